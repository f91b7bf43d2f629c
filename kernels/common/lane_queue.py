# mypy: disable-error-code="assignment"
"""Words on their way from memory: a queue for each lane, in shared memory that only this lane reads again.

Loads into registers do not stay where they are written: the assembler moves them behind the products of the words
before them, and of sixteen loads meant to be on their way five were, none at times (`benchmarks/compiled.py`, `flight`).
`cp.async` keeps its place among the waits. A lane takes back what it asked for itself, so no barrier is needed, and the
number of words on their way is bounded by shared memory, not by registers.

A slot holds two pieces of V words of each lane. Slots are numbers known when compiling; what was asked for first is
taken first, and each `ask` counts for `take`, also one for nothing. The state is a tuple that loops hand on: with ASM
the lane's address in shared memory, without it, in the interpreter, the words themselves.
"""

import triton
import triton.language as tl

from kernels.common.int4_tiles import ASSEMBLY

EIGHT_WORDS, FOUR_WORDS, TWO_WORDS = (tl.constexpr((tl.int32,) * n) for n in (8, 4, 2))


@triton.constexpr_function
def _room(lanes, slots, vector):
    """PTX: $0 = the address of a lane's first piece; $1 = the number of the lane. At most 48 KB."""
    size = lanes * slots * 8 * vector
    assert size <= 48 * 1024, f"{size} bytes of shared memory for a queue, of 49152"
    return (
        f"{{ .shared .align 16 .b8 room[{size}]; .reg .u32 start; mov.u32 start, room;"
        f"mad.lo.u32 $0, $1, {4 * vector}, start; }}"
    )


@triton.constexpr_function
def _ask(lanes, slot, vector, partly):
    """PTX: copies of two pieces from $2 and $3 into slot `slot` of $1, of $4 and $5 bytes where `partly`."""
    text = "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
    kind = "cg" if vector == 4 else "ca"
    for piece in (0, 1):
        place = (2 * slot + piece) * lanes * 4 * vector
        size = f"{4 * vector}, ${4 + piece}" if partly else f"{4 * vector}"
        text += f"cp.async.{kind}.shared.global.L2::cache_hint [$1 + {place}], [${2 + piece}], {size}, policy;"
    return text + "cp.async.commit_group; mov.u32 $0, $1; }"


@triton.constexpr_function
def _take(lanes, slot, vector, behind):
    """PTX: waits for all copies but the last `behind`, then the 2 * vector words of slot `slot`."""
    text = f"cp.async.wait_group {behind};"
    out = 2 * vector
    for piece in (0, 1):
        names = ", ".join(f"${piece * vector + v}" for v in range(vector))
        kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[vector]
        names = f"{{{names}}}" if vector > 1 else names
        text += f"ld.shared.{kind} {names}, [${out} + {(2 * slot + piece) * lanes * 4 * vector}];"
    return text


@triton.constexpr_function
def _take_operands(vector):
    return ",".join(["=&r"] * (2 * vector) + ["r"])


@triton.jit
def lane_queue(lane, SLOTS: tl.constexpr, V: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """An empty queue of SLOTS slots, one a kernel; lane: tl.arange over the program's threads."""
    queue = ()
    if ASM:
        queue = (
            tl.inline_asm_elementwise(
                _room(lane.shape[0], SLOTS, V), "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1
            ),
        )
    return queue


@triton.jit
def ask(
    queue, one, two, first, second, SLOT: tl.constexpr, V: tl.constexpr, PARTLY: tl.constexpr,
    ASM: tl.constexpr = ASSEMBLY,
):  # fmt: skip
    """The queue with V words from `one` and V from `two` (pointers, (L,)) on their way into SLOT.

    PARTLY: first and second (L,) say which lanes' words are read; others get zeros.
    """
    if ASM:
        if PARTLY:
            tl.inline_asm_elementwise(
                _ask(one.shape[0], SLOT, V, True),
                "=r,r,l,l,r,r",
                [queue[0], one, two, tl.where(first, 4 * V, 0), tl.where(second, 4 * V, 0)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.inline_asm_elementwise(
                _ask(one.shape[0], SLOT, V, False), "=r,r,l,l", [queue[0], one, two], dtype=tl.int32, is_pure=False,
                pack=1,
            )  # fmt: skip
    else:
        for piece in tl.static_range(2):
            at = one if piece == 0 else two
            mask = first if piece == 0 else second
            for v in tl.static_range(V):
                queue = queue + (tl.load(at + v, mask=mask, other=0),)
    return queue


@triton.jit
def take(queue, SLOT: tl.constexpr, V: tl.constexpr, BEHIND: tl.constexpr, L: tl.constexpr,
         ASM: tl.constexpr = ASSEMBLY):  # fmt: skip
    """(the 2 V tiles of words in SLOT, which were asked for BEHIND calls of `ask` before the last one, the queue)."""
    if ASM:
        if V == 4:
            words = tl.inline_asm_elementwise(
                _take(L, SLOT, V, BEHIND), _take_operands(V), [queue[0]], dtype=EIGHT_WORDS, is_pure=False, pack=1
            )
        elif V == 2:
            words = tl.inline_asm_elementwise(
                _take(L, SLOT, V, BEHIND), _take_operands(V), [queue[0]], dtype=FOUR_WORDS, is_pure=False, pack=1
            )
        else:
            words = tl.inline_asm_elementwise(
                _take(L, SLOT, V, BEHIND), _take_operands(V), [queue[0]], dtype=TWO_WORDS, is_pure=False, pack=1
            )
    else:
        words = queue[: 2 * V]
        queue = queue[2 * V :]
    return words, queue
