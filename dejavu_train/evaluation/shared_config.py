"""The keys that commands of a model and its bundle share, with their defaults. Readable without torch."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from dejavu_train.bundle.folder import METADATA, PREDICTORS_FOLDER, beside, named_model
from dejavu_train.data.text import TextSource
from dejavu_train.ground.errors import UserError
from dejavu_train.models.installed import installed

DEFAULT = "checkpoints/demo/bundle"
TEXT_SET = "test"  # of a text that is split: nothing was trained or chosen on it
_CONSTANTS: dict[str, Any] = {"text_set": TEXT_SET}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which model is run with which bundle, and on what."""

    RESULTS = ""  # the folder of results within the one that the bundle's lies in
    EXACT = False  # whether a model runs without a bundle as well

    model: str = ""
    """Folder or hub id of a model that docs/guides/families.md lists. Empty: the one that the bundle was made for."""
    bundle: str = ""
    """Folder or hub id of predictors and thresholds, as train.py writes them. Empty: those in the model's folder, and
    without a model checkpoints/demo/bundle. infer.py also runs a model that has none, exactly."""
    output: str = ""
    """Folder of results. Empty: beside the bundle's folder, for a bundle of the hub in checkpoints/NAME. Within it the
    folder tasks is of dejavu tasks. Results of an earlier run of infer.py there are kept under another name."""
    device: str = "auto"
    """Name of the device: auto, cpu, cuda or cuda:N."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of the weights."""

    def __post_init__(self) -> None:
        if self.bundle == "":
            object.__setattr__(self, "bundle", self._found_bundle())
        if not self.output and self.bundle:
            object.__setattr__(self, "output", beside(self.bundle, self.RESULTS))
        elif not self.output and self.bundle == "":
            object.__setattr__(self, "output", f"checkpoints/{Path(self.model).name}-exact")
        if self.bundle:
            object.__setattr__(self, "bundle", installed(self.bundle))
        object.__setattr__(self, "model", installed(self.model) or named_model(self.bundle))

    def _found_bundle(self) -> str:
        """The bundle where none is named. "" for a model that runs without one."""
        if not self.model:
            return DEFAULT
        within = Path(installed(self.model)) / PREDICTORS_FOLDER
        if (within / METADATA).is_file():
            return str(within)
        if not self.EXACT:
            raise UserError(f"{self.model} holds no predictors; give --bundle FOLDER, or train some with train.py")
        return ""


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """Which text is read. Of one that is split, such as that of training or a hub dataset, the test set."""

    CONSTANTS = _CONSTANTS

    seed: int = 0
    """Seed of what is drawn at random, and of the order of documents."""
    text_config: str | None = None
    """Configuration of a hub dataset, for instance en."""
    text_revision: str | None = None
    """Commit or tag of a hub dataset."""
    text_field: str = "text"
    """Field that holds the text, of a hub dataset or a JSONL line."""


@dataclasses.dataclass(frozen=True)
class TextConfig(TextOptions, ModelConfig):
    """A model and a text."""

    revision: str | None = None
    """Commit or tag of a hub model."""
    text_cache: str = "checkpoints/text"
    """Folder where installed texts are cached."""

    def source(self, text: str | dict[str, Any]) -> TextSource:
        """A text as the readers of text want it."""
        named = {name: getattr(self, f"text_{name}") for name in ("config", "revision", "field", "cache")}
        return TextSource(source=text, **named)
