"""Sentences of README and of result pages whose numbers are those of rows, as the tables below them have."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables_cpu import CPU, newest_run
from benchmarks.tables_decode import decode_rows, int4_steps
from benchmarks.tables_format import NoRows, Row, percent, read_csv
from benchmarks.tables_one_model import opening_rows

DEMO = "benchmarks/results/demo.json"  # a copy of the results.json that `make demo` wrote
FULL_SIZE = ("6.7b", "13b", "30b", "66b")
"""Shapes whose weights take a GPU longer to read than its kernels take to start."""


def demo_verdict(root: Path) -> str:
    """Quality and speed of the bundle as calibrated, of the first text."""
    results = json.loads((root / DEMO).read_text())
    times = {row["backend"]: row for row in results["timing"]}
    sparse, name = times["cpu"], results["texts"][0]["name"]
    asked = {key: sparse[key] for key in ("asked_mlp_density", "asked_head_density")}
    rows = {  # a row as calibrated has other thresholds for each layer, and stands in where there is no other
        row["selection"]: row
        for row in sorted(results["quality"], key=lambda row: not row.get("as_calibrated"))
        if row["text"] == name and row["sparse_from"] == 0
        and all(math.isclose(row[key], value) for key, value in asked.items())
    }  # fmt: skip
    if not {"predicted", "static"} <= rows.keys():
        raise NoRows(f"{DEMO} has no predicted and no static rows of what was timed")
    predicted, fixed = rows["predicted"], 1 + rows["static"]["increase"]
    ms = {backend: f"{row['ms_per_token']['p50']:.3g}" for backend, row in times.items()}
    return (
        f"**Verdict.** With {_asked(sparse)}, perplexity of {name} rises by"
        f" {percent(predicted['increase']).lstrip('+')} %, and {100 * predicted['mlp_selected']:.1f} % of the neurons"
        f" are read. A token takes {ms['cpu']} ms instead of {ms['dense-cpu']} in the same engine, and {ms['dense']} in"
        " transformers.\n"
        f"As many neurons, but the same ones for every token (static), make perplexity {fixed:.0f} times as high. So"
        " looking at each token is what pays.\n"
    )


def _asked(timed: Mapping[str, Any]) -> str:
    heads = timed["asked_head_density"]
    skipped = f" and {100 * heads:.0f} % of the heads" if heads < 1 else ""
    return f"{100 * timed['asked_mlp_density']:.0f} % of the neurons as candidates{skipped}"


def between(values: Sequence[float], form: str = ".1f") -> str:
    """Smallest and largest.

    >>> between([2.28, 1.76])
    '1.8 to 2.3'
    """
    return f"{min(values):{form}} to {max(values):{form}}"


def speed_verdict(root: Path) -> str:
    """One GPU from 6.7B on, and a CPU."""
    newest = {key: rows[-1] for key, rows in decode_rows(root).items() if key[0] in FULL_SIZE}
    ms = {key: float(row["p50_ms"]) for key, row in newest.items()}

    def faster(kind: str) -> str:
        return between([ms[model, "dense"] / ms[model, name] for model, name in ms if name == kind])

    shares = [100 * float(row["share45"]) for (_, kind), row in newest.items() if kind == "dense"]
    rival = ms["6.7b", "transformers compiled"] / ms["6.7b", "dense"]
    steps = int4_steps(root)
    fewest = min(
        float(row["p50_ms"]) for (model, what, _), row in steps.items()
        if (model, what) == ("66b", "heads 85 %") and "weights=int4" in row["options"]
    )  # fmt: skip
    demo = {row["backend"]: row["ms_per_token"]["p50"] for row in json.loads((root / DEMO).read_text())["timing"]}
    return (
        "**Verdict.** With a tenth of the neurons and 85 % of the heads a token is"
        f" {faster('sparse (heads 85 %)')} times as fast as in our dense engine. With half of the heads it is"
        f" {faster('sparse (heads 50 %)')} times as fast. That is one H200, from 6.7B to 66B.\n"
        f"Our dense engine reads memory at {between(shares, '.0f')} % of its bandwidth there. At 6.7B it is {rival:.1f}"
        " times as fast as transformers' compiled model.\n"
        f"Four bits and 85 % of the heads together make a 66B token {ms['66b', 'dense'] / fewest:.1f} times as fast as"
        f" fp16 dense. On a CPU a sparse token is {_cpu_ratio(read_csv(root / CPU)):.1f} times as fast as in"
        f" transformers at the 1.3B shape, and {demo['dense'] / demo['cpu']:.0f} times on opt-mini.\n"
    )


def _cpu_ratio(rows: list[Row]) -> float:
    """Milliseconds of transformers over those of the sparse engine with all heads, 1.3B shape in 32 bits."""
    run = newest_run(rows, "1.3b", "float32")
    dense = next(row for row in run if row["engine"] == "transformers-eager")
    sparse = next(row for row in run if row["engine"] == "sparse-float32" and row["head_selected"] == "1")
    return float(dense["p50_ms"]) / float(sparse["p50_ms"])


def one_model_verdict(root: Path) -> str:
    """Which weights are the fastest, and what sparsity gains in fp16."""
    times = {(row["weights"], row["neurons"] == "all"): float(row["ms"]) for row in opening_rows(root)}
    weights, dense = min(times, key=lambda key: times[key])
    gains = [f"{times[kind, True] / times[kind, False]:.2f} times in {kind}" for kind in ("fp16", "4 bits")]
    return (
        f"The fastest row at this size is {weights}, {'dense' if dense else 'sparse'}. A sparse step is"
        f" {' and '.join(gains)} as fast as a dense one.\n{_from_size(root)}"
    )


def _from_size(root: Path) -> str:
    """The smallest shape whose sparse 4-bit step is faster than its dense one."""
    steps: dict[str, dict[str, float]] = {}
    for (model, what, _), row in int4_steps(root).items():
        if "weights=int4" in row["options"] and what in ("dense", "heads 100 %"):
            kept = steps.setdefault(model, {})
            kept[what] = min(kept.get(what, float("inf")), float(row["p50_ms"]))
    won = [model for model, ms in steps.items() if ms["heads 100 %"] < ms["dense"]]
    first = min(won, key=lambda name: float(name.rstrip("b")))
    gain = steps[first]["dense"] / steps[first]["heads 100 %"]
    return f"In 4 bits sparsity wins from {first.upper()} on, the next size that was timed: {gain:.2f} times.\n"


VERDICTS: Mapping[str, Callable[[Path], str]] = {
    "demo-verdict": demo_verdict,
    "speed-verdict": speed_verdict,
    "one-model-verdict": one_model_verdict,
}
