"""The MLP half of a decoding step, x (B, d) -> out (B, d), fp32: out = x + down(relu(up(LayerNorm(x)))), as planned.

Ways differ in how they compute, never in which neurons count: those that the predictor selects.
"""

import torch
from torch import Tensor

from dejavu_train.engine.planned import HalfPlan, Kernels, Packer, Run
from dejavu_train.engine.weights import LayerWeights
from dejavu_train.engine.workspace import TargetSelection, Workspace
from dejavu_train.kernels.lookahead.mlp_ahead import LateSite
from dejavu_train.kernels.stages.hidden import kept_unit


class Mlp:
    """Neurons are selected, then multiplied.

    Args:
        codes_down: down of few rows is multiplied from its codes. neurons: what selects, or None.
        ahead: of the next layer, whose input this half makes, or None.
    """

    def __init__(
        self,
        plan: HalfPlan,
        codes_down: bool,
        weights: LayerWeights,
        work: Workspace,
        neurons: TargetSelection | None,
        ahead: LateSite | None,
    ) -> None:
        self.plan, self.codes_down, self.weights, self.work = plan, codes_down, weights, work
        self.neurons, self.ahead = neurons, ahead
        if plan.run is Run.MASKED:  # of each row's bit
            rows, device = len(work.hidden), work.hidden.device
            self.shifts = torch.arange(rows, dtype=torch.int32, device=device)[:, None]

    def select(self, x: Tensor) -> None:
        """Wait for the selection, normalise what up reads where the predictor has not, and close gaps of the list."""
        plan, work, neurons = self.plan, self.work, self.neurons
        if neurons is None:
            return
        neurons.join()
        if plan.kernels in (Kernels.LISTED_BATCH, Kernels.LISTED_CODES) and not plan.own:
            work.ops.layer_norm(x, self.weights.norm2, work.carried.normalised, pdl=work.pdl)
        if plan.packer is Packer.KERNEL:
            work.ops.pack(neurons.selection, work.carried.packed, pdl=work.pdl)

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """out = x + the MLP of x, of the selected neurons."""
        join = self.work.join
        WAYS[self.plan.kernels](self, x, join.base(x), join.part(out))
        join.close(out)

    def _rows(self, x: Tensor, base: Tensor, out: Tensor) -> None:
        weights, work = self.weights, self.work
        work.ops.hidden_row(x, weights.norm2, weights.mlp, work.hidden, pdl=work.pdl)
        if self.codes_down or self.plan.skips:
            self.down(work.hidden, base, out)
        else:
            work.ops.dense_wide(work.hidden, weights.down.weight, weights.down.bias, base, out, pdl=work.pdl)

    def _listed_grid(self, x: Tensor, base: Tensor, out: Tensor) -> None:
        plan, weights, work = self.plan, self.weights, self.work
        rows = work.every_neuron if self.neurons is None else work.carried.packed
        if self.ahead is not None:
            work.ops.mlp_ahead(
                x, weights.norm2, weights.mlp, rows, out, self.ahead, work.partials, plan.early, pdl=work.pdl
            )
            return
        source, norm = (work.carried.normalised, None) if plan.own else (x, weights.norm2)
        work.ops.listed_mlp(source, norm, weights.mlp, base, rows, out, work.partials, plan.early, pdl=work.pdl)

    def _owned_grid(self, x: Tensor, base: Tensor, out: Tensor) -> None:
        weights, work, neurons = self.weights, self.work, self.neurons
        assert neurons is not None and neurons.runner is not None
        source, norm = (work.carried.normalised, None) if self.plan.own else (x, weights.norm2)
        work.ops.owned_mlp(
            source, norm, weights.mlp, neurons.runner.in_use, base, out, work.state.row_state, work.partials,
            pdl=work.pdl,
        )  # fmt: skip

    def _listed_batch(self, x: Tensor, base: Tensor, out: Tensor) -> None:
        work, weights, neurons = self.work, self.weights.mlp, self.neurons
        assert neurons is not None
        work.ops.up_batch(work.carried.normalised, weights, neurons.selection, work.activations, pdl=work.pdl)
        work.ops.down_batch(work.activations, weights, base, out, pdl=work.pdl)

    def _listed_codes(self, x: Tensor, base: Tensor, out: Tensor) -> None:
        work, carried, neurons = self.work, self.work.carried, self.neurons
        assert neurons is not None
        listed = carried.packed, neurons.selection.row_bits
        hidden = work.ops.hidden_tokens(carried.normalised, self.weights.mlp, listed, pdl=work.pdl)
        self.down(hidden, base, out)

    def _products(self, x: Tensor, base: Tensor, out: Tensor) -> None:
        hidden = self.up(x)
        if self.plan.run is Run.MASKED:
            assert self.neurons is not None
            hidden = hidden.masked_fill((self.neurons.selection.row_bits >> self.shifts) & 1 == 0, 0.0)
        self.down(hidden, base, out)

    def up(self, x: Tensor) -> Tensor:
        """(B, d_ffn): all neurons of any number of rows."""
        return self.work.ops.hidden_products(x, self.weights.norm2, self.weights.mlp, pdl=self.work.pdl)

    def down(self, hidden: Tensor, x: Tensor, out: Tensor) -> None:
        """out = x + down(hidden), hidden values of any number of rows: of rows of neurons, or as one product."""
        work, down, plan = self.work, self.weights.down, self.plan
        given, unit = (hidden, down.weight, down.bias, x, out), kept_unit(self.weights.mlp, hidden.dtype)
        if self.codes_down:
            every = plan.run is Run.ALL and not plan.skips
            given = (hidden.float(), *given[1:]) if len(x) == 1 else given
            work.ops.int4_fc2(*given, work.partials, pdl=work.pdl, unit=unit, every=every)
        elif plan.skips and not self.weights.packed:
            work.ops.live_down(*given, work.partials, pdl=work.pdl, unit=unit)
        else:
            turned = self.weights.down_transposed
            work.ops.dense_add(*given, transposed=turned, pdl=work.pdl, unit=unit)


WAYS = {
    Kernels.ROWS: Mlp._rows,
    Kernels.LISTED_GRID: Mlp._listed_grid,
    Kernels.OWNED_GRID: Mlp._owned_grid,
    Kernels.LISTED_BATCH: Mlp._listed_batch,
    Kernels.LISTED_CODES: Mlp._listed_codes,
    Kernels.PRODUCTS: Mlp._products,
}
