"""The map out of the neurons over those that are live, for one to 64 tokens:

    out[b, j] = bias[j] + sum_i h[b, i] w[i, j]        over i with h[b, i] != 0 for some b

h (B, n), behind the activation. w (n, d), a row a neuron. A row is read where one token's h is not zero. NaN is not
zero, so it is never left out.

A program owns a stripe of columns and a range of neurons. It lists those that are live, and adds their rows, a few at
a time. One token is multiplied in fp32, several on the tensor cores, and sums are in fp32. A second kernel adds the
ranges up, in an order that the shape fixes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import require
from dejavu_train.kernels.common.launch import start_dependents_and_wait, use_pdl
from dejavu_vllm.kernels.lists import RowsSettings, check_matrix, check_tokens, list_of, padded_tokens, write_numbers

SETTINGS = {  # by tokens as they are padded
    1: RowsSettings(1024, 32, 256, stages=2),
    16: RowsSettings(1024, 32, 256, stages=2),
    32: RowsSettings(512, 32, 512, stages=2),
    64: RowsSettings(512, 32, 256, stages=2),
}


def live_rows_reference(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Plain torch, on any device, in the dtype of h: the live rows alone."""
    live = (h != 0).any(0).nonzero().flatten()
    out = h.index_select(1, live) @ weight.index_select(0, live)
    return out if bias is None else out + bias


@triton.jit
def _live_numbers(h, stride, batch, own, inside, TOKENS: tl.constexpr):
    """Which of these neurons are live in some token: (OWN,) bool."""
    if TOKENS == 1:
        return tl.load(h + own, mask=inside, other=0.0) != 0
    b = tl.arange(0, 8)
    live = tl.zeros_like(own)
    for first in range(0, batch, 8):
        there = (first + b < batch)[:, None] & inside[None, :]
        tile = tl.load(h + (first + b)[:, None] * stride + own[None, :], mask=there, other=0.0)
        live |= tl.max((tile != 0).to(tl.int32), 0)
    return live != 0


@triton.jit(do_not_specialize=["n", "batch"])
def _live_rows_kernel(
    h, weight, listed, partials, stride, n, batch, D: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
    R: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split = tl.program_id(1)
    own = split * OWN + tl.arange(0, OWN)
    listed += split * OWN  # programs of other columns write the same there
    start_dependents_and_wait(PDL)
    count = write_numbers(listed, own, _live_numbers(h, stride, batch, own, own < n, TOKENS))
    r = tl.arange(0, R)
    b = tl.arange(0, TOKENS)
    inside = (columns < D)[None, :]
    if TOKENS == 1:
        acc = tl.zeros((R, BLOCK), tl.float32)
    else:
        acc = tl.zeros((TOKENS, BLOCK), tl.float32)
    for entry in tl.range(0, count, R, num_stages=STAGES):
        there = entry + r < count
        i = tl.load(listed + entry + r, mask=there, other=0)
        at = weight + i.to(tl.int64)[:, None] * D + columns[None, :]
        rows = tl.load(at, mask=there[:, None] & inside, other=0.0, eviction_policy="evict_first")
        if TOKENS == 1:
            value = tl.load(h + i, mask=there, other=0.0)
            acc += rows.to(tl.float32) * value.to(tl.float32)[:, None]
        else:
            at = h + b[:, None] * stride + i[None, :]
            values = tl.load(at, mask=(b < batch)[:, None] & there[None, :], other=0.0)
            acc = tl.dot(values, rows, acc, input_precision="ieee")
    if TOKENS == 1:
        tl.store(partials + split * D + columns, tl.sum(acc, 0), mask=columns < D)
    else:
        at = partials + (split * batch + b)[:, None] * D + columns[None, :]
        tl.store(at, acc, mask=(b < batch)[:, None] & inside)


@triton.jit(do_not_specialize=["size"])
def _add_splits_kernel(
    partials, bias, out, size, D: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out = bias + the sum of SPLITS partial sums of size numbers, CHUNK of them at a time."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((CHUNK, BLOCK), tl.float32)
    s = tl.arange(0, CHUNK)
    start_dependents_and_wait(PDL)
    for first in tl.static_range(0, SPLITS, CHUNK):
        part = partials + (first + s)[:, None] * size + at[None, :]
        total += tl.load(part, mask=(first + s < SPLITS)[:, None] & inside[None, :], other=0.0)
    made = tl.sum(total, 0)
    if bias is not None:
        made += tl.load(bias + at % D, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, made, mask=inside)


def live_rows(h: Tensor, weight: Tensor, bias: Tensor | None, settings: RowsSettings | None = None) -> Tensor:
    """(B, d) of h (B, n), weight (n, d) and bias (d) or None, all of one float dtype, B from 1 to 64.

    Errors: shapes, dtypes, more tokens, a CPU tensor.
    """
    n, d = weight.shape
    batch = check_tokens("h", h, n)
    check_matrix("weight", weight, (n, d), h)
    require(bias is None or (tuple(bias.shape) == (d,) and bias.is_contiguous()), f"bias: expected ({d},)")
    tokens = padded_tokens(batch)
    use = settings or SETTINGS[tokens]
    block = min(use.block, max(16, triton.next_power_of_2(d)))
    splits = triton.cdiv(n, use.own)
    partials = torch.empty(splits, batch, d, dtype=torch.float32, device=h.device)
    out, pdl = torch.empty(batch, d, dtype=h.dtype, device=h.device), use_pdl(True, h.device)
    _live_rows_kernel[(triton.cdiv(d, block), splits)](
        h, weight, list_of(splits * use.own, h.device), partials, h.stride(0), n, batch, D=d, OWN=use.own, BLOCK=block,
        R=use.rows, TOKENS=tokens, STAGES=use.stages, PDL=pdl, num_warps=use.warps, launch_pdl=pdl,
    )  # fmt: skip
    _add_splits_kernel[(triton.cdiv(batch * d, 128),)](
        partials, bias, out, batch * d, D=d, SPLITS=splits, CHUNK=8, BLOCK=128, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
