"""Collects, calibrates, quantises and tunes a random OPT larger than its device, a layer at a time: memory, minutes.

    python -m benchmarks.by_layers --shape 30b --tokens 100000                    # makes the model, appends rows
    python -m benchmarks.by_layers --shape 66b --layers 12 --tokens 400000
    python -m benchmarks.by_layers --shape 30b --stages tune --tune_steps 2
    python -m benchmarks.by_layers --shape tiny --tokens 2000 --device cpu --results /tmp/rows.csv   # a rehearsal

The model is made in `--folder`, a file for each layer. A layer's shards are deleted when it is done. The same command
goes on where it was stopped. Each stage is a process of its own, whose peaks are its own.

Columns of benchmarks/results/by_layers.csv: `layer_gb` is a layer as stored. `device_gb` is the peak on the device,
`beside_gb` that less the layer. `host_gb` is the peak of anonymous memory of the process. `read_gbps` is at what rate
layers were read, `disk_gbps` that of plain reads of the same files afterwards. `minutes` of a run that was stopped are
those of its last part, which began with the layer `went_on_from`. GPTQ times two layers alone.
"""

import argparse
import dataclasses
import itertools
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.decode_problem import RANKS, SHAPES
from benchmarks.random_folder import random_bundle
from benchmarks.rows import ROOT, append_row, command_line, device_name, made_now
from dejavu_train.calibration.by_layers import ByLayers, loss_increases_by_layers, measure_heads
from dejavu_train.calibration.curves import HEAD_PROBES, MLP_PROBES
from dejavu_train.calibration.sensitivity import SensitivityProbe
from dejavu_train.data import collect_layers
from dejavu_train.data.config import CollectConfig
from dejavu_train.data.recording import Recording
from dejavu_train.data.shards import ActivationManifest, ShardEntry, layer_folder
from dejavu_train.data.windows import Window, plan_shards
from dejavu_train.extras.pretrain.models import config_values
from dejavu_train.families import TARGETS, ModelDims, Target, UnitKey
from dejavu_train.ground.files import replacing, write_json
from dejavu_train.ground.progress import set_up_logging
from dejavu_train.models.int4 import row_layouts
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.models.load import resolve_device
from dejavu_train.models.stored import INDEX, full_name
from dejavu_train.models.weight_format import FLOAT16
from dejavu_train.predictors.low_rank import LowRankPredictor
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.foreign import MatrixReader
from dejavu_train.quantize.source import StoredTensors
from dejavu_train.quantize.stream import Skeleton, embed, quantised_layers
from dejavu_train.training.config import TuneConfig
from dejavu_train.training.finetune import finetune

TINY = ModelDims(64, 256, 3, 4, 512, 2048)
GB, WINDOW = 1e9, 512
SOURCES = ("dejavu_train.data.collect_layers", "dejavu_train.calibration.by_layers", "dejavu_train.quantize.stream",
           "dejavu_train.training.finetune")  # fmt: skip
OUTER, STAGES = "model-outer.safetensors", ("collect", "calibrate", "quantise", "tune")


def sizes_of(arguments: argparse.Namespace) -> ModelDims:
    whole = TINY if arguments.shape == "tiny" else SHAPES[arguments.shape]
    return dataclasses.replace(whole, n_layers=arguments.layers or whole.n_layers)


@torch.no_grad()
def make(shape: ModelDims, folder: Path, device: torch.device) -> None:
    """A random model in fp16, layer by layer. Files that are there stay."""
    if (folder / INDEX).is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config_values("opt", dataclasses.asdict(shape)) | {"dtype": "float16"})
    d, f, names = shape.d_model, shape.d_ffn, {}

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float16, device=device).normal_(0, 0.02)

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": torch.ones(d, dtype=torch.float16), f"{name}.bias": normal(d)}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        whole = {full_name(name): tensor.cpu() for name, tensor in tensors.items()}
        names.update(dict.fromkeys(whole, file))
        if not (folder / file).is_file():
            with replacing(folder / file) as path:
                save_file(whole, path, {"format": "pt"})

    outer = {"decoder.embed_tokens.weight": normal(shape.vocab_size, d)}
    outer |= {"decoder.embed_positions.weight": normal(shape.max_positions + 2, d), **norm("decoder.final_layer_norm")}
    write(OUTER, outer)
    for layer in range(shape.n_layers):
        torch.manual_seed(layer)
        tensors = {**norm("self_attn_layer_norm"), **norm("final_layer_norm")}
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            tensors |= {f"self_attn.{part}.weight": normal(d, d), f"self_attn.{part}.bias": normal(d)}
        tensors |= {
            "fc1.weight": normal(f, d),
            "fc1.bias": normal(f),
            "fc2.weight": normal(d, f),
            "fc2.bias": normal(d),
        }
        named = {f"decoder.layers.{layer}.{name}": each for name, each in tensors.items()}
        write(f"model-{layer:05d}.safetensors", named)
        print(f"made layer {layer}", flush=True)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": names})


def random_windows(shape: ModelDims, tokens: int) -> list[Window]:
    draw = np.random.default_rng(0)
    return [Window(i, draw.integers(4, shape.vocab_size, WINDOW, np.int32)) for i in range(max(1, tokens // WINDOW))]


@contextmanager
def watched(device: torch.device, row: dict[str, Any]) -> Iterator[None]:
    """Puts minutes and peaks of memory within the context into a row."""
    done, peak = threading.Event(), [0]

    def look() -> None:
        ended = False
        while not ended:  # looks once more when it has ended, however short it was
            ended = done.wait(0.05)
            note()

    def note() -> None:
        found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
        peak[0] = max(peak[0], int(found[1]) * 1024 if found else 0)

    note()
    thread, began = threading.Thread(target=look, daemon=True), time.monotonic()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    row["minutes"], row["host_gb"] = (time.monotonic() - began) / 60, peak[0] / GB
    if device.type == "cuda":
        row["device_gb"] = torch.cuda.max_memory_allocated(device) / GB
        row["beside_gb"] = row["device_gb"] - row["layer_gb"]


def plain_read_rate(folder: Path) -> float:
    """GB/s of reading two layers' files one after the other, whatever is in the page cache."""
    began, count, space = time.monotonic(), 0, bytearray(1 << 26)
    for file in sorted(folder.glob("model-0*.safetensors"))[-2:]:
        with open(file, "rb", buffering=0) as stored:
            while got := stored.readinto(space):
                count += got
    return count / (time.monotonic() - began) / GB


def dtype_on(device: torch.device, stage: str) -> Any:
    """As train.py chooses it: gradients of a divergence vanish in float16."""
    return "float32" if device.type == "cpu" else "bfloat16" if stage == "tune" else "float16"


def collect(walk: LayerWalk, shape: ModelDims, run: Path, row: dict[str, Any]) -> None:
    """Shards of all tokens. Those of a layer are deleted when it is done."""
    parts = plan_shards(random_windows(shape, row["tokens"]), 32_768)
    config = CollectConfig(window=WINDOW, dtype=dtype_on(walk.device, "collect"), storage="bfloat16", by_layers=True)
    entries = [ShardEntry(number, "train", sum(len(each.ids) for each in part)) for number, part in enumerate(parts)]
    manifest = ActivationManifest("random", f"random-{row['tokens']}", shape, "bfloat16", {}, {}, tuple(entries))
    manifest.save(run)
    one_layer = collect_layers._collect_layer

    def then_deleted(passes: Any, *rest: Any) -> None:
        layer, began = passes.stream.next, time.monotonic()
        row.setdefault("went_on_from", layer)
        one_layer(passes, *rest)
        shutil.rmtree(layer_folder(run, layer))
        print(f"layer {layer} collected in {time.monotonic() - began:.1f} s", flush=True)

    collect_layers._collect_layer = then_deleted
    recording = Recording(manifest, list(zip(entries, parts, strict=True)), set(entries), config, run)
    collect_layers.collect_by_layers(walk, recording)


def calibrate(walk: LayerWalk, shape: ModelDims, run: Path, row: dict[str, Any]) -> None:
    """Losses of heads and sensitivities, with random predictors."""
    rank = RANKS.get(row["shape"], 16)
    model = ByLayers(walk, run / "states", "random")
    means = {layer: torch.zeros(shape.n_heads, shape.head_dim) for layer in range(shape.n_layers)}
    probes, heads = {}, {}
    for layer in range(shape.n_layers):
        for target in TARGETS:
            key = UnitKey(layer, target)
            predictor = LowRankPredictor(shape.d_model, rank, shape.units(target)).requires_grad_(False)
            count = len(HEAD_PROBES if target == Target.HEADS else MLP_PROBES)
            probes[key] = SensitivityProbe(predictor, key.site, [0.1 * i for i in range(count, 0, -1)])
            if target == Target.HEADS:
                heads[layer] = {"site_layer": layer, "site": str(key.site.input)}, predictor
    windows = [window.ids.tolist() for window in random_windows(shape, row["tokens"])]
    measure_heads(model, heads, means, windows)
    loss_increases_by_layers(model, probes, windows[: max(1, len(windows) // 4)])
    model.remove_states()


def quantise(shape: ModelDims, model: Path, run: Path, row: dict[str, Any], device: torch.device) -> None:
    """GPTQ of the first two layers."""
    source, values = StoredTensors(str(model)), config_values("opt", dataclasses.asdict(shape))
    skeleton = Skeleton(values, source, device)
    windows = [window.ids for window in random_windows(shape, row["tokens"])]
    batches = embed(skeleton, windows, 8, run / "quantise", [row["shape"], row["tokens"]])
    layers = quantised_layers(
        skeleton, MatrixReader(source, values), row_layouts("opt", shape), QuantizeConfig(), batches
    )
    for layer, _ in enumerate(itertools.islice(layers, 2)):
        print(f"layer {layer} quantised", flush=True)
    batches[0].stream.remove()


def tune(walk: LayerWalk, shape: ModelDims, run: Path, row: dict[str, Any]) -> None:
    """Some steps. No state is kept, so nothing is written."""
    windows = [window.ids.tolist() for window in random_windows(shape, row["tokens"])]
    bundle = random_bundle(shape, RANKS.get(row["shape"], 16), (0.1, 1.0))
    finetune(walk, bundle, windows, TuneConfig(steps=row["steps"]), FLOAT16)


def run_stage(arguments: argparse.Namespace, stage: str) -> None:
    shape, device = sizes_of(arguments), resolve_device(arguments.device)
    model, run = arguments.folder, arguments.folder / "run"
    run.mkdir(parents=True, exist_ok=True)
    passes, windows = TuneConfig().passes(WINDOW)
    tokens = {
        "collect": arguments.tokens, "calibrate": arguments.calibration_tokens, "quantise": 10 * shape.d_ffn,
        "tune": passes * windows * WINDOW,
    }  # fmt: skip
    row: dict[str, Any] = {
        "shape": arguments.shape, "layers": shape.n_layers, "stage": stage, "device": device_name(device),
        "tokens": tokens[stage],
        "layer_gb": (model / "model-00000.safetensors").stat().st_size / GB,
    }  # fmt: skip
    if stage == "tune":
        row["steps"] = arguments.tune_steps
    with watched(device, row):
        if stage == "quantise":
            quantise(shape, model, run, row, device)
        else:
            walk = LayerWalk(str(model), device, dtype_on(device, stage))
            {"collect": collect, "calibrate": calibrate, "tune": tune}[stage](walk, shape, run, row)
    if stage != "quantise":
        reading = walk.reader.reading
        row |= {"read_gb": reading.nbytes / GB, "read_gbps": reading.nbytes / GB / max(reading.seconds, 1e-9)}
    row |= {"disk_gbps": plain_read_rate(model)}
    row = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
    append_row(arguments.results, row | made_now(*SOURCES))
    print(row, flush=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shape", default="30b", choices=["tiny", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b", "175b"])
    parser.add_argument("--layers", type=int, help="only so many of the shape's layers")
    parser.add_argument("--tokens", type=int, default=100_000, help="that are collected")
    parser.add_argument("--calibration_tokens", type=int, default=4096)
    parser.add_argument("--tune_steps", type=int, default=2)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/by-layers"), help="of the model, states and shards")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "by_layers.csv")
    parser.add_argument("--one", choices=STAGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    set_up_logging()
    if arguments.one:
        return run_stage(arguments, arguments.one)
    began = time.monotonic()
    make(sizes_of(arguments), arguments.folder, resolve_device(arguments.device))
    print(f"made in {(time.monotonic() - began) / 60:.1f} minutes in {arguments.folder}", flush=True)
    for stage in arguments.stages:
        subprocess.run([sys.executable, "-m", "benchmarks.by_layers", *sys.argv[1:], "--one", stage], check=True)


if __name__ == "__main__":
    main()
