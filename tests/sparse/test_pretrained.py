"""``from_pretrained`` takes, ignores or refuses each keyword that transformers has, from folders and from the hub."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from bundles import make_bundle
from conftest import REPOSITORY, save_tiny_tokenizer
from family_models import save_family
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from dejavu_train import Bundle, SparseForCausalLM, SparseOPTForCausalLM
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hub import KEYWORDS
from dejavu_train.sparse import keywords
from dejavu_train.sparse.keywords import sort_keywords

SPARSE = SparseOPTForCausalLM
IDS = torch.arange(3, 9)[None]


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    return make_bundle(tiny_opt)


@pytest.fixture(scope="module")
def joint(tiny_opt, bundle, tmp_path_factory):
    """A folder that holds a model, its bundle and a tokenizer."""
    folder = tmp_path_factory.mktemp("joint") / "model"
    SPARSE.from_pretrained(tiny_opt, bundle, "gather").save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def expected(joint):
    with torch.no_grad():
        return SPARSE.from_pretrained(joint, backend="gather")(IDS).logits


@torch.no_grad()
def same(model, expected):
    logits = model(IDS.to(model.device)).logits.float().cpu()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    return True


def test_every_keyword_of_transformers_has_a_row():
    theirs = set(inspect.signature(PreTrainedModel.from_pretrained).parameters) - {"model_args", "kwargs"}
    for function in (PreTrainedModel.from_pretrained, AutoModelForCausalLM.from_pretrained):
        text = inspect.getsource(inspect.unwrap(function)) + inspect.getsource(PreTrainedModel.from_pretrained)
        theirs |= set(re.findall(r"kwargs\.(?:pop|get)\(\"(\w+)\"", text))
        theirs |= set(re.findall(r"\"(\w+)\"", re.search(r"for name in \[([^\]]*)\]", text)[1]))
    own = set(inspect.signature(SPARSE.from_pretrained).parameters)
    rows = [KEYWORDS, keywords.TAKEN, keywords.WITHIN, keywords.PRIVATE, keywords.IGNORED, keywords.REFUSED]
    known = [name for row in rows for name in row]
    assert len(known) == len(set(known)) and len(theirs) > 40
    assert theirs - {"adapter_kwargs", *own} <= set(known)


@pytest.mark.parametrize("name", keywords.REFUSED)
def test_a_refused_keyword_says_what_to_type(name, tiny_opt, bundle):
    with pytest.raises(UserError, match=f"takes no {name}; [a-z]+") as error:
        SPARSE.from_pretrained("never looked at", bundle, **{name: {"a": 1}})
    assert "\n" not in str(error.value) and "{" not in str(error.value)
    sort_keywords({name: None} | {name: keywords.DEFAULTS.get(name, False)}, "Sparse", "opt")


@pytest.mark.parametrize("name", keywords.IGNORED)
def test_an_ignored_keyword_is_a_line(name, caplog):
    asked = sort_keywords({name: True}, "Sparse", "opt")
    assert (asked.hub, asked.options, asked.attributes) == ({}, {}, {})
    assert [record.getMessage().count(f"{name} changes nothing") for record in caplog.records] == [1]
    sort_keywords({name: None}, "Sparse", "opt")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("given", "message"), [
    ({"num_hidden_layers": 1}, "num_hidden_layers: it is that of the weights"),
    ({"atn_implementation": "eager"}, "did you mean attn_implementation"),
    ({"backends": "mask"}, "did you mean backend"),
    ({"zzz": 1}, "AutoModelForCausalLM.from_pretrained and give it to SparseOPTForCausalLM.from_model"),
    ({"config": "here"}, "config must be an OPTConfig"),
    ({"config": OPTConfig()}, "config has other sizes"),
    ({"dtype": "fp16"}, "dtype must be one of float32, float16, bfloat16 or auto, got fp16"),
    ({"dtype": {"": torch.float16}}, "dtype must be one of"),
    ({"device": "cuda"}, "sees no GPU here"),
    ({"device": torch.device("cuda:1")}, "sees no GPU here"),
    ({"device": 0}, "sees no GPU here"),
    ({"device": "meta"}, "cannot use it here"),
    ({"device": "gpu"}, "device must be auto, cpu"),
    ({"device_map": "cuda"}, "sees no GPU here"),
    ({"device_map": 0}, "sees no GPU here"),
    ({"device_map": {"": "cuda:0"}}, "sees no GPU here"),
    ({"device_map": "everywhere"}, "device must be auto, cpu"),
    ({"attn_implementation": "nothing"}, "attn_implementation 'nothing' cannot be had here .*; give eager or sdpa, or"),
])  # fmt: skip
def test_mistakes_are_a_line(given, message, joint):
    if "GPU" in message and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=message) as error:
        SPARSE.from_pretrained(joint, **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [
    {"dtype": "auto"}, {"dtype": None}, {"dtype": torch.float32}, {"dtype": "float"}, {"torch_dtype": "torch.float32"},
    {"device": None}, {"device": "auto"}, {"device_map": "auto"}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}},
    {"device_map": "auto", "max_memory": {"cpu": "1GiB"}}, {"attn_implementation": "eager"}, {"subfolder": ""},
    {"token": "a", "cache_dir": "/nowhere", "local_files_only": True, "force_download": False, "revision": None},
    {"use_safetensors": True, "weights_only": True, "disable_mmap": True, "_from_auto": True, "_commit_hash": None},
    {"dropout": 0.3, "use_cache": True}, {"config": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("load", [SPARSE.from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_what_is_taken_changes_no_logit(load, given, joint, expected):
    if "config" in given:
        given = {"config": OPTConfig.from_pretrained(joint, dropout=0.3)}
    model = load(joint, backend="mask" if "attn_implementation" in given else "gather", **given)
    assert type(model) is SPARSE and same(model, expected)
    assert model.config.dropout == (0.3 if {"dropout", "config"} & set(given) else 0.0)
    if "attn_implementation" in given:
        assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["sdpa", "flash_attention_2", "flex_attention"])
def test_the_attention_that_bloom_has_is_named(kind, tmp_path):
    folder = save_family("bloom", tmp_path / "bloom")
    bundle = make_bundle(folder)
    with pytest.raises(UserError, match=f"attn_implementation '{kind}' cannot be had here .*; give eager, or") as error:
        SparseForCausalLM.from_pretrained(folder, bundle, "mask", attn_implementation=kind)
    assert "\n" not in str(error.value)
    model = SparseForCausalLM.from_pretrained(folder, bundle, "mask", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_half_precision_by_its_names(joint):
    for name in ("half", "float16", torch.float16, "torch.float16"):
        assert SPARSE.from_pretrained(joint, backend="gather", dtype=name).dtype == torch.float16


def test_attention_is_of_mask(joint, caplog):
    SPARSE.from_pretrained(joint, backend="gather", attn_implementation="eager")
    assert "attn_implementation is of the backend mask; gather" in caplog.text


def test_what_comes_back_beside_the_model(joint, expected):
    model, info = SPARSE.from_pretrained(joint, backend="gather", output_loading_info=True)
    assert same(model, expected) and not info["missing_keys"] and not info["unexpected_keys"]
    shorter = GenerationConfig(max_new_tokens=3)
    model = SPARSE.from_pretrained(joint, backend="gather", generation_config=shorter)
    assert model.generation_config.max_new_tokens == 3


def test_a_folder_within_a_folder(joint, tmp_path, expected):
    shutil.copytree(joint, tmp_path / "outer" / "inner")
    for load in (SPARSE.from_pretrained, AutoModelForCausalLM.from_pretrained):
        assert same(load(tmp_path / "outer", subfolder="inner", backend="gather"), expected)
    with pytest.raises(UserError, match="has no config.json"):
        SPARSE.from_pretrained(tmp_path / "outer")


def test_other_models_are_a_line(bundle):
    llama = LlamaForCausalLM(LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=320
    ))  # fmt: skip
    with pytest.raises(UserError, match="of type llama|got a LlamaForCausalLM"):
        SPARSE.from_model(llama, bundle)


@pytest.fixture
def hub(joint, bundle, tmp_path, monkeypatch):
    """Lays folders out in a cache as the hub's client does. Returns the cache."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def add(name, source, revision="main", sub=""):
        repository = cache / f"models--{name.replace('/', '--')}"
        commit = f"{len(list(repository.glob('snapshots/*'))) + 1:040x}"
        for file in source.rglob("*"):
            if file.is_file():
                blob = repository / "blobs" / f"{commit}-{file.name}"
                blob.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, blob)
                link = repository / "snapshots" / commit / sub / file.relative_to(source)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(os.path.relpath(blob, link.parent))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)

    bundle.save_pretrained(tmp_path / "bundle")
    add("me/joint", joint)
    add("me/joint", joint, "older", "inner")
    add("me/bundle", tmp_path / "bundle")
    pickled = shutil.copytree(joint, tmp_path / "pickled", ignore=shutil.ignore_patterns("predictors"))
    tensors = load_file(pickled / "model.safetensors")
    (pickled / "model.safetensors").unlink()
    values = json.loads((pickled / "config.json").read_text())
    (pickled / "config.json").write_text(json.dumps(values | {"model_type": "opt"}))
    names = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    half = sorted(names)[: len(names) // 2]
    parts = {"a.bin": half, "b.bin": [name for name in names if name not in half]}
    for file, held in parts.items():
        torch.save({name: names[name] for name in held}, pickled / file)
    where = {name: file for file, held in parts.items() for name in held}
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    add("me/pickled", pickled)
    return cache


@pytest.mark.parametrize("given", [
    {}, {"revision": "older", "subfolder": "inner"}, {"local_files_only": True, "token": False},
    {"device_map": "auto", "dtype": "auto"}, {"trust_remote_code": False},
], ids=str)  # fmt: skip
def test_both_together_from_the_hub(hub, given, expected):
    for load in (SPARSE.from_pretrained, AutoModelForCausalLM.from_pretrained):
        model = load("me/joint", backend="gather", **given)
        assert type(model) is SPARSE and same(model, expected)
        assert model.bundle.model == "me/joint" == model.config.name_or_path


def test_a_cache_elsewhere(hub, tmp_path, expected, monkeypatch):
    hub.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot fetch the config of me/joint"):
        SPARSE.from_pretrained("me/joint")
    for load in (SPARSE.from_pretrained, AutoModelForCausalLM.from_pretrained):
        assert same(load("me/joint", backend="gather", cache_dir=tmp_path / "elsewhere"), expected)
    model = SPARSE.from_pretrained("me/pickled", "me/bundle", "gather", cache_dir=tmp_path / "elsewhere")
    assert same(model, expected)  # other names and container: the bundle fits by its weights


def test_a_hub_model_without_a_bundle(hub, bundle, expected):
    assert SPARSE.from_pretrained("me/pickled").bundle.targets == []
    assert same(SPARSE.from_pretrained("me/pickled", bundle, "gather"), expected)
    assert Bundle.from_pretrained("me/bundle").specs == bundle.specs
    assert type(AutoModelForCausalLM.from_pretrained("me/pickled")) is OPTForCausalLM
    with pytest.raises(UserError, match="cannot fetch the config of me/nothing"):
        SPARSE.from_pretrained("me/nothing")


def test_repr_names_backend_and_bundle(joint):
    shown = repr(SPARSE.from_pretrained(joint, backend="gather"))
    assert "backend=gather, sparse_from=0, bundle=Bundle(" in shown and len(shown) < 3000


@pytest.mark.long
def test_whatever_is_imported_first(joint):
    """OPTConfig's module is half imported while ours joins transformers'."""
    code = (
        "import dejavu_train; from transformers import OPTConfig, AutoConfig, AutoModelForCausalLM as auto;"
        "AutoConfig.from_pretrained('.'); print(type(auto.from_pretrained('.', backend='mask')).__name__)"
    )
    paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    options = {"capture_output": True, "text": True, "cwd": joint, "env": os.environ | {"PYTHONPATH": paths}}
    run = subprocess.run([sys.executable, "-c", code], **options)
    assert run.stdout.strip() == "SparseOPTForCausalLM", run.stderr[-500:]


@pytest.mark.parametrize("on_disk", ["all", "the embedding"])
def test_offloaded_parameters_run(tiny_opt, bundle, tmp_path, on_disk):
    """``model.device`` is where they are computed with. transformers says meta, where nothing is."""
    parts = ("layers", "embed_positions", "final_layer_norm")
    places = {
        "model.decoder.embed_tokens": "disk",
        "lm_head": "disk",
        **{f"model.decoder.{part}": "cpu" for part in parts},
    }
    device_map, backend = ({"": "disk"}, "mask") if on_disk == "all" else (places, "gather")
    model = SPARSE.from_pretrained(
        tiny_opt, bundle, backend, device_map=device_map, offload_folder=str(tmp_path / "offloaded")
    )
    wanted = SPARSE.from_pretrained(tiny_opt, bundle, "mask")
    assert model.device == torch.device("cpu")
    torch.testing.assert_close(model(IDS).logits, wanted(IDS).logits, atol=1e-3, rtol=1e-3)
    texts = [each.generate(IDS, max_new_tokens=5, do_sample=False) for each in (model, wanted)]
    assert torch.equal(*texts)
