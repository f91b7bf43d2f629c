"""Rows named by a selection times one vector: h[i] = relu(sum_j w[i, j] n[j] + bias[i]), the live ones as a list.

n = LayerNorm(x) or x itself. x (1, d) fp32 (or as w, without a LayerNorm); w (n, d). A program owns every SHARE-th
selected row of one block of the selection: its ids lie at known places, so no running sum of counts is needed; ids and
count arrive together, and the rows after them. With `early` the list was written at least two launches ago (a look-
ahead predictor), and the first row is asked for before the wait for the stage before, which only makes x.
Output: `LiveRows` with one range a program (ids, values, counts).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import check_device, check_shape, start_dependents, two_tiles, use_pdl
from kernels.dense_gemv import load_rows, norm_parameters, normalised
from kernels.gather_gemv import LiveRows
from kernels.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.select import Selection


def listed_block(d: int) -> int:
    """Block of the selections that this kernel likes best, by width."""
    return 64 if d <= 4096 else 32


def listed_share(d: int) -> tuple[int, int]:
    """(programs a block of the selection, warps), by width."""
    return (4, 8) if d <= 4096 else (1, 4)


def listed_rows(n: int, d: int, device: torch.device | str, block: int | None = None) -> LiveRows:
    """The output that `listed_gemv` wants for n rows of width d."""
    block, share = block or listed_block(d), listed_share(d)[0]
    blocks, slots = triton.cdiv(n, block), triton.cdiv(block, share)
    ids = torch.zeros(blocks * share * slots, dtype=torch.int32, device=device)
    values = torch.zeros(blocks * share * slots, 1, device=device)
    return LiveRows(n, slots, ids, values, torch.zeros(blocks * share, dtype=torch.int32, device=device))


def listed_gemv_reference(x, ln, weight, bias, selection, out, early=False, pdl=False) -> None:
    """Plain torch; `out` is the dense (B, n) tensor of the references."""
    y = x.to(weight.dtype) if ln is None else layer_norm_reference(x, ln, weight.dtype)
    y = (torch.nn.functional.linear(y.float(), weight.float()) + bias.float()).relu()
    out.copy_(torch.where(selection.to_mask(len(x)), y, 0.0))


@triton.jit
def _listed_kernel(
    x,
    norm_weight,
    norm_bias,
    weight,
    bias,
    ids,
    counts,
    live_ids,
    live_values,
    live_counts,
    n_rows,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    SLOTS: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    block = pid // SHARE
    part = pid % SHARE
    c0 = tl.arange(0, D0)
    c1 = c0
    if D1 > 0:
        c1 = D0 + tl.arange(0, D1)
    if NORM:
        g0, a0, g1, a1 = norm_parameters(norm_weight, norm_bias, c0, c1, D, D1)
    if not EARLY:
        start_dependents(PDL)
    # The id may be one beyond the count: then it is an old one, in range, and its row is not read.
    count = tl.load(counts + block, cache_modifier=".cg")
    row = tl.load(ids + block * BLOCK + part, cache_modifier=".cg")
    w0, w1 = load_rows(weight, row, tl.where(part < count, n_rows, 0), c0, c1, D, D0, D1, 1)
    if EARLY:
        start_dependents(PDL)
    if NORM:
        n0, n1 = normalised(x, g0, a0, g1, a1, c0, c1, D, D1, EPS, weight.dtype.element_ty)
    else:
        n0 = tl.load(x + c0).to(tl.float32)
        n1 = n0
        if D1 > 0:
            n1 = tl.load(x + c1, mask=c1 < D, other=0.0).to(tl.float32)
    written = 0
    for item in range(part, count, SHARE):
        ahead = item + SHARE
        next_row = tl.load(ids + block * BLOCK + tl.minimum(ahead, BLOCK - 1), cache_modifier=".cg")
        next0, next1 = load_rows(weight, next_row, tl.where(ahead - count < 0, n_rows, 0), c0, c1, D, D0, D1, 1)
        value = tl.sum(w0.to(tl.float32) * n0[None, :])
        if D1 > 0:
            value += tl.sum(w1.to(tl.float32) * n1[None, :])
        value += tl.load(bias + row).to(tl.float32)
        slot = pid * SLOTS + written
        if value <= 0:
            value = 0.0  # keeps a NaN
        tl.store(live_ids + slot, row)
        tl.store(live_values + slot, value)
        written += (value != 0).to(tl.int32)
        row = next_row
        w0 = next0
        w1 = next1
    tl.store(live_counts + pid, written)


def listed_gemv(
    x: Tensor,
    ln: LayerNormWeights | None,
    weight: Tensor,
    bias: Tensor,
    selection: Selection,
    out: LiveRows,
    early: bool = False,
    pdl: bool = False,
) -> None:
    """One batch row; `out` from `listed_rows`. See the module's docstring. Errors: shapes, a CPU tensor."""
    check_device("x", x)
    n, d = weight.shape
    check_shape("x", x, 1, d)
    check_shape("bias", bias, n)
    share, warps = listed_share(d)
    if selection.n != n or out.n != n or out.counts.numel() != selection.counts.numel() * share:
        raise ValueError(f"selection of {selection.n} and list of {out.n} rows do not fit a weight of {n} rows")
    d0, d1 = two_tiles(d)
    pdl = use_pdl(pdl, x.device)
    _listed_kernel[(out.counts.numel(),)](
        x,
        x if ln is None else ln.weight,
        x if ln is None else ln.bias,
        weight,
        bias,
        selection.ids,
        selection.counts,
        out.ids,
        out.values,
        out.counts,
        n,
        D=d,
        D0=d0,
        D1=d1,
        BLOCK=selection.block,
        SHARE=share,
        SLOTS=out.slots,
        NORM=ln is not None,
        EARLY=early,
        EPS=1e-5 if ln is None else ln.eps,
        PDL=pdl,
        num_warps=warps if d >= 2048 else 4,
        launch_pdl=pdl,
    )
