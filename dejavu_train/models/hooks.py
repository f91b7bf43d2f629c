"""Reads the hidden states of a Hugging Face model by hooks, writes nothing: one dict of tensors per layer and forward.

The places are named as in the bundle: ``attn_in`` (after the LayerNorm before attention), ``mlp_in`` (after the
LayerNorm before the MLP), ``activation`` (what its neurons give), ``head_out`` (each head's output before the output
projection); the residual stream before attention is ``residual``, before the MLP ``middle``, and what the two add to
it is ``attn_out`` and ``mlp_out``. Hooks on the modules themselves, not a copy of the forward pass, so that any
attention implementation, dtype or ``device_map`` of transformers works. A layer's tensors are handed over when that
layer ends, so nothing of an earlier layer needs to stay in memory.

Letters: B batch, T positions, d model width, f ffn width, h heads, e head width.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dejavu_train.families import BlockParts, blocks_of

PLACES = ("attn_in", "mlp_in", "activation", "head_out", "residual", "attn_out", "middle", "mlp_out")
OnLayer = Callable[[int, dict[str, Tensor]], None]


def decoder_layers(model: Any) -> Any:
    """The decoder layers of a model as its family has them, in order."""
    return [block.whole for block in blocks_of(model)]


@contextmanager
def record(
    model: nn.Module, places: Iterable[str], layers: Iterable[int] | None = None, on_layer: OnLayer | None = None
) -> Iterator[dict[int, dict[str, Tensor]]]:
    """Within the context every forward pass of ``model`` hands over ``places`` of ``layers``.

    Args:
        model: of a registered family.
        places: some of ``PLACES``.
        layers: layer numbers; None means all.
        on_layer: called as ``on_layer(layer, tensors)`` when a layer has ended. Without it the tensors of the latest
            forward pass are kept in the dict that the context yields, by layer.

    The tensors, detached, in the model's dtype and on the layer's device: ``activation`` (B, T, f), ``head_out``
    (B, T, h, e), all others (B, T, d). Padding is recorded like everything else: the caller knows it.
    """
    recorded = set(places)
    assert recorded <= set(PLACES), f"unknown places {sorted(recorded - set(PLACES))}; known are {PLACES}"
    kept: dict[int, dict[str, Tensor]] = {}
    blocks = blocks_of(model)
    chosen = range(len(blocks)) if layers is None else sorted(set(layers))
    handles = []
    for layer in chosen:
        handles += _hook_layer(layer, blocks[layer], recorded, on_layer or kept.__setitem__)
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _hook_layer(layer: int, block: BlockParts, recorded: set[str], hand_over: OnLayer) -> list[Any]:
    """Hooks on one decoder block; returns their handles."""
    got: dict[str, Tensor] = {}
    rows: list[tuple[int, int]] = [(0, 0)]  # (B, T): the MLP half of a block sees (B*T, d)
    n_heads = block.n_heads

    def after_attn_norm(_module: nn.Module, args: Any, output: Tensor) -> None:
        got.clear()
        rows[0] = (output.shape[0], output.shape[1])
        if "residual" in recorded:
            got["residual"] = args[0].detach()
        if "attn_in" in recorded:
            got["attn_in"] = output.detach()

    def before_out(_module: nn.Module, args: Any) -> None:
        got["head_out"] = args[0].detach().unflatten(-1, (n_heads, -1))

    def after_out(_module: nn.Module, _args: Any, output: Tensor) -> None:
        got["attn_out"] = output.detach()

    def after_mlp_norm(_module: nn.Module, args: Any, output: Tensor) -> None:
        for name, values in (("middle", args[0]), ("mlp_in", output)):
            if name in recorded:
                got[name] = values.detach().view(*rows[0], -1)

    def before_down(_module: nn.Module, args: Any) -> None:
        got["activation"] = args[0].detach().view(*rows[0], -1)

    def after_down(_module: nn.Module, _args: Any, output: Tensor) -> None:
        got["mlp_out"] = output.detach().view(*rows[0], -1)

    def after_block(_module: nn.Module, _args: Any, _output: Any) -> None:
        hand_over(layer, dict(got))
        got.clear()

    handles = [block.norm_attn.register_forward_hook(after_attn_norm)]
    if "head_out" in recorded:
        handles.append(block.out.register_forward_pre_hook(before_out))
    if "attn_out" in recorded:
        handles.append(block.out.register_forward_hook(after_out))
    if recorded & {"mlp_in", "middle"}:
        handles.append(block.norm_mlp.register_forward_hook(after_mlp_norm))
    if "activation" in recorded:
        handles.append(block.down.register_forward_pre_hook(before_down))
    if "mlp_out" in recorded:
        handles.append(block.down.register_forward_hook(after_down))
    handles.append(block.whole.register_forward_hook(after_block))
    return handles


def neuron_contribution(activation: Tensor, down_weight: Tensor) -> Tensor:
    """What each neuron adds to the residual stream: activation x the norm of its column of the map out of the MLP.

    Args:
        activation: (..., f), post-ReLU.
        down_weight: (d, f), as stored.
    Returns: (..., f) in fp32, never negative.
    """
    return activation.float() * torch.linalg.vector_norm(down_weight.float(), dim=0)


def output_gram(out_weight: Tensor, n_heads: int) -> Tensor:
    """Per head the Gram matrix of its slice of the output projection, for ``head_contribution``.

    Args:
        out_weight: (d, h * e), as stored.
    Returns: (h, e, e) fp32.
    """
    slices = out_weight.float().unflatten(1, (n_heads, -1)).transpose(0, 1)  # (h, d, e)
    return slices.transpose(1, 2) @ slices


def head_contribution(
    head_out: Tensor, out_weight: Tensor, gram: Tensor | None = None, mean: Tensor | None = None
) -> Tensor:
    """What each head adds to the residual stream: the norm of its output through its slice of the output projection.

    Computed as sqrt(o' G o) with the slice's Gram matrix G, e/d of the work of projecting first.

    Args:
        head_out: (..., h, e).
        out_weight: (d, h * e), as stored.
        gram: ``output_gram`` of it, when the caller keeps that for many calls.
        mean: (h, e), what stands in for a skipped head; then a head contributes its distance from that.
    Returns: (..., h) in fp32, never negative.
    """
    if gram is None:
        gram = output_gram(out_weight, head_out.shape[-2])
    outputs = head_out.float() if mean is None else head_out.float() - mean.to(head_out.device)
    flat = outputs.flatten(0, -3).transpose(0, 1)  # (h, N, e)
    squares = ((flat @ gram) * flat).sum(-1)  # (h, N)
    return squares.clamp_min(0).sqrt().transpose(0, 1).reshape(head_out.shape[:-1])
