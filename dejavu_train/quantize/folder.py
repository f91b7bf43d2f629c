"""Writes a model folder of 4-bit rows as transformers reads it, a file for each layer. Aside, renamed when whole."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dejavu_train.families.opt import ARCHITECTURE, OPT
from dejavu_train.files import share, write_json
from dejavu_train.models.opt import load_tokenizer
from dejavu_train.models.stored import INDEX

# Of a model's folder: what belongs to its weights or was written by them, and is not taken along.
LEFT = ("config.json", INDEX, "README.md", "samples.json", "samples.xz", "pretraining.json")


@contextlib.contextmanager
def folder_aside(output: str) -> Iterator["ModelFolder"]:
    """A folder that is renamed to ``output`` behind the context, or removed after an error."""
    target = Path(output).resolve()  # of a link what it leads to
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".tmp-", suffix=f"-{target.name}", dir=target.parent))
    try:
        yield ModelFolder(aside)
        aside.chmod(0o755)  # mkdtemp makes folders private to the user
        if target.is_dir():
            target.rmdir()
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class ModelFolder:
    """Adds files of tensors one by one, then what says which tensor is where."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nbytes = 0
        self._map: dict[str, str] = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors, by their full names, as the next file."""
        name = f"model-{len(set(self._map.values())) + 1:05d}.safetensors"
        whole = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
        save_file(whole, self.folder / name, metadata={"format": "pt"})
        share(self.folder / name)
        self._map |= dict.fromkeys(whole, name)
        self.nbytes += sum(tensor.nbytes for tensor in whole.values())

    def finish(self, model: str, revision: str | None, values: Mapping[str, Any], report: Mapping[str, Any]) -> None:
        """Write the index, config.json, ``quantization.json``, the tokenizer and the model's other small files."""
        write_json(self.folder / INDEX, {"metadata": {"total_size": self.nbytes}, "weight_map": self._map})
        source = Path(model)
        if source.is_dir():
            for file in source.iterdir():
                if file.is_file() and file.suffix in (".json", ".txt", ".bin", ".model") and file.name not in LEFT:
                    if not file.name.endswith((".index.json",)) and not file.name.startswith("pytorch_model"):
                        shutil.copyfile(file, self.folder / file.name)
        else:
            load_tokenizer(model, revision).save_pretrained(self.folder)
        write_json(self.folder / "quantization.json", dict(report))
        alone = {**values, "model_type": OPT, "architectures": [ARCHITECTURE]}  # a bundle beside it stays behind
        (self.folder / "config.json").write_text(json.dumps(alone, indent=2, sort_keys=True) + "\n")
