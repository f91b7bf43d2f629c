"""Pretraining by several processes, in parts of a step, from files of token ids, until a held-out text gets worse."""

import json
import multiprocessing
import os

import numpy as np
import pytest
import torch
from conftest import make_text, save_tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from dejavu_train.extras.pretrain import run as module
from dejavu_train.extras.pretrain.forward import run_layer, training_loss
from dejavu_train.extras.pretrain.run import PretrainConfig, make_model, pretrain
from dejavu_train.extras.pretrain.stream import load_stream, read_stream, token_stream, write_stream
from dejavu_train.families import blocks_of, dims_of
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model


def _config(output, text, **changes) -> PretrainConfig:
    values = {
        "output": str(output), "text": (str(text),), "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ffn": 64,
        "max_positions": 64, "context": 32, "batch_rows": 4, "steps": 4, "warmup_steps": 2, "device": "cpu",
        "learning_rate": 1e-2, "checkpoint_seconds": 1000.0,
    }  # fmt: skip
    return PretrainConfig(**values | changes)


@pytest.fixture
def ids(tmp_path):
    """A file of token ids, and a function that makes a folder with its tokenizer."""
    save_tiny_tokenizer(tmp_path / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "text.tokens.xz"
    write_stream(path, token_stream(tokenizer, [make_text(3000)]), tokenizer)

    def folder(name):
        save_tiny_tokenizer(tmp_path / name)
        return tmp_path / name

    return path, folder


def test_a_file_of_ids_is_read_as_it_was_written(ids, tmp_path):
    path, folder = ids
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder("again"))
    text = make_text(3000)
    assert np.array_equal(read_stream(path, tokenizer), token_stream(tokenizer, [text]))
    both = load_stream([str(path)], tokenizer, [text])
    assert np.array_equal(both[: len(both) // 2], both[len(both) // 2 :])
    assert path.stat().st_size < 2 * len(both) // 2
    other = module.train_tokenizer([make_text(500)], 300)
    with pytest.raises(UserError, match="ids of another tokenizer"):
        read_stream(path, other)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        read_stream(path, tokenizer)
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        pretrain(_config(tmp_path / "bare", path))


def test_two_processes_in_parts_make_the_model_of_one(ids, monkeypatch):
    path, folder = ids
    alone = load_model(str(pretrain(_config(folder("alone"), path))))
    output = folder("together")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000)}
    config = _config(output, path, micro_rows=1)
    for name, value in shared.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    second = multiprocessing.get_context("fork").Process(target=pretrain, args=(config,))
    second.start()
    monkeypatch.setenv("RANK", "0")
    pretrain(config)
    second.join(60)
    assert second.exitcode == 0
    together = load_model(str(output)).state_dict()
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(together[name], expected, atol=2e-3, rtol=0, msg=name)
    assert json.loads((output / "pretraining.json").read_text())["processes"] == 2
    with pytest.raises(UserError, match="multiple of the 2 processes, got 3"):
        pretrain(_config(output, path, batch_rows=3))


def test_a_text_that_gets_worse_stops_it(ids, tmp_path):
    path, folder = ids
    heldout = tmp_path / "heldout.txt"
    heldout.write_text(make_text(800, seed=1), encoding="utf-8")
    stopping = {"steps": 40, "patience": 2, "validation_steps": 2, "warmup_steps": 0, "heldout": (str(heldout),)}
    output = pretrain(_config(folder("worse"), path, learning_rate=1.0, weight_decay=0.0, **stopping))
    told = json.loads((output / "pretraining.json").read_text())
    nats = told["heldout_nats"]
    assert told["steps"] == 2 * len(nats) < 40 and min(nats) < min(nats[-2:])
    with pytest.raises(UserError, match="name a text there"):
        pretrain(_config(tmp_path / "none", path, patience=1))
    heldout.write_text("too short", encoding="utf-8")
    with pytest.raises(UserError, match="too few to stop by"):
        pretrain(_config(folder("short"), path, **stopping))


def test_all_layers_share_one_compiled_graph(tmp_path):
    model = make_model(_config(tmp_path, "unused", n_layers=4), 320)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    rows, kind = torch.randint(4, 320, (2, 33)), dims_of(model.config).activation
    compiled = torch.compile(run_layer, backend=count)
    losses = [training_loss(model, blocks_of(model), kind, rows, 0.2, layer)[0] for layer in (compiled, run_layer)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6) and len(graphs) == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_of_several_processes_prints(rank, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "pretrain", lambda config: tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    module.main([f"--output={tmp_path}", "--text=text.txt", "--steps=1"])
    assert capsys.readouterr().out == (f"{tmp_path}\n" if rank == "0" else "")
