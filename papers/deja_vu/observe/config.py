"""What an observation reads and measures, as keys with their defaults."""

import dataclasses
from typing import Literal

from dejavu_train.evaluation.shared_config import TextConfig
from dejavu_train.ground.errors import UserError

PASS_PARTS = ("residual", "units", "attention", "union")
PARTS = (*PASS_PARTS, "selections", "predictors", "neighbours", "cost")


@dataclasses.dataclass(frozen=True)
class ObserveConfig(TextConfig):
    """What to observe of a dense model on held-out text, and of a bundle's predictors if there is one."""

    bundle: str | None = "checkpoints/demo/bundle"  # type: ignore[assignment]
    """Folder or hub id. null: none, which leaves out the parts selections and predictors."""
    output: str = "checkpoints/demo"
    """The folder observations is made in it: CSV, SVG and PNG files, and observations.json."""
    text: str = "installed-docs"
    """An installed source, a .txt or .jsonl file, or a hub dataset."""
    predictor_set: Literal["train", "calibration", "val", "test"] = "val"
    """Which set the part predictors reads of a text that is split: the paper takes validation documents."""
    tokens: int | None = 20_000
    """Of the one pass, about. A window of each document before any gives a second one. null: all."""
    slow_tokens: int = 4000
    """The same for the parts selections and neighbours, each of which needs many passes, and for predictors."""
    window: int = 256
    """</s> and window - 1 new tokens."""
    batch_tokens: int = 4096
    """Positions in one forward pass. Fewer for large models."""
    parts: tuple[str, ...] = PARTS
    """What to measure. residual, units, attention and union share one pass."""
    losses: tuple[float, ...] = (0.2, 0.1)
    """Of the output norm, for which silenced units are counted. The first defines the heads that a token needs."""
    sampled: int = 2048
    """Positions at which neurons are silenced, about."""
    queries: int = 16
    """Positions of each window at which attention is looked at."""
    requests: int = 128
    """Windows whose sets are kept for the unions of batches."""
    densities: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
    """Of the MLPs' candidates, for the part selections."""
    neighbour_density: float = 0.1
    """Share of the neurons that nearest neighbours select."""
    ef: tuple[int, ...] = (200, 400, 800)
    """How many candidates the search of a graph keeps. At least as many as are selected."""
    batch: int = 1
    """Rows, for the part cost."""
    prompt: int = 128
    """Tokens of the prompt, for the part cost."""
    peak_tflops: float | None = None
    """1e12 operations a second of the device. null: measured."""
    peak_gb_s: float | None = None
    """1e9 bytes a second. null: measured."""
    device_map: str | None = None
    """Auto: a model over several GPUs. Needs accelerate."""

    def check(self) -> None:
        """Raise :class:`UserError` for a value that cannot be meant."""
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise UserError(f"--parts must be some of {', '.join(PARTS)}, got {', '.join(unknown) or 'none'}")
        if not self.losses or not all(0 < loss < 1 for loss in self.losses):
            raise UserError(f"--losses must lie between 0 and 1, got {list(self.losses)}")
        if not self.densities or not all(0 < density <= 1 for density in (*self.densities, self.neighbour_density)):
            got = f"{list(self.densities)} and {self.neighbour_density}"
            raise UserError(f"--densities and --neighbour_density must lie above 0 and at most at 1, got {got}")
        least = {"window": 4, "slow_tokens": 1, "batch_tokens": 1, "sampled": 1, "queries": 1, "requests": 1}
        for name, value in (least | {"batch": 1, "prompt": 1}).items():
            if getattr(self, name) < value:
                raise UserError(f"--{name} must be at least {value}, got {getattr(self, name)}")
        if (self.tokens is not None and self.tokens < 1) or any(ef < 1 for ef in self.ef):
            raise UserError(f"--tokens and --ef must be at least 1, got {self.tokens} and {list(self.ef)}")
        if any(peak is not None and peak <= 0 for peak in (self.peak_tflops, self.peak_gb_s)):
            got = f"{self.peak_tflops} and {self.peak_gb_s}"
            raise UserError(f"--peak_tflops and --peak_gb_s must be above 0, got {got}")
