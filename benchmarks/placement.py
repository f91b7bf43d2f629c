# mypy: disable-error-code="assignment"
"""Which multiprocessors the programs of a decoding step's kernels run on, and when they end: one GPU.

    python -m benchmarks.placement --model 66b --try defaults:dense fc2=4/2/528/128/0:dense defaults:ahead=0.85

SETTINGS:STEPS words as in `int4_settings`. Programs of one kernel start while those of the one before it end, so that
neither a grid's size nor a chain of one kernel says how evenly a step's work lies. Before anything is compiled each
kernel's source gets statements that note a program's multiprocessor, when its first thread starts, has waited for the
kernel before it (where the kernel itself says that, not a function it calls) and ends (%globaltimer). That takes time,
and registers, for want of which fewer programs may fit on a multiprocessor than without: a step that notes is timed,
counters set back included, and says little where it takes less time than one that does not (`int4_settings`). A line
for each kernel of the middle layer, microseconds after all earlier kernels have ended.
"""

import inspect
import re
import statistics
import sys
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

import dejavu_train.engine.ops  # noqa: F401  (imports all kernels that a step may take)
from benchmarks import decode, int4_settings
from benchmarks.harness import step_times
from dejavu_train.engine.decode import DecodeEngine

PROGRAMS, LAUNCHES = 4096, 128  # of a kernel in a step; those beyond are not noted
NUMBERS = 4  # of an entry: start, wait (0: not known), end, multiprocessor and above it the grid's size
GRID = 1 << 16
ENTRIES = tl.constexpr(0)  # addresses, set before anything is compiled
COUNTS = tl.constexpr(0)
_PLACE = (
    "mov.u32 i, %ctaid.x; mov.u32 j, %ctaid.y; mov.u32 n, %nctaid.x; mad.lo.u32 i, j, n, i;"
    f"setp.lt.u32 q, i, {PROGRAMS}; mov.u32 j, %tid.x; setp.eq.and.u32 q, j, 0, q;"
)
_REGISTERS = ".reg .pred q; .reg .u32 i, j, n; .reg .u64 a, s, t;"


@triton.constexpr_function
def _number_text(counts, kernel):
    """PTX: $0 = how many launches of this kernel have had this program."""
    at = counts + 4 * PROGRAMS * kernel
    return (
        f"{{ {_REGISTERS} {_PLACE} mov.u32 $0, {LAUNCHES}; mul.wide.u32 a, i, 4; add.u64 a, a, {at};"
        "@q ld.volatile.global.u32 $0, [a]; }"
    )


@triton.constexpr_function
def _end_text(entries, counts, kernel):
    """PTX: writes the entry of a program whose number is $1, start $2 and wait $3."""
    at = entries + 8 * NUMBERS * LAUNCHES * PROGRAMS * kernel
    return (
        f"{{ {_REGISTERS} {_PLACE} setp.lt.and.u32 q, $1, {LAUNCHES}, q; mad.lo.u32 j, i, {LAUNCHES}, $1;"
        f"mul.wide.u32 a, j, {8 * NUMBERS}; add.u64 a, a, {at}; @q st.global.v2.u64 [a], {{$2, $3}};"
        "mov.u32 n, %nctaid.x; mov.u32 j, %nctaid.y; mul.lo.u32 n, n, j; mov.u32 j, %smid;"
        f"mad.wide.u32 t, n, {GRID}, 0; cvt.u64.u32 s, j; add.u64 t, t, s;"
        "@q st.global.u64 [a + 24], t; mov.u64 t, %globaltimer;"
        f"@q st.global.u64 [a + 16], t; mul.wide.u32 a, i, 4; add.u64 a, a, {counts + 4 * PROGRAMS * kernel};"
        "add.u32 n, $1, 1; @q st.volatile.global.u32 [a], n; mov.u32 $0, n; }"
    )


@triton.jit
def launch_number(KERNEL: tl.constexpr):
    return tl.inline_asm_elementwise(
        _number_text(COUNTS, KERNEL), "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def time_now():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [tl.program_id(0)], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def note_end(number, start, wait, KERNEL: tl.constexpr):
    tl.inline_asm_elementwise(
        _end_text(ENTRIES, COUNTS, KERNEL), "=r,r,l,l", [number, start, wait], dtype=tl.int32, is_pure=False, pack=1
    )


def noting(source: str, kernel: int) -> str:
    """The source of a kernel that returns nowhere early, with its programs' times noted under the number `kernel`."""
    head = re.search(r"\):( +# fmt: skip)?\n( {4}\"\"\".*?\"\"\"\n)?", source, re.S)
    assert head and not re.search(r"^ +return", source, re.M), "not a kernel that can be timed"
    wait = r"^( +)((?:wait_for_predecessor|start_dependents_and_wait)\(PDL\))$"
    body = re.sub(wait, r"\1\2\n\1_waited = time_now()", source[head.end() :].rstrip("\n"), flags=re.M)
    begin = f"    _number = launch_number({kernel})\n    _began = time_now()\n    _waited = _began * 0\n"
    return source[: head.end()] + begin + body + f"\n    note_end(_number, _began, _waited, {kernel})\n"


def note_all_kernels() -> list[str]:
    """Changes every kernel of this package; their names, in the order of their numbers."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        functions = vars(module).values() if name.startswith("kernels.") else ()
        for function in [each for each in functions if isinstance(each, triton.JITFunction)]:
            if function.fn.__name__.endswith("_kernel") and function.fn.__module__ == name:
                short = function.fn.__name__.removeprefix("_").removesuffix("_kernel")
                found[f"{name.rpartition('.')[2]}.{short}"] = function
    for number, function in enumerate(found.values()):
        vars(inspect.getmodule(function.fn)).update(launch_number=launch_number, time_now=time_now, note_end=note_end)
        function._unsafe_update_src(noting(function.src, number))
    return list(found)


@dataclass(frozen=True)
class Launch:
    """One launch: of each of its programs start, wait, end (ns) and multiprocessor."""

    kernel: str
    programs: list[tuple[int, int, int, int]]

    @property
    def end(self) -> int:
        return max(end for _, _, end, _ in self.programs)


def launches(entries: torch.Tensor, counts: torch.Tensor, names: list[str]) -> list[Launch]:
    """entries (kernels, programs, launches, 4) int64, counts (kernels, programs); in the order of their ends.

    Launches of one kernel may differ in the size of their grids, as those of the layers and of the LM head do: what a
    program notes k-th of one size belongs to the k-th launch of that size.
    """
    found: dict[tuple[str, int, int], Launch] = {}
    for kernel, name in enumerate(names):
        for program in counts[kernel].nonzero()[:, 0].tolist():
            of_size: dict[int, int] = {}
            for start, wait, end, place in entries[kernel, program, : int(counts[kernel, program])].tolist():
                size = place // GRID
                number = of_size[size] = of_size.get(size, -1) + 1
                launch = found.setdefault((name, size, number), Launch(name, []))
                launch.programs.append((start, wait, end, place % GRID))
    return sorted(found.values(), key=lambda each: each.end)


def quantiles(numbers: list[int]) -> list[int]:
    """A tenth, half and nine tenths of sorted numbers."""
    return [numbers[int(share * (len(numbers) - 1))] for share in (0.1, 0.5, 0.9)]


def described(steps: list[Launch], multiprocessors: int) -> list[str]:
    """A line each but for the first, whose time would be the host's."""
    lines = []
    ended = steps[0].end
    for each in steps[1:]:
        places = [place for *_, place in each.programs]
        a_place = [places.count(place) for place in range(multiprocessors)]
        last: dict[int, int] = {}
        for _, _, end, place in each.programs:
            last[place] = max(last.get(place, 0), end)
        waits = [wait for _, wait, _, _ in each.programs]
        times = (*quantiles(sorted(last.values())), each.end)
        said = f"{(min(waits) - ended) / 1e3:6.1f} " if min(waits) else "     - "
        said += " ".join(f"{(time - ended) / 1e3:6.1f}" for time in times)
        share = ", ".join(f"{a_place.count(count)} of {count}" for count in sorted(set(a_place)))
        lines.append(f"{each.kernel:42} {len(places):5} {said}   {share}")
        ended = max(ended, each.end)
    return lines


def middle_layer(steps: list[Launch], n_layers: int) -> list[Launch]:
    """The last kernel of the layer before the middle one, and those of that layer."""
    names = [each.kernel for each in steps]
    last = max((name for name in set(names) if names.count(name) >= n_layers), key=names.index)
    ends = [place for place, name in enumerate(names) if name == last]
    return steps[ends[n_layers // 2 - 1] : ends[n_layers // 2] + 1]


def main() -> int:
    args = int4_settings.asked(int4_settings.tries_parser(__doc__))
    global ENTRIES, COUNTS
    names = note_all_kernels()
    entries = torch.zeros(len(names), PROGRAMS, LAUNCHES, NUMBERS, dtype=torch.int64, device="cuda")
    counts = torch.zeros(len(names), PROGRAMS, dtype=torch.int32, device="cuda")
    ENTRIES, COUNTS = tl.constexpr(entries.data_ptr()), tl.constexpr(counts.data_ptr())
    for each in int4_settings.tries_of(args.tries, args.model):
        engine = decode.started_engine(each.cell, args.model, each.weights, 40)

        def noted(engine: DecodeEngine = engine) -> None:
            counts.zero_()
            engine.step()

        took = statistics.median(step_times(noted, 20))
        torch.cuda.synchronize()
        print(f"{args.model} {each.settings} {each.step}: {took:.3f} ms a step that notes")
        print("kernel, programs; us: wait over, first tenth, half, nine tenths of the multiprocessors done, end")
        print("multiprocessors by their number of programs")
        every = launches(entries.cpu(), counts.cpu(), names)
        shared = torch.cuda.get_device_properties(0).multi_processor_count
        print(*described(middle_layer(every, engine.shape.n_layers), shared), sep="\n", flush=True)
        del engine, noted
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
