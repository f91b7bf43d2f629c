"""State of a long loop after an interruption, as one file: written aside and renamed, read without code."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import check_zip, replacing


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write tensors and plain values, nested in dicts and lists."""
    buffer = io.BytesIO()  # writing to a file, torch does not say what the operating system refused
    torch.save(state, buffer)
    with replacing(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def load_state(path: Path, device: torch.device | str) -> dict[str, Any] | None:
    """Read what :func:`save_state` wrote, tensors on ``device``. None where there is no file.

    Raises:
        UserError: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        check_zip(path)
        return torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged ({error}); delete it to start anew") from None
