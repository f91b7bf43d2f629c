"""Prompts of an engine's rows: each alone, in chunks of few sizes, every size a graph.

Which kernel multiplies a chunk follows from its size, and the chunks from the prompt's positions. So a prompt gives the
same numbers whoever else is served. An eager pass of a short prompt takes the time in which its launches are queued,
several times what the GPU needs for it. From a graph it takes the GPU's time. The host waits for nothing.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from dejavu_train.engine import runs
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.prefill import (
    MOST,
    MOST_PACKED,
    SLOTTED,
    Chunk,
    chunks_of,
    logits_of,
    run_chunk,
)
from dejavu_train.engine.ranks.joins import Join
from dejavu_train.engine.row_numbers import row_numbers, sent, write_rows
from dejavu_train.engine.scores import AT_ONCE, Score, scores_of
from dejavu_train.engine.slot_pass import SlotPass
from dejavu_train.engine.step import DecodeStep
from dejavu_train.families.dims import engine_refusal
from dejavu_train.kernels.verify.attend_slots import SLOTS
from dejavu_train.models.finite import not_finite


class Prompts:
    """Prompts for the rows of a step.

    Args:
        join: of the outputs of the halves of layers. Those of several GPUs are not recorded.
    """

    @torch.inference_mode(False)  # what it holds is written in later calls, which may be outside
    def __init__(self, core: DecodeStep, join: Join) -> None:
        self.core, self.join, self._alone = core, join, type(join) is Join
        packed = core.weights.packed
        self.most = MOST_PACKED if packed else MOST
        has_slots = self._alone and engine_refusal(core.shape, runs.VERIFIED) is None
        self.slotted = has_slots * SLOTTED
        self._chunk = torch.zeros(3, dtype=torch.int32, device=core.device)
        self._given: dict[int, torch.Tensor] = {}
        self._passes: dict[int, SlotPass] = {}
        self._row = torch.zeros(1, dtype=torch.int64, device=core.device)
        self._changed = core.state.done, core.state.row_state
        self._kept = [tensor.clone() for tensor in self._changed]

    def write(self, first: int, rows: Sequence[Row]) -> None:
        """Begin rows in the state, from place ``first`` on."""
        core, width = self.core, self.core.state.tokens.shape[1]
        numbers = row_numbers(first, rows, width)
        if not self._alone:
            write_rows(core, sent(numbers, core.device))
            return
        if len(rows) not in self._given:
            with torch.inference_mode(False):
                self._given[len(rows)] = torch.zeros(numbers.shape, dtype=torch.float64, device=core.device)
        given = self._given[len(rows)]
        given.copy_(sent(numbers, core.device))
        core.replay(("rows", len(rows)), partial(write_rows, core, given), shared=True)

    @torch.no_grad()
    def run(self, b: int, count: int) -> None:
        """Run the first ``count`` tokens of row b. The step's residual stream behind its last layer is theirs then."""
        for chunk in chunks_of(count, self.most, self.slotted):
            self._run_chunk(b, chunk)

    def _run_chunk(self, b: int, chunk: Chunk) -> None:
        self._name(b, chunk)
        if chunk.size == SLOTS:
            self.core.replay(("slots", b), partial(self._run_slots, b))
        elif self._alone:
            self.core.replay(("prompt", chunk.size), partial(self._run, chunk.size), shared=True)
        else:
            self._run(chunk.size)

    def _name(self, b: int, chunk: Chunk) -> None:
        """Write on the device which chunk of which row is next."""
        self._chunk.copy_(sent(torch.tensor([b, chunk.first, chunk.count], dtype=torch.int32), self.core.device))

    def _know(self, b: int, tokens: Sequence[int]) -> None:
        """Write tokens of row b, which stays as it is otherwise."""
        known = sent(torch.tensor(tokens, dtype=torch.int32), self.core.device)
        self.core.state.tokens[b, : len(tokens)].copy_(known)

    def _run(self, size: int) -> torch.Tensor:
        """The chunk that is written on the device. Returns (size, d)."""
        core = self.core
        x = run_chunk(core.weights, core.ops, core.state.tokens, self._chunk, size, core.caches, self.join)
        core.x[-1].index_copy_(0, self._chunk[:1].long(), x.index_select(0, self._chunk[2:].long() - 1))
        return x

    def _run_slots(self, b: int) -> None:
        """The same of at most eight tokens. Slots behind the last token are copies of it."""
        core, chunk = self.core, self._chunk
        if b not in self._passes:
            of_row = [
                dataclasses.replace(cache, k=cache.k[b : b + 1], v=cache.v[b : b + 1], watermark=None)
                for cache in core.caches
            ]
            with torch.inference_mode(False):
                self._passes[b] = SlotPass(core.weights, of_row, core.ops, core.work.pdl)
        slots = torch.arange(SLOTS, dtype=torch.int32, device=core.device)
        position = chunk[1] + torch.minimum(slots, chunk[2] - 1)
        found = self._passes[b].run_layers(core.state.tokens[b].index_select(0, position), position)
        core.x[-1].index_copy_(0, chunk[:1].long(), found.index_select(0, chunk[2:].long() - 1))

    def joining(self, b: int, row: Row, reused: int) -> Iterator[None]:
        """Begin a row in place b: run its prompt densely from position ``reused`` on, and choose its next token.

        Between two chunks other rows may step. Row b is done meanwhile. What its steps write lies at the position that
        the next chunk writes first.
        """
        core, chunks = self.core, chunks_of(row.prefilled, self.most, self.slotted)
        with torch.no_grad(), core.on_device():
            self._know(b, row.tokens[: row.prefilled])
        for number, chunk in enumerate(chunks):
            if chunk.first < reused:
                continue
            with torch.no_grad(), core.on_device():
                self._run_chunk(b, chunk)
                core.state.position[b : b + 1].fill_(chunk.first + chunk.count)
            if number + 1 < len(chunks):
                yield
        with torch.no_grad():
            self._begin(b, row)

    def _begin(self, b: int, row: Row) -> None:
        """Choose the token behind a prompt that was run. Other rows stay as they are."""
        core, mode, score = self.core, row.sampling.mode, row.scored_from is not None
        try:
            with core.on_device():
                for tensor, kept in zip(self._changed, self._kept, strict=True):
                    kept.copy_(tensor)
                core.state.done.fill_(1)
                self.write(b, [row])
                self._row.fill_(b)
            core.replay(("joined", mode, score), partial(self._end, mode, score), shared=True)
        except BaseException:
            self._put_back()
            raise

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
            self._know(b, row.tokens[: row.prefilled])
            parts = []
            for chunk in chunks_of(row.prefilled, self.most):
                self._name(b, chunk)
                parts.append(self._run(chunk.size)[: chunk.count])
            behind, found = torch.cat(parts), list[Score]()
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
