"""What one layer's attention and MLP cost, prompting against generating, in theory and measured (Tables 1 to 3).

Theory counts two operations for a multiply-add, every weight once, and the keys and values that are read. The time is
the longer of operations / peak rate and bytes / bandwidth. The peaks are measured in the same run unless given.
Measured times have a synchronisation around each part, so that their sum exceeds the time of an undisturbed step.

Letters: d model width, f ffn width, h heads, V vocabulary.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import OPTForCausalLM

from dejavu_train.families import ModelDims, dims_of
from dejavu_train.models.finite import check_logits
from dejavu_train.models.hooks import decoder_layers

PHASES, PARTS = ("prompting", "generating"), ("attention", "mlp", "other")


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What a device can do at most: 1e12 operations a second, 1e9 bytes a second."""

    tera_operations: float
    gigabytes: float
    device: str


@dataclasses.dataclass(frozen=True)
class CostRow:
    """One part of all layers in one phase: of the whole prompt, or of one generated token.

    ``gigaflop``, ``gigabytes``: theory, 1e9. ``compute_ms``, ``read_ms``: at the peaks. ``theory_ms``: the longer one.
    ``measured_ms``: median. ``other``: head, norms, embeddings, and in the measured column all that is no part.
    """

    phase: str
    part: str
    batch: int
    prompt: int
    gigaflop: float
    gigabytes: float
    compute_ms: float
    read_ms: float
    theory_ms: float
    measured_ms: float


def part_cost(shape: ModelDims, phase: str, part: str, batch: int, prompt: int, size: int) -> tuple[float, float]:
    """Operations and bytes of one part of all layers.

    Attention, a token: 8 d² for its four projections and 4 d x (positions seen) for scores and values. MLP: 4 d f.
    Other: 2 d V for the logits of one position a row.
    Bytes: weights once for the whole batch. Keys and values, 2 d a position, are read by every generated token and
    written by the prompt.

    Args: ``size``: bytes of a weight.
    Returns: (operations, bytes).
    """
    d, layers = shape.d_model, shape.n_layers
    prompting = phase == "prompting"
    tokens = batch * prompt if prompting else batch
    if part == "attention":
        seen = (prompt + 1) / 2 if prompting else prompt + 1
        operations = tokens * (8 * d * d + 4 * d * seen)
        return layers * operations, layers * size * (4 * d * d + 2 * d * batch * (prompt if prompting else prompt + 1))
    if part == "mlp":
        return layers * tokens * 4 * d * shape.d_ffn, layers * size * 2 * d * shape.d_ffn
    return batch * 2 * d * shape.vocab_size, size * d * shape.vocab_size


def measure_peaks(device: torch.device, dtype: torch.dtype, size: int = 2048, megabytes: int = 256) -> Peaks:
    """The rate of a square matrix product, and of reading a large matrix once (a product with one vector)."""
    square = torch.randn(size, size, device=device).to(dtype)
    long = torch.zeros(megabytes * 2**20 // (dtype.itemsize * 4096), 4096, device=device, dtype=dtype)
    row = torch.zeros(4096, device=device, dtype=dtype)
    operations = 2 * size**3 / min(_times(lambda: square @ square, device, 5)) / 1e9
    read = long.numel() * dtype.itemsize / min(_times(lambda: long @ row, device, 5)) / 1e6
    return Peaks(operations, read, _name(device))


@torch.no_grad()
def cost_rows(model: OPTForCausalLM, peaks: Peaks, batch: int, prompt: int, steps: int = 16) -> list[CostRow]:
    """Tables 1 to 3 for this model: theory beside what was measured, prompting and generating.

    Args: ``prompt`` tokens a row, then ``steps`` tokens one by one. They must fit the model's positions.
    """
    shape, size = dims_of(model.config), model.dtype.itemsize
    ids = torch.randint(10, shape.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0))
    measured = _measure(model, ids.to(model.device), steps)
    rows = []
    for phase in PHASES:
        for part in PARTS:
            operations, read = part_cost(shape, phase, part, batch, prompt, size)
            times = (operations / peaks.tera_operations / 1e9, read / peaks.gigabytes / 1e6)
            seconds = measured[phase, part]
            rows.append(CostRow(phase, part, batch, prompt, operations / 1e9, read / 1e9, *times, max(times), seconds))
    return rows


def _measure(model: OPTForCausalLM, ids: Tensor, steps: int) -> dict[tuple[str, str], float]:
    """Median milliseconds by (phase, part)."""
    taken: dict[tuple[str, str], list[float]] = {(phase, part): [] for phase in PHASES for part in PARTS}

    def call(phase: str, keep: bool = True, **inputs: Any) -> Any:
        spent = dict.fromkeys(PARTS, 0.0)
        with _timed_parts(model, spent):
            start = _now(model.device)
            out = model(**inputs, use_cache=True, logits_to_keep=1)
            whole = _now(model.device) - start
        spent["other"] = whole - spent["attention"] - spent["mlp"]
        if keep:
            for part, value in spent.items():
                taken[phase, part].append(1e3 * value)
        return out

    for repeat in range(4):
        out = call("prompting", keep=repeat > 0, input_ids=ids)
    for step in range(steps + 3):
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        out = call("generating", keep=step >= 3, input_ids=token, past_key_values=out.past_key_values)
    check_logits(out.logits, model, ids)
    return {key: float(np.median(values)) for key, values in taken.items()}


@contextmanager
def _timed_parts(model: OPTForCausalLM, spent: dict[str, float]) -> Iterator[None]:
    """Within the context seconds of attention and MLP are added to ``spent``."""
    started = {"attention": 0.0, "mlp": 0.0}
    handles = []

    def starts(part: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            started[part] = _now(next(module.parameters()).device)

        return hook

    def stops(part: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            spent[part] += _now(next(module.parameters()).device) - started[part]

        return hook

    for block in decoder_layers(model):
        for part, first, last in (("attention", block.self_attn, block.self_attn), ("mlp", block.fc1, block.fc2)):
            handles += [first.register_forward_pre_hook(starts(part)), last.register_forward_hook(stops(part))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _times(work: Callable[[], object], device: torch.device, n: int) -> list[float]:
    """Milliseconds of ``n`` calls, after one that warms up."""
    rows = []
    for _ in range(n + 1):
        start = _now(device)
        work()
        rows.append(1e3 * (_now(device) - start))
    return rows[1:]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
