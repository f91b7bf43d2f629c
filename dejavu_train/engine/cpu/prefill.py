"""The dense prompt phase on a CPU: eight positions of a sequence at once, as eight rows of the decoding step.

    pass c:  positions 8 c .. 8 c + 7    every row of weights is read once for them, and no other copy is made

A row has the same sums in the same order whatever stands beside it. So a position's K and V are the same bits in any
chunk, and those that a dense step of one row would write.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from dejavu_train.engine.cpu import arrays
from dejavu_train.engine.cpu.entry_point import enter
from dejavu_train.engine.cpu.team import Team
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.ground.errors import UserError
from dejavu_train.models.finite import name_half, not_finite

AT_ONCE = 8  # positions in a pass
QUIET_SECONDS = 2.0  # before a prompt shows its progress
HEAD_ROWS = 4096  # of the LM head at once


def fault(site: int, row: int, position: int) -> UserError:
    """Error for an input of norm ``site``, in order of use, that is not finite. -1 = of the LM head."""
    where = name_half(site - 1) if site > 0 else "the LM head" if site < 0 else "the embedding"
    return not_finite(f"{where} gives numbers that are not finite (row {row}, position {position})")


class PromptPass:
    """Runs prompts densely, into the caches of a state.

    Args:
        selectors: of the engine. Layers with a second stage multiply with what their planes hold, and means stand in
            for nothing, because all heads run.
        state: whose tokens and caches are used.
    """

    def __init__(
        self, weights: CpuWeights, selectors: arrays.Selectors, state: arrays.State, context: int, threads: int
    ) -> None:
        self.weights, rules = weights, selectors.without_predictors()
        self.slots = arrays.new_state(weights.shape, AT_ONCE, context, 0, weights.operand, state)
        self.scratch = arrays.new_scratch(weights.shape, AT_ONCE, context, threads, rules, weights.operand)
        self.team = Team(enter, (weights.model, rules, self.slots, self.scratch), threads)

    def run(self, row: int, count: int, first: int = 0, whole: bool = False) -> Tensor:
        """Run the positions ``first`` to ``count`` - 1 of a sequence. Those before were run, and are read.

        Args:
            whole: return all positions, not the last alone.
        Returns:
            (count - first, d) fp32, the residual stream behind the last layer, or (1, d) of the last position.
        Raises:
            UserError: numbers that are not finite, by layer, row and position.
        """
        slots, d = self.slots, self.weights.shape.d_model
        kept = torch.zeros(count - first if whole else 1, d, dtype=torch.float32)
        slots.sequence[:], slots.limit[:], slots.known[:] = row, count + AT_ONCE, count + AT_ONCE
        slots.sparse_from[:], slots.fault[:], slots.fault_site[:] = count + AT_ONCE, 0, 0
        starts = range(first, count, AT_ONCE)
        with tqdm(
            total=count - first, desc="prompt", unit="token", leave=False, delay=QUIET_SECONDS, disable=None
        ) as progress:
            for start in starts:
                n = min(AT_ONCE, count - start)
                slots.position[:] = np.arange(start, start + AT_ONCE)
                slots.row_state[:] = np.where(np.arange(AT_ONCE) < n, arrays.DENSE, arrays.DONE)
                self.team.call(1, "greedy")
                behind = self.scratch.x[0, :n, :d]
                self._look_for_faults(row, start, n, behind)
                if whole:
                    kept[start - first : start - first + n] = torch.from_numpy(behind)
                progress.update(n)
        if not whole and len(starts):
            kept[0] = torch.from_numpy(behind[-1])
        return kept

    def _look_for_faults(self, row: int, start: int, n: int, behind: np.ndarray) -> None:
        """Raise for the first position of a pass whose numbers are not finite."""
        for s in np.flatnonzero(self.slots.fault[:n]):
            raise fault(int(self.slots.fault_site[s]) - 1, row, start + int(s))
        if not (finite := np.isfinite(behind).all(axis=1)).all():
            raise fault(2 * self.weights.shape.n_layers, row, start + int(finite.argmin()))


def logits_of(weights: CpuWeights, x: Tensor, row: int, first: int) -> Tensor:
    """The logits (n, V) of the residual stream x (n, d) behind the last layer, of a row's positions from ``first`` on.

    Raises:
        UserError: numbers that are not finite.
    """
    shape, model = weights.shape, weights.model
    if not model.post_norm or model.final_norm:
        x = _norm(x, model.norms[2 * shape.n_layers], model.eps, model.centred)
    logits = torch.empty(len(x), shape.vocab_size, dtype=torch.float32)
    for start in range(0, shape.vocab_size, HEAD_ROWS):  # rows of codes are copied as numbers
        n = min(HEAD_ROWS, shape.vocab_size - start)
        logits[:, start : start + n] = F.linear(x, weights.rows(model.lm_head + start, n))
    if model.logit_cap:
        logits.div_(model.logit_cap).tanh_().mul_(model.logit_cap)
    if not bool((finite := logits.isfinite().all(dim=1)).all()):
        raise fault(-1, row, first + int(finite.int().argmin()))
    return logits


def _norm(x: Tensor, values: np.ndarray, eps: float, centred: int) -> Tensor:
    """x (..., n) normed by values (2, n), as `vector_ops.layer_norm` does."""
    weight, bias = torch.from_numpy(values)
    if centred:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.rms_norm(x, weight.shape, weight, eps) + bias
