"""The halves of a decoding step that a guard measures: they compute all units, and note what would have been selected.

The predictors run as in any other step, by the same kernels. What they select is read, and then replaced by everything.
Plain torch without a question to the host, so that a whole measured step is captured as a graph of its own. Beside the
dense step it reads the predictors.
"""

import torch
from torch import Tensor

from dejavu_train.bundle.guard import GuardState
from dejavu_train.engine.attention import Attention
from dejavu_train.engine.mlp import Mlp
from dejavu_train.families import Target, UnitKey


class GuardedAttention:
    """All heads of every row. K and V that were skipped before are filled in."""

    def __init__(self, attention: Attention, guard: GuardState, layer: int) -> None:
        self.attention, self.guard, self.key = attention, guard, UnitKey(layer, Target.HEADS)
        self.units = attention.cache.k.shape[1]  # heads, or groups of them that share K and V
        slices = attention.weights.whole_out(torch.float32).unflatten(1, (self.units, -1)).transpose(0, 1)
        self.gram = slices.transpose(1, 2) @ slices  # (g, e, e): |W_g o|^2 = o' G o

    def select(self, x: Tensor) -> None:
        self.attention.select(x)
        selection, row_state = self.attention.selection, self.attention.work.state.row_state
        assert selection is not None
        self.keep = selection.to_mask(len(x))
        selection.set_mask((row_state > 0)[:, None].expand_as(self.keep))

    def project_in(self, x: Tensor) -> None:
        self.attention.project_in(x)

    def attend(self) -> None:
        self.attention.attend()

    def project_out(self, x: Tensor, out: Tensor) -> None:
        self.attention.project_out(x, out)
        work = self.attention.work
        # What attention leaves is each head's output, less the mean that stands in for it.
        outputs = work.heads_out.float().view(len(x), self.units, -1).transpose(0, 1)
        contribution = ((outputs @ self.gram) * outputs).sum(-1).clamp_min(0).sqrt().T
        self.guard.measure(self.key, work.state.row_state == 1, self.keep, self.keep, contribution)


class GuardedMlp:
    """All neurons of every row."""

    def __init__(self, mlp: Mlp, guard: GuardState, layer: int) -> None:
        self.mlp, self.guard, self.key = mlp, guard, UnitKey(layer, Target.MLP)
        # Rows of down are neurons here.
        self.norms = torch.linalg.vector_norm(mlp.weights.down.weight.dense(), dim=1)

    def select(self, x: Tensor) -> None:
        neurons = self.mlp.neurons
        assert neurons is not None
        neurons.join()
        if neurons.runner is not None and not neurons.runner.selects:
            neurons.runner.select(self.mlp.work.pdl)
        self.selected = neurons.selection.to_mask(len(x))

    def multiply(self, x: Tensor, out: Tensor) -> None:
        hidden = self.mlp.up(x)
        self.mlp.down(hidden, x, out)
        rows = self.mlp.work.state.row_state == 1
        self.guard.measure(self.key, rows, self.selected, self.selected, hidden.float() * self.norms)
