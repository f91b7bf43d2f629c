"""Writes activation shards: one folder per layer, one set per shard. shard_reader.py reads them.

    activations/manifest.json                 model, weights, text, and the planned shards
    activations/statistics.json               share of active neurons per layer, once every shard is there
    activations/layer_07/weights.safetensors  what a loss needs of the layer: see RecordedWeights
    activations/layer_07/shard_0003.h5        datasets below; shard 3 holds the same tokens in every layer

Datasets of a shard, a row for each token. Those of a half that the layer does not have are not there:

- ``attn_in``, ``mlp_in`` (tokens, d_model): float16, or bfloat16 stored as uint16.
- ``mlp_active`` (tokens, ceil(d_ffn / 8)) uint8: bits as of ``numpy.packbits``, set where a neuron gives no zero.
- ``head_norm`` (tokens, n_heads) float16: what each head contributes.
- ``token``, ``document``, ``position`` (tokens) int32.
"""

import contextlib
import dataclasses
import errno
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import h5py
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dejavu_train.cli.registry import extra
from dejavu_train.data.bulk_read import sha256_files
from dejavu_train.data.config import Storage
from dejavu_train.families import BlockParts, ModelDims, Target
from dejavu_train.families.block import activate_
from dejavu_train.families.dims import Activation
from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.ground.files import read_json, read_sealed, replacing, system_error, write_json

MANIFEST, STATISTICS, WEIGHTS = "manifest.json", "statistics.json", "weights.safetensors"
SCHEMA = 2  # 1 had other names of the sets
CHUNK_BYTES = 1 << 20
SETS = ("train", "val", "calibration")  # the sets that are collected; test is only ever scored
HIDDEN = ("attn_in", "mlp_in")
STORE = "store.json"  # in a folder all of whose files lie in object storage
COLLECT_AGAIN = "delete it and run train.py again, which collects what is missing"


def is_marked(folder: str | Path) -> bool:
    """Whether every file of the folder lies in a store."""
    return (Path(folder) / STORE).is_file()


def bring(folder: str | Path, path: Path) -> None:
    """Fetch a file of ``folder`` from its store, if it has one and the file is not here."""
    if not path.is_file() and is_marked(folder):
        extra("hosts.store", f"{folder}, whose files lie in a store,").bring(folder, path)


@dataclasses.dataclass(frozen=True)
class ShardEntry:
    """One planned shard: ``tokens`` rows of one set."""

    index: int
    set: str
    tokens: int


@dataclasses.dataclass(frozen=True)
class ActivationManifest:
    """Contents of an activations folder, or of one whose collecting is not over."""

    model: str
    weight_hash: str
    shape: ModelDims
    storage: Storage
    request: dict[str, Any]
    text: dict[str, Any]
    shards: tuple[ShardEntry, ...]
    tokenizer_hash: str | None = None  # activations of earlier versions do not name their tokenizer

    def save(self, folder: str | Path) -> None:
        values = dataclasses.asdict(self) | {"shape": self.shape.stored()}
        write_json(Path(folder) / MANIFEST, {"schema": SCHEMA, **values})

    @classmethod
    def load(cls, folder: str | Path) -> "ActivationManifest":
        """Read ``manifest.json``.

        Raises:
            UserError: missing, damaged, or of another schema.
        """
        path = Path(folder) / MANIFEST
        values = read_json(path, "the manifest of the activation shards")
        try:
            schema = values.pop("schema")
            if schema != SCHEMA:
                raise UserError(
                    f"the activation shards in {folder} have schema {schema}, this version reads {SCHEMA};"
                    " delete the folder and run train.py again"
                )
            values["shape"] = ModelDims.from_stored(values["shape"])
            values["shards"] = tuple(ShardEntry(**entry) for entry in values["shards"])
            manifest = cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a manifest of activation shards ({error}); {COLLECT_AGAIN}") from None
        check_digests(folder, path)
        return manifest

    def of_set(self, name: str) -> list[ShardEntry]:
        return [entry for entry in self.shards if entry.set == name]

    def missing(self, folder: str | Path) -> list[ShardEntry]:
        """The shards that are not there in every layer with a target. In a store all are."""
        return (
            []
            if is_marked(folder)
            else [
                entry
                for entry in self.shards
                if not all(shard_path(folder, layer, entry.index).is_file() for layer in self.shape.layers_of())
            ]
        )

    def row_bytes(self) -> int:
        """Bytes of one token in the shards of all layers."""
        shape = self.shape
        of_target = {Target.MLP: -(-shape.d_ffn // 8), Target.HEADS: 2 * shape.n_kv_heads}
        units = sum(2 * shape.d_model + of_target[key.target] for key in shape.keys)
        return units + 12 * len(shape.layers_of())


def file_digests(activations: str | Path) -> dict[str, str]:
    """By name SHA-256 of every file of complete activations. Nothing while they are collected, or of earlier versions.

    Raises:
        UserError: the file that holds them is damaged.
    """
    path = Path(activations) / STATISTICS
    values = read_sealed(path, "the statistics of the activation shards") if path.is_file() else {}
    files = values.get("files")
    return files if isinstance(files, dict) else {}


def check_digests(activations: str | Path, *paths: Path) -> None:
    """Compare files of the activations with their stored digests.

    Raises:
        UserError: one was changed.
    """
    digests = file_digests(activations)
    stored = {path: digests.get(str(path.relative_to(activations))) for path in paths}
    known = [path for path, digest in stored.items() if digest is not None and path.is_file()]
    for path, digest in zip(known, sha256_files(known), strict=True):
        if digest != stored[path]:
            raise UserError(f"{path} was changed since it was written; {COLLECT_AGAIN}")


def layer_folder(activations: str | Path, layer: int) -> Path:
    return Path(activations) / f"layer_{layer:02d}"


def shard_path(activations: str | Path, layer: int, index: int) -> Path:
    return layer_folder(activations, layer) / f"shard_{index:04d}.h5"


def open_shard(path: str | Path) -> h5py.File:
    """A shard's file to read, without HDF5's locks, which some file systems do not have. Writers hold the folder
    (locks.py), and a shard appears whole under its name.

    Raises:
        UserError: the environment asks for locks, and the file system has none.
        OSError: what the system says. One without a number if the file is no HDF5 file or truncated.
    """
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        if "lock file" not in str(error):
            raise
        asked, reason = os.environ.get("HDF5_USE_FILE_LOCKING"), os.strerror(system_error(error) or errno.ENOLCK)
        raise UserError(
            f"HDF5 cannot lock {path} ({reason}), as HDF5_USE_FILE_LOCKING={asked} asks; set"
            " HDF5_USE_FILE_LOCKING=FALSE, locks are not needed here"
        ) from None


class _CheckedFile(io.FileIO):
    """A file that keeps the first error of writing and takes what comes after it without writing.

    HDF5 cannot close a file that it cannot write, and ends the process with a segmentation fault when it tries again at
    exit. So it does not hear of the error, which :meth:`check` raises.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left and self.error is None:
                left = left[super().write(left) or 0 :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        if self.error is None:
            try:
                return super().truncate(size)
            except OSError as error:
                self.error = error
        return size or 0

    def check(self) -> None:
        """Raise the error that came, if one did."""
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def new_shard(path: Path) -> Iterator[tuple[h5py.File, _CheckedFile]]:
    """A new shard's file, and what says whether it could be written. Raises ``OSError`` at the end if it could not."""
    with _CheckedFile(path, "w+") as stored:
        with h5py.File(stored, "w") as file:
            yield file, stored
        stored.check()


def refuse_unreadable(error: Exception, path: Path, message: str) -> NoReturn:
    """Refuse a file that could not be read. Says what the system refused, else that it is damaged (``message``).

    Raises:
        OSError: the system's error, of ``path``: the file is not to blame.
        UserError: otherwise.
    """
    number = system_error(error)
    if number not in (None, errno.ENOENT):
        raise OSError(number, os.strerror(number), str(path)) from None
    raise UserError(f"{message} ({first_line(error)}); {COLLECT_AGAIN}") from None


def chunk_rows(d_model: int) -> int:
    """Rows of a chunk: the power of two that keeps a hidden state's chunk within 1 MB."""
    return max(16, 1 << (CHUNK_BYTES // (2 * d_model)).bit_length() - 1)


def pack_bits(active: Tensor) -> Tensor:
    """(N, n) bool -> (N, ceil(n / 8)) uint8 on the same device, first unit in the highest bit."""
    rows, units = active.shape
    padded = torch.nn.functional.pad(active, (0, -units % 8)).view(rows, -1, 8)
    powers = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=active.device)
    return (padded.to(torch.uint8) * powers).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, n_units: int) -> Tensor:
    """(N, ceil(n / 8)) uint8 -> (N, n) bool on the same device."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, count=n_units)).view(torch.bool)
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1)[:, :n_units].bool()


def datasets(manifest: ActivationManifest, layer: int) -> dict[str, tuple[int | None, str]]:
    """By name the width of each dataset of a layer's shard, None of a column, and its dtype."""
    shape = manifest.shape
    hidden = "f2" if manifest.storage == "float16" else "u2"
    of_target: dict[Target, dict[str, tuple[int | None, str]]] = {
        Target.HEADS: {"attn_in": (shape.d_model, hidden), "head_norm": (shape.n_kv_heads, "f2")},
        Target.MLP: {"mlp_in": (shape.d_model, hidden), "mlp_active": (-(-shape.d_ffn // 8), "u1")},
    }
    made = {name: size for target in shape.targets_of(layer) for name, size in of_target[target].items()}
    return made | dict.fromkeys(("token", "document", "position"), (None, "i4"))


class ShardWriter:
    """Writes one shard of some layers at once. Leaving the context without an error completes it.

    Args:
        layers: None means all that have a target.
    """

    def __init__(
        self, folder: str | Path, manifest: ActivationManifest, entry: ShardEntry, layers: Iterable[int] | None = None
    ) -> None:
        self._folder, self._manifest, self._entry = Path(folder), manifest, entry
        self._stack = contextlib.ExitStack()
        self._files: dict[int, h5py.File] = {}
        self._stored: dict[int, _CheckedFile] = {}
        layers = manifest.shape.layers_of() if layers is None else layers
        self._active = dict.fromkeys(layers, 0)
        self._rows = dict.fromkeys(self._active, 0)

    def __enter__(self) -> "ShardWriter":
        shape, entry = self._manifest.shape, self._entry
        with contextlib.ExitStack() as opening:
            for layer in self._active:
                path = opening.enter_context(replacing(shard_path(self._folder, layer, entry.index)))
                file, self._stored[layer] = opening.enter_context(new_shard(path))
                file.attrs.update(self._attributes(layer))
                for name, (width, dtype) in datasets(self._manifest, layer).items():
                    rows = min(chunk_rows(shape.d_model), entry.tokens)
                    tail = () if width is None else (width,)
                    file.create_dataset(name, (entry.tokens, *tail), dtype, chunks=(rows, *tail))
                self._files[layer] = file
            self._stack = opening.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            for layer, file in self._files.items():
                assert self._rows[layer] == self._entry.tokens, f"layer {layer}: {self._rows[layer]} rows"
                file.attrs["active"] = self._active[layer]
        self._stack.__exit__(kind, error, trace)

    def _attributes(self, layer: int) -> dict[str, Any]:
        manifest, entry = self._manifest, self._entry
        return {
            "schema": SCHEMA,
            "model": manifest.model,
            "weight_hash": manifest.weight_hash,
            "text_sha256": str(manifest.text.get("sha256", "")),
            "text_source": str(manifest.text.get("source", "")),
            "seed": int(manifest.request.get("seed", 0)),
            "storage": manifest.storage,
            "layer": layer,
            "index": entry.index,
            "set": entry.set,
            "tokens": entry.tokens,
        }

    def write(self, layer: int, start: int, rows: Mapping[str, np.ndarray], active: int) -> None:
        """Write all datasets of rows ``start`` .. of one layer. ``active`` is the count of set bits among them."""
        stop = start + len(rows["document"])
        for name, values in rows.items():
            self._files[layer][name][start:stop] = values
        self._stored[layer].check()
        self._active[layer] += active
        self._rows[layer] += stop - start


_STORED = {"up_weight": "fc1_weight", "up_bias": "fc1_bias", "down_norm": "fc2_norm"}  # names in the file, where others
# In the file's metadata: what a neuron's label comes from, else relu.
_ABOUT, _LABELS, _THRESHOLD = "about", "activation", "threshold"


@dataclasses.dataclass(frozen=True)
class RecordedWeights:
    """Weights that a loss needs of a layer, in float32. Tensors of a half that it does not have are empty.

    Attributes:
        up_weight, up_bias: (n, d) and (n,), the map into the neurons. gate_weight, gate_bias: the same of a gate.
        down_norm: (n,), the norms of the columns of the map out of the neurons.
        head_mean: (n_heads, head_dim), the mean of each head's output, from which ``head_norm`` is the distance.
        activation: of ``up``, or of the gate where there is one. threshold: of FATReLU.
    """

    up_weight: Tensor
    up_bias: Tensor
    down_norm: Tensor
    head_mean: Tensor
    gate_weight: Tensor | None = None
    gate_bias: Tensor | None = None
    activation: Activation = Activation.RELU
    threshold: float = 0.0

    @classmethod
    def of(cls, block: BlockParts, shape: ModelDims, head_mean: Tensor) -> "RecordedWeights":
        """Take a layer's modules, with maps in their own dtype."""
        parts: dict[str, Any] = {"activation": shape.activation, "threshold": shape.threshold}
        if block.down is None:
            empty = head_mean.new_empty(0)
            return cls(empty, empty, empty, head_mean.float(), **parts)
        for name, linear in (("up", block.up), ("gate", block.gate)):
            if linear is not None:
                bias = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
                parts |= {f"{name}_weight": linear.weight.detach().cpu(), f"{name}_bias": bias.detach().float().cpu()}
        norms = torch.linalg.vector_norm(block.down.weight.detach().float(), dim=0).cpu()
        return cls(**parts, down_norm=norms, head_mean=head_mean.float() if block.out is not None else norms[:0])

    @property
    def tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> "RecordedWeights":
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return dataclasses.replace(self, **moved)

    @property
    def deciding(self) -> tuple[Tensor, Tensor]:
        """Weight (n, d) and bias (n) of the map that decides which neurons are active: those where it is above 0."""
        if self.gate_weight is None or self.gate_bias is None:
            return self.up_weight, self.up_bias - self.threshold
        return self.gate_weight, self.gate_bias - self.threshold

    def contribution(self, mlp_in: Tensor) -> Tensor:
        """(N, n) fp32, what each neuron adds to the residual stream for mlp_in (N, d): its norm."""
        up = torch.addmm(self.up_bias, mlp_in, self.up_weight.T)
        if self.gate_weight is None or self.gate_bias is None:
            return activate_(self.activation, up, self.threshold).abs_().mul_(self.down_norm)
        gate = activate_(self.activation, torch.addmm(self.gate_bias, mlp_in, self.gate_weight.T), self.threshold)
        gate.mul_(up.relu_() if self.activation == Activation.DRELU else up).abs_()
        return gate.mul_(self.down_norm)

    def save(self, activations: str | Path, layer: int, weight_hash: str) -> None:
        tensors = {_STORED.get(name, name): tensor.contiguous() for name, tensor in self.tensors.items()}
        about = {"model": weight_hash}
        if self.activation != Activation.RELU:  # one entry: several would stand in another order in each file
            about = {_ABOUT: json.dumps({**about, _LABELS: self.activation, _THRESHOLD: self.threshold})}
        with replacing(layer_folder(activations, layer) / WEIGHTS) as path:
            save_file(tensors, path, about)

    @classmethod
    def load(cls, activations: str | Path, layer: int, weight_hash: str) -> "RecordedWeights":
        """Read a layer's weights.

        Raises:
            UserError: missing, damaged, or of another model.
        """
        path = layer_folder(activations, layer) / WEIGHTS
        bring(activations, path)
        try:
            with safe_open(path, "pt") as file:
                about: dict[str, Any] = file.metadata() or {}
                about |= json.loads(about.pop(_ABOUT, "{}"))
                if about.get("model") != weight_hash:
                    raise UserError(f"{path} is of another model than the shards beside it; {COLLECT_AGAIN}")
                check_digests(activations, path)
                names = ["up_weight", "up_bias", "down_norm", "head_mean"]
                names += [name for name in ("gate_weight", "gate_bias") if name in file.keys()]
                tensors = {name: file.get_tensor(_STORED.get(name, name)).float() for name in names}
                kinds: dict[str, Any] = {"activation": Activation(about.get(_LABELS, "relu"))}
                return cls(**tensors, **kinds, threshold=float(about.get(_THRESHOLD, 0)))
        except UserError:
            raise
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            refuse_unreadable(error, path, f"{path} is missing or damaged")
