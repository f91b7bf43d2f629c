"""A draft and its verification on a CPU: a dense step of eight rows, which are positions of one sequence."""

from collections.abc import Sequence

import numpy as np

from dejavu_train.engine.cpu import arrays
from dejavu_train.engine.cpu.entry_point import enter_cycle
from dejavu_train.engine.cpu.prefill import PromptPass, fault
from dejavu_train.engine.cpu.selectors import make_selectors
from dejavu_train.engine.cpu.team import Team
from dejavu_train.engine.cpu.verify import ACCEPTED, DRAFTED, FIRST
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.engine.cpu_limits import row_seed
from dejavu_train.engine.draft import MOST_DRAFTED
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.lossless import Pace, Pair, Verified

SLOTS = MOST_DRAFTED + 1


class CpuPair(Pair):
    """The draft has the predictors of an engine of one row, verification all units. They share the engine's caches.

    Args:
        dense: weights. draft: the same, or others of the same model.
        selectors: of the draft. state, scratch: of the engine. context: tokens.
        threads: their number is part of what a text follows from, because sums are shared among them.
    Attributes:
        draft_state: where the draft stands. Has tokens and caches of ``state``.
        slots: the rows of verification.
    """

    def __init__(
        self,
        dense: CpuWeights,
        draft: CpuWeights,
        selectors: arrays.Selectors,
        state: arrays.State,
        scratch: arrays.Scratch,
        threads: int,
    ) -> None:
        self.dense, self.draft, self.rules = dense, draft, make_selectors(dense, [])
        shape, context = dense.shape, state.tokens.shape[1]
        self.draft_state, self.scratch = state, scratch
        if draft.model.rows.itemsize == 1:  # a neuron's row of codes takes no longer than its test
            selectors = selectors.without_second_stage()
        if draft is not dense:
            kept = int((selectors.kept >= 0).sum())
            self.draft_state = arrays.new_state(shape, 1, context, kept, draft.operand, state)
            self.scratch = arrays.new_scratch(shape, 1, context, threads, selectors, draft.operand)
        self.slots = arrays.new_state(shape, SLOTS, context, 0, dense.operand, state)
        self.slot_scratch = arrays.new_scratch(shape, SLOTS, context, threads, self.rules, dense.operand)
        self.prompts = PromptPass(dense, self.rules, state, context, threads)
        self.pace = Pace(MOST_DRAFTED if draft is not dense or (selectors.at >= 0).any() else 0)
        groups = (draft.model, selectors, self.draft_state, self.scratch, dense.model, self.rules)
        self.copied = Pace(MOST_DRAFTED)
        choices = np.zeros(SLOTS, np.int64)
        self.team = Team(enter_cycle, (*groups, self.slots, self.slot_scratch, choices), threads)

    def begin(self, row: Row, stops: Sequence[int]) -> Verified:
        """See `Pair.begin`."""
        draft, n, sampler = self.draft_state, len(row.tokens), row.sampling
        for state in (draft, self.slots):
            state.clear()
            state.temperature[:], state.top_p[:], state.min_p[:] = sampler.temperature, sampler.top_p, sampler.min_p
            state.top_k[:], state.seed[:] = sampler.top_k, row_seed(sampler.seed, 0)
            state.limit[:], state.least[:], state.sparse_from[:] = row.total, row.least, n
        draft.tokens[0, :n], draft.stops[: len(stops)] = row.tokens, list(stops)
        draft.position[0] = n - 1
        self.slot_scratch.residual[0] = self.prompts.run(0, n)[-1].numpy()
        draft.seen[0] = 0
        draft.watermark[:] = 0
        return self._call(0, sampler.mode, behind_prompt=True)

    def cycle(self, drafted: int, mode: str) -> Verified:
        """See `Pair.cycle`."""
        return self._call(drafted, mode)

    def verify(self, given: Sequence[int], mode: str) -> Verified:
        """See `Pair.verify`."""
        state = self.draft_state
        first = int(state.position[0])
        state.tokens[0, first + 1 : first + 1 + len(given)] = given
        state.position[0] += len(given)
        return self._call(0, mode, given=len(given))

    def _call(self, drafted: int, mode: str, behind_prompt: bool = False, given: int = 0) -> Verified:
        state, command = self.draft_state, self.team.command
        command[FIRST] = state.position[0] - given
        self.team.call(drafted, mode, tail_only=behind_prompt)
        if state.fault[0]:
            raise fault(int(state.fault_site[0]) - 1, 0, int(state.fault[0]) - 1)
        done, held = bool(state.row_state[0] == arrays.DONE), int(state.position[0]) + 1
        new = state.tokens[0, command[FIRST] + 1 : held].tolist()
        return Verified(int(command[DRAFTED]), int(command[ACCEPTED]), held, done, new)
