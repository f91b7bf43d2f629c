"""The tables of steps on a CPU, and of pipelines on a CPU and a GPU."""

import json
from pathlib import Path
from typing import Any

from benchmarks.tables_format import Row, age, commits, markdown, read_csv

CPU = "benchmarks/results/cpu_decode.csv"
EXTRA, GENERATE = "benchmarks/results/cpu_extra.csv", "benchmarks/results/generate.jsonl"
KINDS = (("1.3b", "float32"), ("1.3b", "int8"), ("opt-mini", "float32"), ("opt-mini", "int8"))
RIVALS = ("transformers-eager", "transformers-compile", "llama.cpp")
BITS = {"float32": "32 bits", "int8": "8 bits"}


def cpu_table(root: Path) -> str:
    """Rivals and our engine, dense and sparse: ms, and megabytes that a token reads. A line is of one run."""
    rows = read_csv(root / CPU)
    table, shown = [], []
    for model, stored in KINDS:
        run = newest_run(rows, model, stored)
        rivals = [next((row for row in run if row["engine"] == name), None) for name in RIVALS]
        ours = {row["engine"]: row for row in run if row["stored"] == stored}
        sparse = [row for row in run if row["engine"] == f"sparse-{stored}"]
        kinds = [
            *rivals,
            ours[f"dense-{stored}"],
            next((row for row in sparse if row["head_selected"] == "1"), None),
            next((row for row in sparse if row["head_selected"] != "1"), None),
        ]
        cells = [f"{float(row['p50_ms']):.3g}" if row else "" for row in kinds]
        read = [f"{float(row['mb_per_token']):,.0f}" if row else "" for row in kinds[-3:]]
        table.append([f"{model}, {BITS[stored]}", *cells, ", ".join(filter(None, read))])
        shown += [row for row in kinds if row]
    headings = ["ms per token", "transformers", "compiled", "llama.cpp", "our dense", "sparse, all heads"]
    headings += ["sparse, fewer heads", "MB read by ours"]
    processors = ", ".join(sorted({row["cpu"] for row in shown}))
    return f"{markdown(headings, table)}\nRows: [cpu_decode.csv]({CPU}). {processors}{age(shown)}. {commits(shown)}.\n"


def newest_run(rows: list[Row], model: str, stored: str) -> list[Row]:
    """The rows of the newest commit that has transformers beside our engine."""
    of_model = [row for row in rows if row["model"] == model]
    engines: dict[tuple[str, str], set[str]] = {}
    for row in of_model:
        engines.setdefault((row["date"], row["commit"]), set()).add(row["engine"])
    beside = [key for key, names in engines.items() if {"transformers-eager", f"dense-{stored}"} <= names]
    return [row for row in of_model if (row["date"], row["commit"]) == beside[-1]]


def pipeline_table(root: Path) -> str:
    """Pipelines with all defaults, of transformers' dense model and ours, the newest of each device and model."""
    found: dict[tuple[str, str, str], Row] = {}
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in read_csv(root / EXTRA):
        if row["what"] == "pipeline":
            found[row["cpu"], row["model"], row["case"]] = row
    for (device, model, case), row in found.items():
        newest.setdefault((device, model), {"row": row})[case] = float(row["value"])
    for row in map(json.loads, (root / GENERATE).read_text().splitlines()):
        if "pipeline_ms" in row:
            ms = {"transformers dense": row["pipeline_dense_ms"], "sparse": row["pipeline_ms"]}
            newest[row["gpu"], row["shape"].upper()] = ms | {
                "sparse over dense": row["pipeline_over_dense"],
                "row": row,
            }
    cases = ("transformers dense", "sparse", "sparse over dense")
    table = [
        [f"{device}, {model}", *(f"{each[case]:.3g}" for case in cases)] for (device, model), each in newest.items()
    ]
    used = [each["row"] for each in newest.values()]
    headings = ["device, model", "transformers, dense, ms per token", "ours, ms per token", "times as fast"]
    links = f"[cpu_extra.csv]({EXTRA}), [generate.jsonl]({GENERATE})"
    return f"{markdown(headings, table)}\nRows: {links}{age(used)}. {commits(used)}.\n"
