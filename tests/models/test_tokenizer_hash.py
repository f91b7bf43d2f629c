"""One hash for one tokenizer, however its files are written. Another one for any other."""

import json
import shutil

import pytest
from conftest import REPOSITORY

from dejavu_train.models.load import load_tokenizer
from dejavu_train.models.tokenizer_hash import hash_of, tokenizer_hash

MINI = REPOSITORY / "checkpoints" / "opt-mini"


def test_the_hash_of_opt_mini_is_that_of_every_version_of_transformers():
    assert tokenizer_hash(str(MINI)) == "ac517870e0efe0580fbaa324cfd5cd48f2ad198edcddb9fb99871d7a414a591d"


def test_files_that_are_written_in_another_way(tmp_path):
    """Saved again by transformers, and as vocab.json and merges.txt, the files of OPT on the hub."""
    tokenizer = load_tokenizer(str(MINI))
    tokenizer.save_pretrained(tmp_path / "again")
    assert hash_of(load_tokenizer_of(tmp_path / "again")) == hash_of(tokenizer)
    model = json.loads((MINI / "tokenizer.json").read_text("utf-8"))["model"]
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    config = {
        "tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "eos_token": "</s>", "unk_token": "<unk>",
        "pad_token": "<pad>", "add_bos_token": True, "additional_special_tokens": ["<s>"],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert hash_of(load_tokenizer_of(folder)) == hash_of(tokenizer)


def load_tokenizer_of(folder):
    shutil.copy(MINI / "config.json", folder)
    return load_tokenizer(str(folder))


def swap_merges(values):
    merges = values["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]


def swap_ids(values):
    vocabulary = values["model"]["vocab"]
    first, last = list(vocabulary)[300], list(vocabulary)[-1]
    vocabulary[first], vocabulary[last] = vocabulary[last], vocabulary[first]


def lower(values):
    values["normalizer"] = {"type": "Lowercase"}


def start_with_nothing(values):
    values["post_processor"] = None


def strip_around_padding(values):
    values["added_tokens"][1] |= {"lstrip": True}


@pytest.mark.parametrize("change", [swap_merges, swap_ids, lower, start_with_nothing, strip_around_padding])
def test_another_tokenizer_of_the_same_size(tmp_path, change):
    folder = shutil.copytree(MINI, tmp_path / "other")
    values = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    change(values)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    assert tokenizer_hash(str(folder)) != tokenizer_hash(str(MINI))


def test_a_folder_without_a_tokenizer(tiny_opt, tmp_path):
    folder = shutil.copytree(tiny_opt, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert tokenizer_hash(str(folder)) is None
