"""Launch settings of the kernels, looked up in a JSON file for each GPU model (`kernels/settings`).

    {"gpus": ["H200"], "multiprocessors": 132,
     "stages": {"screen": {"float": [{"for": {"d": [null, 3072]}, "use": {"programs": 3, "rows": 8, "warps": 4}}, ..]}}}

A stage is a subclass of `Settings`, a format how the stage's matrix is stored ("float": every dtype that is not named).
Of its rows the first one counts whose conditions a launch meets. A pair is a range with both ends within, where null is
open. Anything else is compared. "programs" are those of one multiprocessor, so that no row depends on their number.
Loads no Triton.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from dejavu_train.kernels.common.checks import INTERPRET

FOLDER = Path(__file__).resolve().parent.parent / "settings"
OTHER, INTERPRETER = "other.json", "interpreter.json"  # of GPUs without a file of their own, and of none
FLOATS = ("float64", "float32", "float16", "bfloat16")
Values = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class SettingsRow:
    """conditions: of a shape. values: of the fields of a stage's settings."""

    conditions: Mapping[str, Any]
    values: Values

    def meets(self, shape: Mapping[str, Any]) -> bool:
        """Whether a shape, which has every name that the conditions have, meets them."""
        return all(_meets(wanted, shape[name]) for name, wanted in self.conditions.items())


def _meets(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, list):
        least, most = wanted
        return (least is None or least <= value) and (most is None or value <= most)
    return bool(wanted == value)


@dataclasses.dataclass(frozen=True)
class SettingsFile:
    """One file. digest: of its bytes. gpus: words of device names. multiprocessors: of the GPU that it was written on,
    0 where that was none."""

    name: str
    digest: str
    gpus: tuple[str, ...]
    multiprocessors: int
    stages: Mapping[str, Mapping[str, Sequence[SettingsRow]]]

    @classmethod
    def read(cls, path: Path) -> "SettingsFile":
        """Raises ValueError, which names the file, where it is not as the module's docstring says."""
        data = path.read_bytes()
        try:
            found = json.loads(data)
            stages = {
                stage: {
                    name: tuple(SettingsRow(row["for"], row["use"]) for row in rows) for name, rows in formats.items()
                }
                for stage, formats in found["stages"].items()
            }
            gpus, number = tuple(found["gpus"]), int(found["multiprocessors"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a file of launch settings ({error!r})") from error
        return cls(path.name, hashlib.sha256(data).hexdigest()[:12], gpus, number, stages)

    def rows(self, stage: str, format: str) -> Sequence[SettingsRow]:
        """Rows of a stage and a format, in order. Raises ValueError where there are none."""
        formats = self.stages.get(stage, {})
        rows = formats.get(format) or (formats.get("float") if format in FLOATS else None)
        if not rows:
            raise ValueError(f"{self.name} has no settings of stage {stage}, format {format}")
        return rows

    def values(self, stage: str, format: str, shape: Mapping[str, Any]) -> Values:
        """Values of the first row that a shape meets. Raises ValueError where there is none."""
        for row in self.rows(stage, format):
            if row.meets(shape):
                return row.values
        raise ValueError(f"{self.name}: no row of stage {stage}, format {format} is for {dict(shape)}")

    def __str__(self) -> str:
        """The name and the digest, as an engine's description has them."""
        return f"{self.name} {self.digest}"


@functools.cache
def committed_files() -> Mapping[str, SettingsFile]:
    """Every file of this installation by its name."""
    return {path.name: SettingsFile.read(path) for path in sorted(FOLDER.glob("*.json"))}


def words_of(gpu: str) -> list[str]:
    """Words of a GPU's name.

    >>> words_of("NVIDIA A100-SXM4-80GB")
    ['NVIDIA', 'A100', 'SXM4', '80GB']
    """
    return re.findall(r"\w+", gpu)


def file_for(gpu: str | None) -> SettingsFile:
    """The file of a GPU's name as the driver tells it, by whole words. None = no GPU, under Triton's interpreter."""
    files = committed_files()
    if gpu is None:
        return files[INTERPRETER]
    own = [file for file in files.values() if set(file.gpus) & set(words_of(gpu))]
    return own[0] if own else files[OTHER]


@functools.cache
def settings_file(device: torch.device) -> SettingsFile:
    """The file that launches on a device take their settings from."""
    return file_for(None if INTERPRET or device.type != "cuda" else torch.cuda.get_device_name(device))


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Question of a launch. shape: pairs in the order of names."""

    stage: str
    format: str
    shape: tuple[tuple[str, Any], ...]


_tried: dict[str, Values] = {}


@contextmanager
def tried(stage: str, values: Values) -> Iterator[None]:
    """Within, every launch of a stage has these values, whatever its shape."""
    before = _tried.copy()
    _tried[stage] = values
    try:
        yield
    finally:
        _tried.clear()
        _tried.update(before)


class Settings:
    """Launch settings of a stage: a frozen dataclass with the fields that its rows give."""

    stage: ClassVar[str]
    kinds: ClassVar[dict[str, type["Settings"]]] = {}  # by their stages, of the modules that are loaded

    def __init_subclass__(cls, stage: str) -> None:
        cls.stage = stage
        Settings.kinds[stage] = cls

    @classmethod
    def find(cls, format: str, device: torch.device, **shape: int | bool | str) -> Self:
        """Settings of a launch.

        format: how the stage's matrix is stored, as `formats.format.Format` names it. shape: what rows have conditions
        for. Raises ValueError where no row is for it.
        """
        asked = Lookup(cls.stage, format, tuple(sorted(shape.items())))
        return cls(**(_tried.get(cls.stage) or values_for(asked, device)))

    def in_use(self) -> AbstractContextManager[None]:
        """Within, every launch of the stage has these."""
        return tried(self.stage, vars(self))


@functools.cache
def values_for(asked: Lookup, device: torch.device) -> Values:
    """Values in the device's file."""
    return settings_file(device).values(asked.stage, asked.format, dict(asked.shape))


def forget_settings() -> None:
    """For who changes the file of a device: what was looked up is looked up anew."""
    values_for.cache_clear()
