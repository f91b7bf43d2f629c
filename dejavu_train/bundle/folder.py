"""Checks of a bundle's folder before torch is imported: that its files are there, and which model it is of."""

import os
import tempfile
from pathlib import Path
from typing import Any

from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_json, way_from
from dejavu_train.models.hub import looks_local
from dejavu_train.models.installed import hint, known_as
from dejavu_train.models.stored import read_header

METADATA = "bundle.json"
BUNDLE_FILES = (METADATA, "predictors.safetensors")
PREDICTORS_FOLDER = "predictors"  # of a model's folder, where a bundle lies beside its model


def model_reference(model: str, folder: Path) -> str:
    """How the bundle.json in ``folder`` names a model: one on the hub by its id, a folder by :func:`way_from` there."""
    if not os.path.isabs(model):
        return model
    way = way_from(folder, model)
    return way if os.path.isabs(way) or way.startswith(os.pardir) else os.path.join(os.curdir, way)


def published_name(model: str) -> str:
    """How a bundle that leaves this machine names a model: one on the hub by its id, a folder by its last name."""
    if not os.path.isabs(model):
        return model
    temporary = os.path.realpath(model).startswith(os.path.realpath(tempfile.gettempdir()) + os.sep)
    return "local-model" if temporary else os.path.basename(model)


def referenced_model(metadata: Any, folder: Path) -> str:
    """The model that a bundle.json in ``folder`` names: an absolute path, an id on the hub, or a bare name. A bare name
    stands for a folder that is not here. "" where nothing can be read.
    """
    name = metadata.get("model") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        return ""
    here = Path(os.path.abspath(folder))
    if not name.startswith(os.curdir):
        return name
    ways = [os.path.normpath(base / name) for base in (here, folder.resolve())]
    return next((way for way in ways if os.path.isdir(way)), os.path.basename(ways[0]))


def check_bundle(name: str) -> None:
    """Raise :class:`UserError` for a folder that cannot hold a bundle. A hub id passes."""
    folder = Path(name)
    if not folder.is_dir():
        if looks_local(name):
            raise UserError(f"there is no bundle folder {name}; python train.py makes one{hint(name)}")
        return
    absent = [part for part in BUNDLE_FILES if not (folder / part).is_file()]
    if absent:
        raise UserError(f"the bundle {name} lacks {absent[0]}; give the folder that train.py wrote")
    if not isinstance(read_json(folder / METADATA, "the bundle"), dict):
        raise UserError(f"the bundle {name}: {METADATA} must hold keys and values; train it again")
    read_header(folder / BUNDLE_FILES[1])


def named_model(bundle: str | None) -> str:
    """The model that a bundle's folder was made for, as a path or an id on the hub. "" where that is not known here."""
    if bundle is None:
        return ""
    name = referenced_model(_metadata(bundle), Path(bundle))
    if os.path.isabs(name):
        way = os.path.relpath(name)
        return name if way.startswith(os.pardir) else way
    return "" if looks_local(name) else name


def beside(bundle: str, name: str = "") -> str:
    """Where results of a bundle go when nothing is named: the folder that the bundle's lies in, for a bundle of the hub
    checkpoints/NAME. ``name`` is of a folder within it."""
    folder = Path(known_as(bundle))
    local = folder.is_dir() or looks_local(str(folder))
    return str((folder.parent if local else Path("checkpoints") / folder.name) / name)


def _metadata(bundle: str) -> Any:
    try:
        return read_json(Path(bundle) / METADATA, "the bundle")
    except (UserError, OSError):
        return None


def require_model(model: str, bundle: str | None) -> None:
    """Raise :class:`UserError` where neither the user nor the bundle named a model that is known here."""
    if model:
        return
    if bundle is None:
        raise UserError("without a bundle nothing names the model; give --model")
    check_bundle(bundle)
    name = referenced_model(_metadata(bundle), Path(bundle))
    named = f" (its name is {name})" if name else ""
    raise UserError(f"the bundle {bundle} does not say where the model is that it was made for{named}; give --model")
