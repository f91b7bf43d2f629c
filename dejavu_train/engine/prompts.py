"""Rows that join others: each alone, its prompt filled up to one of few sizes, from a graph of that size.

Which kernel multiplies a prompt follows from how many tokens it has. So a prompt that runs alone in its size gives the
same numbers whoever else is served. An eager pass of a short prompt takes the time in which its launches are queued,
several times what the GPU needs for it. From a graph it takes the GPU's time.

A row joins in one transfer and two graphs, behind the steps that were asked for before. The host waits for nothing.
"""

from functools import partial

import torch
from torch import Tensor

from dejavu_train.engine.inputs import Row
from dejavu_train.engine.prefill import logits_of, run_prompts, run_tokens
from dejavu_train.engine.row_numbers import FIRST, row_numbers, sent, write_rows
from dejavu_train.engine.scores import AT_ONCE, Score, scores_of
from dejavu_train.engine.step import DecodeStep
from dejavu_train.models.finite import not_finite

STEP = 32  # tokens between two sizes
LONGEST = 256  # beyond it the GPU needs longer than the host


class Prompts:
    """Prompts for the rows of a step.

    Matrices of 4 bits are written out as numbers one after another. These passes, and long prompts, are not recorded.
    """

    def __init__(self, core: DecodeStep) -> None:
        self.core = core
        self._packed = any(layer.packed for layer in core.weights.layers)
        self._given: dict[int, Tensor] = {}
        self._row = torch.zeros(1, dtype=torch.int64, device=core.device)
        self._changed = core.state.done, core.state.row_state
        self._kept = [tensor.clone() for tensor in self._changed]

    @torch.no_grad()
    def join(self, b: int, row: Row) -> None:
        """Begin a row in place b: run its prompt densely, and choose its next token. Other rows stay as they are."""
        core, size = self.core, self._size(row.prefilled)
        width = self._size(len(row.tokens))
        numbers = row_numbers(b, [row], width)
        try:
            if self._packed or width > LONGEST:
                self._begin(sent(numbers, core.device), size)
            else:
                if width not in self._given:
                    shape = 1, FIRST + width
                    self._given[width] = torch.zeros(shape, dtype=torch.float64, device=core.device)
                given = self._given[width]
                given.copy_(sent(numbers, core.device))
                core.replay(("prompt", width, size), partial(self._begin, given, size), shared=True)
            mode, score = row.sampling.mode, row.scored_from is not None
            core.replay(("joined", mode, score), partial(self._end, mode, score), shared=True)
        except BaseException:
            self._put_back()
            raise

    def _size(self, n: int) -> int:
        return min(-(-n // STEP) * STEP, self.core.context)

    def _begin(self, given: Tensor, size: int) -> None:
        """Everything in front of the LM head. Other rows are done meanwhile. given: (1, FIRST + width) fp64."""
        core = self.core
        for tensor, kept in zip(self._changed, self._kept, strict=True):
            kept.copy_(tensor)
        core.state.done.fill_(1)
        row, prefilled, tokens = write_rows(core, given)
        self._row.copy_(row)
        if size:
            keys, values = [cache.k for cache in core.caches], [cache.v for cache in core.caches]
            last = run_prompts(core.weights, tokens[:, :size], row, prefilled - 1, keys, values)
            core.x[-1].index_copy_(0, row, last)

    @torch.no_grad()
    def scores(self, b: int, row: Row) -> list[Score]:
        """The scores of a row's prefilled tokens, from ``row.scored_from`` on, before it joins in place b.

        Raises:
            UserError: numbers that are not finite.
        """
        core, first = self.core, row.scored_from
        if first is None or first >= row.prefilled:
            return []
        with core.on_device():
            ids = torch.tensor([row.tokens[: row.prefilled]], device=core.device)
            keys, values = [cache.k for cache in core.caches], [cache.v for cache in core.caches]
            behind = run_tokens(core.weights, ids, torch.tensor([b], device=core.device), keys, values)[0]
            found: list[Score] = []
            for start in range(first, row.prefilled, AT_ONCE):  # logits of position p stand behind token p - 1
                stop = min(row.prefilled, start + AT_ONCE)
                logits = logits_of(core.weights, behind[start - 1 : stop - 1])
                if not bool(logits.isfinite().all()):
                    raise not_finite(f"the logits of row {b} hold NaN", core.weights.embedding.dtype)
                found += scores_of(logits, row.tokens[start:stop], row.top)
        return found

    def _end(self, mode: str, score: bool) -> None:
        """The LM head and the choice of the next token. Then other rows go on."""
        self.core.tail(mode, score)
        for tensor, kept in zip(self._changed, self._kept, strict=True):
            kept.index_copy_(0, self._row, tensor.index_select(0, self._row))
        self._put_back()

    def _put_back(self) -> None:
        for tensor, kept in zip(self._changed, self._kept, strict=True):
            tensor.copy_(kept)
