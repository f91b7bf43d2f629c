# mypy: disable-error-code="assignment"
"""When the programs of a 4-bit step's kernels reach given places in their code, in whole decoding steps: one GPU.

    python -m benchmarks.phases --model 66b --try defaults:ahead=0.85

SETTINGS:STEPS words as in `int4_settings`. `placement` says when programs start and end; this says what they do in
between, which a profiler of one kernel alone does not: there other kernels' code and words are not in the way. Before
anything is compiled, PLACES' functions get statements that note %globaltimer of a program's first thread when a value
is there. That takes instructions and registers: a step that notes is timed, and says little where it takes much longer
than one that does not. A line for each place: microseconds after the kernel's first program began, the earliest, a
tenth, half, nine tenths and the latest of its programs, of the last launch in a step.
"""

import importlib
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from benchmarks import decode, int4_settings
from benchmarks.placement import quantiles

PROGRAMS = 8192  # of a grid; those beyond are not noted
TIMES = tl.constexpr(0)  # address, set before anything is compiled


@dataclass(frozen=True)
class Place:
    """Before, or `after`, each line of a function that begins with `line` ("" = the end); when `value` is there."""

    kernel: str
    what: str
    function: str
    line: str
    value: str
    after: bool = False


PLACES = (
    Place("int4_mlp", "begins", "mlp.int4_mlp._int4_mlp_kernel", "listed = rows_list", "pid"),
    Place("int4_mlp", "has asked", "mlp.int4_mlp._int4_mlp_kernel", "wait_for_predecessor", "pid"),
    Place("int4_mlp", "has waited", "mlp.int4_mlp._int4_mlp_kernel", "wait_for_predecessor", "pid", True),
    Place("int4_mlp", "has normalised x", "mlp.int4_mlp._int4_mlp_kernel", "held = 0", "n[0]"),
    Place("int4_mlp", "has all of fc1", "mlp.int4_mlp._int4_mlp_kernel", "queue = emptied", "held + 0 * pid"),
    Place("int4_mlp", "ends", "mlp.int4_mlp._int4_mlp_kernel", "", "pid"),
    Place("q/k/v", "begins", "attention.qkv_int4.own_tile", "queue = lane_queue", "tile"),
    Place("q/k/v", "has asked", "attention.qkv_int4.own_tile", "wait_for_predecessor", "tile"),
    Place("q/k/v", "has waited", "attention.qkv_int4.own_tile", "wait_for_predecessor", "tile", True),
    Place("q/k/v", "knows its head", "attention.qkv_int4.own_tile", "needed = own_bits", "own_bits"),
    Place("q/k/v", "ends", "attention.qkv_int4.own_tile", "", "tile"),
    Place("q/k/v", "selection begins", "lookahead.select_nibbles.select_nibbles", "words = ()", "block_number"),
    Place("q/k/v", "selection waited", "lookahead.select_nibbles.select_nibbles", "planes = hidden", "block_number"),
    Place("q/k/v", "selection ends", "lookahead.select_nibbles.select_nibbles", "", "block_number"),
    Place("q/k/v", "has products", "attention.qkv_int4._store_hidden", "own = (tl.arange", "rank"),
    Place("q/k/v", "has hidden values", "attention.qkv_int4._store_hidden", "", "rank"),
    Place("sum", "begins", "lookahead.mlp_ahead._add_ahead_kernel", "stripe = tl.program_id", "stripe", True),
    Place("sum", "has waited", "lookahead.mlp_ahead._add_ahead_kernel", "m = tl.load(estimate)", "stripe"),
    Place("sum", "ends", "lookahead.mlp_ahead._add_ahead_kernel", "", "stripe"),
    Place("attention", "begins", "attention.flash_decode.attend", "b = pair // H", "pair"),
    Place("attention", "has waited", "attention.flash_decode.attend", "start_dependents_and_wait", "pair", True),
    Place("attention", "ends", "attention.flash_decode.attend", "", "pair"),
    Place("out-projection", "begins", "attention.out_projection_int4._project_head_rows_kernel", "rows = line", "line"),
    Place("out-projection", "has waited", "attention.out_projection_int4._project_head_rows_kernel", "wait_for", "line",
          True),
    Place("out-projection", "has its input", "attention.out_projection_int4._project_head_rows_kernel", "for begin in",
          "x[0]"),
    Place("out-projection", "ends", "attention.out_projection_int4._project_head_rows_kernel", "", "line"),
)  # fmt: skip


@triton.constexpr_function
def _note_text(times, number):
    """PTX: writes the time when $1 is there to the program's entry of place `number`."""
    at = times + 8 * PROGRAMS * number
    return (
        "{ .reg .pred q, there; .reg .u32 i, j; .reg .u64 a, t;"
        f"mov.u32 i, %ctaid.x; mov.u32 j, %tid.x; setp.lt.u32 q, i, {PROGRAMS}; setp.eq.and.u32 q, j, 0, q;"
        "setp.ne.u32 there, $1, 0xDEADBEEF; mov.u64 t, 0; @there mov.u64 t, %globaltimer;"
        f"mul.wide.u32 a, i, 8; add.u64 a, a, {at}; @q st.global.u64 [a], t; mov.u32 $0, $1; }}"
    )


@triton.jit
def note_place(NUMBER: tl.constexpr, value):
    tl.inline_asm_elementwise(_note_text(TIMES, NUMBER), "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)


def noting(source: str, places: dict[int, Place]) -> str:
    """The source of one function, with its places noted under their numbers."""
    made: list[str] = []
    found = set()
    for text in source.rstrip("\n").split("\n"):
        indent = text[: len(text) - len(text.lstrip())]
        own = [n for n, place in places.items() if place.line and text.lstrip().startswith(place.line)]
        found |= set(own)
        notes = {n: f"{indent}note_place({n}, {places[n].value})" for n in own}
        made += [note for n, note in notes.items() if not places[n].after]
        made.append(text)
        made += [note for n, note in notes.items() if places[n].after]
    ends = [n for n, place in places.items() if not place.line]
    lost = [places[n] for n in places if n not in found and n not in ends]
    assert not lost, f"no such line: {lost}"
    return "\n".join(made + [f"    note_place({n}, {places[n].value})" for n in ends]) + "\n"


def note_all_places() -> None:
    """Changes the functions of PLACES."""
    for name in dict.fromkeys(place.function for place in PLACES):
        module_name, _, function_name = name.rpartition(".")
        module = importlib.import_module(f"kernels.{module_name}")
        vars(module)["note_place"] = note_place
        function = getattr(module, function_name)
        own = {number: place for number, place in enumerate(PLACES) if place.function == name}
        function._unsafe_update_src(noting(function.src, own))


def described(times: torch.Tensor) -> list[str]:
    """Lines of times (places, programs) int64, ns, zero where none was noted."""
    began: dict[str, int] = {}
    lines = []
    for place, row in zip(PLACES, times, strict=True):
        noted = sorted(row[row > 0].tolist())
        if noted:
            first = began.setdefault(place.kernel, noted[0])
            numbers = " ".join(f"{(each - first) / 1e3:6.1f}" for each in (noted[0], *quantiles(noted), noted[-1]))
            lines.append(f"{place.kernel:15} {place.what:17} {len(noted):5} {numbers}")
    return lines


def main() -> int:
    args = int4_settings.asked(int4_settings.tries_parser(__doc__))
    global TIMES
    times = torch.zeros(len(PLACES), PROGRAMS, dtype=torch.int64, device="cuda")
    TIMES = tl.constexpr(times.data_ptr())
    note_all_places()
    for each in int4_settings.tries_of(args.tries, args.model):
        times.zero_()
        row = decode.run_cell(each.cell, args.model, each.weights, 20, 4.5e9)
        took = f"{row.get('p50_ms')} ms a step that notes {row.get('note', '')}"
        print(f"{args.model} {each.settings} {each.step}: {took}")
        print("kernel, place, programs; us: first, a tenth, half, nine tenths, last")
        print(*described(times.cpu()), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
