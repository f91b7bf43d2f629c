"""What a layer is, family by family: which modules it has, what it computes, and what may read their weights."""

from dejavu_train.families.base import BlockParts, Family, blocks_of, family_of, register
from dejavu_train.families.opt import OPTFamily

register(OPTFamily())

__all__ = ["BlockParts", "Family", "blocks_of", "family_of", "register"]
