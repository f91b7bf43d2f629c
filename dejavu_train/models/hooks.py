"""Reads the hidden states of a Hugging Face model by hooks, writes nothing: one dict of tensors per layer and forward.

The places are named as in the bundle. ``attn_in`` is after the LayerNorm before attention, ``mlp_in`` after the
LayerNorm before the MLP. ``activation`` is what neurons give, ``head_out`` each head's output before the output
projection. The residual stream before attention is ``residual``, before the MLP ``middle``. What the two add to it is
``attn_out`` and ``mlp_out``. Hooks on the modules themselves, not a copy of the forward pass, so that any attention
implementation, dtype or ``device_map`` of transformers works. A layer's tensors are handed over when that layer ends,
so nothing of an earlier layer needs to stay in memory.

Letters: B batch, T positions, d model width, f ffn width, h heads, e head width.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dejavu_train.families import BlockParts, blocks_of

_PARTS = {  # by name which part of a layer, and whether what it reads or what it gives
    "residual": ("norm_attn", "input"),
    "attn_in": ("norm_attn", "output"),
    "head_out": ("out", "input"),
    "attn_out": ("out", "output"),
    "middle": ("norm_mlp", "input"),
    "mlp_in": ("norm_mlp", "output"),
    "activation": ("down", "input"),
    "mlp_out": ("down", "output"),
    "layer_in": ("whole", "input"),
    "layer_out": ("whole", "output"),
}
_POST_NORM = {  # where these places are when norms stand behind what a half adds
    "residual": ("whole", "input"),
    "attn_in": ("whole", "input"),
    "middle": ("norm_attn", "output"),
    "mlp_in": ("norm_attn", "output"),
}
PLACES = tuple(place for place, (part, _) in _PARTS.items() if part != "whole")
Act = Callable[[Any], Tensor | None]
"""``act(values)``: is shown what stands at a place; what it returns, if that is no None, takes the place."""
OnLayer = Callable[[int, dict[str, Tensor]], None]
Hook = Callable[..., Any]


def at_place(block: BlockParts, place: str, act: Act, wrap: Callable[[Hook], Hook] = lambda hook: hook) -> Any:
    """The handle of a new hook at one of ``PLACES`` of a layer, or at its ``layer_in`` or ``layer_out``.

    The shape is what the model gives the module: leading dimensions may be (B, T) or (B * T).
    ``wrap`` makes of the hook what is registered.
    """
    part, side = {**_PARTS, **(_POST_NORM if block.post_norm else {})}[place]
    return at_module(getattr(block, part), side, act, wrap)


def at_module(module: nn.Module, side: str, act: Act, wrap: Callable[[Hook], Hook] = lambda hook: hook) -> Any:
    """The same at the ``input`` or ``output`` of any module."""

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        made = act(args[0])
        return None if made is None else (made, *args[1:])

    def after(_module: nn.Module, _args: Any, output: Any) -> Tensor | None:
        return act(output)

    if side == "input":
        return module.register_forward_pre_hook(wrap(before))
    return module.register_forward_hook(wrap(after))


def has_place(block: BlockParts, place: str) -> bool:
    """True where a layer has the half in which one of ``PLACES`` lies."""
    return getattr(block, _PARTS[place][0]) is not None


def first_place(block: BlockParts) -> str:
    """Place of a layer where its input (B, T, d) passes."""
    return next((place for place in ("residual", "middle") if has_place(block, place)), "layer_in")


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    """Remove the hooks of ``handles`` at the end of the context."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def decoder_layers(model: Any) -> Any:
    """The decoder layers of a model as its family has them, in order."""
    return [block.whole for block in blocks_of(model)]


@contextmanager
def record(
    model: nn.Module, places: Iterable[str], layers: Iterable[int] | None = None, on_layer: OnLayer | None = None
) -> Iterator[dict[int, dict[str, Tensor]]]:
    """Within the context every forward pass of ``model`` hands over those of ``places`` that each of ``layers`` has.

    Args:
        model: of a registered family.
        places: some of ``PLACES``.
        layers: layer numbers. None means all that have a target.
        on_layer: called as ``on_layer(layer, tensors)`` when a layer has ended. Without it the tensors of the latest
            forward pass are kept in the dict that the context yields, by layer.

    The tensors are detached, in the model's dtype and on the layer's device. ``activation`` is (B, T, f). ``head_out``
    is (B, T, g, h / g * e), by groups that share K and V. All others are (B, T, d). Padding is recorded like everything
    else: the caller knows it.
    """
    recorded = set(places)
    assert recorded <= set(PLACES), f"unknown places {sorted(recorded - set(PLACES))}; known are {PLACES}"
    kept: dict[int, dict[str, Tensor]] = {}
    blocks = blocks_of(model)
    chosen = [layer for layer, block in enumerate(blocks) if block.targets and (layers is None or layer in set(layers))]
    handles = []
    for layer in chosen:
        handles += _record_layer(layer, blocks[layer], recorded, on_layer or kept.__setitem__)
    with hooked(handles):
        yield kept


def _record_layer(layer: int, block: BlockParts, recorded: set[str], hand_over: OnLayer) -> list[Any]:
    """Hooks on one decoder block. Returns their handles."""
    got: dict[str, Tensor] = {}
    places = [place for place in PLACES if place in recorded and has_place(block, place)]

    def begin(hidden: Tensor) -> None:
        got.clear()
        got["layer_in"] = hidden.detach()

    def keep(place: str, values: Tensor) -> None:
        rows = got["layer_in"].shape[:2]  # the MLP half of a block may see (B * T, d)
        groups = (block.n_groups,) if place == "head_out" else ()
        got[place] = values.detach().view(*rows, *groups, -1)

    def end(_output: Any) -> None:
        hand_over(layer, {place: got[place] for place in places})
        got.clear()

    begins = at_place(block, first_place(block), begin)  # before the others, one of which may stand at the same place
    handles = [at_place(block, place, partial(keep, place)) for place in places]
    return [begins, *handles, at_place(block, "layer_out", end)]


def neuron_contribution(activation: Tensor, down_weight: Tensor) -> Tensor:
    """Contribution of each neuron: |activation| x the norm of its column of the map out of the MLP.

    Args:
        activation: (..., f), what the neurons give.
        down_weight: (d, f), as stored.
    Returns: (..., f) in fp32, never negative.
    """
    return activation.float().abs() * torch.linalg.vector_norm(down_weight.float(), dim=0)


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
    """Contribution of each head: the norm of its output through its slice of the output projection.

    Computed as sqrt(o' G o) with the slice's Gram matrix G, e/d of the work of projecting first.

    Args:
        head_out: (..., h, e).
        out_weight: (d, h * e), as stored.
        gram: ``output_gram`` of it, when the caller keeps that for many calls.
        mean: (h, e), what stands in for a skipped head. Then a head contributes its distance from that.
    Returns: (..., h) in fp32, never negative.
    """
    if gram is None:
        gram = output_gram(out_weight, head_out.shape[-2])
    outputs = head_out.float() if mean is None else head_out.float() - mean.to(head_out.device)
    flat = outputs.flatten(0, -3).transpose(0, 1)  # (h, N, e)
    squares = ((flat @ gram) * flat).sum(-1)  # (h, N)
    return squares.clamp_min(0).sqrt().transpose(0, 1).reshape(head_out.shape[:-1])
