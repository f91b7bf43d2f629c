"""OPT: LayerNorm, learned positions, ReLU. The names of its modules stand here.

The 350m has norms behind what a half adds, and an embedding of another width. Galactica has GELU and no biases.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dejavu_train.families.base import BlockParts, decoder_tensors, refuse_activation
from dejavu_train.families.dims import Activation, ModelDims
from dejavu_train.families.standard import whole_number
from dejavu_train.ground.errors import UserError

if TYPE_CHECKING:  # torch is not loaded to check the keys of a run
    from torch import Tensor

OPT, ARCHITECTURE = "opt", "OPTForCausalLM"
POSITIONS_OFFSET = 2  # rows of the position embedding before that of the first position

# What a config.json may leave out, as transformers' OPTConfig fills it in. word_embed_proj_dim: as hidden_size.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072, "max_position_embeddings": 2048,
    "do_layer_norm_before": True, "word_embed_proj_dim": None, "num_attention_heads": 12, "activation_function": "relu",
    "enable_bias": True,
}  # fmt: skip
_ACTIVATIONS = {"relu": Activation.RELU, "gelu": Activation.GELU}

_SIZES = (
    "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"
)  # fmt: skip


class OPTFamily:
    """See :class:`dejavu_train.families.base.Family`."""

    model_types: tuple[str, ...] = (OPT,)
    least_transformers = "4.19"
    around = "model"
    embedding = "decoder.embed_tokens.weight"
    matrices: Mapping[str, str] = {
        **{part: f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")}, "up": "fc1", "down": "fc2",
    }  # fmt: skip
    structure: tuple[str, ...] = (
        *_SIZES, "do_layer_norm_before", "word_embed_proj_dim", "activation_function", "_remove_final_layer_norm",
        "enable_bias", "layer_norm_elementwise_affine",
    )  # fmt: skip

    def dims(self, values: Mapping[str, Any], name: str) -> ModelDims:
        given = {**_DEFAULTS, **values}
        if given["activation_function"] not in _ACTIVATIONS:
            refuse_activation(name, given["activation_function"], _ACTIVATIONS)
        if given["word_embed_proj_dim"] is None:
            given["word_embed_proj_dim"] = given["hidden_size"]
        for key in (*_SIZES, "word_embed_proj_dim"):
            whole_number(given, key, name)
        if given["hidden_size"] % given["num_attention_heads"]:
            raise UserError(
                f"{name} has the hidden_size {given['hidden_size']}, which its {given['num_attention_heads']}"
                " num_attention_heads do not divide; give the config that belongs to the weights"
            )
        return ModelDims(
            d_model=given["hidden_size"],
            d_ffn=given["ffn_dim"],
            n_layers=given["num_hidden_layers"],
            n_heads=given["num_attention_heads"],
            vocab_size=given["vocab_size"],
            max_positions=given["max_position_embeddings"],
            activation=_ACTIVATIONS[given["activation_function"]],
            biases=bool(given["enable_bias"]),
            post_norm=not given["do_layer_norm_before"],
            embedding_dim=given["word_embed_proj_dim"],
            tied=bool(given.get("tie_word_embeddings", True)),
        )

    def stored_tensors(self, values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dims = self.dims(values, "this model")
        d, removed = dims.d_model, values.get("_remove_final_layer_norm") or dims.post_norm
        norms = {} if removed else {"decoder.final_layer_norm": d}
        parts = ("weight", "bias") if values.get("layer_norm_elementwise_affine", True) else ()
        of_layer = dict.fromkeys(("self_attn_layer_norm", "final_layer_norm"), d)
        made = decoder_tensors(dims, self, "decoder.layers.", norms, of_layer, parts)
        made["decoder.embed_positions.weight"] = (dims.max_positions + POSITIONS_OFFSET, d)
        if dims.embedding_dim != d:
            made |= {"decoder.project_in.weight": (d, dims.embedding_dim)}
            made |= {"decoder.project_out.weight": (dims.embedding_dim, d)}
        return made

    def blocks(self, model: Any) -> list[BlockParts]:
        return [block_parts(f"model.decoder.layers.{i}", layer) for i, layer in enumerate(model.model.decoder.layers)]

    def embed(self, model: Any, inputs: "Tensor", positions: "Tensor") -> "Tensor":
        import torch

        decoder = model.model.decoder
        hidden = inputs if inputs.is_floating_point() else decoder.embed_tokens(inputs)
        if decoder.project_in is not None:
            hidden = decoder.project_in(hidden)
        # The mask is read where positions are not given: here they are.
        return hidden + decoder.embed_positions(torch.ones_like(positions), 0, position_ids=positions).to(hidden.device)

    def embeddings(self, model: Any) -> list[Any]:
        decoder = model.model.decoder
        found = [decoder.embed_tokens, decoder.embed_positions, decoder.project_in]
        return [module for module in found if module is not None]

    def final_norm(self, model: Any) -> Any:
        from torch.nn import Sequential

        decoder = model.model.decoder
        found = [module for module in (decoder.final_layer_norm, decoder.project_out) if module is not None]
        return found[0] if len(found) == 1 else Sequential(*found) if found else None


def block_parts(name: str, layer: Any) -> BlockParts:
    """The modules of one of transformers' ``OPTDecoderLayer``."""
    # transformers loads this module while it loads its own.
    from transformers.models.opt.modeling_opt import OPTAttention, OPTDecoderLayer

    attention = layer.self_attn
    return BlockParts(
        name=name,
        whole=layer,
        attention=attention,
        norm_attn=layer.self_attn_layer_norm,
        **{part: getattr(attention, f"{part}_proj") for part in "qkv"},
        out=attention.out_proj,
        norm_mlp=layer.final_layer_norm,
        up=layer.fc1,
        down=layer.fc2,
        activate=layer.activation_fn,
        kinds=(OPTDecoderLayer, OPTAttention),
        n_heads=attention.num_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        post_norm=not layer.do_layer_norm_before,
    )
