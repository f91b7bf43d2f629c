"""Prompts of rows that join others: each alone, filled up to one of few sizes, from a graph of that size.

Which kernel multiplies a prompt follows from how many tokens it has. So a prompt that runs alone in its size gives the
same numbers whoever else is served. An eager pass of a short prompt takes the time in which its launches are queued,
several times what the GPU needs for it. From a graph it takes the GPU's time.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dejavu_train.engine.prefill import run_prompts
from dejavu_train.engine.step import DecodeStep

STEP = 32  # tokens between two sizes
LONGEST = 256  # beyond it the GPU needs longer than the host


class Prompts:
    """Prompts for the rows of a step.

    Matrices of 4 bits are written out as numbers one after another. These passes, and long prompts, are not recorded.
    """

    def __init__(self, core: DecodeStep) -> None:
        self.core = core
        self._recorded = not any(layer.packed for layer in core.weights.layers)
        self._given: dict[int, Tensor] = {}

    @torch.no_grad()
    def run(self, b: int, tokens: Sequence[int]) -> None:
        """Run a prompt densely for row b: K and V are written, and ``x[-1, b]`` of the step, behind the last layer."""
        n = len(tokens)
        size = min(-(-n // STEP) * STEP, self.core.context)
        recorded = self._recorded and size <= LONGEST
        known = torch.tensor([b, n - 1, *tokens, *[0] * (size - n)])
        if not recorded:
            self._queue(known.to(self.core.device))
            return
        if size not in self._given:
            self._given[size] = known.to(self.core.device)
        self._given[size].copy_(known)
        self.core.replay(("prompt", size), partial(self._queue, self._given[size]), shared=True)

    def _queue(self, given: Tensor) -> None:
        """given: row, position of the last token, and tokens, (2 + size,) int64."""
        core, row = self.core, given[:1]
        keys, values = [cache.k for cache in core.caches], [cache.v for cache in core.caches]
        last = run_prompts(core.weights, given[None, 2:], row, given[1:2], keys, values)
        core.x[-1].index_copy_(0, row, last)
