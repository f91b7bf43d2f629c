"""Writes what a run of each configuration takes, as `train.py --help check` prints it: disk, weights, hours.

Disk and weights follow from the shape. Hours are reckoned as `train.py --check` reckons them: from a block and some
training steps of that shape, timed on this device. Or as `train.py --plan` does, on hardware that is not here.
Nothing is downloaded: a folder with a config.json alone is enough.

    python -m benchmarks.check_sizes                    on a GPU, a minute or two
    python -m benchmarks.check_sizes --plan             hours by figures of an H200 that are stated
"""

import dataclasses
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_problem import SHAPES
from benchmarks.rows import command_line, made_now
from dejavu_train.extras.hosts.forecast import forecast
from dejavu_train.extras.hosts.hardware import PlanConfig, hardware_of
from dejavu_train.extras.pretrain.models import config_values
from dejavu_train.families import ModelDims
from dejavu_train.ground.files import write_json
from dejavu_train.models.load import resolve_device
from dejavu_train.run.command import parse_config
from dejavu_train.run.estimate import Estimate
from dejavu_train.run.own_text import tokens_to_sample
from dejavu_train.run.plan import expected_tokens, row_bytes, stage_seconds
from dejavu_train.training.config import RunConfig
from dejavu_train.training.sizes import ROWS, read_rows

logger = logging.getLogger(__name__)
NAMES = ("1.3b", "2.7b", "6.7b", "13b", "30b", "66b")
SOURCES = ("dejavu_train.run.estimate", "dejavu_train.extras.hosts.forecast", "dejavu_train.run.plan")


def disk_bytes(config: RunConfig, shape: ModelDims, on_gpu: bool | None = None) -> tuple[int, int]:
    """Tokens and bytes of all activations where nothing is there yet. Of a text that must be read first, none."""
    tokens = sum(filter(None, expected_tokens(config, on_gpu).values()))
    return tokens, tokens * row_bytes(config, shape)


def whole_run(config: RunConfig, shape: ModelDims) -> dict[str, float]:
    """Seconds of each stage where nothing is there yet. The device of the run is timed."""
    rows = {name: count or 0 for name, count in expected_tokens(config).items()}
    return stage_seconds(Estimate.measure(config.settled(shape), shape), rows, tokens_to_sample(config))


def row_of(name: str, time_it: bool) -> dict[str, Any]:
    """What the configuration of an OPT takes. ``hours`` are timed here, or those of a stated GPU."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_values("opt", dataclasses.asdict(shape))))
        config = parse_config(
            ["--config", f"configs/opt-{name}.yaml", "--model", folder, "--trainer.logger", "null", "--output", folder]
        )
        tokens, n_bytes = disk_bytes(config, shape, on_gpu=True)
        row: dict[str, Any] = {"configuration": f"opt-{name}", "tokens": tokens, "disk_gb": round(n_bytes / 1e9, 1)}
        row["weights_gb"] = round(2 * shape.weights / 1e9, 1)
        if time_it:
            seconds = whole_run(config, shape)
            device = resolve_device(config.collect.device)
            row["hours"] = round(sum(seconds.values()) / 3600, 2)
            row["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
            logger.info("%s: %s", name, {stage: round(spent, 1) for stage, spent in seconds.items()})
        else:
            plan = PlanConfig()
            gpu = hardware_of(plan)
            row["hours"] = round(forecast(config.settled(shape), shape, gpu, plan).hours, 2)
            row["device"] = f"{gpu.gpu}, reckoned"
    return row


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--plan", action="store_true", help="reckon on an H200, time nothing")
    parser.add_argument("--out", type=Path, default=ROWS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows = {row["configuration"]: row for row in (read_rows(args.out) if args.out.is_file() else [])}
    for name in args.only:
        row = row_of(name, not args.plan)
        row |= {key: value for key, value in made_now(*SOURCES).items() if key in ("date", "sources")}
        rows[row["configuration"]] = row
    write_json(args.out, [rows[f"opt-{name}"] for name in NAMES if f"opt-{name}" in rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
