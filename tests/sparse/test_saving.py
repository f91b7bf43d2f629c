"""A model is saved over whatever lies in a folder: whole, loadable by everyone, or not at all."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from bundles import make_bundle
from safetensors.torch import load_file
from transformers import OPTForCausalLM

from dejavu_train import Bundle, SparseOPTForCausalLM
from dejavu_train.bundle.artifact import METADATA
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.models.stored import INDEX, SINGLE, loaded_files
from dejavu_train.sparse import saving

IDS = torch.arange(3, 9)[None]


@pytest.fixture
def folder(tiny_opt, tmp_path):
    """A model in shards, as it came from somewhere, with files of its owner beside them."""
    load_model(str(tiny_opt)).save_pretrained(tmp_path / "model", max_shard_size="40KB")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    for file in tiny_opt.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    assert len(loaded_files(tmp_path / "model")) > 3
    return tmp_path / "model"


@pytest.fixture
def model(folder, tiny_opt):
    """That model, changed."""
    made = SparseOPTForCausalLM.from_pretrained(folder, make_bundle(tiny_opt), "gather")
    with torch.no_grad():
        made.model.decoder.layers[1].fc2.weight.mul_(1.25)
    return SparseOPTForCausalLM.from_model(made, made.bundle, "gather")


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@torch.no_grad()
def check(folder, model):
    """The folder gives the model back, by each of the ways, and holds nothing of an earlier save."""
    wanted = model(IDS).logits
    again = SparseOPTForCausalLM.from_pretrained(folder, backend="gather")
    torch.testing.assert_close(again(IDS).logits, wanted)
    dense = OPTForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(dense.model.decoder.layers[1].fc2.weight, model.model.decoder.layers[1].fc2.weight)
    taken = {file.name for file in loaded_files(folder)}
    there = {name for name in os.listdir(folder) if name.endswith((".safetensors", ".json")) and "model" in name}
    assert there == taken | ({INDEX} if len(taken) > 1 else set())
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    assert (folder / "notes.txt").read_text() == "mine"
    assert all(os.stat(file).st_mode & 0o044 for file in loaded_files(folder))


@pytest.mark.parametrize("size", ["50GB", "40KB", "90KB"])
def test_over_the_folder_that_it_came_from(folder, model, size):
    model.save_pretrained(folder, max_shard_size=size)
    check(folder, model)
    model.save_pretrained(folder, max_shard_size="60KB")
    check(folder, model)
    model.save_pretrained(folder)
    check(folder, model)
    assert json.loads((folder / "predictors" / METADATA).read_text())["model"] == ".."


@pytest.mark.parametrize("place", ["weights", "bundle", "check"])
def test_a_save_that_fails_changes_nothing(folder, model, tmp_path, monkeypatch, place):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    where = {
        "weights": "transformers.modeling_utils.safe_save_file",
        "check": "dejavu_train.sparse.saving.check_weights",
        "bundle": "dejavu_train.bundle.artifact.save_file",
    }
    monkeypatch.setattr(where[place], fail)
    before = content(folder)
    for target in (folder, tmp_path / "new" / "folder"):
        with pytest.raises(OSError, match="No space"):
            model.save_pretrained(target, max_shard_size="60KB")
    assert content(folder) == before and not (tmp_path / "new" / "folder").exists()


@pytest.mark.parametrize("size", ["50GB", "40KB"])
def test_a_kill_at_any_rename_leaves_no_mixture(folder, model, monkeypatch, size):
    """Whoever loads the folder then gets the old weights, the new ones, or an error."""
    name = "model.decoder.layers.1.fc2.weight"
    whole = {file: load_file(folder / file.name) for file in loaded_files(folder)}
    old = {key: tensor for held in whole.values() for key, tensor in held.items()}
    new = old | {name: model.model.decoder.layers[1].fc2.weight.detach()}
    replace, unlink = os.replace, Path.unlink
    for step in range(12):
        target = shutil.copytree(folder, folder.parent / f"{size}-{step}")
        left = [step]

        def counted(function):
            def act(*args, **kwargs):
                if ".tmp-" not in str(args[-1]):
                    left[0] -= 1  # noqa: B023
                    if left[0] < 0:  # noqa: B023
                        raise KeyboardInterrupt
                return function(*args, **kwargs)

            return act

        with monkeypatch.context() as patched:
            patched.setattr(saving.os, "replace", counted(replace))
            patched.setattr(Path, "unlink", counted(unlink))
            with pytest.raises(KeyboardInterrupt):
                model.save_pretrained(target, max_shard_size=size)
                raise KeyboardInterrupt
        try:
            found = {key: t for file in loaded_files(target) for key, t in load_file(file).items()}
        except UserError:
            continue
        assert found.keys() == old.keys()
        matches = [all(torch.equal(found[key], each[key]) for key in old) for each in (old, new)]
        assert any(matches), step
        if (target / "predictors" / METADATA).exists():
            assert matches[1]


def test_what_cannot_be_loaded_again_is_refused(folder, model, tmp_path):
    before = content(folder)
    for option in ("variant", "distributed_checkpoint"):
        with pytest.raises(UserError, match=f"takes no {option}"):
            model.save_pretrained(folder, **{option: "fp16"})
    with pytest.raises(UserError, match="is a file"):
        model.save_pretrained(folder / "notes.txt")
    torch.nn.utils.parametrizations.weight_norm(model.model.decoder.layers[0].fc1)
    with pytest.raises(UserError, match="an OPT's folder cannot hold this model: the weights of it lack .*merge"):
        model.save_pretrained(folder)
    model.save_pretrained(folder, is_main_process=False)
    assert content(folder) == before


def test_a_vocabulary_that_grew(folder, model):
    model.resize_token_embeddings(328)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    assert SparseOPTForCausalLM.from_pretrained(folder, backend="gather").lm_head.weight.shape[0] == 328
    assert Bundle.from_pretrained(folder / "predictors").shape.vocab_size == 328


def test_pushed_together(folder, model, monkeypatch, tmp_path):
    """What is uploaded is whole, and names no folder of this machine."""
    calls = []

    class Api:
        def __init__(self, token=None):
            self.token = token

        def create_repo(self, repo_id, private, exist_ok):
            calls.append((repo_id, private, self.token))

        def upload_folder(self, repo_id, folder_path, **options):
            files = content(folder_path)
            calls.append((repo_id, set(files), options))
            named = (str(tmp_path.parent).encode(), str(folder_path).encode())
            assert not any(name in held for held in files.values() for name in named)
            Bundle.from_pretrained(folder_path / "predictors").check_model(str(folder_path))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    model.push_to_hub("me/joint", token="a", revision="older", max_shard_size="60KB")
    model.save_pretrained(folder, push_to_hub=True, repo_id="me/again", private=True)
    assert calls[0] == ("me/joint", None, "a") and calls[2] == ("me/again", True, None)
    assert calls[1][2] == {"revision": "older", "commit_message": "Upload SparseOPTForCausalLM"}
    assert {INDEX, "config.json", "README.md", f"predictors/{METADATA}", "predictors/predictors.safetensors"} <= calls[
        1
    ][1]
    assert SINGLE in calls[3][1]


def test_what_stands_in_a_place_is_refused_before_anything_changes(folder, model):
    for name in ("generation_config.json", "predictors"):
        place, aside = folder / name, folder.parent / f"moved-{name}"
        if place.exists():
            place.rename(aside)
        if name == "predictors":
            place.write_text("mine")
        else:
            place.mkdir()
        before = content(folder)
        with pytest.raises(UserError, match=f"{name} is a (file|folder), in the place of what is saved; move it away"):
            model.save_pretrained(folder)
        assert content(folder) == before
        place.unlink() if place.is_file() else place.rmdir()
        if aside.exists():
            aside.rename(place)
    model.save_pretrained(folder)
