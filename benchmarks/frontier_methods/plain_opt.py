"""Reads a Hugging Face OPT, runs it as plain functions: what a study needs to edit or to differentiate.

Letters: B batch, T positions, d model width, f ffn width, h heads, e head width, V vocabulary, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Sites = dict[Any, Tensor]


class Edit(Protocol):
    """Changes a forward pass. Both methods return what goes on; ``sites`` holds what earlier places gave."""

    def heads(self, layer: int, sites: Sites, out: Tensor) -> Tensor:
        """``out`` (B, T, h, e): the heads' outputs before the output projection."""
        ...

    def mlp(self, layer: int, sites: Sites, activation: Tensor) -> Tensor:
        """``activation`` (B, T, f): post-ReLU."""
        ...

    def offset(self, layer: int, target: str) -> Tensor | None:
        """(d,) added to the output of the layer's attention or MLP, or None."""
        ...


@dataclass
class Layer:
    """Weights of one block; all fp32."""

    attn_norm: tuple[Tensor, Tensor]
    qkv_weight: Tensor  # (3 d, d)
    qkv_bias: Tensor
    out_weight: Tensor  # (d, d)
    out_bias: Tensor
    mlp_norm: tuple[Tensor, Tensor]
    fc1_weight: Tensor  # (f, d)
    fc1_bias: Tensor
    fc2_weight: Tensor  # (d, f)
    fc2_bias: Tensor
    fc2_norm: Tensor = field(init=False)  # (f), norms of fc2's columns

    def __post_init__(self) -> None:
        self.fc2_norm = torch.linalg.vector_norm(self.fc2_weight, dim=0)


class PlainOPT:
    """A pre-norm OPT as plain tensors.

    Args:
        model: an OPTForCausalLM.
        device: where the weights go.
    """

    def __init__(self, model: Any, device: torch.device | str = "cpu") -> None:
        def get(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, torch.float32)

        def norm(module: Any) -> tuple[Tensor, Tensor]:
            return get(module.weight), get(module.bias)

        decoder = model.model.decoder
        self.config = model.config
        self.device = torch.device(device)
        self.n_heads: int = model.config.num_attention_heads
        self.d: int = model.config.hidden_size
        self.f: int = model.config.ffn_dim
        self.embed = get(decoder.embed_tokens.weight)
        self.positions = get(decoder.embed_positions.weight)[2:]  # OPT stores positions with an offset of 2
        self.final_norm = norm(decoder.final_layer_norm)
        self.head = get(model.lm_head.weight)
        self.layers: list[Layer] = []
        for block in decoder.layers:
            attention = block.self_attn
            parts = [attention.q_proj, attention.k_proj, attention.v_proj]
            self.layers.append(
                Layer(
                    norm(block.self_attn_layer_norm),
                    torch.cat([get(p.weight) for p in parts]),
                    torch.cat([get(p.bias) for p in parts]),
                    get(attention.out_proj.weight),
                    get(attention.out_proj.bias),
                    norm(block.final_layer_norm),
                    get(block.fc1.weight),
                    get(block.fc1.bias),
                    get(block.fc2.weight),
                    get(block.fc2.bias),
                )
            )

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def start(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, d): embedding and position."""
        return self.embed[ids] + self.positions[: ids.shape[1]]

    def normed(self, hidden: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
        return F.layer_norm(hidden, (self.d,), *norm)

    def blocks(
        self,
        hidden: Tensor,
        edit: Edit | None = None,
        first: int = 0,
        sites: Sites | None = None,
        on_input: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Run blocks ``first`` .. end on ``hidden`` (B, T, d).

        ``sites`` collects ("attn_in" | "mlp_in", layer); ``on_input`` is told every block's input.
        """
        sites = {} if sites is None else sites
        batch, length, _ = hidden.shape
        for index in range(first, self.n_layers):
            layer = self.layers[index]
            if on_input is not None:
                on_input(index, hidden)
            x = self.normed(hidden, layer.attn_norm)
            sites["attn_in", index] = x
            qkv = F.linear(x, layer.qkv_weight, layer.qkv_bias).view(batch, length, 3, self.n_heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)  # (B, T, h, e)
            sites["qk", index] = qkv  # a view, for criteria that look at attention itself
            if edit is not None:
                out = edit.heads(index, sites, out)
            hidden = hidden + F.linear(out.flatten(-2), layer.out_weight, layer.out_bias)
            if edit is not None and (shift := edit.offset(index, "heads")) is not None:
                hidden = hidden + shift
            x = self.normed(hidden, layer.mlp_norm)
            sites["mlp_in", index] = x
            activation = F.relu(F.linear(x, layer.fc1_weight, layer.fc1_bias))
            if edit is not None:
                activation = edit.mlp(index, sites, activation)
            hidden = hidden + F.linear(activation, layer.fc2_weight, layer.fc2_bias)
            if edit is not None and (shift := edit.offset(index, "mlp")) is not None:
                hidden = hidden + shift
        return self.normed(hidden, self.final_norm)

    def logits(self, final: Tensor) -> Tensor:
        return F.linear(final, self.head)


def scored_log_probabilities(model: PlainOPT, final: Tensor, rows: Tensor) -> Tensor:
    """(N, V) log-probabilities at the (B, T) bool positions ``rows``."""
    return F.log_softmax(model.logits(final[rows]), dim=-1)
