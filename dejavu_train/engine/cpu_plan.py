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
    if formats.dtype != "float32":
        raise Unsupported(
            f"the CPU engine keeps weights in float32, and this model is in {formats.dtype}; pass dtype='float32' to"
            " stay on it"
        )
    if options.batch > cpu.MAX_BATCH:
        raise UserError(f"the CPU engine decodes 1 to {cpu.MAX_BATCH} rows at once, got a batch of {options.batch}")


def _half(key: UnitKey, predictors: Mapping[UnitKey, PredictorFacts | None], silent: bool) -> HalfPlan:
    """Half a layer. silent: neurons may be exactly zero."""
    facts, skips = predictors.get(key), silent and key.target == Target.MLP
    if facts is None:
        return HalfPlan(key.target, Run.ALL, Kernels.COMPILED, (why_all(key, predictors),), skips=skips)
    return HalfPlan(
        key.target, Run.SELECTED, Kernels.COMPILED, ("rows read what they select together",), facts.site,
        Place.COMPILED, facts.format, key.site.half - facts.site.half, second_stage=facts.second_stage,
        density=facts.density, union=facts.union, skips=skips,
    )  # fmt: skip


def cpu_format(group: int, asked: str | None = None) -> str:
    """How the CPU engine keeps weights: as asked for, else the codes of a 4-bit model where they fit, else in float32.

    Args:
        group: columns that share a scale of 4-bit codes. 0 = the model has none.
    Raises:
        UserError: codes that the model does not have, or whose groups are not whole chunks.
    """
    fits = group > 0 and group % cpu.CHUNK == 0
    if asked == "codes" and not fits:
        found = f"4-bit codes in groups of {group} columns" if group else "no 4-bit codes"
        raise UserError(
            f"codes are kept of 4-bit models with groups of {cpu.CHUNK} or 128 columns; this one has {found}"
        )
    return asked or ("codes" if fits else "float32")
