"""Reads what a model's folder holds without torch: weight files, their headers, the tokenizer. Refuses what is missing.

Headers alone are read, so that a folder of any size is checked in well under a second.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejavu_train.families import ModelDims
from dejavu_train.families.base import families, family_named
from dejavu_train.families.published import is_extra
from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import INT4, config_values, quant_method, refuse_foreign
from dejavu_train.models.hub import fetch, in_hub_cache, model_folder, within
from dejavu_train.models.int4_sizes import COLUMNS_PER_WORD, head_kind, head_sizes, row_sizes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER = "adapter_config.json"
HEAD = "lm_head.weight"
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
GENERATION = "generation_config.json"
MOVED = "rotary_emb.inv_freq"  # old uploads of Llama's kind have it in every layer, and transformers leaves it
_SWITCHES = (
    "do_layer_norm_before", "_remove_final_layer_norm", "use_cache", "enable_bias", "layer_norm_elementwise_affine",
    "tie_word_embeddings",
)  # fmt: skip
_SHARES = ("dropout", "attention_dropout", "layerdrop")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "U64": 8, "U32": 4, "U16": 2, "BOOL": 1,
}  # fmt: skip
NUMBERS = ("F64", "F32", "F16", "BF16")
"""The dtypes of weights that stand for themselves. Any other one is of codes, which need scales."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file. ``begin`` and ``end`` are places in the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def check_folder(name: str, shape: ModelDims) -> None:
    """Compare a model's folder with its config: every tensor there with its size, a tokenizer. A hub id passes.

    Raises:
        UserError: what is missing, surplus, damaged or of another size, by name.
    """
    folder = Path(name)
    if not folder.is_dir():
        return
    values = config_values(folder)
    refuse_foreign(values, name)
    check_weights(name, values, shape)
    _check_types(values, folder / "config.json", shape)
    if (folder / GENERATION).is_file():
        _check_types(_mapping(folder / GENERATION), folder / GENERATION, shape)
    _check_tokenizer(folder, shape)


def has_config_alone(name: str) -> bool:
    """Whether a model's folder has a config.json and no weights, index or tokenizer. Not so a hub id."""
    folder = Path(name)
    kinds = (".safetensors", ".bin", ".json")
    return folder.is_dir() and {file.name for file in folder.iterdir() if file.suffix in kinds} <= {
        "config.json", GENERATION,
    }  # fmt: skip


def check_weights(name: str, values: Mapping[str, Any], shape: ModelDims) -> None:
    """The weights' part of :func:`check_folder`, for the values of a config.json."""
    tensors: dict[str, TensorEntry] = {}
    for file in loaded_files(Path(name)):
        tensors |= read_header(file)
    check_tensors(name, values, tensors, shape)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error}); fetch it again, or save the model again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold keys and values; fetch it again, or save the model again")
    return values


def _check_types(values: Mapping[str, Any], path: Path, shape: ModelDims) -> None:
    """Refuse values that transformers would trip over, or take for something else, when the model is loaded."""

    def is_token(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < shape.vocab_size

    for key, value in values.items():
        if key in _SWITCHES and not isinstance(value, bool):
            wanted = "true or false"
        elif key in _SHARES and not (isinstance(value, (int, float)) and 0 <= value <= 1):
            wanted = "a number from 0 to 1"
        elif key in _TOKENS and value is not None and not all(map(is_token, value if type(value) is list else [value])):
            wanted = f"a token below {shape.vocab_size}"
        else:
            continue
        raise UserError(f"{key} of {path} must be {wanted}, got {value!r}; give the file that belongs to the weights")


def candidates(folder: Path) -> list[str]:
    """The files that transformers' loader looks for in a model's folder, in its order. The first that is there counts.

    Pickled weights are read from the hub's cache alone, where older OPTs have nothing else.

    Raises:
        UserError: config.json names a file that is no safetensors file of the folder.
    """
    named = config_values(folder).get("transformers_weights")
    if named is None:
        return [SINGLE, INDEX, *(PICKLED if in_hub_cache(folder) else ())]
    inside = isinstance(named, str) and not Path(named).is_absolute() and ".." not in Path(named).parts
    if not inside or not named.endswith((".safetensors", ".safetensors.index.json")):
        raise UserError(
            f"transformers_weights in config.json of {folder} must name a safetensors file of the folder, got"
            f" {named!r}; leave it out"
        )
    return [named]


def shards(index: Path) -> list[str]:
    """The names of the files that an index names. Raises :class:`UserError` for an index that cannot be read."""
    try:
        values = json.loads(index.read_text(encoding="utf-8"))
        if not isinstance(values["metadata"], dict):  # without it the loader fails
            raise TypeError
        return sorted({str(Path(part)) for part in values["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"the weight index {index} is damaged; fetch it again, or save the model again") from None


def loaded_files(folder: Path) -> list[Path]:
    """The weight files that transformers' loader takes from a model's folder. What lies beside them is not read: other
    formats and dtypes, and shards of an earlier save.

    Raises:
        UserError: there is none, one is missing, the index cannot be read, or an adapter would be laid over them.
    """
    names = sorted(file.name for file in folder.iterdir())
    if ADAPTER in names:
        raise UserError(
            f"the model folder {folder} holds an adapter ({ADAPTER}), which transformers lays over the weights; merge"
            " it (peft: merge_and_unload) and save the model, or give a folder without it"
        )
    if any(map(_DISTRIBUTED.fullmatch, names)):
        raise UserError(
            f"the model folder {folder} holds a distributed checkpoint (shard-...), which is not read; save the model"
            " with save_pretrained and distributed_checkpoint=False into another folder"
        )
    for candidate in candidates(folder):
        if not (folder / candidate).is_file():
            if candidate in names:
                raise UserError(
                    f"{candidate} of the model folder {folder} is no file, or a link to none; fetch or save it again"
                )
            continue
        if not candidate.endswith(".index.json"):
            return [folder / candidate]
        files = [folder / part for part in shards(folder / candidate)]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise UserError(
                f"the model folder {folder} lacks {absent[0]}, which its index names; fetch the model again"
            )
        if files:
            return files
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        raise UserError(
            f"the model folder {folder} has {others[0]}, and neither {SINGLE} nor {INDEX}, which are what transformers"
            " loads; give the weights that name, or save the model with save_pretrained"
        )
    raise UserError(
        f"the model folder {folder} has no *.safetensors (pickled weights are not read);"
        " save the model with save_pretrained"
    )


def stored_files(name: str, subfolder: str = "", **hub: Any) -> list[Path]:
    """:func:`loaded_files` of a folder or hub id, fetched where they are not there yet. Keywords as of
    :func:`model_folder`."""
    folder = model_folder(name, subfolder, **hub)
    if not Path(name).is_dir():
        for candidate in candidates(folder):
            fetch(name, within(subfolder, [candidate]), "cannot fetch the weights of", hub)
            if (folder / candidate).is_file():
                if candidate.endswith(".index.json"):
                    fetch(name, within(subfolder, shards(folder / candidate)), "cannot fetch the weights of", hub)
                break
    return loaded_files(folder)


def own_name(stored: str) -> str:
    """A tensor's name without that of the model around its layers, such as ``model.``, before it."""
    first, dot, rest = stored.partition(".")
    return rest if dot and any(first == family.around for family in families().values()) else stored


def full_name(own: str) -> str:
    """The name that transformers stores a tensor of ``own_names`` under."""
    return own if own.startswith("lm_head.") else f"model.{own}"


def embedding_name(names: Iterable[str]) -> str:
    """The name of a family's embedding that is among ``own_names``, without one that of an OPT's."""
    known = [family.embedding for family in families().values()]
    return next(filter(set(names).__contains__, known), known[0])


def own_names(names: Iterable[str], model: str, embedding: str) -> dict[str, str]:
    """By the names without ``model.`` before them the names that tensors are stored under, of those that are read.

    Args:
        embedding: what is stored as the LM head alone, which is tied to it, goes by this name.
    Raises:
        UserError: a tensor is there under two names.
    """
    made: dict[str, str] = {}
    for name in names:
        if name.endswith(MOVED):
            continue
        plain_name = own_name(name)
        if plain_name in made:
            raise UserError(
                f"the weights of {model} hold {plain_name} twice, with and without model. before it; leave one out"
            )
        made[plain_name] = name
    if embedding not in made and HEAD in made:
        made[embedding] = made.pop(HEAD)
    return made


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name.

    Raises:
        UserError: the file is truncated or damaged.
    """
    size = file.stat().st_size
    with open(file, "rb") as stored:
        header_bytes = int.from_bytes(stored.read(8), "little")
        if header_bytes > size:
            raise UserError(f"the weights file {file} is truncated or not safetensors; fetch or save it again")
        raw = stored.read(header_bytes)
    base = 8 + header_bytes
    tensors: dict[str, TensorEntry] = {}
    try:
        for name, entry in json.loads(raw).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                if not all(type(each) is int and each >= 0 for each in (begin, end, *shape)):
                    raise TypeError
                tensors[name] = TensorEntry(str(entry["dtype"]), shape, base + begin, base + end)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"the weights file {file} is damaged; fetch or save it again") from None
    place = base
    for name, entry in sorted(tensors.items(), key=lambda each: (each[1].begin, each[1].end)):
        if entry.end > size:
            raise UserError(f"the weights file {file} is truncated at tensor {name}; fetch or save it again")
        width = ITEM_BYTES.get(entry.dtype)
        if entry.begin != place or (width is not None and entry.nbytes != width * math.prod(entry.shape)):
            raise UserError(
                f"the weights file {file} is damaged: {name} has {entry.nbytes} bytes at {entry.begin - base} for"
                f" {entry.dtype} {list(entry.shape)}; fetch or save it again"
            )
        place = entry.end
    return tensors


def expected_tensors(values: Mapping[str, Any], shape: ModelDims) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a model of this config.json stores, by their names without ``model.`` before them.

    ``lm_head.weight`` is among them where it is not the embedding.
    """
    made = dict(family_named(values["model_type"], "this model").stored_tensors(values))
    int4 = row_sizes(values["model_type"], shape) if quant_method(values) == INT4 else {}
    for name in [name for name in made if name.endswith(tuple(f".{part}.weight" for part in int4))]:
        matrix = name.removesuffix(".weight")
        sizes = next(sizes for part, sizes in int4.items() if matrix.endswith(f".{part}"))
        del made[name]
        made |= {f"{matrix}.{part}": found for part, found in sizes.stored.items()}
    head = head_sizes(shape, head_kind(values))
    if head is not None:
        made |= {f"lm_head.{part}": found for part, found in head.stored.items()}
    return made


def layer_prefixes(values: Mapping[str, Any]) -> list[str]:
    """Prefixes of the own names of each layer's tensors, of a model of this config.json."""
    family = family_named(values["model_type"], "this model")
    up = f"{family.matrices['up']}.weight"
    return [name.removesuffix(up) for name in family.stored_tensors(values) if name.endswith(f".{up}")]


def in_layer(values: Mapping[str, Any]) -> re.Pattern[str]:
    """Pattern in the names of a layer's tensors, whatever its number, of a model of this config.json."""
    around, _, _ = layer_prefixes(values)[0].removesuffix(".").rpartition(".")
    return re.compile(rf"(^|\.){re.escape(around)}\.\d+\.")


def check_numbers(model: str, values: Mapping[str, Any], found: Mapping[str, TensorEntry]) -> None:
    """Raise :class:`UserError` for weights that are no numbers, which transformers would take for such.

    Args:
        values: of config.json. The matrices of a quantised model are codes. found: by stored names.
    """
    family = family_named(values["model_type"], model)
    expected = {*family.stored_tensors(values), HEAD}
    if quant_method(values) is not None:
        parts = tuple(f".{part}.weight" for part in family.matrices.values())
        expected = {name for name in expected if not name.endswith(parts)}
        expected -= {HEAD} if head_kind(values) != "fp16" else set()
    for name, entry in found.items():
        if own_name(name) in expected and entry.dtype not in NUMBERS:
            raise UserError(
                f"{name} of {model} is stored as {entry.dtype}, and config.json names no quantisation of it; weights"
                f" must be one of {', '.join(NUMBERS)}: give the config that belongs to them, or save it in float16"
            )


def check_tensors(model: str, values: Mapping[str, Any], found: Mapping[str, TensorEntry], shape: ModelDims) -> None:
    """Raise :class:`UserError` where tensors, by their stored names, are not those of a config.json's values."""
    expected = expected_tensors(values, shape)
    stored = {own: found[name] for own, name in own_names(found, model, embedding_name(expected)).items()}
    missing = sorted(set(expected) - set(stored))
    if missing:
        more = f" and {len(missing) - 1} more" * (len(missing) > 1)
        raise UserError(
            f"the weights of {model} lack {missing[0]}{more}, which its config asks for; give the config that belongs"
            " to them"
        )
    for name, size in expected.items():
        if stored[name].shape != size:
            got = "x".join(map(str, stored[name].shape))
            if len(size) == 2 and stored[name].shape == (size[0], size[1] // COLUMNS_PER_WORD):
                raise UserError(
                    f"{name} of {model} is {got}, as codes of 4 bits are, and config.json has no quantization_config;"
                    " take that file from where the weights are from"
                )
            raise UserError(
                f"{name} of {model} is {got}, its config asks for {'x'.join(map(str, size))}; give the config that"
                " belongs to the weights"
            )
    layers, kind = in_layer(values), values["model_type"]
    others = (name for name in stored if name not in expected and not is_extra(kind, name))
    surplus = sorted(name for name in others if layers.search(name))
    if surplus:
        layer = str(layers.search(surplus[0])[0])  # type: ignore[index]
        known = any(name.startswith(layer) for name in expected)
        why = f"no layer of the type {kind} has it" if known else f"num_hidden_layers is {shape.n_layers}"
        raise UserError(
            f"the weights of {model} hold {surplus[0]}, which its config has no place for ({why}); give the config that"
            " belongs to them"
        )
    check_numbers(model, values, found)


def _check_tokenizer(folder: Path, shape: ModelDims) -> None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return
        raise UserError(
            f"the model folder {folder} has no tokenizer (tokenizer.json, or vocab.json and merges.txt);"
            " save one beside the model with save_pretrained"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = values["model"]["vocab"]
        ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()  # a Unigram's is a list
        largest = max([*ids, *(token["id"] for token in values.get("added_tokens") or ())])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"the tokenizer {path} is damaged; fetch it again, or save it again") from None
    if largest >= shape.vocab_size:
        raise UserError(
            f"the tokenizer of {folder} has the token {largest}, the model {shape.vocab_size} embeddings;"
            " give the tokenizer that belongs to the model"
        )
