"""What a layer is, family by family: which modules it has, what it computes, and what may read their weights."""

from dejavu_train.families.base import BlockParts, Family, blocks_of, dims_of, family_of, register
from dejavu_train.families.dims import TARGETS, ModelDims, Target, UnitKey
from dejavu_train.families.opt import OPTFamily

register(OPTFamily())

__all__ = [
    "TARGETS",
    "BlockParts",
    "Family",
    "ModelDims",
    "Target",
    "UnitKey",
    "blocks_of",
    "dims_of",
    "family_of",
    "register",
]
