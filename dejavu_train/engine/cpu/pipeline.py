"""How numba compiles the engine: functions are typed one by one, then optimised together, as one module.

By itself numba optimises a function and makes machine code of it before it compiles the callers, and again inside every
caller. Here only the entry point gets machine code. What it calls, directly or not, stays as it was lowered until the
entry point is optimised. It takes two thirds of the time.

By itself numba looks through some thirty definitions of ``+`` again at each place that adds. Here a definition that was
chosen for operands of some types is kept while the engine is compiled. Passes for what no function here has are left
out: a tenth of the calls.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

UNUSED = {
    "Rewrite dynamic raises",
    "find_literally",
    "inline_closure_likes",
    "inline_inlinables",
    "inline_overloads",
    "literal_unroll",
    "make_function_op_code_to_jit_function",
    "nopython_rewrites",
    "with_lifting",
}
"""Names of numba's passes for closures, literals that functions ask for, exceptions, array expressions, ``with``."""


class _NotLoaded:
    """In place of the code generator: a function that is not in this process's memory has no environment to set."""

    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        pass


class _PartLibrary(JITCodeLibrary):
    """The module of one function, as it was lowered."""

    codegen = _NotLoaded()

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0


class _EntryLibrary(JITCodeLibrary):
    """The module of the entry point with all parts."""

    _linking_libraries: list[Any]

    def finalize(self) -> None:
        found = dict.fromkeys(self._linking_libraries)  # in order
        waiting = list(found)
        while waiting:
            library = waiting.pop()
            if isinstance(library, _PartLibrary):
                called = [each for each in library._linking_libraries if each not in found]
                found.update(dict.fromkeys(called))
                waiting += called
        self._linking_libraries = list(found)
        super().finalize()


class _Lowering(NativeLowering):
    library: Any

    def run_pass(self, state: Any) -> bool:
        state.library = self.library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().run_pass(state)


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(_Lowering):
    _name, library = "part_lowering", _PartLibrary


@register_pass(mutates_CFG=True, analysis_only=False)
class _EntryLowering(_Lowering):
    _name, library = "entry_lowering", _EntryLibrary


class Part(CompilerBase):
    """The compiler of a function that only compiled code calls."""

    lowering: Any = _PartLowering

    def define_pipelines(self) -> list[Any]:
        """Numba's own passes with another lowering."""
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        used = [(kind, name) for kind, name in pipeline.passes if kind._name not in UNUSED]
        pipeline.passes = [(self.lowering if kind is NativeLowering else kind, name) for kind, name in used]
        pipeline._finalized = False
        pipeline.finalize()
        return [pipeline]


class Entry(Part):
    """The compiler of a function that Python calls."""

    lowering = _EntryLowering


@contextlib.contextmanager
def operators_kept() -> Iterator[None]:
    """Within the context the type of an operator's or a function's result is worked out once for types of operands."""
    found: dict[Any, Any] = {}
    look_up = types.BaseFunction.get_call_type

    def get_call_type(function: Any, context: Any, args: Any, kws: Any) -> Any:
        if kws:
            return look_up(function, context, args, kws)
        key = (function.key, tuple(args))
        if key not in found:
            signature = look_up(function, context, args, kws)
            if signature is None:
                return None
            found[key] = signature, function._impl_keys[signature.args]
        signature, function._impl_keys[signature.args] = found[key]
        return signature

    types.BaseFunction.get_call_type = get_call_type
    try:
        yield
    finally:
        types.BaseFunction.get_call_type = look_up
