"""The tables of docs/notes/one-model.md: one model's quality and speed, its stages, and how long they should take."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.one_model_plan import DRAFTED, SCALES, describe
from benchmarks.tables_format import Row, markdown, mean, percent, provenance, read_csv

ONE_MODEL = "benchmarks/results/one_model.csv"
DENSE_WAYS, SPARSE_WAYS = ("dense-engine", "dense-cpu"), ("triton", "cpu")


def newest_rows(root: Path) -> list[Row]:
    """Those of the largest model."""
    rows = read_csv(root / ONE_MODEL)
    largest = max((row["scale"] for row in rows), key=list(SCALES).index)
    return [row for row in rows if row["scale"] == largest]


def _values(rows: Sequence[Row], measure: str, **same: str) -> list[float]:
    return [
        float(row["value"])
        for row in rows
        if row["measure"] == measure and all(row[name] == value for name, value in same.items())
    ]


def _milliseconds(
    rows: Sequence[Row], weights: str, ways: Sequence[str], pair: tuple[float, float], gpus: str
) -> list[float]:
    """The selection nearest to that which was asked for: mean densities are not met exactly."""
    return [
        float(row["value"])
        for row in rows
        if row["measure"] == "ms" and row["weights"] == weights and row["way"] in ways and row["gpus"] == gpus
        and abs(float(row["mlp_density"]) - pair[0]) < 0.03 and abs(float(row["head_density"]) - pair[1]) < 0.08
    ]  # fmt: skip


def _lossless(rows: Sequence[Row], weights: str) -> str:
    """Greedy speed in dense steps and acceptance of the fastest sparse draft."""
    drafts = [row for row in rows if row["measure"] == "lossless" and row["weights"] == weights]
    drafts = [row for row in drafts if row["subject"] == "greedy" and row["way"].startswith("sparse")]
    if not drafts:
        return ""
    best = max(drafts, key=lambda row: float(row["value"]))
    accepted = _values(rows, "acceptance", weights=weights, subject="greedy", way=best["way"])
    return f"{float(best['value']):.2f}, {100 * accepted[0]:.0f} % ({best['way']})"


def result_table(root: Path) -> str:
    """Each kind of weights and selection: perplexity, tasks, milliseconds, lossless speed."""
    rows = newest_rows(root)
    headings = [
        "weights", "neurons, heads", "perplexity of the texts", "rise, %", "accuracy of the tasks, %",
        "answers changed, %", "ms a token", "ms on two GPUs", "lossless speed, accepted",
    ]  # fmt: skip
    table = []
    theirs = _values(rows, "ms", way="dense", weights="fp16")
    if theirs:
        table.append(["fp16, transformers", "all", *[""] * 4, f"{theirs[0]:.3g}", "", ""])
    kinds = dict.fromkeys(
        (row["weights"], row["mlp_density"], row["head_density"]) for row in rows if row["measure"] == "perplexity"
    )
    for weights, neurons, heads in kinds:
        same = {"weights": weights, "mlp_density": neurons, "head_density": heads}
        pair = float(neurons), float(heads)
        dense = pair == (1.0, 1.0)
        perplexities = _values(rows, "perplexity", **same)
        cells = [weights, "all" if dense else f"{100 * pair[0]:g} %, {100 * pair[1]:g} %"]
        cells.append(f"{math.exp(mean([math.log(value) for value in perplexities])):.4g}")
        cells.append(percent(math.expm1(mean(_values(rows, "increase", **same)))))
        for measure in ("accuracy", "changed"):
            found = _values(rows, measure, **same)
            cells.append(f"{100 * mean(found):.1f}" if found else "")
        for gpus in ("1", "2"):
            times = _milliseconds(rows, weights, DENSE_WAYS if dense else SPARSE_WAYS, pair, gpus)
            cells.append(f"{times[0]:.3g}" if times else "")
        cells.append(_lossless(rows, weights) if pair == (DRAFTED, 1.0) else "")
        table.append(cells)
    measured = [row for row in rows if row["measure"] == "ms"] or rows
    about = f"Scale {rows[0]['scale']}. Perplexity is the geometric mean over the texts."
    about += f" {provenance(measured, 'device')}."
    return f"{markdown(headings, table)}\n{about}\n"


def time_table(root: Path) -> str:
    """What pretraining came to, and the seconds of each process."""
    rows = newest_rows(root)
    told = {row["subject"]: float(row["value"]) for row in rows if row["measure"] == "pretraining"}
    bits = [f"{row['subject']} {float(row['value']):.3g}" for row in rows if row["measure"] == "bits_per_byte"]
    active = [100 * float(row["value"]) for row in rows if row["measure"] == "active"]
    about = f"Pretrained on {told['tokens'] / 1e6:.3g} million tokens in {told['seconds']:.0f} s"
    about += f" ({told['stream_tokens'] / 1e6:.3g} million different ones). Bits a byte: {', '.join(bits)}."
    about += f" {mean(active):.1f} % of the neurons are active."
    times = [[row["subject"], row["error"], row["value"]] for row in rows if row["measure"] == "seconds"]
    return f"{markdown(['process', 'began, s', 'took, s'], times)}\n{about}\n"


def forecast_table(_: Path) -> str:
    """Minutes of each stage, by size."""
    return describe()


ONE_MODEL_TABLES: dict[str, Callable[[Path], str]] = {
    "one-model": result_table,
    "one-model-times": time_table,
    "one-model-forecast": forecast_table,
}
