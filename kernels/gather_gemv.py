# mypy: disable-error-code="assignment"
"""Rows of a matrix times a vector: y[b, i] = act(sum_j w[i, j] x[b, j] + bias[i]) for the selected rows i, or for all.

x (B, d), optionally normalised on the way in; w (n, d) row-major; sums in fp32. With a selection the non-zero results
come out as `LiveRows`, the list that `scatter_gemv` reads, or at their own place of a dense (B, n) output.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.batch_kernels import gather_dot_kernel
from kernels.launch import (
    FLOAT_TYPES,
    QUANTIZED_TYPES,
    GatherSettings,
    check_input,
    check_tensor,
    dot_type,
    gather_settings,
    list_products,
    list_slots_wide,
    load_vector,
    next_power_of_two,
    padded_batch,
    programmatic,
    require,
    wait_for_predecessor,
)
from kernels.layer_norm import LayerNormWeights, layer_norm, layer_norm_reference
from kernels.select import Selection


@dataclass(frozen=True)
class LiveRows:
    """Rows with a non-zero value in any batch row, as ranges: program p owns slots [p * slots, p * slots + counts[p]).

    ids: (programs * slots,) int32; values: (programs * slots, B) fp32; counts: (programs,) int32. Nothing beyond a
    count is defined.
    """

    n: int
    slots: int
    ids: Tensor
    values: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, n: int, batch: int, device: torch.device | str, programs: int = 528) -> "LiveRows":
        """Fresh buffers for up to n rows."""
        slots = -(-n // programs)
        ids = torch.zeros(programs * slots, dtype=torch.int32, device=device)
        values = torch.zeros(programs * slots, batch, dtype=torch.float32, device=device)
        return cls(n, slots, ids, values, torch.zeros(programs, dtype=torch.int32, device=device))

    def set_dense(self, h: Tensor) -> None:
        """Fill from h (B, n), for tests and references."""
        live = (h != 0).any(0)
        ids = live.nonzero().flatten()
        programs = self.counts.numel()
        bounds = [p * ids.numel() // programs for p in range(programs + 1)]
        for p in range(programs):
            mine = ids[bounds[p] : bounds[p + 1]]
            self.counts[p] = mine.numel()
            self.ids[p * self.slots : p * self.slots + mine.numel()] = mine.int()
            self.values[p * self.slots : p * self.slots + mine.numel()] = h[:, mine].T.float()

    def to_dense(self) -> Tensor:
        """(B, n) fp32 with zeros elsewhere. Synchronises with the host: for tests and references."""
        slots = torch.arange(self.slots, device=self.ids.device)
        valid = (slots[None, :] < self.counts[:, None]).flatten()
        dense = torch.zeros(self.values.shape[1], self.n, dtype=torch.float32, device=self.ids.device)
        dense[:, self.ids[valid].long()] = self.values[valid].T
        return dense


def gather_gemv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    activation: str = "none",
    ln: LayerNormWeights | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """(B, n) in plain torch with zeros where mask (B, n) is False; fp64 when x is fp64, else fp32."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    if ln is not None:
        x = layer_norm_reference(x, ln, wide)
    y = x.to(wide) @ weight.to(wide).T
    if scale is not None:
        y = y * scale.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    if activation == "relu":
        y = y.relu()
    return y if mask is None else torch.where(mask, y, torch.zeros_like(y))


@triton.jit(do_not_specialize=["n", "n_blocks", "slots"])
def _gather_kernel(
    x_ptr,
    ln_weight_ptr,
    ln_bias_ptr,
    normalised_ptr,
    w_ptr,
    bias_ptr,
    scale_ptr,
    ids_ptr,
    counts_ptr,
    out_ptr,
    live_ids_ptr,
    live_counts_ptr,
    n,
    n_blocks,
    slots,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CAP: tl.constexpr,
    SEL_BLOCKS: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    RELU: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One batch row. Program p takes an even, contiguous share of the list, ROWS rows at a time over the full width."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    STEPS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    MASKED: tl.constexpr = D % BLOCK != 0
    gammas = ()
    betas = ()
    if ln_weight_ptr is not None:
        for j in tl.static_range(STEPS):
            c = j * BLOCK + columns
            if MASKED:
                gammas = gammas + (tl.load(ln_weight_ptr + c, mask=c < D, other=0.0),)
                betas = betas + (tl.load(ln_bias_ptr + c, mask=c < D, other=0.0),)
            else:
                gammas = gammas + (tl.load(ln_weight_ptr + c),)
                betas = betas + (tl.load(ln_bias_ptr + c),)
    wait_for_predecessor(PDL)

    xs = ()
    if HELD:
        xs = load_vector(x_ptr, columns, D, BLOCK)
    if counts_ptr is not None:
        block_index = tl.arange(0, SEL_BLOCKS)
        counts = tl.load(counts_ptr + block_index, mask=block_index < n_blocks, other=0)
        running = tl.cumsum(counts, 0)
        total = tl.sum(counts, 0) * GROUP
        first = ((pid.to(tl.int64) * total) // programs).to(tl.int32)
        last = (((pid + 1).to(tl.int64) * total) // programs).to(tl.int32)
    else:
        first = ((pid.to(tl.int64) * n) // programs).to(tl.int32)
        last = (((pid + 1).to(tl.int64) * n) // programs).to(tl.int32)

    if ln_weight_ptr is not None:
        partial = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(STEPS):
            partial += xs[j].to(tl.float32)
        mean = tl.sum(partial, 0) / D
        partial = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(STEPS):
            centred = xs[j].to(tl.float32) - mean
            if MASKED:
                centred = tl.where(j * BLOCK + columns < D, centred, 0.0)
            partial += centred * centred
        rstd = tl.rsqrt(tl.sum(partial, 0) / D + eps)
        normed = ()
        for j in tl.static_range(STEPS):
            scaled = (xs[j].to(tl.float32) - mean) * rstd * gammas[j].to(tl.float32) + betas[j].to(tl.float32)
            if w_ptr.dtype.element_ty == tl.float16 or w_ptr.dtype.element_ty == tl.bfloat16:
                normed = normed + (scaled.to(w_ptr.dtype.element_ty),)
            else:
                normed = normed + (scaled,)
        xs = normed
        if normalised_ptr is not None:
            for j in tl.static_range(STEPS):
                c = j * BLOCK + columns
                if j % programs == pid:
                    tl.store(normalised_ptr + c, xs[j].to(normalised_ptr.dtype.element_ty), mask=c < D)

    written = 0
    for start in range(first, last, CAP):  # a share is searched for, and stored, CAP rows at once
        items = start + tl.arange(0, CAP)
        valid = items < last
        if ids_ptr is not None:
            slots_of = list_slots_wide(items // GROUP, running, SEL_BLOCK, SEL_BLOCKS)
            rows = tl.load(ids_ptr + slots_of, mask=valid, other=0) * GROUP + items % GROUP
        else:
            rows = items
        y = list_products(w_ptr, rows, tl.minimum(last - start, CAP), x_ptr, xs, columns, D, BLOCK, ROWS, HELD)
        if scale_ptr is not None:
            y = y * tl.load(scale_ptr + rows, mask=valid, other=0.0)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + rows, mask=valid, other=0.0).to(tl.float32)
        if RELU:
            y = tl.where(y <= 0, 0.0, y)  # keeps a NaN
        if live_ids_ptr is not None:
            live = valid & (y != 0)
            rank = written + tl.cumsum(live.to(tl.int32), 0) - 1
            tl.store(live_ids_ptr + pid * slots + rank, rows, mask=live)
            tl.store(out_ptr + pid * slots + rank, y, mask=live)
            written += tl.sum(live.to(tl.int32), 0)
        else:
            tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=valid)
    if live_ids_ptr is not None:
        tl.store(live_counts_ptr + pid, written)


def gather_gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    selection: Selection | None,
    activation: str,
    out: Tensor | LiveRows,
    ln: LayerNormWeights | None = None,
    scale: Tensor | None = None,
    rows_per_id: int = 1,
    normalised_out: Tensor | None = None,
    pdl: bool = False,
    settings: GatherSettings | None = None,
) -> None:
    """Selected rows of `weight` times x; selection None = all rows (a dense GEMV).

    x: (B, d) fp32/fp16/bf16, B <= 32; weight: (n, d) fp32/fp16/bf16, or int8/fp8 with scale (n,) fp32; bias: (n,).
    activation: "none" or "relu". ln normalises x first, in fp32, then rounds to the weight's dtype if that is fp16 or
    bf16 (for B > 1 with a kernel of its own, which needs normalised_out or allocates one).
    out: `LiveRows` (needs a selection), or (B, n) fp32/fp16/bf16; then rows that no batch row selected are left
    untouched. For B > 1 a row that batch row b did not select is 0 there. rows_per_id: every selected id stands for
    this many consecutive rows (a head). normalised_out: (B, d), receives LN(x). Sums in fp32, in an order that the
    settings fix.
    """
    batch, d = check_input("x", x)
    n = weight.shape[0]
    check_tensor("weight", weight, (n, d), FLOAT_TYPES + QUANTIZED_TYPES, x)
    require(activation in ("none", "relu"), f"activation must be 'none' or 'relu', got {activation!r}")
    quantized = weight.dtype in QUANTIZED_TYPES
    require(not quantized or scale is not None, f"a weight of {weight.dtype} needs a scale per row")
    if bias is not None:
        check_tensor("bias", bias, (n,), FLOAT_TYPES, x)
    if scale is not None:
        check_tensor("scale", scale, (n,), (torch.float32,), x)
    if ln is not None:
        check_tensor("LayerNorm weight", ln.weight, (d,), FLOAT_TYPES, x)
        check_tensor("LayerNorm bias", ln.bias, (d,), FLOAT_TYPES, x)
    if normalised_out is not None:
        require(ln is not None, "normalised_out needs a LayerNorm")
        check_tensor("normalised_out", normalised_out, (batch, d), FLOAT_TYPES, x)
    if selection is not None:
        require(
            selection.n * rows_per_id == n,
            f"a selection of {selection.n} ids of {rows_per_id} rows does not fit a weight of {n} rows",
        )
        check_tensor("selection.ids", selection.ids, tuple(selection.ids.shape), (torch.int32,), x)
    settings = settings or gather_settings(d, batch, selection is None, n)
    programs = min(settings.programs, n)
    if isinstance(out, LiveRows):
        require(selection is not None, "LiveRows are the output of a selection; a dense product needs a tensor")
        require(out.n == n, f"the live rows are made for {out.n} rows, the weight has {n}")
        require(out.values.shape[1] == batch, f"the live rows are made for batch {out.values.shape[1]}, got {batch}")
        check_tensor("out.values", out.values, tuple(out.values.shape), (torch.float32,), x)
        target, live_ids, live_counts, slots = out.values, out.ids, out.counts, out.slots
        programs = out.counts.numel()  # the list's ranges are the programs of this launch
    else:
        check_tensor("out", out, (batch, n), FLOAT_TYPES, x)
        target, live_ids, live_counts, slots = out, None, None, 0
    ids = counts = row_bits = None
    n_blocks, sel_block = 0, 1
    if selection is not None:
        ids, counts, row_bits = selection.ids, selection.counts, selection.row_bits
        n_blocks, sel_block = counts.numel(), selection.block
    has_pdl, use_pdl = programmatic(x, pdl)
    sel_blocks = next_power_of_two(max(n_blocks, 2))
    if batch == 1:
        _gather_kernel[(programs,)](
            x,
            None if ln is None else ln.weight,
            None if ln is None else ln.bias,
            normalised_out,
            weight,
            bias,
            scale,
            ids,
            counts,
            target,
            live_ids,
            live_counts,
            n,
            n_blocks,
            slots,
            0.0 if ln is None else ln.eps,
            D=d,
            BLOCK=settings.block,
            ROWS=settings.rows,
            CAP=32,
            SEL_BLOCKS=sel_blocks,
            SEL_BLOCK=sel_block,
            GROUP=rows_per_id,
            RELU=activation == "relu",
            HELD=settings.held or ln is not None,
            PDL=has_pdl,
            num_warps=settings.warps,
            launch_pdl=use_pdl,
        )
        return
    if ln is not None:
        if normalised_out is None:
            normalised_out = torch.empty(x.shape, dtype=x.dtype if quantized else weight.dtype, device=x.device)
        layer_norm(x, ln, normalised_out, pdl)
        x = normalised_out
    gather_dot_kernel[(programs,)](
        x,
        weight,
        bias,
        scale,
        ids,
        counts,
        row_bits,
        target,
        live_ids,
        live_counts,
        n,
        n_blocks,
        slots,
        batch,
        D=d,
        BATCH=padded_batch(batch),
        BLOCK=settings.block,
        ROWS=settings.rows,
        SEL_BLOCKS=sel_blocks,
        SEL_BLOCK=sel_block,
        GROUP=rows_per_id,
        RELU=activation == "relu",
        STAGES=settings.stages,
        DOT=dot_type(weight.dtype),
        PDL=has_pdl,
        num_warps=settings.warps,
        launch_pdl=use_pdl,
    )
