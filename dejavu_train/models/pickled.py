"""Reads pickled weight files, which older uploads of the hub have alone. No code of theirs runs."""

import pickle
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from dejavu_train.ground.errors import UserError, first_line

_DAMAGED = (
    pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError,
    AssertionError, ImportError,
)  # fmt: skip


def load_pickled(file: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of a pickled file by name. Containers of torch before 1.6 are read into memory, later ones mapped.

    Raises:
        UserError: a damaged file, one that holds more than tensors, or one whose tensors have no names.
    """
    try:
        held = torch.load(file, map_location=device, weights_only=True, mmap=zipfile.is_zipfile(file))
    except _DAMAGED as error:
        raise UserError(
            f"the weights file {file} is damaged, or holds more than tensors ({first_line(error)}); fetch it again, or"
            " save the model with save_pretrained"
        ) from None
    named = isinstance(held, dict) and all(isinstance(name, str) for name in held)
    other = next((name for name, value in held.items() if not isinstance(value, Tensor)), None) if named else None
    if not named or other is not None:
        what = f"holds {other!r}, which is no tensor" if named else "does not hold tensors by name"
        raise UserError(f"the weights file {file} {what}; save the model with save_pretrained")
    return dict(held)
