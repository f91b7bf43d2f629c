"""The keys of collecting activations and of reading them, without torch. Those of text stand in text.py."""

import dataclasses
from typing import Any, Literal

from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import COUNT, NUMBER, Range, check_ranges

Storage = Literal["float16", "bfloat16"]
MEAN_TOKENS = 8192  # of the train set, over which a head's mean is taken: many times the columns of a head
POOL_BLOCKS = 32  # of about 1 MB, whose rows are shuffled together: a batch of 1,024 rows has some of each
CONSTANTS = {"head_criterion": "from_mean", "mean_tokens": MEAN_TOKENS}
"""Options of 0.2. What is recorded still names them, so that its activations are known."""


@dataclasses.dataclass(frozen=True)
class CollectConfig:
    """How much text is recorded, and how the dense model runs."""

    window: int = 512
    """Tokens of a sequence, the leading </s> included."""
    train_tokens: int | None = 880_000
    """At most so many tokens are recorded for training. null takes all."""
    val_tokens: int | None = 40_000
    """The same for early stopping and choices."""
    calibration_tokens: int | None = 80_000
    """The same for thresholds."""
    windows_per_document: int | None = None
    """At most so many windows of a document, drawn at random: a budget then sees more documents. null takes all."""
    shard_tokens: int = 32_768
    """Tokens of a shard. A killed run redoes at most one."""
    batch_size: int = 8
    """Windows per forward pass."""
    dtype: Literal["float32", "float16", "bfloat16", "auto"] = "float32"
    """In which the model runs. auto: float16, and bfloat16 where neurons are squared, which float16 does not hold."""
    storage: Storage = "float16"
    """In which hidden states are stored."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    device_map: str | None = None
    """As in transformers (for instance auto) for a model larger than one GPU. Needs accelerate."""
    by_layers: bool = False
    """Run a layer over all windows before the next one is read, for a model larger than the device's memory. The states
    between two layers lie on the disk, in the activations folder, until the last layer is done."""

    def __post_init__(self) -> None:
        least = Range(2, COUNT.most)  # </s> and a token
        tokens = dict.fromkeys(("window", "train_tokens", "val_tokens", "calibration_tokens", "shard_tokens"), least)
        check_ranges(self, "collect.", tokens | {"batch_size": COUNT, "windows_per_document": COUNT})
        if self.by_layers and self.device_map is not None:
            raise UserError(
                f"collect.by_layers runs on one device, got collect.device_map {self.device_map};"
                " set --collect.device_map null"
            )

    def settled(self, shape: ModelDims) -> "CollectConfig":
        """The same with the name of a dtype for one that is auto."""
        return dataclasses.replace(self, dtype=shape.half_dtype) if self.dtype == "auto" else self

    def budget(self, set_name: str) -> int | None:
        return getattr(self, f"{set_name}_tokens")

    def request(self, seed: int) -> dict[str, Any]:
        """Settings that decide which rows are recorded. How the model runs (batch, dtype, device) is left out."""
        values = dataclasses.asdict(self) | CONSTANTS
        for name in ("batch_size", "dtype", "device", "device_map", "by_layers"):
            values.pop(name)
        return {**values, "seed": seed}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """How shards are read for training."""

    batch_size: int = 1024
    """Rows per step, over all devices."""
    memory_gb: float = 4.0
    """Rows of a job up to this size are kept on the training device. More are streamed from disk. 0 always streams."""
    num_workers: int = 0
    """Reader processes when streaming. 0 reads in the training process, which is right on few cores."""

    def __post_init__(self) -> None:
        ranges = {"batch_size": COUNT, "num_workers": Range(0, 10_000), "memory_gb": NUMBER}
        check_ranges(self, "data.", ranges)
