"""Predict and select: logits = up @ act(down @ x) + bias. A row of weights is selected where logit > threshold.

x (B, d). down (rank, d). up (n, rank). bias (n). A NaN logit is never selected. The result is a list of ids on the
device, made without sorting or a host synchronisation. Block p owns rows [p * block, (p + 1) * block). It writes its
selected ids in ascending order to slots [p * block, p * block + counts[p]), and its count. `pack` closes the gaps. For
B > 1 the list is the union of the batch's sets. Bit b of row_bits[i] says that row b selected i.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_input, check_tensor, require
from dejavu_train.kernels.common.launch import (
    dot_type,
    next_power_of_two,
    padded_batch,
    programmatic,
    wait_for_predecessor,
)
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm, layer_norm_reference
from dejavu_train.kernels.common.limits import takes_nibbles
from dejavu_train.kernels.common.row_state import mask_by_state
from dejavu_train.kernels.mlp import nibbles_batch
from dejavu_train.kernels.mlp.codes import CODE_TYPES, nibble_floats, stored_width, to_float, unscaled
from dejavu_train.kernels.mlp.predict import norm_sums, predict_down
from dejavu_train.kernels.mlp.predict_batch import predict_down_batch
from dejavu_train.kernels.mlp.predictor import Predictor, PredictorWeights
from dejavu_train.kernels.mlp.select_batch import select_batch_kernel, store_chosen


def predict_reference(x: Tensor, predictor: PredictorWeights, ln: LayerNormWeights | None = None) -> Tensor:
    """Logits (B, n) in plain torch. fp64 when x is fp64."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    if ln is not None:
        x = layer_norm_reference(x, ln, wide)
    hidden = x.to(wide) @ unscaled(predictor.down, predictor.down_scale, wide, x.shape[1]).T
    if predictor.relu:
        hidden = hidden.relu()
    logits = hidden @ unscaled(predictor.up, predictor.up_scale, wide, hidden.shape[1]).T
    return logits if predictor.bias is None else logits + predictor.bias.to(wide)


def predict_select_reference(
    x: Tensor,
    predictor: PredictorWeights,
    threshold: float | Tensor,
    ln: LayerNormWeights | None = None,
    row_state: Tensor | None = None,
    top_k: int | None = None,
) -> Tensor:
    """The selection as a mask (B, n) bool in plain torch."""
    logits = predict_reference(x, predictor, ln)
    if top_k is not None:
        return top_k_mask(logits, top_k, row_state)
    return mask_by_state(logits > threshold, row_state)


@triton.jit(do_not_specialize=["n"])
def _select_kernel(
    hidden_ptr,
    up_ptr,
    up_scale_ptr,
    bias_ptr,
    threshold_ptr,
    threshold,
    row_state_ptr,
    ids_ptr,
    counts_ptr,
    row_bits_ptr,
    logits_ptr,
    n,
    RANK: tl.constexpr,
    HIGH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One batch row: a program owns a block. Its whole tile of `up` is static, so it is in registers before the wait.

    Columns come in chunks of a power of two, and what is left of them as a rest. RANK: elements of a row of `up`, where
    they are nibbles, HIGH of them have a column in the high one too.
    """
    pid = tl.program_id(0)
    rows = pid * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n
    at = up_ptr + rows.to(tl.int64)[:, None] * RANK
    r = tl.arange(0, CHUNK)
    STEPS: tl.constexpr = RANK // CHUNK
    REST: tl.constexpr = RANK % CHUNK
    tiles = ()
    for j in tl.static_range(STEPS):
        tiles = tiles + (tl.load(at + (j * CHUNK + r)[None, :], mask=inside[:, None], other=0.0),)
    if REST > 0:
        # At least as many values as a program has threads, or copies of a sum would be written to one word (as happens,
        # harmlessly, in the chunks of ranks below 8).
        WIDE: tl.constexpr = triton.next_power_of_2(REST) if REST > 8 else 8
        last = STEPS * CHUNK + tl.arange(0, WIDE)
        if WIDE == REST:
            rest = tl.load(at + last[None, :], mask=inside[:, None], other=0.0)
        else:
            rest = tl.load(at + last[None, :], mask=inside[:, None] & (last < RANK)[None, :], other=0.0)
    if up_scale_ptr is not None:
        scale = tl.load(up_scale_ptr + rows, mask=inside, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    if threshold_ptr is not None:
        limit = tl.load(threshold_ptr)
    else:
        limit = threshold
    state = None
    if row_state_ptr is not None:
        state = tl.load(row_state_ptr)
    wait_for_predecessor(PDL)
    acc = tl.zeros((BLOCK, CHUNK), tl.float32)
    if up_ptr.dtype.element_ty == tl.uint8:
        total = tl.zeros((CHUNK,), tl.float32)
        for j in tl.static_range(STEPS):
            c = j * CHUNK + r
            low_z = tl.load(hidden_ptr + c)
            high_z = tl.load(hidden_ptr + RANK + c, mask=c < HIGH, other=0.0)
            floats = nibble_floats(tiles[j])
            acc += floats[0] * low_z[None, :] + floats[1] * high_z[None, :]
            total += low_z + high_z
        logits = tl.sum(acc, 1)
        ones = tl.sum(total, 0)
        if REST > 0:
            low_z = tl.load(hidden_ptr + last, mask=last < RANK, other=0.0)
            high_z = tl.load(hidden_ptr + RANK + last, mask=last < HIGH, other=0.0)
            floats = nibble_floats(rest)
            logits += tl.sum(floats[0] * low_z[None, :] + floats[1] * high_z[None, :], 1)
            ones += tl.sum(low_z + high_z, 0)
        logits = 16 * logits - 24 * ones
    else:
        for j in tl.static_range(STEPS):
            acc += to_float(tiles[j]) * tl.load(hidden_ptr + j * CHUNK + r)[None, :]
        logits = tl.sum(acc, 1)
        if REST > 0:
            z = tl.load(hidden_ptr + last, mask=last < RANK, other=0.0)
            logits += tl.sum(to_float(rest) * z[None, :], 1)
    if up_scale_ptr is not None:
        logits = logits * scale
    if bias_ptr is not None:
        logits += bias
    if logits_ptr is not None:
        tl.store(logits_ptr + rows, logits, mask=inside)
    store_chosen(logits, limit, state, rows, inside, pid, ids_ptr, counts_ptr, row_bits_ptr, BLOCK)


def predict_select(
    x: Tensor,
    predictor: Predictor,
    ln: LayerNormWeights | None = None,
    row_state: Tensor | None = None,
    normalised_out: Tensor | None = None,
    logits_out: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Run the predictor on x (B, d) in two kernels, and write the rows that it selects.

    row_state: (B,) int32 on the device, 0 = the row selects nothing (finished), 1 = by its logits, 2 = everything (a
    dense position). normalised_out: (B, d), receives LN(x), so that fc1 need not normalise again. logits_out: (B, n)
    fp32.
    pdl: launch as programmatic dependents of the kernels before. threshold and row_state must then be older than the
    launch before this call. Errors: shapes, dtypes, a CPU tensor.
    """
    batch, _ = check_input("x", x)
    weights, hidden = predictor.weights, predictor.hidden
    require(
        predictor.listed is None or lists(weights, batch, predictor.top_k),
        "a list without gaps is made of several rows, by a predictor of nibbles and a threshold",
    )
    check_tensor("hidden", hidden, (batch, weights.down.shape[0]), (torch.float32,), x)
    if batch == 1 and ln is not None:
        sums = weights.sums or norm_sums(weights.down, ln)
        predict_down(x, ln, weights.down, sums, hidden, weights.down_scale, weights.relu, normalised_out, pdl)
    else:
        if ln is not None:
            if normalised_out is None:
                wanted = torch.float16 if weights.down.dtype == torch.uint8 else x.dtype
                normalised_out = torch.empty_like(x, dtype=wanted)
            layer_norm(x, ln, normalised_out, pdl)
            x = normalised_out
        if weights.down.dtype == torch.uint8:
            _predict_select_nibbles(x, predictor, row_state, logits_out, pdl)
            return
        predict_down_batch(x, weights.down, hidden, weights.down_scale, weights.relu, pdl)
    select_rows(predictor, row_state, logits_out, pdl)


def lists(predictor: PredictorWeights, batch: int, top_k: int | None) -> bool:
    """Whether `predict_select` can leave a list without gaps: of several rows, by nibbles and a threshold."""
    return batch > 1 and predictor.down.dtype == torch.uint8 and top_k is None


def _predict_select_nibbles(
    x: Tensor, predictor: Predictor, row_state: Tensor | None, logits_out: Tensor | None, pdl: bool
) -> None:
    """`predict_select` of several rows, whose scratch holds as many bytes in another order."""
    weights, listed = predictor.weights, predictor.listed
    assert weights.down_scale is not None and weights.up_scale is not None
    batch, d = x.shape
    rank, n = len(weights.down), len(weights.up)
    require(takes_nibbles(batch, rank, d), f"{batch} rows of {d} columns, rank {rank}: {nibbles_batch.WANTED}")
    check_tensor("predictor.up", weights.up, (n, rank // 2), (torch.uint8,), x)
    check_second_half(predictor, row_state)
    nibbles_batch.check_block(predictor.selection.block)
    for name, tensor, size in zip(("ids", "count"), listed or (), (n, 1), strict=False):
        check_tensor(f"listed {name}", tensor, (size,), (torch.int32,), x)
    logits_out = _room_for_logits(logits_out, predictor.top_k, batch, n, x)
    planes = predictor.hidden.view(torch.float16).view(2, batch, rank)
    count = None if listed is None else listed[1]
    nibbles_batch.predict_down_nibbles(x, weights.down, weights.down_scale, planes, weights.relu, pdl, count)
    nibbles_batch.select_nibbles_batch(planes, predictor, row_state, logits_out, pdl)
    _select_top_k(predictor, logits_out, row_state)


def _select_top_k(predictor: Predictor, logits: Tensor | None, row_state: Tensor | None) -> None:
    if predictor.top_k is not None:
        assert logits is not None
        predictor.selection.set_mask(top_k_mask(logits, predictor.top_k, row_state))


def _room_for_logits(logits: Tensor | None, top_k: int | None, batch: int, n: int, like: Tensor) -> Tensor | None:
    """logits (B, n) fp32, checked. Fresh ones where top_k needs some."""
    if logits is not None:
        check_tensor("logits_out", logits, (batch, n), (torch.float32,), like)
    if top_k is not None:
        require(0 <= top_k <= n, f"top_k must be between 0 and {n}, got {top_k}")
        if logits is None:
            return torch.empty(batch, n, dtype=torch.float32, device=like.device)
    return logits


def rank_chunk(rank: int, size: int) -> int:
    """Columns of `up` a step, of `size` bytes each: a power of two, whole lines of memory where possible.

    One of 64 or more that divides the rank takes the fewest instructions, but 64 of one byte are half a line.
    """
    divisor = min(rank & -rank, 256)
    return divisor if size > 1 and divisor >= 64 else min(128, 1 << (rank.bit_length() - 1))


def check_second_half(predictor: Predictor, row_state: Tensor | None) -> tuple[int, int, int, int]:
    """(batch, rank, neurons, stored columns of `up`). ValueError where hidden (B, rank), `up`, its bias and scales, the
    threshold, and what receives the list do not fit together."""
    weights, hidden, out = predictor.weights, predictor.hidden, predictor.selection
    batch, rank = check_input("hidden", hidden)
    n = weights.up.shape[0]
    width = stored_width(weights.up, rank)
    check_tensor("predictor.up", weights.up, (n, width), FLOAT_TYPES + CODE_TYPES, hidden)
    require(out.n == n, f"the selection is made for {out.n} rows, the predictor has {n}")
    blocks = triton.cdiv(n, out.block)
    check_tensor("selection.ids", out.ids, (blocks * out.block,), (torch.int32,), hidden)
    check_tensor("selection.counts", out.counts, (blocks,), (torch.int32,), hidden)
    check_tensor("selection.row_bits", out.row_bits, (n,), (torch.int32,), hidden)
    check_tensor("threshold", predictor.threshold, (1,), (torch.float32,), hidden)
    if weights.bias is not None:
        check_tensor("predictor.bias", weights.bias, (n,), FLOAT_TYPES, hidden)
    if weights.up_scale is not None:
        check_tensor("predictor.up_scale", weights.up_scale, (n,), (torch.float32,), hidden)
    if row_state is not None:
        check_tensor("row_state", row_state, (batch,), (torch.int32,), hidden)
    return batch, rank, n, width


def select_rows(
    predictor: Predictor,
    row_state: Tensor | None = None,
    logits_out: Tensor | None = None,
    pdl: bool = False,
    warps: int | None = None,
) -> None:
    """The second half of `predict_select`: hidden (B, rank) fp32 times `up`, bias, threshold, list.

    Errors: shapes, dtypes, a CPU tensor.
    """
    weights, hidden, out = predictor.weights, predictor.hidden, predictor.selection
    batch, rank, n, width = check_second_half(predictor, row_state)
    several = batch > 1 and weights.up.dtype == torch.uint8
    require(not several, "nibbles of several rows are multiplied by `predict_select`, both halves together")
    logits_out = _room_for_logits(logits_out, predictor.top_k, batch, n, hidden)
    has_pdl, use_pdl = programmatic(hidden, pdl)
    grid = (out.counts.numel(),)
    common = (weights.up, weights.up_scale, weights.bias, predictor.threshold, 0.0, row_state)
    outputs = (out.ids, out.counts, out.row_bits, logits_out)
    if batch == 1:
        tile = out.block * width * weights.up.element_size()
        warps = warps or (8 if out.block > 32 and tile >= 32768 else 4)
        chunk = rank_chunk(width, weights.up.element_size())
        high = rank - width if weights.up.dtype == torch.uint8 else 0
        _select_kernel[grid](
            hidden, *common, *outputs, n, RANK=width, HIGH=high, CHUNK=chunk, BLOCK=out.block, PDL=has_pdl,
            num_warps=warps, launch_pdl=use_pdl,
        )  # fmt: skip
    else:
        select_batch_kernel[grid](
            hidden, *common, *outputs, n, batch, RANK=rank, BATCH=padded_batch(batch),
            CHUNK=min(64, max(16, next_power_of_two(rank))), BLOCK=out.block, DOT=dot_type(weights.up.dtype),
            PDL=has_pdl, num_warps=4, launch_pdl=use_pdl,
        )  # fmt: skip
    _select_top_k(predictor, logits_out, row_state)


def top_k_mask(logits: Tensor, top_k: int, row_state: Tensor | None = None) -> Tensor:
    """(B, n) bool: the top_k largest logits of each row, ties to the lower index, NaN never."""
    order = torch.sort(logits.nan_to_num(nan=float("-inf")), dim=1, descending=True, stable=True).indices
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order[:, :top_k], True) & ~logits.isnan()
    return mask_by_state(mask, row_state)
