"""Two versions of the decode engine side by side: the same cells, in turns, on one machine.

    git archive --prefix .before/ COMMIT dejavu_train kernels benchmarks | tar -x
    python -m benchmarks.alternate --before .before --out FOLDER [--rounds 3] [--groups 1 4]

Each version runs each group of cells in a process of its own, one version after the other, ROUNDS times. FOLDER gets
before.csv and after.csv, with rows as benchmarks/results/decode.csv has them. Its alternate.csv has for each cell both
medians, the change, and the spread. The spread is the largest distance between the rounds of one version.
"""

import csv
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.rows import append_row, command_line, needs_gpu

AHEAD = "site=1 head_density=1.0,0.85,0.5"
INT4 = "weights=int4 predictors=int4"
DENSE_INT4 = "engine=dense weights=int4"
TWO, EIGHT = "batch=2 mlp_density=0.153 head_density=1.0", "batch=8 mlp_density=0.29 head_density=1.0"
GROUPS = (  # model, and cells with the same weights: 20 in all
    ("6.7b", ("engine=dense", AHEAD, TWO, EIGHT)),
    ("6.7b", (DENSE_INT4, f"{INT4} {AHEAD}", f"{INT4} {EIGHT}")),
    ("30b", ("engine=dense", "site=1 head_density=0.85")),
    ("30b", (DENSE_INT4, f"{INT4} site=1 head_density=0.85")),
    ("66b", (DENSE_INT4, f"{INT4} site=1 head_density=0.85", f"{INT4} batch=2 mlp_density=0.08 head_density=1.0")),
    ("66b", ("engine=dense", "site=1 head_density=0.5")),
)
SHOWN = ("gpu", "model", "engine", "batch", "options", "mlp_union", "head_union")
Rows = list[dict[str, str]]


def run(folder: Path, name: str, group: int, out: Path) -> Rows:
    """The rows of one group's cells with the code of a folder, which go into FOLDER/name.csv as well."""
    model, cells = GROUPS[group]
    made = out / "part.csv"
    made.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
    environment["DEJAVU_COMMIT"] = os.environ.get(f"DEJAVU_{name.upper()}", name)
    command = [sys.executable, "-m", "benchmarks.decode", "--models", model, "--out", str(made.resolve())]
    with (out / f"{name}.log").open("a") as log:
        subprocess.run([*command, "--cells", *cells], cwd=folder, env=environment, check=False, stdout=log, stderr=log)
    rows = list(csv.DictReader(made.read_text().splitlines())) if made.exists() else []
    for row in rows:
        append_row(out / f"{name}.csv", row)
    return rows


def compare(found: dict[tuple[int, int], dict[str, Rows]], path: Path) -> float:
    """Write the table of both versions' cells. The geometric mean of after / before."""
    changes = []
    path.unlink(missing_ok=True)
    for cell in sorted(found):
        times = {name: [float(row["p50_ms"]) for row in rows if row["p50_ms"]] for name, rows in found[cell].items()}
        if len(times) < 2 or not all(times.values()):
            print("no times of both versions:", found[cell])
            continue
        before, after = statistics.median(times["before"]), statistics.median(times["after"])
        spread = max((max(each) - min(each)) / min(each) for each in times.values())
        changes.append(after / before)
        commits = {f"{name}_commit": rows[0]["commit"] for name, rows in found[cell].items()}
        numbers = {"before_ms": before, "after_ms": after, "change": f"{after / before - 1:+.4f}"}
        numbers |= {"spread": f"{spread:.4f}", "rounds": len(times["after"])}
        append_row(path, {key: found[cell]["after"][0][key] for key in SHOWN} | numbers | commits)
    return math.exp(statistics.fmean(map(math.log, changes)))


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a folder with the code of the earlier version")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", nargs="+", type=int, default=list(range(len(GROUPS))), help="by their number")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no new pair begins after so long")
    args = parser.parse_args()
    needs_gpu(parser)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    rows_of_cells: dict[tuple[int, int], dict[str, Rows]] = {}
    for turn in range(args.rounds):
        for group in range(len(GROUPS)):
            if group not in args.groups or time.monotonic() - began > args.seconds:
                continue
            pair = [("before", args.before), ("after", Path())]
            for name, folder in pair if turn % 2 == 0 else reversed(pair):
                for number, row in enumerate(run(folder, name, group, args.out)):
                    rows_of_cells.setdefault((group, number), {}).setdefault(name, []).append(row)
            print(f"round {turn}, group {group}: {time.monotonic() - began:.0f} s", flush=True)
            mean = compare(rows_of_cells, args.out / "alternate.csv")
    print(f"after / before, geometric mean: {mean:.4f}\n" + (args.out / "alternate.csv").read_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
