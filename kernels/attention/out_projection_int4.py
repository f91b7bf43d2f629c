# mypy: disable-error-code="assignment"
"""The output projection over the selected heads with 4-bit weights.

    y[i] = residual[i] + bias[i] + sum_h scale[h, i] sum_j code[h, i, j] mixed[h head_dim + j],   h selected

The weight lies head by head, Int4Rows of shape (h, d, head_dim) with one scale a head and output, so that a skipped
head skips codes and scales alike; fp16 weights (`out_projection`) keep rows of all heads. mixed (1, h * head_dim) fp32
is rounded to fp16; sums in fp32, the scale multiplies a thread's part of a head.
Threads are spread over C chunks (16 bytes of one head and output; at head dim 80, 8 bytes) and L / C outputs. Each goes
over the chunks of the selected heads, C apart, for R neighbouring outputs: what it reads of mixed serves R times.
The first chunks are read before the wait: selection, bias and residual are older than the launch before, see
`out_projection`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.out_projection import _selected_heads
from kernels.common.checks import INTERPRET, check_device, check_head_dim, check_shape, require
from kernels.common.int4 import Int4Rows
from kernels.common.int4_tiles import int4_dot, split_words, word_planes
from kernels.common.launch import use_pdl, wait_for_predecessor
from kernels.mlp.select import Selection


@dataclass(frozen=True)
class HeadRowSettings:
    """lanes: threads of a program; chunks: of them side by side; outputs: of a thread."""

    lanes: int
    chunks: int
    outputs: int


def head_row_settings(d: int) -> HeadRowSettings:
    """Launch settings. Not measured yet: `benchmarks/int4_rows.py`."""
    if INTERPRET:
        return HeadRowSettings(8, 4, 2)
    return HeadRowSettings(128, 32, 2 if d <= 4096 else 4)


def by_head(weight: Tensor, n_heads: int) -> Tensor:
    """weight (d, h * head_dim) -> (h, d, head_dim), contiguous: what is quantised and packed row by row."""
    return weight.view(len(weight), n_heads, -1).transpose(0, 1).contiguous()


def project_head_rows_reference(mixed, weight, bias, residual, selection, out, pdl=False) -> None:
    """Plain torch; mixed is zero in heads that are not selected. fp64 where mixed is."""
    wide = torch.float64 if mixed.dtype == torch.float64 else torch.float32
    n_heads, _, head_dim = weight.shape
    x = mixed.half().to(wide).view(-1, n_heads, head_dim)
    out.copy_(torch.einsum("bhj,hij->bi", x, weight.dequantised(wide)) + bias.to(wide) + residual)


@triton.jit
def _places(order, begin, n, q, HEAD_DIM: tl.constexpr, VECTOR: tl.constexpr, ALL: tl.constexpr):
    """(head, word of the head, whether there is one) of the threads' chunks from the begin-th on; n heads."""
    CHUNKS: tl.constexpr = HEAD_DIM // (8 * VECTOR)
    number = begin + q
    if ALL:
        head = number // CHUNKS
    else:
        head = tl.gather(order, tl.minimum(number // CHUNKS, order.shape[0] - 1), 0)
    there = number < n * CHUNKS
    return tl.where(there, head, 0), (number % CHUNKS) * VECTOR, there


@triton.jit
def _chunk(
    weight, scales, head, word, there, rows, n_rows, HEAD_DIM: tl.constexpr, VECTOR: tl.constexpr, R: tl.constexpr
):
    """VECTOR words and a scale for each of a thread's R outputs; words that are not there are undefined."""
    tiles = ()
    for k in tl.static_range(R):
        line = head * n_rows + rows + k
        mask = there & (rows + k < n_rows)
        at = weight + (line.to(tl.int64) * (HEAD_DIM // 8) + word)[:, None] + tl.arange(0, VECTOR)[None, :]
        tiles = tiles + split_words(tl.load(at, mask=mask[:, None], eviction_policy="evict_first"), VECTOR)
        tiles = tiles + (tl.load(scales + line, mask=mask, other=0.0),)
    return tiles


@triton.jit
def _project_head_rows_kernel(
    mixed,
    weight,
    scales,
    bias,
    residual,
    row_bits,
    out,
    n_rows,
    H: tl.constexpr,
    H_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VECTOR: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNKS: tl.constexpr = HEAD_DIM // (8 * VECTOR)
    lane = tl.arange(0, L)
    q = lane % C
    rows = (tl.program_id(0) * (L // C) + lane // C) * R
    own = tl.program_id(0) * (L // C * R) + tl.arange(0, L // C * R)
    inside = own < n_rows
    if ALL:
        order = lane
        n = H
    else:
        order, n = _selected_heads(row_bits, H, H_TILE)
    head, word, there = _places(order, 0, n, q, HEAD_DIM, VECTOR, ALL)
    w = _chunk(weight, scales, head, word, there, rows, n_rows, HEAD_DIM, VECTOR, R)
    offset = tl.load(bias + own, mask=inside, other=0.0).to(tl.float32)
    base = tl.load(residual + own, mask=inside, other=0.0, cache_modifier=".cg")
    wait_for_predecessor(PDL)
    acc = ()
    for _ in tl.static_range(R):
        acc = acc + (tl.zeros((L,), tl.float32),)
    for begin in range(0, n * CHUNKS, C):
        x = ()
        for v in tl.static_range(VECTOR):
            column = head * HEAD_DIM + 8 * (word + v)
            at = mixed + column[:, None] + tl.arange(0, 8)[None, :]
            x = x + word_planes(tl.load(at, mask=there[:, None], other=0.0))
        head, word, there = _places(order, begin + C, n, q, HEAD_DIM, VECTOR, ALL)
        more = ()
        for k in tl.static_range(R):
            part = int4_dot(w[k * (VECTOR + 1) : k * (VECTOR + 1) + VECTOR], x, VECTOR)
            more = more + (acc[k] + part * w[k * (VECTOR + 1) + VECTOR].to(tl.float32),)
        acc = more
        w = _chunk(weight, scales, head, word, there, rows, n_rows, HEAD_DIM, VECTOR, R)
    if R == 1:
        sums = tl.sum(tl.reshape(acc[0], (L // C, C)), 1)
    elif R == 2:
        sums = tl.reshape(tl.sum(tl.reshape(tl.join(acc[0], acc[1]), (L // C, C, 2)), 1), (L // C * 2,))
    else:
        fours = tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))
        sums = tl.reshape(tl.sum(tl.reshape(fours, (L // C, C, 4)), 1), (L // C * 4,))
    tl.store(out + own, sums + offset + base, mask=inside)


def project_head_rows(
    mixed: Tensor,
    weight: Int4Rows,
    bias: Tensor,
    residual: Tensor,
    selection: Selection | None,
    out: Tensor,
    pdl: bool = False,
    settings: HeadRowSettings | None = None,
) -> None:
    """mixed (1, h * head_dim), residual and out (1, d) fp32, weight (h, d, head_dim); selection None = all heads.

    Bitwise deterministic. Selection and residual must be older than the two launches before this one.
    Errors: shapes, dtypes, head dims, groups other than a head, a CPU tensor.
    """
    check_device("mixed", mixed)
    n_heads, d, head_dim = weight.shape
    check_head_dim(head_dim)
    check_shape("mixed", mixed, 1, n_heads * head_dim)
    weight.check("weight", (n_heads, d, head_dim), mixed)
    require(weight.scales.shape[-1] == 1, f"weight: {weight.scales.shape[-1]} groups a head, expected one")
    check_shape("bias", bias, d)
    check_shape("residual", residual, 1, d)
    check_shape("out", out, 1, d)
    require(selection is None or selection.n == n_heads, f"a selection of other heads than the weight's {n_heads}")
    settings = settings or head_row_settings(d)
    require(settings.outputs in (1, 2, 4), f"a thread has 1, 2 or 4 outputs, not {settings.outputs}")
    pdl = use_pdl(pdl, mixed.device)
    _project_head_rows_kernel[(triton.cdiv(d, settings.lanes // settings.chunks * settings.outputs),)](
        mixed,
        weight.words,
        weight.scales,
        bias,
        residual,
        mixed if selection is None else selection.row_bits,
        out,
        d,
        H=n_heads,
        H_TILE=triton.next_power_of_2(n_heads),
        HEAD_DIM=head_dim,
        VECTOR=4 if head_dim % 32 == 0 else 2,
        L=settings.lanes,
        C=settings.chunks,
        R=settings.outputs,
        ALL=selection is None,
        PDL=pdl,
        num_warps=max(1, settings.lanes // 32),
        launch_pdl=pdl,
    )
