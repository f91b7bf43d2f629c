"""Writes rows, dataclasses or mappings of plain values, as CSV, and reads them again."""

import csv
import io
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import write_text

# Name of a column in earlier versions -> its name now, where a row has no field of the earlier name.
EARLIER = {"mlp_density": "asked_mlp_density", "head_density": "asked_head_density"}


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """Fields, or keys, are columns. Floats have six significant digits, None and NaN are empty."""
    made = [row if isinstance(row, Mapping) else vars(row) for row in rows]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(dict.fromkeys(name for row in made for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in made)
    write_text(path, buffer.getvalue())


def read_csv(path: Path, kind: type[Any]) -> list[Any]:
    """The rows of :func:`write_csv` as ``kind``. Columns of earlier versions may have their names of ``EARLIER``.

    Raises:
        UserError: no rows, other columns, or values of another type.
    """
    kinds = typing.get_type_hints(kind)
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        try:
            now = {name: name if name in kinds else EARLIER.get(name, name) for name in reader.fieldnames or ()}
            rows = [kind(**{now[n]: _value(kinds[now[n]], text) for n, text in row.items()}) for row in reader]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path}, line {reader.line_num}: not a row of {kind.__name__} ({error}); measure anew"
            ) from None
    if not rows:
        raise UserError(f"{path} holds no rows; measure anew")
    return rows


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else ""
    return "" if value is None else value


def _value(kind: Any, text: str) -> Any:
    if isinstance(kind, types.UnionType):  # a number or None
        return None if text == "" else _value(typing.get_args(kind)[0], text)
    return float(text or "nan") if kind is float else kind(text)
