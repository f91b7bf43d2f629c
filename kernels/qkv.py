"""Query, key and value rows of the selected heads, with exact back-fill of the K/V that were skipped earlier.

    q[b, i]           = W_q[i] n(b, t) + b_q[i]                        t = position[b], for heads i that row b selects
    k_cache[b, i, p]  = W_k[i] n(b, p) + b_k[i]   (v likewise)         p = watermark[b, i] .. t
    n(b, p)           = attn_in[b, p], the kept LayerNorm outputs

weight (h, 3, head_dim, d) head-major: one head's rows are one contiguous range. bias (h, 3, head_dim). q (B, h,
head_dim) fp32. k_cache, v_cache (B, h, T, head_dim). watermark (B, h) int32 is only read here: the attention kernel,
the next stage, advances it, because other programs of the same head may still be reading it.
Policies: "backfill" as above; "always" writes K/V of every head at t and reads all their weights; "stale" writes
K/V at t only and marks it in `valid` (B, h, T) uint8: what was skipped stays missing.
`qkv_dense` does all heads at t with the LayerNorm in its prologue: the dense engine needs neither attn_in nor a list.
"""

import torch
import triton
import triton.language as tl

from kernels.attention_common import (
    check_device,
    check_head_dim,
    check_shape,
    n_sms,
    start_dependents,
    two_tiles,
    use_pdl,
)
from kernels.batched import dense_qkv
from kernels.dense_gemv import RowSettings, load_rows, norm_parameters, normalised, row_settings
from kernels.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.select import Selection

POLICIES = {"backfill": 0, "always": 1, "stale": 2}


def qkv_settings(d: int) -> RowSettings:
    """Launch settings of the sparse kernel by width, from benchmarks/sparse_attention.py --sweep."""
    return RowSettings(2, 2, 8) if d <= 4096 else RowSettings(2, 1, 4)


def qkv_reference(
    attn_in, weight, bias, selection, position, watermark, valid, q, k_cache, v_cache, order, policy="backfill",
    pdl=False,
) -> None:  # fmt: skip
    """Plain torch, one (row, head) at a time."""
    batch, n_heads, head_dim = q.shape
    mask = selection.to_mask(batch)
    picked = mask.any(0).nonzero().flatten()
    order[: len(picked)], order[-1] = picked, len(picked)
    for b in range(batch):
        t = int(position[b])
        for head in range(n_heads):
            chosen = bool(mask[b, head])
            if not chosen and policy != "always":
                continue
            first = int(watermark[b, head]) if policy == "backfill" else t
            n = attn_in[b, first : t + 1].float()
            rows = n @ weight[head].float().transpose(1, 2) + bias[head].float()[:, None]
            k_cache[b, head, first : t + 1] = rows[1].to(k_cache.dtype)
            v_cache[b, head, first : t + 1] = rows[2].to(v_cache.dtype)
            if chosen:
                q[b, head] = rows[0, -1]
            if policy == "stale":
                valid[b, head, t] = 1


def qkv_dense_reference(x, ln, weight, bias, position, q, k_cache, v_cache, pdl=False) -> None:
    """Plain torch; also the batched form on the GPU, where a matrix product is cuBLAS's. No host synchronisation."""
    batch, n_heads, head_dim = q.shape
    n = layer_norm_reference(x, ln, weight.dtype)
    rows = torch.nn.functional.linear(n, weight.view(-1, weight.shape[-1])).float() + bias.float().flatten()
    rows = rows.view(batch, n_heads, 3, head_dim)
    q.copy_(rows[:, :, 0])
    each = torch.arange(batch, device=x.device)
    k_cache[each, :, position.long()] = rows[:, :, 1].to(k_cache.dtype)
    v_cache[each, :, position.long()] = rows[:, :, 2].to(v_cache.dtype)


@triton.jit
def _nth_head(rank, heads, n, H: tl.constexpr):
    """The n-th selected head, from the running count of selected heads."""
    return tl.minimum(tl.sum(((rank <= n) & (heads < H)).to(tl.int32)), H - 1)


@triton.jit
def _place(item, rank, heads, H: tl.constexpr, HEAD_DIM: tl.constexpr, PER_HEAD: tl.constexpr, FIXED: tl.constexpr):
    """(head, row of the head's 3 * HEAD_DIM) of a work item."""
    head = _nth_head(rank, heads, (item - FIXED) // PER_HEAD, H)
    row = (item - FIXED) % PER_HEAD
    if FIXED > 0:
        fixed = item - FIXED < 0
        head = tl.where(fixed, item // (2 * HEAD_DIM), head)
        row = tl.where(fixed, HEAD_DIM + item % (2 * HEAD_DIM), row)
    return head, row


@triton.jit
def write_order(row_bits, order, H: tl.constexpr, H_TILE: tl.constexpr):
    """order[:n] = the selected heads, ascending; order[H] = n. For the output projection."""
    heads = tl.arange(0, H_TILE)
    chosen = (tl.load(row_bits + heads, mask=heads < H, other=0) != 0).to(tl.int32)
    tl.store(order + tl.cumsum(chosen, 0) - 1, heads, mask=chosen != 0)
    tl.store(order + H, tl.sum(chosen))


@triton.jit
def _store_values(
    values, kind, row, pair, p, q, k_cache, v_cache, valid, capacity, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """The values of ROWS neighbouring rows at position p."""
    rows = row + tl.arange(0, ROWS)
    slots = (pair * capacity + p).to(tl.int64) * HEAD_DIM + rows % HEAD_DIM
    if kind == 0:
        tl.store(q + pair * HEAD_DIM + rows, values)
    elif kind == 1:
        tl.store(k_cache + slots, values.to(k_cache.dtype.element_ty))
    else:
        tl.store(v_cache + slots, values.to(v_cache.dtype.element_ty))
        if POLICY == 2:
            if row == 2 * HEAD_DIM:
                tl.store(valid + pair * capacity + p, 1)


@triton.jit
def _qkv_rows(
    pid,
    programs,
    attn_in,
    weight,
    bias,
    row_bits,
    position,
    watermark,
    valid,
    q,
    k_cache,
    v_cache,
    capacity,
    B: tl.constexpr,
    H: tl.constexpr,
    H_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Every `programs`-th tile of ROWS rows of the selected heads, the next tile ahead of the arithmetic.

    A tile stays in registers for all positions that its head lacks: one reduction gives a position's values of all its
    rows. Neighbouring tiles belong to one head and have the same positions to fill in: striding shares them out evenly.
    With the policy "always" the k and v rows of all heads come first, then the q rows of the selected ones. ROWS
    divides HEAD_DIM, so a tile is of one head and one of q, k, v.
    """
    PER_HEAD: tl.constexpr = HEAD_DIM if POLICY == 1 else 3 * HEAD_DIM
    FIXED: tl.constexpr = 2 * HEAD_DIM * H if POLICY == 1 else 0
    c0 = tl.arange(0, D0)
    c1 = c0
    if D1 > 0:
        c1 = D0 + tl.arange(0, D1)
    heads = tl.arange(0, H_TILE)
    chosen = (tl.load(row_bits + heads, mask=heads < H, other=0) != 0).to(tl.int32)
    rank = tl.cumsum(chosen, 0)
    n_tiles = (FIXED + tl.sum(chosen) * PER_HEAD) // ROWS
    head, row = _place(pid * ROWS, rank, heads, H, HEAD_DIM, PER_HEAD, FIXED)
    line = head * (3 * HEAD_DIM) + row
    w0, w1 = load_rows(weight, line, tl.where(pid - n_tiles < 0, line + ROWS, 0), c0, c1, D, D0, D1, ROWS)
    if B == 1:
        # The usual case: one position, whose input stays in registers.
        now = tl.load(position)
        x0 = tl.load(attn_in + now.to(tl.int64) * D + c0).to(tl.float32)
        if D1 > 0:
            x1 = tl.load(attn_in + now.to(tl.int64) * D + c1, mask=c1 < D, other=0.0).to(tl.float32)
    for tile in range(pid, n_tiles, programs):
        next_head, next_row = _place((tile + programs) * ROWS, rank, heads, H, HEAD_DIM, PER_HEAD, FIXED)
        next_line = next_head * (3 * HEAD_DIM) + next_row
        stop_line = tl.where(tile + programs - n_tiles < 0, next_line + ROWS, 0)
        next0, next1 = load_rows(weight, next_line, stop_line, c0, c1, D, D0, D1, ROWS)
        kind = row // HEAD_DIM
        offset = tl.load(bias + head * (3 * HEAD_DIM) + row + tl.arange(0, ROWS)).to(tl.float32)
        bits = tl.load(row_bits + head)
        for b in range(B):
            wanted = ((bits >> b) & 1) != 0
            if POLICY == 1:
                wanted = wanted | (kind > 0)
            if wanted:
                pair = b * H + head
                last = tl.load(position + b)
                first = last
                if POLICY == 0:
                    if kind > 0:
                        first = tl.load(watermark + pair)
                stop = last + 1
                if B == 1:
                    stop = last
                for p in range(first, stop):
                    at = attn_in + (b * capacity + p).to(tl.int64) * D
                    values = tl.sum(w0.to(tl.float32) * tl.load(at + c0).to(tl.float32)[None, :], 1)
                    if D1 > 0:
                        tail = tl.load(at + c1, mask=c1 < D, other=0.0).to(tl.float32)
                        values += tl.sum(w1.to(tl.float32) * tail[None, :], 1)
                    _store_values(
                        values + offset, kind, row, pair, p, q, k_cache, v_cache, valid, capacity, HEAD_DIM, ROWS,
                        POLICY,
                    )  # fmt: skip
                if B == 1:
                    values = tl.sum(w0.to(tl.float32) * x0[None, :], 1)
                    if D1 > 0:
                        values += tl.sum(w1.to(tl.float32) * x1[None, :], 1)
                    _store_values(
                        values + offset, kind, row, pair, last, q, k_cache, v_cache, valid, capacity, HEAD_DIM, ROWS,
                        POLICY,
                    )  # fmt: skip
        head = next_head
        row = next_row
        w0 = next0
        w1 = next1


@triton.jit
def _qkv_kernel(
    attn_in,
    weight,
    bias,
    row_bits,
    position,
    watermark,
    valid,
    q,
    k_cache,
    v_cache,
    order,
    capacity,
    B: tl.constexpr,
    H: tl.constexpr,
    H_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
    POLICY: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    if tl.program_id(0) == 0:
        write_order(row_bits, order, H, H_TILE)
    _qkv_rows(
        tl.program_id(0), tl.num_programs(0), attn_in, weight, bias, row_bits, position, watermark, valid, q, k_cache,
        v_cache, capacity, B, H, H_TILE, HEAD_DIM, D, D0, D1, ROWS, POLICY,
    )  # fmt: skip


@triton.jit
def _qkv_dense_kernel(
    x,
    norm_weight,
    norm_bias,
    weight,
    bias,
    position,
    q,
    k_cache,
    v_cache,
    capacity,
    H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    # As `dense_gemv`, but a row's result goes to q, or to the caches at the position. ROWS divides HEAD_DIM.
    N_ROWS: tl.constexpr = 3 * HEAD_DIM * H
    c0 = tl.arange(0, D0)
    c1 = c0
    if D1 > 0:
        c1 = D0 + tl.arange(0, D1)
    step = tl.num_programs(0) * ROWS
    w0, w1 = load_rows(weight, tl.program_id(0) * ROWS, N_ROWS, c0, c1, D, D0, D1, ROWS)
    g0, a0, g1, a1 = norm_parameters(norm_weight, norm_bias, c0, c1, D, D1)
    start_dependents(PDL)
    last = tl.load(position)
    n0, n1 = normalised(x, g0, a0, g1, a1, c0, c1, D, D1, EPS, weight.dtype.element_ty)
    for line in range(tl.program_id(0) * ROWS, N_ROWS, step):
        next0, next1 = load_rows(weight, line + step, N_ROWS, c0, c1, D, D0, D1, ROWS)
        value = tl.sum(w0.to(tl.float32) * n0[None, :], 1)
        if D1 > 0:
            value += tl.sum(w1.to(tl.float32) * n1[None, :], 1)
        lines = line + tl.arange(0, ROWS)
        value += tl.load(bias + lines).to(tl.float32)
        head = line // (3 * HEAD_DIM)
        row = line % (3 * HEAD_DIM)
        rows = row + tl.arange(0, ROWS)
        slots = (head * capacity + last).to(tl.int64) * HEAD_DIM + rows % HEAD_DIM
        if row < HEAD_DIM:
            tl.store(q + head * HEAD_DIM + rows, value)
        elif row < 2 * HEAD_DIM:
            tl.store(k_cache + slots, value.to(k_cache.dtype.element_ty))
        else:
            tl.store(v_cache + slots, value.to(v_cache.dtype.element_ty))
        w0 = next0
        w1 = next1


def _check(x, weight, bias, q, k_cache, v_cache, position) -> tuple[int, int, int, int]:
    check_device("q", q)
    batch, n_heads, head_dim = q.shape
    check_head_dim(head_dim)
    d = weight.shape[-1]
    check_shape("weight", weight, n_heads, 3, head_dim, d)
    check_shape("bias", bias, n_heads, 3, head_dim)
    capacity = k_cache.shape[2]
    check_shape("k_cache", k_cache, batch, n_heads, capacity, head_dim)
    check_shape("v_cache", v_cache, batch, n_heads, capacity, head_dim)
    check_shape("position", position, batch)
    if x.shape[-1] != d:
        raise ValueError(f"the input has {x.shape[-1]} columns, the weight {d}")
    return batch, n_heads, head_dim, d


def qkv(
    attn_in: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    selection: Selection,
    position: torch.Tensor,
    watermark: torch.Tensor,
    valid: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    order: torch.Tensor,
    policy: str = "backfill",
    pdl: bool = False,
    settings: RowSettings | None = None,
) -> None:
    """See the module's formula; fp32 sums, one writer an element, bitwise deterministic. Errors: shapes, dims, policy.

    order: (h + 1) int32, receives the selected heads in ascending order and, at its end, their number.
    """
    batch, n_heads, head_dim, d = _check(attn_in, weight, bias, q, k_cache, v_cache, position)
    check_shape("attn_in", attn_in, batch, k_cache.shape[2], d)
    check_shape("watermark", watermark, batch, n_heads)
    check_shape("order", order, n_heads + 1)
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}, expected one of {', '.join(POLICIES)}")
    if policy == "stale" and valid is None:
        raise ValueError('the policy "stale" needs the tensor of valid positions')
    d0, d1 = two_tiles(d)
    pdl = use_pdl(pdl, q.device)
    settings = settings or qkv_settings(d)
    _qkv_kernel[(n_sms(q.device) * settings.programs,)](
        attn_in,
        weight,
        bias,
        selection.row_bits,
        position,
        watermark,
        row_or(valid, watermark),
        q,
        k_cache,
        v_cache,
        order,
        k_cache.shape[2],
        B=batch,
        H=n_heads,
        H_TILE=triton.next_power_of_2(n_heads),
        HEAD_DIM=head_dim,
        D=d,
        D0=d0,
        D1=d1,
        ROWS=settings.rows,
        POLICY=POLICIES[policy],
        PDL=pdl,
        num_warps=settings.warps if d >= 2048 else 4,
        launch_pdl=pdl,
    )


def row_or(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """A kernel's pointer argument may not be None; what stands in is never read."""
    return stand_in if tensor is None else tensor


def qkv_dense(
    x: torch.Tensor,
    ln: LayerNormWeights,
    weight: torch.Tensor,
    bias: torch.Tensor,
    position: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pdl: bool = False,
    settings: RowSettings | None = None,
) -> None:
    """All heads at `position` from x (B, d) fp32. One row runs in one kernel, several as a matrix product."""
    batch, n_heads, head_dim, d = _check(x, weight, bias, q, k_cache, v_cache, position)
    if batch > 1:
        dense_qkv(x, ln, weight, bias, position, q, k_cache, v_cache, pdl)
        return
    d0, d1 = two_tiles(d)
    pdl = use_pdl(pdl, q.device)
    settings = settings or row_settings(d)
    _qkv_dense_kernel[(min(n_sms(q.device) * settings.programs, 3 * n_heads * head_dim // settings.rows),)](
        x,
        ln.weight,
        ln.bias,
        weight,
        bias,
        position,
        q,
        k_cache,
        v_cache,
        k_cache.shape[2],
        H=n_heads,
        HEAD_DIM=head_dim,
        D=d,
        D0=d0,
        D1=d1,
        ROWS=settings.rows,
        EPS=ln.eps,
        PDL=pdl,
        num_warps=settings.warps if d >= 2048 else 4,
        launch_pdl=pdl,
    )
