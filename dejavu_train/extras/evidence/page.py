"""Writes rows down: a CSV of each part, pictures, and evidence.html, which needs no network."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejavu_train.evaluation.html_report import picture, rendered, rows_table
from dejavu_train.evaluation.report import Table
from dejavu_train.evaluation.rows import write_csv
from dejavu_train.extras.evidence.cell import Row
from dejavu_train.extras.evidence.picture import draw, means
from dejavu_train.extras.evidence.verdict import verdict
from dejavu_train.ground.files import write_text

PAGE = "evidence.html"


def write(found: dict[str, Any], folder: Path) -> Path:
    """Write everything but results.json. Returns the page."""
    shown = {}
    for name, rows in found["rows"].items():
        if rows:
            write_csv(folder / f"{name}.csv", rows)
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
    """Tables of a part. Where a part has many rows, means stand before them."""
    by = {"active": "text", "quality": "variant"}.get(name)
    return ([rows_table(f"means by {by}", means(by, rows))] if by else []) + [rows_table(name, rows)]
