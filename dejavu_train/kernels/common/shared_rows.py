"""A program's list of row numbers with a value each, in shared memory, written sixteen at a time for all its warps.

All threads of a program hold the same sixteen numbers and values, and write what is wanted of them. That is at most
CAPACITY in all, a multiple of 16. After a barrier (`tl.debug_barrier`) any lane reads four of them in two loads. With
ASM the state is the list's address. Without it, in the interpreter, the list.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.assembly import ASSEMBLY, assembly
from dejavu_train.kernels.common.lane_queue import shared_room


@triton.constexpr_function
def rows_bytes(capacity):
    """Shared memory of a list."""
    return 8 * capacity


@triton.constexpr_function
def _append(capacity):
    """PTX: row number $3 and value $4 to place $2 of the list $1, where that is not negative."""
    return (
        "{ .reg .pred p; .reg .b32 at; setp.ge.s32 p, $2, 0; shl.b32 at, $2, 2; add.u32 at, at, $1;"
        f"@p st.shared.b32 [at], $3; @p st.shared.f32 [at + {4 * capacity}], $4; mov.u32 $0, $2; }}"
    )


@triton.constexpr_function
def _four(capacity):
    """PTX: $0..$3 = four row numbers, $4..$7 = their values, from byte $9 of the list $8 on."""
    return (
        "{ .reg .b32 at; add.u32 at, $8, $9; ld.shared.v4.b32 {$0, $1, $2, $3}, [at];"
        f"ld.shared.v4.f32 {{$4, $5, $6, $7}}, [at + {4 * capacity}]; }}"
    )


@triton.constexpr_function
def _one(capacity):
    """PTX: $0 = a row number, $1 = its value, from byte $3 of the list $2 on."""
    return f"{{ .reg .b32 at; add.u32 at, $2, $3; ld.shared.b32 $0, [at]; ld.shared.f32 $1, [at + {4 * capacity}]; }}"


@triton.jit
def rows_list(program, CAPACITY: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """An empty list, one a kernel. program: any number."""
    if ASM:
        listed = (shared_room(program, "listed", rows_bytes(CAPACITY), 16),)
    else:
        N: tl.constexpr = triton.next_power_of_2(CAPACITY)
        listed = (tl.zeros((N,), tl.int32), tl.zeros((N,), tl.float32))
    return listed


@triton.jit
def append_rows(listed, held, numbers, values, wanted, CAPACITY: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """(the list with those of sixteen numbers and values (16,) that are wanted, how many it holds): held: before."""
    flags = wanted.to(tl.int32)
    place = held + tl.cumsum(flags, 0) - flags
    if ASM:
        assembly(_append(CAPACITY), "=r,r,r,r,f", (listed[0], tl.where(wanted, place, -1), numbers, values))
    else:
        number = tl.arange(0, listed[0].shape[0])
        own = wanted[None, :] & (place[None, :] == number[:, None])
        listed = (
            listed[0] + tl.sum(tl.where(own, numbers[None, :], 0), 1),
            listed[1] + tl.sum(tl.where(own, values[None, :], 0.0), 1),
        )
    return listed, held + tl.sum(flags)


@triton.jit
def four_rows(listed, four, CAPACITY: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """Rows 4 four .. 4 four + 3 of the list: four tiles (L,) of numbers, four of values. Undefined beyond its end."""
    four = tl.minimum(four, CAPACITY // 4 - 1)
    if ASM:
        found = assembly(_four(CAPACITY), "=r,=r,=r,=r,=f,=f,=f,=f,r,r", (listed[0], 16 * four))
    else:
        numbers = ()
        values = ()
        for k in tl.static_range(4):
            own = tl.arange(0, listed[0].shape[0])[None, :] == (4 * four + k)[:, None]
            numbers = numbers + (tl.sum(tl.where(own, listed[0][None, :], 0), 1),)
            values = values + (tl.sum(tl.where(own, listed[1][None, :], 0.0), 1),)
        found = numbers + values
    return found


@triton.jit
def one_row(listed, place, CAPACITY: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """(number, value) of the list's row at each `place`, a tile of any size. Undefined beyond its end."""
    place = tl.minimum(place, CAPACITY - 1)
    if ASM:
        number, value = assembly(_one(CAPACITY), "=&r,=f,r,r", (listed[0], 4 * place))
    else:
        own = tl.arange(0, listed[0].shape[0])[None, :] == place[:, None]
        number = tl.sum(tl.where(own, listed[0][None, :], 0), 1)
        value = tl.sum(tl.where(own, listed[1][None, :], 0.0), 1)
    return number, value


@triton.jit
def written_anew(listed, ASM: tl.constexpr = ASSEMBLY):
    """An empty list in the place of one that is still read, at and behind the entries that are written."""
    if not ASM:
        listed = (tl.zeros_like(listed[0]), tl.zeros_like(listed[1]))
    return listed
