"""Lossless decoding on a GPU: sparse steps draft, one dense pass over eight slots verifies, all on the device.

Verification runs eight slots always (`slot_pass`). Slot s has the token at p + s. Slots behind the draft are copies of
slot 0. So shapes never change, and what a slot gives does not depend on how many are live.

A cycle is one CUDA graph for each length of a draft: the steps, verification, and what is kept of them. The host looks
once at it, while the next one runs: its report is copied to pinned memory behind it. K and V of the whole draft are
written by verification. Position, watermarks and the end of the row follow from what was accepted.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dejavu_train.engine.draft import MOST_DRAFTED
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.lossless import Pace, Pair, Verified
from dejavu_train.engine.ranks.joins import RankJoin
from dejavu_train.engine.ranks.ranks import Ranks, waiting
from dejavu_train.engine.slot_pass import SlotPass
from dejavu_train.engine.step import DecodeStep
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.ground.errors import UserError
from dejavu_train.kernels.sample.sampling import TokenState
from dejavu_train.kernels.verify.attend_slots import SLOTS
from dejavu_train.models.finite import not_finite

assert SLOTS == MOST_DRAFTED + 1
SHARED = ("known", "least", "limit", "stops", "temperature", "top_p", "top_k", "min_p", "seed")


class _Look:
    """A copy of a tensor in the host's memory, which later work of the device does not wait for, nor change."""

    def __init__(self, report: Tensor) -> None:
        on_gpu = report.is_cuda
        self.copy = torch.empty(report.shape, dtype=report.dtype, pin_memory=on_gpu)
        self.event = torch.cuda.Event() if on_gpu else None

    def take(self, report: Tensor) -> None:
        """Queue the copy."""
        self.copy.copy_(report, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def read(self) -> list[int]:
        """The copy, as soon as it is there."""
        if self.event is not None:
            self.event.synchronize()
        found: list[int] = self.copy.tolist()
        return found


class EnginePair(Pair):
    """The draft is a step of an engine of one row, verification a dense pass over the same caches.

    Args:
        step: of the draft. dense: weights of the model, the step's own or others beside them.
        begin: starts a row of the engine whose caches the step shares, as `Session.begin`.
        ranks: of one of several GPUs. All of them run the same cycles. None = one GPU.
        skips: verification leaves rows of silent neurons out, see `SlotPass`.
    Raises:
        UserError: a guard, or products whose rows depend on each other here.
    """

    ahead = True

    def __init__(
        self,
        step: DecodeStep,
        dense: DecodeWeights,
        begin: Callable[..., None],
        ranks: Ranks | None = None,
        skips: bool = False,
    ) -> None:
        if step.guard is not None:
            raise UserError("lossless decoding has no guard, since acceptance measures the selection; pass guard=None")
        self.step, self._begin, self._ranks = step, begin, ranks
        self.weights, device = dense, step.device
        join = None if ranks is None else RankJoin(ranks.shard, ranks.sums.by_rank(), SLOTS, device)
        self.dense = SlotPass(self.weights, step.caches, step.ops, step.work.pdl, step.screen, join, skips)
        self.dense.check_slots_alone()
        vocab = self.weights.shape.vocab_size
        self.slots = TokenState.empty(SLOTS, step.state.tokens.shape[1], device, vocab=vocab)
        self.numbers = torch.arange(SLOTS, device=device)
        self.first = torch.zeros(1, dtype=torch.int32, device=device)
        self.report = torch.zeros(6 + SLOTS, dtype=torch.int32, device=device)
        self._looks = [_Look(self.report) for _ in range(2)]  # of the cycle that the host waits for, and of the next
        self.copied = Pace(MOST_DRAFTED)
        self.pace = Pace(MOST_DRAFTED if step.plan.selecting or dense is not step.weights else 0)

    def begin(self, row: Row, stops: Sequence[int]) -> Verified:
        """See `Pair.begin`. The token behind the prompt is chosen as the engine chooses it, drafts or none."""
        n, state = len(row.tokens), self.step.state
        self.step.reset()
        self.dense.reset()
        self._begin([row], stops)
        for name in SHARED:
            getattr(self.slots, name).copy_(getattr(state, name))
        self.slots.known.zero_()
        self.slots.limit.fill_(self.slots.tokens.shape[1] + 1)  # a row's end is decided where tokens are kept
        with self._waiting():
            held = torch.stack((state.done, state.position, state.fault, state.tokens[:, n]))[:, 0].tolist()
        return self._verified([0, 0, held[1], held[0], held[2], 1, held[3]])

    def cycle(self, drafted: int, mode: str) -> Verified:
        """See `Pair.cycle`."""
        return self.queue(drafted, mode)()

    def queue(self, drafted: int, mode: str) -> Callable[[], Verified]:
        """See `Pair.queue`."""
        with self._waiting():
            self.step.replay(("cycle", drafted, mode), partial(self._run, drafted, mode))
        return self._look()

    def agreed(self, seconds: float) -> float:
        """See `Pair.agreed`. The first rank's clock counts."""
        return seconds if self._ranks is None else self._ranks.hosts.gather(round(1e9 * seconds))[0] / 1e9

    def _look(self) -> Callable[[], Verified]:
        """Function that waits for the last replay alone."""
        look = self._looks.pop(0)
        self._looks.append(look)
        look.take(self.report)

        def wait() -> Verified:
            with self._waiting():
                found = look.read()
            return self._verified(found)

        return wait

    def _waiting(self) -> contextlib.AbstractContextManager[Any]:
        return waiting(self._ranks)

    def verify(self, given: Sequence[int], mode: str) -> Verified:
        """See `Pair.verify`. The host writes these tokens."""
        state, n = self.step.state, len(given)
        self.first.copy_(state.position)
        if n:
            at = self.first + 1 + self.numbers[:n]
            state.tokens[0].index_copy_(0, at, torch.tensor(given, dtype=torch.int32, device=at.device))
            state.position.add_(n)
        with self._waiting():
            self.step.replay(("given", mode), partial(self._judge, mode))
        return self._look()()

    def _verified(self, report: list[int]) -> Verified:
        drafted, accepted, position, done, fault, written, *choices = report
        if fault:
            what = f"the logits for the token at position {fault} hold NaN"
            error = not_finite(what, self.weights.embedding.dtype)
            error.tokens = self.step.state.tokens[0, :fault].tolist()
            raise error
        return Verified(drafted, accepted, position + 1, bool(done), choices[:written])

    @torch.no_grad()
    def _run(self, drafted: int, mode: str) -> None:
        self.first.copy_(self.step.state.position)
        for _ in range(drafted):
            self.step.eager(mode, False)
        self._judge(mode)

    @torch.no_grad()
    def _judge(self, mode: str) -> None:
        """Verify the tokens between `first` and the position."""
        self._keep(self._choices(mode))

    def _choices(self, mode: str) -> Tensor:
        """(8,) int32: the dense model's choice behind each slot."""
        state, slots = self.step.state, self.slots
        live = self.numbers <= state.position - self.first
        position = torch.where(live, self.first + self.numbers, self.first)
        slots.position.copy_(position)
        slots.done.zero_()
        slots.fault.zero_()
        stops = slots.stops if mode == "greedy" else None
        self.dense.run(state.tokens[0][position], slots.position, stops)
        self.step.ops.advance(self.dense.logits, slots, mode)
        return slots.tokens.gather(1, position[:, None] + 1)[:, 0]

    def _keep(self, choices: Tensor) -> None:
        """Write the choices up to the first that was not drafted, or that ends the row."""
        state, first, s = self.step.state, self.first, self.numbers
        drafted = state.position - first
        at = torch.where(s <= drafted, first + s, first) + 1
        same = (s < drafted) & (state.tokens[0][at] == choices)
        faulty = self.slots.fault > 0
        over = (choices[:, None] == state.stops).any(1) | faulty | (at + 1 >= state.limit)
        last = (same & ~over).int().cumprod(0).sum(0, keepdim=True)  # the slot whose choice is the last to be written
        written = s <= last
        state.tokens[0, torch.where(written, at, at[0]).long()] = torch.where(written, choices, choices[0])
        position, done = (first + last + 1).int(), over[last].int()
        state.position.copy_(position)
        state.done.copy_(done)
        state.row_state.copy_(1 - done)
        state.fault.copy_(self.slots.fault[last])
        self.step.watermark.copy_(position.expand_as(self.step.watermark))
        accepted = (same & written).sum(0, keepdim=True).int()
        self.report.copy_(torch.cat((drafted, accepted, position, done, state.fault, last + 1, choices)))
