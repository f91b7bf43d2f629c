"""Reads a rank's rows of a model's safetensors files, and no others: a Hugging Face model whose maps are narrower.

Files are mapped. Rows of a unit are pieces of a file. The output projection and `down` lie across, as numbers: of each
of their rows a rank reads the columns of its units, in runs. Ranks of one host share what the system has read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dejavu_train.engine.ranks.shard import Shard
from dejavu_train.families import Target, blocks_of, dims_of
from dejavu_train.families.plain import LINEAR
from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import INT4, quant_method, read_values, refuse_foreign
from dejavu_train.models.int4 import CodedLinear, head_layout, row_layouts
from dejavu_train.models.int4_quantizer import replace_matrices
from dejavu_train.models.int4_sizes import head_kind, head_sizes
from dejavu_train.models.load import DTYPE_SPELLED, chosen_dtype, random_model
from dejavu_train.models.stored import (
    HEAD,
    TensorEntry,
    check_weights,
    embedding_name,
    expected_tensors,
    own_name,
    own_names,
    read_header,
    stored_files,
)


class MappedTensors:
    """The stored tensors of a model, by their names without ``model.`` before them.

    Attributes:
        nbytes: what was read of them so far.
    """

    def __init__(self, files: Sequence[Path], model: str, embedding: str) -> None:
        found: dict[str, tuple[Path, TensorEntry]] = {}
        for file in files:
            if file.suffix != ".safetensors":
                raise UserError(f"{file} is pickled, and several GPUs read rows of safetensors; save {model} again")
            found |= {name: (file, entry) for name, entry in read_header(file).items()}
        self._stored = {own: found[name] for own, name in own_names(found, model, embedding).items()}
        self._mapped: dict[Path, Tensor] = {}
        self.nbytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same. They are not kept, and do not count as read."""
        before = self.nbytes
        equal = torch.equal(self.take(name), self.take(other))
        self.nbytes = before
        return equal

    def take(self, name: str, ids: Tensor | None = None, dim: int = 0) -> Tensor:
        """A tensor in memory of its own. ids: of the rows, or with dim 1 of the columns, that are read. None = all."""
        file, entry = self._stored[name]
        if file not in self._mapped:
            self._mapped[file] = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
        raw, dtype = self._mapped[file][entry.begin : entry.end], DTYPE_SPELLED[entry.dtype]
        if entry.begin % dtype.itemsize:
            raw = raw.clone()
        whole = raw.view(dtype).view(entry.shape)
        made = whole.clone() if ids is None else torch.cat([whole.narrow(dim, *run) for run in runs_of(ids)], dim)
        self.nbytes += made.nbytes
        return made


def runs_of(ids: Tensor) -> list[tuple[int, int]]:
    """The first and the number of each run without gaps of ascending ids.

    >>> runs_of(torch.tensor([2, 3, 4, 8]))
    [(2, 3), (8, 1)]
    """
    ends = [0, *((ids[1:] - ids[:-1] != 1).nonzero().flatten() + 1).tolist(), len(ids)]
    return [(int(ids[first]), last - first) for first, last in zip(ends, ends[1:], strict=False)]


@torch.no_grad()
def load_shard(
    name: str,
    shard: Shard,
    dtype: str | torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> tuple[Any, int]:
    """The model with the maps of a rank's units alone, and how many bytes were read of the files.

    Its modules cannot be called as a model: what they give is a part. Biases that count once are zero on later ranks.

    Args:
        name: folder or hub id. dtype: as of `load_model`. Of 4-bit rows what is no matrix is in float32.
    Raises:
        UserError: as `load_model`. Weights that are pickled, or q, k and v that are stored as one matrix.
    """
    values = read_values(name, revision)
    refuse_foreign(values, name)
    dims, files, packed = dims_of(values, name), stored_files(name, revision=revision), quant_method(values) == INT4
    check_weights(str(files[0].parent), values, dims)
    kind = torch.float32 if packed else chosen_dtype(dtype, values, files)
    embedding = embedding_name(expected_tensors(values, dims))
    stored = MappedTensors(files, name, embedding)
    with torch.device("meta"):
        model: Any = random_model(values)
        if model.config.tie_word_embeddings and HEAD in stored and not stored.are_equal(HEAD, embedding):
            model = random_model({**values, "tie_word_embeddings": False})  # as where the whole model is loaded
    if hasattr(blocks_of(model)[0].q, "fused"):
        raise UserError(
            f"{name} stores q, k and v as one matrix, of which several GPUs read no rows; start one process, without"
            " torchrun"
        )
    if packed:
        _replace(model, shard, values)
    paths = {id(module): own_name(path) for path, module in model.named_modules()}
    for number, block in enumerate(blocks_of(model)):
        for part in LINEAR:
            linear = getattr(block, part)
            if linear is not None:
                _fill(linear, paths[id(linear)], stored, _Place.of(shard, number, part), kind, device)
    _fill_others(model, stored, kind, device)
    model.config.name_or_path = name
    return model.eval(), stored.nbytes


@dataclass(frozen=True)
class _Place:
    """Which rows or columns of a layer's map are a rank's. once: its bias counts on the first rank alone."""

    numbers: Tensor
    dim: int
    codes: Tensor
    once: bool
    first: bool

    @classmethod
    def of(cls, shard: Shard, layer: int, part: str) -> "_Place":
        whole = shard.whole
        target = Target.HEADS if part in ("q", "k", "v", "out") else Target.MLP
        rows = {"q": whole.group_dim, "out": whole.group_dim, "k": whole.head_dim, "v": whole.head_dim}.get(part, 1)
        numbers = codes = shard.rows_of_units(layer, target, rows)
        if part == "out":  # head by head
            codes = shard.rows_of_units(layer, target, whole.kv_group * whole.d_model)
        once = part in ("out", "down")
        return cls(numbers, int(once), codes, once, shard.first)


def _replace(model: Any, shard: Shard, values: Any) -> None:
    """Put places for a rank's codes where the matrices are, and for all codes of an LM head that has any."""
    for block in blocks_of(model):
        replace_matrices(block.whole, row_layouts(model.config.model_type, shard.dims))
    head = head_sizes(shard.whole, head_kind(values))
    if head is not None:
        replace_matrices(model, {"lm_head": head_layout(head)})


def _fill(
    linear: Any, path: str, stored: MappedTensors, place: _Place, dtype: torch.dtype, device: torch.device | str
) -> None:
    """A linear map of a layer, made as narrow as what a rank holds of it."""
    if isinstance(linear, CodedLinear):
        linear.words, linear.scales = (
            stored.take(f"{path}.{part}", place.codes).to(device) for part in ("weight", "scales")
        )
    else:
        linear.weight = _parameter(stored.take(f"{path}.weight", place.numbers, place.dim), dtype, device)
    if linear.bias is not None and place.once and not place.first:
        linear.bias = _parameter(torch.zeros(linear.out_features, dtype=torch.float32), dtype, device)
    elif linear.bias is not None:
        linear.bias = _parameter(stored.take(f"{path}.bias", None if place.once else place.numbers), dtype, device)
    if place.dim:
        linear.in_features = len(place.numbers)
    else:
        linear.out_features = len(place.numbers)


def _fill_others(model: Any, stored: MappedTensors, dtype: torch.dtype, device: torch.device | str) -> None:
    """Fill what is no map of a layer: whole, on every rank. Tied weights stay tied."""
    made: dict[int, nn.Parameter] = {}
    for path, module in list(model.named_modules()):
        for name, tensor in list(module.named_parameters(recurse=False)):
            if not tensor.is_meta:
                continue
            own = own_name(f"{path}.{name}")
            if own == HEAD and own not in stored:  # tied, and named by the module of the embedding
                continue
            if id(tensor) not in made:
                made[id(tensor)] = _parameter(stored.take(own), dtype, device)
            setattr(module, name, made[id(tensor)])
        if isinstance(module, CodedLinear) and module.words.is_meta:
            own = own_name(path)
            module.words, module.scales = (stored.take(f"{own}.{part}").to(device) for part in ("weight", "scales"))
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):  # tables that follow from the config
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, type(module)(config=model.config).to(device))
    model.tie_weights()
    absent = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not absent, f"nothing fills {absent[0]}"


def _parameter(tensor: Tensor, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(tensor.to(device, dtype), requires_grad=False)
