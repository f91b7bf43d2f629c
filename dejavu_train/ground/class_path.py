"""Classes that a configuration names by ``class_path`` and ``init_args``, as Lightning's: imports and builds them."""

import importlib
import inspect
from typing import Any

from dejavu_train.ground.errors import UserError


def import_named(value: Any, key: str) -> Any:
    """The class or function that ``value``, of the configuration's ``key``, names.

    Args:
        value: ``{"class_path": "package.module.Name", "init_args": {...}}``, the arguments being optional.

    Raises:
        UserError: another form, or nothing of that name can be imported.
    """
    surplus = sorted(set(value) - {"class_path", "init_args"}) if isinstance(value, dict) else []
    if surplus or not isinstance(value, dict) or not isinstance(value.get("class_path"), str):
        got = f"the key {surplus[0]}" if surplus else repr(value)
        raise UserError(f"{key} takes class_path and, as one mapping, init_args; got {got}")
    path = value["class_path"]
    module, _, name = path.rpartition(".")
    if not module:
        raise UserError(f"{key}.class_path must look like package.module.Name, got {path}")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, SyntaxError, AttributeError) as error:
        raise UserError(f"{key}.class_path {path} cannot be imported: {error}") from None


def bound_arguments(kind: Any, value: dict[str, Any], key: str, **given: Any) -> dict[str, Any]:
    """The arguments with which ``kind``, of :func:`import_named`, is called: ``given`` and the ``init_args``.

    Raises:
        UserError: it does not take them.
    """
    arguments = {**given, **(value.get("init_args") or {})}
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        names = ", ".join(arguments) or "nothing"
        raise UserError(f"{key}: {full_name(kind)} cannot be called with {names}: {error}") from None
    return arguments


def full_name(kind: Any) -> str:
    """``package.module.Name`` of a class or function."""
    return f"{kind.__module__}.{kind.__qualname__}"
