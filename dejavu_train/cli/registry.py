"""How the core reaches what stands beside it: by name, and only where somebody asks for it."""

import importlib
from pathlib import Path
from types import ModuleType

from dejavu_train.ground.errors import UserError

EXTRAS = "dejavu_train.extras"


def has_extras() -> bool:
    """Whether this copy holds the folder ``extras``."""
    return (Path(__file__).parents[1] / "extras").is_dir()


def extra(part: str, asked: str) -> ModuleType:
    """The module of an extra that does a part of a command of the core.

    Args:
        part: the module below ``extras``, for instance ``hosts.mirror``.
        asked: the option that asked for it, for the message.

    Raises:
        UserError: this copy has no extras.
    """
    if not has_extras():
        raise UserError(f"{asked} needs dejavu_train/extras, which this copy lacks; leave it out, or install the whole")
    return importlib.import_module(f"{EXTRAS}.{part}")
