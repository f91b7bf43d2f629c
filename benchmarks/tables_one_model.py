"""The tables of docs/notes/one-model.md: one model's quality and speed, its stages, and how long they should take."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.one_model_plan import DRAFTED, SCALES, describe, forecast, pretraining_step
from benchmarks.tables_format import Row, markdown, mean, percent, provenance, read_csv

ONE_MODEL = "benchmarks/results/one_model.csv"
DENSE = (1.0, 1.0)
STAGES = ("pretrain", "predictors", "gptq")  # processes before the measurements
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


def _kinds(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Weights and densities of which there are perplexities."""
    names = ("weights", "mlp_density", "head_density")
    scored = dict.fromkeys(tuple(row[name] for name in names) for row in rows if row["measure"] == "perplexity")
    return [dict(zip(names, values, strict=True)) for values in scored]


def _densities(kind: Row) -> tuple[float, float]:
    return float(kind["mlp_density"]), float(kind["head_density"])


def _selected(pair: tuple[float, float]) -> str:
    return "all" if pair == DENSE else f"{100 * pair[0]:g} %, {100 * pair[1]:g} %"


def _quality(rows: Sequence[Row], kind: Row) -> list[str]:
    """Perplexity, as a geometric mean over the texts, and its rise over dense fp16."""
    perplexities, rises = _values(rows, "perplexity", **kind), _values(rows, "increase", **kind)
    return [f"{math.exp(mean([math.log(value) for value in perplexities])):.4g}", percent(math.expm1(mean(rises)))]


def _milliseconds(rows: Sequence[Row], weights: str, pair: tuple[float, float], gpus: str) -> str:
    """Of the selection nearest to the one asked for: mean densities are not met exactly."""
    ways = DENSE_WAYS if pair == DENSE else SPARSE_WAYS
    times = [
        float(row["value"])
        for row in rows
        if row["measure"] == "ms" and row["weights"] == weights and row["way"] in ways and row["gpus"] == gpus
        and abs(float(row["mlp_density"]) - pair[0]) < 0.03 and abs(float(row["head_density"]) - pair[1]) < 0.08
    ]  # fmt: skip
    return f"{times[0]:.3g}" if times else ""


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
    for kind in _kinds(rows):
        weights, pair = kind["weights"], _densities(kind)
        cells = [weights, _selected(pair), *_quality(rows, kind)]
        for measure in ("accuracy", "changed"):
            found = _values(rows, measure, **kind)
            cells.append(f"{100 * mean(found):.1f}" if found else "")
        cells += [_milliseconds(rows, weights, pair, gpus) for gpus in ("1", "2")]
        cells.append(_lossless(rows, weights) if pair == (DRAFTED, 1.0) else "")
        table.append(cells)
    measured = [row for row in rows if row["measure"] == "ms"] or rows
    about = f"Scale {rows[0]['scale']}. Perplexity is the geometric mean over the texts."
    about += f" {provenance(measured, 'device')}."
    return f"{markdown(headings, table)}\n{about}\n"


def opening_rows(root: Path) -> list[Row]:
    """Weights, neurons, quality and milliseconds with all heads, of what was timed on one GPU."""
    rows, found = newest_rows(root), []
    for kind in _kinds(rows):
        pair = _densities(kind)
        time = _milliseconds(rows, kind["weights"], pair, "1")
        if time and pair[1] == 1:
            neurons = _selected(pair).partition(",")[0]
            quality = _quality(rows, kind)[0]
            found.append({"weights": kind["weights"], "neurons": neurons, "perplexity": quality, "ms": time})
    return found


def opening_table(root: Path) -> str:
    """Quality and speed of the same weights with all heads, as README shows them."""
    table = [list(row.values()) for row in opening_rows(root)]
    device = next(row["device"] for row in newest_rows(root) if row["measure"] == "ms")
    return markdown([f"on one {device}", "neurons read", "perplexity of eight texts", "ms per token"], table)


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


def forecast_check_table(root: Path) -> str:
    """Stages of the forecast for the same number of GPUs beside the run's. Decoding on several GPUs is left out."""
    rows = newest_rows(root)
    scale = SCALES[rows[0]["scale"]]
    told = {row["subject"]: float(row["value"]) for row in rows if row["measure"] == "pretraining"}
    gpus = round(told["processes"])
    expected, step = forecast(scale, gpus), pretraining_step(scale, gpus)
    took = {row["subject"]: (float(row["error"]), float(row["value"])) for row in rows if row["measure"] == "seconds"}
    alone = [span for name, span in took.items() if name not in STAGES and "-shards" not in name]
    measured = max(began + seconds for began, seconds in alone) - min(began for began, _ in alone)
    prepared = sum(expected[stage] for stage in ("text", "collect", "predictors", "calibrate"))
    compared = {
        "pretraining around its own time, s": (
            expected["pretrain"] - scale.pretrain_seconds, took["pretrain"][1] - told["seconds"],
        ),
        "text, collecting, predictors, calibration, s": (prepared, took["predictors"][1]),
        "measurements of one GPU each, s": (expected["measure"], measured),
        "pretraining, thousand tokens a second": (
            scale.rows * scale.context / step / 1e3, told["tokens"] / told["seconds"] / 1e3,
        ),
    }  # fmt: skip
    cells = [[name, *(f"{value:.0f}" for value in pair)] for name, pair in compared.items()]
    return markdown([f"{rows[0]['scale']} on {gpus} GPUs", "forecast", "measured"], cells) + "\n"


def forecast_table(_: Path) -> str:
    """Minutes of each stage, by size."""
    return describe()


ONE_MODEL_TABLES: dict[str, Callable[[Path], str]] = {
    "one-model-opening": opening_table,
    "one-model": result_table,
}
