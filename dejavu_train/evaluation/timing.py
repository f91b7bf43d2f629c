"""Reads a model and a prompt, writes milliseconds per decoded token: median, 20th and 80th percentile.

The prompt is processed densely, which is the time to the first token, and not counted in what follows. The first steps
warm up and are not counted either. What a predictor costs is inside the measured time. Greedy, batch rows alike.
Models are timed call by call, as a loop of Hugging Face's would. The decode engine by its captured step.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.ranks.part import ranks_of
from dejavu_train.families import dims_of
from dejavu_train.models.finite import check_logits

logger = logging.getLogger(__name__)

WARM_UP = 3
# Engines without a bundle, and the same that read rows of silent neurons too. With a bundle an engine is named as its
# backend: triton, and cpu.
DENSE_ENGINE, DENSE_CPU, CPU, TRITON = "dense-engine", "dense-cpu", "cpu", "triton"
READ_ENGINE, READ_CPU = "dense-engine-read", "dense-cpu-read"
ON_GPU, ON_CPU = (READ_ENGINE, DENSE_ENGINE, TRITON), (READ_CPU, DENSE_CPU, CPU)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Conditions and milliseconds per token of one backend."""

    backend: str
    device: str
    batch: int
    prompt: int
    new_tokens: int
    ms_per_token: dict[str, float]
    first_token_ms: float | None = None
    """Milliseconds of the prompt, up to the first new token: the median of warm calls."""
    megabytes_per_token: float | None = None
    """1e6 bytes that a step read, counted by the CPU engine."""
    asked_mlp_density: float | None = None
    """Density that the timed bundle's thresholds were set for, a mean over the layers. 1.0: dense.

    With a second stage these are candidates."""
    asked_head_density: float | None = None
    """The same of the heads."""
    second_stage: bool | None = None
    """Whether a second stage tested the candidates. False: they were read whole. None: the bundle has none."""
    tokens: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    """Greedy tokens of the first row, behind the prompt. Empty where the text is not the model's."""


class Clock(BaseStreamer):
    """A streamer of ``generate()`` that notes when the prompt and each new token come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """A prompt, then one token after the other."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is kept back."""

    @property
    def rate(self) -> float:
        """Tokens a second behind the first new one, for three times or more."""
        return (len(self.times) - 2) / (self.times[-1] - self.times[1])


@torch.no_grad()
def time_decoding(model: PreTrainedModel, backend: str, prompt: Tensor, new_tokens: int) -> Timing:
    """Decode ``new_tokens`` tokens one by one, each step timed.

    Args:
        model: a dense model or a sparse one with ``sparse_from="prompt"``.
        backend: its name, for the result.
        prompt: (B, P) token ids. P + new_tokens + 3 must fit the model's positions.
    Raises:
        UserError: logits that are not finite at the prompt or at the last step.
    """
    assert prompt.shape[1] + new_tokens + WARM_UP <= dims_of(model.config).max_positions, "the prompt is too long"
    options: dict[str, Any] = {"use_cache": True}
    written: list[Tensor] = []
    out: Any = None

    def begin() -> None:
        nonlocal out
        out = model(prompt.to(model.device), logits_to_keep=1, **options)

    first = _first_token(begin, model.device)
    check_logits(out.logits, model, prompt)

    def step() -> None:
        nonlocal out
        token = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        written.append(token[0])
        out = model(token, past_key_values=out.past_key_values, **options)

    times = _per_step(step, model.device, new_tokens)
    check_logits(out.logits, model, prompt)
    conditions = _conditions(model.device, prompt, new_tokens)
    return Timing(backend, *conditions, times, first, tokens=tuple(map(int, written)))


def build_engine(
    backend: str,
    model: Any,
    bundle: Bundle | None = None,
    rows: int = 1,
    tokens: int | None = None,
    stored: str | None = None,
) -> Any:
    """A `CpuEngine` for `ON_CPU`, else a `DecodeEngine`.

    Args:
        tokens: of a row, None = the model's limit. stored: format of the weights on a CPU, None = the engine's choice.
    """
    if backend in ON_CPU:
        from dejavu_train.engine.cpu import CpuEngine, load_engine

        load_engine()  # numba
        from dejavu_train.engine.cpu.rounded import read_weights

        weights = read_weights(model, stored)
        if backend == READ_CPU:  # this engine always skips: at such biases no neuron is silent, and the text is another
            for biases in {id(each): each for each in (weights.model.in_bias, weights.model.up_bias)}.values():
                biases += 1e4
        return CpuEngine(weights, bundle, batch=rows, context=tokens)
    from dejavu_train.engine.decode import DecodeEngine, EngineOptions  # imports triton

    plain = ranks_of(model) is not None and model.device.type == "cpu"  # to try several processes out
    zeros = "read" if backend == READ_ENGINE else "auto"
    return DecodeEngine(
        model, bundle, EngineOptions(batch=rows, context=tokens, ops="reference" if plain else "triton", zeros=zeros)
    )


@torch.no_grad()
def time_engine(
    model: PreTrainedModel,
    bundle: Bundle | None,
    backend: str,
    prompt: Tensor,
    new_tokens: int,
    stored: str | None = None,
) -> Timing:
    """The same through an engine, step by step, on a copy of the model's weights.

    Args:
        bundle: None = dense.
        backend, stored: see `build_engine`. prompt: (B, P) token ids.
    Raises:
        UserError: what the engine refuses, for instance a machine without a GPU.
    """
    (batch, length), on_cpu = prompt.shape, backend in ON_CPU
    engine = build_engine(backend, model, bundle, batch, length + new_tokens + WARM_UP, stored)
    logger.info("%s", engine.describe())
    rows = [Row.of_prompt(row, engine.context) for row in prompt.tolist()]
    first = _first_token(lambda: engine.begin(rows), model.device)
    n, megabytes = max(1, new_tokens - 1), None  # the first new token came with the prompt
    if on_cpu:
        engine.bytes_read()
    times = _per_step(engine.step, model.device, n)
    (held, *_), _ = engine.look(batch)
    tokens = () if backend == READ_CPU else tuple(engine.state.tokens[0, length:held].tolist())
    if on_cpu:
        megabytes = round(sum(engine.bytes_read().values()) / (n + WARM_UP) / 1e6, 3)
        engine.close()
    conditions, ranks = _conditions(model.device, prompt, new_tokens), ranks_of(model)
    timing = Timing(backend, *conditions, times, first, megabytes, tokens=tokens)
    return timing if ranks is None else dataclasses.replace(timing, device=f"{ranks.shard.world} x {timing.device}")


def _conditions(device: torch.device, prompt: Tensor, new_tokens: int) -> tuple[str, int, int, int]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return name, prompt.shape[0], prompt.shape[1], new_tokens


def _first_token(begin: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a prompt: the median of `WARM_UP` calls behind the first one."""
    return _per_step(begin, device, WARM_UP, 1)["p50"]


def _per_step(step: Callable[[], object], device: torch.device, n: int, warm_up: int = WARM_UP) -> dict[str, float]:
    """Milliseconds of one step: 20th, 50th and 80th percentile of n, after those that warm up."""
    milliseconds = []
    for _ in range(warm_up + n):
        _wait(device)
        start = time.perf_counter()
        step()
        _wait(device)
        milliseconds.append(1e3 * (time.perf_counter() - start))
    points = np.percentile(milliseconds[warm_up:], [20, 50, 80])
    return dict(zip(("p20", "p50", "p80"), (round(float(point), 4) for point in points), strict=True))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
