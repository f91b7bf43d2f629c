"""The MLP halves of a decoding step, x (B, d) -> out (B, d), fp32: out = x + fc2(relu(fc1(LayerNorm(x)))).

One is chosen for each layer when a step is built; `run` queues its kernels in order. The sparse ones differ in how
they compute, never in which neurons count: those that the predictor, and the second stage where there is one, select.
"""

import torch
from torch import Tensor

from dejavu_train.engine.weights import LayerWeights
from dejavu_train.engine.workspace import TargetSelection, Workspace
from kernels.common.limits import takes_down
from kernels.formats.format import Format
from kernels.lookahead.mlp_ahead import LateSite


def reads_own_site(mlp: TargetSelection) -> bool:
    """Whether the predictor reads what fc1 reads: then it leaves that, normalised, in the workspace."""
    predictor = mlp.predictor
    return (predictor.site, predictor.site_layer) == ("mlp_in", predictor.layer)


def dense_fc2(weights: LayerWeights, work: Workspace, hidden: Tensor, x: Tensor, out: Tensor) -> None:
    """out = x + fc2(hidden), all neurons of any number of rows: from the codes, or as a product of numbers."""
    fc2 = weights.fc2.weight
    rows = (fc2, weights.fc2.bias, x, out)
    if fc2.format is Format.INT4 and takes_down(fc2.group, fc2.shape[-1], len(x)):
        work.ops.int4_fc2(hidden.float() if len(x) == 1 else hidden, *rows, work.partials, pdl=work.pdl)
    else:
        work.ops.dense_add(hidden, *rows, transposed=weights.fc2_transposed, pdl=work.pdl)


class DenseMlp:
    """All neurons. Of one row and 4-bit weights, fc2 leaves out what a ReLU has made zero.

    one_grid: fc1 and fc2 run in one grid, over the list of all neurons.
    """

    def __init__(self, weights: LayerWeights, work: Workspace, one_grid: bool) -> None:
        self.weights, self.work, self.several, self.one_grid = weights, work, len(work.hidden) > 1, one_grid

    def run(self, x: Tensor, out: Tensor) -> None:
        weights, work = self.weights, self.work
        ops, hidden, pdl, fc1, fc2 = work.ops, work.hidden, work.pdl, weights.fc1, weights.fc2
        if self.several:
            several = ops.dense_hidden(x, weights.norm2, fc1.weight, fc1.bias, "relu", pdl=pdl)
            dense_fc2(weights, work, several, x, out)
            return
        if self.one_grid:
            ops.int4_mlp(x, weights.norm2, weights.mlp, x, work.every_neuron, out, work.partials, "list", pdl)
            return
        ops.dense_rows(x, weights.norm2, fc1.weight, fc1.bias, "relu", hidden, pdl=pdl)
        if weights.packed:
            ops.int4_fc2(hidden, fc2.weight, fc2.bias, x, out, work.partials, pdl=pdl)
            return
        ops.dense_wide(hidden, fc2.weight, fc2.bias, x, out, pdl=pdl)


class SparseMlp:
    """The neurons of one row, fc1 and fc2 in one grid.

    packed: whether attention's grid has packed the list already. ahead: of the next layer, or None.
    """

    def __init__(
        self, weights: LayerWeights, work: Workspace, mlp: TargetSelection, packed: bool, ahead: LateSite | None = None
    ) -> None:
        self.weights, self.work, self.mlp, self.packed, self.ahead = weights, work, mlp, packed, ahead
        self.own = reads_own_site(mlp)
        # Data written two launches ago is complete, so the kernel may read it before it waits for the launch before
        # its own: x where the predictor normalised it and its list was packed after that; or the list itself where
        # the predictor ran beside attention.
        self.early = "x" if self.own else "list" if packed else None

    def run(self, x: Tensor, out: Tensor) -> None:
        weights, work = self.weights, self.work
        self.mlp.join()
        if not self.packed:
            work.ops.pack(self.mlp.selection, work.packed, pdl=work.pdl)
        if self.ahead is not None:
            work.ops.mlp_ahead(
                x, weights.norm2, weights.mlp, work.packed, out, self.ahead, work.partials, self.early, work.pdl
            )
            return
        source, norm = (work.normalised, None) if self.own else (x, weights.norm2)
        sparse_mlp = work.ops.int4_mlp if weights.packed else work.ops.sparse_mlp
        sparse_mlp(source, norm, weights.mlp, x, work.packed, out, work.partials, self.early, work.pdl)


class CascadeMlp:
    """The neurons of one row that pass a second stage, with fc1 as planes."""

    def __init__(self, weights: LayerWeights, work: Workspace, mlp: TargetSelection, packed: bool) -> None:
        self.weights, self.work, self.mlp, self.packed = weights, work, mlp, packed
        self.own = reads_own_site(mlp)

    def run(self, x: Tensor, out: Tensor) -> None:
        weights, work = self.weights, self.work
        ops, pdl = work.ops, work.pdl
        self.mlp.join()
        if not self.packed:
            ops.pack(self.mlp.selection, work.packed, pdl=pdl)
        if not self.own:
            ops.layer_norm(x, weights.norm2, work.normalised, pdl=pdl)
        ops.cascade(
            work.normalised, weights.cascade, self.mlp.selection, work.packed, row_state=work.state.row_state, pdl=pdl
        )
        ops.sparse_fc2(work.packed, weights.fc2.weight, weights.fc2.bias, x, out, partials=work.partials, pdl=pdl)


def select_of_several_rows(weights: LayerWeights, work: Workspace, mlp: TargetSelection, own: bool, x: Tensor) -> None:
    """Complete the selection of several rows: normalise what fc1 reads where that is needed, run the second stage."""
    mlp.join()
    if not own:
        work.ops.layer_norm(x, weights.norm2, work.normalised, pdl=work.pdl)
    if weights.cascade is not None:
        work.ops.cascade_test(
            work.normalised, weights.cascade, mlp.selection, work.state.row_state, work.levels, pdl=work.pdl
        )


class BatchMlp:
    """The neurons that several rows select together, each row masked by its own selection."""

    def __init__(self, weights: LayerWeights, work: Workspace, mlp: TargetSelection) -> None:
        self.weights, self.work, self.mlp, self.own = weights, work, mlp, reads_own_site(mlp)

    def run(self, x: Tensor, out: Tensor) -> None:
        weights, work = self.weights, self.work
        select_of_several_rows(weights, work, self.mlp, self.own, x)
        work.ops.fc1_batch(
            work.normalised, weights.fc1.weight, weights.fc1.bias, self.mlp.selection, work.activations, pdl=work.pdl
        )
        work.ops.fc2_batch(work.activations, weights.fc2.weight, weights.fc2.bias, x, out, pdl=work.pdl)


class ListedMlp:
    """The neurons that up to eight rows select together, each row masked by its own selection; 4-bit weights."""

    def __init__(self, weights: LayerWeights, work: Workspace, mlp: TargetSelection) -> None:
        self.weights, self.work, self.mlp, self.own = weights, work, mlp, reads_own_site(mlp)
        self.listed = mlp.runner is not None and mlp.runner.listed is not None

    def run(self, x: Tensor, out: Tensor) -> None:
        weights, work, selection = self.weights, self.work, self.mlp.selection
        select_of_several_rows(weights, work, self.mlp, self.own, x)
        ids, count = work.packed.ids, work.packed.count
        if not self.listed:
            work.ops.pack(selection, work.packed, pdl=work.pdl)
        hidden = work.ops.int4_listed(
            work.normalised, weights.fc1.weight, weights.fc1.bias, ids, count, selection.row_bits, pdl=work.pdl
        )
        dense_fc2(weights, work, hidden, x, out)


class MaskedMlp:
    """All neurons of several rows, then each row masked by its own selection: for unions that leave little out."""

    def __init__(self, weights: LayerWeights, work: Workspace, mlp: TargetSelection) -> None:
        self.weights, self.work, self.mlp, self.own = weights, work, mlp, reads_own_site(mlp)
        self.shifts = torch.arange(len(work.hidden), dtype=torch.int32, device=work.hidden.device)[:, None]

    def run(self, x: Tensor, out: Tensor) -> None:
        weights, work = self.weights, self.work
        select_of_several_rows(weights, work, self.mlp, self.own or weights.cascade is None, x)
        fc1 = weights.fc1
        hidden = work.ops.dense_hidden(x, weights.norm2, fc1.weight, fc1.bias, "relu", pdl=work.pdl)
        hidden = hidden.masked_fill((self.mlp.selection.row_bits >> self.shifts) & 1 == 0, 0.0)
        dense_fc2(weights, work, hidden, x, out)


Mlp = DenseMlp | SparseMlp | CascadeMlp | BatchMlp | ListedMlp | MaskedMlp
