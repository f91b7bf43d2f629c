"""Runtime of a sparse model: made of its weights and a bundle, and made again when they change.

Nothing of a call stands here. A call that has begun keeps the runtime that it began with.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.guard import GuardState
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.engine.cpu_plan import check_stored
from dejavu_train.engine.options import ZEROS, check_zeros
from dejavu_train.engine.ranks.part import ranks_of
from dejavu_train.engine.runs import RUNS
from dejavu_train.engine.token_bytes import step_bytes
from dejavu_train.engine.turns import Turns
from dejavu_train.families import blocks_of, dims_of
from dejavu_train.families.dims import engine_refusal
from dejavu_train.families.plain import NotPlain, is_adapter
from dejavu_train.ground.errors import Unsupported, UserError
from dejavu_train.sparse.derived import DerivedCell, Sources, no_mode
from dejavu_train.sparse.gather import GatherDecoder

BACKENDS = ("auto", "mask", "gather", "triton", "cpu")
ENGINES = ("triton", "cpu")
WITHOUT_PLAN = {
    "gather": "plain torch reads the units that a token selects, layer by layer. Expected speed: seldom above dense",
    "mask": "the dense model runs, and skipped units are zeroed. Expected speed: below that of the dense model",
}


@dataclass(frozen=True)
class Settings:
    """Settings of the user when the model was made.

    Attributes:
        backend: one of BACKENDS. ops: of the engine on a GPU, "triton" or "reference". guard: None without one.
        zeros: one of ZEROS, what becomes of silent neurons where nothing is selected.
        stored: one of `cpu_limits.STORED`, how the CPU engine keeps weights. None = as it chooses.
    Raises:
        UserError: an unknown backend, choice of zeros or format, or a format for a backend that keeps none.
    """

    backend: str = "mask"
    ops: str = "triton"
    guard: Guard | None = None
    zeros: str = "auto"
    stored: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise UserError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend}")
        if self.zeros not in ZEROS:
            raise UserError(f"zeros must be one of {', '.join(ZEROS)}, got {self.zeros}")
        check_stored(self.stored, self.backend)

    @property
    def auto(self) -> bool:
        """Whether gather may stand in for the engine."""
        return self.backend == "auto"


class Runtime:
    """One backend, ready to run.

    Args:
        earlier: of the same model. What it copied of unchanged weights is used again.
    Attributes:
        backend: "mask", "gather", "triton" or "cpu".
        selector, means: of mask. engines: of triton and cpu, else None.
        gatherer: of gather, made when it is first needed: beside an engine it takes the output projections again.
        guarded: what the guard has measured, or None.
        refusal: why auto did not take the engine, or None.
    Raises:
        UserError: a bundle of another shape, or a backend that cannot run it or be guarded.
    """

    def __init__(self, model: Any, bundle: Bundle, settings: Settings, earlier: "Runtime | None" = None) -> None:
        check_bundle_of(model, bundle)
        check_zeros(settings.zeros, dims_of(model.config).activation)
        self.bundle = bundle
        self.device, self.dtype = model.device, model.dtype
        self.backend = settings.backend
        self.refusal: Unsupported | None = None
        self.guarded: GuardState | None = None
        self.engines: Any = None
        self.gatherer: GatherDecoder | None = None
        self.selector: Any = None
        self.means: dict[int, Tensor] = {}
        self._turns, self._made = Turns(), DerivedCell[None]()
        if settings.guard is not None:
            if self.backend == "mask":
                raise UserError("the backend mask computes whole sequences at once and has no guard; use gather")
            self.guarded = GuardState(settings.guard, bundle.specs, model.device)
        if ranks_of(model) is not None:
            settings = _of_ranks(settings, model.device)
            self.backend = settings.backend
        if settings.auto or self.backend in ENGINES:
            if settings.auto:
                self.backend = "cpu" if model.device.type == "cpu" and settings.ops == "triton" else "triton"
            try:
                self.engines = _engine_backend(self.backend, model, bundle, settings, self.guarded)
            except Unsupported as refusal:
                if ranks_of(model) is not None:
                    raise refusal.among_ranks() from None
                if not settings.auto or settings.stored is not None:
                    raise
                self.backend, self.refusal = "gather", refusal
        if self.backend == "mask":
            self.selector, self.means = PredictorSelector(bundle, model.device, model), bundle.head_means(model.device)
        elif self.backend == "gather":
            self.gather(model)
        self._sources = self._read_sources(model)
        if earlier is not None and self.backend == earlier.backend == "cpu" and self._sources.same(earlier._sources):
            self.engines.share(earlier.engines)

    def fits(self, model: Any) -> bool:
        """Whether the model still is what this was made of."""
        same = (self.device, self.dtype) == (model.device, model.dtype)
        return same and self._sources.same(self._read_sources(model))

    def prepare(self, model: Any) -> None:
        """Lay weights out as the engine of a GPU shares them, before its first call."""
        if self.backend == "triton" and not self.engines.laid_out:
            with self._made.lock, torch.inference_mode(next(model.parameters()).is_inference()):
                _ = self.engines.weights
                self._sources = self._read_sources(model)

    def gather(self, model: Any) -> GatherDecoder:
        """The decoder of gather."""
        with self._made.lock, no_mode(self.device):
            if self.gatherer is None:
                try:
                    self.gatherer = GatherDecoder(model, self.bundle, self.guarded)
                except NotPlain as refusal:
                    raise UserError(str(refusal)) from None
                if self.engines is not None:  # weights were laid out anew
                    self._sources = self._read_sources(model)
            return self.gatherer

    def describe(self, model: Any, rows: int, tokens: int) -> str:
        """See `SparseCausalLM.describe`."""
        if self.engines is None:
            refused = "" if self.refusal is None else f"\n    not the engine: {self.refusal}"
            return f"backend {self.backend}: {WITHOUT_PLAN[self.backend]}{refused}"
        self.prepare(model)
        with self.engines.turn():
            engine = self.engines.engine(rows, tokens)
            return f"{step_bytes(self.bundle, engine.plan).describe(rows)}\n{engine.describe()}"

    def check_engine(self, what: str, otherwise: str = "") -> None:
        """Raise :class:`UserError` where ``what`` needs an engine and there is none. otherwise: ends the message."""
        if self.engines is None:
            why = "" if self.refusal is None else f": {self.refusal.reason}"
            raise UserError(f"{what} needs an engine, and the backend is {self.backend}{why}{otherwise}")

    @contextlib.contextmanager
    def turn(self, nested: bool) -> Iterator[None]:
        """Calls of gather run side by side, but for a guard, whose thresholds all of them would move."""
        with contextlib.nullcontext() if self.guarded is None or nested else self._turns:
            yield

    def _read_sources(self, model: Any) -> Sources:
        blocks = blocks_of(model)
        staged = [blocks[layer] for layer in self.bundle.cascades()]
        if self.backend == "mask":
            return Sources(model, (block.whole for block in staged), _tensors(*(block.up for block in staged)))
        folded = [blocks[layer].out for layer in self.bundle.head_means()]
        adapters = [module for module in model.modules() if is_adapter(module)]
        roots = (model.base_model, model.get_output_embeddings())
        if self.backend == "cpu":
            return Sources(model, roots, _tensors(*roots))
        screened = [] if self.engines is None else [model.get_output_embeddings()]
        copied = _tensors(*(block.up for block in staged), *folded, *adapters, *screened)
        if self.engines is not None:
            copied += [tensor for tensor in _tensors(*roots) if tensor.dim() < 2]
        return Sources(model, roots, copied)


def _tensors(*modules: nn.Module) -> list[Tensor]:
    found = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    return list(found.values())


def check_bundle_of(model: Any, bundle: Any) -> None:
    """Raise :class:`UserError` for what is no bundle, or one of another shape. The vocabulary may have grown."""
    if not isinstance(bundle, Bundle):
        raise UserError(
            f"a bundle must be a Bundle, got a {type(bundle).__name__}; Bundle.from_pretrained(FOLDER) reads one"
        )
    shape = dims_of(model.config)
    for name in ("n_layers", "d_model", "n_heads", "d_ffn", "pattern"):
        ours, theirs = getattr(bundle.shape, name), getattr(shape, name)
        if ours != theirs:
            raise UserError(
                f"the bundle was made for {bundle.model} with {name} {ours}, this model has {theirs};"
                " give the bundle of this model"
            )


def _of_ranks(settings: Settings, device: torch.device) -> Settings:
    """Settings of a model that is shared out: the engine, on CPUs in plain torch. Raises UserError for another."""
    if settings.backend not in ("auto", "triton"):
        raise UserError(
            f"several processes of torchrun decode through backend triton alone, got {settings.backend}; leave it out,"
            " or start one process"
        )
    return replace(settings, backend="triton", ops=settings.ops if device.type == "cuda" else "reference")


def check_lossless(runtime: Runtime) -> None:
    """Raise :class:`UserError` where decoding cannot be lossless: without an engine, or with a guard."""
    runtime.check_engine("lossless decoding", "; or pass lossless=False")
    if runtime.guarded is not None:
        raise UserError("lossless decoding has no guard, since acceptance measures the selection; pass guard=None")


def _engine_backend(backend: str, model: Any, bundle: Bundle, settings: Settings, guarded: GuardState | None) -> Any:
    """The engines for a model. Raises Unsupported where they do not run."""
    if (why := engine_refusal(dims_of(model.config), RUNS)) is not None:
        raise Unsupported(f"the engine {backend} has {why}")
    try:
        if backend == "cpu":
            from dejavu_train.engine.cpu.backend import CpuBackend

            return CpuBackend(model, bundle, guarded, settings.zeros, settings.stored)
        from dejavu_train.engine.backend import EngineBackend

        return EngineBackend(model, bundle, settings.ops, guarded, settings.zeros)
    except ImportError as error:
        raise Unsupported(f"the engine {backend} cannot be loaded ({error})") from None
    except NotPlain as refusal:
        raise Unsupported(refusal.what) from None
