"""The tables of docs/notes/lossless.md, from the rows of benchmarks/lossless.py and lossless_gpu.py."""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.tables_format import Row, age, card, markdown, provenance, read_csv

CPU, GPU = "benchmarks/results/lossless.csv", "benchmarks/results/lossless_gpu.csv"

CPU_DRAFT = "sparse, 8 bits"  # of a model in fp32 on a CPU, the fastest

DRAFTS = {  # way of the rows of opt-mini on a CPU -> what README calls it; their drafts read 40 % of the candidates
    "sparse": "the sparse model",
    "dense, 8 bits": "the dense model with weights in 8 bits",
    "sparse, 8 bits": "the sparse model with weights in 8 bits",
    "prompt lookup": "copies of earlier text alone",
    "sparse, 8 bits, and copies": "copies, and the sparse model with weights in 8 bits",
}


def last_of(rows: Sequence[Row], **same: str) -> Row | None:
    """The last row with these fields, or None."""
    found = [row for row in rows if all(row[name] == value for name, value in same.items())]
    return found[-1] if found else None


def _number(row: Row | None, name: str) -> str:
    return f"{float(row[name]):.3g}" if row is not None and row[name] else ""


def cpu_cycles(rows: Sequence[Row]) -> dict[int, float]:
    """Dense steps that a cycle takes by length of its draft, of the newest row of timed cycles."""
    row = last_of(rows, what="cycles")
    pairs = (each.split("=") for each in row["note"].rpartition(": ")[2].split()) if row is not None else ()
    return {int(length): float(steps) for length, steps in pairs}


def forced_cpu_table(root: Path) -> str:
    """True shapes on a CPU, as :func:`forced_table` has those of a GPU."""
    rows = [row for row in read_csv(root / CPU) if row["what"] in ("forced", "cycles")]
    shares = sorted({row["forced"] for row in rows if row["forced"]})
    table, used = [], []
    for model, way in dict.fromkeys((row["model"], row["way"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["way"]) == (model, way)]
        cycles, found = cpu_cycles(mine), [last_of(mine, what="forced", forced=share) for share in shares]
        costs = [f"{cycles[0]:.3g}", f"{(cycles[4] - cycles[0]) / 4:.3g}"] if cycles else ["", ""]
        table.append([f"{model.upper()}, fp32", way, *costs, *(_number(row, "ratio") for row in found)])
        used += [row for row in found if row is not None]
    headings = ["shape", "way", "verification", "a step of the draft", *(f"speed at {share}" for share in shares)]
    made = ", ".join(sorted({f"{row['cpu']}, {row['threads']} threads" for row in used}))
    return f"{markdown(headings, table)}\n{made}{age(used)}.\n"


def forced_table(root: Path) -> str:
    """True shapes on a GPU: verification and a step of the draft in dense steps, and speeds at forced acceptances."""
    rows = read_csv(root / GPU)
    shares = sorted({row["forced"] for row in rows if row["what"] == "forced" and row["forced"]})
    headings = [
        "shape",
        "card",
        "way",
        "verification",
        "a step of the draft",
        *(f"speed at {share}" for share in shares),
    ]
    table = []
    for key in dict.fromkeys(_forced_key(row) for row in rows if row["what"] == "cycle"):
        (model, weights, on, way), mine = key, [row for row in rows if _forced_key(row) == key]
        cycles = {g: last_of(mine, what="cycle", length=g) for g in ("0", "4")}
        verified, four = cycles["0"], cycles["4"]
        step = ""
        if verified is not None and four is not None and way != "prompt lookup":
            step = f"{(float(four['ratio']) - float(verified['ratio'])) / 4:.3g}"
        name = f"{model.upper()}, {'4 bits' if weights == 'int4' else 'fp16'}"
        speeds = [_number(last_of(mine, what="forced", forced=share), "ratio") for share in shares]
        if way == "draft_length=0":
            speeds = [next(filter(None, speeds), "")] * len(speeds)
        table.append([name, on, way, _number(verified, "ratio"), step, *speeds])
    return f"{markdown(headings, table)}\n{provenance(rows)}.\n"


def _forced_key(row: Row) -> tuple[str, str, str, str]:
    return row["model"], row["weights"], card(row), row["way"]


def speed_table(root: Path) -> str:
    """Whole texts of a model by all ways on a CPU: speed and acceptance by decoding."""
    return _speeds(read_csv(root / CPU), "cpu")


def opening_table(root: Path) -> str:
    """Greedy text by what drafts it, as a guide shows it."""
    rows = [row for row in read_csv(root / CPU) if row["what"] == "speed" and row["text"] == "all"]
    table = []
    for way, draft in DRAFTS.items():
        row = last_of(rows, model="opt-mini", decoding="greedy", way=way)
        if row is not None:
            table.append([draft, _number(row, "ratio"), _share(row)])
    return markdown(["what drafts", "lossless speed, our dense engine is 1", "accepted"], table)


def gpu_speed_table(root: Path) -> str:
    """The same on a GPU."""
    return _speeds(read_csv(root / GPU), "gpu")


def _speeds(rows: Sequence[Row], device: str) -> str:
    rows = [row for row in rows if row["what"] == "speed" and row["text"] == "all"]
    decodings = list(dict.fromkeys(row["decoding"] for row in rows))
    headings = ["model", "way", *(f"{name}: speed, acceptance" for name in decodings)]
    table, used = [], []
    for model, weights, way in dict.fromkeys((row["model"], row.get("weights", ""), row["way"]) for row in rows):
        mine = [row for row in rows if row.get("weights", "") == weights]
        found = [last_of(mine, model=model, way=way, decoding=name) for name in decodings]
        used += [row for row in found if row is not None]
        cells = [", ".join(filter(None, (_number(row, "ratio"), _share(row)))) for row in found]
        table.append([f"{model}, 4 bits" if weights == "int4" else model, way, *cells])
    devices = ", ".join(sorted({row[device] for row in used}))
    return f"{markdown(headings, table)}\nOur dense engine is 1. {devices}{age(used)}.\n"


def _share(row: Row | None) -> str:
    return "" if row is None or float(row["acceptance"] or 0) == 0 else f"{100 * float(row['acceptance']):.0f} %"


def search_table(root: Path) -> str:
    """Densities and bundles on validation text."""
    rows = [row for row in read_csv(root / CPU) if row["what"] in ("search", "choices")]
    table = []
    for note in dict.fromkeys(row["note"] for row in rows):
        choices = [last_of(rows, what="choices", note=note, decoding=name) for name in ("greedy", "1.0")]
        shares = [f"{100 * float(row['acceptance']):.1f} %" if row is not None else "" for row in choices]
        table.append([note, *shares, _number(last_of(rows, what="search", note=note, decoding="greedy"), "ratio")])
    headings = ["a draft of", "greedy choices that survive", "at 1.0, at best", "greedy speed"]
    tokens = ", ".join(sorted({f"{int(row['tokens']):,}" for row in rows if row["what"] == "choices"}))
    return f"{markdown(headings, table)}\nChoices at {tokens} positions{age(rows)}.\n"


LOSSLESS_TABLES: dict[str, Callable[[Path], str]] = {
    "lossless-forced": forced_table,
    "lossless-opening": opening_table,
}
