"""Reads activation shards (written by shards.py) and checks them against their manifest."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from dejavu_train.data.bulk_read import Piece, fill, pieces, runs, sha256_files
from dejavu_train.data.shards import (
    COLLECT_AGAIN,
    HIDDEN,
    MANIFEST,
    SCHEMA,
    STATISTICS,
    WEIGHTS,
    ActivationManifest,
    ShardEntry,
    bring,
    check_digests,
    chunk_rows,
    datasets,
    layer_folder,
    open_shard,
    refuse_unreadable,
    shard_path,
    unpack_bits,
)
from dejavu_train.families import Target
from dejavu_train.families.dims import listed
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_sealed, write_sealed


class ShardReader:
    """The rows of one set of one layer, as if all its shards were one file.

    Args:
        activations: the folder with ``manifest.json``.
        layer: layer number.
        set_name: ``train``, ``val`` or ``calibration``.

    Raises:
        UserError: a shard that is missing, truncated, of another model, set or schema. A set without rows.

    HDF5 handles open on the first read, in the process that reads: a reader may be sent to workers.
    """

    def __init__(self, activations: str | Path, layer: int, set_name: str) -> None:
        self.manifest = ActivationManifest.load(activations)
        self.layer, self.set = layer, set_name
        shape = self.manifest.shape
        if layer not in shape.layers_of():
            has = listed(shape.layers_of())
            raise UserError(f"layer {layer} has no activations: those of {self.manifest.model} are of layers {has}")
        entries = self.manifest.of_set(set_name)
        if not entries:
            raise UserError(
                f"the activation shards in {activations} have no rows of the set {set_name}; {COLLECT_AGAIN}"
            )
        self._paths = [shard_path(activations, layer, entry.index) for entry in entries]
        self._starts = np.cumsum([0] + [entry.tokens for entry in entries])
        for path, entry in zip(self._paths, entries, strict=True):
            bring(activations, path)
            check_shard(path, self.manifest, layer, entry)
        check_digests(activations, *self._paths)
        self._files: dict[int, h5py.File] = {}
        self._owner = 0

    @property
    def rows(self) -> int:
        return int(self._starts[-1])

    def blocks(self) -> list[tuple[int, int]]:
        """Row ranges (start, stop) that are cheap to read: whole chunks, none across two shards."""
        step = chunk_rows(self.manifest.shape.d_model)
        return [
            (start, min(start + step, int(stop)))
            for first, stop in zip(self._starts[:-1], self._starts[1:], strict=True)
            for start in range(int(first), int(stop), step)
        ]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` .. ``stop`` - 1 of one dataset, ``mlp_active`` as (N, d_ffn) bool, the rest as stored."""
        tensor = self.read_stored(name, start, stop)
        return unpack_bits(tensor, self.manifest.shape.d_ffn) if name == "mlp_active" else tensor

    def read_stored(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` .. ``stop`` - 1 of one dataset.

        Returns: ``attn_in``, ``mlp_in`` (N, d_model) float16 or bfloat16. ``mlp_active`` (N, ceil(d_ffn / 8)) uint8.
            ``head_norm`` (N, n_heads) float16. ``token``, ``document``, ``position`` (N) int32. ``generated`` (N)
            uint8.

        Raises:
            UserError: damaged, or not a number.
        """
        pieces = []
        for shard in range(len(self._paths)):
            first, last = int(self._starts[shard]), int(self._starts[shard + 1])
            if start < last and stop > first:
                pieces.append(self._read(shard, name, max(start, first) - first, min(stop, last) - first))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def read_rows(self, name: str, row_ranges: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """All rows of ``row_ranges`` (start, stop), one after the other, as ``read_stored`` gives them, on ``device``.

        For many rows: several threads read, and a GPU gets its bytes while the next ones are read.

        Raises:
            UserError: damaged, or not a number.
        """
        to_read: list[Piece] = []
        count = 0
        for start, stop in row_ranges:
            for shard in range(len(self._paths)):
                first, last = int(self._starts[shard]), int(self._starts[shard + 1])
                low, high = max(start, first), min(stop, last)
                if low >= high:
                    continue
                found = runs(self._dataset(shard, name), low - first, high - first)
                if found is None:  # not stored as this version stores: through the library
                    return torch.cat([self.read_stored(name, *row_range) for row_range in row_ranges]).to(device)
                to_read += pieces(self._paths[shard], found, count)
                count += high - low
        like = self._dataset(0, name)
        dtype = torch.from_numpy(np.empty(0, like.dtype)).dtype
        with torch.inference_mode(False):  # the mode of the caller is not that of the threads that write
            result = torch.empty((count, *like.shape[1:]), dtype=dtype, device=device)
        try:
            fill(result, to_read)
        except OSError as error:
            refuse_unreadable(error, self._paths[0].parent, f"a shard of layer {self.layer} is damaged")
        return self._checked(result, name, self._paths[0].parent)

    def windows(self) -> list[list[int]]:
        """The sequences of token ids behind the rows, without padding."""
        tokens, positions = self.read("token", 0, self.rows).numpy(), self.read("position", 0, self.rows).numpy()
        return [part.tolist() for part in np.split(tokens, np.flatnonzero(positions == 0)[1:])]

    def _dataset(self, shard: int, name: str) -> h5py.Dataset:
        try:
            return self._open(shard)[name]
        except (OSError, KeyError, RuntimeError) as error:
            refuse_unreadable(error, self._paths[shard], f"the shard {self._paths[shard]} is damaged")

    def _read(self, shard: int, name: str, start: int, stop: int) -> Tensor:
        path = self._paths[shard]
        try:
            values = self._dataset(shard, name)[start:stop]
        except (OSError, RuntimeError) as error:
            refuse_unreadable(error, path, f"the shard {path} is damaged")
        return self._checked(torch.from_numpy(values), name, path)

    def _checked(self, tensor: Tensor, name: str, path: Path) -> Tensor:
        if name in HIDDEN and self.manifest.storage == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"the shard {path} has values in {name} that are not finite numbers; {COLLECT_AGAIN}")
        return tensor

    def _open(self, shard: int) -> h5py.File:
        if self._owner != os.getpid():
            self._files, self._owner = {}, os.getpid()
        if shard not in self._files:
            self._files[shard] = open_shard(self._paths[shard])
        return self._files[shard]

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}, "_owner": 0}


def recorded_windows(activations: str | Path, set_name: str) -> list[list[int]]:
    """The sequences of token ids of a set. Raises as :class:`ShardReader`."""
    first = ActivationManifest.load(activations).shape.layers_of()[0]
    return ShardReader(activations, first, set_name).windows()


def check_shard(path: Path, manifest: ActivationManifest, layer: int, entry: ShardEntry) -> int:
    """Compare a shard with the manifest. Returns its count of active neurons, summed over its tokens.

    Raises:
        UserError: missing, truncated, or of another model, set, size or schema.
    """
    if not path.is_file():
        raise UserError(f"the shard {path} is missing; run train.py again, which collects what is missing")
    try:
        with open_shard(path) as file:
            attributes = dict(file.attrs)
            sizes = {name: len(file[name]) for name in datasets(manifest, layer)}
    except (OSError, KeyError, RuntimeError) as error:
        refuse_unreadable(error, path, f"the shard {path} is truncated or damaged")
    if attributes.get("schema") != SCHEMA:
        raise UserError(f"the shard {path} has schema {attributes.get('schema')}, expected {SCHEMA}; {COLLECT_AGAIN}")
    if attributes.get("weight_hash") != manifest.weight_hash:
        raise UserError(
            f"the shard {path} is of another model ({attributes.get('model')}) than its manifest ({manifest.model});"
            f" {COLLECT_AGAIN}"
        )
    expected = {"layer": layer, "index": entry.index, "set": entry.set, "tokens": entry.tokens}
    for name, value in expected.items():
        if attributes.get(name) != value:
            raise UserError(f"the shard {path} says {name} {attributes.get(name)}, expected {value}; {COLLECT_AGAIN}")
    for name, rows in sizes.items():
        if rows != entry.tokens:
            raise UserError(f"the shard {path} has {rows} rows of {name}, not {entry.tokens}; {COLLECT_AGAIN}")
    return int(attributes["active"])


def write_statistics(
    activations: str | Path, manifest: ActivationManifest, known: Mapping[str, str] | None = None
) -> None:
    """Check every shard. Store each layer's share of active neurons, and the digests of all files of the activations.

    Args:
        known: digests of files that were there before and must be the same.

    Raises:
        UserError: a shard that does not fit the manifest, or a file that was changed.
    """
    shape = manifest.shape
    total, layers = sum(entry.tokens for entry in manifest.shards) * shape.d_ffn, shape.layers_of()
    counts = {
        layer: sum(check_shard(shard_path(activations, layer, e.index), manifest, layer, e) for e in manifest.shards)
        for layer in layers
    }
    neurons = shape.layers_of(Target.MLP)
    densities = [counts[layer] / total if layer in neurons else None for layer in range(shape.n_layers)]
    names = [MANIFEST, *(f"{layer_folder('', layer)}/{WEIGHTS}" for layer in layers)]
    names += [str(shard_path("", layer, e.index)) for layer in layers for e in manifest.shards]
    files = dict(zip(names, sha256_files(Path(activations) / name for name in names), strict=True))
    for name, digest in (known or {}).items():
        if files.get(name, digest) != digest:
            raise UserError(f"{Path(activations) / name} was changed since it was written; {COLLECT_AGAIN}")
    write_sealed(Path(activations) / STATISTICS, {"active_density": densities, "files": files})


def active_densities(activations: str | Path) -> dict[int, float]:
    """Share of active neurons of every layer with an MLP, over all collected tokens.

    Raises:
        UserError: collecting is not over.
    """
    values = read_sealed(Path(activations) / STATISTICS, "the statistics of the activation shards")
    return {layer: float(value) for layer, value in enumerate(values["active_density"]) if value is not None}
