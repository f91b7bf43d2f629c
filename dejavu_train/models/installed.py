"""Finds models that are installed as distributions, such as dejavu-opt-mini.

A distribution names its package as an entry point of the group ``dejavu_train.models``. The model lies in the package's
folder ``model``. Commands know it as ``checkpoints/NAME``, as a clone has it, where no such folder is.
"""

import importlib.util
from importlib.metadata import entry_points
from pathlib import Path

GROUP = "dejavu_train.models"
CHECKPOINTS = "checkpoints"


def installed(name: str) -> str:
    """``name``, or the installed folder of ``checkpoints/NAME`` and what lies in it, where this folder has none.

    A folder of results alone is none: a model has a ``config.json``, a bundle a ``bundle.json``.
    """
    first, second, *rest = [*Path(name).parts, "", ""]
    if first != CHECKPOINTS or _has_files(Path(name)) or (Path(first) / second / "config.json").is_file():
        return name
    folder = _folders().get(second)
    place = None if folder is None else folder.joinpath(*rest)
    return name if place is None or not place.is_dir() else str(place)


def known_as(name: str) -> str:
    """``checkpoints/NAME...`` of a folder within an installed model, where nothing is to be written. Else ``name``."""
    place = Path(name).absolute()
    for model, folder in _folders().items():
        if place.is_relative_to(folder.absolute()) and "site-packages" in folder.absolute().parts:
            return str(Path(CHECKPOINTS) / model / place.relative_to(folder.absolute()))
    return name


def hint(name: str) -> str:
    """End of a message about a missing folder: that a package may bring it. "" for folders elsewhere."""
    return "; the package dejavu-opt-mini brings checkpoints/opt-mini" if Path(name).parts[:1] == (CHECKPOINTS,) else ""


def _has_files(folder: Path) -> bool:
    """Whether a model or a bundle lies in a folder."""
    return (folder / "config.json").is_file() or (folder / "bundle.json").is_file()


def _folders() -> dict[str, Path]:
    """The folders of installed models by their names. Nothing is imported."""
    found = {}
    for point in entry_points(group=GROUP):
        spec = importlib.util.find_spec(point.module)
        for place in (spec.submodule_search_locations if spec is not None else None) or ():
            found[point.name] = Path(place) / "model"
    return found
