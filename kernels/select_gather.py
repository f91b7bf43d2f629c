# mypy: disable-error-code="assignment"
"""Select and fc1 in one kernel, for one batch row: `select_rows` followed by `gather_gemv(..., "relu", LiveRows)`.

    logits = up @ hidden + bias;  h[i] = relu(sum_j w[i, j] x[j] + b[i]) where logits[i] > threshold

A program owns BLOCK neurons: it computes their logits (its tile of `up` is static, so it is in registers before the
wait), ranks the selected ones in registers and reads their rows at once: no list is written and read back, and the
bytes of predictor and fc1 travel in one stage. The price is balance: a program reads as many rows as its neurons have
selected. Neurons whose activity is uneven along the index should be permuted once at load, which is exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gather_gemv import LiveRows, gather_gemv_reference
from kernels.launch import (
    FLOAT_TYPES,
    QUANTIZED_TYPES,
    SelectGatherSettings,
    check_input,
    check_tensor,
    list_products,
    load_vector,
    programmatic,
    require,
    select_gather_settings,
    wait_for_predecessor,
)
from kernels.select import PredictorWeights, Selection, rank_chunk


def select_gather_reference(
    hidden: Tensor,
    predictor: PredictorWeights,
    threshold: float | Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """h (1, n) with zeros where nothing is selected, in plain torch; fp64 when x is fp64."""
    up = predictor.up.to(hidden.dtype)
    if predictor.up_scale is not None:
        up = up * predictor.up_scale[:, None].to(hidden.dtype)
    logits = hidden @ up.T
    if predictor.bias is not None:
        logits = logits + predictor.bias.to(hidden.dtype)
    return gather_gemv_reference(x, weight, bias, logits > threshold, "relu")


@triton.jit(do_not_specialize=["n"])
def _select_gather_kernel(
    hidden_ptr,
    up_ptr,
    up_scale_ptr,
    up_bias_ptr,
    threshold_ptr,
    threshold,
    row_state_ptr,
    x_ptr,
    w_ptr,
    bias_ptr,
    live_ids_ptr,
    live_values_ptr,
    live_counts_ptr,
    sel_ids_ptr,
    sel_counts_ptr,
    row_bits_ptr,
    n,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    neuron = pid * BLOCK + tl.arange(0, BLOCK)
    inside = neuron < n
    r = tl.arange(0, CHUNK)
    RANK_STEPS: tl.constexpr = (RANK + CHUNK - 1) // CHUNK
    tiles = ()
    for j in tl.static_range(RANK_STEPS):
        tile_ptrs = up_ptr + neuron.to(tl.int64)[:, None] * RANK + (j * CHUNK + r)[None, :]
        tile_mask = inside[:, None]
        if RANK % CHUNK != 0:
            tile_mask = tile_mask & (j * CHUNK + r < RANK)[None, :]
        tiles = tiles + (tl.load(tile_ptrs, mask=tile_mask, other=0.0),)
    if up_scale_ptr is not None:
        up_scale = tl.load(up_scale_ptr + neuron, mask=inside, other=0.0)
    if up_bias_ptr is not None:
        up_bias = tl.load(up_bias_ptr + neuron, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)

    acc = tl.zeros((BLOCK, CHUNK), tl.float32)
    for j in tl.static_range(RANK_STEPS):
        if RANK % CHUNK != 0:
            z = tl.load(hidden_ptr + j * CHUNK + r, mask=j * CHUNK + r < RANK, other=0.0)
        else:
            z = tl.load(hidden_ptr + j * CHUNK + r)
        acc += tiles[j].to(tl.float32) * z[None, :]
    columns = tl.arange(0, COLUMNS)
    xs = ()
    if HELD:
        xs = load_vector(x_ptr, columns, D, COLUMNS)
    logits = tl.sum(acc, 1)
    if up_scale_ptr is not None:
        logits = logits * up_scale
    if up_bias_ptr is not None:
        logits += up_bias
    if threshold_ptr is not None:
        limit = tl.load(threshold_ptr)
    else:
        limit = threshold
    chosen = (logits > limit) & inside  # False for NaN
    if row_state_ptr is not None:
        state = tl.load(row_state_ptr)
        chosen = (chosen & (state > 0)) | (inside & (state == 2))
    bits = chosen.to(tl.int32)
    place = tl.cumsum(bits, 0) - 1
    count = tl.sum(bits, 0)
    if sel_ids_ptr is not None:
        tl.store(sel_ids_ptr + pid * BLOCK + place, neuron, mask=chosen)
        tl.store(sel_counts_ptr + pid, count)
        tl.store(row_bits_ptr + neuron, bits, mask=inside)

    slot = tl.arange(0, BLOCK)
    mine = (place[None, :] == slot[:, None]) & chosen[None, :]
    rows = tl.sum(tl.where(mine, neuron[None, :], 0), 1)  # the selected neurons at the front, in order
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, mask=slot < count, other=0.0).to(tl.float32)
    y = list_products(w_ptr, rows, count, x_ptr, xs, columns, D, COLUMNS, ROWS, HELD)
    if bias_ptr is not None:
        y += bias
    y = tl.where(y <= 0, 0.0, y)  # keeps a NaN
    live = (slot < count) & (y != 0)
    rank = tl.cumsum(live.to(tl.int32), 0) - 1
    tl.store(live_ids_ptr + pid * BLOCK + rank, rows, mask=live)
    tl.store(live_values_ptr + pid * BLOCK + rank, y, mask=live)
    tl.store(live_counts_ptr + pid, tl.sum(live.to(tl.int32), 0))


def select_gather(
    hidden: Tensor,
    predictor: PredictorWeights,
    threshold: float | Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: LiveRows,
    selection: Selection | None = None,
    row_state: Tensor | None = None,
    pdl: bool = False,
    settings: SelectGatherSettings | None = None,
) -> None:
    """hidden (1, rank) fp32, x (1, d), weight (n, d) fp32/fp16/bf16 -> out, the list of live rows; batch 1 only.

    `out` must be made with `select_gather_rows`. selection: also receives the selected set (its block is that of the
    settings), for study; it costs three stores a program. threshold and row_state as in `predict_select`.
    """
    batch, rank = check_input("hidden", hidden)
    require(batch == 1, f"select and gather in one kernel take batch 1, got {batch}: use select_rows and gather_gemv")
    check_tensor("hidden", hidden, (1, rank), (torch.float32,), hidden)
    n, d = weight.shape
    settings = settings or select_gather_settings(d)
    check_tensor("x", x, (1, d), FLOAT_TYPES, hidden)
    check_tensor("weight", weight, (n, d), FLOAT_TYPES, hidden)
    check_tensor("predictor.up", predictor.up, (n, rank), FLOAT_TYPES + QUANTIZED_TYPES, hidden)
    for name, tensor, dtypes in (
        ("bias", bias, FLOAT_TYPES),
        ("predictor.bias", predictor.bias, FLOAT_TYPES),
        ("predictor.up_scale", predictor.up_scale, (torch.float32,)),
    ):
        if tensor is not None:
            check_tensor(name, tensor, (n,), dtypes, hidden)
    if row_state is not None:
        check_tensor("row_state", row_state, (1,), (torch.int32,), hidden)
    if isinstance(threshold, Tensor):
        check_tensor("threshold", threshold, (1,), (torch.float32,), hidden)
    programs = -(-n // settings.block)
    require(
        out.n == n and out.counts.numel() == programs and out.slots == settings.block,
        f"the live rows are {out.counts.numel()} ranges of {out.slots}, not {programs} of {settings.block}",
    )
    if selection is not None:
        require(
            selection.n == n and selection.block == settings.block,
            f"the selection has blocks of {selection.block}, this kernel of {settings.block}",
        )
    has_pdl, use_pdl = programmatic(hidden, pdl)
    _select_gather_kernel[(programs,)](
        hidden,
        predictor.up,
        predictor.up_scale,
        predictor.bias,
        threshold if isinstance(threshold, Tensor) else None,
        0.0 if isinstance(threshold, Tensor) else float(threshold),
        row_state,
        x,
        weight,
        bias,
        out.ids,
        out.values,
        out.counts,
        None if selection is None else selection.ids,
        None if selection is None else selection.counts,
        None if selection is None else selection.row_bits,
        n,
        RANK=rank,
        CHUNK=rank_chunk(rank),
        BLOCK=settings.block,
        D=d,
        COLUMNS=settings.columns,
        ROWS=settings.rows,
        HELD=settings.held,
        PDL=has_pdl,
        num_warps=settings.warps,
        launch_pdl=use_pdl,
    )


def select_gather_rows(n: int, d: int, device: torch.device | str, block: int | None = None) -> LiveRows:
    """The output that `select_gather` wants for n neurons of width d."""
    block = block or select_gather_settings(d).block
    programs = -(-n // block)
    rows = LiveRows.empty(n, 1, device, programs)
    ids, values = rows.ids.new_zeros(programs * block), rows.values.new_zeros(programs * block, 1)
    return LiveRows(n, block, ids, values, rows.counts)
