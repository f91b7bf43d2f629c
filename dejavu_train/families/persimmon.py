"""Persimmon: squared ReLU, LayerNorm, one map for q, k and v, norms of q and k before a partial rotation."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dejavu_train.families.base import BlockParts
from dejavu_train.families.dims import Activation, ModelDims, Norm, QkNorm
from dejavu_train.families.standard import StandardFamily

if TYPE_CHECKING:  # torch is not loaded to check the keys of a run
    from torch import Tensor


class PersimmonFamily(StandardFamily):
    classes = {"persimmon": "Persimmon"}
    least_transformers = "4.33"
    activations = {"relu2": Activation.RELU2, "relu": Activation.RELU}
    defaults = {
        "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
    }  # fmt: skip
    epsilon = "layer_norm_eps"
    norm, last_norm = Norm.LAYER_NORM, "final_layernorm"
    matrices = {
        **dict.fromkeys("qkv", "self_attn.query_key_value"), "out": "self_attn.dense",
        "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
    }  # fmt: skip

    @property
    def structure(self) -> tuple[str, ...]:
        return (*super().structure, "qk_layernorm")

    def dims(self, values: Mapping[str, Any], name: str) -> ModelDims:
        normed = self.given(values)["qk_layernorm"]
        values = {**values, "num_key_value_heads": None}  # its one map has as many of K and V as of queries
        return replace(super().dims(values, name), qk_norm=QkNorm.BEFORE if normed else QkNorm.NONE)

    def layer_norms(self, dims: ModelDims) -> dict[str, int]:
        of_heads = () if dims.qk_norm == QkNorm.NONE else ("self_attn.q_layernorm", "self_attn.k_layernorm")
        return super().layer_norms(dims) | dict.fromkeys(of_heads, dims.head_dim)

    def block(
        self, name: str, layer: Any, kinds: tuple[type, type], rotate: "Callable[[Tensor, Tensor], Tensor]"
    ) -> BlockParts:
        from dejavu_train.families.fused import fused_parts

        attention = layer.self_attn
        return fused_parts(
            name,
            layer,
            attention,
            activate=layer.mlp.act,
            kinds=kinds,
            scaling=attention.scaling,
            rotate=rotate,
            norm_q=attention.q_layernorm if attention.qk_layernorm else None,
            norm_k=attention.k_layernorm if attention.qk_layernorm else None,
            norms_first=True,
        )
