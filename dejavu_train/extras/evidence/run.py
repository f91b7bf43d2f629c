"""Walks from a model's name to its evidence: cells of all parts in order, each kept on the disk, then the page."""

import dataclasses
import logging
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers

from dejavu_train.evaluation.provenance import hashes, versions
from dejavu_train.extras.evidence import active, generation, page, quality, speed, tasks, verdict
from dejavu_train.extras.evidence.cell import Cell, Ledger, Row
from dejavu_train.extras.evidence.config import PARTS, EvidenceConfig
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.extras.evidence.variants import FOUR_BITS
from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.ground.files import write_json
from dejavu_train.ground.progress import Progress
from dejavu_train.version import package_version

logger = logging.getLogger(__name__)
SCHEMA = 1
MODULES: dict[str, ModuleType] = {
    "active": active, "speed": speed, "quality": quality, "tasks": tasks, "generation": generation,
}  # fmt: skip
HOUR = 3600.0


@dataclasses.dataclass
class PartRun:
    """A part, its cells in order, and the file that keeps those that are done."""

    name: str
    cells: list[Cell]
    ledger: Ledger
    missing: list[tuple[str, str]]

    @property
    def left(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.name not in self.ledger.cells]

    def look(self) -> None:
        """Leave out the cells whose data lack, before they are begun."""
        for cell in self.left:
            try:
                cell.check()
            except UserError as error:
                self.missing.append((f"{self.name}: {cell.name}", first_line(error)))
                self.cells.remove(cell)

    @property
    def rows(self) -> list[Row]:
        kept = self.ledger.cells
        return [row for cell in self.cells if cell.name in kept for row in kept[cell.name]["rows"]]


def prepare(subject: Subject) -> list[PartRun]:
    """The parts that are asked for, in their order."""
    config, made = subject.config, []
    for name in (name for name in PARTS if name in config.parts):
        module = MODULES[name]
        key = subject.key() | {option: getattr(config, option) for option in module.OPTIONS}
        work = module.work(subject)
        key = {each: list(value) if isinstance(value, tuple) else value for each, value in key.items()}
        ledger = Ledger(Path(config.output) / "parts" / f"{name}.json", key)
        made.append(PartRun(name, work.cells, ledger, list(work.missing)))
    return made


def plan(parts: list[PartRun], subject: Subject) -> str:
    """Hours and bytes of what is left, by part. What the weights take is said beside them."""
    lines, seconds = [], 0.0
    for part in parts:
        own = sum(cell.seconds for cell in part.left)
        seconds += own
        done = len(part.cells) - len(part.left)
        lines.append(f"{part.name}: {len(part.left)} cells left, {done} done, {own / HOUR:.2f} hours")
        lines += [f"  left out, {what}: {why}" for what, why in part.missing]
    if any(FOUR_BITS in cell.name for part in parts for cell in part.left) and subject.quantizing_seconds:
        seconds += subject.quantizing_seconds
        lines.append(f"4 bits: made by gptq first, {subject.quantizing_seconds / HOUR:.2f} hours")
    lines.append(
        f"in all {seconds / HOUR:.2f} hours, {subject.rates.weights / 1e9:.2f} GB of weights in memory,"
        f" {subject.dims.weights / 2e9:.2f} GB in 4 bits"
    )
    if (limit := subject.config.budget) is not None and seconds > limit * HOUR:
        lines.append(f"more than --budget {limit:g}: what comes last is left out, and the page names it")
    return "\n".join(lines)


def run(config: EvidenceConfig) -> Path | None:
    """Everything that the command does. The page, or None with ``--plan``. Raises :class:`UserError` for mistakes."""
    transformers.utils.logging.disable_progress_bar()
    subject = Subject(config)
    parts = prepare(subject)
    if config.plan:
        for part in parts:
            part.look()
        print(plan(parts, subject))
        return None
    if any(part.left for part in parts):
        # A model that cannot be loaded ends here, before anything is written.
        logger.info("weights of %s in %s", config.model, subject.dense.dtype)
    logger.info("%s", plan(parts, subject))
    began, page_path = time.monotonic(), Path()
    total = sum(len(part.cells) for part in parts)
    limit = None if config.budget is None else config.budget * HOUR
    with Progress("evidence", total, "cell", done=total - sum(len(part.left) for part in parts)) as bar:
        for part in parts:
            for cell in part.left:
                bar.describe(f"{part.name}: {cell.name}")
                needs = cell.seconds + (subject.quantizing_seconds if FOUR_BITS in cell.name else 0)
                if limit is not None and time.monotonic() - began + needs > limit:
                    part.missing.append((f"{part.name}: {cell.name}", _over(needs, config)))
                else:
                    _do(part, cell)
                bar.update()
            page_path = write(subject, parts)
    logger.info("wrote %s", page_path)
    print(verdict.verdict({part.name: part.rows for part in parts}))
    return page_path


def _over(seconds: float, config: EvidenceConfig) -> str:
    return f"it takes about {seconds / 60:.2g} minutes, which --budget {config.budget:g} hours does not leave"


def _do(part: PartRun, cell: Cell) -> None:
    """Run a cell and keep its rows. What it refuses is named, and tried again by the next command."""
    began = time.monotonic()
    try:
        rows = cell.run()
    except UserError as error:
        part.missing.append((f"{part.name}: {cell.name}", first_line(error)))
        logger.info("%s: %s is left out: %s", part.name, cell.name, first_line(error))
        return
    part.ledger.add(cell.name, rows, time.monotonic() - began)


def write(subject: Subject, parts: list[PartRun]) -> Path:
    """Write results.json, a CSV of each part, the pictures and the page. Returns the page."""
    config = subject.config
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "model": config.model,
        "bundle": config.bundle,
        "hashes": hashes(config.model, config.revision, config.bundle or None),
        "versions": versions() | {"dejavu_train": package_version()},
        "machine": {"name": subject.machine.name, "gb_per_second": round(subject.machine.bandwidth / 1e9, 1)},
        "config": dataclasses.asdict(config),
        "rows": {part.name: part.rows for part in parts},
        "seconds": {part.name: round(part.ledger.seconds, 1) for part in parts},
        "not_measured": [{"what": what, "why": why} for part in parts for what, why in part.missing],
    }
    not_asked = [name for name in PARTS if name not in config.parts]
    found["not_measured"] += [{"what": name, "why": "not asked for (--parts)"} for name in not_asked]
    folder = Path(config.output)
    write_json(folder / "results.json", found)
    return page.write(found, folder)
