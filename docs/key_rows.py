"""Rows of the page of configuration keys, made from the dataclasses of commands."""

import dataclasses
import importlib

from docstring_parser import parse_from_object


def key_rows(path: str, prefix: str = "") -> list[tuple[str, str, str]]:
    """Key, default and meaning of each field of a configuration class, as ``--help`` has them.

    Args:
        path: of the class, as PACKAGE.MODULE.CLASS. prefix: of its keys, without the dot.
    """
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    said: dict[str, str] = {}
    for base in reversed(kind.__mro__):  # a docstring stands in the class that has the field, which may be a base
        if dataclasses.is_dataclass(base):
            said |= {each.arg_name: each.description for each in parse_from_object(base).params if each.description}
    rows = []
    for field in dataclasses.fields(kind):
        shown = not dataclasses.is_dataclass(field.default) and field.default not in (dataclasses.MISSING, "")
        default = "null" if field.default is None else str(field.default)
        meaning = said.get(field.name, "").replace("``", "`").replace("|", "or").replace("<", "&lt;")
        rows.append(
            (f"{prefix}.{field.name}" if prefix else field.name, default if shown else "", " ".join(meaning.split()))
        )
    return rows
