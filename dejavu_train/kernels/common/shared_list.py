"""A program's list of numbers in shared memory: which of its threads' items are wanted, for all its warps to share.

Thread t = 32 w + l of L has the items (w R + r) 32 + l, r < R, and says of each whether it is wanted. The list holds
those that are, in the order of their numbers, 16 bits each: the order does not depend on timing. Any warp may then take
any of them four by four, so that all have as many. A loop over each warp's own items could not do that.

With ASM the list lies in shared memory that the caller has (`list_bytes`). Without it, in the interpreter, it is a
tuple of tiles: the place of each item in the list, or -1.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.assembly import ASSEMBLY, assembly, operands


@triton.constexpr_function
def list_bytes(lanes, rounds):
    """Shared memory of a list of at most lanes * rounds items, below 65536, and a count for each warp."""
    assert lanes * rounds < 1 << 16, f"{lanes * rounds} items: a list takes fewer than 65536"
    return 2 * lanes * rounds + lanes // 8


@triton.constexpr_function
def _write_list(lanes, rounds):
    """PTX: $0 = how many of the flags $2.. are not zero in all threads. Their items' numbers go to $1."""
    warps = lanes // 32
    counts = 2 * lanes * rounds  # behind the list
    text = "{ .reg .pred p; .reg .b32 below, warp, own, item, at, n, total; .reg .b16 short;"
    text += f".reg .b32 votes<{rounds}>;"
    text += "mov.u32 below, %lanemask_lt; mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; mov.u32 own, 0;"
    for r in range(rounds):
        text += f"setp.ne.b32 p, ${2 + r}, 0; vote.sync.ballot.b32 votes{r}, p, 0xffffffff;"
        text += f"popc.b32 n, votes{r}; add.u32 own, own, n;"
    text += f"shl.b32 at, warp, 2; add.u32 at, at, $1; st.shared.u32 [at + {counts}], own; bar.sync 0;"
    text += "mov.u32 own, 0; mov.u32 total, 0;"
    for w in range(warps):
        text += f"ld.shared.u32 n, [$1 + {counts + 4 * w}]; add.u32 total, total, n;"
        text += f"setp.gt.u32 p, warp, {w}; @p add.u32 own, own, n;"
    text += f"mov.u32 item, %laneid; mad.lo.u32 item, warp, {32 * rounds}, item;"
    for r in range(rounds):
        text += f"and.b32 n, votes{r}, below; popc.b32 n, n; add.u32 n, n, own; shl.b32 n, n, 1; add.u32 at, n, $1;"
        text += f"setp.ne.b32 p, ${2 + r}, 0; cvt.u16.u32 short, item; @p st.shared.u16 [at], short;"
        text += f"popc.b32 n, votes{r}; add.u32 own, own, n; add.u32 item, item, 32;"
    return text + "bar.sync 0; mov.u32 $0, total; }"


@triton.jit
def write_list(at, wanted, lane, R: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """(the list, how many items it has, int32 (L,)) of R tiles (L,) of flags. at: address in shared memory, (L,).

    Barriers of all threads stand before and behind the writes. lane: tl.arange over the program's threads.
    """
    L: tl.constexpr = lane.shape[0]
    if ASM:
        flags = (at,)
        for r in tl.static_range(R):
            flags = flags + (wanted[r].to(tl.int32),)
        count = assembly(_write_list(L, R), operands("=&r", 1, "r", R + 1), flags)
        items = (at,)
    else:
        own = tl.zeros((L // 32,), tl.int32)
        for r in tl.static_range(R):
            own += tl.sum(tl.reshape(wanted[r].to(tl.int32), (L // 32, 32)), 1)
        count = tl.zeros((L,), tl.int32) + tl.sum(own, 0)
        before = tl.cumsum(own, 0) - own
        items = ()
        for r in tl.static_range(R):
            flags = tl.reshape(wanted[r].to(tl.int32), (L // 32, 32))
            place = before[:, None] + tl.cumsum(flags, 1) - flags
            items = items + (tl.reshape(tl.where(flags != 0, place, -1), (L,)),)
            before += tl.sum(flags, 1)
    return items, count


@triton.jit
def _item_at(items, place, lane, R: tl.constexpr):
    """Without ASM: the item at each lane's place (L,), zero beyond the end."""
    L: tl.constexpr = lane.shape[0]
    found = tl.zeros((L,), tl.int32)
    for r in tl.static_range(R):
        number = (lane // 32 * R + r) * 32 + lane % 32
        found += tl.sum(tl.where(items[r][None, :] == place[:, None], number[None, :], 0), 1)
    return found


@triton.jit
def list_four(items, four, lane, R: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """The items 4 four .. 4 four + 3 of `write_list`'s list, int32 (L,) each, in one load. Undefined beyond its end.

    The list lies at a multiple of 8 bytes.
    """
    if ASM:
        place = tl.minimum(four, R * lane.shape[0] // 4 - 1)
        low, high = assembly("ld.shared.v2.u32 {$0, $1}, [$2];", "=r,=r,r", (items[0] + 8 * place,))
        found = (low & 0xFFFF, (low >> 16) & 0xFFFF, high & 0xFFFF, (high >> 16) & 0xFFFF)
    else:
        found = ()
        for k in tl.static_range(4):
            found = found + (_item_at(items, 4 * four + k, lane, R),)
    return found
