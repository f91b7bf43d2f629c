"""Reads documents, writes nothing: which windows are recorded, and which of them make which shard.

The plan follows from text, seed and budgets alone, so that a run which was killed makes the same one again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from dejavu_train.data.shards import Storage
from dejavu_train.data.text import Document, cut_windows, windows
from dejavu_train.errors import UserError


@dataclasses.dataclass(frozen=True)
class CollectConfig:
    """How much text is recorded, and how the dense model runs."""

    window: int = 512
    """Tokens of a sequence, the leading </s> included."""
    train_tokens: int | None = 880_000
    """At most so many tokens are recorded for training; null takes all."""
    val_tokens: int | None = 40_000
    """The same for early stopping and choices."""
    calibration_tokens: int | None = 80_000
    """The same for thresholds."""
    windows_per_document: int | None = None
    """At most so many windows of a document, drawn at random: a budget then sees more documents. null takes all."""
    shard_tokens: int = 32_768
    """Tokens of a shard; a killed run redoes at most one."""
    batch_size: int = 8
    """Windows per forward pass."""
    dtype: str = "float32"
    """The model runs in float32, float16 or bfloat16."""
    storage: Storage = "float16"
    """Hidden states are stored as float16 or bfloat16."""
    head_criterion: Literal["from_mean", "norm"] = "from_mean"
    """What a head contributes: how far its output lies from its mean (a skipped head is replaced by its mean), or its
    whole output (a skipped head is dropped)."""
    mean_tokens: int = 8192
    """Train tokens over which that mean is taken."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    device_map: str | None = None
    """As in transformers (for instance auto) for a model larger than one GPU; needs accelerate."""

    def __post_init__(self) -> None:
        for name in ("window", "shard_tokens", "batch_size"):
            if getattr(self, name) < 2 - (name == "batch_size"):
                raise UserError(f"collect.{name} is too small: {getattr(self, name)}")
        for name in ("train_tokens", "val_tokens", "calibration_tokens", "windows_per_document"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"collect.{name} must be positive or null, got {value}")

    def budget(self, set_name: str) -> int | None:
        return getattr(self, f"{set_name}_tokens")

    def request(self, seed: int) -> dict[str, Any]:
        """What decides which rows are recorded; how the model runs (batch, dtype, device) is left out."""
        values = dataclasses.asdict(self)
        for name in ("batch_size", "dtype", "device", "device_map"):
            values.pop(name)
        return {**values, "seed": seed}


@dataclasses.dataclass(frozen=True)
class Window:
    """One sequence of token ids of a document."""

    document: int
    ids: np.ndarray


def plan_windows(
    documents: Sequence[Document], tokenizer: Any, config: CollectConfig, budget: int | None, seed: int
) -> list[Window]:
    """Draw documents in random order and take their windows until ``budget`` tokens (exactly) are planned."""
    generator = np.random.default_rng(seed)
    planned: list[Window] = []
    total = 0
    for number in generator.permutation(len(documents)):
        document = documents[number]
        if document.ids is None:
            ids = windows(tokenizer, document.text, config.window)
        else:
            ids = cut_windows(document.ids.tolist(), config.window)
        if config.windows_per_document is not None and len(ids) > config.windows_per_document:
            ids = [ids[i] for i in sorted(generator.permutation(len(ids))[: config.windows_per_document])]
        for window_ids in ids:
            if budget is not None and total + len(window_ids) > budget:
                window_ids = window_ids[: budget - total]
            if len(window_ids) < 2:
                continue
            planned.append(Window(int(number), np.array(window_ids, np.int32)))
            total += len(window_ids)
        if budget is not None and total >= budget - 1:
            break
    return planned


def plan_shards(planned: Sequence[Window], shard_tokens: int) -> list[list[Window]]:
    """Cut into runs of whole windows, each of at least ``shard_tokens`` (the last may be smaller).

    Within a shard windows stand by length, so that a batch has little padding.
    """
    shards: list[list[Window]] = []
    room = 0
    for window in planned:
        if room <= 0:
            shards.append([])
            room = shard_tokens
        shards[-1].append(window)
        room -= len(window.ids)
    return [sorted(shard, key=lambda window: -len(window.ids)) for shard in shards]
