"""Tables of docs/notes/one-source.md: cells before and after kernels became stages, what that saved, registers."""

import math
from pathlib import Path

from benchmarks.merged import LINES, REGISTERS
from benchmarks.tables_format import Row, card, markdown, percent, read_csv

CELLS = "benchmarks/results/alternate.csv"
BEFORE = "11dec66"  # the commit that the cells are compared with
WIDTHS = ("4096", "9216")
ROWS = {"1": "one row", "2": "two rows", "8": "eight rows"}


def _cell(row: Row) -> str:
    options = dict(word.split("=") for word in row["options"].split())
    words = [row["model"].upper(), "4 bits" if "weights" in options else "fp16", ROWS[row["batch"]], row["engine"]]
    if row["engine"] == "sparse":
        share = float(options.get("head_density", 0.5))
        words.append("all heads" if share == 1 else f"{100 * share:.0f} % of the heads")
    return ", ".join(words)


def _change(row: Row) -> str:
    return f"{percent(float(row['change']))} %"


def cells_table(root: Path) -> str:
    """The newest times of each cell on an H200 beside the code of before, its earlier change, and an H100's."""
    rows = [row for row in read_csv(root / CELLS) if row["before_commit"] == BEFORE]
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(_cell(row), {}).setdefault(card(row), []).append(row)
    table, newest = [], []
    for name, of in found.items():
        *earlier, now = of["H200"]
        newest.append(now)
        times = [f"{float(now[key]):.4g}" for key in ("before_ms", "after_ms")]
        spread = f"{100 * float(now['spread']):.2f} %" if now["rounds"] != "1" else ""
        numbers = [*times, _change(now), spread, now["rounds"], now["after_commit"]]
        others = [_change(each[-1]) if each else "" for each in (earlier, of.get("H100", []))]
        table.append([name, *numbers, *others])
    headings = ["cell", "before, ms", "after, ms", "change", "spread", "rounds", "code", "change earlier", "H100"]
    means = {
        kind: math.exp(sum(math.log(1 + float(each["change"])) for each in of) / len(of)) - 1
        for kind, of in (
            ("all", newest),
            ("fp16", [row for row in newest if "weights" not in row["options"]]),
            ("4 bits", [row for row in newest if "weights" in row["options"]]),
        )
        if of
    }
    said = ", ".join(f"{kind} {percent(mean)} %" for kind, mean in means.items())
    slower = [_cell(row) for row in newest if float(row["change"]) > max(0.02, float(row["spread"]))]
    return (
        f"{markdown(headings, table)}\nGeometric means of the change: {said}. Slower by more than 2 % and the spread:"
        f" {len(slower)} of {len(newest)} ({', '.join(slower) or 'none'}).\n"
    )


def lines_table(root: Path) -> str:
    """What each merge changed in kernels/."""
    columns = ("lines", "code", "kernels", "of_device", "of_others")
    table = [
        [row["what"], *(f"{int(row[f'{key}_before']):,} to {int(row[f'{key}_after']):,}" for key in columns)]
        for row in read_csv(root / LINES)
    ]
    headings = ["merge", "all lines", "lines of code", "kernels", "parameters of a device function", "of another one"]
    return markdown(headings, table)


def registers_table(root: Path) -> str:
    """Registers, stack and shared memory of a program, before and after, by width. Equal numbers stand once."""
    rows = read_csv(root / REGISTERS)
    cases: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        words = row["case"].split()
        width = next(word for word in words if word in WIDTHS)
        words.remove(width)
        cases.setdefault((" ".join(words), row["kernel_before"], row["kernel_after"]), {})[width] = row
    table = []
    for (case, before, after), of in cases.items():
        cells = [case, " to ".join(dict.fromkeys((before.strip("_"), after.strip("_"))))]
        for width in WIDTHS:
            cells += [_both(of[width], key) for key in ("registers", "shared")] if width in of else ["", ""]
        table.append(cells)
    spilled = sum(row["stack_after"] != "0" for row in rows), sum(row["stack_before"] != "0" for row in rows)
    more = sum(int(row["registers_after"]) > int(row["registers_before"]) for row in rows)
    fewer = sum(int(row["registers_after"]) < int(row["registers_before"]) for row in rows)
    headings = ["case", "kernel"] + [f"{width}: {what}" for width in WIDTHS for what in ("registers", "shared, B")]
    return (
        f"{markdown(headings, table)}\n{len(rows)} kernels: more registers {more}, fewer {fewer}. With a stack:"
        f" {spilled[1]} before, {spilled[0]} after. Triton {rows[0]['triton']}, commits {BEFORE} and"
        f" {rows[0]['after_commit']}.\n"
    )


def _both(row: Row, key: str) -> str:
    return " to ".join(dict.fromkeys((f"{int(row[f'{key}_{when}']):,}") for when in ("before", "after")))


STAGE_TABLES = {"stage-cells": cells_table, "stage-lines": lines_table, "stage-registers": registers_table}
