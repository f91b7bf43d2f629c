"""Compare runs of `infer`: what differs between them, quality against bytes and time, as tables and a picture.

    dejavu compare RUN RUN ... [--by SETTING] [--output FOLDER]

A RUN is a folder with results.json. --output writes compare.csv, compare.md, and the picture as .svg and .png.
--by names a setting, such as mlp.rank: runs with the same value of it are one line of the picture.
"""

import argparse
import csv
import functools
import io
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejavu_train.evaluation.figure import STYLES, make_panels, pyplot, save
from dejavu_train.evaluation.report import Table, densities_of
from dejavu_train.evaluation.schema import read_current
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.experiments import Record, record_of
from dejavu_train.ground.files import read_json, write_text
from dejavu_train.ground.progress import set_up_logging
from dejavu_train.ground.table import table

logger = logging.getLogger(__name__)
QUALITY = ("mlp_candidates", "mlp_selected", "head_selected", "mlp_bytes", "mlp_recall", "mlp_retained_mass")
_TIME = ("backend", "ms_per_token", "ms_p20", "ms_p80", "megabytes_per_token")
COLUMNS = ("run", "experiment", "text", "densities", "as_calibrated", *QUALITY, "increase", "increase_error", *_TIME)
_PLACES = {"output", "bundle"}  # settings that always differ: where things lie


@dataclass(frozen=True)
class Run:
    """A folder with results. name: shortest end of its path that no other run has. found: results.json, schema 3."""

    name: str
    folder: Path
    found: Mapping[str, Any]

    @property
    def _bundle(self) -> Path:
        return Path(str(self.found.get("bundle"))) / "bundle.json"

    @functools.cached_property
    def record(self) -> Record | None:
        """The experiment that made the bundle, if it is still there."""
        if not self._bundle.is_file():
            return None
        return record_of(self._bundle.parent, read_json(self._bundle, "the bundle").get("metadata", {}))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of `infer`, calibration and training: as the experiment has them, else as the bundle tells them."""
        settings = {key: value for key, value in (self.found.get("config") or {}).items() if key not in _PLACES}
        for key in ("model", "bundle"):
            settings[f"hash of the {key}"] = (self.found.get("hashes") or {}).get(key)
        if self.record is not None:
            trained = {key: value for key, value in self.record.settings.items() if key not in _PLACES}
            return {key: value for key, value in settings.items() if key not in trained} | trained
        if self._bundle.is_file():
            stored = read_json(self._bundle, "the bundle")
            metadata = stored.get("metadata", {})
            for part in ("stage", "train", "collect"):
                settings |= (metadata.get(part) or {}).get("keys", {})
            for target in stored.get("targets", ()):
                ranks = sorted(
                    {one["rank"] for one in stored["predictors"] if one["target"] == target and "rank" in one}
                )
                settings[f"rank of {target}"] = ", ".join(map(str, ranks))
        return settings

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Rows of a selection from the first position on, where it has an increase."""
        for row in self.found["quality"]:
            if row["selection"] == "predicted" and row["sparse_from"] == 0 and row["increase"] is not None:
                yield row

    def time(self) -> Mapping[str, Any] | None:
        """The fastest sparse row of decoding."""
        sparse = [row for row in self.found["timing"] if not row["backend"].startswith("dense")]
        return min(sparse, key=lambda row: row["ms_per_token"]["p50"], default=None)


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """The runs of folders.

    Raises:
        UserError: fewer than two folders, one that stands twice, no results.json, another schema.
    """
    paths = [Path(folder) for folder in folders]
    if len({path.resolve() for path in paths}) < max(2, len(paths)):
        raise UserError(f"expected at least two different folders of infer, got {' '.join(map(str, paths)) or 'none'}")
    return [Run(name, path, read_current(path)) for path, name in zip(paths, _names(paths), strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    """The fewest last parts of each path that tell all of them apart.

    >>> _names([Path("a/x/eval"), Path("a/y/eval")])
    ['x/eval', 'y/eval']
    """
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def differences(runs: Sequence[Run]) -> Table:
    """Settings that are not the same in all runs. A setting that a run does not have is a dash.

    Each setting is a row, or each run where there are more than three and more than settings.
    """
    settings = [run.settings for run in runs]
    keys = dict.fromkeys(key for each in settings for key in each)
    cells = []
    for key in keys:
        values = ["-" if each.get(key) is None else _short(each[key]) for each in settings]
        if len(set(values)) > 1:
            cells.append([key, *values])
    if len(cells) > 1:  # what differs makes another bundle
        cells = [row for row in cells if row[0] != "hash of the bundle"]
    table = [["setting", *(run.name for run in runs)], *cells]
    if len(runs) > max(3, len(cells)):
        table = [list(column) for column in zip(*table, strict=True)]
        table[0][0] = "run"
    return Table("settings that differ", table[0], table[1:])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:10]}..{text[-10:]}"


def compared_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each run, text and density, in the order of the texts. Time stands at rows of the calibrated density,
    or at the run's first row, since a run times one density."""
    rows = []
    texts = dict.fromkeys(row["text"] for run in runs for row in run.rows())
    for text in texts:
        for run in runs:
            own = [row for row in run.rows() if row["text"] == text]
            time, timed = run.time(), _timed(own, run.time())
            for row in sorted(own, key=lambda row: row["mlp_bytes"]):
                experiment = "" if run.record is None else run.record.id
                values = {"run": run.name, "experiment": experiment, "text": text, "densities": densities_of(row)}
                values |= {"as_calibrated": bool(row.get("as_calibrated"))}
                values |= {key: row.get(key) for key in (*QUALITY, "increase", "increase_error")}
                if time is not None and row is timed:
                    spent = time["ms_per_token"]
                    values |= {"backend": time["backend"], "ms_per_token": spent["p50"]}
                    values |= {"ms_p20": spent.get("p20"), "ms_p80": spent.get("p80")}
                    values["megabytes_per_token"] = time.get("megabytes_per_token")
                rows.append(values)
    return rows


def _timed(rows: Sequence[Mapping[str, Any]], time: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The row of the densities that were timed: those asked for, or the calibrated ones."""
    if time is None:
        return None
    for row in rows:
        pairs: list[Any] = [(time.get(key), row[key]) for key in ("asked_mlp_density", "asked_head_density")]
        if all(None in pair or math.isclose(*pair, rel_tol=0.01) for pair in pairs):  # means over the layers
            if row.get("as_calibrated") or any(asked is not None for asked, _ in pairs):
                return row
    return None


def compared_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows for people."""
    headings = ["run", "text", "densities", "selected", "heads", "mlp bytes", "recall", "mass", "increase", "+-", "ms"]
    cells = [
        [
            *(row[key] for key in ("run", "text", "densities")),
            *(_percent(row[key]) for key in ("mlp_selected", "head_selected", "mlp_bytes", "mlp_recall")),
            *(_percent(row[key]) for key in ("mlp_retained_mass", "increase", "increase_error")),
            _milliseconds(row),
        ]
        for row in rows
    ]
    return Table("quality and time", headings, cells)


def times_table(runs: Sequence[Run]) -> Table:
    """Every row of decoding of every run."""
    headings = ["run", "backend", "device", "batch", "prompt", "ms/token p50", "MB/token"]
    cells = [
        [run.name, time["backend"], time["device"], str(time["batch"]), str(time["prompt"])]
        + [f"{time['ms_per_token']['p50']:.3g}"]
        + ["-" if time.get("megabytes_per_token") is None else f"{time['megabytes_per_token']:.1f}"]
        for run in runs
        for time in run.found["timing"]
    ]
    return Table("decoding", headings, cells)


def _milliseconds(row: Mapping[str, Any]) -> str:
    if row.get("ms_per_token") is None:
        return "-"
    spread = "" if row.get("ms_p20") is None else f" ({row['ms_p20']:.3g} to {row['ms_p80']:.3g})"
    return f"{row['ms_per_token']:.3g}{spread}"


def _percent(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.3g} %"


def warnings(runs: Sequence[Run]) -> list[str]:
    """Why rows may not be comparable: other weights, other text under one name, other machines."""
    lines = []
    if len({(run.found.get("hashes") or {}).get("model") for run in runs}) > 1:
        lines.append("the runs are of different weights: compare increases, not perplexities")
    texts: dict[str, set[Any]] = {}
    for run in runs:
        for text in run.found["texts"]:
            texts.setdefault(text["name"], set()).add((text["sha256"], text["tokens"]))
    lines += [f"{name} is not the same text in all runs" for name, kinds in texts.items() if len(kinds) > 1]
    places = {(time["device"], time["batch"], time["prompt"]) for run in runs if (time := run.time()) is not None}
    if len(places) > 1:
        lines.append("the runs were timed on other devices, batches or prompts")
    return lines


def lines_by(runs: Sequence[Run], setting: str | None) -> dict[str, str]:
    """The line of the picture to which each run belongs, by the run's name: its own, or that of its setting's value.

    Raises:
        UserError: a setting that is the same in all runs, or unknown.
    """
    if setting is None:
        return {run.name: run.name for run in runs}
    values = {run.name: str(run.settings.get(setting, "-")) for run in runs}
    if len(set(values.values())) == 1:
        table = differences(runs)
        named = [cells[0] for cells in table.cells] if table.headings[0] == "setting" else table.headings[1:]
        known = any(setting in run.settings for run in runs)
        wrong = f"--by {setting} is the same in all runs" if known else f"--by {setting} is no setting of these runs"
        raise UserError(f"{wrong}; what differs is {', '.join(named) or 'nothing'}")
    return {run: f"{setting} {value}" for run, value in values.items()}


def draw(rows: Sequence[Mapping[str, Any]], stem: Path, lines: Mapping[str, str]) -> bool:
    """Draw increases against bytes for each text, with errors, and against time where it is known.

    Args:
        lines: the line to which each run's rows belong.

    Returns: False without matplotlib.
    """
    if pyplot() is None:
        return False
    texts = list(dict.fromkeys(row["text"] for row in rows))
    timed = [row for row in rows if row.get("ms_per_token") is not None]
    axes = [(text, "mlp_bytes", [row for row in rows if row["text"] == text]) for text in texts]
    axes += [(text, "ms_per_token", found) for text in texts[:1] if (found := [r for r in timed if r["text"] == text])]
    columns = min(3, len(axes))
    figure, panels = make_panels(columns, 4.5, 3.6, math.ceil(len(axes) / columns))
    styles = dict(zip(dict.fromkeys(lines[row["run"]] for row in rows), _styles(), strict=False))
    for panel, (text, by, found) in zip(panels, axes, strict=False):
        for name, (colour, marker, line) in styles.items():
            of_line = (row for row in found if lines[row["run"]] == name and row[by] is not None)
            own = sorted(of_line, key=lambda row: row[by])
            if own:
                scale = 100 if by == "mlp_bytes" else 1
                x, y = [scale * row[by] for row in own], [100 * row["increase"] for row in own]
                bars = [100 * (row["increase_error"] or 0.0) for row in own]
                spread = None
                if by == "ms_per_token" and all(row["ms_p20"] is not None and row["ms_p80"] is not None for row in own):
                    spread = [[row[by] - row["ms_p20"] for row in own], [row["ms_p80"] - row[by] for row in own]]
                style = {"color": colour, "marker": marker, "linestyle": line, "capsize": 2.5}
                panel.errorbar(x, y, bars, spread, label=name, **style)
        panel.axhline(0, color="0.6", linewidth=0.8)
        panel.set_title(text, loc="left", fontsize=10)
        words = {"mlp_bytes": "MLP bytes of a token, % of dense"}
        panel.set_xlabel(words.get(by, "ms a token, bars from p20 to p80"))
        panel.set_ylabel("increase of perplexity, %")
    for panel in panels[len(axes) :]:
        panel.set_axis_off()
    panels[0].legend(fontsize=8)
    save(figure, stem)
    return True


def _styles() -> Iterator[tuple[str, str, str]]:
    """Colours, markers and lines for any number of runs."""
    for turn in range(1, 1000):
        for colour, marker, line in STYLES:
            yield colour, marker, line if turn == 1 else (":", "--", "-.")[turn % 3]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the comparison, and write it where ``--output`` says."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("dejavu compare", description=__doc__, formatter_class=raw)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a folder in which infer left results.json")
    parser.add_argument("--by", metavar="SETTING", help="runs with the same value of it are one line of the picture")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write compare.csv, .md, .svg and .png there")
    given = parser.parse_args(sys.argv[1:] if argv is None else argv)
    set_up_logging()
    runs = read_runs(given.runs)
    rows = compared_rows(runs)
    if not rows:
        raise UserError("no run scored what its predictors select; run dejavu infer with --text and --mlp_density")
    lines = lines_by(runs, given.by)
    for line in warnings(runs):
        logger.warning("note: %s", line)
    made = (differences(runs), compared_table(rows), times_table(runs))
    parts = [f"{each.name}:\n{table(each.headings, each.cells)}" for each in made]
    print("\n\n".join(parts))
    if given.output is not None:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(rows)
        given.output.mkdir(parents=True, exist_ok=True)
        write_text(given.output / "compare.csv", buffer.getvalue())
        write_text(given.output / "compare.md", "\n\n".join(f"```\n{part}\n```" for part in parts) + "\n")
        drawn = draw(rows, given.output / "compare", lines)
        logger.info("wrote %s/compare.%s", given.output, "csv, .md, .svg and .png" if drawn else "csv and .md")
