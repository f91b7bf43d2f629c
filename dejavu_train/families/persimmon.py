"""Persimmon: squared ReLU, LayerNorm, one map for q, k and v, norms of q and k before a partial rotation."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dejavu_train.families.base import BlockParts, layer_tensors, map_shapes
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
    norm = Norm.LAYER_NORM
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

    def stored_tensors(self, values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dims = self.dims(values, "this model")
        d, e = dims.d_model, (dims.head_dim,)
        made: dict[str, tuple[int, ...]] = {self.embedding: (dims.vocab_size, d)}
        norms = {"final_layernorm": (d,)}
        layers = [f"layers.{i}." for i in range(dims.n_layers)]
        made |= layer_tensors(layers, map_shapes(dims, self.matrices))
        for layer in layers:
            norms |= {f"{layer}input_layernorm": (d,), f"{layer}post_attention_layernorm": (d,)}
            if dims.qk_norm != QkNorm.NONE:
                norms |= {f"{layer}self_attn.q_layernorm": e, f"{layer}self_attn.k_layernorm": e}
        made |= {f"{name}.{part}": size for name, size in norms.items() for part in ("weight", "bias")}
        if not dims.tied:
            made["lm_head.weight"] = (dims.vocab_size, d)
        return made

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

    def final_norm(self, model: Any) -> Any:
        return model.model.final_layernorm
