"""What a bundle's folder says before torch is imported: that its files are there, and which model it is of."""

from pathlib import Path

from dejavu_train.errors import UserError
from dejavu_train.files import read_json
from dejavu_train.models.stored import read_header

METADATA = "bundle.json"
BUNDLE_FILES = (METADATA, "predictors.safetensors")


def check_bundle(name: str) -> None:
    """Raise :class:`UserError` for a folder that cannot hold a bundle; a hub id passes."""
    folder = Path(name)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or folder.parent.is_dir()
    if not folder.is_dir():
        if looks_local:
            raise UserError(f"there is no bundle folder {name}; python train.py makes one")
        return
    absent = [part for part in BUNDLE_FILES if not (folder / part).is_file()]
    if absent:
        raise UserError(f"the bundle {name} lacks {absent[0]}; give the folder that train.py wrote")
    if not isinstance(read_json(folder / METADATA, "the bundle"), dict):
        raise UserError(f"the bundle {name}: {METADATA} must hold keys and values; train it again")
    read_header(folder / BUNDLE_FILES[1])


def named_model(bundle: str | None) -> str:
    """The model that a bundle's folder was made for, as train.py was told it; "" where that cannot be read."""
    if bundle is None:
        return ""
    try:
        metadata = read_json(Path(bundle) / METADATA, "the bundle")
    except (UserError, OSError):
        return ""
    name = metadata.get("model") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def require_model(model: str, bundle: str | None) -> None:
    """Raise :class:`UserError` where neither the user nor the bundle named a model."""
    if model:
        return
    if bundle is None:
        raise UserError("without a bundle nothing names the model; give --model")
    check_bundle(bundle)
    raise UserError(f"the bundle {bundle} does not say here which model it was made for; give --model")
