"""What the fields of a dataclass may hold, by their types: sections, mappings, lists, and a type in words."""

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any


def fields_of(kind: type[Any], prefix: str = "") -> tuple[set[str], dict[str, Any]]:
    """The dotted names of a dataclass's sections, and of its other fields with their types."""
    sections: set[str] = set()
    values: dict[str, Any] = {}
    for name, hint in hints_of(kind):
        if (section := section_of(hint)) is not None:
            inner = fields_of(section, f"{prefix}{name}.")
            sections |= {prefix + name, *inner[0]}
            values |= inner[1]
        else:
            values[prefix + name] = hint
    return sections, values


def hints_of(kind: type[Any]) -> Iterable[tuple[str, Any]]:
    return typing.get_type_hints(kind).items()


def section_of(hint: Any) -> Any:
    """The dataclass that a field holds, where it is a section: always, or unless it is null."""
    return next((part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)), None)


def is_list(kind: Any) -> bool:
    return item_of(kind) is not None


def is_mapping(kind: Any) -> bool:
    return any(typing.get_origin(part) is dict for part in (kind, *typing.get_args(kind)))


def may_be(value: Any, kind: Any) -> bool:
    """Whether a value for a field that takes mappings is one, or null where it may be.

    A field that takes text as well is left to jsonargparse, which says more.
    """
    others = () if typing.get_origin(kind) is dict else typing.get_args(kind)
    return isinstance(value, dict) or type(value) in others or str in others


def item_of(kind: Any) -> Any:
    """The type of a list's items. None for other types. ``str | tuple[str, ...]`` is a list too."""
    for part in (kind, *typing.get_args(kind)):
        if typing.get_origin(part) is tuple:
            return typing.get_args(part)[0]
    return None


def described(kind: Any) -> str:
    """A type in words."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else str(parts[0])
    if origin in (types.UnionType, typing.Union):
        return " or ".join(described(part) for part in parts)
    if origin is tuple:
        return f"a list, each item {described(parts[0])}"
    if origin is dict:
        return "a mapping"
    return {int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}.get(kind, "text")
