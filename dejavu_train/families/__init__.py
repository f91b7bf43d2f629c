"""Layers, family by family: which modules they have, what they compute, and what may read their weights.

The environment's ``DEJAVU_FAMILIES`` names modules with further families, which every process imports, a worker too.
"""

import importlib
import os

from dejavu_train.families.arcee import ArceeFamily
from dejavu_train.families.base import BlockParts, Family, blocks_of, dims_of, family_of, register
from dejavu_train.families.bloom import BloomFamily
from dejavu_train.families.cosmos3_edge import Cosmos3EdgeFamily
from dejavu_train.families.dims import TARGETS, LayerInput, ModelDims, Site, Target, UnitKey
from dejavu_train.families.jais2 import Jais2Family
from dejavu_train.families.llama import LlamaFamily, MistralFamily
from dejavu_train.families.nanochat import NanoChatFamily
from dejavu_train.families.nemotron import NemotronFamily
from dejavu_train.families.nemotron_h import NemotronHFamily
from dejavu_train.families.opt import OPTFamily
from dejavu_train.families.persimmon import PersimmonFamily
from dejavu_train.families.published import FAMILIES as PUBLISHED
from dejavu_train.ground.errors import UserError

_FAMILIES: tuple[Family, ...] = (
    OPTFamily(), LlamaFamily(), MistralFamily(), ArceeFamily(), NemotronFamily(), Jais2Family(), PersimmonFamily(),
    NanoChatFamily(), BloomFamily(), NemotronHFamily(), Cosmos3EdgeFamily(), *PUBLISHED,
)  # fmt: skip
for _family in _FAMILIES:
    register(_family)
for _module in filter(None, os.environ.get("DEJAVU_FAMILIES", "").split(",")):
    try:
        importlib.import_module(_module)
    except (ImportError, SyntaxError) as error:
        raise UserError(
            f"DEJAVU_FAMILIES names {_module}, which cannot be imported: {error}; name modules of files beside"
            " train.py or in a folder of PYTHONPATH, with commas between them"
        ) from None

__all__ = [
    "TARGETS",
    "BlockParts",
    "Family",
    "LayerInput",
    "ModelDims",
    "Site",
    "Target",
    "UnitKey",
    "blocks_of",
    "dims_of",
    "family_of",
    "register",
]
