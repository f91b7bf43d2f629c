"""Tables of docs/notes/streaming.md and by-layers.md: with shards and without, own text, and what was measured."""

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.check_sizes import config_values
from benchmarks.decode_problem import SHAPES
from benchmarks.tables_format import Row, age, markdown, read_csv
from dejavu_train.extras.hosts.hardware import PlanConfig, known_hardware
from dejavu_train.families import TARGETS
from dejavu_train.run.command import parse_config
from dejavu_train.training.config import RunConfig

MODELS, DISKS = ("1.3b", "6.7b", "30b", "66b"), (1.0, 0.2)  # GB/s
FORWARDS = (
    4  # of a step of tuning: dense, sparse, sparse again with its graph, and back, whose weights have no gradient
)
TUNING_STEPS = 300
LINK, ROOM = 25.0, 60.0  # GB/s from the host's memory to a GPU, as of PCIe 4; GB of a GPU for keys and values


@contextmanager
def _planned(root: Path, name: str) -> Iterator[RunConfig]:
    """The configuration of an OPT, whose config.json is there as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_values(SHAPES[name])))
        yield parse_config(["--config", str(root / f"configs/opt-{name}.yaml"), "--model", folder])


def streaming_table(root: Path) -> str:
    """GPU-hours of one H200 with shards on two disks, and without shards at the measured rate and at five times it."""
    from dejavu_train.extras.hosts.forecast import forecast, predictor_memory

    gpu = known_hardware()["H200"]
    fast = dataclasses.replace(gpu, tflops=5 * gpu.tflops)
    rows = []
    for name in MODELS:
        shape = SHAPES[name]
        with _planned(root, name) as config:
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


def by_layers_table(root: Path) -> str:
    """Each stage of a model that is run a layer at a time: memory, minutes, and rates of reading."""
    rows = read_csv(root / "benchmarks/results/by_layers.csv")
    numbers = ("layer_gb", "beside_gb", "host_gb", "written_gb", "read_gbps", "disk_gbps")
    table = [
        [f"{row['shape'].upper()}, {row['layers']} layers",
         f"{row['stage']}, {row['steps']} steps" if row["steps"] else row["stage"],
         f"{int(row['tokens']):,}", f"{float(row['minutes']):.3g}",
         *(f"{float(row[name]):.3g}" if row[name] else "" for name in numbers)]
        for row in rows
    ]  # fmt: skip
    headings = [
        "OPT", "stage", "tokens", "minutes", "a layer, GB", "beside it, GB", "host, GB", "written, GB",
        "weights read, GB/s", "plain reads, GB/s",
    ]  # fmt: skip
    where = ", ".join(sorted({row["device"] for row in rows}))
    about = f"Rows: [by_layers.csv](benchmarks/results/by_layers.csv). {where}{age(rows)}."
    return f"{markdown(headings, table)}\n{about}\n"


def tuning_table(root: Path) -> str:
    """What tuning by layers reads and computes, and how long it takes by the steps that were timed."""
    rows, table = [row for row in read_csv(root / "benchmarks/results/by_layers.csv") if row["stage"] == "tune"], []
    for row in rows:
        shape, tokens = SHAPES[row["shape"]], int(row["tokens"])
        weights = shape.n_layers * shape.layer_weights
        timed = 60 * float(row["minutes"]) / int(row["steps"]) / int(row["layers"])
        seconds = timed * shape.n_layers
        table.append([
            f"{row['shape'].upper()}, {row['layers']} of {shape.n_layers} layers timed", f"{2 * 2 * weights / 1e9:.0f}",
            f"{FORWARDS * 2 * weights * tokens / 1e15:.1f}", f"{timed:.2f}", f"{seconds:.0f}",
            f"{TUNING_STEPS * seconds / 3600:.1f}",
        ])  # fmt: skip
    headings = ["OPT", "GB read a step", "PFLOP a step", "seconds a layer and step", "seconds a step"]
    headings.append(f"{TUNING_STEPS} steps, hours")
    about = f"A step has {tokens:,} tokens. {', '.join(sorted({row['device'] for row in rows}))}{age(rows)}."
    return f"{markdown(headings, table)}\n{about}\n"


def plan_check_table(root: Path) -> str:
    """Stages of a run beside what `train.py --plan` reckons for them."""
    rows = read_csv(root / "benchmarks/results/plan.csv")
    table = [
        [f"{row['shape'].upper()}, {row['layers']} layers, {int(row['tokens']):,} tokens", row["plan_gpu"],
         row["stage"], row["predicted_s"], row["measured_s"], *_per_predictor(row)]
        for row in rows
    ]  # fmt: skip
    disks = ", ".join(sorted({f"{row['disk_gb_s']} GB/s ({row['plan_gpu']})" for row in rows}))
    about = f"Rows: [plan.csv](benchmarks/results/plan.csv){age(rows)}. Disks: {disks}."
    headings = ["OPT", "card", "stage", "reckoned, s", "measured, s", "a predictor, s", "64 at that rate, minutes"]
    return f"{markdown(headings, table)}\n{about}\n"


def _per_predictor(row: Row) -> list[str]:
    """Of a training, start included: two predictors a layer."""
    if not row["stage"].startswith("training"):
        return ["", ""]
    seconds = float(row["measured_s"]) / (len(TARGETS) * int(row["layers"]))
    return [f"{seconds:.1f}", f"{64 * seconds / 60:.1f}"]


def own_text_table(root: Path) -> str:
    """What a model would read from the host if it wrote its own text by layers, all rows at once or as many as fit."""
    from dejavu_train.extras.hosts.forecast import forecast
    from dejavu_train.run.own_text import tokens_to_sample

    rows = []
    for name in MODELS[1:]:
        shape = SHAPES[name]
        with _planned(root, name) as config:
            tokens, length = tokens_to_sample(config, on_gpu=True), config.collect.window
            hours = forecast(config, shape, known_hardware()["H200"], PlanConfig()).hours
        layers = 2 * shape.n_layers * shape.layer_weights / 1e9
        token = 4 * shape.n_layers * shape.n_kv_heads * shape.head_dim / 1e9  # of keys and values
        texts, steps = -(-tokens // length), length - 1
        fit = min(texts, int(ROOM / (token * length)))
        once = steps * (layers + texts * token * length / 2)  # keys and values of half a row, in the mean
        parts = steps * layers * -(-texts // fit)
        cells = [f"{layers:.0f}", f"{tokens:,}", f"{token * texts * length:.0f}"]
        times = [f"{read / 1000:.0f}, {read / LINK / 3600:.1f}" for read in (once, parts)]
        rows.append([name, *cells, times[0], str(fit), times[1], f"{hours:.1f}"])
    headings = [
        "OPT", "layers, GB", "tokens", "K and V of all rows, GB", "all rows at once: TB read, hours", "rows that fit",
        "those at once: TB read, hours", "the whole run, hours",
    ]  # fmt: skip
    conditions = (
        f"Layers and K and V lie in the host's memory, and {LINK:g} GB/s reach the GPU. Rows fit into {ROOM:g} GB of"
        " it, and their K and V stay there. The whole run is that of `train.py --plan` on an H200 that holds the model."
    )
    return markdown(headings, rows) + f"\n{conditions}\n"
