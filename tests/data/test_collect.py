import dataclasses
import re
import resource
import shutil

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, make_text, save_tiny_opt
from small_runs import COLLECT, activations, flags, run_main, start_process

import dejavu_train.data.collect as collect_module
from dejavu_train.data.collect import _say_shortfall, collect
from dejavu_train.data.config import MEAN_TOKENS, CollectConfig
from dejavu_train.data.recording import HeadReference, WindowBatch, record_batch
from dejavu_train.data.shard_reader import ShardReader
from dejavu_train.data.shards import ActivationManifest, RecordedWeights, shard_path
from dejavu_train.data.text import TextSource, load_sets
from dejavu_train.data.untrained import warn_if_untrained
from dejavu_train.data.windows import Window
from dejavu_train.families import blocks_of
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hooks import decoder_layers, head_contribution, record
from dejavu_train.models.load import load_model, load_tokenizer


def test_rows_equal_an_unbatched_forward(tiny_opt, text_file):
    """Batching and padding change nothing, and only real tokens are recorded."""
    folder = activations(tiny_opt, text_file)
    model = load_model(str(tiny_opt))
    reader = ShardReader(folder, 1, "val")
    mean = RecordedWeights.load(folder, 1, reader.manifest.weight_hash).head_mean
    start = 0
    for window in reader.windows():
        with torch.no_grad(), record(model, {"attn_in", "mlp_in", "activation", "head_out"}) as kept:
            model(torch.tensor([window]))
        stop = start + len(window)
        expected = kept[1]
        for name in ("attn_in", "mlp_in"):
            torch.testing.assert_close(reader.read(name, start, stop).float(), expected[name][0], atol=4e-3, rtol=2e-3)
        wrong = reader.read("mlp_active", start, stop) != (expected["activation"][0] > 0)
        assert wrong.float().mean() < 1e-3  # batching may turn the sign of a zero
        out_proj = decoder_layers(model)[1].self_attn.out_proj.weight.detach()
        heads = head_contribution(expected["head_out"][0] - mean, out_proj)
        torch.testing.assert_close(reader.read("head_norm", start, stop).float(), heads, atol=1e-2, rtol=1e-2)
        assert reader.read("position", start, stop).tolist() == list(range(len(window)))
        start = stop
    assert start == reader.rows


def test_activations_whose_sum_is_above_float16_are_no_error(tiny_opt):
    """A sum in their own type would be infinite for any large batch."""
    model = load_model(str(tiny_opt)).half()
    layer = decoder_layers(model)[0]
    torch.nn.init.constant_(layer.fc1.bias, 100.0)
    batch = WindowBatch.of([Window(0, np.arange(3, 35))])
    heads = {0: HeadReference.of(blocks_of(model)[0], torch.zeros(4, 12))}
    kept = []

    class Writer:
        def put(self, *given):
            kept.append(given)

    record_batch(model, batch, CollectConfig(dtype="float16"), heads, Writer(), 0)
    assert len(kept) == 1 and kept[0][3] == 32 * 96
    torch.nn.init.constant_(layer.fc1.bias, torch.inf)
    with pytest.raises(UserError, match="the MLP's activation of layer 0 is not finite in float16"):
        record_batch(model, batch, CollectConfig(dtype="float16"), heads, Writer(), 0)


def test_a_heads_mean_is_over_the_first_train_tokens(tiny_opt, text_file):
    folder = activations(tiny_opt, text_file)
    model = load_model(str(tiny_opt))
    reader = ShardReader(folder, 1, "train")
    total, seen = torch.zeros(4, 12), 0
    for window in reader.windows():
        with torch.no_grad(), record(model, {"head_out"}) as kept:
            model(torch.tensor([window]))
        total += kept[1]["head_out"][0].sum(0)
        seen += len(window)
        if seen >= MEAN_TOKENS:
            break
    mean = RecordedWeights.load(folder, 1, reader.manifest.weight_hash).head_mean
    torch.testing.assert_close(mean, total / seen, atol=1e-4, rtol=1e-4)


def test_budgets_are_exact_and_sets_disjoint(tiny_opt, text_file):
    folder = activations(tiny_opt, text_file)
    for name in ("train", "val", "calibration"):
        assert ShardReader(folder, 0, name).rows == COLLECT[f"{name}_tokens"]
    sets, _ = load_sets(TextSource(source=str(text_file)), str(tiny_opt))
    names = [{document.name for document in documents} for documents in sets.values()]
    assert sum(map(len, names)) == len(set().union(*names))


def test_a_missing_shard_is_redone_and_the_rest_kept(tiny_opt, text_file, tmp_path):
    folder = shutil.copytree(activations(tiny_opt, text_file), tmp_path / "a")
    before = ShardReader(folder, 1, "train").read("mlp_in", 0, 12000)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.h5")}
    removed = shard_path(folder, 1, 1)
    removed.unlink()
    (folder / "statistics.json").unlink()
    leftover = folder / "layer_00" / ".tmp-abc-shard_0001.h5"
    leftover.write_bytes(b"half")
    collect(str(tiny_opt), TextSource(source=str(text_file)), CollectConfig(**COLLECT), folder)
    assert not leftover.exists()
    redone = {path for path in folder.rglob("*.h5") if path.stat().st_mtime_ns != times[path]}
    assert redone == {removed, shard_path(folder, 0, 1)}
    torch.testing.assert_close(ShardReader(folder, 1, "train").read("mlp_in", 0, 12000), before)


def test_complete_shards_are_not_touched(tiny_opt, text_file, monkeypatch):
    folder = activations(tiny_opt, text_file)
    monkeypatch.setattr(collect_module, "load_model", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(collect_module, "load_sets", lambda *_: pytest.fail("the text was read"))
    collect(str(tiny_opt), TextSource(source=str(text_file)), CollectConfig(**COLLECT), folder)


def refused(tiny_opt, text, config, folder, *words):
    with pytest.raises(UserError) as caught:
        collect(str(tiny_opt), text, config, folder)
    assert all(word in str(caught.value) for word in words), caught.value


def test_another_request_or_model_is_refused(tiny_opt, text_file, tmp_path):
    folder = shutil.copytree(activations(tiny_opt, text_file), tmp_path / "a")
    config = CollectConfig(**COLLECT)
    text = TextSource(source=str(text_file))
    refused(tiny_opt, text, dataclasses.replace(config, train_tokens=11000), folder, "train_tokens", "12000", "11000")
    other = save_tiny_opt(tmp_path / "other", init_std=0.2)
    refused(other, text, config, folder, "another model")
    (folder / "layer_00" / "shard_0000.h5").unlink()
    changed = tmp_path / "changed" / text_file.name
    changed.parent.mkdir()
    changed.write_text(make_text(30000, seed=5))
    refused(tiny_opt, TextSource(source=str(changed)), config, folder, "changed")


def test_values_beyond_fp16_name_the_remedy(tmp_path, text_file, monkeypatch):
    folder = save_tiny_opt(tmp_path / "big")
    model = load_model(str(folder))
    with torch.no_grad():
        decoder_layers(model)[1].final_layer_norm.bias.fill_(1e5)
    monkeypatch.setattr(collect_module, "load_model", lambda *_: model)
    refused(folder, TextSource(source=str(text_file)), CollectConfig(**COLLECT), tmp_path / "a", "layer 1", "bfloat16")
    assert not ActivationManifest.load(tmp_path / "a").missing(tmp_path / "a") == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(tiny_opt, text_file, tmp_path, dtype):
    config = CollectConfig(
        **COLLECT
        | {"train_tokens": 600, "val_tokens": 200, "calibration_tokens": 200, "dtype": dtype, "storage": "bfloat16"}
    )
    collect(str(tiny_opt), TextSource(source=str(text_file)), config, tmp_path / "a")
    reader = ShardReader(tmp_path / "a", 0, "train")
    position = reader.read("position", 0, 600)
    assert reader.read("mlp_in", 0, 10).dtype == torch.bfloat16
    assert (reader.read("token", 0, 600) == 2).sum() == (position == 0).sum()


@pytest.mark.parametrize("own", [True, False])
def test_a_random_model_is_named_and_a_trained_one_is_not(tiny_opt, caplog, own):
    """Own text is what a random model loses least on."""
    model = load_model(str(tiny_opt), "float32", torch.device("cpu"))
    if own:
        ids = torch.full((4, 1), 2)
        ids = model.generate(ids, attention_mask=ids > 0, do_sample=True, top_k=0, max_new_tokens=63, eos_token_id=[])
    else:
        ids = torch.randint(3, 320, (4, 64))
    warn_if_untrained(model, list(ids.numpy()))
    assert "the model looks untrained: it loses " in caplog.text
    caplog.clear()
    trained = load_model(str(REPOSITORY / "checkpoints" / "opt-mini"), "float32", torch.device("cpu"))
    text = load_tokenizer(str(REPOSITORY / "checkpoints" / "opt-mini"))
    ids = text("Compute the arithmetic mean along the specified axis. " * 3)["input_ids"]
    warn_if_untrained(trained, [np.array(ids)])
    assert not caplog.records


def test_a_text_that_is_shorter_than_what_was_asked_for_is_said(caplog):
    caplog.set_level("INFO")
    _say_shortfall("train", 90, 100)
    assert "the set train has 90 tokens, of the 100 that collect.train_tokens asks for" in caplog.text
    caplog.clear()
    _say_shortfall("train", 96, 100)
    _say_shortfall("val", 96, None)
    assert not caplog.text


def limited(limit, *given):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run_main(*given)


@pytest.mark.parametrize("limit", [20_000, 200_000])
def test_a_limit_of_file_sizes_ends_a_run_in_one_line(tiny_opt, text_file, tmp_path, limit):
    """HDF5 ends a process with a segmentation fault where it cannot close a file."""
    argv, log = flags(tiny_opt, text_file, tmp_path / "run"), tmp_path / "log"
    process = start_process(limited, limit, argv, str(log), "dejavu_train.run.command")
    process.join()
    said = log.read_text()
    assert process.exitcode == 2 and "Traceback" not in said and not list((tmp_path / "run").rglob(".tmp-*"))
    assert re.fullmatch(r"error: .*File too large; raise the limit of file sizes.*", said.strip().splitlines()[-1])
