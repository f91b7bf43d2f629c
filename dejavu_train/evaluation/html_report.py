"""Reads a results folder, writes report.html: one page that needs no network, with everything that was measured.

    python -m dejavu_train.evaluation.html_report RESULTS_FOLDER [--wandb PROJECT]

Made of the files alone: results.json, and if they lie there observations/ (of papers.deja_vu.observe), generation/
(of evaluation.generation), tasks/results.json (of evaluation.lm_eval) and paper/paper.json (of papers.deja_vu.tables).
So it can be made anew at any time. All text is escaped; the one script sorts tables.
"""

import argparse
import csv
import dataclasses
import html
import logging
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dejavu_train.errors import UserError, exit_on_user_error
from dejavu_train.evaluation import report
from dejavu_train.evaluation.picture import plot_curves
from dejavu_train.evaluation.report import Table
from dejavu_train.files import read_json, write_text

logger = logging.getLogger(__name__)

SHOWN_ROWS = 400  # of a table; the CSV beside it has them all
LONG = 40  # rows of a table of tasks, from which on it is folded
TASKS = {"tasks/results.json": "Tasks", "paper/paper.json": "The paper's tables that are about tasks"}

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 78rem; margin: 2rem auto;
  padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { margin-top: 2.6rem; border-bottom: 2px solid #0072B2; }
h3 { margin: 2rem 0 .3rem; } nav a { margin-right: 1rem; } a { color: #005a8e; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #555; vertical-align: bottom; }
tbody tr:hover { background: #f0f6fa; } caption { text-align: left; font-weight: 600; padding: .3rem 0; }
thead button { font: inherit; font-weight: 600; background: none; border: 0; padding: 0; cursor: pointer;
  color: #005a8e; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
figure { margin: .6rem 0 .8rem; } figure svg { max-width: 100%; height: auto; }
figcaption { max-width: 60rem; color: #444; }
.paper { color: #555; font-weight: 400; font-size: .9rem; } details { margin: .6rem 0; } summary { cursor: pointer; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; } dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; } code { font-size: .86em; }
@media print { nav, details:not([open]) { display: none; } body { max-width: none; font-size: 10pt; }
  figure, tr { break-inside: avoid; } }
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const value = (row, column) => row.cells[column].textContent.trim();
  const number = (text) => {  // "x 13" is a multiple among percentages
    const found = parseFloat(text.replaceAll(",", "").replace(/^x /, ""));
    return text.startsWith("x ") ? 100 * (found - 1) : found;
  };
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const [x, y] = [value(a, column), value(b, column)], [p, q] = [number(x), number(y)];
        const order = isNaN(p) || isNaN(q) ? x.localeCompare(y) : p - q;
        return falling ? -order : order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}
"""


@dataclasses.dataclass(frozen=True)
class Observation:
    """One observation of observations.json: its words, its rows, and its picture as SVG, if it has one."""

    name: str
    title: str
    paper: str
    caption: str
    table: Table
    svg: str | None


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything in a results folder. ``observed`` is observations.json, ``tasks`` the rows of each file of tasks,
    ``trend`` the picture of the paper's Fig. 7 as SVG, ``generation`` generation.json with its picture as ``svg``."""

    folder: Path
    found: dict[str, Any]
    curve: str | None
    observed: dict[str, Any] | None
    observations: list[Observation]
    tasks: dict[str, Table]
    trend: str | None
    generation: dict[str, Any] | None


def read_results(folder: str | Path) -> Results:
    """Read what lies in ``folder``.

    Raises:
        UserError: no results.json, or a file that is not what it should be.
    """
    folder = Path(folder)
    found = read_json(folder / "results.json", "results.json (python infer.py writes it)")
    if not isinstance(found, dict) or found.get("schema") != report.SCHEMA:
        raise UserError(f"{folder / 'results.json'} is not of schema {report.SCHEMA}; make it anew with infer.py")
    observed, observations = None, []
    stored = folder / "observations"
    if (stored / "observations.json").is_file():
        observed = read_json(stored / "observations.json", "observations.json")
        try:
            observations = [_observation(stored, one) for one in observed["observed"]]
        except (KeyError, TypeError, OSError, ValueError) as error:
            raise UserError(f"{stored} is not as it was written ({error}); observe anew") from None
    try:
        tasks = {path: _task_table(folder / path) for path in TASKS if (folder / path).is_file()}
        drawn = folder / "paper" / "fig7.svg"
        trend = _svg(drawn) if drawn.is_file() else None
        generation = _generation(folder / "generation")
        return Results(folder, found, _curve(found), observed, observations, tasks, trend, generation)
    except UserError:
        raise
    except (KeyError, OSError) as error:
        raise UserError(f"a results file in {folder} lacks {error}; make it anew") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise UserError(f"a results file in {folder} is not as it was written ({error}); make it anew") from None


def _svg(path: Path) -> str:
    """Raises ValueError for a file that holds no picture."""
    text = path.read_text(encoding="utf-8")
    if "<svg" not in text:
        raise ValueError(f"{path.name} is no SVG")
    return text


def _observation(folder: Path, one: dict[str, Any]) -> Observation:
    with open(folder / f"{one['name']}.csv", encoding="utf-8", newline="") as file:
        headings, *rows = csv.reader(file)
    cells = [[_rounded(cell) for cell in row] for row in rows]
    svg = _svg(folder / f"{one['name']}.svg") if one["picture"] else None
    words = {key: one[key] for key in ("name", "title", "paper", "caption")}
    return Observation(**words, table=Table(one["name"], headings, cells), svg=svg)


def _rounded(cell: str) -> str:
    """A fraction to four significant digits; the CSV has them all."""
    return f"{float(cell):.4g}" if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", cell) else cell


def _task_table(path: Path) -> Table:
    rows = read_json(path, "the rows of tasks")["rows"]
    return _rows_table(TASKS[f"{path.parent.name}/{path.name}"], rows)


def _rows_table(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Rows as a table, whatever their columns are, less what was asked for: what was measured stands beside it."""
    headings = [key for key in dict.fromkeys(k for row in rows for k in row) if not key.startswith("asked_")]
    return Table(name, headings, [[_shown(row.get(key)) for key in headings] for row in rows])


def _generation(folder: Path) -> dict[str, Any] | None:
    if not (folder / "generation.json").is_file():
        return None
    found = read_json(folder / "generation.json", "generation.json")
    svg = _svg(folder / "generation.svg") if found["picture"] else None
    return {**found, "svg": svg, "table": _rows_table("Generation", found["rows"])}


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _curve(found: dict[str, Any]) -> str | None:
    """The picture of the quality rows as SVG; None without rows or without matplotlib."""
    if not found["quality"]:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curve.svg"
        return path.read_text(encoding="utf-8") if plot_curves(found, path) else None


def page(results: Results) -> str:
    """The whole page."""
    found = results.found
    sections = {
        "Run": _run(found),
        "Quality": _quality(results),
        "Layers": _layers(found),
        "Tasks": _tasks(results),
        "Generation": _generated(results),
        "Timing": _timing(found),
        "Observations": _observations(results),
        "Not measured": _missing(results),
    }
    sections = {name: body for name, body in sections.items() if body}
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in sections)
    body = "".join(
        f'<section id="{_anchor(name)}"><h2>{name}</h2>{content}</section>' for name, content in sections.items()
    )
    title = f"{_text(Path(found['model']).name)}: results"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>"
        f"<p>Model <code>{_text(found['model'])}</code>, bundle <code>{_text(found['bundle'])}</code></p>"
        f"<nav>{links}</nav>{body}<script>{SCRIPT}</script></body></html>\n"
    )


def _run(found: dict[str, Any]) -> str:
    hashes = found.get("hashes") or {}
    about = {f"{name} hash": value for name, value in hashes.items() if value} | found["versions"]
    about |= {f"text {text['name']}": f"sha256 {text['sha256']}" for text in found["texts"]}
    config = found.get("config")
    return _pairs(about) + (_folded("configuration", _pairs(config)) if config else "")


def _quality(results: Results) -> str:
    found = results.found
    if not found["quality"]:
        return ""
    parts = [_table(report.text_table(found)), _table(report.drift_table(found), sortable=True)]
    if results.curve:
        caption = "Increase of perplexity against the share of neurons that is selected, a panel for each text."
        parts.append(_figure("curve", "Perplexity of the sparse model over the dense one", results.curve, caption))
    for text in found["texts"]:
        full = report.full_table(found, text["name"])
        parts.append(_folded(f"{full.name} ({len(full.cells)})", _table(full, sortable=True)))
    return "".join(parts)


def _layers(found: dict[str, Any]) -> str:
    made = [report.layer_table(found, text["name"]) for text in found["texts"]]
    tables = [_table(one, sortable=True) for one in made if one.cells]
    return "".join([tables[0], *(_folded(made[i].name, one) for i, one in enumerate(tables[1:], 1))]) if tables else ""


def _tasks(results: Results) -> str:
    """Every table; a long one is folded beneath its means and perplexities."""
    parts = []
    if results.tasks and results.trend is not None:
        caption = "Mean accuracy and perplexities over the share of all blocks' weights not read; bars: paired errors."
        parts.append(_figure("fig7", "Tasks over sparsity", results.trend, caption))
    for table in results.tasks.values():
        short = [row for row in table.cells if "mean" in row or "perplexity" in row]
        if len(table.cells) > LONG and short:
            parts.append(_table(dataclasses.replace(table, cells=short), sortable=True))
            parts.append(_folded(f"all rows ({len(table.cells)})", _table(table, sortable=True)))
        else:
            parts.append(_table(table, sortable=True))
    return "".join(parts)


def _generated(results: Results) -> str:
    made = results.generation
    if made is None:
        return ""
    config, text = made["config"], made["text"]
    prompts = f"{config['prompts']} prompts of {config['prompt']} tokens of {_text(text['name'])}"
    about = f"<p>{prompts} (set {_text(text['set_name'] or 'all')}), {config['new_tokens']} new tokens each.</p>"
    folded = _folded("configuration and versions", _pairs(made["versions"] | made["hashes"] | config))
    picture = ""
    if made["svg"] is not None:
        caption = (
            "When continuations part from the dense model's, what they lose under it by position, and what a guard's"
            " dense tokens gain."
        )
        picture = _figure("generation", "Generation under sparsity", made["svg"], caption)
    return about + folded + picture + _table(made["table"], sortable=True)


def _timing(found: dict[str, Any]) -> str:
    if not found["timing"]:
        return ""
    read = found.get("read_gb_s")
    note = f"<p>This machine reads memory at {read:.1f} GB/s.</p>" if read else ""
    return _table(report.timing_table(found), sortable=True) + note


def _observations(results: Results) -> str:
    if results.observed is None:
        return ""
    observed = results.observed
    text = observed["text"]
    read = ""
    if text is not None:
        read = (
            f"{text['tokens']:,} tokens of {text['documents']} documents of {_text(text['name'])}"
            f" (set {_text(text['set_name'] or 'all')}), windows of {text['window']}; "
        )
    parts = [
        f"<p>{read}{_text(observed['device'])}.</p>",
        _folded("configuration and versions", _pairs(observed["versions"] | observed["hashes"] | observed["config"])),
    ]
    for one in results.observations:
        parts.append(f'<h3>{_text(one.title)} <span class="paper">{_text(one.paper)}</span></h3>')
        table = _table(one.table, sortable=True)
        if one.svg is None:
            parts.append(f"<p>{_text(one.caption)}</p>{table}")
        else:
            parts.append(_figure(one.name, one.title, one.svg, one.caption))
            parts.append(_folded(f"rows ({len(one.table.cells)})", table))
    return "".join(parts)


def _missing(results: Results) -> str:
    """What could not be measured, and why; nothing is left out in silence."""
    found = results.found
    missing = [(one["what"], one["why"]) for one in found.get("not_measured") or []]
    if not found["quality"]:
        missing.append(("quality", "no token was scored (--tokens 0)"))
    elif results.curve is None:
        missing.append(("picture of the quality", "matplotlib is not installed (pip install matplotlib)"))
    if not found["timing"]:
        missing.append(("decode timing", "nothing was timed (--timing)"))
    if not found["layers"] and found["quality"]:
        missing.append(("figures per layer", "no predicted row was scored"))
    if results.observed is None:
        missing.append(("observations", "not made: python -m papers.deja_vu.observe makes them"))
    else:
        missing += [(one["what"], one["why"]) for one in results.observed["not_measured"]]
    if results.generation is None:
        missing.append(("generation under sparsity", "not made: infer.py --generation makes it"))
    missing += [
        (title, f"there is no {path} in the folder") for path, title in TASKS.items() if path not in results.tasks
    ]
    return "<ul>" + "".join(f"<li><b>{_text(what)}</b>: {_text(why)}</li>" for what, why in missing) + "</ul>"


def _table(table: Table, sortable: bool = False) -> str:
    around = ("<button type=button>", "</button>") if sortable else ("", "")
    head = "".join(f"<th scope=col>{around[0]}{_text(name)}{around[1]}</th>" for name in table.headings)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in table.cells[:SHOWN_ROWS]
    )
    more = len(table.cells) - SHOWN_ROWS
    note = f"<p>{more:,} more rows stand in {_text(table.name)}.csv.</p>" if more > 0 else ""
    kind = " class=sortable" if sortable else ""
    return (
        f'<div class="wide"><table{kind}><caption>{_text(table.name)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _figure(name: str, title: str, svg: str, caption: str) -> str:
    drawn = inline_svg(svg, name, title)
    return f'<figure id="picture-{_anchor(name)}">{drawn}<figcaption>{_text(caption)}</figcaption></figure>'


def inline_svg(svg: str, name: str, title: str) -> str:
    """An SVG file as a part of a page: without its prologue, its ids prefixed so that no two pictures share one.

    >>> inline_svg('<?xml?><svg a="b"><g id="x"/><use xlink:href="#x" clip-path="url(#x)"/></svg>', "n", "T")
    '<svg role="img" aria-label="T" a="b"><g id="n-x"/><use xlink:href="#n-x" clip-path="url(#n-x)"/></svg>'
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'href="#', f'href="#{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    return body.replace("<svg", f'<svg role="img" aria-label="{_text(title)}"', 1).rstrip()


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{_text(summary)}</summary>{body}</details>"


def _pairs(values: dict[str, Any]) -> str:
    rows = (f"<dt>{_text(name)}</dt><dd><code>{_text(value)}</code></dd>" for name, value in values.items())
    return f"<dl>{''.join(rows)}</dl>"


def _text(value: Any) -> str:
    return html.escape(str(value))


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def write_report(folder: str | Path) -> Path:
    """Write report.html into ``folder`` from what lies there; returns its path. Raises as :func:`read_results`."""
    results = read_results(folder)
    path = results.folder / "report.html"
    write_text(path, page(results))
    return path


def all_tables(results: Results) -> Iterable[Table]:
    """Every table of the page, whole."""
    found = results.found
    if found["quality"]:
        yield report.text_table(found)
        yield report.drift_table(found)
        for text in found["texts"]:
            yield report.full_table(found, text["name"])
            yield report.layer_table(found, text["name"])
    if found["timing"]:
        yield report.timing_table(found)
    yield from results.tasks.values()
    if results.generation is not None:
        yield results.generation["table"]
    yield from (one.table for one in results.observations)


def log_to_wandb(results: Results, project: str) -> None:
    """Log all tables, and all pictures as PNG, as one run of ``project``; WANDB_MODE=offline keeps it on disk.

    Raises:
        UserError: wandb is not installed, or has no key and is not offline.
    """
    try:
        import wandb
    except ImportError:
        raise UserError("--wandb needs wandb: pip install 'dejavu-train[train]'") from None
    try:
        run = wandb.init(project=project, dir=str(results.folder), job_type="infer", config=results.found.get("config"))
    except wandb.errors.UsageError as error:
        raise UserError(f"--wandb: {error} Or set WANDB_MODE=offline, which keeps the run on disk") from None
    tables = {table.name: wandb.Table(columns=table.headings, data=table.cells) for table in all_tables(results)}
    drawn = [results.folder / "observations" / f"{one.name}.png" for one in results.observations if one.svg]
    pictures = [results.folder / "curve.png", results.folder / "generation" / "generation.png"]
    pictures += [results.folder / "paper" / "fig7.png", *drawn]
    run.log(tables | {f"picture {path.stem}": wandb.Image(str(path)) for path in pictures if path.is_file()})
    run.finish()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def main(argv: Sequence[str] | None = None) -> None:
    """Everything the command does. Raises :class:`UserError` for what the user can mend."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = _Parser(prog="python -m dejavu_train.evaluation.html_report", description="Make report.html anew.")
    parser.add_argument("folder", help="which infer.py wrote: it holds results.json")
    parser.add_argument("--wandb", metavar="PROJECT", help="log the tables and pictures there as well")
    given = parser.parse_args(argv)
    logger.info("wrote %s", write_report(given.folder))
    if given.wandb:
        log_to_wandb(read_results(given.folder), given.wandb)


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
