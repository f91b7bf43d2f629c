"""Writes a model folder of 4-bit rows as transformers reads it, a file for each layer. Aside, renamed when whole."""

import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dejavu_train.families.base import dense_type
from dejavu_train.ground.files import json_digest, replacing, write_json
from dejavu_train.ground.locks import locked
from dejavu_train.ground.signals import Interrupted
from dejavu_train.models.load import dense_class, load_tokenizer
from dejavu_train.models.stored import INDEX, read_header

# Of a model's folder: what belongs to its weights or was written by them, and is not taken along.
WORK = "work"
LEFT = ("config.json", INDEX, "README.md", "samples.json", "samples.xz", "pretraining.json")


@contextlib.contextmanager
def folder_aside(output: str, identity: Any = None) -> Iterator["ModelFolder"]:
    """A folder that is renamed to ``output`` behind the context, or removed after an error.

    Args:
        identity: JSON, of all that decides what is written. A folder that was begun for it and stopped is gone on with.
            None: there is no going on.
    """
    target = Path(output).resolve()  # of a link what it leads to
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if identity is None:
            aside = Path(tempfile.mkdtemp(prefix=".tmp-", suffix=f"-{target.name}", dir=target.parent))
        else:
            aside = target.with_name(f".tmp-{json_digest(identity)[:8]}-{target.name}")
            stack.enter_context(_alone(aside))
            aside.mkdir(exist_ok=True)
        stopped = False
        try:
            yield ModelFolder(aside)
            shutil.rmtree(aside / WORK, ignore_errors=True)
            aside.chmod(0o755)  # mkdtemp makes folders private to the user
            if target.is_dir():
                target.rmdir()
            aside.rename(target)
        except (KeyboardInterrupt, Interrupted):
            stopped = identity is not None
            raise
        finally:
            if not stopped:
                shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _alone(aside: Path) -> Iterator[None]:
    holders = aside.with_name(aside.name + "-holders")
    try:
        with locked(holders, f"another process is writing {aside}; waiting for it"):
            yield
    finally:
        with contextlib.suppress(OSError):  # another one waits
            holders.rmdir()


class ModelFolder:
    """Adds files of tensors one by one, then what says which tensor is where.

    Attributes:
        work: a folder for what is needed on the way.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / WORK
        self.nbytes = 0
        self._map: dict[str, str] = {}

    def files(self) -> int:
        """How many files there are, one after the other."""
        return next(number for number in itertools.count() if not self._file(number + 1).is_file())

    def go_on(self, files: int) -> None:
        """Take over so many files that are there. Later ones are written anew."""
        for number in range(1, files + 1):
            file = self._file(number)
            header = read_header(file)
            self._map |= dict.fromkeys(header, file.name)
            self.nbytes += sum(entry.end - entry.begin for entry in header.values())

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors, by their full names, as the next file."""
        path = self._file(len(set(self._map.values())) + 1)
        whole = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
        with replacing(path) as aside:
            save_file(whole, aside, metadata={"format": "pt"})
        self._map |= dict.fromkeys(whole, path.name)
        self.nbytes += sum(tensor.nbytes for tensor in whole.values())

    def _file(self, number: int) -> Path:
        return self.folder / f"model-{number:05d}.safetensors"

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
        # A bundle beside it stays behind.
        alone = {**values, "model_type": dense_type(values["model_type"])}
        alone["architectures"] = [dense_class(values)[0].__name__]
        (self.folder / "config.json").write_text(json.dumps(alone, indent=2, sort_keys=True) + "\n")
