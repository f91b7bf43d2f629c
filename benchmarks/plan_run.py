"""Compares what `train.py --plan` reckons with a run: a random OPT of some layers of a real shape, stage by stage.

    python -m benchmarks.plan_run --shape 6.7b --layers 4 --tokens 40000 --gpu H100      (16 GB of disk, one GPU)
    python -m benchmarks.plan_run --shape 6.7b --layers 8 --tokens 40000 --workers 2 4   trains on 2 and 4 GPUs too
    python -m benchmarks.plan_run --shape tiny --tokens 4000 --results /tmp/plan.csv     a rehearsal on a CPU

The model has opt-mini's tokenizer and writes its own text. The rate of the disk is measured before. A row for each
stage is appended to benchmarks/results/plan.csv. `measured_s` holds the start of each stage too, which the plan leaves
out.
"""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.by_layers import TINY, WINDOW, config_values, make
from benchmarks.decode_problem import RANKS, SHAPES
from benchmarks.rows import ROOT, append_row, command_line, device_name, made_now
from dejavu_train.extras.hosts.forecast import forecast
from dejavu_train.extras.hosts.hardware import PlanConfig, hardware_of
from dejavu_train.families import TARGETS
from dejavu_train.ground.files import require_disk
from dejavu_train.ground.progress import set_up_logging
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.opt import resolve_device
from dejavu_train.run.command import parse_config
from dejavu_train.run.crew import COLLECT, REST, TRAIN, train_together
from dejavu_train.run.folder import claimed_folder
from dejavu_train.run.own_text import sampled
from dejavu_train.run.pipeline import checked, work
from dejavu_train.training.config import RunConfig
from dejavu_train.training.stages import train_stage

GB, PROBE = 1e9, 1 << 28
SOURCES = ("dejavu_train/run/estimate.py", "dejavu_train/extras/hosts/forecast.py", "dejavu_train/hardware.json")


def disk_rate(folder: Path) -> float:
    """Bytes that a file of 2 GB takes in a second, until they are on the disk."""
    block, path = os.urandom(PROBE), folder / "probe"
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(8):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return 8 * PROBE / seconds


def seconds_of(work_of_stage: Callable[[], object]) -> float:
    began = time.perf_counter()
    work_of_stage()
    return time.perf_counter() - began


def train_in(count: int, config: RunConfig) -> None:
    """All predictors in so many workers, as ``train.py --jobs``."""
    given = dataclasses.replace(config, jobs=count)
    settled, shape = checked(given)
    stages = {target: train_stage(settled, target) for target in TARGETS}
    with claimed_folder(settled, given):
        train_together(settled, settled.own_jobs(shape.n_layers), stages, lambda job: None)


def run_stages(config: RunConfig, workers: Sequence[int]) -> Iterator[tuple[str, float]]:
    """Seconds of each stage of a run whose folder is empty. workers: so many train the same predictors once more."""
    write_text = sampled(config)
    assert write_text is not None, "the text is the model's own"
    yield "text", seconds_of(write_text)
    yield "collecting", seconds_of(lambda: work(config, COLLECT))
    for count in workers:
        yield f"training, {count} workers", seconds_of(partial(train_in, count, config))
        shutil.rmtree(Path(config.output) / "predictors")
    yield "training", seconds_of(lambda: work(config, TRAIN))
    yield "calibrating", seconds_of(lambda: work(config, REST))


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--shape", default="6.7b", choices=["tiny", *SHAPES])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=40_000, help="of the train set; a tenth for each other set")
    parser.add_argument("--workers", type=int, nargs="+", default=[], help="train with so many too, a GPU each")
    parser.add_argument("--gpu", default="H200", help="as plan.gpu")
    parser.add_argument("--folder", type=Path, default=ROOT / "checkpoints" / "plan-run")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "plan.csv")
    asked = parser.parse_args()
    set_up_logging()
    shape = TINY if asked.shape == "tiny" else SHAPES[asked.shape]
    model, output = asked.folder / "model", asked.folder / "run"
    shutil.rmtree(asked.folder, ignore_errors=True)
    model.mkdir(parents=True)
    require_disk(asked.folder, 4 * PROBE, "a run that is compared with its plan")
    values = config_values(shape) | {"num_hidden_layers": asked.layers, "vocab_size": 50272}
    (model / "config.json").write_text(json.dumps(values))
    device = resolve_device("auto")
    shape = read_dims(str(model), None)
    make(shape, model, device)
    for path in (ROOT / "checkpoints" / "opt-mini").glob("*token*"):
        shutil.copy(path, model)
    rank = RANKS.get(asked.shape, 16)
    config = parse_config([
        "--config", str(ROOT / "configs" / "base.yaml"), "--model", str(model), "--output", str(output),
        f"--mlp.rank={rank}", f"--heads.rank={min(32, shape.n_heads)}", "--trainer.logger=null",
        f"--text.cache={asked.folder / 'text'}", f"--collect.train_tokens={asked.tokens}", f"--collect.window={WINDOW}",
        f"--collect.val_tokens={max(WINDOW, asked.tokens // 10)}", "--mlp.patience=0", "--heads.patience=0",
        f"--collect.calibration_tokens={max(WINDOW, asked.tokens // 10)}",
    ])  # fmt: skip
    plan = PlanConfig(asked.gpu, disk_gb_s=disk_rate(asked.folder) / GB)
    predicted = dict(forecast(config, shape, hardware_of(plan), plan).seconds)
    for count in asked.workers:
        several = forecast(config, shape, hardware_of(plan), dataclasses.replace(plan, gpus=count)).seconds
        predicted[f"training, {count} workers"] = several["training"]
    about = made_now(*SOURCES) | {
        "shape": asked.shape, "layers": asked.layers, "tokens": asked.tokens, "device": device_name(device),
        "plan_gpu": asked.gpu, "disk_gb_s": f"{plan.disk_gb_s:.2f}",
    }  # fmt: skip
    for stage, seconds in run_stages(config, asked.workers):
        of_plan = predicted.get(stage)
        row = {"stage": stage, "predicted_s": "" if of_plan is None else f"{of_plan:.1f}"}
        row |= {"measured_s": f"{seconds:.1f}"}
        append_row(asked.results, about | row)
        print(row, flush=True)
    shutil.rmtree(asked.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
