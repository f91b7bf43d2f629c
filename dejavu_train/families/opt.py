"""OPT: LayerNorm, learned positions, ReLU. The names of its modules stand here."""

from typing import Any

import torch
from torch import Tensor

from dejavu_train.families.base import BlockParts


class OPTFamily:
    """See :class:`dejavu_train.families.base.Family`."""

    model_types: tuple[str, ...] = ("opt", "dejavu_sparse_opt")

    def blocks(self, model: Any) -> list[BlockParts]:
        return [_block(f"model.decoder.layers.{i}", layer) for i, layer in enumerate(model.model.decoder.layers)]

    def embed(self, model: Any, inputs: Tensor, positions: Tensor) -> Tensor:
        decoder = model.model.decoder
        hidden = inputs if inputs.is_floating_point() else decoder.embed_tokens(inputs)
        # The mask is read where positions are not given: here they are.
        return hidden + decoder.embed_positions(torch.ones_like(positions), 0, position_ids=positions).to(hidden.device)

    def embeddings(self, model: Any) -> list[Any]:
        return [model.model.decoder.embed_tokens, model.model.decoder.embed_positions]

    def final_norm(self, model: Any) -> Any:
        return model.model.decoder.final_layer_norm


def _block(name: str, layer: Any) -> BlockParts:
    # transformers loads this module while it loads its own.
    from transformers.models.opt.modeling_opt import OPTAttention, OPTDecoderLayer

    attention = layer.self_attn
    return BlockParts(
        name=name,
        whole=layer,
        attention=attention,
        norm_attn=layer.self_attn_layer_norm,
        q=attention.q_proj,
        k=attention.k_proj,
        v=attention.v_proj,
        out=attention.out_proj,
        norm_mlp=layer.final_layer_norm,
        up=layer.fc1,
        down=layer.fc2,
        activate=layer.activation_fn,
        kinds=(OPTDecoderLayer, OPTAttention),
        n_heads=attention.num_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
    )
