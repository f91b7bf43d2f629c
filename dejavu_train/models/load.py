"""Reads a model (Hugging Face format, folder or hub id): its weights, and a hash that names them."""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dejavu_train.families import (
    dims_of,
    published_classes,
)
from dejavu_train.families.base import dense_type
from dejavu_train.families.published import say_code
from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.ground.machine import PLACEMENTS
from dejavu_train.models.config_values import INT4, quant_method, read_values, refuse_foreign
from dejavu_train.models.hub import model_folder
from dejavu_train.models.installed import installed
from dejavu_train.models.pickled import load_pickled
from dejavu_train.models.stored import (
    HEAD,
    TensorEntry,
    check_tensors,
    embedding_name,
    full_name,
    own_name,
    read_header,
    stored_files,
)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SPELLED = {  # as safetensors spells the dtypes of stored tensors
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPE_SPELLED = {spelled: dtype for dtype, spelled in SPELLED.items()}
UNKNOWN = (
    "\u2603 \u00fe\u0180\ufffc"  # that a tokenizer may have no tokens for: it says so now, not in the middle of a run
)
HASH_SAMPLE_BYTES = 64 * 1024
Spelling = Callable[[str, str], tuple[str, str] | None]  # of a stored name and dtype; None leaves the tensor out


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``.

    Raises:
        UserError: not one of float32, float16, bfloat16.
    """
    if name not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {name}")
    return DTYPES[name]


def chosen_dtype(asked: str | torch.dtype | None, values: Mapping[str, Any], files: Sequence[Path]) -> torch.dtype:
    """The dtype to load a model in, asked for by any name that transformers takes.

    Args:
        asked: a torch dtype or its name, such as ``float16`` or ``half``. ``auto`` or None: the one that config.json
            says, without one that of the first stored weights.
        values: of config.json.
        files: of the weights.
    Raises:
        UserError: not one of float32, float16, bfloat16.
    """
    kind: Any = asked
    if asked in ("auto", None):
        kind = values.get("dtype") or values.get("torch_dtype") or _stored_dtype(files[0])
    if isinstance(kind, str):
        kind = getattr(torch, kind.removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype) or kind not in DTYPES.values():
        told = f"auto, which is {kind} here" if asked in ("auto", None) else asked
        raise UserError(f"dtype must be one of {', '.join(DTYPES)} or auto, got {told}")
    return kind


def _stored_dtype(file: Path) -> torch.dtype | None:
    dtypes = [DTYPE_SPELLED.get(entry.dtype) for entry in stored_entries(file).values()]
    return next((dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point), None)


def stored_entries(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by their stored names. Pickled ones have no places.

    Raises:
        UserError: the file is damaged.
    """
    if file.suffix == ".safetensors":
        return read_header(file)
    held = load_pickled(file, "meta").items()
    return {name: TensorEntry(SPELLED.get(each.dtype, str(each.dtype)), tuple(each.shape), 0, 0) for name, each in held}


def mapped_dtype(files: Sequence[Path]) -> torch.dtype | None:
    """The dtype of most stored numbers: loaded in it, a model has them mapped from their files, whatever its config
    says. None: pickled files. float32 where no model is loaded in it."""
    nbytes: dict[torch.dtype, int] = {}
    for file in files:
        if file.suffix != ".safetensors":
            return None
        for entry in read_header(file).values():
            dtype = DTYPE_SPELLED.get(entry.dtype)
            if dtype is not None and dtype.is_floating_point:
                nbytes[dtype] = nbytes.get(dtype, 0) + entry.end - entry.begin
    most = max(nbytes, key=nbytes.__getitem__, default=torch.float32)
    return most if most in DTYPES.values() else torch.float32


def resolve_device(name: str | int | torch.device) -> torch.device:
    """``auto`` is the first GPU if there is one, else the CPU. A number is that of a GPU.

    Raises:
        UserError: a device that torch does not know or cannot use here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(f"cuda:{name}" if isinstance(name, int) else name)
    except (RuntimeError, TypeError):
        raise UserError(f"device must be auto, cpu or cuda[:N], got {name}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name} was asked for, but torch sees no GPU here; use --device cpu (device='cpu')")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name} was asked for, but torch sees {torch.cuda.device_count()} GPUs, from cuda:0 on")
    is_available = getattr(getattr(torch, device.type, None), "is_available", lambda: False)
    if not is_available():
        raise UserError(f"device {name} was asked for, but torch cannot use it here; use --device cpu (device='cpu')")
    return device


def load_model(
    name: str,
    dtype: str | torch.dtype | None = "float32",
    device: str | int | torch.device | None = "cpu",
    device_map: Any = None,
    revision: str | None = None,
) -> PreTrainedModel:
    """Load the dense model in evaluation mode.

    Args:
        name: folder or hub id.
        dtype: as :func:`chosen_dtype` takes it.
        device: ignored when ``device_map`` is given.
        device_map: as in transformers, for models larger than one GPU. Needs accelerate.

    A model whose weights lie in 4 bits (``python -m dejavu_train.quantize``) has a ``CodedLinear`` in the place of each
    matrix. Otherwise it is in fp32, whatever ``dtype`` says: rounded to fp16, its weights would select other units.

    Raises:
        UserError: nothing there, a model that no family runs, weights that cannot be read or do not fit the config, or
            that another package quantised.
    """
    return load_with_info(name, dtype, device, device_map, revision)[0]


def load_with_info(
    name: str,
    dtype: str | torch.dtype | None,
    device: str | int | torch.device | None,
    device_map: Any,
    revision: str | None,
    attributes: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """As :func:`load_model`, with what transformers says of the loading (``output_loading_info``).

    Args:
        attributes: values that replace those of config.json. None of the sizes.
        options: keywords of transformers' ``from_pretrained`` that say how to load.
    """
    name = installed(name)
    values = {**read_values(name, revision), **(attributes or {})}
    dims = dims_of(values, name)
    refuse_foreign(values, name)
    files = stored_files(name, revision=revision)  # says what is missing, and that pickled weights are not read
    check_tensors(name, values, {key: entry for file in files for key, entry in stored_entries(file).items()}, dims)
    options["dtype"] = torch.float32 if quant_method(values) == INT4 else chosen_dtype(dtype, values, files)
    if device_map is not None:
        options["device_map"] = _checked_map(device_map)
    placed = resolve_device("cpu" if device is None else device)
    folder = str(model_folder(name, revision=revision))
    try:
        dense, config = dense_class(values)
        _check_attention(dense, config, options.get("attn_implementation"))
        model, info = dense.from_pretrained(folder, config=config, output_loading_info=True, **options)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"cannot load the weights of {name} ({first_line(error)}); fetch or save them again") from None
    except SafetensorError as error:
        raise UserError(f"the weights of {name} are damaged ({error}); fetch or save them again") from None
    if isinstance(model, published_classes.Published):
        model.loaded_from = folder
    say_code(values, name)
    model.config.name_or_path = name  # a hub id as it was given, not the folder of the cache
    _check_loaded(model, info, name)
    model.eval()
    if device_map is None:
        model.to(placed)
    return model, info


def drop_generation_defaults(model: Any) -> None:
    """Let ``generate()`` do what a call says and no more. A model's folder may name penalties and banned words too."""
    model.generation_config = GenerationConfig()


def _check_attention(dense: Any, config: PreTrainedConfig, kind: Any) -> None:
    """Raise :class:`UserError` for an attention implementation that a class does not have, or not on this machine."""
    if kind is None:
        return
    asked = copy.deepcopy(config)
    asked._attn_implementation = kind
    try:
        with torch.device("meta"):
            dense(asked)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        works = ["eager", "sdpa"] if dense._supports_sdpa else ["eager"]
        why = first_line(error).split(". ")[0]
        raise UserError(
            f"attn_implementation {kind!r} cannot be had here ({why}); give {' or '.join(works)}, or leave it out"
        ) from None


def random_model(values: Mapping[str, Any]) -> PreTrainedModel:
    """A dense model of a config.json's values, with the first values that transformers gives its weights."""
    dense, config = dense_class(values)
    return dense(config)  # type: ignore[no-any-return]


def empty_model(values: Mapping[str, Any]) -> PreTrainedModel:
    """The same in evaluation mode with its weights on the meta device, where they take no memory.

    Numbers that follow from the configuration alone, such as those of rotary positions, are there.
    """
    with torch.device("meta"):
        model = random_model(values)
    for name, module in list(model.named_modules()):
        if module._non_persistent_buffers_set:  # others are stored with the weights
            model.set_submodule(name, type(module)(module.config))
    return model.eval().requires_grad_(False)


def dense_class(values: Mapping[str, Any]) -> tuple[Any, PreTrainedConfig]:
    """The class and the configuration of a dense model, or of the dense one that was saved with a bundle."""
    kind = dense_type(values["model_type"])
    config = CONFIG_MAPPING[kind].from_dict({**values, "model_type": kind})
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config


def _check_loaded(model: PreTrainedModel, info: Mapping[str, Any], name: str) -> None:
    """Raise :class:`UserError` for tensors that a family's ``stored_tensors`` does not name and transformers lacks."""
    tied = bool(getattr(model.config, "tie_word_embeddings", True))  # then the head is the embedding, and not stored
    missing = [key for key in info["missing_keys"] if key != HEAD or not tied]
    if missing:
        raise UserError(
            f"the weights of {name} lack {len(missing)} tensors of its config, first {sorted(missing)[:1]}; give the"
            " config that belongs to them"
        )
    head = model.get_output_embeddings().weight
    if tied and head is not model.get_input_embeddings().weight:
        # Both are stored and differ, so the loader left them apart. What is on the meta device lies on disk: unknown.
        model.config.tie_word_embeddings = head.is_meta


def _checked_map(device_map: Any) -> Any:
    """``device_map`` as it is, with devices that are there. Raises :class:`UserError` as :func:`resolve_device`."""
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise UserError("device_map needs accelerate: pip install 'dejavu-train[large]'") from None
    for place in device_map.values() if isinstance(device_map, Mapping) else [device_map]:
        if place not in (*PLACEMENTS, "disk"):
            resolve_device(place)
    return device_map


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """The tokenizer beside the model.

    Raises:
        UserError: nothing there.
    """
    folder = model_folder(name, revision=revision)
    try:
        made = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        made(UNKNOWN)
        return made
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise UserError(f"cannot load a tokenizer from {name}: {first_line(error)}") from None
    except Exception as error:  # so the package tokenizers, which is compiled, refuses what it cannot read
        if type(error) is not Exception:
            raise
        raise UserError(f"cannot load a tokenizer from {name}: {first_line(error)}") from None


def _canonical(name: str, dtype: str) -> tuple[str, str]:
    """The name of a stored tensor in transformers' model, and its dtype as safetensors spells it."""
    return full_name(own_name(name)), dtype


def _stored_tensors(file: Path) -> Iterator[tuple[str, str, list[int], int, Callable[[int, int], bytes]]]:
    """Every tensor's name, dtype, shape, bytes, and a function that reads bytes ``start`` to ``stop`` of them."""
    if file.suffix == ".safetensors":
        with open(file, "rb") as stored:
            for name, entry in read_header(file).items():

                def read(start: int, stop: int, begin: int = entry.begin) -> bytes:
                    stored.seek(begin + start)
                    return stored.read(stop - start)

                yield name, entry.dtype, list(entry.shape), entry.end - entry.begin, read
        return
    # Only files of hub repositories come here (older OPT uploads have nothing else).
    for name, tensor in load_pickled(file).items():
        flat = tensor.contiguous().flatten().view(torch.uint8).numpy()
        dtype = SPELLED.get(tensor.dtype, str(tensor.dtype))
        yield name, dtype, list(tensor.shape), len(flat), lambda start, stop: flat[start:stop].tobytes()  # noqa: B023


def _samples(n_bytes: int, full: bool) -> list[tuple[int, int]]:
    """Byte ranges of a tensor that go into the hash: 64 KiB at four fixed offsets, or everything in pieces."""
    if full or n_bytes <= 4 * HASH_SAMPLE_BYTES:
        return [(start, min(start + (1 << 24), n_bytes)) for start in range(0, n_bytes, 1 << 24)]
    last = n_bytes - HASH_SAMPLE_BYTES
    return [(last * part // 3, last * part // 3 + HASH_SAMPLE_BYTES) for part in range(4)]


def _rows(files: Iterable[Path], full: bool, spelling: Spelling) -> dict[str, bytes]:
    """By name the digest of a tensor, where two files have it that of the later one, which the loader keeps."""
    rows: dict[str, bytes] = {}
    for file in files:
        names: dict[str, bytes] = {}
        for stored_name, stored_dtype, shape, n_bytes, read in _stored_tensors(file):
            spelled = spelling(stored_name, stored_dtype)
            if spelled is None:
                continue
            name, dtype = spelled
            if name in names:
                raise UserError(
                    f"the weights file {file} holds a tensor twice, with and without model. before it; drop one"
                )
            digest = hashlib.sha256(f"{name} {dtype} {shape}".encode())
            for start, stop in _samples(n_bytes, full):
                digest.update(read(start, stop))
            names[name] = digest.digest()
        rows |= names
    return rows


def _digest(rows: Mapping[str, bytes], full: bool) -> str:
    digest = hashlib.sha256()
    for name in sorted(rows):
        digest.update(name.encode() + b"\0" + rows[name])
    return ("full:" if full else "") + digest.hexdigest()


def weight_hash(name: str, full: bool = False, revision: str | None = None) -> str:
    """A name for the exact weights: SHA-256 over the sorted (name, dtype, shape, sampled bytes) of the stored tensors.

    Names are those of transformers' model, and dtypes are spelled as safetensors does, whatever the files have. An LM
    head that equals the embedding is left out. So any container and sharding of the same tensors has the same hash.
    With ``full`` every byte is read (``--verify full``). The two kinds differ and are only compared with their own.

    Raises:
        UserError: no weights there, or a damaged file.
    """
    files = stored_files(name, revision=revision)
    rows = _rows(files, full, _canonical)
    if HEAD in rows:
        embedding = full_name(embedding_name(map(own_name, rows)))
        head = _rows(
            files, full, lambda each, dtype: (embedding, dtype) if _canonical(each, dtype)[0] == HEAD else None
        )[embedding]
        if rows.get(embedding, head) == head:
            rows[embedding] = head
            del rows[HEAD]
    return _digest(rows, full)
