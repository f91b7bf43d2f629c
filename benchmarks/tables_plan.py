"""The table of docs/notes/streaming.md: what `train.py --plan` reckons with shards and without."""

import dataclasses
import json
import tempfile
from pathlib import Path

from benchmarks.check_sizes import config_values
from benchmarks.decode_problem import SHAPES
from benchmarks.tables_format import markdown
from dejavu_train.cli import parse_config
from dejavu_train.hardware import PlanConfig, known_hardware

MODELS, DISKS = ("1.3b", "6.7b", "30b", "66b"), (1.0, 0.2)  # GB/s


def streaming_table(root: Path) -> str:
    """GPU-hours of one H200 with shards on two disks, and without shards at the measured rate and at five times it."""
    from dejavu_train.forecast import forecast, predictor_memory

    gpu = known_hardware()["H200"]
    fast = dataclasses.replace(gpu, tflops=5 * gpu.tflops)
    rows = []
    for name in MODELS:
        shape = SHAPES[name]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_values(shape)))
            config = parse_config(["--config", str(root / f"configs/opt-{name}.yaml"), "--model", folder])
            plans = [PlanConfig(disk_gb_s=disk) for disk in DISKS]
            with_shards = [forecast(config, shape, rate, plan) for rate in (gpu, fast) for plan in plans]
            without = [forecast(config, shape, rate, plans[0], stream=True) for rate in (gpu, fast)]
            held = predictor_memory(config, shape) / 1e9
        hours = [f"{run.hours:.2f}" for run in (*with_shards[:2], without[0], *with_shards[2:], without[1])]
        rows.append([name, f"{with_shards[0].shards / 1e9:.0f}", f"{held:.1f}", *hours])
    headings = [f"shards, disk of {disk:g} GB/s" for disk in DISKS] + ["no shards"]
    rates = [f"{rate.tflops:.0f} TFLOP/s: {heading}" for rate in (gpu, fast) for heading in headings]
    conditions = "Hours of one H200, all stages. Rates: dejavu_train/hardware.json."
    return markdown(["OPT", "shards, GB", "all predictors in training, GB", *rates], rows) + f"\n{conditions}\n"
