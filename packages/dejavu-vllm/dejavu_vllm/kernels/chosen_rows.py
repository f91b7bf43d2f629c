"""The map into the neurons over those that are chosen, zeros elsewhere, for one to 64 tokens:

    out[b, i] = bias[i] + sum_j x[b, j] w[i, j]    where score[b, i] > cut, else 0
    score[b, i] = offset[i] + sum_r hidden[b, r] up[i, r]              of a predictor, or given
    hidden[b, r] = act(sum_j x[b, j] down[r, j])

x (B, d), w (n, d). With two halves w is (2 n, d) and out (B, 2 n): gates, then their other maps, chosen together. A row
is read where one token chose it. NaN is above no cut.

A program owns a range of neurons. It scores them, and writes who chose what into out. It lists what somebody chose, and
multiplies those rows with all tokens, a few at a time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.kernels.common.checks import require
from dejavu_train.kernels.common.launch import start_dependents_and_wait, use_pdl
from dejavu_vllm.kernels.lists import RowsSettings, check_matrix, check_tokens, list_of, padded_tokens, write_numbers

FEW = 8  # tokens whose first half of a predictor is multiplied without tensor cores


@dataclass(frozen=True)
class Scorer:
    """A predictor: down (rank, d), up (n, rank), offset (n). relu: between its matrices. cut: of its scores."""

    down: Tensor
    up: Tensor
    offset: Tensor
    relu: bool
    cut: float


SETTINGS = {  # by tokens as they are padded
    1: RowsSettings(32, 8, 512),
    16: RowsSettings(32, 16, 256),
    32: RowsSettings(32, 16, 128),
    64: RowsSettings(32, 16, 128),
}


def chosen_rows_reference(x: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor) -> Tensor:
    """Plain torch, on any device, in the dtype of x: the rows that ``keep`` (B, n) bool names. Halves as in weight."""
    n = keep.shape[1]
    units = keep.any(0).nonzero().flatten()
    rows = torch.cat([units + first for first in range(0, len(weight), n)])
    made = F.linear(x, weight.index_select(0, rows), None if bias is None else bias.index_select(0, rows))
    kept = keep.index_select(1, units).repeat(1, len(weight) // n)
    return x.new_zeros(len(x), len(weight)).index_copy_(1, rows, torch.where(kept, made, 0.0))


@triton.jit(do_not_specialize=["batch"])
def _hidden_kernel(
    x, down, hidden, stride, batch, D: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, RELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, BLOCK)
    start_dependents_and_wait(PDL)
    sums = ()
    for _ in tl.static_range(TOKENS):
        sums = sums + (tl.zeros((R, BLOCK), tl.float32),)
    for first in tl.static_range(0, D, BLOCK):
        at = down + rows.to(tl.int64)[:, None] * D + (first + k)[None, :]
        own = tl.load(at, mask=(rows < RANK)[:, None] & (first + k < D)[None, :], other=0.0).to(tl.float32)
        added = ()
        for b in tl.static_range(TOKENS):
            its = tl.load(x + tl.minimum(b, batch - 1) * stride + first + k, mask=first + k < D, other=0.0)
            added = added + (sums[b] + own * its.to(tl.float32)[None, :],)
        sums = added
    for b in tl.static_range(TOKENS):
        made = tl.sum(sums[b], 1)
        if RELU:
            made = tl.where(made <= 0, 0.0, made)
        tl.store(hidden + b * RANK + rows, made, mask=(rows < RANK) & (tl.zeros_like(rows) + b < batch))


def predictor_hidden(x: Tensor, scorer: Scorer) -> Tensor:
    """(B, rank), in fp32 for few tokens, else in the dtype of x."""
    batch, (rank, d) = len(x), scorer.down.shape
    if batch > FEW:
        made = F.linear(x, scorer.down)
        return F.relu(made) if scorer.relu else made
    hidden, pdl = torch.empty(batch, rank, dtype=torch.float32, device=x.device), use_pdl(True, x.device)
    _hidden_kernel[(triton.cdiv(rank, 2),)](
        x, scorer.down, hidden, x.stride(0), batch, D=d, RANK=rank, R=2, BLOCK=512 if d >= 512 else 64,
        TOKENS=triton.next_power_of_2(batch), RELU=scorer.relu, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return hidden


@triton.jit
def _scores(hidden, up, offset, own, inside, batch, RANK: tl.constexpr, RANKS: tl.constexpr, TOKENS: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    """(OWN, TOKENS) of a predictor. Of several tokens hidden is multiplied as the sum of two numbers of up's dtype."""
    at = up + own.to(tl.int64)[:, None] * RANK
    beginning = tl.load(offset + own, mask=inside, other=0.0).to(tl.float32)
    if TOKENS == 1:
        k = tl.arange(0, RANKS)
        rows = tl.load(at + k[None, :], mask=inside[:, None] & (k < RANK)[None, :], other=0.0)
        start_dependents_and_wait(PDL)
        one = tl.load(hidden + k, mask=k < RANK, other=0.0).to(tl.float32)
        made = tl.sum(rows.to(tl.float32) * one[None, :], 1)[:, None]
    else:
        CHUNK: tl.constexpr = min(RANKS, 64)
        k = tl.arange(0, CHUNK)
        b = tl.arange(0, TOKENS)
        start_dependents_and_wait(PDL)
        made = tl.zeros((own.shape[0], TOKENS), tl.float32)
        for first in tl.static_range(0, RANK, CHUNK):
            there = first + k < RANK
            rows = tl.load(at + (first + k)[None, :], mask=inside[:, None] & there[None, :], other=0.0)
            its = hidden + b[None, :] * RANK + (first + k)[:, None]
            whole = tl.load(its, mask=there[:, None] & (b < batch)[None, :], other=0.0).to(tl.float32)
            most = whole.to(rows.dtype)
            rest = (whole - most.to(tl.float32)).to(rows.dtype)
            made = tl.dot(rows, most, made, input_precision="ieee")
            made = tl.dot(rows, rest, made, input_precision="ieee")
    return made + beginning[:, None]


@triton.jit
def _products(x, stride, weight, rows, there, batch, D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
              STAGES: tl.constexpr):  # fmt: skip
    """(R, TOKENS): rows (R,) of the matrix with every token."""
    R: tl.constexpr = rows.shape[0]
    k = tl.arange(0, BLOCK)
    b = tl.arange(0, TOKENS)
    at = weight + rows.to(tl.int64)[:, None] * D + k[None, :]
    if TOKENS == 1:
        sums = tl.zeros((R, BLOCK), tl.float32)
        for first in tl.range(0, D, BLOCK, num_stages=STAGES):
            inside = first + k < D
            own = tl.load(at + first, mask=there[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
            its = tl.load(x + first + k, mask=inside, other=0.0)
            sums += own.to(tl.float32) * its.to(tl.float32)[None, :]
        made = tl.sum(sums, 1)[:, None]
    else:
        made = tl.zeros((R, TOKENS), tl.float32)
        for first in tl.range(0, D, BLOCK, num_stages=STAGES):
            inside = first + k < D
            own = tl.load(at + first, mask=there[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
            its = x + b[None, :] * stride + (first + k)[:, None]
            columns = tl.load(its, mask=(b < batch)[None, :] & inside[:, None], other=0.0)
            made = tl.dot(own, columns, made, input_precision="ieee")
    return made


@triton.jit(do_not_specialize=["n", "batch"])
def _chosen_rows_kernel(
    x, weight, bias, hidden, up, offset, scores, listed, out, cut, x_stride, score_stride, out_stride, n, batch,
    D: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, HALVES: tl.constexpr, OWN: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    inside = own < n
    b = tl.arange(0, TOKENS)
    seen = (b < batch)[None, :]
    if scores is None:
        score = _scores(hidden, up, offset, own, inside, batch, RANK, RANKS, TOKENS, PDL)
    else:
        start_dependents_and_wait(PDL)
        at = scores + b[None, :] * score_stride + own[:, None]
        score = tl.load(at, mask=inside[:, None] & seen, other=float("-inf"))
    chosen = (score > cut) & inside[:, None] & seen
    for half in tl.static_range(HALVES):  # of the first half 1 where it is chosen, until its number stands there
        at = out + b[None, :] * out_stride + own[:, None] + half * n
        tl.store(at, tl.where(chosen, 1.0 - half, 0.0), mask=inside[:, None] & seen)
    listed += tl.program_id(0) * OWN
    count = write_numbers(listed, own, tl.max(chosen.to(tl.int32), 1) != 0)
    for entry in range(0, count, R):
        there = entry + tl.arange(0, R) < count
        i = tl.load(listed + entry + tl.arange(0, R), mask=there, other=0)
        mask = there[:, None] & seen
        kept = tl.load(out + b[None, :] * out_stride + i[:, None], mask=mask, other=0.0) != 0
        tl.debug_barrier()
        for half in tl.static_range(HALVES):
            made = _products(x, x_stride, weight, i + half * n, there, batch, D, BLOCK, TOKENS, STAGES)
            if bias is not None:
                made += tl.load(bias + i + half * n, mask=there, other=0.0).to(tl.float32)[:, None]
            tl.store(out + b[None, :] * out_stride + i[:, None] + half * n, tl.where(kept, made, 0.0), mask=mask)


def chosen_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scorer: Scorer | Tensor,
    cut: float = 0.0,
    out: Tensor | None = None,
    settings: RowsSettings | None = None,
) -> Tensor:
    """(B, n) of x (B, d) and weight (n, d), B from 1 to 64. In two halves weight is (2 n, d) and the result (B, 2 n).

    scorer: a predictor, or scores (B, n) that are compared with ``cut``. out: where it goes, columns side by side.

    Errors: shapes, dtypes, more tokens, a CPU tensor.
    """
    rows, d = weight.shape
    batch = check_tokens("x", x, d)
    check_matrix("weight", weight, (rows, d), x)
    require(bias is None or (tuple(bias.shape) == (rows,) and bias.is_contiguous()), f"bias: expected ({rows},)")
    n = scorer.shape[1] if isinstance(scorer, Tensor) else len(scorer.up)
    require(rows in (n, 2 * n), f"weight: {rows} rows, expected {n} or twice as many")
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device) if out is None else out
    require(tuple(out.shape) == (batch, rows) and out.stride(1) == 1, f"out: expected ({batch}, {rows})")
    parts: tuple[Tensor | None, ...]
    if isinstance(scorer, Tensor):
        require(len(scorer) == batch and scorer.stride(1) == 1, f"scores: expected ({batch}, {n})")
        parts, rank, stride = (None, None, None, scorer), 1, scorer.stride(0)
    else:
        rank, cut, stride = len(scorer.down), scorer.cut, 0
        check_matrix("down", scorer.down, (rank, d), x)
        check_matrix("up", scorer.up, (n, rank), x)
        parts = (predictor_hidden(x, scorer), scorer.up, scorer.offset, None)
    tokens, pdl = padded_tokens(batch), use_pdl(True, x.device)
    use = settings or SETTINGS[tokens]
    programs = triton.cdiv(n, use.own)
    _chosen_rows_kernel[(programs,)](
        x, weight, bias, *parts, list_of(programs * use.own, x.device), out, cut, x.stride(0),
        stride, out.stride(0), n, batch, D=d, RANK=rank,
        RANKS=max(16, triton.next_power_of_2(rank)), HALVES=rows // n, OWN=use.own, R=use.rows,
        BLOCK=min(use.block, max(16, triton.next_power_of_2(d))), TOKENS=tokens, STAGES=use.stages, PDL=pdl,
        num_warps=use.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
