# mypy: disable-error-code="assignment"
"""Predict and select: logits = up @ act(down @ x) + bias; a row of weights is selected where logit > threshold.

x (B, d); down (rank, d); up (n, rank); bias (n). A NaN logit is never selected. The result is a list of ids on the
device, made without sorting or a host synchronisation: block p owns rows [p * block, (p + 1) * block), writes
its selected ids in ascending order to slots [p * block, p * block + counts[p]) and its count. `sparse_fc2.pack` closes
the gaps. For B > 1 the list is the union of the batch's sets; bit b of row_bits[i] says that row b selected i.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.checks import FLOAT_TYPES, check_input, check_tensor, require
from kernels.common.launch import dot_type, next_power_of_two, padded_batch, programmatic, wait_for_predecessor
from kernels.common.layer_norm import LayerNormWeights, layer_norm, layer_norm_reference
from kernels.common.row_state import mask_by_state
from kernels.mlp import nibbles_batch
from kernels.mlp.codes import CODE_TYPES, nibble_floats, stored_width, to_float, unscaled
from kernels.mlp.predict import norm_sums, predict_down
from kernels.mlp.predict_batch import predict_down_batch
from kernels.mlp.select_batch import select_batch_kernel, store_chosen


@dataclass(frozen=True)
class Selection:
    """Selected rows of n, as block-local ranges on the device.

    ids: (n_blocks * block,) int32, slots beyond a block's count are undefined; counts: (n_blocks,) int32;
    row_bits: (n,) int32, bit b = selected by batch row b (defined for every i, also unselected ones).
    """

    n: int
    block: int
    ids: Tensor
    counts: Tensor
    row_bits: Tensor

    @classmethod
    def empty(cls, n: int, device: torch.device | str, block: int = 64) -> "Selection":
        """An empty selection of n rows with fresh buffers."""
        n_blocks = -(-n // block)
        ids = torch.zeros(n_blocks * block, dtype=torch.int32, device=device)
        counts = torch.zeros(n_blocks, dtype=torch.int32, device=device)
        return cls(n, block, ids, counts, torch.zeros(n, dtype=torch.int32, device=device))

    @classmethod
    def from_mask(cls, mask: Tensor, block: int = 64) -> "Selection":
        """mask: (B, n) bool with B <= 32."""
        selection = cls.empty(mask.shape[1], mask.device, block)
        selection.set_mask(mask)
        return selection

    def set_mask(self, mask: Tensor) -> None:
        """Fill from mask (B, n) bool; torch operations without a host synchronisation, so it can be captured."""
        batch, n = mask.shape
        if n != self.n:
            raise ValueError(f"the mask has {n} columns, the selection {self.n} rows")
        if batch > 32:
            raise ValueError(f"a selection holds at most 32 batch rows, got {batch}")
        shifts = torch.arange(batch, device=mask.device, dtype=torch.int64)
        bits = (mask.to(torch.int64) << shifts[:, None]).sum(0)
        self.row_bits.copy_(torch.where(bits >= 2**31, bits - 2**32, bits))
        n_blocks = self.counts.numel()
        wide = torch.zeros(n_blocks * self.block, dtype=torch.bool, device=mask.device)
        wide[:n] = mask.any(0)
        blocks = wide.view(n_blocks, self.block)
        self.counts.copy_(blocks.sum(1))
        # A stable sort of "not selected" moves the selected columns to the front in ascending order.
        order = torch.sort((~blocks).to(torch.int8), dim=1, stable=True).indices
        first = torch.arange(n_blocks, device=mask.device)[:, None] * self.block
        self.ids.copy_((order + first).flatten())

    def indices(self) -> Tensor:
        """The selected rows, (count,) int64 ascending. Synchronises with the host: for tests and references."""
        slots = torch.arange(self.block, device=self.ids.device)
        valid = slots[None, :] < self.counts[:, None]
        return self.ids.view(-1, self.block)[valid].long()

    def to_mask(self, batch: int) -> Tensor:
        """(B, n) bool, from row_bits."""
        shifts = torch.arange(batch, device=self.row_bits.device)
        return ((self.row_bits.long()[None, :] >> shifts[:, None]) & 1).bool()


@dataclass(frozen=True)
class PredictorWeights:
    """down (rank, d), up (n, rank), bias (n) or None; in fp32, fp16, bf16, or int8 / fp8 e4m3 with fp32 row scales.

    For up to eight rows also as nibbles, uint8 (rank, ceil(d / 2)) and (n, ceil(rank / 2)), see `codes`; for several
    rows of fp16 and of widths that `nibbles_batch.takes`.

    sums: of down with the LayerNorm in front of it, where that is known (`with_norm`): a shorter kernel for one row.
    """

    down: Tensor
    up: Tensor
    bias: Tensor | None = None
    down_scale: Tensor | None = None
    up_scale: Tensor | None = None
    relu: bool = False
    sums: tuple[Tensor, Tensor] | None = None

    def with_norm(self, ln: LayerNormWeights) -> "PredictorWeights":
        """For inputs that `ln` normalises: `predict_select` must then be called with this LayerNorm."""
        return replace(self, sums=norm_sums(self.down, ln))

    def quantized(self, dtype: torch.dtype) -> "PredictorWeights":
        """A copy in int8 or float8_e4m3fn with one scale per row."""
        down, down_scale = quantize_rows(self.down, dtype)
        up, up_scale = quantize_rows(self.up, dtype)
        return PredictorWeights(down, up, self.bias, down_scale, up_scale, self.relu)


def quantize_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight (n, d) -> (n, d) int8 or float8_e4m3fn, scales (n,) fp32, weight ~ quantized * scale[:, None]."""
    limit = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}.get(dtype)
    if limit is None:
        raise ValueError(f"rows are quantised to int8 or float8_e4m3fn, not {dtype}")
    largest = weight.float().abs().amax(1)
    scale = torch.where(largest > 0, largest / limit, torch.ones_like(largest))
    scaled = weight.float() / scale[:, None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def predict_reference(x: Tensor, predictor: PredictorWeights, ln: LayerNormWeights | None = None) -> Tensor:
    """Logits (B, n) in plain torch; fp64 when x is fp64."""
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

    Columns come in chunks of a power of two, and what is left of them as a rest. RANK: elements of a row of `up`; where
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
    predictor: PredictorWeights,
    threshold: float | Tensor,
    out: Selection,
    ln: LayerNormWeights | None = None,
    row_state: Tensor | None = None,
    top_k: int | None = None,
    hidden: Tensor | None = None,
    normalised_out: Tensor | None = None,
    logits_out: Tensor | None = None,
    pdl: bool = False,
    listed: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Run the predictor on x (B, d) and write the selected rows to `out`; two kernels.

    threshold: a number, or a (1,) fp32 tensor on the device. row_state: (B,) int32 on the device, 0 = the row selects
    nothing (finished), 1 = by its logits, 2 = everything (a dense position). hidden: (B, rank) fp32 scratch.
    normalised_out: (B, d), receives LN(x), so that fc1 need not normalise again. logits_out: (B, n) fp32.
    top_k selects exactly that many per row (ties to the lower index) by a sort: exact, and slow. listed: ids (n) and
    count (1) int32, receive the list without gaps as well, in no particular order (`lists`).
    pdl: launch as programmatic dependents of the kernels before; threshold and row_state must then be older than the
    launch before this call. Errors: shapes, dtypes, a CPU tensor.
    """
    batch, d = check_input("x", x)
    rank = predictor.down.shape[0]
    require(
        listed is None or lists(predictor, batch, top_k),
        "a list without gaps is made of several rows, by a predictor of nibbles and a threshold",
    )
    if hidden is None:
        hidden = torch.empty(batch, rank, dtype=torch.float32, device=x.device)
    check_tensor("hidden", hidden, (batch, rank), (torch.float32,), x)
    if batch == 1 and ln is not None:
        sums = predictor.sums or norm_sums(predictor.down, ln)
        predict_down(x, ln, predictor.down, sums, hidden, predictor.down_scale, predictor.relu, normalised_out, pdl)
    else:
        if ln is not None:
            if normalised_out is None:
                wanted = torch.float16 if predictor.down.dtype == torch.uint8 else x.dtype
                normalised_out = torch.empty_like(x, dtype=wanted)
            layer_norm(x, ln, normalised_out, pdl)
            x = normalised_out
        if predictor.down.dtype == torch.uint8:
            _predict_select_nibbles(x, predictor, threshold, out, row_state, top_k, hidden, logits_out, pdl, listed)
            return
        predict_down_batch(x, predictor.down, hidden, predictor.down_scale, predictor.relu, pdl)
    select_rows(hidden, predictor, threshold, out, row_state, top_k, logits_out, pdl)


def lists(predictor: PredictorWeights, batch: int, top_k: int | None) -> bool:
    """Whether `predict_select` can leave a list without gaps: of several rows, by nibbles and a threshold."""
    return batch > 1 and predictor.down.dtype == torch.uint8 and top_k is None


def _predict_select_nibbles(
    x: Tensor,
    predictor: PredictorWeights,
    threshold: float | Tensor,
    out: Selection,
    row_state: Tensor | None,
    top_k: int | None,
    hidden: Tensor,
    logits_out: Tensor | None,
    pdl: bool,
    listed: tuple[Tensor, Tensor] | None,
) -> None:
    """`predict_select` of several rows, whose scratch holds as many bytes in another order."""
    assert predictor.down_scale is not None and predictor.up_scale is not None
    batch, d = x.shape
    rank, n = len(predictor.down), len(predictor.up)
    require(nibbles_batch.takes(batch, rank, d), f"{batch} rows of {d} columns, rank {rank}: {nibbles_batch.WANTED}")
    check_tensor("predictor.up", predictor.up, (n, rank // 2), (torch.uint8,), x)
    check_second_half(hidden, predictor, out, row_state)
    nibbles_batch.check_block(out.block)
    for name, tensor, size in zip(("ids", "count"), listed or (), (n, 1), strict=False):
        check_tensor(f"listed {name}", tensor, (size,), (torch.int32,), x)
    logits_out = _room_for_logits(logits_out, top_k, batch, n, x)
    if isinstance(threshold, Tensor):
        check_tensor("threshold", threshold, (1,), (torch.float32,), x)
    planes = hidden.view(torch.float16).view(2, batch, rank)
    count = None if listed is None else listed[1]
    nibbles_batch.predict_down_nibbles(x, predictor.down, predictor.down_scale, planes, predictor.relu, pdl, count)
    nibbles_batch.select_nibbles_batch(
        planes, predictor.up, predictor.up_scale, predictor.bias, threshold, row_state,
        (out.ids, out.counts, out.row_bits), out.block, logits_out, listed, pdl,
    )  # fmt: skip
    if top_k is not None:
        assert logits_out is not None
        out.set_mask(top_k_mask(logits_out, top_k, row_state))


def _room_for_logits(logits: Tensor | None, top_k: int | None, batch: int, n: int, like: Tensor) -> Tensor | None:
    """logits (B, n) fp32, checked; fresh ones where top_k needs some."""
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


def check_second_half(
    hidden: Tensor, predictor: PredictorWeights, out: Selection, row_state: Tensor | None
) -> tuple[int, int, int, int]:
    """(batch, rank, neurons, stored columns of `up`). ValueError where hidden (B, rank), `up`, its bias and scales, and
    what receives the list do not fit together."""
    batch, rank = check_input("hidden", hidden)
    n = predictor.up.shape[0]
    width = stored_width(predictor.up, rank)
    check_tensor("predictor.up", predictor.up, (n, width), FLOAT_TYPES + CODE_TYPES, hidden)
    require(out.n == n, f"the selection is made for {out.n} rows, the predictor has {n}")
    blocks = triton.cdiv(n, out.block)
    check_tensor("selection.ids", out.ids, (blocks * out.block,), (torch.int32,), hidden)
    check_tensor("selection.counts", out.counts, (blocks,), (torch.int32,), hidden)
    check_tensor("selection.row_bits", out.row_bits, (n,), (torch.int32,), hidden)
    if predictor.bias is not None:
        check_tensor("predictor.bias", predictor.bias, (n,), FLOAT_TYPES, hidden)
    if predictor.up_scale is not None:
        check_tensor("predictor.up_scale", predictor.up_scale, (n,), (torch.float32,), hidden)
    if row_state is not None:
        check_tensor("row_state", row_state, (batch,), (torch.int32,), hidden)
    return batch, rank, n, width


def select_rows(
    hidden: Tensor,
    predictor: PredictorWeights,
    threshold: float | Tensor,
    out: Selection,
    row_state: Tensor | None = None,
    top_k: int | None = None,
    logits_out: Tensor | None = None,
    pdl: bool = False,
    warps: int | None = None,
) -> None:
    """The second half of `predict_select`: hidden (B, rank) fp32 times `up`, bias, threshold, list.

    Errors: shapes, dtypes, a CPU tensor.
    """
    batch, rank, n, width = check_second_half(hidden, predictor, out, row_state)
    several = batch > 1 and predictor.up.dtype == torch.uint8
    require(not several, "nibbles of several rows are multiplied by `predict_select`, both halves together")
    logits_out = _room_for_logits(logits_out, top_k, batch, n, hidden)
    if isinstance(threshold, Tensor):
        check_tensor("threshold", threshold, (1,), (torch.float32,), hidden)
    threshold_ptr = threshold if isinstance(threshold, Tensor) else None
    value = 0.0 if isinstance(threshold, Tensor) else float(threshold)
    has_pdl, use_pdl = programmatic(hidden, pdl)
    grid = (out.counts.numel(),)
    common = (predictor.up, predictor.up_scale, predictor.bias, threshold_ptr, value, row_state)
    outputs = (out.ids, out.counts, out.row_bits, logits_out)
    if batch == 1:
        tile = out.block * width * predictor.up.element_size()
        warps = warps or (8 if out.block > 32 and tile >= 32768 else 4)
        chunk = rank_chunk(width, predictor.up.element_size())
        high = rank - width if predictor.up.dtype == torch.uint8 else 0
        _select_kernel[grid](
            hidden, *common, *outputs, n, RANK=width, HIGH=high, CHUNK=chunk, BLOCK=out.block, PDL=has_pdl,
            num_warps=warps, launch_pdl=use_pdl,
        )  # fmt: skip
    else:
        select_batch_kernel[grid](
            hidden, *common, *outputs, n, batch, RANK=rank, BATCH=padded_batch(batch),
            CHUNK=min(64, max(16, next_power_of_two(rank))), BLOCK=out.block, DOT=dot_type(predictor.up.dtype),
            PDL=has_pdl, num_warps=4, launch_pdl=use_pdl,
        )  # fmt: skip
    if top_k is not None:
        assert logits_out is not None
        out.set_mask(top_k_mask(logits_out, top_k, row_state))


def top_k_mask(logits: Tensor, top_k: int, row_state: Tensor | None = None) -> Tensor:
    """(B, n) bool: the top_k largest logits of each row, ties to the lower index, NaN never."""
    order = torch.sort(logits.nan_to_num(nan=float("-inf")), dim=1, descending=True, stable=True).indices
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order[:, :top_k], True) & ~logits.isnan()
    return mask_by_state(mask, row_state)
