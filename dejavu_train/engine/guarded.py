"""The halves of a decoding step that a guard measures: they compute all units, and note what would have been selected.

The predictors run as in any other step, by the same kernels; what they select is read, and then replaced by everything.
Plain torch without a question to the host, so that a whole measured step is captured as a graph of its own. Beside the
dense step it reads the predictors, and of a second stage the candidates' upper planes (one row: also what passes).
"""

import torch
from torch import Tensor

from dejavu_train.bundle.guard import GuardState
from dejavu_train.engine.attention import FusedAttention, MaskedAttention, SparseAttention
from dejavu_train.engine.mlp import (
    BatchMlp,
    CascadeMlp,
    ListedMlp,
    MaskedMlp,
    SparseMlp,
    dense_fc2,
    reads_own_site,
    select_of_several_rows,
)
from dejavu_train.families import Target, UnitKey


class GuardedAttention:
    """All heads of every row; K and V that were skipped before are filled in as the policy says."""

    def __init__(self, body: SparseAttention | MaskedAttention | FusedAttention, guard: GuardState) -> None:
        self.body, self.guard = body, guard
        n_heads, head_dim = body.work.q.shape[1:]
        slices = body.weights.whole_out(torch.float32).unflatten(1, (n_heads, head_dim)).transpose(0, 1)
        self.gram = slices.transpose(1, 2) @ slices  # (h, e, e): |W_h o|^2 = o' G o

    def run(self, x: Tensor, out: Tensor) -> None:
        body, work, heads = self.body, self.body.work, self.body.heads
        batch, (n_heads, head_dim) = len(x), work.q.shape[1:]
        body.select(x)
        row_state = work.state.row_state
        keep = heads.selection.to_mask(batch)
        heads.selection.set_mask((row_state > 0)[:, None].expand(batch, n_heads))
        body.attend(x, out)
        # What attention leaves is each head's output, less the mean that stands in for it.
        outputs = work.heads_out.float().view(batch, n_heads, head_dim).transpose(0, 1)
        contribution = ((outputs @ self.gram) * outputs).sum(-1).clamp_min(0).sqrt().T
        rows = row_state == 1
        self.guard.measure(UnitKey(heads.predictor.layer, Target.HEADS), rows, keep, keep, contribution)


class GuardedMlp:
    """All neurons of every row."""

    def __init__(self, body: SparseMlp | CascadeMlp | BatchMlp | ListedMlp | MaskedMlp, guard: GuardState) -> None:
        self.body, self.guard, self.own = body, guard, reads_own_site(body.mlp)
        # Rows of fc2 are neurons here.
        self.norms = torch.linalg.vector_norm(body.weights.fc2.weight.dense(), dim=1)

    def run(self, x: Tensor, out: Tensor) -> None:
        body, mlp, weights, work = self.body, self.body.mlp, self.body.weights, self.body.work
        mlp.join()
        batch = len(x)
        candidates = selected = mlp.selection.to_mask(batch)
        if isinstance(body, CascadeMlp):
            body.run(x, out)  # the second stage leaves what passed; its output is overwritten
            selected = mlp.selection.to_mask(batch)
            mlp.selection.set_mask(torch.ones_like(selected))
            everything = torch.full_like(work.state.row_state, 2)
            work.ops.pack(mlp.selection, work.packed, pdl=work.pdl)
            work.ops.cascade(
                work.normalised, weights.cascade, mlp.selection, work.packed, row_state=everything, pdl=work.pdl
            )
            fc2 = weights.fc2
            work.ops.sparse_fc2(work.packed, fc2.weight, fc2.bias, x, out, partials=work.partials, pdl=work.pdl)
            hidden = torch.zeros_like(work.hidden)
            hidden[0, work.packed.ids.long()] = work.packed.values
        else:
            if weights.cascade is not None:
                select_of_several_rows(weights, work, mlp, self.own, x)
                selected = mlp.selection.to_mask(batch)
            fc1 = weights.fc1
            hidden = work.ops.dense_hidden(x, weights.norm2, fc1.weight, fc1.bias, "relu", pdl=work.pdl)
            dense_fc2(weights, work, hidden, x, out)
        rows = work.state.row_state == 1
        self.guard.measure(
            UnitKey(mlp.predictor.layer, Target.MLP), rows, candidates, selected, hidden.float() * self.norms
        )
