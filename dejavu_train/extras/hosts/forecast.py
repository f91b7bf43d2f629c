"""Output of ``train.py --plan``: shards, hours and price on stated hardware, of any model by its config.json.

No device is timed. The rates are those of hardware.py, and what follows from them is reckoned as for ``--check``.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from dejavu_train.extras.hosts.hardware import Hardware, hardware_of
from dejavu_train.families import ModelDims, Target
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.table import table
from dejavu_train.models.config_values import read_dims
from dejavu_train.run.estimate import Estimate, flops_of_step
from dejavu_train.run.footprint import gigabytes, memory_line
from dejavu_train.run.own_text import tokens_to_sample
from dejavu_train.run.plan import expected_tokens, row_bytes, stage_seconds
from dejavu_train.training.config import PlanConfig, RunConfig

FRACTIONS = (1.0, 0.5, 0.25)  # of the tokens, in the second table
START_SECONDS = 10.0  # of a stage: libraries, the model, workers. The mean of benchmarks/results/plan.csv


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A run that is reckoned.

    Attributes:
        tokens: recorded, of all sets.
        shards: bytes of the activations on disk.
        seconds: of each stage with its start, on the GPUs that it can use.
        gpus: that each stage keeps busy.
        asked: GPUs that are there, and paid for, all the time.
    """

    tokens: int
    shards: int
    seconds: Mapping[str, float]
    gpus: Mapping[str, int]
    asked: int

    @property
    def hours(self) -> float:
        return sum(self.seconds.values()) / 3600

    @property
    def paid(self) -> float:
        """GPU-hours."""
        return self.hours * self.asked

    @property
    def busy(self) -> float:
        """GPU-hours in which a GPU computes."""
        return sum(spent * self.gpus[stage] for stage, spent in self.seconds.items()) / 3600


def stated(config: RunConfig, shape: ModelDims, gpu: Hardware, disk: float) -> Estimate:
    """The estimate on a GPU of known rates and a disk of ``disk`` bytes a second. No device is timed."""

    def steps(target: Target) -> tuple[float, float]:
        rank = config.predictor(target).rank
        flops = flops_of_step(shape, rank, config.data.batch_size) if target == Target.MLP else 0.0
        seconds = max(gpu.step_ms / 1000, flops / gpu.tflops / 1e12)
        return seconds, seconds

    row = 2 * shape.mean_layer_weights / gpu.read_tb_s / 1e12 / config.text.sample.batch_size
    return Estimate(config, shape, 2 * shape.mean_layer_weights / gpu.tflops / 1e12, row, steps, disk)


def forecast(config: RunConfig, shape: ModelDims, gpu: Hardware, plan: PlanConfig, fraction: float = 1.0) -> Forecast:
    """Reckon a run.

    Args:
        fraction: of the tokens that the configuration asks for.

    Raises:
        UserError: nobody knows how many tokens a text has.
    """
    sets = expected_tokens(config, on_gpu=True)
    if None in sets.values():
        raise UserError(
            f"how many tokens {config.text.source} has is not known before it is read; set --collect.train_tokens,"
            " --collect.val_tokens and --collect.calibration_tokens"
        )
    rows = {name: round(fraction * (count or 0)) for name, count in sets.items()}
    estimate = stated(config, shape, gpu, plan.disk_gb_s * 1e9)
    seconds = stage_seconds(estimate, rows, round(fraction * tokens_to_sample(config, on_gpu=True)))
    tokens = sum(rows.values())
    jobs = len(config.all_jobs(shape))
    gpus = dict.fromkeys(seconds, 1) | {"training": min(plan.gpus, jobs)}
    rounds = math.ceil(jobs / gpus["training"])
    # However many GPUs train, their shards come from one disk.
    seconds["training"] = max(seconds["training"] * rounds / jobs, jobs * estimate.reading(rows))
    seconds = {stage: spent + START_SECONDS if spent else 0.0 for stage, spent in seconds.items()}
    return Forecast(tokens, tokens * row_bytes(config, shape), seconds, gpus, plan.gpus)


def print_forecast(config: RunConfig, plan: PlanConfig) -> None:
    """Print what a run takes on the hardware of ``plan``. Nothing is written, no weights are read.

    Raises:
        UserError: a configuration that does not fit the model, a GPU that is not known, a text of unknown length.
    """
    shape = read_dims(config.model, config.revision)
    config.check(shape)
    config = config.settled(shape)
    gpu = hardware_of(plan)
    whole = forecast(config, shape, gpu, plan)
    stages = {name: spent for name, spent in whole.seconds.items() if spent}
    print(f"{config.model}: {shape.n_layers} layers, {gigabytes(2 * shape.weights)} of weights in 16 bits")
    print(f"{plan.gpus} x {gpu.gpu}, a disk of {plan.disk_gb_s:g} GB/s, nothing made before\n")
    rows = [[name, str(whole.gpus[name]), _hours(spent / 3600)] for name, spent in stages.items()]
    rows.append(["in all", str(plan.gpus), _hours(whole.hours)])
    print(table(["stage", "GPUs", "hours"], rows))
    print(f"each stage holds {START_SECONDS:g} seconds of its start")
    if "text" in stages:
        print("text: the model writes its own, which --text FILE spares")
    print(f"\nGPU-hours: {_hours(whole.paid)} paid for {plan.gpus} until the end, {_hours(whole.busy)} busy\n")
    runs = {f"{fraction:.0%} of the tokens": forecast(config, shape, gpu, plan, fraction) for fraction in FRACTIONS}
    rows = [_choice(title, run, plan) for title, run in runs.items()]
    print(table(["choice", "tokens", "shards on disk", "hours", "GPU-hours", *(["price"] if plan.price else [])], rows))
    for line in _memory_lines(config, shape, gpu, plan, whole.tokens):
        print(line)
    print("\nrates:")
    for name, unit in (
        ("tflops", "TFLOP/s at least"),
        ("read_tb_s", "TB/s"),
        ("step_ms", "ms a training step at least"),
    ):
        print(f"  {getattr(gpu, name):g} {unit}: {gpu.sources[name]}")


def _memory_lines(config: RunConfig, shape: ModelDims, gpu: Hardware, plan: PlanConfig, tokens: int) -> Iterator[str]:
    """Lines on what a run by layers holds, or that the model has no room."""
    if config.collect.by_layers:
        yield memory_line(config, shape, tokens)
        return
    weights, spread = 2 * shape.weights / 1e9, config.collect.device_map is not None
    if gpu.memory_gb is not None and weights > gpu.memory_gb * (plan.gpus if spread else 1):
        least = math.floor(weights / gpu.memory_gb) + 1
        yield (
            f"the weights exceed the {gpu.memory_gb:g} GB of one {gpu.gpu}: --collect.device_map auto spreads them over"
            f" GPUs of one host, {least} at least; --collect.by_layers true needs one, and text from --text FILE"
        )


def _choice(title: str, run: Forecast, plan: PlanConfig) -> list[str]:
    cells = [title, f"{run.tokens:,}", gigabytes(run.shards), _hours(run.hours), _hours(run.paid)]
    return cells + ([f"{run.paid * plan.price:.2f}"] if plan.price else [])


def _hours(hours: float) -> str:
    if hours < 0.01:
        return f"{60 * hours:.1f} min"
    return f"{hours:.2f}" if hours < 100 else f"{hours:,.0f}"
