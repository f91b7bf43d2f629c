"""Puts what the processes of benchmarks/one_model.py wrote into one file: a row for each number."""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.rows import CPU_STEP, SCORE, STEP, five_digits, made_now
from dejavu_train.ground.files import replacing

COLUMNS = (
    "scale measure weights way mlp_density head_density subject value error tokens gpus device torch commit date "
    "sources"
).split()
PRETRAINING = "steps seconds tokens stream_tokens processes".split()
Row = dict[str, Any]


def _read(paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    for path in sorted(paths):
        with path.open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)


def pretraining_rows(model: Path) -> Iterator[Row]:
    """Tokens, seconds, and bits per byte of the held-out texts."""
    path = model / "pretraining.json"
    if not path.is_file():
        return
    told = json.loads(path.read_text("utf-8"))
    about = {"measure": "pretraining", "device": told["device"], "torch": told["torch"], "gpus": told["processes"]}
    for name in PRETRAINING:
        yield about | {"subject": name, "value": told[name]}
    for name, found in told["heldout"].items():
        density = sum(found["density"]) / len(found["density"])
        yield about | {"measure": "bits_per_byte", "subject": Path(name).stem, "value": found["bits_per_byte"]}
        yield about | {"measure": "active", "subject": Path(name).stem, "value": density}


def text_rows(rows: Path) -> Iterator[Row]:
    """Perplexities, and by how many nats they rose."""
    for row in _read(rows.glob("texts-*.csv")):
        weights = "fp16" if row["weights"] == "fp16" else "4 bits"
        same = {"weights": weights, "mlp_density": row["asked_mlp_density"], "head_density": row["asked_head_density"]}
        same |= {"subject": row["text"], "tokens": row["tokens"], "torch": row["versions"]}
        yield same | {"measure": "perplexity", "value": row["perplexity"]}
        yield same | {"measure": "increase", "value": row["increase"], "error": row["error"]}
        yield same | {"measure": "block_bytes", "value": row["block_bytes"]}


def task_rows(rows: Path) -> Iterator[Row]:
    """Accuracies, and shares of the answers that changed, of folders tasks-WEIGHTS-NEURONS-HEADS."""
    for path in sorted(rows.glob("tasks-*/tasks.csv")):
        _, weights, neurons, heads = path.parent.name.split("-")
        for row in _read([path]):
            if row["task"] == "mean" or row["metric"] != "acc":
                continue
            same = {"weights": "fp16" if weights == "fp16" else "4 bits", "subject": row["task"]}
            same |= {"tokens": row["examples"], "device": row["device"], "torch": row["torch"]}
            for densities, name in (((neurons, heads), "value"), ((1, 1), "dense")):
                at = same | {"mlp_density": densities[0], "head_density": densities[1]}
                yield at | {"measure": "accuracy", "value": row[name]}
                yield at | {"measure": "changed", "value": row["flips"] if name == "value" else 0}


def speed_rows(rows: Path) -> Iterator[Row]:
    """Milliseconds a token, of folders speed-WEIGHTS-NEURONS-HEADS."""
    for path in sorted(rows.glob("speed-*/results.json")):
        weights = path.parent.name.split("-")[1]
        results = json.loads(path.read_text("utf-8"))
        for timing in results["timing"]:
            yield {
                "measure": "ms", "weights": "fp16" if weights == "fp16" else "4 bits", "way": timing["backend"],
                "mlp_density": timing["asked_mlp_density"], "head_density": timing["asked_head_density"],
                "subject": f"prompt {timing['prompt']}", "value": timing["ms_per_token"]["p50"],
                "tokens": timing["new_tokens"], "gpus": "1", "device": timing["device"],
                "torch": results["versions"]["torch"],
            }  # fmt: skip


def lossless_rows(rows: Path) -> Iterator[Row]:
    """Speeds in those of the dense engine, and acceptances, over all texts."""
    for row in _read(rows.glob("lossless-*.csv")):
        if row["what"] != "speed" or row["text"] != "all":
            continue
        same = {"weights": "4 bits" if row["weights"] == "int4" else "fp16", "way": row["way"]}
        same |= {
            "subject": row["decoding"],
            "tokens": row["tokens"],
            "device": row["gpu"] or row["cpu"],
            "torch": row["torch"],
        }
        yield same | {"measure": "lossless", "value": row["ratio"]}
        yield same | {"measure": "acceptance", "value": row["acceptance"]}


def time_rows(rows: Path) -> Iterator[Row]:
    """Seconds of each process."""
    path = rows / "times.csv"
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            for _, name, code, began, seconds in csv.reader(file):
                yield {"measure": "seconds", "subject": name, "way": f"exit {code}", "error": began, "value": seconds}


def gather(scale: str, model: Path, rows: Path) -> None:
    """Write rows.csv anew from all that is there."""
    made = made_now(*STEP, *CPU_STEP, *SCORE)
    found: list[Row] = list(pretraining_rows(model))
    for part in (text_rows, task_rows, speed_rows, lossless_rows, time_rows):
        found += part(rows)
    with replacing(rows / "rows.csv") as path, path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(five_digits({"scale": scale, **row, **made}) for row in found)
