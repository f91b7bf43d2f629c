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
    _check(options)
    keys = [UnitKey(layer, target) for layer in range(dims.n_layers) for target in (Target.HEADS, Target.MLP)]
    halves = tuple(_half(key, predictors, dims.activation in SILENT) for key in keys)
    head = "greedy tokens through a screen" if formats.head in cpu.WHOLE else "all logits"
    return StepPlan(Engine.CPU, dims, options.batch, context, formats, halves, False, head_why=head)


def _check(options: EngineOptions) -> None:
    """Raise Unsupported for what the CPU engine does not do."""
    if options.guarded:
        raise Unsupported("the CPU engine has no guard: its thresholds are constants; pass guard=None to stay on it")
    if options.zeros == "read":
        raise Unsupported("the CPU engine never reads rows of silent neurons; leave zeros out")
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


def cpu_format(own: str, asked: str | None = None) -> str:
    """The format of weights: as asked for, else the model's ``own``, else float32."""
    return asked or (own if own in cpu.STORED else "float32")


def weight_bytes(dims: ModelDims, stored: str, tied: bool) -> int:
    """Bytes, to within a tenth, of a model's weights in this format. tied: the LM head is the embedding."""
    columns = -(-dims.d_model // cpu.CHUNK) * cpu.CHUNK
    tied = tied and dims.embedding_dim == dims.d_model
    layers, ends = dims.n_layers * dims.layer_weights // dims.d_model, dims.vocab_size * (1 if tied else 2)
    if stored in cpu.WHOLE:
        return ((4 if stored == "float32" else 2) * (layers + ends) + dims.vocab_size) * columns
    bits = 8.5 if stored == "int8" else 4.5  # with their scales
    return int((layers * bits + ends * 8.5) / 8 * columns)
