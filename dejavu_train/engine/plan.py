"""Who runs a decoding step: every choice between kernels, made once when an engine is built, each with its reason.

A plan is made from sizes and from what is known of the predictors. It reads no weights and needs no GPU. One row reads
what it selects. Several rows read what they select together, where that leaves enough out: `DENSE_FROM_BATCHES`. A
layer that computes all of its units masks each row by its own selection, so which units count never depends on a plan.

A second stage saves bytes, and no time on a GPU (`benchmarks/results/cascade.csv`). There its candidates are what is
selected, and are read whole. That is no less than the second stage would let through. The engine for CPUs runs it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dejavu_train.engine.cpu_plan import plan_compiled
from dejavu_train.engine.facts import PredictorFacts, why_all
from dejavu_train.engine.memory import SLACK, cache_bytes, late_bytes, scratch_bytes
from dejavu_train.engine.one_kernel_plan import one_kernel_sizes
from dejavu_train.engine.options import EngineOptions, check_zeros
from dejavu_train.engine.planned import (
    Early,
    Engine,
    Formats,
    HalfPlan,
    Kernels,
    Packer,
    Place,
    Run,
    StepPlan,
    hidden_values,
)
from dejavu_train.engine.ranks.refusals import check_ranks
from dejavu_train.engine.runs import RUNS
from dejavu_train.families import ModelDims, Target, UnitKey
from dejavu_train.families.dims import SILENT, engine_refusal
from dejavu_train.ground.errors import Unsupported, UserError
from dejavu_train.kernels.common.limits import (
    DRIVERS_CARVEOUT,
    HEAD_DIMS,
    INT4_CARVEOUT,
    MOST_TOKENS,
    OWNERS,
    OWNERS_WARPS,
    ROW_LANES,
    SCREENED_WIDTHS,
    SPARSE_CARVEOUT,
    Products,
    owned_block,
    screen_bytes,
    selection_block,
    takes_down,
    takes_nibbles,
    takes_row_words,
    tokens_at_once,
)
from dejavu_train.models.load import DTYPES

MEASURED_FROM = 4096  # d from which lists of several rows were timed
# Density of what 2 to 32 rows select together from which the engine's dense MLP is faster than the sparse one with its
# predictor (rank d / 16): benchmarks/results/sparse_mlp.csv. Measured at 4096 and 9216 up to unions of 75 %, where 8
# rows of the sparse MLP alone still take 0.86 and 0.70 of the dense one's time (50 % in a whole step). What a step
# adds, and more rows, leave less. Below 4096: not measured.
DENSE_FROM_BATCHES = ((0, 0.0), (MEASURED_FROM, 0.6), (9216, 0.65))
# d from which a dense step of one row and 4-bit weights without a gate runs up and down apart. Not measured below.
# Behind a gate one grid reads only live rows of up: ProSparse-7B's shapes take 0.86 of the time.
CODES_FROM = 4096
# Share of the neurons that trained ReLU models keep live, by rows together: 6 % of one row, and unions that grow as
# Polar Sparsity's of OPT-6.7B do. Which share a model has is not known when a plan is made.
LIVE = {1: 0.06, 2: 0.092, 4: 0.124, 8: 0.174}
# Live share from which reading all rows of down is no slower, by rows and width: benchmarks/results/zeros.csv. One row
# never gets there below 0.85, two rows never. Widths below the first take its value.
READ_FROM = {1: ((0, 1.0),), 2: ((0, 1.0),), 4: ((0, 0.5), (4096, 0.8)), 8: ((0, 0.22), (4096, 0.43), (7168, 0.3))}
APART_FROM = 7168  # d from which one row without a gate runs up, then live rows of down. Below, one grid is faster.
DTYPE_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
SPARE = 2**31  # bytes that stay free beside a screen of the LM head, for weights that are still to be arranged


def plan_step(
    dims: ModelDims,
    predictors: Mapping[UnitKey, PredictorFacts | None],
    formats: Formats,
    options: EngineOptions,
    engine: Engine,
    ranks: int = 1,
) -> StepPlan:
    """How an engine runs a decoding step.

    Args:
        dims: of what this GPU holds. ranks: GPUs that run the step together.
        predictors: of the (layer, target) that select. Others compute all units. None = the bundle leaves it dense.
    Raises:
        Unsupported: what the engine has no kernels for. UserError: a context that does not fit the model.
    """
    _check_dims(dims, engine)
    check_zeros(options.zeros, dims.activation)
    limit = dims.max_positions
    if options.context is not None and not 2 <= options.context <= limit:
        raise UserError(
            f"a context of {options.context} tokens does not fit: this model has positions for 2 to {limit};"
            " choose less, or leave context out"
        )
    batch, context = options.batch, options.context or limit
    if engine is Engine.CPU:
        return plan_compiled(dims, predictors, formats, options, context)
    _check_formats(formats, engine)
    if ranks > 1:
        check_ranks(predictors, options)
    chooser = _Chooser(dims, predictors, formats, options, engine, ranks)
    halves = tuple(half for layer in range(dims.n_layers) for half in (chooser.attention(layer), chooser.mlp(layer)))
    plan = StepPlan(engine, dims, batch, context, formats, halves, chooser.codes_down, ranks=ranks)
    kept = sum(half.run is Run.SELECTED for half in halves[::2]) + plan.shares_inputs
    mlps = [predictors.get(UnitKey(i // 2, Target.MLP)) for i, half in enumerate(halves) if half.late]
    widths = [facts.rank for facts in mlps if facts is not None]
    scratch = scratch_bytes(dims, batch, formats.packed, formats.head == "int4") + late_bytes(dims, context, widths)
    coming = cache_bytes(dims, batch, context, DTYPE_BYTES[formats.dtype], kept) | {"scratch": scratch}
    if engine is Engine.GPU and formats.packed and batch == 1:
        skips = all(half.skips for half in halves[1::2])
        sizes, why = one_kernel_sizes(dims, predictors, formats, options, ranks, skips)
        plan = replace(plan, one_kernel=sizes, one_kernel_why=why)
    return replace(plan, coming=coming, carveout=carveout(halves, formats.packed))


def with_screen(plan: StepPlan, asked: bool | None, free: int | None) -> StepPlan:
    """The plan with a screen of the LM head where that is asked for and fits.

    Args:
        free: bytes that the device has left beside weights and predictors. None = nobody looks.
    """
    dims, size = plan.dims, screen_bytes(plan.dims.vocab_size, plan.dims.d_model)
    why = ""
    if asked is False:
        why = "no screen was asked for"
    elif plan.ranks > 1:
        why = "each GPU reads its rows of the LM head"
    elif plan.batch > 1 or plan.formats.head not in DTYPE_BYTES or dims.d_model % SCREENED_WIDTHS:
        why = f"a screen is for one row, numbers and a multiple of {SCREENED_WIDTHS} columns"
    elif asked is None and plan.engine is not Engine.GPU:
        why = "a screen is for GPUs"
    elif asked is None and free is not None and sum(plan.coming.values()) + size + SPARE + SLACK > free:
        why = "the GPU has no room for a screen"
    if why:
        return replace(plan, head_why=f"all logits, because {why}")
    coming = {**plan.coming, "screen of the LM head": size}
    return replace(plan, coming=coming, screened=True, head_why="greedy tokens through a screen")


def _check_dims(dims: ModelDims, engine: Engine) -> None:
    """Raise Unsupported for a layer that no kernel computes."""
    if (why := engine_refusal(dims, RUNS)) is not None:
        raise Unsupported(f"{'the CPU engine' if engine is Engine.CPU else 'the decode engine'} has {why}")
    if engine in (Engine.GPU, Engine.INTERPRETER) and dims.head_dim not in HEAD_DIMS:
        raise Unsupported(f"head dim {dims.head_dim} has no kernels (there are {', '.join(map(str, HEAD_DIMS))})")


def _check_formats(formats: Formats, engine: Engine) -> None:
    """Raise Unsupported for weights that no kernel reads."""
    if formats.head == "int8":
        raise Unsupported("the decode engine has no kernel for an LM head in int8; quantise with --lm_head int4")
    if formats.dtype not in DTYPE_BYTES:
        raise Unsupported(
            f"the decode engine computes in {', '.join(DTYPE_BYTES)}, and this model is in {formats.dtype}"
        )
    if not formats.packed:
        return
    if engine is not Engine.REFERENCE and formats.dtype != "float16":
        raise Unsupported(
            f"4-bit weights meet float16 inputs in the decode engine, not {formats.dtype}; load them with float16"
        )


class _Chooser:
    """Chooses how each half runs. Methods named `_not_...` give the reason why not, or "" where it is so."""

    def __init__(
        self,
        dims: ModelDims,
        predictors: Mapping[UnitKey, PredictorFacts | None],
        formats: Formats,
        options: EngineOptions,
        engine: Engine,
        ranks: int,
    ) -> None:
        self.ranks = ranks
        self.dims, self.predictors, self.formats, self.options, self.engine = dims, predictors, formats, options, engine
        self.batch, self.packed = options.batch, formats.packed
        self.codes_down = self.packed and takes_down(formats.group, dims.d_model, self.batch)
        self.fused = {layer: self._not_fused(layer) for layer in range(dims.n_layers)}
        self.late: dict[int, str] = {}
        for layer in range(dims.n_layers):  # in order: a late layer's MLP is one of those that can make the next input
            self.late[layer] = self._not_late(layer)
            if not self.late[layer]:
                self.fused[layer] = ""

    def facts(self, layer: int, target: Target) -> PredictorFacts | None:
        return self.predictors.get(UnitKey(layer, target))

    def _not_beside_attention(self, layer: int) -> str:
        """Reason against the MLP's predictor."""
        mlp = self.facts(layer, Target.MLP)
        if mlp is None:
            return "its MLP selects nothing"
        if self.options.look_ahead != "fused":
            return f"look_ahead is {self.options.look_ahead}"
        if self.batch > 1:
            return "grids of attention carry a predictor of one row"
        if mlp.top_k is not None:
            return "grids of attention carry a predictor with a threshold, not an exact top k"
        if mlp.site.half != 2 * layer:
            return "grids of attention carry a predictor of their own attn_in"
        return ""

    def _not_fused(self, layer: int) -> str:
        heads = self.facts(layer, Target.HEADS)
        apart = self._not_beside_attention(layer)
        if apart:
            return apart
        if heads is None and not self.packed:
            # 6.7B on one H200: 1.83 ms a step, fused 1.87.
            return "q/k/v of all heads is faster as a dense product, beside a predictor on a stream of its own"
        if heads is not None and not self._own_matrix(layer, heads):
            return "the heads' predictor is not one matrix of attn_in"
        return ""

    def _not_late(self, layer: int) -> str:
        heads, mlp = self.facts(layer, Target.HEADS), self.facts(layer, Target.MLP)
        if not self.packed:
            return "a norm comes late for 4-bit weights"
        if self.ranks > 1:
            return "the MLP before is a sum over GPUs"
        if self.dims.post_norm:
            return "its input is a norm's output, which the MLP before does not make"
        if self.options.guarded:
            return "a guard's dense steps make no input for the next layer"
        apart = self._not_beside_attention(layer)
        if apart or layer == 0:
            return apart or "no MLP is before it"
        if heads is not None and not (heads.folds and heads.site.half == 2 * layer - 1):
            return "its heads are not selected by one matrix of the input of the MLP before"
        if self.fused[layer - 1]:
            return "the MLP before has no predictor in attention's grids"
        if mlp is None or mlp.format != "int4":
            return "its MLP's predictor is not read in int4"
        return ""

    def _own_matrix(self, layer: int, heads: PredictorFacts) -> bool:
        return heads.folds and heads.site.half == 2 * layer

    def _site(self, layer: int, target: Target, facts: PredictorFacts) -> tuple[int, Place]:
        """(halves between the predictor's site and its target, where it runs as kernels of its own)."""
        ahead = UnitKey(layer, target).site.half - facts.site.half
        # Several rows with 4-bit weights fill every multiprocessor: a predictor beside them waits, and they for it.
        how = self.options.look_ahead
        beside = how == "stream" or (how == "fused" and not (self.packed and self.batch > 1))
        return ahead, Place.STREAM if ahead and beside and self.engine is Engine.GPU else Place.SITE

    def _products(self, facts: PredictorFacts, place: Place) -> tuple[Products, str]:
        """How the two matrices of a predictor are multiplied, and why."""
        codes, block = facts.format == "int4", selection_block(self.dims.d_model, self.batch)
        if self.batch > 1:
            if codes:
                return Products.WORDS, f"int4 of up to {MOST_TOKENS} rows fills tensor cores as words of eight codes"
            return Products.TILES, "several rows fill a tile of the tensor cores"
        if codes and takes_row_words(facts.rank, block, ROW_LANES):
            return Products.ROW_WORDS, "int4 of one row fills tensor cores as words of eight codes"
        if codes:
            return Products.ROW_TILES, f"rank {facts.rank} in int4 does not fit words of eight codes"
        if place is Place.GRIDS:
            return Products.ROW_TILES, "programs of q/k/v have no room for whole rows"
        return Products.REGISTERS, "a block's rows fit registers before the kernel waits"

    def attention(self, layer: int) -> HalfPlan:
        facts, fused, late = self.facts(layer, Target.HEADS), not self.fused[layer], not self.late[layer]
        kernels = Kernels.QKV_WITH_PREDICTOR if fused else Kernels.QKV_ALL
        why = (f"its norm does not come late: {self.late[layer]}",) if self.packed and not late else ()
        if facts is None:
            reason = why_all(UnitKey(layer, Target.HEADS), self.predictors)
            return HalfPlan(Target.HEADS, Run.ALL, kernels, (reason, *why), late=late)
        ahead, place = self._site(layer, Target.HEADS, facts)
        if late:
            place = Place.BEFORE
        elif self._own_matrix(layer, facts):
            place = Place.FOLDED
        selected, reason = self._heads_selected()
        if selected and kernels is Kernels.QKV_ALL:
            kernels = Kernels.QKV_SELECTED
        if selected and self.packed and self.batch > MOST_TOKENS:
            raise UserError(
                f"4-bit weights of selected heads are read for up to {MOST_TOKENS} rows at once, not {self.batch};"
                " take fewer rows, or let crossover on"
            )
        plan = HalfPlan(
            Target.HEADS, Run.SELECTED if selected else Run.MASKED, kernels, (reason, *why), facts.site, place,
            facts.format, ahead, late, density=facts.density, union=facts.union,
        )  # fmt: skip
        if place in (Place.FOLDED, Place.BEFORE):
            return replace(plan, format=self.formats.dtype)
        products, how = self._products(facts, place)
        return replace(plan, products=products, why=(*plan.why, f"predictor by {products}: {how}"))

    def _heads_selected(self) -> tuple[bool, str]:
        """Whether attention reads the selected heads only, instead of computing K/V of all heads and masking.

        Every row of several brings its own missing positions. At 8 rows they cost what skipped heads save, from about a
        quarter of the heads a row on.
        """
        if self.batch == 1:
            return True, "one row reads the heads that it selects"
        if not (self.options.crossover and crossover_measured(self.engine)):
            return True, "crossover is off, or was not measured here"
        return False, "several rows would compute K/V of missing positions, each of its own"

    def _silent_left_out(self) -> tuple[bool, str]:
        """Whether a layer that computes all neurons leaves out rows of those that are exactly zero, and why."""
        dims, asked = self.dims, self.options.zeros
        if dims.activation not in SILENT:
            return False, f"{dims.activation} makes no neuron silent"
        if self.packed and self.batch == 1 and not self.codes_down:
            return True, "the kernel of 4-bit rows in such groups has no other form"
        if asked == "read":
            return False, "rows of silent neurons are read, as zeros='read' asks"
        if self.batch > MOST_TOKENS:
            return False, f"more than {MOST_TOKENS} rows leave few neurons silent"
        if self.packed and not self.codes_down:
            return False, "4-bit rows in such groups are written out whole for several rows"
        if self.packed or asked == "skip" or not crossover_measured(self.engine):
            return True, "a silent neuron adds nothing"
        rows = tokens_at_once(self.batch)
        live, limit = LIVE[rows], at_width(READ_FROM[rows], dims.d_model)
        together = "a row keeps" if self.batch == 1 else f"{self.batch} rows together keep"
        why = f"{together} {live:.2f} of the neurons live in trained models, and reading all pays from {limit:.2f} on"
        return live < limit, why

    def _all_neurons(self) -> tuple[Kernels, bool, str]:
        """(kernels of a layer that computes all neurons, whether silent ones are left out, why)."""
        skips, why = self._silent_left_out()
        if self.batch > 1:
            return Kernels.PRODUCTS, skips, why
        if self.packed:
            wide = self.dims.d_model >= CODES_FROM and not (skips and self.dims.gated)
            apart = self.codes_down and (wide or self.options.zeros == "read")
            return Kernels.ROWS if apart else Kernels.LISTED_GRID, skips, why
        apart = not skips or (self.dims.d_model >= APART_FROM and not self.dims.gated)
        return Kernels.ROWS if apart else Kernels.LISTED_GRID, skips, why

    def mlp(self, layer: int) -> HalfPlan:
        facts, hidden = self.facts(layer, Target.MLP), hidden_values(self.dims)
        kernels, skips, silent = self._all_neurons()
        if facts is None:
            early = Early.LIST if kernels is Kernels.LISTED_GRID else None  # of all neurons: it never changes
            reasons = why_all(UnitKey(layer, Target.MLP), self.predictors), silent
            return HalfPlan(
                Target.MLP, Run.ALL, kernels, reasons, early=early, hidden=hidden, gated=self.dims.gated, skips=skips
            )
        ahead, place = self._site(layer, Target.MLP, facts)
        why = [f"not in attention's grids: {self.fused[layer]}"] if self.fused[layer] else []
        if not self.fused[layer]:
            place = Place.GRIDS
        selected, reason = self._neurons_selected(facts.union)
        packer, early = None, None
        products, how = self._products(facts, place)
        apart = self._not_owned(facts, ahead, place, products)
        if not apart:
            kernels = Kernels.OWNED_GRID
        elif self.batch == 1:
            kernels = Kernels.LISTED_GRID
            packer = Packer.ATTENTION if place is Place.GRIDS else Packer.KERNEL
            # Data written two launches ago is complete, so the kernel may read it before it waits for the launch before
            # its own: x where the predictor normalised it and its list was packed after that, or the list itself where
            # the predictor ran beside attention.
            early = Early.X if ahead == 0 else Early.LIST if place is Place.GRIDS else None
        elif selected and self.packed:
            # Only between its own MLP and itself: every layer's list lies in the same place.
            listed = ahead == 0 and facts.format == "int4" and facts.top_k is None
            kernels, packer = Kernels.LISTED_CODES, Packer.PREDICTOR if listed else Packer.KERNEL
        elif selected:
            kernels = Kernels.LISTED_BATCH
        why.append(f"predictor by {products}: {how}")
        if apart and self.packed and self.batch == 1:
            why.append(f"a list comes before up and down: {apart}")
        if facts.second_stage:
            why.append("candidates of a second stage are read whole: it saves bytes, and no time here")
        if facts.stored not in (facts.format, ""):
            why.append(f"{facts.stored} is read as codes by one row, or int4 in float16 by 2 to {MOST_TOKENS} rows")
        if not selected:
            why.append(silent)
        return HalfPlan(
            Target.MLP, Run.SELECTED if selected else Run.MASKED, kernels, (reason, *why), facts.site, place,
            facts.format, ahead, packer=packer, early=early, products=products, density=facts.density,
            union=facts.union, hidden=hidden, gated=self.dims.gated,
            skips=self.dims.activation in SILENT if selected else skips,
        )  # fmt: skip

    def _not_owned(self, facts: PredictorFacts, ahead: int, place: Place, products: Products) -> str:
        """Reason against programs that select among neurons of their own."""
        if self.batch > 1 or not self.packed:
            return "such programs take one row and 4-bit weights"
        if place is not Place.SITE or (ahead and self.options.look_ahead != "inline"):
            return "the whole predictor runs beside other kernels"
        if facts.top_k is not None:
            return "an exact top k needs the logits of all neurons"
        if products not in (Products.ROW_WORDS, Products.REGISTERS):
            return f"the predictor goes by {products}"
        size = 0 if products is Products.ROW_WORDS else DTYPE_BYTES.get(facts.format, 1)
        if not owned_block(self.dims.d_ffn, facts.rank, size, OWNERS, OWNERS_WARPS):
            return f"{OWNERS} programs have no room for {self.dims.d_ffn} neurons of rank {facts.rank}"
        return ""

    def _neurons_selected(self, union: float) -> tuple[bool, str]:
        if self.batch == 1:
            return True, "one row reads the neurons that it selects"
        if self.packed:
            if self.batch <= MOST_TOKENS:
                return True, f"up to {MOST_TOKENS} rows of 4-bit weights never read more than all neurons"
            return False, f"4-bit weights have no kernel that reads a list for more than {MOST_TOKENS} rows"
        if not (self.options.crossover and crossover_measured(self.engine)):
            return True, "crossover is off, or was not measured here"
        limit = dense_from(self.dims.d_model)
        if limit == 0:
            return False, f"what several rows gain by a list was not measured below d_model {MEASURED_FROM}"
        return union < limit, f"rows select {union:.2f} together; computing all is faster from {limit:.2f} on"


def crossover_measured(engine: Engine) -> bool:
    """Whether it is known from which density on computing all units is faster."""
    return engine is Engine.GPU


def dense_from(d: int) -> float:
    """The density of what several rows select together from which an MLP of width d is computed whole.

    Between two widths, the narrower decides.
    """
    return at_width(DENSE_FROM_BATCHES, d)


def at_width(measured: Sequence[tuple[int, float]], d: int) -> float:
    """Value measured at the widest model that is no wider than d, of (width, value) in order."""
    return [value for width, value in measured if width <= d][-1]


def read_as_codes(bundle: Any, dtype: torch.dtype, rows: int) -> frozenset[UnitKey]:
    """The (layer, target) of which an engine of so many rows reads codes. Others become numbers of the dtype.

    One row reads codes of int8 and int4. Two to eight rows in fp16 read those of int4 whose widths their kernels take.
    """
    found = set()
    for key, spec in bundle.specs.items():
        nibbles = spec.dtype == "int4" and dtype == torch.float16
        if spec.dtype not in DTYPES and (rows == 1 or (nibbles and takes_nibbles(rows, spec.rank, spec.d_in))):
            found.add(key)
    return frozenset(found)


def carveout(halves: Sequence[HalfPlan], packed: bool) -> int:
    """Percent of shared memory that is best for a step, by whole steps at four widths (`launch.share_carveout`).

    On an H200 sparse steps of small models are faster with the larger share, dense ones with the smaller. Large models
    do not care.
    """
    heads = any(half.place is not None or half.kernels is Kernels.QKV_WITH_PREDICTOR for half in halves[::2])
    if packed:
        return INT4_CARVEOUT if heads else SPARSE_CARVEOUT
    return SPARSE_CARVEOUT if heads or any(half.place for half in halves) else DRIVERS_CARVEOUT
