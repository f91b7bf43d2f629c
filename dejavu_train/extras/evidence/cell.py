"""Units of work: a cell makes rows of one part, and is kept on the disk when it is done."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_json, write_json

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A unit of work. ``seconds`` are estimated. A :class:`UserError` of ``run`` says why there are no rows.

    What can lack, such as data of the hub, is looked up by ``check``, which measures nothing.
    """

    name: str
    seconds: float
    run: Callable[[], Sequence[Row]]
    check: Callable[[], object] = lambda: None


@dataclasses.dataclass
class Work:
    """Cells of a part, and what it leaves out from the start: what, and why."""

    cells: list[Cell] = dataclasses.field(default_factory=list)
    missing: list[tuple[str, str]] = dataclasses.field(default_factory=list)


class Ledger:
    """Cells of one part that are done, in a file that is written aside and renamed.

    Args:
        key: hashes of model and bundle, and the options that decide the rows. A file of another key is begun anew.
    """

    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        self.path, self.key, self.cells = path, dict(key), dict[str, Row]()
        try:
            stored = read_json(path, "the rows of a part")
            self.cells = stored["cells"] if stored["key"] == self.key else {}
        except (UserError, KeyError, TypeError):  # none, or one that somebody has changed
            pass

    def add(self, name: str, rows: Sequence[Row], seconds: float) -> None:
        """Keep the rows of a cell."""
        self.cells[name] = {"rows": list(rows), "seconds": round(seconds, 2)}
        write_json(self.path, {"key": self.key, "cells": self.cells})

    @property
    def seconds(self) -> float:
        """Seconds that all cells took."""
        return float(sum(cell["seconds"] for cell in self.cells.values()))
