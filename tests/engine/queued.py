"""The kernels that a decoding step queues, by name and in order: launches are noted and nothing is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from decode_helpers import mlp_ahead, random_bundle, random_opt
from four_bit_models import four_bits
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.options import EngineOptions

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
PLAIN = "!"  # behind the name of a kernel that is not launched as a dependent


@dataclass(frozen=True)
class Launch:
    """A kernel, the addresses of its tensors and its options by their names, or a product of torch."""

    kernel: str
    tensors: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def dependent(self) -> bool:
        return bool(self.options.get("launch_pdl"))

    def __str__(self) -> str:
        if self.kernel.startswith("torch"):
            return self.kernel
        name = self.kernel.split(".")[1].removeprefix("_").removesuffix("_kernel")
        if "walk" in self.options:  # what the kernel of rows is handed
            name = self.options["walk"].__name__.removeprefix("_walk_")
            name += "_qkv" * (self.options["put"].__name__ == "_put_qkv")
        return name + PLAIN * (not self.dependent)


class Products(TorchDispatchMode):
    """Notes the matrix products of torch."""

    def __init__(self, queued: list[Launch]) -> None:
        super().__init__()
        self.queued = queued

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.queued.append(Launch(f"torch.{name}"))
        return func(*args, **(kwargs or {}))


def named(given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a kernel is given by its names, and what lies in a named tuple by the names of its fields."""
    for name, value in given.items():
        if hasattr(value, "_asdict"):
            yield from named(value._asdict())
        else:
            yield name, value


@contextmanager
def recorded(monkeypatch: Any) -> Iterator[list[Launch]]:
    """What is queued within, as on a GPU with dependent launches. Kernels do nothing."""
    queued: list[Launch] = []

    def run(kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(named(dict(zip(kernel.arg_names, args, strict=False)) | options))
        tensors = {name: value.data_ptr() for name, value in given.items() if torch.is_tensor(value)}
        module = kernel.fn.__module__.rpartition(".")[2]
        handed = {name: value for name, value in given.items() if isinstance(value, InterpretedFunction)}
        queued.append(Launch(f"{module}.{kernel.__name__}", tensors, options | dict(named(options)) | handed))

    with monkeypatch.context() as patched, Products(queued):
        patched.setattr(InterpretedFunction, "run", run)
        patched.setattr("dejavu_train.kernels.common.launch._knows_pdl", lambda device: True)
        yield queued


WIDE = {"d_model": 256, "n_heads": 8, "d_ffn": 96, "n_layers": 3, "positions": 32}
MIXED = {(1, "heads"): {"site": "attn_in", "site_layer": 1}, (2, "heads"): {"threshold": None, "keep_dense": True}}
# name -> (4-bit weights, options of the bundle or None, options of the engine, changes of specs)
CASES: dict[str, tuple[bool, dict[str, Any] | None, dict[str, Any], dict[Any, Any]]] = {}


def _case(name: str, packed: bool, bundle: dict[str, Any] | None, specs: dict[Any, Any] | None = None, **engine: Any):
    CASES[name] = packed, bundle, engine, specs or {}


for _packed, _bits in ((False, "16 bits"), (True, "4 bits")):
    for _batch in (1, 2, 9):
        _case(f"{_bits}, dense, {_batch} rows", _packed, None, batch=_batch)
    for _batch in (1, 2, 9):
        _case(f"{_bits}, own sites, {_batch} rows", _packed, {}, batch=_batch, crossover=True)
        _case(f"{_bits}, int4 predictors, {_batch} rows", _packed, {"int4": True}, batch=_batch, crossover=True)
    for _batch in (1, 2):
        _case(f"{_bits}, MLP alone, {_batch} rows", _packed, {"targets": ("mlp",)}, batch=_batch)
        _case(f"{_bits}, heads alone, {_batch} rows", _packed, {"targets": ("heads",)}, batch=_batch)
        _case(f"{_bits}, top k, {_batch} rows", _packed, {"top_k": 0.4}, batch=_batch)
        _case(f"{_bits}, relu, {_batch} rows", _packed, {"relu": True, "lookahead": 1}, batch=_batch)
        _case(f"{_bits}, two halves ahead, {_batch} rows", _packed, {"lookahead": 2, "int8": True}, batch=_batch)
    for _how in ("fused", "stream", "inline"):
        for _name, _options in (
            ("ahead", {}), ("ahead, int4", {"int4": True}), ("MLP ahead, int4", {"int4": True, "targets": ("mlp",)}),
            ("own heads", {"int4": True, "own_heads": True}), ("ahead, means", {"means": True, "int8": True}),
        ):  # fmt: skip
            _case(f"{_bits}, {_name}, {_how}", _packed, {"lookahead": 1, **_options}, look_ahead=_how)
    _case(f"{_bits}, mixed", _packed, {"lookahead": 1, "int4": True}, MIXED)
    _case(f"{_bits}, ahead, 2 rows", _packed, {"lookahead": 1, "int4": True}, batch=2)
    _case(f"{_bits}, guard, fused", _packed, {"lookahead": 1, "int4": True}, guard=True)
    _case(f"{_bits}, guard, own heads", _packed, {"lookahead": 1, "own_heads": True}, guard=True)
    for _batch in (1, 2, 9):
        _case(f"{_bits}, guard, {_batch} rows", _packed, {}, batch=_batch, guard=True, crossover=True)
for _packed, _bits in ((False, "16 bits"), (True, "4 bits")):
    _case(f"{_bits}, second stage", _packed, {"cascade": True})
_case("4 bits, guard, int4 predictors, 1 rows", True, {"int4": True}, guard=True)
_case("4 bits, dense and wide", True, None, pays_from=256)
_case("a screen", False, {}, screen=True)
for _packed, _bits in ((False, "16 bits"), (True, "4 bits")):
    for _batch in (1, 2, 9):
        _case(f"{_bits}, norms behind, dense, {_batch} rows", _packed, None, batch=_batch, before=False)
        _case(f"{_bits}, norms behind, {_batch} rows", _packed, {}, batch=_batch, crossover=True, before=False)
    for _how in ("fused", "stream"):
        _case(
            f"{_bits}, norms behind, ahead, {_how}", _packed, {"lookahead": 1, "int4": True}, look_ahead=_how,
            before=False,
        )  # fmt: skip
_case("4 bits, a head of 4 bits", True, {}, packed_head=True)
_case("4 bits, a head of 4 bits, 2 rows", True, {}, packed_head=True, batch=2)


@cache
def model_of(packed: bool, packed_head: bool, before: bool) -> Any:
    model = random_opt(**WIDE, before=before)
    return four_bits(model, packed_head) if packed else model


def engine_of(name: str, monkeypatch: Any) -> DecodeEngine:
    packed, options, settings, specs = CASES[name]
    settings = dict(settings)
    monkeypatch.setattr("dejavu_train.engine.plan.CODES_FROM", settings.pop("pays_from", 4096))
    model = model_of(packed, settings.pop("packed_head", False), settings.pop("before", True))
    bundle = None
    if options is not None:
        own_heads = options.get("own_heads")
        bundle = random_bundle(model, rank=16, **{k: v for k, v in options.items() if k != "own_heads"})
        bundle = mlp_ahead(bundle) if own_heads else bundle
        for key, changes in specs.items():
            vars(bundle.specs[key]).update(changes)
    if settings.pop("guard", False):
        settings["guard"] = guard(bundle)
    crossed = settings.pop("crossover", False)
    return build(model, bundle, crossed, monkeypatch, context=24, device="cpu", dtype=torch.float16, **settings)


def guard(bundle: Any) -> Any:
    """What stands in for a `GuardState`: every step is measured."""
    return SimpleNamespace(
        threshold=lambda key: torch.full((1,), 0.3), due=lambda: True, tensors=lambda: [], measure=lambda *_: None,
        move=lambda rows: None,
    )  # fmt: skip


def build(model: Any, bundle: Any, crossed: bool, monkeypatch: Any, **options: Any) -> DecodeEngine:
    """An engine of kernels on the CPU. crossed: that computes layers whole as a GPU would."""
    with monkeypatch.context() as patched:
        patched.setattr("dejavu_train.engine.plan.crossover_measured", lambda engine: crossed)
        return DecodeEngine(model, bundle, EngineOptions(**options))


def queue_of(name: str, monkeypatch: Any) -> str:
    """The kernels of a case's steps: the first one greedy, where a guard measures another one that is not measured."""
    with torch.no_grad():
        engine = engine_of(name, monkeypatch)
        with recorded(monkeypatch) as queued:
            engine.step("greedy")
        queues = [queued]
        if engine.guard is not None:
            with recorded(monkeypatch) as queued:
                engine.core.eager("greedy", False)
            queues.append(queued)
    return " | ".join(" ".join(map(str, queued)) for queued in queues)
