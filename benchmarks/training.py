"""Writes activation shards of a real model's shape, then times the training of their predictors.

    python -m benchmarks.training --shape opt-6.7b --layers 4 --tokens 200000        (15 GB of shards, one GPU)

The shards hold random hidden states, their labels the most excited neurons of a random fc1, so that there is something
to learn. Making them is not timed. Training is that of train.py, job by job: reading, starting, every step, validation
and export. The time of the whole model is extrapolated from the layers that were trained. Rows per second of the loader
stand beside those of the step. The last line is JSON.
"""

import dataclasses
import json
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.rows import command_line, device_name
from dejavu_train.data.config import DataConfig
from dejavu_train.data.shard_reader import write_statistics
from dejavu_train.data.shards import ActivationManifest, LayerWeights, ShardEntry, ShardWriter, pack_bits
from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.run.pipeline import table
from dejavu_train.training.config import PredictorConfig, RunConfig
from dejavu_train.training.job import run_job, summary_rows
from dejavu_train.training.stages import train_stage

# d_model, d_ffn, layers, heads, rank of the MLP's predictors
SHAPES = {
    "opt-mini": (384, 1536, 6, 12, 64),
    "opt-100m": (768, 3072, 12, 12, 128),
    "opt-1.3b": (2048, 8192, 24, 32, 128),
    "opt-6.7b": (4096, 16384, 32, 32, 256),
}
BLOCK = 4096


@torch.no_grad()
def make_shards(
    folder: Path, shape: ModelDims, tokens: dict[str, int], shard_tokens: int, device: torch.device
) -> None:
    """Write all shards and layer weights, filled with random but learnable rows."""
    entries: list[ShardEntry] = []
    for name, count in tokens.items():
        for start in range(0, count, shard_tokens):
            entries.append(ShardEntry(len(entries), name, min(shard_tokens, count - start)))
    manifest = ActivationManifest("random", "random", shape, "float16", {"seed": 0}, {}, tuple(entries))
    manifest.save(folder)
    generator = torch.Generator(device).manual_seed(0)
    layers = []
    for layer in range(shape.n_layers):
        fc1 = torch.randn(shape.d_ffn, shape.d_model, generator=generator, device=device) / shape.d_model**0.5
        # Rows of falling strength, so that a low rank explains part of it; the bias leaves few units active.
        fc1 *= torch.linspace(1.5, 0.5, shape.d_model, device=device)
        bias = torch.full((shape.d_ffn,), -1.7, device=device)
        mean = torch.zeros(shape.n_heads, shape.head_dim)
        norms = torch.rand(shape.d_ffn, generator=generator, device=device) + 0.5
        LayerWeights(fc1.half().cpu(), bias.cpu(), norms.cpu(), mean).save(folder, layer, "random")
        layers.append((fc1, bias))
    for entry in entries:
        with ShardWriter(folder, manifest, entry) as writer:
            for start in range(0, entry.tokens, BLOCK):
                rows = min(BLOCK, entry.tokens - start)
                for layer, (fc1, bias) in enumerate(layers):
                    hidden = torch.randn(2, rows, shape.d_model, generator=generator, device=device)
                    active = hidden[1] @ fc1.T + bias > 0
                    heads = (hidden[0, :, : shape.n_heads] + 3).clamp_min(0)
                    counter = torch.arange(start, start + rows, dtype=torch.int32).numpy()
                    values = {
                        "attn_in": hidden[0].half().cpu().numpy(),
                        "mlp_in": hidden[1].half().cpu().numpy(),
                        "mlp_active": pack_bits(active).cpu().numpy(),
                        "head_norm": heads.half().cpu().numpy(),
                        **dict.fromkeys(("token", "document", "position"), counter),
                    }
                    writer.write(layer, start, values, int(active.sum()))
    write_statistics(folder, manifest)


def run(argv: Sequence[str] | None = None) -> None:
    """Parse, make shards, train, report."""
    parser = command_line(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="opt-6.7b")
    parser.add_argument("--layers", type=int, default=4, help="distinct layers that are made and trained")
    parser.add_argument("--tokens", type=int, default=200_000, help="train rows per layer")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/training-benchmark"))
    parser.add_argument("--mlp_steps", type=int, default=1000)
    parser.add_argument("--head_steps", type=int, default=600)
    parser.add_argument("--batch_size", type=int, default=1024)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--memory_gb", type=float, default=4.0)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--keep", action="store_true", help="keep the folder, and reuse its shards the next time")
    asked = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("dejavu_train").setLevel(logging.INFO)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    d_model, d_ffn, all_layers, n_heads, rank = SHAPES[asked.shape]
    shape = ModelDims(d_model, d_ffn, asked.layers, n_heads, 50272, 2048)

    activations = asked.folder / "activations"
    began = time.perf_counter()
    if not (activations / "statistics.json").is_file():
        held_out = max(1024, asked.tokens // 20)
        make_shards(activations, shape, {"train": asked.tokens, "val": held_out}, 32_768, device)
    size = sum(path.stat().st_size for path in activations.rglob("*.h5"))
    print(f"{size / 1e9:.1f} GB of shards in {time.perf_counter() - began:.0f} s (not timed)", file=sys.stderr)

    shutil.rmtree(asked.folder / "predictors", ignore_errors=True)
    mlp = PredictorConfig(rank=rank, init="whitened_svd", steps=asked.mlp_steps, learning_rate=4e-3, patience=0)
    heads = PredictorConfig(
        rank=n_heads,
        init="small",
        loss="log_contribution",
        density=0.85,
        steps=asked.head_steps,
        patience=0,
    )
    trainer = {"accelerator": device.type, "devices": 1, "precision": asked.precision}
    data = DataConfig(asked.batch_size, asked.memory_gb, asked.num_workers)
    parts = {"mlp": mlp, "heads": heads, "data": data}
    config = RunConfig(output=str(asked.folder), **parts, trainer=trainer)
    jobs = config.all_jobs(asked.layers)
    seconds = {}
    for job in jobs:
        began = time.perf_counter()
        run_job(config, job, f"layer {job[0]} {job[1]}", train_stage(config, job[1]))
        seconds[job] = time.perf_counter() - began
    total = sum(seconds.values())
    columns, rows = summary_rows(asked.folder, jobs)
    print(table([*columns, "wall s"], [[*row, round(seconds[row[0], row[1]], 1)] for row in rows]))
    whole = total * all_layers / asked.layers
    print(f"{len(jobs)} predictors in {total:.1f} s; extrapolated to {all_layers} layers: {whole:.0f} s")
    metadata = {
        "shape": asked.shape,
        "layers": asked.layers,
        "tokens": asked.tokens,
        "gigabytes": round(size / 1e9, 2),
        "seconds": round(total, 2),
        "extrapolated_seconds": round(whole, 1),
        "loader_rows_per_s": [round(row[-2]) for row in rows],
        "step_rows_per_s": [round(row[-1]) for row in rows],
        "device": device_name(device),
        "torch": torch.__version__,
        "config": {name: dataclasses.asdict(part) for name, part in parts.items()},
    }
    print(json.dumps(metadata))
    if not asked.keep:
        shutil.rmtree(asked.folder)


if __name__ == "__main__":
    sys.exit(exit_on_user_error(run))
