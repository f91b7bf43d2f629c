"""Arcee: squared ReLU without a gate, RMSNorm, rotary positions, shared K/V heads. AFM-4.5B is one."""

from typing import Any

from dejavu_train.families.base import BlockParts
from dejavu_train.families.dims import Activation
from dejavu_train.families.squared import with_wide_squares
from dejavu_train.families.standard import StandardFamily


class ArceeFamily(StandardFamily):
    classes = {"arcee": "Arcee"}
    least_transformers = "4.53"
    activations = {"relu2": Activation.RELU2, "relu": Activation.RELU}
    defaults = {"hidden_act": "relu2"}

    def blocks(self, model: Any) -> list[BlockParts]:
        return with_wide_squares(super().blocks(model))
