"""Tables of exact.csv and zeros.csv: steps that read all rows, leave silent neurons out, or ask predictors."""

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.tables_format import Row, markdown, provenance, read_csv

EXACT = "benchmarks/results/exact.csv"
ZEROS = "benchmarks/results/zeros.csv"
USUAL = 0.06  # share of all neurons that is active, in tables
NEAR = 0.004  # what a measured share may differ
ENGINES = ("dense", "exact", "sparse")
Steps = dict[tuple[str, str, int], dict[str, Row]]


def exact_rows(root: Path) -> list[Row]:
    """Timed rows, oldest first."""
    return sorted((row for row in read_csv(root / EXACT) if row["p50_ms"]), key=lambda row: row["date"])


def weights_of(row: Row) -> str:
    return "4 bits" if "weights=int4" in row["options"] else "fp16"


def steps_at(root: Path, share: float) -> Steps:
    """(model, weights, rows) -> by engine the newest row with so many active neurons. The fastest sparse one with all
    heads."""
    found: Steps = {}
    for row in exact_rows(root):
        if abs(float(row["active"]) - share) > NEAR or float(row["head_union"]) < 1:
            continue
        kept = found.setdefault((row["model"], weights_of(row), int(row["batch"])), {})
        before = kept.get(row["engine"])
        if row["engine"] != "sparse" or before is None or float(row["p50_ms"]) < float(before["p50_ms"]):
            kept[row["engine"]] = row
    return {key: rows for key, rows in found.items() if {"exact", "sparse"} <= rows.keys()}


def gains(rows: Mapping[str, Row]) -> tuple[float, float]:
    """How many times as fast: the exact step as one that reads all rows, and the sparse step as the exact one."""
    dense, exact, sparse = (float(rows[engine]["p50_ms"]) for engine in ENGINES)
    return dense / exact, exact / sparse


def exact_table(root: Path) -> str:
    """Steps of one row."""
    steps = {key[:2]: rows for key, rows in steps_at(root, USUAL).items() if key[2] == 1}
    table, shown = [], []
    for (model, weights), rows in sorted(steps.items(), key=lambda item: (item[0][1] != "fp16", _order(item[0][0]))):
        first, second = gains(rows)
        ms = [f"{float(rows[engine]['p50_ms']):.3g}" for engine in ENGINES]
        recall = f"{100 * float(rows['sparse']['recall']):.0f} %"
        table.append([_named(model), weights, *ms, f"{first:.2f}x", f"{second:.2f}x", recall])
        shown += list(rows.values())
    headings = ["shapes", "weights", "all rows, ms", "exact, ms", "sparse, ms", "exact over all rows"]
    headings += ["sparse over exact", "active neurons found"]
    return f"{markdown(headings, table)}\nRows: [exact.csv]({EXACT}). {provenance(shown)}.\n"


def exact_batches_table(root: Path) -> str:
    """Steps of several rows in fp16: what they keep live together, and two tokens' overlap."""
    steps = {key[2]: rows for key, rows in steps_at(root, USUAL).items() if key[:2] == ("6.7b", "fp16")}
    table, shown = [], []
    for batch, rows in sorted(steps.items()):
        exact, (first, second) = rows["exact"], gains(rows)
        live = f"{100 * float(exact['live']):.1f} %"
        ms = [f"{float(rows[engine]['p50_ms']):.3g}" for engine in ENGINES]
        table.append([str(batch), live, f"{float(exact['overlap']):.2f}", *ms, f"{first:.2f}x", f"{second:.2f}x"])
        shown += list(rows.values())
    headings = ["rows", "live together", "overlap of two tokens", "all rows of weights, ms", "exact, ms", "sparse, ms"]
    made = markdown([*headings, "exact over all", "sparse over exact"], table)
    return f"{made}\nRows: exact.csv. {provenance(shown)}.\n"


def zeros_table(root: Path) -> str:
    """An MLP with silent neurons left out, by the share that is live, beside one that reads all."""
    rows = read_csv(root / ZEROS)
    timed: dict[tuple[str, str], dict[float, dict[str, float]]] = {}
    for row in rows:
        what = "eight slots" if row["slots"] == "1" else row["rows"]
        timed.setdefault((row["model"], what), {}).setdefault(float(row["live"]), {})[row["way"]] = float(row["us"])
    table = []
    for (model, what), by_share in sorted(timed.items(), key=lambda item: (_order(item[0][0]), item[0][1])):
        shares = sorted(by_share)
        skips = [min(us for way, us in by_share[s].items() if way != "read") for s in shares]
        table.append([_named(model), what, f"{by_share[shares[0]]['read']:.1f}", *(f"{us:.1f}" for us in skips)])
    headings = ["shapes", "rows", "all read, us"] + [f"{100 * share:g} % live" for share in shares]
    return f"{markdown(headings, table)}\nRows: [zeros.csv]({ZEROS}). {provenance(rows)}.\n"


def exact_verdict(root: Path) -> str:
    """Gains of exact skip, and of predictors over it."""
    steps = {key: gains(rows) for key, rows in steps_at(root, USUAL).items() if key[2] == 1}

    def span(weights: str, which: int) -> str:
        values = [pair[which] for key, pair in steps.items() if key[1] == weights]
        return f"{min(values):.2f} to {max(values):.2f}"

    return (
        "**Verdict.** Leaving silent neurons out needs no training and changes no text. It makes a token"
        f" {span('fp16', 0)} times as fast in fp16, and {span('4 bits', 0)} times in 4 bits, where"
        f" {100 * USUAL:.0f} % of the neurons are active.\n"
        f"Predictors that select a tenth of the neurons add {span('fp16', 1)} times to that in fp16, and"
        f" {span('4 bits', 1)} times in 4 bits. They cost training, and some quality.\n"
    )


def break_even_line(root: Path) -> str:
    """How what predictors gain over exact skip falls with the active share, between the ends that were timed."""
    parts = []
    for weights in ("fp16", "4 bits"):
        for share in (0.02, 0.3):
            step = steps_at(root, share)
            found = [
                float(rows["exact"]["p50_ms"]) / float(rows["sparse"]["p50_ms"])
                for key, rows in step.items()
                if key[1:] == (weights, 1)
            ]
            parts.append(f"{min(found):.2f} to {max(found):.2f}")
    return (
        f"In fp16 predictors gain {parts[0]} times over exact skip with 2 % of the neurons active, and {parts[1]} times"
        f" with 30 %. In 4 bits it is {parts[2]} and {parts[3]} times.\n"
    )


def _order(model: str) -> tuple[bool, float]:
    size = "".join(letter for letter in model.rpartition("-")[2] if letter.isdigit() or letter == ".")
    return not model[0].isdigit(), float(size)


def _named(model: str) -> str:
    return f"OPT-{model.upper()}" if model[0].isdigit() else model


EXACT_TABLES: dict[str, Callable[[Path], str]] = {
    "exact": exact_table,
    "exact-batches": exact_batches_table,
    "zeros": zeros_table,
}
EXACT_SENTENCES: dict[str, Callable[[Path], str]] = {"speed-verdict": exact_verdict, "break-even": break_even_line}
