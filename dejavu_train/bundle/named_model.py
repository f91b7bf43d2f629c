"""Which model a bundle is of, by its name. Readable without torch."""

from pathlib import Path

from dejavu_train.errors import UserError
from dejavu_train.files import read_json

METADATA = "bundle.json"


def named_model(bundle: str) -> str:
    """The model that a bundle's folder was made for, as train.py was told it; "" where that cannot be read."""
    try:
        metadata = read_json(Path(bundle) / METADATA, "the bundle")
    except (UserError, OSError):
        return ""
    name = metadata.get("model") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def require_model(model: str, bundle: str) -> None:
    """Raise :class:`UserError` where neither the user nor the bundle named a model."""
    if not model:
        raise UserError(f"the bundle {bundle} does not say here which model it was made for; give --model")
