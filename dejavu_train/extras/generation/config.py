"""The keys of ``dejavu generation``. Readable without torch."""

import dataclasses
from typing import Literal

from dejavu_train.bundle.guard_config import Guard
from dejavu_train.evaluation.shared_config import TextConfig
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import COLDEST, SHARE, WIDEST, check_ranges

DECODINGS = ("greedy", "sampled")  # a bundle is judged by both


@dataclasses.dataclass(frozen=True)
class GenerationConfig(TextConfig):
    """Continuations of held-out prompts, dense and sparse, side by side."""

    GONE = {"densities": "its name is --mlp_density"}
    CONSTANTS = TextConfig.CONSTANTS | {"decodings": [*DECODINGS]}

    text: str = "installed-docs"
    """An installed source, a .txt or .jsonl file, or a hub dataset."""
    prompts: int = 32
    """How many, of as many documents as there are."""
    prompt: int = 32
    """Tokens of each prompt, the leading </s> included."""
    new_tokens: int = 128
    """Tokens of every continuation. </s> ends none."""
    temperature: float = 1.0
    """Temperature of sampling, which draws the same random numbers for every model."""
    top_p: float = 1.0
    """Nucleus that sampling draws from."""
    mlp_density: tuple[float, ...] = ()
    """Densities of the MLPs' candidates, means over the layers. None named: as the bundle was calibrated."""
    head_density: float | None = None
    """Density of the heads. null: as calibrated."""
    sparse_from: tuple[Literal["prompt", 0], ...] = ("prompt", 0)
    """Where sparsity begins: prompt keeps prompts dense, 0 has every token sparse. Guards are compared at prompt."""
    every: tuple[int, ...] = (8, 16, 32)
    """Guards to try: every so many-th decoding step is dense. None named: no guards."""
    control: tuple[bool, ...] = (False, True)
    """Guards' thresholds to try: as the bundle has them, and moved."""
    batch: int = 32
    """Rows at once."""
    backend: Literal["auto", "gather", "triton"] = "auto"
    """Backend of all models, the dense one included. auto: the engine on a GPU, gather on a CPU."""

    def check(self) -> None:
        """Raise :class:`UserError` for a value that cannot be meant."""
        for name, least in {"prompts": 2, "prompt": 2, "new_tokens": 8, "batch": 1}.items():
            if getattr(self, name) < least:
                raise UserError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        if not self.sparse_from:
            raise UserError("--sparse_from is empty; name one")
        check_ranges(self, "--", {"mlp_density": SHARE, "head_density": SHARE})
        if not COLDEST <= self.temperature <= WIDEST:
            raise UserError(f"--temperature must lie in {COLDEST:g} to {WIDEST:g}, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p must lie above 0 and at most at 1, got {self.top_p}")
        if 0 in self.every:
            raise UserError("--every must be at least 2, got 0; leave it out, rows without a guard are always there")
        for every in self.every:
            Guard(every=every)
