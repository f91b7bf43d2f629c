"""Reckons how long the stages of a run take on its device, for ``--check``.

One block of the model's shape is timed, recorded as collecting does, and steps and validations of a real predictor on
random rows. What follows a known number of such passes is reckoned from them, with factors that were measured once.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from dejavu_train.data.recording import HeadReference, WindowBatch, record_batch
from dejavu_train.data.shards import RecordedWeights, pack_bits
from dejavu_train.data.windows import Window
from dejavu_train.families import ModelDims, Target, UnitKey, blocks_of
from dejavu_train.families.base import family_named
from dejavu_train.models.config_values import read_values
from dejavu_train.models.load import random_model, resolve_device, torch_dtype
from dejavu_train.run.footprint import probed_rows
from dejavu_train.training.build import make_predictor
from dejavu_train.training.config import RunConfig
from dejavu_train.training.lit_predictor import LitPredictor
from dejavu_train.training.trainer import start_device

TRIALS = 5
TRIAL_SECONDS = 3.0  # after which no further trial begins: a large model on a CPU
TRIAL_FLOPS = {"cpu": 2e10, "cuda": 2e13}  # of one timed block or step: a second at most
DISK_BYTES = 1.0e9  # that a disk writes, or that are read and hashed, in a second
JOB_SECONDS = 0.3  # until a fit's first step, and after its last
STEP_SECONDS = 1.5e-3  # of Lightning, around a step
BACKWARD = 3.0  # a forward and a backward pass, in forward passes
SPARSE_PASS = 1.0  # a pass with a selection in plain torch, in passes of the dense model
UNIT_SECONDS = 4e-8  # to score one unit of one row for a curve


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a run's stages, each of them in all.

    Args:
        config: the run.
        shape: of its model.
        block: seconds of one block for one token, recorded.
        row: seconds of one block for one row of those that are continued at once, by one token.
        steps: by target seconds of a training step, and of the validation of a batch.
        disk: bytes that are written, or read and hashed, in a second.
    """

    config: RunConfig
    shape: ModelDims
    block: float
    row: float
    steps: Callable[[Target], tuple[float, float]]
    disk: float = DISK_BYTES

    @classmethod
    def measure(cls, config: RunConfig, shape: ModelDims) -> "Estimate":
        """Time one block on the device of the run."""
        device, run = resolve_device(config.collect.device), config.collect
        block = shape.mean_layer_weights
        tokens = int(TRIAL_FLOPS[device.type] / (2 * block))
        length = max(16, min(run.window, tokens))
        rows = max(1, min(run.batch_size, tokens // length))
        model, mean = _one_block(config, device), torch.zeros(shape.n_kv_heads, shape.group_dim, dtype=torch.float32)
        blocks = blocks_of(model)
        heads = {number: HeadReference.of(each, mean) for number, each in enumerate(blocks) if each.targets}
        record = timed(_recorded(model, heads, config, rows, length), device) / (rows * length)
        write = timed(_recorded(model, heads, config, 32, 1), device) / 32
        steps = functools.partial(seconds_of_steps, config, shape)
        return cls(config, shape, record / len(blocks), write / len(blocks), steps)

    @property
    def token(self) -> float:
        """Seconds of all blocks for one token."""
        return self.block * self.shape.n_layers

    @property
    def head(self) -> float:
        """The vocabulary's logits in blocks, by their weights."""
        return self.shape.vocab_size * self.shape.d_model / self.shape.mean_layer_weights

    def sampling(self, tokens: int) -> float:
        """Seconds of the model's own text."""
        return tokens * self.row * (self.shape.n_layers + self.head)

    def collecting(self, tokens: int, n_bytes: int) -> float:
        """Seconds of recording so many tokens, all bytes of which are then hashed."""
        return max(tokens * self.token, n_bytes / self.disk) + n_bytes / self.disk

    def training(self, target: Target, jobs: int, rows: Mapping[str, int]) -> float:
        """Seconds of so many jobs with all their steps, where the sets have so many ``rows``."""
        section = self.config.predictor(target)
        step, validation = self.steps(target)
        scored = (section.validations + 1) * -(-rows["val"] // self.config.data.batch_size)
        computed = section.steps * (step + STEP_SECONDS) + scored * validation
        return jobs * (JOB_SECONDS + self.reading(rows) + computed)

    def reading(self, rows: Mapping[str, int]) -> float:
        """Seconds of the rows that one job reads and hashes, with the disk for itself."""
        return sum(rows.values()) * (2 * self.shape.d_model + self.shape.d_ffn // 8) / self.disk

    def tuning(self) -> float:
        """Seconds of the predictors' training in the model: a dense pass, and a sparse one with its gradients.

        By layers the sparse pass runs twice, and a step reads all layers twice, of which the next is read meanwhile.
        """
        steps, by_layers = self.config.tune.steps, self.config.collect.by_layers
        computed = steps * self.config.tune.tokens * self.token * (1 + BACKWARD + by_layers)
        read = steps * 2 * 2 * self.shape.mean_layer_weights * self.shape.n_layers / self.disk if by_layers else 0.0
        return max(computed, read)

    def calibrating(self, rows: int) -> float:
        """Seconds of curves over ``rows`` rows, heads' losses and sensitivities: layers behind a probe run again."""
        config, shape = self.config.calibrate, self.shape
        stages = 1 if config.cascade is None else 2
        seconds = min(rows, config.rows) * len(shape.layers_of(Target.MLP)) * shape.d_ffn * UNIT_SECONDS * stages
        if not config.sensitivity_tokens:
            return seconds
        layers = probed_rows(self.config, shape) * (shape.n_layers / 2 + self.head)
        seconds += min(rows, config.sensitivity_tokens) * layers * self.block * SPARSE_PASS
        if self.config.heads.enabled:
            seconds += min(rows, config.head_loss_tokens) * self.token * (1 + BACKWARD)
        return seconds


def flops_of_step(shape: ModelDims, rank: int, rows: int) -> float:
    """Operations in a training step of a neurons' predictor: contributions, and three passes of its own maps."""
    maps = shape.rows_of(Target.MLP) - 1  # into the neurons
    return 2.0 * rows * (maps * shape.d_model * shape.d_ffn + 3 * rank * (shape.d_model + shape.d_ffn))


class _Nowhere:
    """Takes what a shard's writer would."""

    def put(self, *_: Any) -> None:
        pass


def _one_block(config: RunConfig, device: torch.device) -> PreTrainedModel:
    """A model of one block of the run's shape, or of one of each kind.

    All weights are one number: a draw takes longer than what is timed.
    """
    values = {**read_values(config.model, config.revision), "num_hidden_layers": 1, "vocab_size": 16}
    values |= getattr(family_named(values["model_type"], config.model), "shortest", dict)()
    values.pop("quantization_config", None)
    with torch.device(device), no_init_weights():
        model = random_model(values).to(torch_dtype(config.collect.dtype)).eval()
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    return model


def _recorded(
    model: PreTrainedModel, heads: dict[int, HeadReference | None], config: RunConfig, rows: int, length: int
) -> Callable[[], object]:
    """A pass of ``rows`` windows through a model of one block, as collecting makes it."""
    batch = WindowBatch.of([Window(0, np.full(length, 3)) for _ in range(rows)])
    return lambda: record_batch(model, batch, config.collect, heads, _Nowhere(), 0)


def seconds_of_steps(config: RunConfig, shape: ModelDims, target: Target) -> tuple[float, float]:
    """Seconds of one training step and of one validation of a batch, timed on random rows."""
    device, section, n_units = start_device(config.trainer), config.predictor(target), shape.units(target)
    predictor = make_predictor(config, UnitKey(0, target), shape.d_model, n_units)
    module = LitPredictor(target, predictor, n_units, section.density or 0.1, section.loss).to(device)
    weights = RecordedWeights(
        torch.randn(1, shape.d_model, dtype=torch.float32).repeat(shape.d_ffn, 1),
        torch.zeros(shape.d_ffn, dtype=torch.float32),
        torch.ones(shape.d_ffn, dtype=torch.float32),
        torch.zeros(shape.n_kv_heads, shape.group_dim, dtype=torch.float32),
    )
    module.init_predictor("small", weights.to(device))
    most = int(TRIAL_FLOPS[device.type] / (6 * shape.d_model * shape.d_ffn))  # of contributions, forward and backward
    rows = max(16, min(config.data.batch_size, most))
    held = torch.randn(4 * rows, shape.d_model, device=device, dtype=torch.float32).half()
    raw: dict[str, Any] = {
        "active": pack_bits(torch.rand(4 * rows, shape.d_ffn, device=device, dtype=torch.float32) < 0.1)
    }
    raw = (
        raw
        if target == Target.MLP
        else {"contribution": torch.rand(4 * rows, n_units, device=device, dtype=torch.float32).half()}
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)

    def batch() -> dict[str, Any]:
        chosen = torch.randint(len(held), (rows,), device=device)
        return {"inputs": held[chosen], **{name: values[chosen] for name, values in raw.items()}}

    def step() -> None:
        optimizer.zero_grad()
        module.loss_of_batch(batch()).backward()
        optimizer.step()

    @torch.no_grad()
    def validate() -> None:
        module.score_batch(batch())

    share = config.data.batch_size / rows
    return share * timed(step, device), share * timed(validate, device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call, after one that is not counted."""
    seconds: list[float] = []
    for _ in range(TRIALS + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        if sum(seconds) > TRIAL_SECONDS and len(seconds) > 1:
            break
    return sorted(seconds[1:])[len(seconds[1:]) // 2]
