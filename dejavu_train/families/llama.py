"""Llama and Mistral with a ReLU in their gates: ReLUfied models, FATReLU's threshold, dReLU.

A config.json says which by ``hidden_act``:

- ``relu``: the gate's ReLU. SparseLM and ReLULlama have it.
- ``fatrelu``: the gate where it lies above ``hidden_act_param``, else zero. ProSparse has it.
- ``drelu``: ReLU of the gate and of the other map. TurboSparse and Bamboo have it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dejavu_train.families.base import BlockParts
from dejavu_train.families.dims import Activation
from dejavu_train.families.standard import StandardFamily

FATRELU, THRESHOLD = "fatrelu", 0.01  # of a config.json without hidden_act_param


class LlamaFamily(StandardFamily):
    """Llama.

    Attributes:
        computes: the activation of its code where that reads no ``hidden_act``. "": it does.
        extra: patterns of names of stored tensors that no module reads.
    """

    classes = {"llama": "Llama"}
    least_transformers = "4.34"
    activations = {
        "relu": Activation.RELU, FATRELU: Activation.FATRELU, "drelu": Activation.DRELU,
    }  # fmt: skip
    defaults = {"hidden_act": "silu"}
    gated = True
    turns_part = False
    computes = ""
    extra: tuple[str, ...] = ()

    @property
    def structure(self) -> tuple[str, ...]:
        return (*super().structure, "hidden_act_param")

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        given = super().given(values)
        return {**given, "hidden_act": self.computes or given["hidden_act"]}

    def threshold(self, given: Mapping[str, Any]) -> float:
        param = given.get("hidden_act_param")
        return (THRESHOLD if param is None else float(param)) if given["hidden_act"] == FATRELU else 0.0

    def blocks(self, model: Any) -> list[BlockParts]:
        activates_up = self.given(model.config.to_dict())["hidden_act"] == "drelu"
        return [replace(block, activates_up=activates_up) for block in super().blocks(model)]


class MistralFamily(LlamaFamily):
    """Mistral, whose config.json may leave out what is not as in Llama."""

    classes = {"mistral": "Mistral"}
    defaults = {**LlamaFamily.defaults, "num_key_value_heads": 8, "sliding_window": 4096}
