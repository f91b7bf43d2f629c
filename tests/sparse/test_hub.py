"""The hub's whole way, against a server that speaks its protocol: pushed by one process, loaded by id in others."""

import json
import os

import pytest
import torch
from bundles import make_bundle
from conftest import REPOSITORY, save_tiny_tokenizer
from forks import Forks
from hub_server import TOKEN, running_hub
from transformers import AutoTokenizer

from dejavu_train import Bundle, SparseOPTForCausalLM

PUSH = """
import sys
from transformers import AutoTokenizer
from dejavu_train import Bundle, SparseOPTForCausalLM
from dejavu_train.ground.errors import UserError
joint, dense, bundle, results, token = sys.argv[1:]
model = SparseOPTForCausalLM.from_pretrained(joint, backend="gather")
try:
    model.push_to_hub("me/joint", token="hf_wrong")
except UserError as error:
    print(error)
model.push_to_hub("me/joint", token=token, private=True, results=results, tags=["mine"])
AutoTokenizer.from_pretrained(joint).push_to_hub("me/joint", token=token)
for name, revision in (("me/joint", None), ("me/nothing", None), ("me/joint", "nowhere")):
    try:
        SparseOPTForCausalLM.from_pretrained(name, revision=revision, token=token if revision else "hf_wrong")
    except UserError as error:
        print(error)
Bundle.from_pretrained(bundle).push_to_hub("me/bundle", token=token, private=False, results=results)
Bundle.from_pretrained(bundle).at(mlp_density=0.2).push_to_hub("me/bundle", token=token)
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(dense).push_to_hub("me/dense", token=token)
"""
LOAD = """
import json, os, sys
import torch
import dejavu_train
from dejavu_train import Bundle, SparseOPTForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
cache, options = sys.argv[1], json.loads(sys.argv[2])
ids = torch.arange(3, 9)[None]
def logits(model):
    assert type(model).__name__ == "SparseOPTForCausalLM", type(model)
    return model(ids).logits[0, -1].tolist()
found = {}
with torch.no_grad():
    sparse = SparseOPTForCausalLM.from_pretrained
    own = {"backend": "gather", "cache_dir": f"{cache}/auto"}  # first: the cache has nothing yet
    found["auto"] = logits(AutoModelForCausalLM.from_pretrained("me/joint", **own, **options))
    found["ours"] = logits(sparse("me/joint", backend="gather", **options))
    found["elsewhere"] = logits(sparse("me/joint", backend="gather", cache_dir=cache, **options))
    found["apart"] = logits(sparse("me/dense", "me/bundle", "gather", **options))
    old = Bundle.from_pretrained("me/bundle", revision=f"{1:040x}", **options)
    found["density"] = old.mean_density("mlp"), Bundle.from_pretrained("me/bundle", **options).mean_density("mlp")
    write = pipeline("text-generation", model="me/joint", model_kwargs={"backend": "gather"}, **options)
    assert type(write.model).__name__ == "SparseOPTForCausalLM"
    found["pipeline"] = write("the model", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    from lm_eval.models.huggingface import HFLM
    tokenizer = AutoTokenizer.from_pretrained("me/joint", **options)
    judge = HFLM(pretrained="me/joint", tokenizer=tokenizer, device="cpu", batch_size=1, dtype="float32", **options)
    assert type(judge.model).__name__ == "SparseOPTForCausalLM", type(judge.model)
    found["lm-eval"] = judge._model_call(ids)[0, -1].tolist()
    from dejavu_train.extras.serving.server import ServeConfig, load, load_tokenizer
    os.environ |= {"HF_TOKEN": value for value in options.values()}  # a server has no option for it
    found["served"] = load(ServeConfig("me/joint")).bundle.digest(), len(load_tokenizer("me/joint"))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    return make_bundle(tiny_opt)


@pytest.fixture(scope="module")
def places(tiny_opt, bundle, tmp_path_factory):
    """A model saved with its bundle and a tokenizer, the bundle alone, and what infer.py measured of it."""
    folder = tmp_path_factory.mktemp("hub")
    SparseOPTForCausalLM.from_pretrained(tiny_opt, bundle, "gather").save_pretrained(folder / "joint")
    save_tiny_tokenizer(folder / "joint")
    bundle.save_pretrained(folder / "bundle")
    row = {"text": "prose", "selection": "dense", "sparse_from": 0, "as_calibrated": False, "perplexity": 11.5}
    sparse = {"selection": "predicted", "as_calibrated": True, "perplexity": 11.75, "increase": 0.0217}
    found = {"schema": 3, "bundle": str(folder / "bundle"), "hashes": {"model": bundle.weight_hash}}
    found |= {"texts": [{"name": "prose", "tokens": 800}], "timing": []}
    found["quality"] = [row, row | sparse | {"increase_error": 0.001, "mlp_selected": 0.21}]
    (folder / "results").mkdir()
    (folder / "results" / "results.json").write_text(json.dumps(found))
    return folder


@pytest.fixture(scope="module")
def hub():
    with running_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """What processes know of this machine: no other hub and no other cache."""
    paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": paths, "HF_HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_DISABLE_XET": "1"}
    return os.environ | own | {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def forks(home):
    """Processes that have read what knows nothing of a hub."""
    with Forks(["torch", "torch._dynamo", "torch.distributed.tensor", "scipy.stats", "numba"], home) as forks:
        yield forks


@pytest.fixture(scope="module")
def online(forks, home, hub):
    read = [
        "lm_eval.models.huggingface",
        "transformers.pipelines.text_generation",
        "dejavu_train.extras.serving.server",
    ]
    return forks.fork(read, home | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.endpoint})


@pytest.fixture(scope="module")
def pushed(places, tiny_opt, online, tmp_path_factory):
    """What the process printed that pushed all there is."""
    arguments = [places / "joint", tiny_opt, places / "bundle", places / "results", TOKEN]
    return online.run(tmp_path_factory.mktemp("push"), PUSH, *arguments)


def test_pushed_and_loaded_by_id(places, tiny_opt, bundle, tmp_path, hub, forks, home, online, pushed):
    refused, *unseen = pushed
    assert refused.startswith("cannot push the model to me/joint: ") and "hf auth login" in refused
    names = ("me/joint", "me/nothing", "me/joint")
    assert [line.split(":")[0] for line in unseen] == [f"cannot fetch the config of {name}" for name in names]
    assert {name: each.private for name, each in hub.repositories.items()} == {
        "me/joint": True, "me/bundle": False, "me/dense": False
    }  # fmt: skip
    check_cards(hub)
    (line,) = online.run(tmp_path, LOAD, tmp_path / "cache", json.dumps({"token": TOKEN}))[-1:]
    found = json.loads(line)
    with torch.no_grad():
        joint = SparseOPTForCausalLM.from_pretrained(places / "joint", backend="gather")
        expected = joint(torch.arange(3, 9)[None]).logits[0, -1]
        narrow = SparseOPTForCausalLM.from_pretrained(tiny_opt, bundle.at(mlp_density=0.2), "gather")
        apart = narrow(torch.arange(3, 9)[None]).logits[0, -1]
    for name in ("ours", "auto", "elsewhere", "lm-eval"):
        torch.testing.assert_close(torch.tensor(found[name]), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.tensor(found["apart"]), apart, rtol=1e-4, atol=1e-4)
    assert found["density"] == pytest.approx([bundle.mean_density("mlp"), 0.2], abs=0.02)
    assert found["pipeline"].startswith("the model")
    assert found["served"] == [joint.bundle.digest(), len(AutoTokenizer.from_pretrained(places / "joint"))]
    asked = len(hub.asked)
    offline = forks.fork([], home | {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": hub.endpoint})
    (line,) = offline.run(tmp_path, LOAD, tmp_path / "cache", "{}")[-1:]
    assert json.loads(line) == found and len(hub.asked) == asked


def check_cards(hub):
    """Both cards have the measured rows, are whole, and name no folder of this machine."""
    joint, alone = (hub.repositories[name] for name in ("me/joint", "me/bundle"))
    text = joint.commits[joint.refs["main"]]["README.md"].decode()
    first = alone.commits[f"{1:040x}"]["README.md"].decode()
    for card in (text, first):
        assert "| prose | 800 | 11.5 | 11.75 | 2.17 % | 0.1 % | 21 % |" in card
        assert card.count("| mlp | low_rank |") == 2 and "/tmp" not in card
    assert "\n- mine\n" in text and "model: `me/joint`" in text and 'pipeline("text-generation"' in text
    assert "## Measured" not in alone.commits[alone.refs["main"]]["README.md"].decode()
    assert "predictors/README.md" in joint.commits[joint.refs["main"]]


def test_results_of_something_else_are_refused(places, bundle):
    from dejavu_train.ground.errors import UserError

    dry = {"dry_run": True, "results": places / "results"}
    assert "me/bundle" in bundle.push_to_hub("me/bundle", **dry)
    with pytest.raises(UserError, match="was measured with another bundle; run infer.py with this one"):
        bundle.at(mlp_density=0.2).push_to_hub("me/bundle", **dry)
    with pytest.raises(UserError, match=r"results.json \(python infer.py writes it\) is missing"):
        bundle.push_to_hub("me/bundle", dry_run=True, results=places)
    model = SparseOPTForCausalLM.from_pretrained(places / "joint", backend="gather")
    with pytest.raises(UserError, match="push_to_hub takes no privat; it takes results"):
        model.push_to_hub("me/joint", privat=True)
    with pytest.raises(UserError, match="no repository of the hub"):
        model.push_to_hub("a/b/c")
    assert Bundle.from_pretrained(places / "bundle").specs == bundle.specs
