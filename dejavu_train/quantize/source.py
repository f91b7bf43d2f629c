"""Reads a model's stored tensors one by one, from a folder or the hub's cache, without building the model."""

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dejavu_train.families.base import family_named
from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import read_values
from dejavu_train.models.load import dense_class, stored_entries
from dejavu_train.models.pickled import load_pickled
from dejavu_train.models.stored import HEAD, check_numbers, own_names, stored_files


class StoredTensors:
    """The tensors of a checkpoint by their names without the model's before them. Each is read when asked for.

    Attributes:
        embedding: the name of the tokens' embedding. An LM head that is stored in its place goes by it.
    Raises:
        UserError: no weights there, or a damaged file.
    """

    def __init__(self, model: str, revision: str | None = None) -> None:
        self.model, values = model, read_values(model, revision)
        self.embedding = family_named(values["model_type"], model).embedding
        self._around = dense_class(values)[0].base_model_prefix
        files: dict[str, Path] = {}
        for file in stored_files(model, revision=revision):
            found = stored_entries(file)
            check_numbers(model, values, found)
            files |= dict.fromkeys(found, file)
        self._files = {own: (files[name], name) for own, name in own_names(files, model, self.embedding).items()}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def stored_name(self, name: str) -> str:
        """The name that transformers stores it under, whatever the file has."""
        return name if name.startswith(HEAD.partition(".")[0]) else f"{self._around}.{name}"

    def __getitem__(self, name: str) -> Tensor:
        """Raises :class:`UserError` for a tensor that is not there."""
        if name not in self._files:
            raise UserError(f"the weights of {self.model} lack the tensor {name}; fetch or save them again")
        file, stored_name = self._files[name]
        if file.suffix != ".safetensors":
            return load_pickled(file)[stored_name].clone()
        try:
            with safe_open(file, "pt") as stored:
                return stored.get_tensor(stored_name)
        except SafetensorError as error:
            raise UserError(f"the weights file {file} is damaged ({error}); fetch or save it again") from None
