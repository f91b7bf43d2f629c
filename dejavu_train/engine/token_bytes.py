"""How many bytes of weights a decoding step reads, as expected from a bundle's curves. K/V are not counted."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from dejavu_train.bundle.allocation import read_curve
from dejavu_train.bundle.cost_model import predictor_bytes, unit_bytes
from dejavu_train.engine.facts import expected_union
from dejavu_train.engine.planned import Engine, StepPlan
from dejavu_train.families import ModelDims, Target, UnitKey
from dejavu_train.families.dims import SMOOTH
from dejavu_train.kernels.common.limits import MOST_TOKENS
from dejavu_train.models.weight_format import CODES4, WeightFormat

BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
PACKED = WeightFormat("int4", 4.5)  # with an fp16 scale for 32 columns
SCREEN_BITS = 8  # of the codes by which a screen leaves words of the LM head out
GAIN = 1.05  # times as fast, from which sparsity is worth a word


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one step of all rows: as selected, and of all units. Both have the LM head.

    exact: no predictor says how many neurons are silent, and rows of those are left out.
    """

    read: float
    dense: float
    exact: bool = False

    def describe(self, rows: int = 1) -> str:
        """For people: megabytes, the share that is read, and the speed that follows."""
        share, gain = self.read / self.dense, self.dense / self.read
        what = "a token" if rows == 1 else f"a step of {rows} rows"
        if self.exact:
            return (
                f"reads at most {self.read / 1e6:,.1f} MB of weights for {what}, less by rows of silent neurons\n"
                "expected speed: it follows from how many are silent, which python infer.py --model MODEL measures"
            )
        part = f"{100 * share:.0f} % of the {self.dense / 1e6:,.1f} MB without predictors"
        read = f"reads {self.read / 1e6:,.1f} MB of weights for {what}, {part}"
        if gain < GAIN:
            return f"{read}\nexpected speed: that of the dense model in the same engine, because nearly all is read"
        return f"{read}\nexpected speed: up to {gain:.1f} times that of the dense model in the same engine"


def step_bytes(bundle: Any, plan: StepPlan) -> StepBytes:
    """Bytes that an engine of this plan reads in a step."""
    shape, weights = plan.dims, _format(plan.formats.layers, plan.engine)
    unit = weights.unit_bytes(shape)
    head = _head_bytes(shape, plan)
    read = dense = head
    for layer in range(shape.n_layers):
        for target in (Target.HEADS, Target.MLP):
            spec = bundle.specs.get(UnitKey(layer, target))
            whole = unit.dense(shape, target)
            if target == Target.MLP and (plan.engine == Engine.CPU or plan.batch <= MOST_TOKENS):
                whole -= shape.d_ffn * unit.down * (1 - _active(bundle, spec, plan))  # of zeros nothing more is read
            dense += whole
            read += whole if spec is None or spec.dense else _spec_bytes(bundle, spec, plan, weights)
    return StepBytes(read, dense, exact=not bundle.specs and any(half.skips for half in plan.halves))


def _spec_bytes(bundle: Any, spec: Any, plan: StepPlan, weights: WeightFormat) -> float:
    """One predictor, and the units that all rows select together."""
    frequency = bundle.frequency(spec.layer, spec.target)
    union = expected_union(spec.density, plan.batch, frequency)
    staged = spec.kind == "cascade" and plan.engine == Engine.CPU  # other engines read all candidates
    selected = None
    if staged:
        selected = expected_union(read_curve(spec.curve, spec.density)["selected"], plan.batch, frequency)
    together = dataclasses.replace(spec, active_density=_active(bundle, spec, plan))
    return predictor_bytes(spec) + unit_bytes(together, plan.dims, weights, union, spec.recall or 1.0, selected)


def _active(bundle: Any, spec: Any, plan: StepPlan) -> float:
    """The share of units that any row activates. All, where no predictor says it, or the activation is never zero."""
    if spec is None or spec.active_density is None or plan.dims.activation in SMOOTH:
        return 1.0
    return expected_union(spec.active_density, plan.batch, bundle.frequency(spec.layer, spec.target))


def _format(name: str, engine: Engine) -> WeightFormat:
    if BITS[name] == 4:  # a CPU's rows may have any width
        return PACKED if engine is Engine.CPU else CODES4
    return WeightFormat(name, BITS[name])


def _head_bytes(shape: ModelDims, plan: StepPlan) -> float:
    bits = SCREEN_BITS if "screen" in plan.head_why else BITS[plan.formats.head]
    return shape.vocab_size * shape.d_model * bits / 8
