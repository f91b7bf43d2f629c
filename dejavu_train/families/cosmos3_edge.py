"""Text tower of Cosmos 3 Edge: squared ReLU without a gate, RMSNorm, shared K/V heads, rotary positions of three axes.

Of a text all three axes are equal, so a whole head turns as in Llama. transformers has this tower without an LM head,
which ``published_classes.py`` adds. Pictures are not read.
"""

from collections.abc import Mapping
from typing import Any

from dejavu_train.families.dims import Activation, ModelDims
from dejavu_train.families.standard import StandardFamily
from dejavu_train.ground.errors import UserError


class Cosmos3EdgeFamily(StandardFamily):
    classes = {"cosmos3_edge_text": "Cosmos3EdgeText"}
    coded_as = "cosmos3_edge"
    least_transformers = "5.15"
    activations = {"relu2": Activation.RELU2, "relu": Activation.RELU}
    defaults = {"hidden_act": "relu2", "num_key_value_heads": 8, "head_dim": 128}
    turns_part = False
    maps = ("fc1", "fc2", "activation_fn")
    steady = ("default",)

    def dims(self, values: Mapping[str, Any], name: str) -> ModelDims:
        made = super().dims(values, name)
        rope = values.get("rope_parameters") or {"mrope_section": [24, 20, 20]}  # as transformers has it
        axes = rope.get("mrope_section")
        if not isinstance(axes, list) or len(axes) != 3 or sum(axes) != made.head_dim // 2:
            raise UserError(
                f"mrope_section of {name} must be three numbers that sum to {made.head_dim // 2}, half of head_dim,"
                f" got {axes}; give the config that belongs to the weights"
            )
        return made
