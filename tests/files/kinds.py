"""Draws a small file of each kind, with what the package reads of it and what another reader does."""

import bz2
import dataclasses
import gzip
import io
import json
import lzma
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from bundles import make_bundle
from conftest import make_text, save_tiny_opt
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dejavu_train import Bundle
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.data.text import TextSource, load_documents
from dejavu_train.data.text_check import check_source
from dejavu_train.ground.files import json_digest
from dejavu_train.models.config_values import read_dims, read_values
from dejavu_train.models.int4 import row_layouts
from dejavu_train.models.load import load_model, load_tokenizer, weight_hash
from dejavu_train.models.stored import check_folder
from dejavu_train.models.tokenizer_hash import tokenizer_hash
from dejavu_train.quantize.foreign import MatrixReader
from dejavu_train.quantize.source import StoredTensors

from . import mutate

SIZES = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 1}
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2")


@dataclasses.dataclass
class Drawn:
    """A file.

    Attributes:
        about: how it was made.
        read: the package's reading. truth: another's, None where it cannot be read.
        is_whole: it must be read.
    """

    about: str
    read: Callable[[], Any]
    truth: Callable[[], Any]
    is_whole: bool = False


class Base:
    """A good model, bundle and texts, made once."""

    def __init__(self, folder: Path) -> None:
        self.model = save_tiny_opt(folder / "opt", **SIZES)
        self.bundle = folder / "bundle"
        make_bundle(self.model).at(0.3, 0.5).save_pretrained(self.bundle)
        self.texts = [make_text(60, seed) for seed in range(12)]


# ------------------------------------------------------------------------------------------------------------- texts


def zstd(data: bytes) -> bytes:
    made = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(made, "zstd") as packed:
        packed.write(data)
    return made.getvalue().to_pybytes()


def parquet(rows: list[Any]) -> bytes:
    made = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), made)
    return made.getvalue()


FORMS: dict[str, Callable[[list[str]], bytes]] = {
    ".txt": lambda texts: "\n\n".join(texts).encode(),
    ".jsonl": lambda texts: "\n".join(json.dumps({"text": text}) for text in texts).encode(),
    ".json": lambda texts: json.dumps([{"text": text} for text in texts], indent=1).encode(),
    ".parquet": lambda texts: parquet([{"text": text} for text in texts]),
}
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": lambda data: gzip.compress(data, mtime=0), ".xz": lzma.compress, ".zst": zstd,
    ".bz2": bz2.compress,
}  # fmt: skip
UNPACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress,
    ".zst": lambda data: pyarrow.input_stream(pyarrow.py_buffer(data), compression="zstd").read(),
}  # fmt: skip


def draw_text(rng: random.Random, folder: Path, base: Base) -> Drawn:
    texts = rng.sample(base.texts, rng.randint(1, 6))
    form, packing = rng.choice(list(FORMS)), rng.choice(list(PACKED))
    packing = "" if form == ".parquet" else packing
    named = packing if rng.random() < 0.8 else rng.choice(("", ".gz", ".xz", ".zst"))
    inner, about = FORMS[form](texts), []
    if form != ".parquet" and rng.random() < 0.3:
        way = rng.choice(("utf-16", "utf-16-le", "utf-8-sig", "latin-1"))
        inner = (inner.decode() + "\u00e9").encode(way) if form == ".txt" else inner.decode().encode(way)
        about.append(way)
    elif form in (".jsonl", ".json") and rng.random() < 0.3:
        rows, said = mutate.json_of(rng, [{"text": text} for text in texts])
        lines = "\n".join(json.dumps(row) for row in rows) if form == ".jsonl" else json.dumps(rows)
        inner, about = lines.encode(), [said]
    data = PACKED[packing](inner)
    if not about and rng.random() < 0.4:
        data, said = mutate.bytes_of(rng, data)
        about.append(said)
    file = folder / f"text{form}{named}"
    file.write_bytes(data)

    def truth() -> Any:
        try:
            body = UNPACKED[named](data)
            if form == ".parquet":
                found = pyarrow.parquet.read_table(io.BytesIO(body))["text"].to_pylist()
            elif form == ".txt":
                found = ["".join(body.decode("utf-8-sig").split())]
                return found if found[0] and "\0" not in found[0] else None
            else:
                text = body.decode("utf-8-sig")
                whole = form == ".json" and text.lstrip().startswith("[")
                rows = json.loads(text) if whole else [json.loads(line) for line in text.split("\n") if line.strip()]
                found = [row if isinstance(row, str) and whole else row["text"] for row in rows]
            return found if found and all(isinstance(each, str) for each in found) else None
        except Exception:
            return None

    def read() -> Any:
        source = TextSource(source=str(file))
        check_source(source)
        found = [document.text for document in load_documents(source)[0]]
        return ["".join("".join(found).split())] if form == ".txt" else found

    whole = not about and named == packing and packing != ".bz2"
    return Drawn(f"{file.name} of {packing or 'plain'} {', '.join(about)}", read, truth, whole)


# -------------------------------------------------------------------------------------------------------- tokenizers


def _unigram(texts: list[str]) -> Tokenizer:
    words = sorted({piece for text in texts for word in text.split() for piece in (f"\u2581{word}", *word)})
    made = Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -float(len(word))) for word in words)], unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def _words(texts: list[str]) -> Tokenizer:
    words = sorted({word for text in texts for word in text.split()})
    made = Tokenizer(models.WordLevel({"<unk>": 0, **{word: i for i, word in enumerate(words, 1)}}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def draw_tokenizer(rng: random.Random, folder: Path, base: Base) -> Drawn:
    shutil.copytree(base.model, folder / "model")
    file, kind = folder / "model" / "tokenizer.json", rng.choice(("BPE", "Unigram", "WordLevel"))
    if kind != "BPE":
        file.write_text((_unigram if kind == "Unigram" else _words)(base.texts).to_str(), encoding="utf-8")
        (folder / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    about = ""
    if rng.random() < 0.3:
        data, about = mutate.bytes_of(rng, file.read_bytes())
        file.write_bytes(data)
    elif rng.random() < 0.6:
        values, about = mutate.json_of(rng, json.loads(file.read_text(encoding="utf-8")))
        file.write_text(json.dumps(values), encoding="utf-8")
    text = base.texts[0]

    def truth() -> Any:
        try:
            ids = Tokenizer.from_file(str(file)).encode(text).ids
        except BaseException:  # what Rust panics with is no Exception
            return None
        return ids if max(ids, default=0) < read_dims(str(base.model)).vocab_size else None

    def read() -> Any:
        name = str(folder / "model")
        check_folder(name, read_dims(name))
        tokenizer_hash(name)
        return load_tokenizer(name)(text)["input_ids"]

    return Drawn(f"{kind} {about}", read, truth, not about)


# ------------------------------------------------------------------------------------------------------- safetensors

_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def numbers_of(data: bytes) -> dict[str, np.ndarray] | None:
    """The tensors of a safetensors file in fp32, by its format's description alone. None: it is none."""
    try:
        size = int.from_bytes(data[:8], "little")
        header, body = json.loads(data[8 : 8 + size].decode()), data[8 + size :]
        made, place = {}, 0
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            raw = np.frombuffer(body[begin:end], _NUMPY[entry["dtype"]])
            if begin != place or any(type(each) is not int or each < 0 for each in (begin, end, *entry["shape"])):
                return None
            wide = (raw.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else raw.astype("<f4")
            made[name], place = wide.reshape(entry["shape"]), end
        return made if place == len(body) else None
    except Exception:
        return None


def draw_safetensors(rng: random.Random, folder: Path, base: Base) -> Drawn:
    shutil.copytree(base.model, folder / "model")
    file, about = folder / "model" / "model.safetensors", ""
    tensors = load_file(file)
    dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16, torch.float64))
    held = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    way = rng.choice(("whole", "bytes", "header", "header", "integers", "renamed", "dropped"))
    name = rng.choice(sorted(held))
    if way == "integers":
        held[name] = held[name].to(rng.choice((torch.int8, torch.int32, torch.uint8, torch.float8_e4m3fn)))
    elif way == "renamed":
        held[f"{name}.old"] = held.pop(name)
    elif way == "dropped":
        del held[name]
    save_file(held, file, {"format": "pt"})
    data = file.read_bytes()
    if way == "bytes":
        data, about = mutate.bytes_of(rng, data)
    elif way == "header":
        size = int.from_bytes(data[:8], "little")
        header, about = mutate.json_of(rng, json.loads(data[8 : 8 + size]))
        raw = json.dumps(header).encode()
        data = len(raw).to_bytes(8, "little") + raw + data[8 + size :]
    file.write_bytes(data)

    def truth() -> Any:
        found = numbers_of(data)
        if found is None or {key: found[key].shape for key in found} != {
            key: tuple(tensors[key].shape) for key in tensors
        }:
            return None
        return found

    def read() -> Any:
        where = str(folder / "model")
        check_folder(where, read_dims(where))
        weight_hash(where)
        state = load_model(where).state_dict()
        return {key: state[key].float().numpy() for key in tensors}

    return Drawn(f"{dtype} {way} {about}", read, truth, way == "whole")


# -------------------------------------------------------------------------------------------------------------- GPTQ


def _packed(nibbles: np.ndarray, axis: int) -> torch.Tensor:
    """Eight nibbles a word along an axis, the first in the lowest bits."""
    moved = np.moveaxis(nibbles.astype(np.uint32), axis, -1)
    eights = moved.reshape(*moved.shape[:-1], -1, 8)
    words = sum(eights[..., i] << np.uint32(4 * i) for i in range(8)).astype(np.uint32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words.view(np.int32), -1, axis)))


def _coded(
    rng: random.Random, size: tuple[int, int], form: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """The parts of a matrix, and its weights."""
    (n, m), made = size, np.random.default_rng(rng.randrange(2**32))
    group = m if form["group_size"] == -1 else form["group_size"]
    each = np.arange(m) // group
    if form["desc_act"]:
        each = made.permutation(each)
    codes, groups = made.integers(0, 16, (n, m)), -(-m // group)
    zeros = np.full((groups, n), 8) if form["sym"] else made.integers(1, 16, (groups, n))
    scales = torch.from_numpy(made.uniform(0.01, 0.1, (groups, n))).to(form["scales"])
    weight = (codes - zeros[each].T) * scales.float().numpy()[each].T
    parts = {"qweight": _packed(codes.T, 0), "qzeros": _packed(zeros - form["less"], 1), "scales": scales}
    return parts | ({"g_idx": torch.from_numpy(each).int()} if form["g_idx"] or form["desc_act"] else {}), weight


def draw_gptq(rng: random.Random, folder: Path, base: Base) -> Drawn:
    shutil.copytree(base.model, folder / "model")
    file = folder / "model" / "model.safetensors"
    form: dict[str, Any] = {"group_size": rng.choice((32, 64, -1, 40, 128)), "sym": rng.random() < 0.6}
    form |= {"desc_act": rng.random() < 0.3, "g_idx": rng.random() < 0.7, "less": rng.choice((0, 1))}
    form["scales"] = rng.choice((torch.float16, torch.bfloat16, torch.float32))
    label = rng.choice(("gptq", "gptq_v2"))
    label = label if form["sym"] else ("gptq", "gptq_v2")[1 - form["less"]]
    tensors, weights = load_file(file), {}
    for part in LINEAR:
        stem = f"model.decoder.layers.0.{part}"
        parts, weights[stem.removeprefix("model.")] = _coded(rng, tuple(tensors.pop(f"{stem}.weight").shape), form)
        tensors |= {f"{stem}.{name}": tensor for name, tensor in parts.items()}
    config = {"quant_method": "gptq", "bits": 4, "group_size": form["group_size"], "sym": form["sym"]}
    config |= {"desc_act": form["desc_act"], "checkpoint_format": label}
    about, name = "", rng.choice([name for name in sorted(tensors) if "layers.0." in name and "norm" not in name])
    way = rng.choice(("whole", "whole", "config", "size", "dropped", "cut", "cast", "index"))
    if way == "config":
        config, about = mutate.json_of(rng, config)
        config |= {} if form["sym"] else {"checkpoint_format": label}  # which alone says what zero points are
    elif way == "size" and any(key.endswith("g_idx") for key in tensors):  # else nothing but the config tells the width
        config["group_size"] = rng.choice((16, 32, 64, 96, 7))
    elif way == "dropped":
        del tensors[name]
    elif way == "cut":
        tensors[name] = tensors[name][:-1].contiguous()
    elif way == "cast":
        tensors[name] = tensors[name].to(rng.choice((torch.int64, torch.int16, torch.float32)))
    elif way == "index" and any(key.endswith("g_idx") for key in tensors):
        name = rng.choice([key for key in sorted(tensors) if key.endswith("g_idx")])
        tensors[name] = torch.full_like(tensors[name], rng.choice((-1, 0, 1000)))
    else:
        way = "whole"
    save_file(tensors, file, {"format": "pt"})
    values = json.loads((folder / "model" / "config.json").read_text()) | {"quantization_config": config}
    (folder / "model" / "config.json").write_text(json.dumps(values))

    told = way == "dropped" and name.endswith("g_idx") and not form["desc_act"]  # by the config
    about = f"{form} {label} {way} {name if way not in ('whole', 'config') else ''} {about}"
    return Drawn(about, _matrices(folder / "model", weights), lambda: weights, way == "whole" or told)


def _matrices(folder: Path, weights: dict[str, np.ndarray]) -> Callable[[], Any]:
    """What reads the matrices of a folder, and the hash of its weights."""

    def read() -> Any:
        values = read_values(str(folder))
        reader, layouts = MatrixReader(StoredTensors(str(folder)), values), row_layouts("opt", read_dims(str(folder)))
        assert weight_hash(str(folder))
        by_module = {module: layouts.get(module.rpartition(".")[2], _Layout()) for module in LINEAR}
        return {
            stem: reader.read(stem, next(by_module[each] for each in LINEAR if stem.endswith(each)))[0].float().numpy()
            for stem in weights
        }

    return read


class _Layout:
    """No rows of ours are asked for."""

    def to_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    class sizes:
        group = 1


# ------------------------------------------------------------------------------------- codes of three other packages

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word of AWQ the nibble of each of eight numbers that follow one another


def _awq(made: Any, rng: random.Random, size: tuple[int, int]) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    group = rng.choice((32, 64, -1))
    n, m = size
    each = np.arange(m) // (m if group == -1 else group)
    groups = each[-1] + 1
    codes, zeros = made.integers(0, 16, (n, m)), made.integers(0, 16, (groups, n))
    scales = torch.from_numpy(made.uniform(0.01, 0.1, (groups, n))).half()

    def placed(numbers: np.ndarray) -> torch.Tensor:
        eights = numbers.reshape(len(numbers), -1, 8)
        return _packed(np.stack([eights[..., AWQ_PLACES.index(i)] for i in range(8)], -1).reshape(len(numbers), -1), 1)

    parts = {"qweight": placed(codes.T), "qzeros": placed(zeros), "scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return config, parts, (codes - zeros[each].T) * scales.float().numpy()[each].T


def _compressed(made: Any, rng: random.Random, size: tuple[int, int]) -> tuple[dict[str, Any], dict[str, Any], Any]:
    (n, m), strategy = size, rng.choice(("group", "channel", "tensor"))
    group = rng.choice((32, 40, 64)) if strategy == "group" else None
    each = np.arange(m) // (group or m)
    codes, shape = made.integers(0, 16, (n, m)), (1,) if strategy == "tensor" else (n, each[-1] + 1)
    scales = torch.from_numpy(made.uniform(0.01, 0.1, shape)).to(rng.choice((torch.bfloat16, torch.float16)))
    wide = np.broadcast_to(scales.float().numpy().reshape(-1, shape[-1]), (n, each[-1] + 1))[:, each]
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    parts = {"weight_packed": _packed(codes, 1), "weight_scale": scales, "weight_shape": torch.tensor([n, m])}
    return config, parts, (codes - 8) * wide


def _nf4(made: Any, rng: random.Random, size: tuple[int, int]) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    (n, m), block = size, rng.choice((32, 64, 128))
    table = np.sort(made.uniform(-1, 1, 16)).astype(np.float32)
    codes, blocks = made.integers(0, 16, n * m).astype(np.uint8), -(-n * m // block)
    absmax = made.uniform(0.1, 1, blocks).astype(np.float32)
    state: dict[str, Any] = {"blocksize": block, "shape": [n, m], "dtype": "float16", "quant_type": "nf4"}
    stored = torch.from_numpy(codes[::2] << 4 | codes[1::2])
    parts = {"weight": stored.view(rng.choice((torch.uint8, torch.bfloat16, torch.float32)))[:, None]}
    parts |= {"weight.quant_map": torch.from_numpy(table), "weight.absmax": torch.from_numpy(absmax)}
    if rng.random() < 0.5:
        second, steps = made.uniform(0, 1, 256).astype(np.float32), made.integers(0, 256, blocks).astype(np.uint8)
        outer = made.uniform(0.1, 1, -(-blocks // 8)).astype(np.float32)
        state |= {"nested_blocksize": 8, "nested_offset": 0.25}
        parts |= {"weight.absmax": torch.from_numpy(steps), "weight.nested_absmax": torch.from_numpy(outer)}
        parts["weight.nested_quant_map"] = torch.from_numpy(second)
        absmax = second[steps] * np.repeat(outer, 8)[:blocks] + np.float32(0.25)
    said = json.dumps(state).encode()
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(said), dtype=torch.uint8)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return config, parts, (table[codes] * np.repeat(absmax, block)[: n * m]).reshape(n, m)


def draw_codes(rng: random.Random, folder: Path, base: Base) -> Drawn:
    shutil.copytree(base.model, folder / "model")
    file, tensors = folder / "model" / "model.safetensors", load_file(base.model / "model.safetensors")
    code, seed, weights, config = rng.choice((_awq, _compressed, _nf4)), rng.randrange(2**32), {}, {}
    for number, part in enumerate(LINEAR):  # one form for all of them
        stem = f"model.decoder.layers.0.{part}"
        size, made = tuple(tensors.pop(f"{stem}.weight").shape), np.random.default_rng([seed, number])
        config, parts, weights[stem.removeprefix("model.")] = code(made, random.Random(seed), size)
        tensors |= {f"{stem}.{name}": tensor for name, tensor in parts.items()}
    way, about = rng.choice(("whole", "whole", "config", "dropped", "cut", "cast")), ""
    name = rng.choice(
        [key for key in sorted(tensors) if "layers.0." in key and "norm" not in key and "bias" not in key]
    )
    if way == "config":
        config, about = mutate.json_of(rng, config)
    elif way == "dropped":
        del tensors[name]
    elif way == "cut":
        tensors[name] = tensors[name][:-1].contiguous() if tensors[name].ndim else tensors[name]
    elif way == "cast":
        tensors[name] = tensors[name].to(rng.choice((torch.int64, torch.int16)))
    save_file(tensors, file, {"format": "pt"})
    values = json.loads((folder / "model" / "config.json").read_text()) | {"quantization_config": config}
    (folder / "model" / "config.json").write_text(json.dumps(values))
    return Drawn(
        f"{code.__name__} {way} {name} {about}", _matrices(folder / "model", weights), lambda: weights, way == "whole"
    )


# ----------------------------------------------------------------------------------------------------------- bundles


def draw_bundle(rng: random.Random, folder: Path, base: Base) -> Drawn:
    shutil.copytree(base.bundle, folder / "bundle")
    way = rng.choice(("whole", "bytes", "bytes", "sealed", "sealed", "sealed", "gone"))
    name, about = rng.choice(("bundle.json", "predictors.safetensors")), ""
    file = folder / "bundle" / name
    values = json.loads((folder / "bundle" / "bundle.json").read_text())
    if way == "bytes":
        data, about = mutate.bytes_of(rng, file.read_bytes())
        file.write_bytes(data)
    elif way == "gone":
        file.unlink()
    elif way == "sealed":  # changed by one who knows how it is sealed
        values.pop("sha256")
        values, about = mutate.json_of(rng, values)
        sealed = values | {"sha256": json_digest(values)}
        (folder / "bundle" / "bundle.json").write_text(json.dumps(sealed))

    def described(specs: Any, tensors: Any) -> Any:
        return [json.loads(json.dumps(spec)) for spec in specs], {key: tensors[key].tolist() for key in sorted(tensors)}

    def truth() -> Any:
        try:
            found = json.loads((folder / "bundle" / "bundle.json").read_text())
            usual = {each.name: each.default for each in dataclasses.fields(PredictorSpec)}
            usual |= {"curve": {}, "init_args": {}, "tensors": {}}
            return described(
                [{**usual, **spec} for spec in found["predictors"]],
                load_file(folder / "bundle" / "predictors.safetensors"),
            )
        except Exception:
            return None

    def read() -> Any:
        bundle = Bundle.from_pretrained(folder / "bundle")
        specs = [dataclasses.asdict(bundle.specs[key]) for key in bundle.specs]
        for layer, target in bundle.specs:
            bundle.predictor(layer, target)
        bundle.at(0.4, 0.5), repr(bundle), bundle.card("owner/name")
        return described(specs, bundle.tensors)

    return Drawn(f"{way} {name if way in ('bytes', 'gone') else ''} {about}", read, truth, way == "whole")


KINDS: dict[str, Callable[[random.Random, Path, Base], Drawn]] = {
    "text": draw_text, "tokenizer": draw_tokenizer, "safetensors": draw_safetensors, "gptq": draw_gptq,
    "bundle": draw_bundle, "codes": draw_codes,
}  # fmt: skip
