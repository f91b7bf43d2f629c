"""BLOOM: LayerNorm, ALiBi, GELU, one map for q, k and v, a norm behind the embedding."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dejavu_train.families.base import BlockParts, decoder_tensors
from dejavu_train.families.dims import Activation, ModelDims, Positions
from dejavu_train.families.standard import whole_number
from dejavu_train.ground.errors import UserError

if TYPE_CHECKING:  # torch is not loaded to check the keys of a run
    from torch import Tensor

POSITIONS = 2048  # of a config.json without seq_length; ALiBi itself has no end
# Two names of a size: released files have the second, which counts where both are there.
_NAMES = {"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}


class BloomFamily:
    """See :class:`dejavu_train.families.base.Family`."""

    model_types: tuple[str, ...] = ("bloom",)
    least_transformers = "4.20"
    around = "transformer"
    embedding = "word_embeddings.weight"
    matrices: Mapping[str, str] = {
        **dict.fromkeys("qkv", "self_attention.query_key_value"), "out": "self_attention.dense",
        "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
    }  # fmt: skip
    structure: tuple[str, ...] = (
        *_NAMES, *_NAMES.values(), "vocab_size", "seq_length", "layer_norm_epsilon",
        "apply_residual_connection_post_layernorm", "slow_but_exact", "pretraining_tp",
    )  # fmt: skip

    def dims(self, values: Mapping[str, Any], name: str) -> ModelDims:
        given = {**values, **{key: values[other] for key, other in _NAMES.items() if other in values}}
        if given.get("apply_residual_connection_post_layernorm"):
            raise UserError(
                f"{name} adds to the output of its norms (apply_residual_connection_post_layernorm), which is not run"
                " here; no released BLOOM does"
            )
        if given.get("slow_but_exact") and given.get("pretraining_tp", 1) > 1:
            raise UserError(f"{name} sums slices of its matrices (slow_but_exact); set slow_but_exact to false")
        d, heads = whole_number(given, "hidden_size", name), whole_number(given, "n_head", name)
        if d % heads:
            raise UserError(f"{name} has the hidden_size {d}, which its {heads} heads do not divide")
        return ModelDims(
            d_model=d,
            d_ffn=4 * d,
            n_layers=whole_number(given, "n_layer", name),
            n_heads=heads,
            vocab_size=whole_number(given, "vocab_size", name),
            max_positions=whole_number({"seq_length": POSITIONS, **given}, "seq_length", name),
            positions=Positions.ALIBI,
            activation=Activation.GELU_TANH,
            embedding_norm=True,
            tied=bool(given.get("tie_word_embeddings", True)),
        )

    def stored_tensors(self, values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dims = self.dims(values, "this model")
        around, of_layer = ("word_embeddings_layernorm", "ln_f"), ("input_layernorm", "post_attention_layernorm")
        return decoder_tensors(dims, self, "h.", *(dict.fromkeys(each, dims.d_model) for each in (around, of_layer)))

    def blocks(self, model: Any) -> list[BlockParts]:
        from transformers.models.bloom.modeling_bloom import BloomAttention, BloomBlock

        from dejavu_train.families.block import alibi_slopes
        from dejavu_train.families.fused import fused_parts

        slopes = alibi_slopes(model.config.n_head)

        def parts(name: str, layer: Any) -> BlockParts:
            attention = layer.self_attention
            return fused_parts(
                name,
                layer,
                attention,
                activate=layer.mlp.gelu_impl,
                kinds=(BloomBlock, BloomAttention),
                scaling=attention.inv_norm_factor,
                slopes=slopes,
            )

        return [parts(f"transformer.h.{i}", layer) for i, layer in enumerate(model.transformer.h)]

    def embed(self, model: Any, inputs: "Tensor", positions: "Tensor") -> "Tensor":
        transformer = model.transformer
        embedded = inputs if inputs.is_floating_point() else transformer.word_embeddings(inputs)
        normed: Tensor = transformer.word_embeddings_layernorm(embedded)
        return normed

    def embeddings(self, model: Any) -> list[Any]:
        return [model.transformer.word_embeddings, model.transformer.word_embeddings_layernorm]

    def final_norm(self, model: Any) -> Any:
        return model.transformer.ln_f
