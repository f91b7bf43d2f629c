"""The record of an experiment: one bundle of one run, its settings, what training measured, what ``infer.py`` added.

    experiments/ID.csv      one row a number: name, step, value
    experiments/ID.json     which bundle it is of, which jobs the loggers have, where the loggers wrote

``train.py`` opens an experiment, ``infer.py`` finds it by the bundle and adds perplexities and times. Loggers of a
configuration have one run for each experiment.
"""

import csv
import dataclasses
import hashlib
import io
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dejavu_train.ground.files import read_json, write_json, write_text

logger = logging.getLogger(__name__)

FOLDER = "experiments"  # of a run's output
SETTINGS = "settings/"  # what a setting's name in the CSV begins with
LONGEST_ID = 100  # it is part of a folder's name
Number = tuple[str, int | None, Any]  # name, step, value


@dataclasses.dataclass
class Record:
    """One experiment on disk.

    Args:
        path: of its JSON. The CSV lies beside it.
        bundle: name of the bundle's folder in the output.
        stage: identity of the calibration that made the bundle.
        logged: names of the jobs that the loggers have.
        loggers: what finds a logger's run again, each with a ``kind``.
        done: whether all that training measured is there.
    """

    path: Path
    bundle: str
    stage: str
    logged: list[str] = dataclasses.field(default_factory=list)
    loggers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    done: bool = False

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        """The record at ``path``. None where there is none, or one of another form.

        Raises:
            UserError: no JSON.
        """
        if not path.is_file():
            return None
        stored = read_json(path, "the record of an experiment")
        names = {field.name for field in dataclasses.fields(cls)} - {"path"}
        known = isinstance(stored, dict) and {"bundle", "stage"} <= set(stored) <= names
        return cls(path, **stored) if known else None

    def write(self) -> None:
        """Write it aside and rename it."""
        write_json(self.path, {key: value for key, value in vars(self).items() if key != "path"})

    @property
    def id(self) -> str:
        return self.path.stem

    def logger(self, kind: str) -> dict[str, Any] | None:
        """Facts that find the run of a kind of logger again. None where none was configured."""
        return next((each for each in self.loggers if each.get("kind") == kind), None)

    def numbers(self) -> dict[tuple[str, str], str]:
        """The values of the CSV by name and step."""
        path = self.path.with_suffix(".csv")
        if not path.is_file():
            return {}
        with open(path, newline="", encoding="utf-8") as file:
            return {(row["name"], row["step"]): row["value"] for row in csv.DictReader(file)}

    @property
    def settings(self) -> dict[str, str]:
        """Settings of the run by dotted names, as the CSV has them."""
        return {
            name.removeprefix(SETTINGS): value
            for (name, _), value in self.numbers().items()
            if name.startswith(SETTINGS)
        }

    def add(self, numbers: Iterable[Number]) -> None:
        """Add numbers to the CSV. One that stands there with its name and step is replaced."""
        rows = self.numbers()
        rows |= {(name, "" if step is None else str(step)): str(value) for name, step, value in numbers}
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(("name", "step", "value"))
        writer.writerows((*key, value) for key, value in rows.items())
        write_text(self.path.with_suffix(".csv"), buffer.getvalue())


def record_of(bundle: str | Path, metadata: Mapping[str, Any]) -> Record | None:
    """The experiment that made a bundle, if it lies in its run's folder still.

    Args:
        bundle: the bundle's folder, or its id on the hub.
        metadata: of the bundle.
    """
    stage = metadata.get("stage")
    identity = stage.get("identity") if isinstance(stage, dict) else None
    folder = Path(bundle)
    for path in sorted((folder.parent / FOLDER).glob("*.json")) if folder.is_dir() else ():
        record = Record.read(path)
        if record is not None and (record.bundle, record.stage) == (folder.resolve().name, identity):
            return record
    return None


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names.

    >>> flattened({"mlp": {"rank": 8}, "seed": 0})
    {'mlp.rank': 8, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= (
            flattened(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
        )
    return flat


def clean_id(text: str) -> str:
    """``text`` as an id that wandb and a folder's name take. Texts that differ stay different.

    >>> clean_id("mine-0a1b"), clean_id("50%_a#b")
    ('mine-0a1b', '50-_a-b-9ac0dad6')
    """
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:LONGEST_ID]
    if cleaned == text:
        return text
    return f"{cleaned}-{hashlib.sha256(text.encode()).hexdigest()[:8]}".lstrip("-")


def use_wandb_offline_without_key() -> None:
    """Without a key wandb would ask for one. A run that nobody watches must not wait."""
    os.environ.setdefault("WANDB_SILENT", "true")
    if not has_wandb_key():
        os.environ.setdefault("WANDB_MODE", "offline")


def offline_folder(run: Any) -> Path | None:
    """Where a run of wandb lies that was not uploaded. None for one that is, and for other loggers' experiments."""
    folder = getattr(run, "dir", None)
    if not getattr(run, "offline", False) or not isinstance(folder, str):
        return None
    return Path(folder).parent  # of the folder files


def say_offline(folder: Path | None) -> None:
    """Where such a run lies, and how it is uploaded. Nothing for None."""
    if folder is not None:
        logger.info("Weights & Biases ran offline: the run lies in %s, and `wandb sync %s` uploads it", folder, folder)


def has_wandb_key() -> bool:
    """Whether a key lies in the environment or in the file that ``wandb login`` writes."""
    if "WANDB_API_KEY" in os.environ:
        return True
    netrc = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))  # "~" stays where nobody knows a home
    try:
        return "wandb.ai" in netrc.read_text(errors="ignore")
    except OSError:
        return False  # none, or one that we may not read
