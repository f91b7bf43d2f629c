"""What GPUs are known to do, for a forecast (``train.py --plan``). Readable without torch.

The figures come from rows of benchmarks/results by ``benchmarks/hardware.py``. Each names its row.
"""

import dataclasses
import json
from pathlib import Path

from dejavu_train.errors import UserError
from dejavu_train.ranges import COUNT, Range, check_ranges

FILE = Path(__file__).parent / "hardware.json"
_RATE = Range(0, 10**6, above=True)


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Hardware on which --plan reckons what a run takes. Nothing is run."""

    gpu: str = "H200"
    """H200, H100, or another name with plan.tflops and plan.read_tb_s."""
    gpus: int = 1
    """How many of them. Predictors train on all, the other stages run on one."""
    price: float | None = None
    """Of one GPU for an hour, in whatever currency."""
    disk_gb_s: float = 1.0
    """Gigabytes that the disk writes, or reads, in a second."""
    tflops: float | None = None
    """Products of 16-bit matrices, in 10^12 operations a second. null: as measured for plan.gpu."""
    read_tb_s: float | None = None
    """Weights read while text is written, in TB/s. null: as measured for plan.gpu."""

    def __post_init__(self) -> None:
        rates = dict.fromkeys(("price", "disk_gb_s", "tflops", "read_tb_s"), _RATE)
        check_ranges(self, "plan.", {"gpus": COUNT} | rates)


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
    """By name what ``benchmarks/hardware.py`` wrote."""
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
