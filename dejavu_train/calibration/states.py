"""Tensors of calibration windows between two layers, on the disk: a killed calibration goes on in its layer and window.

FOLDER/STAGE/identity.json     what the states belong to
FOLDER/STAGE/NAME.safetensors  one tensor, with the layer in front of which it stands
"""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dejavu_train.ground.files import json_digest, read_json, replacing, write_json

IDENTITY = "identity.json"


class States:
    """The states of one stage. Those of another identity are removed.

    Args:
        identity: JSON, of all that decides what the states are. None: whatever they are, which another process knows.
    """

    def __init__(self, folder: Path, identity: Any = None) -> None:
        self.folder = folder
        if identity is None:
            return
        path, digest = folder / IDENTITY, json_digest(identity)
        if not path.is_file() or read_json(path, "the identity of states") != digest:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write_json(path, digest)

    def layer(self, name: str) -> int | None:
        """In front of which layer the tensor stands. None: it is not there."""
        if not self._path(name).is_file():
            return None
        with safe_open(self._path(name), "pt") as stored:
            return int(stored.metadata()["layer"])

    def read(self, name: str, device: Any) -> Tensor:
        with safe_open(self._path(name), "pt", device=str(device)) as stored:
            made: Tensor = stored.get_tensor("states")
        return made

    def write(self, name: str, layer: int, states: Tensor) -> None:
        with replacing(self._path(name)) as path:
            save_file({"states": states.detach().contiguous().cpu()}, path, {"layer": str(layer)})

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def digest_of(modules: Iterable[nn.Module]) -> str:
    """SHA-256 over all tensors of modules, in order."""
    digest = hashlib.sha256()
    for module in modules:
        for tensor in module.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
