"""Things that the halves of a decoding step share: operations, token state, scratch, and predictors of a site."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu_train.engine.carried import CarriedBuffers
from dejavu_train.engine.ops import StepOps
from dejavu_train.engine.planned import HalfPlan, Kernels, Place, StepPlan
from dejavu_train.engine.predictors import TargetPredictor
from dejavu_train.engine.ranks.joins import Join
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.limits import MOST_TOKENS, Products
from dejavu_train.kernels.common.partial_sums import partial_sums
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.mlp.pack import PackedSelection
from dejavu_train.kernels.sample.sampling import TokenState
from dejavu_train.kernels.stages.attend import AttentionScratch
from dejavu_train.kernels.stages.mlp_batch import BatchActivations
from dejavu_train.kernels.stages.predictor import HeadPredictor, Predictor


@dataclass(frozen=True)
class Workspace:
    """Buffers that one half of a layer after the other uses, on one device.

    q (B, h, head_dim), hidden (B, d_ffn) fp32. heads_out (B, d) fp32, before a 4-bit projection fp16. attention: for
    partial results. partials: down's of up to eight rows. every_neuron: the list of all, for one row. activations: for
    several. carried: what one half leaves for another. ahead: the stream of look-ahead predictors, or None. join: what
    becomes of a half's output.
    """

    ops: StepOps
    pdl: bool
    state: TokenState
    carried: CarriedBuffers
    ahead: torch.cuda.Stream | None
    q: Tensor
    heads_out: Tensor
    attention: AttentionScratch
    hidden: Tensor
    every_neuron: PackedSelection
    partials: Tensor
    activations: BatchActivations
    join: Join

    @classmethod
    def empty(
        cls,
        plan: StepPlan,
        ops: StepOps,
        pdl: bool,
        dtype: torch.dtype,
        device: torch.device,
        state: TokenState | None = None,
        join: Join | None = None,
    ) -> "Workspace":
        """Make it for a plan. 4-bit weights in a fp16 engine meet fp16 outputs of the heads. state: another's, shared.
        join: None = of one GPU."""
        dims, batch = plan.dims, plan.batch
        h, hd, d = dims.n_heads, dims.head_dim, dims.d_model
        mixed = torch.float16 if plan.formats.packed and dtype == torch.float16 else torch.float32
        one, several = (dims.d_ffn, 0) if batch == 1 else (0, dims.d_ffn)
        return cls(
            ops=ops,
            pdl=pdl,
            # A column more than the context: scoring the last token of a full context chooses one beyond it.
            state=TokenState.empty(batch, plan.context + 1, device, vocab=dims.vocab_size) if state is None else state,
            carried=CarriedBuffers(plan, dtype, device),
            ahead=torch.cuda.Stream(device) if plan.streams else None,
            q=torch.zeros(batch, h, hd, device=device, dtype=torch.float32),
            heads_out=torch.zeros(batch, h * hd, dtype=mixed, device=device),
            attention=AttentionScratch.empty(batch, h, hd, plan.context, device),
            hidden=torch.zeros(batch, dims.d_ffn, device=device, dtype=torch.float32),
            every_neuron=PackedSelection.of_all(one, device),
            partials=partial_sums(d if batch <= MOST_TOKENS else 0, device),
            activations=BatchActivations.empty(several, batch, d, dtype, device),
            join=join or Join(),
        )

    def reset(self) -> None:
        """Forget all rows. Tickets are zero between calls, unless a step was cut short."""
        batch, capacity = self.state.tokens.shape
        fresh = TokenState.empty(batch, capacity, self.state.tokens.device)
        for name, tensor in vars(fresh).items():
            if name != "seen":
                getattr(self.state, name).copy_(tensor)
        self.state.seen.zero_()
        self.carried.reset()
        self.attention.tickets.zero_()
        self.activations.tickets.zero_()


class SitePredictor:
    """Runs one predictor where its site is made. The half of its target reads `selection` after `join`, or selects.

    Args:
        predictor: of one (layer, target).
        plan: of the half that it selects for.
        selection: receives what is selected.
        norm: the LayerNorm of the site.
        normalised_out: (B, d), receives what the predictor read, where up reads the same, or None.
        listed: receives the list without gaps, where the kernels can leave it, or None.
    """

    def __init__(
        self,
        predictor: TargetPredictor,
        plan: HalfPlan,
        selection: Selection,
        work: Workspace,
        norm: LayerNormWeights,
        normalised_out: Tensor | None,
        listed: PackedSelection | None = None,
    ) -> None:
        self.site = predictor.site
        self.work, self.norm = work, norm
        self.stream = work.ahead if plan.place is Place.STREAM else None
        self.normalised_out = normalised_out
        self.selects = plan.kernels is not Kernels.OWNED_GRID
        assert plan.products is not None
        self.in_use = Predictor.of(
            predictor.weights, predictor.threshold, selection, plan.products, len(work.hidden), predictor.top_k,
            None if listed is None else (listed.ids, listed.count),
        )  # fmt: skip
        self._ready: torch.cuda.Event | None = None

    def run(self, x: Tensor) -> None:
        """x (B, d) fp32: the residual stream in front of the site."""
        self._ready = None
        if self.stream is None:
            self._predict(x, self.work.pdl)
            return
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.stream):
            self._predict(x, False)
            self._ready = self.stream.record_event()

    def _predict(self, x: Tensor, pdl: bool) -> None:
        ops, products, normalised = self.work.ops, self.in_use.products, self.normalised_out
        if products.of_one_row:
            ops.predict(x, self.norm, self.in_use, normalised, pdl=pdl)
        else:
            if normalised is None:
                normalised = torch.empty_like(x, dtype=torch.float16 if products is Products.WORDS else x.dtype)
            ops.layer_norm(x, self.norm, normalised, pdl=pdl)
            ops.predict_rows(normalised, self.in_use, pdl=pdl)
        if self.selects:
            self.select(pdl)

    def select(self, pdl: bool) -> None:
        """The second half, which some MLPs run themselves."""
        self.work.ops.select(self.in_use, self.work.state.row_state, pdl=pdl)

    def join(self) -> None:
        """Let the current stream wait for the selection."""
        if self._ready is not None:
            torch.cuda.current_stream(self.in_use.hidden.device).wait_event(self._ready)
            self._ready = None


@dataclass(frozen=True)
class TargetSelection:
    """A target's predictor, the selection it fills, how its matrices are multiplied where there are two, and what runs
    it at its site. None = the half runs it itself."""

    predictor: TargetPredictor
    selection: Selection
    products: Products | None = None
    runner: SitePredictor | None = None

    def folded(self) -> HeadPredictor:
        """Head predictor as one matrix."""
        predictor = self.predictor
        return HeadPredictor(predictor.folded, predictor.bias, predictor.threshold, self.selection)

    def in_use(self, norm: LayerNormWeights | None) -> Predictor:
        """Predictor for a kernel of one row, with scratch of its own. norm: of its input, unless that comes late."""
        assert self.products is not None
        weights = self.predictor.weights if norm is None else self.predictor.weights.with_norm(norm)
        return Predictor.of(weights, self.predictor.threshold, self.selection, self.products)

    def join(self) -> None:
        """Let the current stream wait for the selection, where another one makes it."""
        if self.runner is not None:
            self.runner.join()
