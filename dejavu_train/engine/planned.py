"""Plan of a decoding step: how each half of a layer runs, and where its predictor does."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dejavu_train.families import ModelDims, Site, Target, UnitKey
from dejavu_train.families.dims import Activation
from dejavu_train.kernels.common.limits import DRIVERS_CARVEOUT, Products
from dejavu_train.kernels.formats.matrix import Hidden
from dejavu_train.kernels.persistent.sizes import Neurons, StepSizes


class Engine(StrEnum):
    """Executor of a plan: kernels on a GPU or in the interpreter, plain torch, or the compiled engine for CPUs."""

    GPU = "gpu"
    INTERPRETER = "interpreter"
    REFERENCE = "reference"
    CPU = "cpu"


class Run(StrEnum):
    """Which units half a layer computes."""

    ALL = "all units"
    SELECTED = "the selected units"
    MASKED = "computed whole and masked"


class Place(StrEnum):
    """Where a predictor runs."""

    FOLDED = "as one matrix in front of q/k/v"
    SITE = "as kernels at its site"
    COMPILED = "as compiled code at its site"
    STREAM = "on a second stream from its site on"
    GRIDS = "in the grids of q/k/v and attention"
    BEFORE = "in the grid of the MLP before"


class Kernels(StrEnum):
    """The kernels of half a layer."""

    QKV_ALL = "q/k/v of all heads"
    QKV_SELECTED = "q/k/v of selected heads"
    QKV_WITH_PREDICTOR = "q/k/v beside the MLP's predictor"
    ROWS = "up, then down"
    LISTED_GRID = "up and down in one grid over a list"
    OWNED_GRID = "the predictor's second product, up and down in one grid whose programs own neurons"
    LISTED_BATCH = "up, then down, over the list of several rows"
    LISTED_CODES = "up over the list of several rows, then down"
    PRODUCTS = "up, then down, as products of several rows"
    COMPILED = "compiled for CPUs"


class Packer(StrEnum):
    """Way to close the gaps of the list of selected neurons."""

    KERNEL = "a kernel"
    ATTENTION = "attention's grid"
    PREDICTOR = "the predictor's kernels"


class Early(StrEnum):
    """Reads of the MLP's kernel before it waits for the kernel before it. Both are older than two launches."""

    X = "x"
    LIST = "list"


@dataclass(frozen=True)
class Formats:
    """How the weights lie: float32, float16, bfloat16 or int4, of the LM head int8 as well.

    Attributes:
        layers, head: of the layers' matrices and of the LM head. dtype: of what is no matrix, and of the caches.
        group: columns of down that share a scale, of int4.
    """

    layers: str
    head: str
    dtype: str
    group: int = 0

    @property
    def packed(self) -> bool:
        """Whether the layers' matrices lie in 4 bits."""
        return self.layers == "int4"


def hidden_values(dims: ModelDims) -> Hidden:
    """Function that an MLP's kernels apply to a neuron's products."""
    both = dims.activation is Activation.DRELU
    relu = both or dims.activation is Activation.FATRELU
    return Hidden(str(Activation.RELU if relu else dims.activation), dims.threshold, both)


@dataclass(frozen=True)
class HalfPlan:
    """How half a layer runs.

    Attributes:
        run, kernels: which units, by what. site, place, format: of its predictor, or None. products: how that
            multiplies its two matrices, or None.
        ahead: halves between the predictor's site and this one. late: the MLP before makes this half's input, and its
            norm comes with the products. second_stage: runs, and tests the predictor's selection once more.
        packer, early: of an MLP's list, or None. hidden, gated: what an MLP makes of a neuron's products.
        skips: rows of neurons that are exactly zero are not read.
        density, union: the share of units that one row and all rows select.
        why: reasons, also of what is not done.
    """

    target: Target
    run: Run
    kernels: Kernels
    why: tuple[str, ...]
    site: Site | None = None
    place: Place | None = None
    format: str | None = None
    ahead: int = 0
    late: bool = False
    second_stage: bool = False
    packer: Packer | None = None
    early: Early | None = None
    products: Products | None = None
    density: float = 1.0
    union: float = 1.0
    hidden: Hidden | None = None
    gated: bool = False
    skips: bool = False

    @property
    def own(self) -> bool:
        """Whether the predictor reads what the half itself reads."""
        return self.site is not None and self.ahead == 0

    def __str__(self) -> str:
        parts = [self.run.value, self.kernels.value]
        if self.place is not None:
            assert self.site is not None
            where = f"{self.site.input} {self.ahead} half layers before" if self.ahead else self.site.input
            parts.append(f"predictor in {self.format} of {where}, {self.place.value}")
        parts += ["its norm comes late"] * self.late + ["a second stage"] * self.second_stage
        parts += [f"list packed by {self.packer.value}"] if self.packer is not None else []
        parts += ["rows of silent neurons are not read"] * self.skips
        return "; ".join(parts)


@dataclass(frozen=True)
class StepPlan:
    """How a decoding step runs.

    Attributes:
        halves: attention and MLP of each layer in turn. head_why: of the LM head. screened: greedy tokens go through a
            screen of it. coming: bytes that an engine takes beside weights and predictors, by what they are for.
        codes_down: down of few rows is multiplied from its codes. carveout: percent of shared memory.
        ranks: GPUs that run the step together. `dims` are those of one.
        one_kernel: sizes of the kernel that runs all layers instead of what the halves say, or None and why not.
    """

    engine: Engine
    dims: ModelDims
    batch: int
    context: int
    formats: Formats
    halves: tuple[HalfPlan, ...]
    codes_down: bool
    carveout: int = DRIVERS_CARVEOUT
    ranks: int = 1
    screened: bool = False
    head_why: str = "all logits"
    one_kernel: StepSizes | None = None
    one_kernel_why: str = ""
    coming: Mapping[str, int] = field(default_factory=dict)

    def half(self, layer: int, target: Target | str) -> HalfPlan:
        return self.halves[2 * layer + (target == Target.MLP)]

    @property
    def selecting(self) -> dict[UnitKey, HalfPlan]:
        """The halves with a predictor."""
        return {UnitKey(i // 2, half.target): half for i, half in enumerate(self.halves) if half.place is not None}

    @property
    def turned(self) -> frozenset[int]:
        """The layers whose down lies as rows of neurons, as lists of neurons need it."""
        mlps = enumerate(self.halves[1::2])
        return frozenset(layer for layer, half in mlps if half.place is not None or half.skips)

    @property
    def streams(self) -> bool:
        """Whether a predictor runs on a second stream."""
        return any(half.place is Place.STREAM for half in self.halves)

    @property
    def shares_inputs(self) -> bool:
        """Whether attention of all heads keeps its input, in one place for all layers, for the MLP's predictor."""
        return any(half.kernels is Kernels.QKV_WITH_PREDICTOR and half.place is None for half in self.halves)

    def describe(self) -> str:
        """How every layer runs, equal ones together, and why."""
        lines = [f"{self.batch} row{'s' * (self.batch > 1)} of {self.context} tokens"]
        if self.ranks > 1:
            dims = self.dims
            lines.append(
                f"one of {self.ranks} GPUs: {dims.n_kv_heads} groups of heads and {dims.d_ffn} neurons of every layer,"
                " two sums over GPUs a layer, and one of logits"
            )
        lines.append(f"weights in {self.formats.layers}, LM head in {self.formats.head}: {self.head_why}")
        if self.one_kernel is not None:
            chosen, layers = len(self.selecting), self.dims.n_layers
            mixed = f" in {chosen} of {layers} layers, else {Neurons.LIVE.words}" if 0 < chosen < layers else ""
            return "\n".join([*lines, f"all layers in one kernel: of MLPs {self.one_kernel.neurons.words}{mixed}"])
        if self.one_kernel_why:
            lines.append(f"layers as a chain of kernels, not one kernel: {self.one_kernel_why}")
        for target, name in ((Target.HEADS, "attention"), (Target.MLP, "MLP")):
            mine = enumerate(half for half in self.halves if half.target == target)
            for (text, why), group in itertools.groupby(mine, key=lambda pair: (str(pair[1]), pair[1].why)):
                alike = list(group)
                numbers = f"s {alike[0][0]}-{alike[-1][0]}" if len(alike) > 1 else f" {alike[0][0]}"
                lines.append(f"{name} of layer{numbers}: {text}")
                if alike[0][1].place is not None:
                    row, union = (sum(getattr(h, n) for _, h in alike) / len(alike) for n in ("density", "union"))
                    word = "candidates" if alike[0][1].second_stage else "density"
                    lines.append(f"    {word} {row:.3f}" + (f" a row, {union:.3f} together" if self.batch > 1 else ""))
                lines += [f"    {reason}" for reason in why]
        return "\n".join(lines)
