"""Reads a results folder, writes report.html: one page that needs no network, with everything that was measured.

    python -m dejavu_train.evaluation.html_report RESULTS_FOLDER [--wandb PROJECT]

Made of the files alone: results.json, and if they lie there observations/ (of papers.deja_vu.observe), generation/
(of extras.generation), tasks/results.json (of extras.tasks) and paper/paper.json (of papers.deja_vu.tables).
So it can be made anew at any time. report.html.jinja is the page, which escapes all text. Pictures are those that lie
there, curve.png among them.
"""

import base64
import csv
import dataclasses
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from dejavu_train.cli.parser import Parser
from dejavu_train.evaluation import report
from dejavu_train.evaluation.report import Table
from dejavu_train.evaluation.schema import read_current
from dejavu_train.evaluation.verdict import verdict
from dejavu_train.ground.errors import UserError, exit_on_user_error, first_line
from dejavu_train.ground.experiments import offline_folder, say_offline
from dejavu_train.ground.files import read_json, write_text
from dejavu_train.ground.progress import set_up_logging

logger = logging.getLogger(__name__)

SHOWN_ROWS = 400  # of a table; the CSV beside it has them all
TASKS = {"tasks/results.json": "Tasks", "paper/paper.json": "The paper's tables that are about tasks"}


@dataclasses.dataclass(frozen=True)
class Observation:
    """One observation of observations.json: its words, its rows, and its picture as a data URI, if it has one."""

    name: str
    title: str
    paper: str
    caption: str
    table: Table
    picture: str | None


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything in a results folder, pictures as data URIs.

    ``curve`` is curve.png. ``observed`` is observations.json, and ``tasks`` the rows of each file of tasks. ``trend``
    is the picture of the paper's Fig. 7. ``generation`` is generation.json with its ``picture`` and its ``table``.
    """

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
    stored_results = read_current(folder)
    observed, observations = None, []
    stored = folder / "observations"
    if (stored / "observations.json").is_file():
        observed = read_json(stored / "observations.json", "observations.json")
        try:
            observations = [_observation(stored, one) for one in observed["observed"]]
        except (KeyError, TypeError, OSError, ValueError) as error:
            raise UserError(
                f"{stored} is not as it was written ({error}); make it anew with python -m papers.deja_vu.observe"
            ) from None
    try:
        tasks = {path: _task_table(folder / path) for path in TASKS if (folder / path).is_file()}
        curve = picture(folder / "curve.png") if stored_results["quality"] else None
        trend, generation = picture(folder / "paper" / "fig7.png"), _generation(folder / "generation")
        return Results(folder, stored_results, curve, observed, observations, tasks, trend, generation)
    except UserError:
        raise
    except (KeyError, OSError, TypeError, AttributeError, ValueError) as error:
        wrong = f"lacks {error}" if isinstance(error, KeyError | OSError) else f"is not as it was written ({error})"
        raise UserError(f"a results file in {folder} {wrong}; make it anew with infer.py") from None


def picture(path: Path) -> str | None:
    """A PNG as a data URI. None where there is no file. Raises ValueError for one that holds no picture."""
    if not path.is_file():
        return None
    data = path.read_bytes()
    if not data.startswith(b"\x89PNG"):
        raise ValueError(f"{path.name} is no PNG")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _observation(folder: Path, one: dict[str, Any]) -> Observation:
    with open(folder / f"{one['name']}.csv", encoding="utf-8", newline="") as file:
        headings, *rows = csv.reader(file)
    cells = [[_rounded(cell) for cell in row] for row in rows]
    drawn = picture(folder / f"{one['name']}.png") if one["picture"] else None
    words = {key: one[key] for key in ("name", "title", "paper", "caption")}
    return Observation(**words, table=Table(one["name"], headings, cells), picture=drawn)


def _rounded(cell: str) -> str:
    """A fraction to four significant digits. The CSV has them all."""
    return f"{float(cell):.4g}" if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", cell) else cell


def _task_table(path: Path) -> Table:
    rows = read_json(path, "the rows of tasks")["rows"]
    return rows_table(TASKS[f"{path.parent.name}/{path.name}"], rows)


def rows_table(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Rows as a table, whatever their columns are, less what was asked for: what was measured stands beside it."""
    headings = [key for key in dict.fromkeys(k for row in rows for k in row) if not key.startswith("asked_")]
    return Table(name, headings, [[_shown(row.get(key)) for key in headings] for row in rows])


def _generation(folder: Path) -> dict[str, Any] | None:
    if not (folder / "generation.json").is_file():
        return None
    stored = read_json(folder / "generation.json", "generation.json")
    drawn, table = picture(folder / "generation.png"), rows_table("Generation", stored["rows"])
    return {**stored, "picture": drawn, "table": table}


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def page(results: Results) -> str:
    """The whole page."""
    stored = results.found
    hashes = stored.get("hashes") or {}
    about = {f"{name} hash": value for name, value in hashes.items() if value} | stored["versions"]
    about |= {f"text {text['name']}": f"sha256 {text['sha256']}" for text in stored["texts"]}
    tables = [table for text in stored["texts"] if (table := report.layer_table(stored, text["name"])).cells]
    values = {"results": results, "about": about, "layer_tables": tables, "verdict": verdict(stored)}
    return rendered("report.html.jinja", task_files=TASKS, **values)


def rendered(template: str, *folders: Path, **values: Any) -> str:
    """A page of a template in one of the folders, or in this one. It may take the macros of sheet.html.jinja."""
    loader, strict = jinja2.FileSystemLoader([*folders, Path(__file__).parent]), jinja2.StrictUndefined
    room = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=strict)
    room.filters["anchor"] = lambda name: re.sub(r"[^a-z0-9]+", "-", name.lower())
    return room.get_template(template).render(report=report, shown_rows=SHOWN_ROWS, **values)


def write_report(folder: str | Path) -> Path:
    """Write report.html into ``folder`` from what lies there. Returns its path. Raises as :func:`read_results`."""
    results = read_results(folder)
    path = results.folder / "report.html"
    write_text(path, page(results))
    return path


def all_tables(results: Results) -> Iterable[Table]:
    """Every table of the page, whole."""
    stored = results.found
    if stored["quality"]:
        yield report.text_table(stored)
        yield report.drift_table(stored)
        for text in stored["texts"]:
            yield report.full_table(stored, text["name"])
            yield report.layer_table(stored, text["name"])
    if stored["timing"]:
        yield report.timing_table(stored)
    yield from results.tasks.values()
    if results.generation is not None:
        yield results.generation["table"]
    yield from (one.table for one in results.observations)


def log_to_wandb(
    results: Results, project: str, numbers: Mapping[str, float] | None = None, record: Any = None
) -> None:
    """Log all tables, and all pictures as PNG, as a run of ``project``. WANDB_MODE=offline keeps it on disk.

    Args:
        numbers: to log beside them, by name.
        record: of the experiment that made the bundle. Its run goes on where it is of the same project.
    Raises:
        UserError: wandb is not installed, or has no key and is not offline.
    """
    try:
        import wandb
    except ImportError:
        raise UserError("--wandb needs wandb: pip install 'dejavu-train[train]'") from None
    before = None if record is None else record.logger("wandb")
    tables = {table.name: wandb.Table(columns=table.headings, data=table.cells) for table in all_tables(results)}
    drawn = [results.folder / "observations" / f"{one.name}.png" for one in results.observations if one.picture]
    pictures = [results.folder / "curve.png", results.folder / "generation" / "generation.png"]
    pictures += [results.folder / "paper" / "fig7.png", *drawn]
    shown = {f"picture {path.stem}": wandb.Image(str(path)) for path in pictures if path.is_file()}
    if before is not None and before["project"] == project:
        run = start_wandb(project, record.path.parent.parent, before)
    else:
        run = start_wandb(project, results.folder, {"config": results.found.get("config")})
    run.log(dict(numbers or {}) | tables | shown)
    folder = offline_folder(run)
    run.finish()
    say_offline(folder)


def start_wandb(project: str, folder: Path, about: Mapping[str, Any]) -> Any:
    """A run of Weights & Biases. One whose id ``about`` holds goes on.

    Args:
        folder: where it lies as long as it is not uploaded.
        about: arguments of ``wandb.init``.
    Raises:
        UserError: it has no key or no network, and is not offline.
    """
    import wandb

    known = {key: value for key, value in about.items() if value is not None and key != "kind"}
    known |= {"resume": "allow"} if "id" in known else {"job_type": "infer"}
    try:
        return wandb.init(**known | {"project": project, "dir": str(folder)})
    except wandb.Error as error:  # no key, or no network
        said = first_line(error)
        raise UserError(f"--wandb: {said} Or set WANDB_MODE=offline, which keeps the run on disk") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Everything the command does. Raises :class:`UserError` for what the user can mend."""
    set_up_logging()
    parser = Parser(prog="python -m dejavu_train.evaluation.html_report", description="Make report.html anew.")
    parser.add_argument("folder", help="which infer.py wrote: it holds results.json")
    parser.add_argument("--wandb", metavar="PROJECT", help="log the tables and pictures there as well")
    given = parser.parse_args(argv)
    logger.info("wrote %s", write_report(given.folder))
    if given.wandb:
        log_to_wandb(read_results(given.folder), given.wandb)


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
