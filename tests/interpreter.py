"""Triton's interpreter without the work whose results it throws away."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any


def spare_wasted_work() -> None:
    """Kernels in the interpreter compute what they did, more than four times as fast, and faster still under
    coverage. In a Triton that has other names inside they take as long as they do."""
    import triton.language as tl
    from triton.runtime import interpreter

    names = (
        "interpreter_builder",
        "InterpreterOptions",
        "GridExecutor",
        "_get_np_dtype",
        "_patch_lang",
        "_LangPatchScope",
        "TritonSemantic",
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
    # Every result has a type and a shape, and these have a name, a size and numbers of their own, all made anew.
    tl.core.block_type.__init__ = once_a_shape(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = of_known_shape(tl.core.tuple([]), tl.core.constexpr(1))
    # Operands of one shape, which are most, are compared number by number as if either could be spread. Those of one
    # type are brought to it, and a number becomes a block again wherever it is met.
    semantic = interpreter.TritonSemantic
    semantic.broadcast_impl_value = unless_alike(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = once_a_number(semantic.binary_op_type_checking_impl, tl.core.tensor)


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


def once_a_shape(make: Callable[..., None]) -> Callable[..., None]:
    """make(type, element type, shape), which sets the attributes of a block's type, once for each. They are shared."""
    from triton.language import constexpr, core

    known: dict[Any, dict[str, Any]] = {}

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        attributes = known.get(key)
        if attributes is None:
            make(self, element_ty, shape)
            self.of_tensor = core.tuple([constexpr(size) for size in self.shape]), constexpr(self.numel)
            attributes = known[key] = dict(self.__dict__)
        self.__dict__.update(attributes, element_ty=element_ty)

    return made


def of_known_shape(shape: Any, numel: Any) -> Callable[..., None]:
    """A block's constructor, which takes the shape that `once_a_shape` has left with its type, or that of a scalar."""

    def made(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else (shape, numel)

    return made


def unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """broadcast(semantic, tensor, tensor), but for two of one shape."""

    def shaped(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if shape_of(lhs.type) == shape_of(rhs.type) else broadcast(self, lhs, rhs)

    return shaped


def shape_of(kind: Any) -> Any:
    """Of a block's type, a list. None of a scalar's."""
    return kind.shape.values if kind.is_block() else None


def once_a_number(bring: Callable[..., Any], tensor: type, most: int = 2000) -> Callable[..., Any]:
    """bring(semantic, operand, operand, flags), which gives both one type and one shape. Blocks of numbers are kept,
    `most` at most, and used again where the tensor beside one stayed as it was."""
    kept: dict[Any, Any] = {}

    def brought(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        if type(lhs) is tensor and type(rhs) is tensor:
            one, other = lhs.type, rhs.type
            # Only a division, the fourth flag, gives another type than that of both. Pointers may be refused.
            same = one.scalar is other.scalar and not one.scalar.is_ptr() and len(flags) < 3 and not named
            if same and shape_of(one) == shape_of(other):
                return lhs, rhs
        elif type(rhs) in (int, float) and type(lhs) is tensor:
            key = (repr(rhs), lhs.type.name, flags, *named.items())  # 1 is not 1.0, and 0.0 not -0.0
            if key not in kept:
                made, block = bring(self, lhs, rhs, *flags, **named)
                if made is not lhs:
                    return made, block
                if len(kept) == most:
                    kept.clear()
                kept[key] = block
            return lhs, kept[key]
        return bring(self, lhs, rhs, *flags, **named)

    return brought
