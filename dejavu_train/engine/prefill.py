"""The dense prompt phase of a GPU: chunks of few sizes, K/V written into the engine's static caches.

    prompt of 600 tokens in fp16    0 .. 511 | 512 .. 599, as 128 rows of which 88 are real

Products are those of torch. Attention of a chunk is a kernel, whose row, position and length lie on the device. So each
size is one graph. Chunks of up to `MULTIPLIED` rows in fp16, of up to `MULTIPLIED_ROWS` for down, multiply matrices of
4 bits as they lie. For others a matrix is written out in the model's dtype, into the memory of the one before. A prompt
is never run beside another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from dejavu_train.engine.ops import StepOps
from dejavu_train.engine.ranks.joins import Join
from dejavu_train.engine.weights import DecodeWeights, LayerWeights
from dejavu_train.families.block import before_half, behind_half
from dejavu_train.kernels.common.activation import activation_reference
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.positions import Rotary, turned_reference
from dejavu_train.kernels.dense.chunk_product import PLAIN, Arrangement, Ending, multiplies
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import Linear, Matrix
from dejavu_train.kernels.stages.hidden import kept_unit
from dejavu_train.kernels.verify.attend_slots import SLOTS

HEAD_ROWS = 4096  # of the LM head at once
SIZES = (16, 32, 64, 128, 256, 512, 1024)  # rows of a chunk
MOST, MOST_PACKED = 512, 1024  # rows of a whole chunk: each unpacks 4-bit weights once more
MULTIPLIED, MULTIPLIED_ROWS = 128, 64  # rows of a chunk that reads 4-bit weights as codes, at most; of down
SLOTTED = 8  # tokens that one pass of eight slots takes less time for
ONE_GPU = Join()


@dataclass(frozen=True)
class Chunk:
    """Positions ``first`` to ``first + count`` - 1 of a prompt, computed as ``size`` rows of every product."""

    first: int
    count: int
    size: int


def chunks_of(count: int, most: int, slotted: int = 0) -> list[Chunk]:
    """The chunks of a prompt of ``count`` tokens. They follow from the tokens' positions alone.

    Whole chunks of ``most`` tokens come first. The rest is one chunk of the smallest size that holds it.

    Args:
        slotted: a rest of so many tokens, or fewer, runs in passes of eight slots.

    >>> chunks_of(300, 256)
    [Chunk(first=0, count=256, size=256), Chunk(first=256, count=44, size=64)]
    """
    found = [Chunk(first, most, most) for first in range(0, count - most + 1, most)]
    first = len(found) * most
    if count - first <= slotted:
        found += [Chunk(at, min(SLOTS, count - at), SLOTS) for at in range(first, count, SLOTS)]
    elif first < count:
        found.append(Chunk(first, count - first, next(size for size in SIZES if size >= count - first)))
    return found


def run_chunk(
    weights: DecodeWeights,
    ops: StepOps,
    tokens: Tensor,
    chunk: Tensor,
    size: int,
    caches: Sequence[KvCache],
    join: Join = ONE_GPU,
) -> Tensor:
    """Run a chunk of one row's prompt densely. Earlier positions of the row are in its caches.

    Args:
        tokens: (B, capacity) int32. chunk: (3,) int32, the row, the first position, and how many tokens.
        size: of the chunk. What stands behind its real tokens changes nothing of them.
        caches: per layer. K and V of the real tokens are written.
    Returns:
        (size, d) fp32, the residual stream behind the last layer.
    """
    at = (chunk[1] + torch.arange(size, device=tokens.device)).clamp(max=tokens.shape[1] - 1)  # of real tokens no more
    x = embedded(weights, tokens.index_select(0, chunk[:1].long())[0, at], at)
    # Zeros, since the reference writes real tokens alone.
    heads = torch.zeros(size, weights.shape.n_heads, weights.shape.head_dim, dtype=caches[0].k.dtype, device=x.device)
    for layer, cache in zip(weights.layers, caches, strict=True):
        block = dense_block(weights, layer, ops, at, join)
        rows = block.project(before_half(block, block.norm_attn, x))
        ops.attend_chunk(rows, cache, chunk, heads)
        x = behind_half(block, block.norm_attn, block.out(heads.flatten(1), x))
        made = block.neurons(before_half(block, block.norm_mlp, x))
        x = behind_half(block, block.norm_mlp, block.down(made, x))
    return x


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


def dense_block(
    weights: DecodeWeights, layer: LayerWeights, ops: StepOps, at: Tensor, join: Join = ONE_GPU
) -> SimpleNamespace:
    """The maps of a layer for tokens (T, .) at positions ``at`` (T,). Products are in the weights' dtype.

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

    def of_codes(
        linear: Linear, x: Tensor, to: torch.dtype, kind: Arrangement = Arrangement.COLUMNS, ending: Ending = PLAIN,
        residual: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """(T, n) of a matrix that is multiplied as it lies, else None."""
        weight = linear.weight
        most = MULTIPLIED_ROWS if kind is Arrangement.ROWS else MULTIPLIED
        if weight.format is not Format.INT4 or len(x) > most or not multiplies(weight, dtype, kind):
            return None
        out = torch.empty(len(x), linear.bias.numel(), dtype=to, device=x.device)
        ops.chunk_product(x.to(dtype), weight, linear.bias, out, kind, ending, residual)
        return out

    def norm(ln: LayerNormWeights, x: Tensor) -> Tensor:
        out = torch.empty_like(x, dtype=normed)
        ops.layer_norm(x, ln, out)
        return out

    def compared(x: Tensor, norm: LayerNormWeights | None) -> Tensor:
        """Queries or keys (T, g, n, e), in fp32 where they are turned, as the kernels turn them."""
        if norm is not None:
            x = layer_norm_reference(x, norm, torch.float32)
        if turns is not None:
            x = turned_reference(x.float(), turns, at[:, None, None].expand(x.shape[:-1]))
        return x.to(dtype)

    def project(n: Tensor) -> Tensor:
        """(T, g, r + 2, e)."""
        bias, rows = layer.qkv.bias, of_codes(layer.qkv, n, dtype)
        if rows is None:
            rows = F.linear(n.to(dtype), numbers(layer.qkv.weight), bias.flatten())
        rows = rows.unflatten(-1, bias.shape)
        if turns is None and layer.head_norms is None:
            return rows
        norms = (None, None) if layer.head_norms is None else (layer.head_norms.q, layer.head_norms.k)
        q, k, v = rows.split((share, 1, 1), 2)
        return torch.cat((compared(q, norms[0]), compared(k, norms[1]), v), 2)

    def values(linear: Linear, n: Tensor, activation: str, scale: float = 1.0) -> Tensor:
        threshold = 0.0 if activation == "none" else layer.hidden.threshold
        made = of_codes(linear, n, dtype, ending=Ending(activation, threshold, scale=scale))
        if made is not None:
            return made
        x = F.linear(n.to(dtype), numbers(linear.weight), linear.bias)
        if activation == "relu" and not threshold:
            return x.relu_()
        return (activation_reference(x.float(), activation, threshold) * scale).to(dtype)

    def neurons(n: Tensor) -> Tensor:
        form = layer.hidden
        if layer.gate is None:
            return values(layer.up, n, form.activation, unit)
        gate, up = (
            values(layer.gate, n, form.activation, unit),
            values(layer.up, n, form.activation if form.both else "none"),
        )
        return gate.mul_(up)

    def whole(linear: Linear, x: Tensor, residual: Tensor, kind: Arrangement, unit: float = 1.0) -> Tensor:
        """residual + x weight + bias of all ranks. The bias is added before one rounding, or in fp32 behind it."""
        alone = type(join) is Join
        made = of_codes(linear, x, torch.float32, kind, Ending(unit=1 / unit), residual if alone else None)
        if made is not None:
            return made if alone else residual + join.total(made)
        rows = numbers(linear.weight, kind is Arrangement.BESIDE)
        weight = rows if kind is Arrangement.ROWS else rows.T
        if unit == 1 and alone and linear.bias.dtype == dtype:
            return residual + torch.addmm(linear.bias, x, weight)
        return residual + join.total((x @ weight).float() / unit + linear.bias.float())

    def out(mixed: Tensor, residual: Tensor) -> Tensor:
        return whole(layer.out, mixed, residual, Arrangement.BESIDE if layer.packed else Arrangement.COLUMNS)

    def down(made: Tensor, residual: Tensor) -> Tensor:
        by_neuron = layer.down_transposed or layer.packed
        return whole(layer.down, made, residual, Arrangement.ROWS if by_neuron else Arrangement.COLUMNS, unit)

    return SimpleNamespace(
        post_norm=dims.post_norm,
        norm_attn=partial(norm, layer.behind[0] or layer.norm1),
        project=project,
        out=out,
        norm_mlp=partial(norm, layer.behind[1] or layer.norm2),
        neurons=neurons,
        down=down,
    )
