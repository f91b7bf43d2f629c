"""What is hashed and checked is what transformers' loader takes. A hash knows neither names nor container."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_opt
from family_models import save_family
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, OPTForCausalLM

from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.load import load_model, weight_hash
from dejavu_train.models.stored import INDEX, SINGLE, check_folder, loaded_files
from dejavu_train.quantize.source import StoredTensors

MARK = "model.decoder.final_layer_norm.bias"  # a tensor that says which file it came from
EMBEDDING, HEAD = "model.decoder.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tiny_opt, tmp_path):
    return shutil.copytree(tiny_opt, tmp_path / "model")


@pytest.fixture
def tensors(tiny_opt):
    return load_file(tiny_opt / SINGLE)


def write(path, tensors, mark=None):
    marked = tensors if mark is None else {**tensors, MARK: torch.full_like(tensors[MARK], mark)}
    path.parent.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in marked.items()}, path, {"format": "pt"})


def write_shards(folder, tensors, mark, stem="model", index=INDEX):
    names = sorted(tensors)
    where = {}
    for part in (0, 1):
        file = f"{stem}-0000{part + 1}-of-00002.safetensors"
        held = {name: tensors[name] for name in names[part::2]}
        write(folder / file, held, mark if MARK in held else None)
        where |= dict.fromkeys(held, file)
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


LAYOUTS = {
    "one file": lambda f, t: write(f / SINGLE, t, 1),
    "shards": lambda f, t: ((f / SINGLE).unlink(), write_shards(f, t, 1)),
    "shards by other names": lambda f, t: ((f / SINGLE).unlink(), write_shards(f, t, 1, "part")),
    "an index of an earlier save": lambda f, t: (write_shards(f, t, 2), write(f / SINGLE, t, 1)),
    "an index that names what is gone": lambda f, t: (
        write_shards(f, t, 2),
        (f / "model-00001-of-00002.safetensors").unlink(),
        write(f / SINGLE, t, 1),
    ),
    "shards of an earlier save": lambda f, t: (
        (f / SINGLE).unlink(), write_shards(f, t, 1), write(f / "model-00003-of-00003.safetensors", t, 2)
    ),
    "another format": lambda f, t: (write(f / SINGLE, t, 1), write(f / "consolidated.safetensors", t, 2)),
    "another dtype": lambda f, t: (write(f / SINGLE, t, 1), write(f / "model.fp16.safetensors", t, 2)),
    "pickled beside it": lambda f, t: (
        write(f / SINGLE, t, 1), torch.save({**t, MARK: torch.full_like(t[MARK], 2)}, f / "pytorch_model.bin")
    ),
    "a folder in it": lambda f, t: (write(f / SINGLE, t, 1), write(f / "original" / SINGLE, t, 2)),
    "links, as in the hub's cache": lambda f, t: (
        write(f.parent / "blob", t, 1), (f / SINGLE).unlink(), (f / SINGLE).symlink_to(f.parent / "blob")
    ),
    "named by config.json": lambda f, t: (
        write(f / SINGLE, t, 2), write(f / "other.safetensors", t, 1),
        (f / "config.json").write_text(
            json.dumps(json.loads((f / "config.json").read_text()) | {"transformers_weights": "other.safetensors"})
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hash_and_check_read_what_is_loaded(folder, tensors, layout):
    LAYOUTS[layout](folder, tensors)
    theirs = OPTForCausalLM.from_pretrained(folder)
    assert set(theirs.model.decoder.final_layer_norm.bias.tolist()) == {1.0}
    found = {name: tensor for file in loaded_files(folder) for name, tensor in load_file(file).items()}
    assert set(found[MARK].tolist()) == {1.0} and found.keys() == tensors.keys()
    assert set(load_model(str(folder)).model.decoder.final_layer_norm.bias.tolist()) == {1.0}
    assert set(StoredTensors(str(folder))["decoder.final_layer_norm.bias"].tolist()) == {1.0}
    check_folder(str(folder), read_dims(str(folder)))
    write(folder.parent / "alone" / SINGLE, tensors, 1)
    shutil.copy(folder / "config.json", folder.parent / "alone")
    if layout == "named by config.json":
        (folder.parent / "alone" / SINGLE).rename(folder.parent / "alone" / "other.safetensors")
    assert weight_hash(str(folder)) == weight_hash(str(folder.parent / "alone"))


@pytest.mark.parametrize(("change", "message"), [
    (lambda f: (f / SINGLE).rename(f / "model.fp16.safetensors"), "has model.fp16.safetensors, and neither"),
    (lambda f: (f / SINGLE).rename(f / "model-00001-of-00002.safetensors"), "and neither model.safetensors nor"),
    (lambda f: (f / SINGLE).unlink() or (f / SINGLE).symlink_to(f / "gone"), "is no file, or a link to none"),
    (lambda f: (f / "adapter_config.json").write_text("{}"), "holds an adapter.*merge_and_unload"),
    (lambda f: (f / "shard-00001-model-00001-of-00001.safetensors").touch(), "distributed checkpoint"),
    (lambda f: (f / "config.json").write_text('{"model_type": "opt", "transformers_weights": "../a.safetensors"}'),
     "transformers_weights"),
])  # fmt: skip
def test_what_the_loader_would_not_take_or_would_change_is_refused(folder, change, message):
    change(folder)
    for action in (weight_hash, lambda name: loaded_files(folder)):
        with pytest.raises(UserError, match=message):
            action(str(folder))


def renamed(tensors):
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("full", [False, True])
def test_the_hash_knows_neither_names_nor_container(folder, tensors, full, tmp_path):
    hub = tmp_path / "models--o--n" / "snapshots" / "1" / "sub"
    shutil.copytree(folder, hub)
    (hub / SINGLE).unlink()
    own = weight_hash(str(folder), full)
    torch.save(renamed(tensors), hub / "pytorch_model.bin")
    assert weight_hash(str(hub), full) == own
    torch.save({**tensors, HEAD: tensors[EMBEDDING]}, hub / "pytorch_model.bin")  # as transformers pickled a tied head
    assert weight_hash(str(hub), full) == own and load_model(str(hub), "auto").dtype == torch.float32
    for held in (renamed(tensors), {**tensors, HEAD: tensors[EMBEDDING].clone()}):
        write(folder / SINGLE, held)
        assert weight_hash(str(folder), full) == own
        check_folder(str(folder), read_dims(str(folder)))
    changed = {**tensors, MARK: tensors[MARK] + 1}
    write(folder / SINGLE, renamed(changed))
    assert weight_hash(str(folder), full) != own
    write(folder / SINGLE, {**tensors, "decoder.final_layer_norm.bias": tensors[MARK] + 1})
    with pytest.raises(UserError, match="twice"):
        weight_hash(str(folder), full)


HEADS = {
    "head only": lambda t: {**{name: t[name] for name in t if name != EMBEDDING}, HEAD: t[EMBEDDING]},
    "both equal": lambda t: {**t, HEAD: t[EMBEDDING].clone()},
    "both differ": lambda t: {**t, HEAD: t[EMBEDDING] * 0.5 + 0.01},
}


@pytest.mark.parametrize("heads", HEADS)
def test_a_tied_head_by_any_name(folder, tensors, heads):
    own = weight_hash(str(folder))
    write(folder / SINGLE, HEADS[heads](tensors))
    check_folder(str(folder), read_dims(str(folder)))
    assert (weight_hash(str(folder)) == own) is (heads != "both differ")
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        expected = OPTForCausalLM.from_pretrained(folder)(ids).logits
        model = load_model(str(folder))
        torch.testing.assert_close(model(ids).logits, expected)
        model.tie_weights()  # as several of transformers' functions do
        torch.testing.assert_close(model(ids).logits, expected)
        model.save_pretrained(folder.parent / "again")
        torch.testing.assert_close(load_model(str(folder.parent / "again"))(ids).logits, expected)
    assert weight_hash(str(folder)) == weight_hash(str(folder.parent / "again"))
    source = StoredTensors(str(folder))
    torch.testing.assert_close(source["decoder.embed_tokens.weight"], tensors[EMBEDDING])


def test_a_head_of_its_own_counts(tmp_path):
    folder = save_tiny_opt(tmp_path, tie_word_embeddings=False)
    tensors, own = load_file(folder / SINGLE), weight_hash(str(folder))
    others = {name: tensor for name, tensor in tensors.items() if name != HEAD}
    write(folder / SINGLE, {**others, f"model.{HEAD}": tensors[HEAD]})
    assert weight_hash(str(folder)) == own
    write(folder / SINGLE, {**tensors, HEAD: tensors[HEAD] + 1})
    assert weight_hash(str(folder)) != own


@pytest.mark.parametrize("name", ["llama", "persimmon"])
def test_positions_of_old_uploads_are_left_out(name, tmp_path):
    """Llama 2 and Persimmon were uploaded with the frequencies of every layer, which transformers does not read."""
    folder = save_family(name, tmp_path / "m")
    tensors = load_file(folder / SINGLE)
    moved = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in (0, 1)}
    write(folder / SINGLE, tensors | moved)
    check_folder(str(folder), read_dims(str(folder)))
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        torch.testing.assert_close(load_model(str(folder))(ids).logits, expected)
    assert not any("rotary" in each for each in StoredTensors(str(folder)))


def test_quantised_from_any_names(tmp_path):
    from dejavu_train.quantize.command import main

    folder = save_tiny_opt(tmp_path / "m", hidden_size=64, word_embed_proj_dim=64)
    tensors = load_file(folder / SINGLE)
    write(folder / SINGLE, renamed(HEADS["head only"](tensors)))
    main(["--model", str(folder), "--output", str(tmp_path / "q"), "--quantizer", "rtn"])
    assert load_model(str(tmp_path / "q")).lm_head.weight.shape == tensors[EMBEDDING].shape


FC1 = "model.decoder.layers.0.fc1.weight"


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", [FC1, MARK, EMBEDDING])
def test_weights_that_are_no_numbers_are_refused(folder, tensors, dtype, name):
    write(folder / SINGLE, {**tensors, name: tensors[name].to(dtype)})
    for door in (
        lambda: check_folder(str(folder), read_dims(str(folder))),
        lambda: load_model(str(folder)),
        lambda: StoredTensors(str(folder)),
    ):
        with pytest.raises(UserError, match="names no quantisation"):
            door()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_in_every_width_of_numbers_are_read(folder, tensors, dtype):
    write(folder / SINGLE, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    check_folder(str(folder), read_dims(str(folder)))
    got = load_model(str(folder)).state_dict()[FC1]
    torch.testing.assert_close(got, tensors[FC1].to(dtype).float(), rtol=0, atol=0)


def edited_header(path, change):
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    made = json.dumps(header).encode()
    path.write_bytes(len(made).to_bytes(8, "little") + made + raw[8 + size :])


@pytest.mark.parametrize("change", [
    lambda h: h[FC1].update(shape=[96, 47]),
    lambda h: h[FC1].update(shape=[-96, -48]),
    lambda h: h[FC1].update(dtype="F16"),
    lambda h: h[FC1].update(data_offsets=[0, h[FC1]["data_offsets"][1]]),
    lambda h: h[FC1].update(data_offsets=[place + 4 for place in h[FC1]["data_offsets"]]),
    lambda h: h[FC1].update(data_offsets=[float(place) for place in h[FC1]["data_offsets"]]),
    lambda h: h[FC1].pop("dtype"),
], ids=["smaller", "negative", "narrower", "overlapping", "moved", "floats", "no dtype"])  # fmt: skip
def test_a_header_that_contradicts_itself_is_refused(folder, change):
    edited_header(folder / SINGLE, change)
    for door in (lambda: check_folder(str(folder), read_dims(str(folder))), lambda: weight_hash(str(folder))):
        with pytest.raises(UserError, match="damaged|truncated"):
            door()


def in_the_cache(folder, tmp_path):
    hub = tmp_path / "models--o--n" / "snapshots" / "1"
    shutil.copytree(folder, hub)
    (hub / SINGLE).unlink()
    return hub


def test_a_container_of_old_torch_is_read(folder, tensors, tmp_path):
    hub = in_the_cache(folder, tmp_path)
    torch.save(tensors, hub / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert weight_hash(str(hub)) == weight_hash(str(folder)) and load_model(str(hub), "auto").dtype == torch.float32
    assert torch.equal(StoredTensors(str(hub))["decoder.layers.0.fc1.weight"], tensors[FC1])


class Harmful:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize(("held", "message"), [
    (lambda t: b"garbage" * 99, "is damaged"),
    (lambda t: b"", "is damaged"),
    (lambda t: {**t, "step": Harmful()}, "more than tensors"),
    (lambda t: {"state_dict": t}, "'state_dict', which is no tensor"),
    (lambda t: list(t.values()), "by name"),
    (lambda t: {**t, FC1: t[FC1].to(torch.int8)}, "names no quantisation"),
], ids=["garbage", "empty", "code", "nested", "list", "integers"])  # fmt: skip
@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_are_tensors_alone(folder, tensors, tmp_path, monkeypatch, held, message, zipped):
    monkeypatch.chdir(tmp_path)
    hub, made = in_the_cache(folder, tmp_path), held(tensors)
    if isinstance(made, bytes):
        (hub / "pytorch_model.bin").write_bytes(made)
    else:
        torch.save(made, hub / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    for door in (lambda: load_model(str(hub)), lambda: StoredTensors(str(hub))):
        with pytest.raises(UserError, match=message):
            door()
    assert not Path("ran").exists()


def test_a_unigram_tokenizer_is_whole(folder):
    values = json.loads((folder / "tokenizer.json").read_text())
    pieces = [["<unk>", 0.0], *([f"p{number}", -1.0] for number in range(20))]
    values["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pieces}
    values["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(values))
    dims = read_dims(str(folder))
    check_folder(str(folder), dims)
    values["model"]["vocab"] += [["more", -1.0]] * dims.vocab_size
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="embeddings"):
        check_folder(str(folder), dims)
