"""Reads an OPT model (Hugging Face format, folder or hub id): its weights, and a hash that names them."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from dejavu_train.errors import UserError
from dejavu_train.models.shape import (
    INT4,
    OPT,
    SPARSE_OPT,
    OPTShape,
    check_exists,
    quant_method,
    read_shape,
    read_values,
    refuse_foreign,
)
from dejavu_train.models.stored import read_header, weight_files

__all__ = [
    "DTYPES",
    "OPTShape",
    "load_opt",
    "load_tokenizer",
    "read_shape",
    "resolve_device",
    "torch_dtype",
    "weight_hash",
]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HASH_SAMPLE_BYTES = 64 * 1024


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``.

    Raises:
        UserError: not one of float32, float16, bfloat16.
    """
    if name not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {name}")
    return DTYPES[name]


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first GPU if there is one, else the CPU.

    Raises:
        UserError: a device that torch does not know or cannot use here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device must be auto, cpu or cuda[:N], got {name}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name} was asked for, but torch sees no GPU here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name} was asked for, but torch sees {torch.cuda.device_count()} GPUs, from cuda:0 on")
    return device


def load_opt(
    name: str,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    device_map: Any = None,
    revision: str | None = None,
) -> OPTForCausalLM:
    """Load the dense model in evaluation mode.

    Args:
        name: folder or hub id.
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        device: ignored when ``device_map`` is given.
        device_map: as in transformers, for models larger than one GPU; needs accelerate.

    A model whose weights lie in 4 bits (``python -m dejavu_train.quantize``) has a ``CodedLinear`` in the place of each
    matrix and is in fp32 otherwise, whatever ``dtype`` says: rounded to fp16, its weights would select other units.

    Raises:
        UserError: nothing there, not a pre-norm OPT, weights that cannot be read or do not fit the config, or that
            another package quantised.
    """
    values = read_values(name, revision)
    OPTShape.from_values(values, name)
    refuse_foreign(values, name)
    if device_map is not None:
        try:
            import accelerate  # noqa: F401
        except ImportError:
            raise UserError("device_map needs accelerate: pip install 'dejavu-train[large]'") from None
    kind = torch.float32 if quant_method(values) == INT4 else torch_dtype(dtype)
    options: dict[str, Any] = {"dtype": kind, "revision": revision}
    if values["model_type"] == SPARSE_OPT:
        options["config"] = OPTConfig.from_dict({**values, "model_type": OPT})
    if Path(name).is_dir():
        stored_files(name, revision)  # says which file is missing, and that pickled weights are not read
        options["use_safetensors"] = True
    if device_map is not None:
        options["device_map"] = device_map
    try:
        model, info = OPTForCausalLM.from_pretrained(name, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"cannot load the weights of {name}: {_first_line(error)}") from None
    except SafetensorError as error:
        raise UserError(f"the weights of {name} are damaged ({error}); fetch or save them again") from None
    tied = bool(getattr(model.config, "tie_word_embeddings", True))  # then the head is the embedding, and not stored
    missing = [key for key in info["missing_keys"] if key != "lm_head.weight" or not tied]
    if missing or info["mismatched_keys"]:
        raise UserError(f"the weights of {name} lack {len(missing)} tensors of its config, first {sorted(missing)[:1]}")
    surplus = sorted(key for key in info["unexpected_keys"] if ".layers." in key)
    if surplus:
        raise UserError(
            f"the weights of {name} hold {surplus[0]}, which its config has no place for (num_hidden_layers is"
            f" {model.config.num_hidden_layers}); give the config that belongs to them"
        )
    model.eval()
    if device_map is None:
        model.to(torch.device(device))
    return model


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """The tokenizer beside the model.

    Raises:
        UserError: nothing there.
    """
    check_exists(name)
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise UserError(f"cannot load a tokenizer from {name}: {_first_line(error)}") from None
    except Exception as error:  # so the package tokenizers, which is compiled, refuses what it cannot read
        if type(error) is not Exception:
            raise
        raise UserError(f"cannot load a tokenizer from {name}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def stored_files(name: str, revision: str | None) -> list[Path]:
    """The weight files of a folder or hub id, safetensors if there are any."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors*", "*.json"]))
            if not list(folder.glob("*.safetensors")):
                folder = Path(snapshot_download(name, revision=revision, allow_patterns=["pytorch_model*"]))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise UserError(f"cannot fetch the weights of {name}: {str(error).splitlines()[0]}") from None
        return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    return weight_files(folder)


def _hash_safetensors(file: Path, full: bool) -> list[tuple[str, bytes]]:
    rows = []
    with open(file, "rb") as stored:
        for name, entry in read_header(file).items():
            digest = hashlib.sha256(f"{name} {entry.dtype} {list(entry.shape)}".encode())
            for start, stop in _samples(entry.end - entry.begin, full):
                stored.seek(entry.begin + start)
                digest.update(stored.read(stop - start))
            rows.append((name, digest.digest()))
    return rows


def _samples(n_bytes: int, full: bool) -> list[tuple[int, int]]:
    """Byte ranges of a tensor that go into the hash: 64 KiB at four fixed offsets, or everything in pieces."""
    if full or n_bytes <= 4 * HASH_SAMPLE_BYTES:
        return [(start, min(start + (1 << 24), n_bytes)) for start in range(0, n_bytes, 1 << 24)]
    last = n_bytes - HASH_SAMPLE_BYTES
    return [(last * part // 3, last * part // 3 + HASH_SAMPLE_BYTES) for part in range(4)]


def _hash_pickled(file: Path, full: bool) -> list[tuple[str, bytes]]:
    # Only files of hub repositories come here (older OPT uploads have nothing else); weights_only runs no code.
    tensors: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    rows = []
    for name, tensor in tensors.items():
        digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        flat = tensor.contiguous().flatten().view(torch.uint8)
        for start, stop in _samples(flat.numel(), full):
            digest.update(flat[start:stop].numpy().tobytes())
        rows.append((name, digest.digest()))
    return rows


def weight_hash(name: str, full: bool = False, revision: str | None = None) -> str:
    """A name for the exact weights: SHA-256 over the sorted (name, dtype, shape, sampled bytes) of the stored tensors.

    The same for any sharding of the same tensors. With ``full`` every byte is read (``--verify full``); the two
    kinds differ and are only compared with their own kind.

    Raises:
        UserError: no weights there, or a damaged file.
    """
    check_exists(name)
    rows: list[tuple[str, bytes]] = []
    for file in stored_files(name, revision):
        rows += _hash_safetensors(file, full) if file.suffix == ".safetensors" else _hash_pickled(file, full)
    digest = hashlib.sha256()
    for tensor_name, tensor_digest in sorted(rows):
        digest.update(tensor_name.encode() + b"\0" + tensor_digest)
    return ("full:" if full else "") + digest.hexdigest()
