"""What one source a stage changed in `kernels/`: lines, kernels, parameters, and what the compiler makes of them.

    python -m benchmarks.merged lines                      from git's history, in a whole clone
    python -m benchmarks.merged registers OLD.txt NEW.txt  from what `benchmarks.compiled` printed in two trees

An old tree is that of `git archive COMMIT dejavu_train kernels benchmarks | tar -x -C FOLDER`. One Triton compiles
both, for compute capability 9.0 and the settings of an H200. Kernels are matched by the names of their cases.
"""

import argparse
import ast
import re
from collections.abc import Sequence
from pathlib import Path

import triton

from benchmarks.rows import ROOT, append_row, command_line, commit
from tests.count_lines import code_lines, sources

LINES, REGISTERS = (f"benchmarks/results/merged_{name}.csv" for name in ("lines", "registers"))
STEPS = (  # what, first and last commit
    ("all of it", "2de014c", "HEAD"),
    ("MLP of one row: numbers, 4 bits", "b9d7c70^", "b9d7c70"),
    ("attention", "ae615de^", "ae615de"),
    ("MLP of several rows", "f0117da^", "f0117da"),
    ("products of rows: numbers, 4 bits, q/k/v, listed rows", "bb43e68^", "bb43e68"),
    ("hidden values in front of down", "f8a5b6b^", "f8a5b6b"),
    ("q/k/v of selected heads: numbers, 4 bits, beside a predictor", "9bc2bf1^", "9bc2bf1"),
    ("prediction and selection", "d33ae6e^", "d33ae6e"),
    ("output projections, wide rows, products behind cuBLAS", "7541dcb^", "7541dcb"),
    ("what merged stages spelled out twice", "644b3b9^", "644b3b9"),
    ("the same, later", "4b7c284^", "dc21d4c"),
)
RENAMED = (  # name of a case in the old tree -> in the new one
    (r"^sparse_mlp |^4 bits: int4_mlp ", lambda found: "4 bits: mlp " if "4 bits" in found[0] else "mlp "),
    (r"^4 bits: predict_select (.*) (_predict\w+)$", r"4 bits: predict_rows \1 \2"),
    (r"^4 bits: predict_select (.*) (_select\w+)$", r"4 bits: select \1 \2"),
    (r"^4 bits: int4_listed ", "4 bits: hidden_tokens "),
)
FOUND = re.compile(
    r"(.+) (_\w+): (\d+) registers, (\d+) B stack \((\d+) in loops\), (\d+) B shared, .*?loops of ([^;]+?) instr"
)


def numbers_of(at: str) -> dict[str, int]:
    """Of the kernels of a commit: all lines and those of code, kernels, the most parameters of a device function and of
    another one."""
    found = {"lines": 0, "code": 0, "kernels": 0, "of_device": 0, "of_others": 0}
    for name, source in sources(at):
        if not name.startswith("kernels/"):
            continue
        found["lines"] += source.count("\n")
        found["code"] += code_lines(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                on_device = any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                most = "of_device" if on_device else "of_others"
                found[most] = max(found[most], len(names) - (names[:1] in (["self"], ["cls"])))
                found["kernels"] += on_device and node.name.endswith("_kernel")
    return found


def write_lines(path: Path) -> None:
    path.unlink(missing_ok=True)
    for what, first, last in STEPS:
        before, after = numbers_of(first), numbers_of(last)
        times = {"before": before, "after": after}
        changes = {f"{key}_{when}": each[key] for key in before for when, each in times.items()}
        append_row(path, {"what": what, "first": first, "last": commit() if last == "HEAD" else last} | changes)


def compiled(text: str) -> dict[str, dict[str, str]]:
    """Case and kernel -> what was printed about it."""
    names = ("registers", "stack", "stack_in_loops", "shared", "loops")
    found = (FOUND.match(line) for line in text.splitlines())
    return {f"{each[1]} {each[2]}": dict(zip(names, each.groups()[2:], strict=True)) for each in found if each}


def renamed(name: str) -> str:
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    return name


def write_registers(old: Path, new: Path, path: Path) -> None:
    """Cases that both trees have, by their name and the place of a kernel among those of its case."""
    path.unlink(missing_ok=True)

    def by_place(text: str) -> dict[tuple[str, int], tuple[str, dict[str, str]]]:
        placed: dict[tuple[str, int], tuple[str, dict[str, str]]] = {}
        for name, each in compiled(text).items():
            case, _, kernel = renamed(name).rpartition(" ")
            placed[case, sum(key[0] == case for key in placed)] = kernel, each
        return placed

    before, after = by_place(old.read_text()), by_place(new.read_text())
    for key in before:
        if key in after:
            row = {"case": key[0], "kernel_before": before[key][0], "kernel_after": after[key][0]}
            for name in before[key][1]:
                row |= {f"{name}_before": before[key][1][name], f"{name}_after": after[key][1][name]}
            append_row(path, row | {"triton": triton.__version__, "after_commit": commit()})
    print(f"{len(before)} kernels before, {len(after)} after, {sum(key in after for key in before)} in both")
    print("only before:", *(" ".join(map(str, key)) for key in before if key not in after), sep="\n  ")


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("lines")
    both = parts.add_parser("registers", formatter_class=argparse.RawDescriptionHelpFormatter)
    both.add_argument("old", type=Path)
    both.add_argument("new", type=Path)
    args = parser.parse_args(argv)
    if args.part == "lines":
        write_lines(ROOT / LINES)
    else:
        write_registers(args.old, args.new, ROOT / REGISTERS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
