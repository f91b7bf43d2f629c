"""Writes what a run of each configuration takes, as `train.py --help check` prints it: disk, weights, hours.

Disk and weights follow from the shape. Hours are reckoned as `train.py --plan` does, by figures of an H200.
Nothing is timed or downloaded: a folder with a config.json alone is enough.

    python -m benchmarks.check_sizes
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.decode_problem import SHAPES
from benchmarks.rows import command_line, made_now
from dejavu_train.extras.hosts.forecast import forecast
from dejavu_train.extras.hosts.hardware import PlanConfig, hardware_of
from dejavu_train.extras.pretrain.models import config_values
from dejavu_train.ground.files import write_json
from dejavu_train.run.command import parse_config
from dejavu_train.training.sizes import ROWS

NAMES = ("1.3b", "2.7b", "6.7b", "13b", "30b", "66b")
SOURCES = ("dejavu_train.run.estimate", "dejavu_train.extras.hosts.forecast", "dejavu_train.run.plan")


def row_of(name: str) -> dict[str, Any]:
    """What the configuration of an OPT takes."""
    shape, plan = SHAPES[name], PlanConfig()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_values("opt", dataclasses.asdict(shape))))
        config = parse_config(
            ["--config", f"configs/opt-{name}.yaml", "--model", folder, "--trainer.logger", "null", "--output", folder]
        )
        gpu = hardware_of(plan)
        run = forecast(config.settled(shape), shape, gpu, plan)
    return {
        "configuration": f"opt-{name}", "tokens": run.tokens, "disk_gb": round(run.shards / 1e9, 1),
        "weights_gb": round(2 * shape.weights / 1e9, 1), "hours": round(run.hours, 2), "device": f"{gpu.gpu}, reckoned",
    }  # fmt: skip


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, default=ROWS)
    args = parser.parse_args()
    made = {key: value for key, value in made_now(*SOURCES).items() if key in ("date", "sources")}
    write_json(args.out, [row_of(name) | made for name in NAMES])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
