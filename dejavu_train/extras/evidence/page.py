"""Writes rows down: a CSV of each part, pictures, and evidence.html, which needs no network."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejavu_train.evaluation.html_report import picture, rendered, rows_table
from dejavu_train.evaluation.report import Table
from dejavu_train.extras.evidence.cell import Row
from dejavu_train.extras.evidence.picture import draw
from dejavu_train.extras.evidence.verdict import verdict
from dejavu_train.ground.files import replacing, write_text

PAGE = "evidence.html"


def write(found: dict[str, Any], folder: Path) -> Path:
    """Write everything but results.json. Returns the page."""
    shown = {}
    for name, rows in found["rows"].items():
        if rows:
            write_rows(folder / f"{name}.csv", rows)
            drawn = draw(name, rows, folder / name)
            shown[name] = {"tables": tables(name, rows), "picture": picture(folder / f"{name}.png") if drawn else None}
    about = {f"{name} hash": value for name, value in found["hashes"].items() if value} | found["versions"]
    about |= {"machine": f"{found['machine']['name']}, {found['machine']['gb_per_second']} GB/s"}
    about |= {f"seconds of {name}": value for name, value in found["seconds"].items()}
    title = f"{Path(found['model']).name}: evidence"
    values = {"found": found, "shown": shown, "about": about, "verdict": [verdict(found["rows"])], "title": title}
    write_text(folder / PAGE, rendered("evidence.html.jinja", Path(__file__).parent, **values))
    return folder / PAGE


def tables(name: str, rows: Sequence[Row]) -> list[Table]:
    """Tables of a part. Of active neurons the means over the layers stand before all layers."""
    if name != "active":
        return [rows_table(name, rows)]
    means = []
    for text in dict.fromkeys(row["text"] for row in rows):
        own = [row for row in rows if row["text"] == text]
        mean = {key: sum(row[key] for row in own) / len(own) for key in ("nonzero", "needed", "mass_at_20")}
        means.append({"text": text, "layers": len(own), "tokens": own[0]["tokens"]} | mean)
    return [rows_table("means over the layers", means), rows_table("layers", rows)]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Rows as CSV, floats with six significant digits."""
    with replacing(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: f"{each:.6g}" if isinstance(each, float) else each for name, each in row.items()})
