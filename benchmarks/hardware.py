"""Writes dejavu_train/hardware.json, the rates of GPUs that `train.py --plan` reckons with, from committed rows.

    python -m benchmarks.hardware             writes it
    python -m benchmarks.hardware --check     exits with 1 where it would change

At the 6.7B shape a training step takes nearly the same time for both kinds of predictors. The quicker kind's time is
what a step takes at least. The neurons' operations in their time are a rate that products reach at least. Tokens that
32 rows write at that shape give the rate of reading weights. All was measured on an H200. An H100 has the same
processors, and its reads are scaled by a dense step of both.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.rows import ROOT, command_line
from benchmarks.table_maker import read_rows
from dejavu_train.extras.hosts.hardware import FILE
from dejavu_train.families import ModelDims
from dejavu_train.run.estimate import flops_of_step

TRAINING, SAMPLES, STEPS = (f"benchmarks/results/{name}" for name in ("training.jsonl", "samples.csv", "alternate.csv"))
SHAPE = ModelDims(4096, 16384, 32, 32, 50272, 2048)  # opt-6.7b
MEMORY_GB = {"H200": 141, "H100": 80}  # by their maker
NAMES = {"H200": "NVIDIA H200", "H100": "NVIDIA H100 80GB HBM3"}


def rows(root: Path = ROOT) -> list[dict[str, Any]]:
    """What ``hardware.json`` holds."""
    trained = json.loads((root / TRAINING).read_text().splitlines()[0])
    config, rates = trained["config"], trained["step_rows_per_s"]
    batch, middle = config["data"]["batch_size"], len(rates) // 2  # neurons' predictors first
    neurons, heads = (batch * len(part) / sum(part) for part in (rates[:middle], rates[middle:]))
    tflops = flops_of_step(SHAPE, config["mlp"]["rank"], batch) / neurons / 1e12
    sampled = next(row for row in read_rows(root / SAMPLES) if row["shape"] == "6.7b" and row["gpu"] == NAMES["H200"])
    weights = SHAPE.layer_weights * SHAPE.n_layers + SHAPE.vocab_size * SHAPE.d_model
    read = 2 * weights * float(sampled["tokens_per_s"]) / float(sampled["rows"]) / 1e12
    steps = {gpu: _dense_step(root, name) for gpu, name in NAMES.items()}
    made = []
    for gpu in NAMES:
        own = gpu == "H200"
        chip = f"{TRAINING}, 6.7B on an H200" + ("" if own else ", whose processors are the same")
        reads = f"{SAMPLES}, 6.7B on an H200" + ("" if own else f", and dense steps of both in {STEPS}")
        made.append({
            "gpu": gpu, "memory_gb": MEMORY_GB[gpu], "tflops": round(tflops, 1),
            "read_tb_s": round(read * steps["H200"] / steps[gpu], 2), "step_ms": round(1000 * min(neurons, heads), 2),
            "sources": {"tflops": chip, "step_ms": chip, "read_tb_s": reads},
        })  # fmt: skip
    return made


def _dense_step(root: Path, gpu: str) -> float:
    """Milliseconds of the latest dense fp16 step of 6.7B."""
    wanted = {"gpu": gpu, "model": "6.7b", "engine": "dense", "batch": "1", "options": ""}
    return [float(row["after_ms"]) for row in read_rows(root / STEPS) if wanted.items() <= row.items()][-1]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--check", action="store_true")
    text = json.dumps(rows(), indent=1) + "\n"
    if parser.parse_args().check:
        return int(FILE.read_text() != text)
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
