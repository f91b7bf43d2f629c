"""Words on their way from memory: a queue for each lane or each warp, in shared memory that no one else reads.

Loads into registers do not stay where they are written. The assembler moves them behind the products of the words
before them, and few of those that were meant to be on their way are. `cp.async` keeps its place among the waits. What
is on its way is bounded by shared memory, not by registers.

`ask` and `take`: a lane takes back what it asked for itself, so no barrier is needed. A slot holds two pieces of V
words of each lane. `ask_lines` and `take_unit`: the lanes of a warp read each other's copies, and wait for each other.
For a load should cover whole cache lines, which are not the words that a lane of the tensor cores wants. A slot holds 8
V words of sixteen rows for each warp. Such a row's line is eight chunks of V words, two units of four. In odd rows the
units change places, so that lanes that take together find no bank shared (V = 4).

Slots are numbers known when compiling, or of `at_slot`. What was asked for first is taken first, and every `ask` counts
for `take`, also one for nothing. The state is a tuple that loops hand on: with ASM the queue's address in shared
memory, without it, in the interpreter, the words themselves.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.assembly import ASSEMBLY, assembly, operands

MOST_BYTES = 45 * 1024  # a kernel may declare 48 KB of shared memory, with what its sums take, and `int4_norm`
SHARED_BYTES = 135168  # of a multiprocessor of compute capability 9.0 where a plan's carveout asks for half
BESIDE_QUEUE = 2 * 1024  # of a program: for the driver, and for sums of one column of numbers
EVEN_FROM = 4096


def even_room(programs: int, d: int, dependent: bool, needed: int = 0) -> int:
    """Bytes that a kernel's queue takes at least, so that at most `programs`, two or more, fit on a multiprocessor.

    0: the bytes `needed` see to that already, or none are asked for. dependent: the grid starts while its predecessor
    ends. Such a grid fills the multiprocessors that are free first, each with as many programs as fit. The last get
    none: at d = 9216 a third of an H200's multiprocessors had none of the programs of q/k/v, or of fc2's.
    For grids of a dense step. More than that keeps out the next kernel's programs, which should start early.
    Narrower matrices than EVEN_FROM: not measured. One program alone may not declare enough to keep a second one out.
    """
    if not dependent or d < EVEN_FROM or (programs + 1) * (needed + BESIDE_QUEUE) > SHARED_BYTES:
        return 0
    return min(MOST_BYTES, SHARED_BYTES // (programs + 1))


@triton.constexpr_function
def _room(name, size, align):
    """PTX: $0 = the address of `size` bytes of shared memory."""
    assert size <= MOST_BYTES, f"{size} bytes of shared memory for {name}, of {MOST_BYTES}"
    return f"{{ .shared .align {align} .b8 {name}[{size}]; mov.u32 $0, {name}; }}"


@triton.jit
def shared_room(number, NAME: tl.constexpr, SIZE: tl.constexpr, ALIGN: tl.constexpr):
    """The address of SIZE bytes of shared memory, int32 as often as there are numbers. NAME: once a kernel."""
    return assembly(_room(NAME, SIZE, ALIGN), "=r,r", (number,))


@triton.constexpr_function
def _ask(lanes, slot, vector, partly, again):
    """PTX: copies of pieces from $2 and $3 into slot `slot` of $1, of $4 and $5 bytes where `partly`."""
    text = "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
    kind = "ca" if again or vector < 4 else "cg"
    hint, policy = ("", "") if again else (".L2::cache_hint", ", policy")
    for piece in (0, 1):
        place = (2 * slot + piece) * lanes * 4 * vector
        size = f"{4 * vector}, ${4 + piece}" if partly else f"{4 * vector}"
        text += f"cp.async.{kind}.shared.global{hint} [$1 + {place}], [${2 + piece}], {size}{policy};"
    return text + "cp.async.commit_group; mov.u32 $0, $1; }"


@triton.constexpr_function
def _take(lanes, slot, vector, behind):
    """PTX: waits for all copies but the last `behind`, then the words of slot `slot`."""
    text = f"cp.async.wait_group {behind};"
    for piece in (0, 1):
        names = ", ".join(f"${piece * vector + v}" for v in range(vector))
        kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[vector]
        names = f"{{{names}}}" if vector > 1 else names
        text += f"ld.shared.{kind} {names}, [${2 * vector} + {(2 * slot + piece) * lanes * 4 * vector}];"
    return text


@triton.jit
def lane_queue(lane, BYTES: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """An empty queue of BYTES, one a kernel. lane: tl.arange over the program's threads."""
    queue = ()
    if ASM:
        queue = (shared_room(lane, "room", BYTES, 128),)
    return queue


@triton.jit
def ask(
    queue, lane, one, two, first, second, SLOT: tl.constexpr, V: tl.constexpr, PARTLY: tl.constexpr,
    AGAIN: tl.constexpr = False, ASM: tl.constexpr = ASSEMBLY, LATE: tl.constexpr = False,
):  # fmt: skip
    """The queue with V words from `one` and V from `two` (pointers, (L,)) on their way into SLOT.

    PARTLY: first and second (L,) say which lanes' words are read. Others get zeros. AGAIN: other programs read the same
    words, which the caches should keep. LATE: the queue is one of `at_slot`.
    """
    L: tl.constexpr = lane.shape[0]
    if ASM:
        to = queue[0] + lane * (4 * V)
        if LATE:  # with OR, see `_line_place`
            to = (queue[0] + lane // 8 * (32 * V)) | (lane % 8 * (4 * V))
        sizes = ()
        if PARTLY:
            sizes = (tl.where(first, 4 * V, 0), tl.where(second, 4 * V, 0))
        assembly(_ask(L, SLOT, V, PARTLY, AGAIN), "=r,r,l,l,r,r" if PARTLY else "=r,r,l,l", (to, one, two) + sizes)
    else:
        for v in tl.static_range(V):
            queue = queue + (tl.load(one + v, mask=first, other=0),)
        for v in tl.static_range(V):
            queue = queue + (tl.load(two + v, mask=second, other=0),)
    return queue


@triton.jit
def take(queue, lane, SLOT: tl.constexpr, V: tl.constexpr, BEHIND: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """(the 2 V tiles of words in SLOT, the queue): the words of the ask that BEHIND more have followed."""
    L: tl.constexpr = lane.shape[0]
    if ASM:
        at = (queue[0] + lane * (4 * V),)
        words = assembly(_take(L, SLOT, V, BEHIND), operands("=&r", 2 * V, "r", 1), at)
    else:
        words = queue[: 2 * V]
        queue = queue[2 * V :]
    return words, queue


@triton.constexpr_function
def line_slot_bytes(lanes, vector):
    """Shared memory of a slot of `ask_lines`: 8 `vector` words of sixteen rows for each warp."""
    return lanes // 32 * 16 * 8 * vector * 4


@triton.constexpr_function
def _line_copies(to, sources, sizes, vector):
    """PTX: when all lanes of the warp are here, four copies of so many bytes to every fourth row from $1 + `to` on."""
    kind = "cg" if vector == 4 else "ca"
    text = "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0; bar.warp.sync 0xffffffff;"
    for four in range(4):  # no target within a target, see tests/test_imports.py
        text += f"cp.async.{kind}.shared.global.L2::cache_hint [$1 + {to + 4 * four * 32 * vector}], "
        text += f"[{sources[four]}], {sizes[four]}, policy;"
    return text + "cp.async.commit_group; mov.u32 $0, $1; }"


@triton.constexpr_function
def _ask_lines(lanes, slot, vector, words, start, partly):
    """PTX: when all lanes of the warp are here, copies from every fourth row of `words` words into slot `slot` of $1.

    $2: a lane's first row, `start` words before what it copies. $3..$6: how many bytes, where `partly`.
    """
    sources = [f"$2 + {4 * (start + 4 * four * words)}" for four in range(4)]
    sizes = [f"{4 * vector}, ${3 + four}" if partly else f"{4 * vector}" for four in range(4)]
    return _line_copies(slot * line_slot_bytes(lanes, vector), sources, sizes, vector)


@triton.constexpr_function
def _take_unit(lanes, slot, unit, vector, behind):
    """PTX: the words of a unit of rows g and g + 8. first waits, for the copies and the other lanes, where it is 0."""
    text = f"cp.async.wait_group {behind}; bar.warp.sync 0xffffffff;" if unit == 0 else ""
    for half in (0, 1):
        names = ", ".join(f"${half * vector + v}" for v in range(vector))
        kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[vector]
        names = f"{{{names}}}" if vector > 1 else names
        place = slot * line_slot_bytes(lanes, vector) + 8 * half * 32 * vector
        text += f"ld.shared.{kind} {names}, [${2 * vector} + {place}];"
    return text


@triton.jit
def _line_place(queue, lane, row, chunk, V: tl.constexpr):
    """The address in the first slot of a chunk of a row of this lane's warp.

    Put together with OR, which no compiler folds into an instruction's address. Of a sum, the assembler of CUDA 12.8
    keeps the queue's address in a uniform register. It then writes a copy that the GPU refuses as an illegal
    instruction.
    """
    return (queue[0] + (lane // 32 * 16 + row) * (32 * V)) | (chunk ^ (row % 2 * 4)) * (4 * V)


@triton.jit
def _words_of_units(
    queue, lane, at, first, second, rows, left_first, left_second, V: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Without ASM: the queue with the words that `ask_units` asks for, in the order in which lanes take them."""
    for unit in tl.static_range(2):
        place = second if unit else first
        left = left_second if unit else left_first
        for half in tl.static_range(2):
            row = lane % 32 // 4 + 8 * half
            for v in tl.static_range(V):
                there = (row < rows) & (lane % 4 * V < left)
                queue = queue + (tl.load(at + place + row * W + lane % 4 * V + v, mask=there, other=0),)
    return queue


@triton.jit
def ask_lines(
    queue, lane, at, rows, left, SLOT: tl.constexpr, V: tl.constexpr, W: tl.constexpr, START: tl.constexpr,
    PARTLY: tl.constexpr, ASM: tl.constexpr = ASSEMBLY,
):  # fmt: skip
    """The queue with 8 V words of each of sixteen rows, W words apart, on their way into SLOT, for each warp.

    at: pointers (L,), the same for a warp, START words before its line of the first row. What was in SLOT must have
    been taken. PARTLY: of the rows only `rows` are read and of their lines only `left` words, a multiple of V. Zeros
    stand for the others. A load is four rows of 32 V bytes each.
    """
    L: tl.constexpr = lane.shape[0]
    if ASM:
        row = lane % 32 // 8
        chunk = lane % 8
        given = (_line_place(queue, lane, row, chunk, V), at + row * W + chunk * V)
        if PARTLY:
            for four in tl.static_range(4):
                there = (4 * four + row < rows) & (chunk * V < left)
                given = given + (tl.where(there, 4 * V, 0),)
        assembly(_ask_lines(L, SLOT, V, W, START, PARTLY), "=r,r,l,r,r,r,r" if PARTLY else "=r,r,l", given)
    else:
        queue = _words_of_units(queue, lane, at + START, 0, 4 * V, rows, left, left - 4 * V, V, W)
    return queue


@triton.jit
def ask_units(
    queue, lane, at, first, second, rows, left_first, left_second, V: tl.constexpr, W: tl.constexpr,
    ASM: tl.constexpr = ASSEMBLY,
):  # fmt: skip
    """`ask_lines` into the first slot, of lines whose two units, 4 V words each, lie anywhere. They lie `first` and
    `second` words (L,) behind `at`, the same for a warp, in the first of `rows` rows. Of these `left_..` words are
    read."""
    L: tl.constexpr = lane.shape[0]
    if ASM:
        row = lane % 32 // 8
        chunk = lane % 8
        of_first = chunk < 4
        left = tl.where(of_first, left_first, left_second)
        place = tl.where(of_first, first, second) + (row * W + chunk % 4 * V)
        given = (_line_place(queue, lane, row, chunk, V), at + place)
        for four in tl.static_range(4):
            there = (4 * four + row < rows) & (chunk % 4 * V < left)
            given = given + (tl.where(there, 4 * V, 0),)
        assembly(_ask_lines(L, 0, V, W, 0, True), "=r,r,l,r,r,r,r", given)
    else:
        queue = _words_of_units(queue, lane, at, first, second, rows, left_first, left_second, V, W)
    return queue


@triton.constexpr_function
def _ask_listed(vector):
    """PTX: when all lanes of the warp are here, copies from $2..$5, of $6..$9 bytes, into the first slot of $1."""
    sources, sizes = [f"${2 + four}" for four in range(4)], [f"{4 * vector}, ${6 + four}" for four in range(4)]
    return _line_copies(0, sources, sizes, vector)


@triton.jit
def listed_row(lane, K: tl.constexpr):
    """Which of sixteen rows a lane has to do with: it copies rows K = 0 to 3, and multiplies rows K = 4 and 5."""
    row = lane % 32 // 8 + 4 * K
    if K >= 4:
        row = lane % 32 // 4 + 8 * (K - 4)
    return row


@triton.jit
def ask_listed_lines(
    queue, lane, words, rows, there, left, V: tl.constexpr, W: tl.constexpr, INSIDE: tl.constexpr,
    ASM: tl.constexpr = ASSEMBLY,
):  # fmt: skip
    """`ask_lines` of sixteen rows that lie anywhere in a matrix of rows of W words, into the first slot.

    words: pointers (L,), the same for a warp, to where its lines lie in row 0. rows, there: numbers, and whether they
    are read, of each lane's six rows (`listed_row`). INSIDE: all 8 V words lie within a row, of `left` otherwise.
    """
    if ASM:
        chunk = lane % 8
        given = (_line_place(queue, lane, lane % 32 // 8, chunk, V),)
        for four in tl.static_range(4):
            given = given + (words + (rows[four].to(tl.int64) * W + chunk * V),)
        for four in tl.static_range(4):
            copied = there[four]
            if not INSIDE:
                copied = copied & (chunk * V < left)
            given = given + (tl.where(copied, 4 * V, 0),)
        assembly(_ask_listed(V), "=r,r,l,l,l,l,r,r,r,r", given)
    else:
        for unit in tl.static_range(2):
            place = (4 * unit + lane % 4) * V
            for half in tl.static_range(2):
                for v in tl.static_range(V):
                    read = there[4 + half] & (place < left)
                    at = words + (rows[4 + half].to(tl.int64) * W + place + v)
                    queue = queue + (tl.load(at, mask=read, other=0),)
    return queue


@triton.jit
def take_unit(
    queue, lane, SLOT: tl.constexpr, UNIT: tl.constexpr, V: tl.constexpr, BEHIND: tl.constexpr,
    ASM: tl.constexpr = ASSEMBLY,
):  # fmt: skip
    """(2 V tiles of words, the queue): lane (g, t) = (lane / 4, lane % 4) takes chunk 4 UNIT + t of rows g and g + 8.

    UNIT 0, which comes first, waits for the ask that BEHIND more have followed.
    """
    L: tl.constexpr = lane.shape[0]
    if ASM:
        at = (_line_place(queue, lane, lane % 32 // 4, 4 * UNIT + lane % 4, V),)
        words = assembly(_take_unit(L, SLOT, UNIT, V, BEHIND), operands("=&r", 2 * V, "r", 1), at)
    else:
        words = queue[: 2 * V]
        queue = queue[2 * V :]
    return words, queue


@triton.jit
def drain(lane, ASM: tl.constexpr = ASSEMBLY):
    """Waits for all copies, so that slots may be filled anew: those of nothing write zeros, in no order with others.

    For those of a warp's other lanes as well: what was a slot of lines may become one of each lane's own words.
    """
    if ASM:
        assembly("cp.async.wait_all; bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", (lane,))


@triton.jit
def at_slot(queue, number, BYTES: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """The queue, of slots of BYTES, a multiple of 128, as if slot `number` were its first: known when the kernel runs.

    Hand what has become of it to `after_slot`.
    """
    if ASM:
        queue = (queue[0] + number * BYTES,)
    return queue


@triton.jit
def after_slot(queue, own, ASM: tl.constexpr = ASSEMBLY):
    """The queue of which `own` was a slot, after what was asked for or taken there."""
    if not ASM:
        queue = own
    return queue


@triton.jit
def emptied(queue, lane, ASM: tl.constexpr = ASSEMBLY):
    """The queue without what is on its way: asked for, but taken by no one."""
    drain(lane, ASM)
    if not ASM:
        queue = ()
    return queue


@triton.constexpr_function
def _number(value, short):
    """PTX: $0 = a number that LLVM does not see, and where `short` the assembler neither: $1 may be 2^30 to it."""
    return f"shr.u32 $0, $1, 30; add.u32 $0, $0, {value};" if short else f"mov.u32 $0, {value}; // $1"


@triton.jit
def as_it_comes(number: tl.constexpr, SHORT: tl.constexpr = False, ASM: tl.constexpr = ASSEMBLY):
    """A constant that the compiler does not know, so that a loop up to it is not unrolled.

    SHORT: the loop has so few instructions that the assembler would. Grids have fewer than 2^30 programs.
    """
    if ASM:
        number = assembly(_number(number, SHORT), "=r,r", (tl.program_id(0),), PURE=True)
    return number


@triton.constexpr_function
def _fetch(size):
    """PTX: asks the L2 for `size` bytes from $1 on where $2."""
    return (
        f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], {size}; mov.u32 $0, $2; }}"
    )


@triton.jit
def fetch_ahead(at, there, BYTES: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """Asks the L2 for BYTES, a multiple of 16, from each lane's `at` on where `there`. Compute capability 9.0."""
    if ASM:
        assembly(_fetch(BYTES), "=r,l,r", (at, there.to(tl.int32)))
