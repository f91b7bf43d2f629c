"""Speeds that GPUs are known for, for a forecast (``train.py --plan``). Readable without torch.

Each figure of hardware.json names the rows of benchmarks/results that it comes from.
"""

import dataclasses
import json
from pathlib import Path

from dejavu_train.ground.errors import UserError
from dejavu_train.training.config import PlanConfig

FILE = Path(__file__).parent / "hardware.json"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Rates of one GPU.

    Attributes:
        memory_gb: None where the GPU is not known.
        tflops: at least reached in products of matrices, 10^12 operations a second.
        read_tb_s: of weights, while 32 rows are written at once.
        step_ms: a training step takes at least so long, however small.
        sources: by figure where it comes from.
    """

    gpu: str
    memory_gb: float | None
    tflops: float
    read_tb_s: float
    step_ms: float
    sources: dict[str, str]


def known_hardware() -> dict[str, Hardware]:
    """The GPUs of hardware.json by name."""
    return {row["gpu"]: Hardware(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))}


def hardware_of(plan: PlanConfig) -> Hardware:
    """The GPU that a plan names, with the rates that the plan states in place of measured ones.

    Raises:
        UserError: a GPU that is not known, and no rates.
    """
    known = known_hardware()
    found = known.get(plan.gpu.upper())
    if found is None:
        if plan.tflops is None or plan.read_tb_s is None:
            raise UserError(
                f"plan.gpu {plan.gpu} was never measured; choose {' or '.join(sorted(known))}, or give --plan.tflops"
                " and --plan.read_tb_s"
            )
        slowest = max(known.values(), key=lambda each: each.step_ms)
        found = Hardware(plan.gpu, None, 0, 0, slowest.step_ms, {"step_ms": slowest.sources["step_ms"]})
    stated = {name: getattr(plan, name) for name in ("tflops", "read_tb_s") if getattr(plan, name) is not None}
    return dataclasses.replace(found, **stated, sources=found.sources | dict.fromkeys(stated, "stated"))
