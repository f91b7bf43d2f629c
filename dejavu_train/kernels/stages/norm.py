"""Norms that are stages of their own: of the rows of a batch, and of the heads of q and k.

    out[b] = norm(x[b])                               `layer_norm`, where every consumer of its own would cost more

Norms of heads stand between q/k/v and attention (`norm_heads`):

    q[b, j]          -> turn(norm_q(q[b, j]), t)              t = position[b], for heads that row b selects
    k_cache[b, i, p] -> turn(norm_k(k_cache[b, i, p]), p)     p = watermark[b, i] .. t

The norm of a head needs all of it, and programs of q/k/v have a tile. So q/k/v leave both as products, and what turns
them (`Rotary.later`) does so here. RMSNorm without a weight may as well come after a rotation: it does not see one.
Without watermarks t alone is new, as in `qkv`. Calling this twice for one position norms it twice.
q (B, h, head_dim) fp32, k_cache (B, g, T, head_dim): the norm of k reads what the cache's dtype keeps of the products.
Weights and biases of norms have the order of the rows of q and k.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import (
    FLOAT_TYPES,
    check_attention,
    check_device,
    check_dtype,
    check_shape,
    check_tensor,
    require,
)
from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.launch import as_dependent, programmatic, row_or, wait_for_predecessor
from dejavu_train.kernels.common.layer_norm import (
    LayerNormWeights,
    layer_norm_reference,
    norm_vectors,
    normalised_pieces,
)
from dejavu_train.kernels.common.positions import Rotary, angles, turned, turned_reference
from dejavu_train.kernels.stages.qkv import new_positions

POSITIONS = 8  # that a program takes at once
CHUNKS = 4  # programs of a head: most heads lack a position or two


@dataclass(frozen=True)
class HeadNorms:
    """Norms over the columns of a head of q, and of k."""

    q: LayerNormWeights
    k: LayerNormWeights


def norm_heads_reference(step: HeadStep, norms: HeadNorms) -> None:
    """Plain torch, one (row, head) at a time, in fp64 where q is."""
    q, cache = step.q, step.cache
    rotary = cache.positions if isinstance(cache.positions, Rotary) else None
    batch, n_heads, _, head_dim = cache.k.shape
    own = q.view(batch, n_heads, -1, head_dim)

    def made(x: Tensor, ln: LayerNormWeights, p: Tensor) -> Tensor:
        y = layer_norm_reference(x.to(q.dtype), ln, q.dtype)
        return y if rotary is None else turned_reference(y, rotary, p.expand(y.shape[:-1]))

    for b, head, p in new_positions(step):
        own[b, head] = made(own[b, head], norms.q, step.position[b])
        cache.k[b, head, p] = made(cache.k[b, head, p], norms.k, p).to(cache.k.dtype)


@triton.jit
def _normed(x, norm, c, inside, table, p, HEAD_DIM: tl.constexpr):
    """The norms (HEAD_TILE, N) of the columns x, zero beyond HEAD_DIM, turned with the position of each, p (N,)."""
    N: tl.constexpr = x.shape[1]
    mean = tl.zeros((N,), tl.float32) + norm.mean(tl.sum(x, 0), HEAD_DIM)
    centred = tl.where(inside[:, None], x - mean[None, :], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / HEAD_DIM + norm.eps)
    gain = tl.full(c.shape, 1.0, tl.float32)
    shift = tl.zeros(c.shape, tl.float32)
    if norm.gain is not None:
        gain = tl.load(norm.gain + c, mask=inside, other=0.0)
    if norm.shift is not None:
        shift = tl.load(norm.shift + c, mask=inside, other=0.0)
    y = norm.scaled(centred * scale[None, :], gain[:, None], shift[:, None])
    if table is not None:
        y = turned(y, angles(table, c[:, None], p[None, :], inside[:, None], HEAD_DIM))
    return y


@triton.jit
def _head_norm_kernel(
    q, k_cache, row_bits, position, watermark, table, capacity, norm_q, norm_k, H: tl.constexpr, SHARE: tl.constexpr,
    SHARE_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, POSITIONS: tl.constexpr,
    FILLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    chunk = tl.program_id(1)
    b = pair // H
    c = tl.arange(0, HEAD_TILE)
    inside = c < HEAD_DIM
    wait_for_predecessor(PDL)
    last = tl.load(position + b)
    selected = last >= 0
    if row_bits is not None:
        selected = ((tl.load(row_bits + pair % H) >> b) & 1) != 0
    first = last
    if FILLS:
        first = tl.minimum(last, tl.load(watermark + pair))
    end = tl.where(selected, last + 1, 0)
    if selected:
        if chunk == 0:
            j = tl.arange(0, SHARE_TILE)
            at = q + (pair * SHARE + j)[None, :] * HEAD_DIM + c[:, None]
            there = (j < SHARE)[None, :] & inside[:, None]
            x = tl.load(at, mask=there, other=0.0)
            tl.store(at, _normed(x, norm_q, c, inside, table, tl.zeros_like(j) + last, HEAD_DIM), mask=there)
    for begin in range(first + chunk * POSITIONS, end, tl.num_programs(1) * POSITIONS):
        p = begin + tl.arange(0, POSITIONS)
        at = k_cache + (pair.to(tl.int64) * capacity + p)[None, :] * HEAD_DIM + c[:, None]
        there = (p < end)[None, :] & inside[:, None]
        x = tl.load(at, mask=there, other=0.0).to(tl.float32)
        y = _normed(x, norm_k, c, inside, table, tl.minimum(p, last), HEAD_DIM)
        tl.store(at, y.to(k_cache.dtype.element_ty), mask=there)


def norm_heads(step: HeadStep, norms: HeadNorms, pdl: bool = False) -> None:
    """See the module's formula. Without watermarks t alone is new.

    Raises ValueError for shapes, head dims, or a table of positions that q/k/v turn by themselves.
    """
    q, cache, selection, position = step.q, step.cache, step.selection, step.position
    n_heads, share, head_dim = check_attention(step)
    table = None
    if isinstance(cache.positions, Rotary):
        require(cache.positions.later, "q/k/v turn by this table already; give one that is for later")
        table = cache.positions.fitting(cache.k)
    for ln in (norms.q, norms.k):
        for each in (ln.weight, ln.bias):
            if each is not None:
                check_shape("a norm of heads", each, head_dim)
    filled = cache.watermark is not None
    _head_norm_kernel[(len(q) * n_heads, CHUNKS if filled else 1)](
        q, cache.k, None if selection is None else selection.row_bits, position, row_or(cache.watermark, position),
        table, cache.capacity, norms.q.args(), norms.k.args(), H=n_heads, SHARE=share,
        SHARE_TILE=triton.next_power_of_2(share), HEAD_DIM=head_dim,
        HEAD_TILE=triton.next_power_of_2(head_dim), POSITIONS=POSITIONS,
        FILLS=filled, num_warps=1, **as_dependent(pdl, q.device),
    )  # fmt: skip


@triton.jit
def _layer_norm_kernel(x, norm, out, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    c = tl.arange(0, BLOCK)
    gains, shifts = norm_vectors(norm, c, D, BLOCK)
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64) * D + c
    xs = (tl.load(x + row, mask=c < D, other=0.0).to(tl.float32),)
    n = normalised_pieces(xs, gains, shifts, norm, c, D, BLOCK, out.dtype.element_ty)
    tl.store(out + row, n[0].to(out.dtype.element_ty), mask=c < D)


def layer_norm(x: Tensor, ln: LayerNormWeights, out: Tensor, pdl: bool = False) -> None:
    """x (B, d) -> out (B, d), one program a row, where every consumer of its own would cost more. B is any number."""
    check_device("x", x)
    check_dtype("x", x, FLOAT_TYPES)
    batch, d = x.shape
    check_shape("x", x, batch, d)
    check_tensor("out", out, (batch, d), FLOAT_TYPES, x)
    waits, dependent = programmatic(x, pdl)
    _layer_norm_kernel[(batch,)](
        x, ln.args(), out, D=d, BLOCK=triton.next_power_of_2(d), PDL=waits, num_warps=16, launch_pdl=dependent
    )
