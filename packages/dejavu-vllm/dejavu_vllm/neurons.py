"""Reads from a model's configuration which of its maps belong to neurons, and whether these are ever silent."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dejavu_train.families import dims_of
from dejavu_train.families.dims import SILENT, Activation
from dejavu_train.ground.errors import UserError

INTO = ("fc1", "up_proj", "gate_proj", "dense_h_to_4h")
"""Last names of maps into neurons in vLLM, besides merged ones."""
MERGED = re.compile(r"gate_up_proj|merged_proj_\d+_gate_proj_\d+_up_proj")
"""Those of gates and their other maps in one matrix. vLLM makes the second name where transformers computes a model."""
OUT_OF = ("fc2", "down_proj", "dense_4h_to_h")
_KEYS = ("hidden_act", "mlp_hidden_act", "activation_function", "hidden_activation")


@dataclass(frozen=True)
class Neurons:
    """What a model's MLPs compute.

    Attributes:
        activation: its name. silent: it gives zeros.
        threshold: a gate is silent up to it.
    """

    activation: str
    silent: bool
    threshold: float = 0.0


def neurons_of(values: Mapping[str, Any]) -> Neurons:
    """The neurons of a model, from the values of its config.json. One of no known family goes by its activation."""
    try:
        dims = dims_of(values)
        return Neurons(dims.activation, dims.activation in SILENT, dims.threshold)
    except UserError:
        name = next((str(values[key]) for key in _KEYS if values.get(key)), "unknown")
        # The threshold of an unknown family's FATReLU is not known either.
        return Neurons(name, name in (Activation.RELU, Activation.RELU2, Activation.DRELU))
