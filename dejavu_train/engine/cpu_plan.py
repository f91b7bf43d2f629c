"""Who runs a decoding step of the CPU engine: compiled code, which reads what is selected of any number of rows."""

from collections.abc import Mapping

from dejavu_train.engine import cpu_limits as cpu
from dejavu_train.engine.facts import PredictorFacts, why_all
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.planned import Engine, Formats, HalfPlan, Kernels, Place, Run, StepPlan
from dejavu_train.families import ModelDims, Target, UnitKey
from dejavu_train.families.dims import SILENT
from dejavu_train.ground.errors import Unsupported, UserError


def plan_compiled(
    dims: ModelDims,
    predictors: Mapping[UnitKey, PredictorFacts | None],
    formats: Formats,
    options: EngineOptions,
    context: int,
) -> StepPlan:
    """How the CPU engine runs a decoding step. See `plan_step`."""
    _check(formats, options)
    keys = [UnitKey(layer, target) for layer in range(dims.n_layers) for target in (Target.HEADS, Target.MLP)]
    halves = tuple(_half(key, predictors, dims.activation in SILENT) for key in keys)
    head = "greedy tokens through a screen" if formats.head == "float32" else "all logits"
    return StepPlan(Engine.CPU, dims, options.batch, context, formats, halves, False, head_why=head)


def _check(formats: Formats, options: EngineOptions) -> None:
    """Raise Unsupported for what the CPU engine does not do."""
    if options.guarded:
        raise Unsupported("the CPU engine has no guard: its thresholds are constants; pass guard=None to stay on it")
    if options.zeros == "read":
        raise Unsupported("the CPU engine never reads rows of silent neurons; leave zeros out")
    if formats.dtype != "float32" and formats.layers not in ("int8", "int4"):
        raise Unsupported(
            f"the CPU engine keeps weights in float32 or rounded, and this model is in {formats.dtype}; pass"
            " dtype='float32' to stay on it, or stored='int8'"
        )
    if options.batch > cpu.MAX_BATCH:
        raise UserError(f"the CPU engine decodes 1 to {cpu.MAX_BATCH} rows at once, got a batch of {options.batch}")


def _half(key: UnitKey, predictors: Mapping[UnitKey, PredictorFacts | None], silent: bool) -> HalfPlan:
    """Half a layer. silent: neurons may be exactly zero."""
    facts, skips = predictors.get(key), silent and key.target == Target.MLP
    if facts is None:
        return HalfPlan(key.target, Run.ALL, Kernels.COMPILED, (why_all(key, predictors),), skips=skips)
    return HalfPlan(
        key.target, Run.SELECTED, Kernels.COMPILED, (), facts.site,
        Place.COMPILED, facts.format, key.site.half - facts.site.half, second_stage=facts.second_stage,
        density=facts.density, union=facts.union, skips=skips,
    )  # fmt: skip


def check_stored(stored: str | None, backend: str = "cpu") -> None:
    """Raise :class:`UserError` for a format that the CPU engine does not have, or one asked of another backend."""
    if stored is None:
        return
    if stored not in cpu.STORED:
        raise UserError(f"stored must be {', '.join(cpu.STORED)} or left out, got {stored}")
    if backend not in ("auto", "cpu"):
        raise UserError(
            f"stored={stored} says how the CPU engine keeps weights, and the backend is {backend}; pass backend='cpu',"
            " or leave stored out"
        )


def cpu_format(coded: bool, asked: str | None = None) -> str:
    """The format of weights: as asked for, else the codes of a 4-bit model (``coded``), else float32."""
    return asked or ("int4" if coded else "float32")
