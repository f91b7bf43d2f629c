"""Makes Markdown tables from rows: which rows, what names a line, and what each column shows of a line's rows.

A `Table` says it declaratively. `benchmarks.table_specs` has those of the pages.
"""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.rows import is_older

Row = dict[str, Any]
Shown = Callable[[Sequence[Row], str], str]


class NoRows(Exception):
    """A table's file is there, but none of its rows belongs into the table. The text says what is missing."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV or JSONL file, oldest first."""
    text = path.read_text("utf-8")
    lines = text.splitlines()
    rows = [json.loads(line) for line in lines if line] if path.suffix == ".jsonl" else list(csv.DictReader(lines))
    return sorted(rows, key=lambda row: str(row.get("date") or ""))


def percent(value: float) -> str:
    """An increase in per cent. From a thousand per cent on, how many times the dense model's value.

    >>> percent(0.0027), percent(0.1234), percent(9.3), percent(12.3)
    ('+0.27', '+12.3', '+930', '13-fold')
    """
    return f"{1 + value:,.0f}-fold" if value >= 10 else f"{100 * value:+z.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    return 0 if abs(value) >= 1 else 1 if abs(value) >= 0.1 else 2


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def with_error(value: float, error: float | None) -> str:
    """An increase with its error, in per cent.

    >>> with_error(0.1234, 0.011), with_error(0.02, None)
    ('+12.3 ± 1.1', '+2.00')
    """
    told = error is not None and value < 10
    return percent(value) + (f" ± {100 * error:.{_decimals(value)}f}" if told and error is not None else "")


def numbers(rows: Sequence[Row], name: str) -> list[float]:
    """The values of a field where rows have one."""
    return [float(row[name]) for row in rows if row.get(name) not in ("", None)]


def increase(rows: Sequence[Row], name: str) -> str:
    """One increase with its error, or the mean of several seeds with their range."""
    values = numbers(rows, name)
    if len(values) > 1:
        return f"{percent(mean(values))} ({percent(min(values))} to {percent(max(values))})"
    return with_error(values[0], next(iter(numbers(rows, "error")), None)) if values else ""


def shares(rows: Sequence[Row], name: str) -> str:
    """Smallest and largest of some fractions, in per cent."""
    values = numbers(rows, name)
    ends = dict.fromkeys(f"{100 * value:.1f}" for value in (min(values), max(values))) if values else {}
    return " to ".join(ends)


def matches(row: Row, where: Mapping[str, Any]) -> bool:
    """Whether fields of a row are what is asked for: a value, one of a tuple, or what a function finds good."""
    for name, wanted in where.items():
        value = row.get(name, "")
        one_of = value in wanted if isinstance(wanted, tuple) else value == wanted
        if not (wanted(value) if callable(wanted) else one_of):
            return False
    return True


@dataclass(frozen=True)
class Column:
    """What is shown of a line's rows.

    Attributes:
        field: of the newest row that has it, or of the one whose field ``least`` is least.
        where: what a row of the column has.
        form: a format of Python, a function of all rows of the column, or nothing: the field as it stands.
        times: the value is multiplied by this.
        over: another column, whose value is divided by this one's.
    """

    heading: str
    field: str
    where: Mapping[str, Any] = field(default_factory=dict)
    form: str | Shown = ".3g"
    times: float = 1
    unit: str = ""
    least: str = ""
    over: "Column | None" = None

    def rows(self, line: Sequence[Row]) -> list[Row]:
        """The rows of a line that the column shows."""
        found = [row for row in line if matches(row, self.where) and row.get(self.field) not in ("", None)]
        if callable(self.form) or not found:
            return found
        return [min(found, key=lambda row: float(row[self.least]))] if self.least else found[-1:]

    def text(self, line: Sequence[Row]) -> str:
        """The cell of a line. Empty where it has no such row."""
        found = self.rows(line)
        if not found:
            return ""
        if callable(self.form):
            return self.form(found, self.field)
        if not self.form:
            return str(found[0][self.field])
        value = float(found[0][self.field])
        if self.over is not None:
            others = self.over.rows(line)
            if not others:
                return ""
            value = float(others[0][self.over.field]) / value
        return f"{self.times * value:{self.form}}{self.unit}"


@dataclass(frozen=True)
class Table:
    """A table of rows.

    Attributes:
        rows: a file, or a function of the root that returns rows.
        line: heading -> field, which together name a line.
        made: what makes the rows.
        where: what every row has.
        derived: field -> a function of a row, made before anything is asked. In this order.
        chosen: what is left of all rows, where a row alone does not say whether it belongs to the table.
        order: of lines, by their names. None: as the rows come.
        needs: headings of columns without which a line is left out.
        links: the files of the rows, where ``rows`` is a function.
        brief: whether a page shows what makes the rows alone, as README does.
    """

    rows: str | Callable[[Path], list[Row]]
    line: Mapping[str, str]
    columns: tuple[Column, ...]
    made: str
    where: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Row], Any]] = field(default_factory=dict)
    chosen: Callable[[list[Row]], list[Row]] | None = None
    order: Callable[[tuple[Any, ...]], Any] | None = None
    needs: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    brief: bool = False

    def prepared(self, root: Path) -> list[Row]:
        """The rows of the table, with derived fields.

        Raises:
            NoRows: there is none.
        """
        rows = read_rows(root / self.rows) if isinstance(self.rows, str) else self.rows(root)
        for row in rows:
            for name, made in self.derived.items():
                row[name] = made(row)
        rows = [row for row in rows if matches(row, self.where)]
        rows = self.chosen(rows) if self.chosen is not None else rows
        if not rows:
            raise NoRows(f"{self.rows} has no row of the table")
        return rows

    def lines(self, root: Path) -> list[tuple[tuple[Any, ...], list[Row]]]:
        """What names each line, and its rows."""
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.prepared(root):
            found.setdefault(tuple(row.get(name, "") for name in self.line.values()), []).append(row)
        named = sorted(found, key=self.order) if self.order is not None else list(found)
        must = [column for column in self.columns if column.heading in self.needs]
        return [(name, found[name]) for name in named if all(column.text(found[name]) for column in must)]

    def make(self, root: Path) -> str:
        """The Markdown, and a line about the rows."""
        cells, used = [], []
        for name, rows in self.lines(root):
            cells.append([*map(str, name), *(column.text(rows) for column in self.columns)])
            used += [row for column in self.columns for row in column.rows(rows)]
        table = markdown([*self.line, *(column.heading for column in self.columns)], cells)
        return f"{table}\n{about(self, used)}\n"

    def with_columns(self, *columns: Column, **changed: Any) -> "Table":
        """The same rows with other columns."""
        return replace(self, columns=columns, **changed)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its last line ended."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cells)} |".replace("  ", " ") + "\n" for cells in lines)


def about(table: Table, used: Sequence[Row]) -> str:
    """Where the rows stand, what makes them, on which devices, and how many are older than the sources."""
    files = (table.rows,) if isinstance(table.rows, str) else table.links
    links = ", ".join(f"[{Path(name).name}]({name})" for name in files)
    unique = list({id(row): row for row in used}.values())
    if table.brief:
        gpus = sorted({row["device"] for row in unique if row.get("device")})
        return f"Made by {table.made}{' on ' * bool(gpus)}{', '.join(gpus)}."
    devices = sorted({device for row in unique if (device := device_of(row))})
    where = f" {', '.join(devices)}." if devices else ""
    return f"Rows: {links}, by {table.made}.{where}{age(unique)}"


def device_of(row: Row) -> str:
    """The GPU or processor of a row, with the version of torch where the row has one."""
    named = row.get("gpu") or row.get("device") or row.get("cpu") or ""
    torch = str(row.get("torch") or "").partition("+")[0]
    return f"{named}, torch {torch}" if named and torch else str(named)


def age(rows: Sequence[Mapping[str, Any]]) -> str:
    """The mark of rows that measured other sources than those that stand here. Empty for new rows."""
    older = sum(map(is_older, rows))
    return f" {older} of {len(rows)} rows are older than the sources." if older else ""
