"""Predictors as far as one matrix goes: rows times a normalised input, the LayerNorm folded in.

    n = LayerNorm(x),  so  w[r] n = rstd (sum_j w[r, j] g[j] x[j] - mean gains[r]) + shifts[r]
    hidden[r] = act(scale[r] w[r] n)                               the first half of an MLP's predictor, see `select`
    head r is selected where  w[r] n + bias[r] > threshold         a head's predictor, which has no second half

x (B, d), w (rank, d), sums in fp32. gains and shifts are sums of a row with the LayerNorm's gain g and shift, which
depend on weights alone (`norm_sums`). A program has its rows in registers before it waits. Then one pass over x gives
products, mean and variance together. A program also normalises its slice of x. That is kept for up, or as the
attention's input, from which skipped K/V are computed later. Heads are selected for several rows of the batch, one
after the other.

Of nibbles, what their floats have too much comes off a sum:

    sum_j code[j] z[j] = 16 sum_j (1 + u[j] / 16) z[j] - 24 sum_j z[j]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_input, check_shape, check_tensor, require
from dejavu_train.kernels.common.launch import (
    as_dependent,
    constant_fields,
    load_vector,
    n_sms,
    programmatic,
    start_dependents_and_wait,
    sums_together,
    wait_for_predecessor,
)
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference, row_moments
from dejavu_train.kernels.common.row_state import by_state, mask_by_state
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.formats.codes import nibble_floats, to_float
from dejavu_train.kernels.stages.predict_rows import predict_rows_reference
from dejavu_train.kernels.stages.predictor import HeadSite, Predictor, check_down, down_reference, norm_sums

MAX_ROWS = 7


@dataclass(frozen=True)
class PredictSettings(Settings, stage="predict"):
    """rows: of a program, at most MAX_ROWS. block: columns a piece of a row. warps."""

    rows: int
    block: int
    warps: int

    @classmethod
    def of(cls, d: int, rank: int, device: torch.device) -> "PredictSettings":
        """A program a multiprocessor, where as many rows as were found are enough. No piece wider than a row."""
        found = cls.find("float", device, d=d)
        rows = min(found.rows, triton.cdiv(rank, n_sms(device)))
        return cls(rows, min(found.block, max(16, triton.next_power_of_2(d))), found.warps)


class NormOutput(NamedTuple):
    """Where n of row b goes: normalised (B, capacity, d) or None, at its position (B), or at zero without any."""

    normalised: Any
    position: Any = None
    capacity: Any = 1


class HiddenRows(NamedTuple):
    """The first half of an MLP's predictor: weight (rank, d), scale (rank) or None, gains, shifts and hidden (rank)."""

    weight: Any
    scale: Any
    gains: Any
    shifts: Any
    hidden: Any


class HeadRows(NamedTuple):
    """A head's predictor: weight (h, d), gains, shifts and bias (h), threshold (1), row_state (B), row_bits (h)."""

    weight: Any
    gains: Any
    shifts: Any
    bias: Any
    threshold: Any
    row_state: Any
    row_bits: Any


class RowSizes(NamedTuple):
    """Constants of a program. d: columns. block: of a piece of a row. rows: of a program. slice: columns of n that it
    keeps. batch: rows of the batch. relu: of hidden."""

    d: int
    block: int
    rows: int
    slice: int
    batch: int = 1
    relu: bool = False


def predict_reference(
    x: Tensor, ln: LayerNormWeights, predictor: Predictor, normalised_out: Tensor | None = None,
) -> None:  # fmt: skip
    """Plain torch, in place. What is kept as well is rounded before it is multiplied."""
    n = layer_norm_reference(x, ln, torch.float32 if normalised_out is None else normalised_out.dtype)
    if normalised_out is not None:
        normalised_out.copy_(n)
    predict_rows_reference(n, predictor)


def site_predict_reference(
    x: Tensor, site: HeadSite, position: Tensor, attn_in: Tensor, mlp: Predictor | None = None
) -> None:
    """Plain torch, in place: writes `attn_in` at `position`, the selection where there are rows, and mlp.hidden."""
    heads, n = site.predictor, layer_norm_reference(x, site.ln, attn_in.dtype)
    attn_in[torch.arange(len(x), device=x.device), position.long()] = n
    if heads.rows is not None:
        assert heads.bias is not None and heads.threshold is not None
        logits = n.float() @ heads.rows.float().T + heads.bias
        heads.selection.set_mask(mask_by_state(logits > heads.threshold, site.row_state))
    if mlp is not None:
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        mlp.hidden.copy_(down_reference(layer_norm_reference(x, site.ln, wide), mlp.weights))


@triton.jit
def row_values(ptr, first, n_rows, ROWS: tl.constexpr):
    """One scalar a row. Of rows beyond the end the last one's."""
    values = ()
    for r in tl.static_range(ROWS):
        values = values + (tl.load(ptr + tl.minimum(first + r, n_rows - 1)),)
    return values


@triton.jit
def spread_numbers(tile):
    return (to_float(tile),)


@triton.jit
def read_halves(x, columns, D: tl.constexpr, BLOCK: tl.constexpr):
    """A vector in pieces, as rows of nibbles meet them: of its first half and of its second one in turn."""
    HALF: tl.constexpr = (D + 1) // 2
    low = load_vector(x, columns, HALF, BLOCK)
    pieces = ()
    for j in tl.static_range((HALF + BLOCK - 1) // BLOCK):
        c = j * BLOCK + columns
        pieces = pieces + (low[j], tl.load(x + HALF + c, mask=c < D - HALF, other=0.0))
    return pieces


@triton.jit
def _products(tiles, xs, gains, SPREAD: tl.constexpr, EACH: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr):
    """Sums of rows times gain times x, of x and of its squares (ROWS + 2 scalars) from pieces in registers."""
    scaled = ()
    for k in tl.static_range(EACH * STEPS):
        part = xs[k].to(tl.float32)
        scaled = scaled + (part * gains[k].to(tl.float32),)
        if k == 0:
            total = part
            squares = part * part
            both = scaled[0]
        else:
            total += part
            squares += part * part
            both += scaled[k]
    products = ()
    for r in tl.static_range(ROWS):
        for j in tl.static_range(STEPS):
            floats = SPREAD(tiles[r * STEPS + j])
            if j == 0:
                product = floats[0] * scaled[0]
            else:
                product += floats[0] * scaled[EACH * j]
            if EACH == 2:
                product += floats[1] * scaled[2 * j + 1]
        products = products + (product,)
    if EACH == 1:
        sums = sums_together(products + (total, squares), ROWS + 2)
    else:
        found = sums_together(products + (total, squares, both), ROWS + 3)
        sums = ()
        for r in tl.static_range(ROWS):
            sums = sums + (16 * found[r] - 24 * found[ROWS + 2],)
        sums = sums + (found[ROWS], found[ROWS + 1])
    return sums


@triton.jit
def hidden_facts(rows, first, n_rows, S: tl.constexpr):
    """Facts that `store_hidden` needs beside products, read before the wait."""
    facts = ()
    if rows.scale is not None:
        facts = row_values(rows.scale, first, n_rows, S.rows)
    return facts


@triton.jit
def store_hidden(values, scales, rows, first, n_rows, S: tl.constexpr):
    """hidden of the rows from `first` on. Products times their scales, where they have some."""
    for r in tl.static_range(S.rows):
        value = values[r]
        if rows.scale is not None:
            value = value * scales[r]
        if S.relu:
            value = tl.where(value <= 0, 0.0, value)  # keeps a NaN
        tl.store(rows.hidden + first + r, value, mask=first + r < n_rows)


@triton.jit
def head_facts(rows, first, n_rows, S: tl.constexpr):
    """Facts that `store_heads` needs: offsets, states of the batch's rows, and the threshold."""
    facts = row_values(rows.bias, first, n_rows, S.rows)
    for b in tl.static_range(S.batch):
        facts = facts + (tl.load(rows.row_state + b),)
    return facts + (tl.load(rows.threshold),)


@triton.jit
def store_heads(values, facts, rows, first, n_rows, S: tl.constexpr):
    """Bits of the heads from `first` on."""
    limit = facts[S.rows + S.batch]
    for r in tl.static_range(S.rows):
        bits = 0
        for b in tl.static_range(S.batch):
            chosen = by_state((values[b * S.rows + r] + facts[r]) > limit, facts[S.rows + b])
            bits |= chosen.to(tl.int32) << b
        tl.store(rows.row_bits + first + r, bits, mask=first + r < n_rows)


@triton.jit
def predicted_rows(
    pid, before, x, norm, rows, n_rows, kept, FACTS: tl.constexpr, STORE: tl.constexpr, WAIT: tl.constexpr,
    S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's whole work, its wait included: its rows times LayerNorm(x), and its slice of that kept.

    before: programs of the grid that have rows of another matrix. rows: `HiddenRows` or `HeadRows`. FACTS, STORE: what
    becomes of the products.
    """
    STORED: tl.constexpr = tl.float32 if rows.weight is None else rows.weight.dtype.element_ty
    NIBBLES: tl.constexpr = STORED == tl.uint8
    READ: tl.constexpr = read_halves if NIBBLES else load_vector
    SPREAD: tl.constexpr = nibble_floats if NIBBLES else spread_numbers
    WIDTH: tl.constexpr = (S.d + 1) // 2 if NIBBLES else S.d  # elements of a row
    STEPS: tl.constexpr = (WIDTH + S.block - 1) // S.block
    first = (pid - before) * S.rows
    columns = tl.arange(0, S.block)
    facts = FACTS(rows, first, n_rows, S)
    tiles = ()
    for r in tl.static_range(S.rows):
        at = rows.weight + tl.minimum(first + r, n_rows - 1).to(tl.int64) * WIDTH
        tiles = tiles + load_vector(at, columns, WIDTH, S.block)
    gain = READ(norm.gain, columns, S.d, S.block)
    gains = row_values(rows.gains, first, n_rows, S.rows)
    shifts = row_values(rows.shifts, first, n_rows, S.rows)
    own = pid * S.slice + tl.arange(0, S.slice)
    places = ()
    if kept.normalised is not None:
        own_gain = tl.load(norm.gain + own, mask=own < S.d, other=0.0).to(tl.float32)
        own_shift = 0.0
        if norm.shift is not None:
            own_shift = tl.load(norm.shift + own, mask=own < S.d, other=0.0).to(tl.float32)
        for b in tl.static_range(S.batch):
            if kept.position is None:
                places = places + (b,)
            else:  # what the step before left: older than the launch before this one
                places = places + ((b * kept.capacity + tl.load(kept.position + b)).to(tl.int64),)
    WAIT(PDL)
    values = ()
    for b in tl.static_range(S.batch):
        xs = READ(x + b * S.d, columns, S.d, S.block)
        if kept.normalised is not None:
            own_x = tl.load(x + b * S.d + own, mask=own < S.d, other=0.0).to(tl.float32)
        sums = _products(tiles, xs, gain, SPREAD, 2 if NIBBLES else 1, STEPS, S.rows)
        mean, rstd = row_moments(sums[S.rows], sums[S.rows + 1], norm, S.d)
        if kept.normalised is not None:
            value = (own_x - mean) * rstd * own_gain + own_shift
            to = kept.normalised + places[b] * S.d + own
            tl.store(to, value.to(kept.normalised.dtype.element_ty), mask=own < S.d)
        for r in tl.static_range(S.rows):
            values = values + (rstd * (sums[r] - mean * gains[r]) + shifts[r],)
    STORE(values, facts, rows, first, n_rows, S)


@triton.jit(do_not_specialize=["n_heads", "n_rows"])
def _predict_kernel(
    x, norm, heads, n_heads, down, n_rows, kept, WAIT: tl.constexpr, HEAD_PROGRAMS: tl.constexpr, BOTH: tl.constexpr,
    S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """heads, down: `HeadRows` and `HiddenRows`, BOTH or one of them. The first programs have rows of heads."""
    pid = tl.program_id(0)
    if HEAD_PROGRAMS == 0:
        predicted_rows(pid, 0, x, norm, down, n_rows, kept, hidden_facts, store_hidden, WAIT, S, PDL)
    elif not BOTH:
        predicted_rows(pid, 0, x, norm, heads, n_heads, kept, head_facts, store_heads, WAIT, S, PDL)
    elif pid < HEAD_PROGRAMS:
        predicted_rows(pid, 0, x, norm, heads, n_heads, kept, head_facts, store_heads, WAIT, S, PDL)
    else:
        predicted_rows(pid, HEAD_PROGRAMS, x, norm, down, n_rows, kept, hidden_facts, store_hidden, WAIT, S, PDL)


def row_launch(x: Tensor, n_rows: Sequence[int], nibbles: bool, relu: bool) -> tuple[int, RowSizes, int]:
    """(programs, constants, warps) of `predicted_rows` for x (B, d), over matrices of so many rows each."""
    batch, d = x.shape
    settings = PredictSettings.of((d + 1) // 2 if nibbles else d, sum(n_rows), x.device)
    require(settings.rows <= MAX_ROWS, f"a program takes up to {MAX_ROWS} rows, not {settings.rows}")
    programs = sum(triton.cdiv(rows, settings.rows) for rows in n_rows if rows) or n_sms(x.device)
    own = triton.next_power_of_2(-(-d // programs))  # columns of n that each stores
    warps = min(settings.warps, max(1, settings.block // 32))  # no more threads than columns
    return programs, RowSizes(d, settings.block, settings.rows if any(n_rows) else 0, own, batch, relu), warps


def _hidden_rows(predictor: Predictor, ln: LayerNormWeights) -> HiddenRows:
    own = predictor.weights
    sums = own.sums or norm_sums(own.down, ln)
    for total in sums:
        check_tensor("sums", total, own.down.shape[:1], (torch.float32,), own.down)
    return HiddenRows(own.down, own.down_scale, *sums, predictor.hidden)


def head_rows(site: HeadSite, x: Tensor) -> HeadRows | None:
    """Arguments for a predictor of heads that reads x (B, d), checked. None: it selects nothing."""
    heads = site.predictor
    if heads.rows is None:
        return None
    assert heads.bias is not None and heads.threshold is not None
    n_heads = heads.selection.n
    check_shape("rows of heads", heads.rows, n_heads, x.shape[1])
    check_tensor("bias of heads", heads.bias, (n_heads,), (torch.float32,), x)
    check_tensor("threshold of heads", heads.threshold, (1,), (torch.float32,), x)
    require(heads.selection.block == 1, "a selection of heads has one of them a block")
    sums = heads.sums or norm_sums(heads.rows, site.ln)
    return HeadRows(heads.rows, *sums, heads.bias, heads.threshold, site.row_state, heads.selection.row_bits)


def _check_norm(x: Tensor, ln: LayerNormWeights) -> tuple[int, int]:
    batch, d = check_input("x", x)
    for name, given in zip(("weight", "bias"), ln.folded, strict=True):
        check_tensor(f"norm {name}", given, (d,), FLOAT_TYPES, x)
    return batch, d


def predict(
    x: Tensor, ln: LayerNormWeights, predictor: Predictor, normalised_out: Tensor | None = None, pdl: bool = False
) -> None:
    """The first half of a predictor of one row. x (1, d) fp32/fp16/bf16 -> predictor.hidden (1, rank) fp32.

    normalised_out: (1, d), receives LayerNorm(x), so that up need not normalise again. Sums in fp32, in a fixed order.

    Raises:
        ValueError: shapes, dtypes, a CPU tensor.
    """
    batch, d = _check_norm(x, ln)
    require(batch == 1, f"the LayerNorm is folded into the product of one row, got {batch}")
    check_down(predictor, 1, d)
    if normalised_out is not None:
        check_tensor("normalised_out", normalised_out, (1, d), FLOAT_TYPES, x)
    own = predictor.weights
    rank, nibbles = len(own.down), own.down.dtype == torch.uint8
    programs, sizes, warps = row_launch(x, (rank,), nibbles, own.relu)
    has_pdl, dependent = programmatic(x, pdl)
    # The selection that follows asks for its own weights meanwhile.
    _predict_kernel[(programs,)](
        x, ln.args(), None, 0, _hidden_rows(predictor, ln), rank, NormOutput(normalised_out),
        WAIT=start_dependents_and_wait, HEAD_PROGRAMS=0, BOTH=False, S=constant_fields(sizes), PDL=has_pdl,
        num_warps=warps, launch_pdl=dependent,
    )  # fmt: skip


def site_predict(
    x: Tensor, site: HeadSite, position: Tensor, attn_in: Tensor, mlp: Predictor | None = None, pdl: bool = False
) -> None:
    """Everything that reads one site: its input kept, heads selected, and the first half of an MLP's predictor.

    x (B, d) fp32, attn_in (B, T, d), position (B) int32. Of the selection row_bits alone are written, and nothing where
    the predictor has no rows. mlp: of one row, or None. position and row_state are older than the launch before this
    one.

    Raises:
        ValueError: shapes, dtypes, a CPU tensor.
    """
    batch, d = _check_norm(x, site.ln)
    check_shape("attn_in", attn_in, batch, attn_in.shape[1], d)
    check_shape("position", position, batch)
    selecting = head_rows(site, x)
    n_heads = 0 if selecting is None else site.predictor.selection.n
    down, n_rows = None, 0
    if mlp is not None:
        require(batch == 1, f"the LayerNorm is folded into the product of one row, got {batch}")
        check_down(mlp, 1, d)
        down, n_rows = _hidden_rows(mlp, site.ln), len(mlp.weights.down)
    relu = mlp is not None and mlp.weights.relu
    programs, sizes, warps = row_launch(x, (n_heads, n_rows), False, relu)
    if down is None and selecting is None:  # the input alone
        down = HiddenRows(None, None, None, None, None)
    _predict_kernel[(programs,)](
        x, site.ln.args(), selecting, n_heads, down, n_rows, NormOutput(attn_in, position, attn_in.shape[1]),
        WAIT=wait_for_predecessor, HEAD_PROGRAMS=triton.cdiv(n_heads, max(1, sizes.rows)), BOTH=mlp is not None,
        S=constant_fields(sizes), num_warps=warps, **as_dependent(pdl, x.device),
    )  # fmt: skip
