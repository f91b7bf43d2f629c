"""Sentences of README and of result pages whose numbers are those of rows, as the tables below them have."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.tables_exact import EXACT_SENTENCES, USUAL, gains, steps_at
from benchmarks.tables_format import NoRows, percent
from benchmarks.tables_one_model import opening_rows

DEMO = "benchmarks/results/demo.json"  # a copy of the results.json that `make demo` wrote


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
    """What sparsity gains in 4 bits over leaving silent neurons out, by size."""
    steps = steps_at(root, USUAL)
    found = {key[0]: gains(rows)[1] for key, rows in steps.items() if key[1:] == ("4 bits", 1) and key[0][0].isdigit()}
    first, second, *_ = sorted(found, key=lambda name: float(name.rstrip("b")))
    return (
        f"In 4 bits predictors gain {found[first]:.2f} times over exact skip at {first.upper()}, and"
        f" {found[second]:.2f} times at {second.upper()}.\n"
    )


VERDICTS: Mapping[str, Callable[[Path], str]] = {
    "demo-verdict": demo_verdict,
    **EXACT_SENTENCES,
    "one-model-verdict": one_model_verdict,
}
