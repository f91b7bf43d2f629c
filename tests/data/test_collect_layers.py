"""Collecting by layers: the same files as with the whole model, and a killed run goes on in its layer."""

import json
import shutil

import pytest
from family_models import CASES, HYBRIDS, save_family
from safetensors.torch import load_file, save_file
from small_runs import COLLECT

from dejavu_train.data import collect_layers
from dejavu_train.data.collect import collect
from dejavu_train.data.config import CollectConfig
from dejavu_train.data.parts import record_part
from dejavu_train.data.shards import ActivationManifest, file_digests
from dejavu_train.data.text import TextSource
from dejavu_train.ground.errors import UserError
from dejavu_train.models.stored import SINGLE


def made(model, text_file, folder, **settings):
    config = CollectConfig(**COLLECT | settings)
    collect(str(model), TextSource(source=str(text_file)), config, folder)
    return file_digests(folder)


@pytest.fixture(scope="module")
def collected(tiny_opt, text_file, tmp_path_factory):
    """The folder of the whole model's activations."""
    folder = tmp_path_factory.mktemp("collected") / "whole"
    made(tiny_opt, text_file, folder)
    return folder


@pytest.fixture(scope="module")
def whole(collected):
    """Its files' digests."""
    return file_digests(collected)


def test_files_are_the_same(tiny_opt, text_file, tmp_path, whole):
    assert len(whole) > 6
    assert made(tiny_opt, text_file, tmp_path / "layers", by_layers=True) == whole
    assert not (tmp_path / "layers" / collect_layers.STREAM).exists()


@pytest.mark.parametrize("kind", ["another config", "64 bits", "norms of 32 bits"])
def test_files_are_the_same_whatever_dtype_is_named_or_stored(kind, tiny_opt, text_file, tmp_path):
    folder = shutil.copytree(tiny_opt, tmp_path / "model")
    tensors, values = load_file(folder / SINGLE), json.loads((folder / "config.json").read_text())
    if kind == "64 bits":
        tensors = {name: tensor.double() for name, tensor in tensors.items()}
    elif kind == "norms of 32 bits":
        tensors = {name: tensor if tensor.dim() == 1 else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**values, "dtype": "bfloat16"}))
    whole = made(folder, text_file, tmp_path / "whole")
    assert made(folder, text_file, tmp_path / "layers", by_layers=True) == whole


def test_a_killed_run_goes_on_in_its_layer(tiny_opt, text_file, tmp_path, monkeypatch, whole):
    folder, ran = tmp_path / "layers", []
    collect_layer, record = collect_layers._collect_layer, collect_layers.record_batch

    def watched(passes, *rest):
        ran.append(passes.stream.next)
        collect_layer(passes, *rest)

    def killed(*arguments):
        if ran[-1] == 1 and len(ran) == 2:
            raise KeyboardInterrupt
        record(*arguments)

    monkeypatch.setattr(collect_layers, "_collect_layer", watched)
    monkeypatch.setattr(collect_layers, "record_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        made(tiny_opt, text_file, folder, by_layers=True)
    assert made(tiny_opt, text_file, folder, by_layers=True) == whole
    assert ran == [0, 1, 1]


def test_states_of_a_run_that_is_killed_at_its_end_are_removed(tiny_opt, text_file, tmp_path, monkeypatch, whole):
    folder = tmp_path / "layers"

    def killed(stream):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(collect_layers.Stream, "remove", killed)
        made(tiny_opt, text_file, folder, by_layers=True)
    assert (folder / collect_layers.STREAM).is_dir()
    assert made(tiny_opt, text_file, folder, by_layers=True) == whole
    assert not (folder / collect_layers.STREAM).exists()


def test_a_missing_shard_alone_is_redone(tiny_opt, text_file, tmp_path, collected, whole):
    folder = shutil.copytree(collected, tmp_path / "whole")
    kept = folder / "layer_01" / "shard_0000.h5"
    before = kept.stat().st_mtime_ns
    (folder / "layer_01" / "shard_0001.h5").unlink()
    assert made(tiny_opt, text_file, folder, by_layers=True) == whole
    assert kept.stat().st_mtime_ns == before


@pytest.mark.parametrize("parts", [(0, 1, 2), (2,), ()])
def test_parts_of_several_processes_are_the_whole(tiny_opt, text_file, tmp_path, parts, whole):
    """Also where some of three recorded nothing."""
    folder = tmp_path / "layers"
    config, left = CollectConfig(**COLLECT | {"by_layers": True}), []

    def share():
        for number in parts:
            record_part(folder, number, 3)
        left.append(len(ActivationManifest.load(folder).missing(folder)))

    collect(str(tiny_opt), TextSource(source=str(text_file)), config, folder, share=share)
    assert file_digests(folder) == whole
    assert left == [{3: 0, 1: 4, 0: 5}[len(parts)]]
    assert not list(folder.glob("stream*")) + list(folder.glob("parts*"))


def test_a_device_map_is_another_way():
    with pytest.raises(UserError, match="set --collect.device_map null"):
        CollectConfig(by_layers=True, device_map="auto")


@pytest.mark.parametrize("name", [name for name in (*CASES, *HYBRIDS) if name != "galactica"])
def test_every_family_runs_by_layers(name, text_file, tmp_path):
    """With an own dtype, and fewer tokens: two shards of two layers."""
    model = save_family(name, tmp_path / "model")
    fewer = {"train_tokens": 500, "val_tokens": 200, "calibration_tokens": 200, "dtype": "bfloat16"}
    whole = made(model, text_file, tmp_path / "whole", **fewer)
    assert made(model, text_file, tmp_path / "layers", by_layers=True, **fewer) == whole
