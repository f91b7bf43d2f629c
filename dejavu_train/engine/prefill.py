"""The dense prompt phase of a GPU: chunks of few sizes, K/V written into the engine's static caches.

    prompt of 600 tokens    0 .. 255 | 256 .. 511 | 512 .. 599, as 128 rows of which 88 are real

Products are those of torch. Attention of a chunk is a kernel, whose row, position and length lie on the device. So each
size is one graph. Matrices of 4 bits are written out in the model's dtype one after another, each into the memory of
the one before. A prompt is never run beside another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dejavu_train.engine.ops import StepOps
from dejavu_train.engine.ranks.joins import Join
from dejavu_train.engine.weights import DecodeWeights, LayerWeights
from dejavu_train.families.block import forward_block
from dejavu_train.kernels.common.activation import activation_reference
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.positions import Rotary, turned_reference
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import Linear, Matrix
from dejavu_train.kernels.stages.hidden import kept_unit
from dejavu_train.kernels.verify.attend_slots import SLOTS

HEAD_ROWS = 4096  # of the LM head at once
SIZES = (16, 64, 128, 256, 512, 1024)  # rows of a chunk
MOST, MOST_PACKED = 256, 1024  # rows of a whole chunk: each unpacks 4-bit weights once more
SLOTTED = 32  # tokens that take no longer in passes of eight slots than with all weights unpacked
ONE_GPU = Join()


@dataclass(frozen=True)
class Chunk:
    """Positions ``first`` to ``first + count`` - 1 of a prompt, computed as ``size`` rows of every product."""

    first: int
    count: int
    size: int


def chunks_of(count: int, most: int, slots: bool = False) -> list[Chunk]:
    """The chunks of a prompt of ``count`` tokens. They follow from the tokens' positions alone.

    Whole chunks of ``most`` tokens come first. The rest is one chunk of the smallest size that holds it.

    Args:
        slots: a rest of at most SLOTTED tokens runs in passes of eight slots, which read weights of 4 bits as they are.

    >>> chunks_of(300, 256)
    [Chunk(first=0, count=256, size=256), Chunk(first=256, count=44, size=64)]
    """
    found = [Chunk(first, most, most) for first in range(0, count - most + 1, most)]
    first = len(found) * most
    if slots and count - first <= SLOTTED:
        found += [Chunk(at, min(SLOTS, count - at), SLOTS) for at in range(first, count, SLOTS)]
    elif first < count:
        found.append(Chunk(first, count - first, next(size for size in SIZES if size >= count - first)))
    return found


def run_chunk(
    weights: DecodeWeights,
    ops: StepOps,
    ids: Tensor,
    chunk: Tensor,
    size: int,
    caches: Sequence[KvCache],
    join: Join = ONE_GPU,
) -> Tensor:
    """Run a chunk of one row's prompt densely. Earlier positions of the row are in its caches.

    Args:
        ids: (capacity,) int32, the row's tokens. chunk: (3,) int32, the row, the first position, and how many tokens.
        size: of the chunk. What stands behind its real tokens changes nothing of them.
        caches: per layer. K and V of the real tokens are written.
    Returns:
        (size, d) fp32, the residual stream behind the last layer.
    """
    at = (chunk[1] + torch.arange(size, device=ids.device)).clamp(max=len(ids) - 1)  # what is no token has no place

    def attend(cache: KvCache, _attn_in: Tensor, *heads: Tensor) -> Tensor:
        q, k, v = (each[0].transpose(0, 1).contiguous() for each in heads)
        out = torch.empty_like(q)
        ops.attend_chunk(q, k, v, cache, chunk, out)
        return out.transpose(0, 1)[None]

    positions = at[None]
    x = embedded(weights, ids[at][None], positions)
    for layer, cache in zip(weights.layers, caches, strict=True):
        x = forward_block(dense_block(weights, layer, ops, join), x, partial(attend, cache), positions)[0]
    return x[0]


def logits_of(weights: DecodeWeights, x: Tensor) -> Tensor:
    """The logits (n, V) fp32 of the residual stream x (n, d) behind the last layer. Products are fp32 as in kernels."""
    dtype, head = weights.embedding.dtype, weights.lm_head
    n = (x if weights.final_norm is None else layer_norm_reference(x, weights.final_norm, dtype)).to(dtype).float()
    logits = torch.empty(len(x), weights.shape.vocab_size, dtype=torch.float32, device=x.device)
    for first in range(0, logits.shape[1], HEAD_ROWS):
        part = slice(first, first + HEAD_ROWS)
        logits[:, part] = F.linear(n, type(head)(*(each[part] for each in head.parts())).dense())
    if cap := weights.shape.logit_cap:
        logits.div_(cap).tanh_().mul_(cap)
    return logits


def embedded(weights: DecodeWeights, ids: Tensor, positions: Tensor) -> Tensor:
    """(..., d) fp32, what the first layer reads, of tokens ids (...) at positions (...)."""
    x = weights.embedding[ids].float()
    if weights.positions is not None:
        x = x + weights.positions[positions].float()
    return x if weights.embedding_norm is None else layer_norm_reference(x, weights.embedding_norm)


def dense_block(weights: DecodeWeights, layer: LayerWeights, ops: StepOps, join: Join = ONE_GPU) -> Any:
    """A layer as `forward_block` reads it. Residual sums are fp32, products in the weights' dtype.

    Squares of 256 and more are no fp16 numbers: hidden values are stored times `kept_unit`.
    """
    dims, dtype = weights.shape, weights.embedding.dtype
    share, unit = dims.kv_group, kept_unit(layer.mlp, dtype)
    turns = weights.placed if isinstance(weights.placed, Rotary) else None
    normed = torch.float32 if dims.post_norm else dtype  # the residual stream itself, or what products read

    def numbers(weight: Matrix, beside: bool = False) -> Tensor:
        """(n, d) of a weight with any leading dimensions."""
        if weight.format is Format.INT4:
            return ops.unpack(weight, dtype, beside)
        return weight.numbers.flatten(0, -2)

    def norm(ln: LayerNormWeights, x: Tensor) -> Tensor:
        out = torch.empty_like(x, dtype=normed)
        ops.layer_norm(x.flatten(0, -2), ln, out.flatten(0, -2))
        return out

    def compared(x: Tensor, norm: LayerNormWeights | None, positions: Tensor) -> Tensor:
        """Queries or keys (B, h, T, e), in fp32 where they are turned, as the kernels turn them."""
        if norm is not None:
            x = layer_norm_reference(x, norm, torch.float32)
        if turns is not None:
            x = turned_reference(x.float(), turns, positions[:, None].expand(x.shape[:-1]))
        return x.to(dtype)

    def project(n: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        n, qkv = n.to(dtype), numbers(layer.qkv.weight)
        # (B, g, r + 2, T, e)
        rows = F.linear(n, qkv, layer.qkv.bias.flatten()).unflatten(-1, layer.qkv.bias.shape).movedim(-4, -2)
        q, k, v = rows[:, :, :share].flatten(1, 2), rows[:, :, share], rows[:, :, share + 1]
        norms = (None, None) if layer.head_norms is None else (layer.head_norms.q, layer.head_norms.k)
        return compared(q, norms[0], positions), compared(k, norms[1], positions), v

    def values(linear: Linear, n: Tensor, activation: str, scale: float = 1.0) -> Tensor:
        x = F.linear(n.to(dtype), numbers(linear.weight), linear.bias)
        if activation == "relu" and not layer.hidden.threshold:
            return x.relu_()
        return (activation_reference(x.float(), activation, layer.hidden.threshold) * scale).to(dtype)

    def neurons(n: Tensor) -> Tensor:
        form = layer.hidden
        if layer.gate is None:
            return values(layer.up, n, form.activation, unit)
        gate, up = (
            values(layer.gate, n, form.activation, unit),
            values(layer.up, n, form.activation if form.both else "none"),
        )
        return gate.mul_(up)

    def down(neurons: Tensor) -> Tensor:
        down = numbers(layer.down.weight)
        product = neurons @ down if layer.down_transposed else F.linear(neurons, down)
        return join.total(product.float() / unit + layer.down.bias.float())

    def out(mixed: Tensor) -> Tensor:
        product = F.linear(mixed, numbers(layer.out.weight, beside=layer.packed))
        return join.total(product.float() + layer.out.bias.float())

    return SimpleNamespace(
        post_norm=dims.post_norm,
        norm_attn=partial(norm, layer.behind[0] or layer.norm1),
        project=project,
        scaling=1.0,  # by `scaled_dot_product_attention`
        out=out,
        norm_mlp=partial(norm, layer.behind[1] or layer.norm2),
        neurons=neurons,
        down=down,
    )
