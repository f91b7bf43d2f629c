"""Triton's interpreter without the work whose results it throws away."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any


def spare_wasted_work() -> None:
    """Kernels in the interpreter compute what they did, about three times as fast, six times under coverage. In a
    Triton that has other names inside they take as long as they do."""
    import triton.language as tl
    from triton.runtime import interpreter

    names = (
        "interpreter_builder",
        "InterpreterOptions",
        "GridExecutor",
        "_get_np_dtype",
        "_patch_lang",
        "_LangPatchScope",
    )
    missing = [name for name in names if not hasattr(interpreter, name)]
    if missing or interpreter.interpreter_builder.options.debug:
        warnings.warn(f"tests of kernels take longer: another Triton than 3.6 to 3.9 {missing}", stacklevel=2)
        return
    # Every sum, difference and product of integers is computed again in 64 bits, for an assertion that the interpreter,
    # whose `debug` is off, does not make.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    # Coverage is told of every call and line of kernels and of Triton, which more than doubles their time; none counts.
    interpreter.GridExecutor.__call__ = uncounted(interpreter.GridExecutor.__call__)
    # For every result a table of all types is made anew.
    interpreter._get_np_dtype = of_scalar(interpreter._get_np_dtype)
    # A function that a kernel calls puts the interpreter's functions in place once more, as the launch has already.
    interpreter._patch_lang = once(interpreter._patch_lang, (tl, tl.core), interpreter._LangPatchScope)


def uncounted(call: Callable[..., Any]) -> Callable[..., Any]:
    """call, but coverage does not follow it. Debuggers do."""

    @functools.wraps(call)
    def called(*args: Any, **named: Any) -> Any:
        tracer = sys.gettrace()
        if not type(tracer).__module__.startswith("coverage"):
            return call(*args, **named)
        sys.settrace(None)
        try:
            return call(*args, **named)
        finally:
            sys.settrace(tracer)

    return called


def of_scalar(table: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """table(type), which is that of a block's elements, asked once for each."""
    from triton.language import pointer_type

    known = functools.cache(table)
    return lambda kind: table(kind) if isinstance(kind.scalar, pointer_type) else known(kind.scalar)


def once(patch: Callable[[Any], Any], languages: tuple[Any, ...], nothing: Callable[[], Any]) -> Callable[[Any], Any]:
    """patch(function), which replaces builtins in the languages that a function sees, but where that is done."""
    from triton.language.core import is_builtin

    @functools.cache
    def seen(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if inspect.ismodule(value) and value in languages]

    def patched(function: Any) -> Any:
        done = seen(function) and not any(is_builtin(language.load) for language in seen(function))
        return nothing() if done else patch(function)

    return patched
