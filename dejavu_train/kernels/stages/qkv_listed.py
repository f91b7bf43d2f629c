"""Query, key and value rows of the selected heads as numbers. Formulas and layouts as in `qkv`.

Programs take items off a list that all of them make: only rows that are needed are read. Programs of 4-bit rows read
their first words before they know (`qkv_owned`). Of numbers these would be four times as many bytes. That is why the
two formats have programs of their own.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.launch import wait_for_predecessor
from dejavu_train.kernels.stages.qkv_pairs import lacking_positions, places, store_rows, turning


@triton.jit
def _fill(
    head, row, start, n_pairs, first, ends, attn_in, rows, stored, S: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Values of ROWS rows of a head for the pairs start .. start + N - 1 of n_pairs, see `qkv_pairs`."""
    OF_HEAD: tl.constexpr = (S.SHARE + 2) * S.HEAD_DIM
    c = tl.arange(0, BLOCK)
    r = tl.arange(0, S.ROWS)
    i = tl.arange(0, N)
    exists = start + i < n_pairs
    of_row, p = places(i, start, first, ends, S.B)
    line = head * OF_HEAD + row
    offset = tl.load(rows.bias + line + r)  # used after the product: nothing waits for it before
    by = turning(stored.table, row, p, exists, S.ROWS, S)
    # Scalar bases and constant offsets: little is left to compute before the first load.
    if S.B == 1:
        present = tl.sum(first) + start
        x_ptrs = attn_in + present.to(tl.int64) * S.D + (i * S.D)[None, :] + c[:, None]
    else:
        x_ptrs = attn_in + (of_row * stored.capacity + p).to(tl.int64)[None, :] * S.D + c[:, None]
    w_ptrs = rows.weight + line.to(tl.int64) * S.D + (r * S.D)[:, None] + c[None, :]
    values = tl.zeros((S.ROWS, N), tl.float32)
    for column in tl.range(0, S.D, BLOCK, num_stages=S.STAGES):
        if S.D % BLOCK == 0:
            w = tl.load(w_ptrs + column, eviction_policy="evict_first")
            x = tl.load(x_ptrs + column, mask=exists[None, :], other=0.0)
        else:
            w = tl.load(w_ptrs + column, mask=(column + c < S.D)[None, :], other=0.0)
            x = tl.load(x_ptrs + column, mask=exists[None, :] & (column + c < S.D)[:, None], other=0.0)
        values = tl.dot(w, x, values, input_precision="ieee")
    values += offset.to(tl.float32)[:, None]
    store_rows(values, by, head, row, row + r, of_row, p, exists, stored, S)


@triton.jit
def listed_tiles(
    tile, n_tiles, attn_in, rows, wanted, stored, late, down, S: tl.constexpr, A: tl.constexpr, PDL: tl.constexpr
):
    """A program's whole work, its wait included: items tile, tile + n_tiles, ...

    An item is ROWS rows of a head and up to WIDE of the pairs that it lacks. First come the rows of q, which need the
    present position only, then those of k and v for each group of pairs. All take about as long, so that none is late.
    late, down, A: as for `qkv_owned.own_tile`, and None.
    """
    OF_Q: tl.constexpr = S.SHARE * S.HEAD_DIM // S.ROWS  # tiles
    OF_KV: tl.constexpr = 2 * S.HEAD_DIM // S.ROWS
    b = tl.arange(0, triton.next_power_of_2(S.B))
    heads = tl.arange(0, triton.next_power_of_2(S.H))
    inside = (b < S.B)[:, None] & (heads < S.H)[None, :]
    # Positions and watermarks are those that the step before left.
    if S.FILLS:
        last, lacking = lacking_positions(wanted, b, heads, S)  # pairs by (row, head)
    else:
        last = tl.load(wanted.position + b, mask=b < S.B, other=0)
        lacking = tl.where(inside, 1, 0)
    groups = (tl.sum(lacking, 0) + S.WIDE - 1) // S.WIDE
    wait_for_predecessor(PDL)
    head_bits = tl.load(wanted.row_bits + heads, mask=heads < S.H, other=0)
    chosen = head_bits != 0
    if S.B > 1:
        lacking = tl.where(((head_bits[None, :] >> b[:, None]) & 1) != 0, lacking, 0)
        groups = (tl.sum(lacking, 0) + S.WIDE - 1) // S.WIDE
    items = tl.where(chosen, OF_Q + OF_KV * groups, 0)
    ends = tl.cumsum(items, 0)
    begins = ends - items
    for item in range(tile, tl.sum(items), n_tiles):
        own = (ends > item) & (ends - items <= item)
        head = tl.sum(tl.where(own, heads, 0))
        place = item - tl.sum(tl.where(own, begins, 0))
        group = tl.maximum(place - OF_Q, 0) // OF_KV
        row = (place - group * OF_KV) * S.ROWS
        start = group * S.WIDE
        # The pairs (row b, position first[b] .. last[b]) that the head lacks, counted on through the rows.
        n = tl.sum(tl.where(own[None, :], lacking, 0), 1)
        n = tl.where(place < OF_Q, tl.minimum(n, 1), n)
        n_pairs = tl.sum(n)
        first = last + 1 - n
        if S.WIDE > S.PAIRS and n_pairs > S.PAIRS:  # the same shared memory: in steps of half the columns
            _fill(head, row, start, n_pairs, first, tl.cumsum(n, 0), attn_in, rows, stored, S, S.WIDE, S.BLOCK // 2)
        else:
            _fill(head, row, start, n_pairs, first, tl.cumsum(n, 0), attn_in, rows, stored, S, S.PAIRS, S.BLOCK)
