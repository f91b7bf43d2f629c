import dataclasses
import json
import logging

import numpy as np
import pytest
from conftest import make_text
from small_runs import flags

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.cli.registry import has_extras
from dejavu_train.data.packed import pack
from dejavu_train.data.samples import (
    CYCLE,
    SampleManifest,
    decode_rows,
    load_samples,
    split_rows,
    tokens_needed,
    transformers_writer,
)
from dejavu_train.data.shard_reader import ShardReader
from dejavu_train.data.shards import ActivationManifest
from dejavu_train.data.text import SampleConfig, TextSource
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.options import EngineOptions
from dejavu_train.families import dims_of
from dejavu_train.ground.errors import UserError, exit_on_user_error
from dejavu_train.models.load import load_model, load_tokenizer, weight_hash
from dejavu_train.run import own_text
from dejavu_train.run.command import main, parse_config
from dejavu_train.run.own_text import engine_writer
from dejavu_train.training.config import RunConfig

BUDGETS = [("train", None), ("val", None), ("calibration", None)]


class Writer:
    """Stands in for a model: rows that count up from the seed, ``</s>`` in the middle. May be stopped."""

    def __init__(self, stop_after=None):
        self.calls, self.opened, self.stop_after = [], 0, stop_after

    def open(self, rows, length):
        self.opened += 1
        return self, "counting"

    def __call__(self, prompts, length, seed):
        self.calls.append(seed)
        if self.stop_after is not None and len(self.calls) > self.stop_after:
            raise KeyboardInterrupt
        made = [
            prompt + [(seed + b + t) % 200 + 4 for t in range(length - len(prompt))] for b, prompt in enumerate(prompts)
        ]
        for row in made:
            row[length // 2] = 2
        return made


def load(tiny_opt, cache, writer, config, budgets=BUDGETS, model=None):
    source = TextSource(sample=config, cache=str(cache))
    digest = weight_hash(str(tiny_opt))
    tokenizer = load_tokenizer(str(tiny_opt))
    return load_samples(source, str(model or tiny_opt), digest, 16, budgets, False, tokenizer, writer.open)


def ids(sets):
    return {name: [(d.name, d.ids.tolist()) for d in documents] for name, documents in sets.items()}


def test_rows_survive_packing():
    rows = np.random.default_rng(0).integers(0, 50272, (7, 33)).astype(np.int32)
    assert (decode_rows(pack(rows), 33) == rows).all()


def test_rows_become_documents_in_disjoint_sets():
    rows = np.full((50, 8), 9, np.int32)
    rows[:, 0], rows[:, 3], rows[:, 4], rows[0, 7] = 2, 2, 2, 2
    sets = split_rows(rows)
    assert {name: len(documents) for name, documents in sets.items()} == {"train": 88, "calibration": 8, "val": 4}
    assert all(2 not in document.ids and len(document.ids) for part in sets.values() for document in part)
    assert [len(document.ids) for document in sets["val"][:2]] == [2, 2]  # the last </s> of row 0 starts nothing
    origin = {name: {document.name.split(".")[0] for document in part} for name, part in sets.items()}
    assert not origin["train"] & (origin["calibration"] | origin["val"])
    with pytest.raises(UserError, match="raise text.sample.tokens"):
        split_rows(rows[:2])


def test_how_many_tokens_are_sampled():
    budgets = [("train", 8800), ("val", 400), ("calibration", 8000)]
    assert tokens_needed(SampleConfig(tokens=77), budgets, True) == (77, 77)
    assert tokens_needed(SampleConfig(), budgets, True) == (100_000, 100_000)  # 8,000 are 2 of 25 parts
    assert tokens_needed(SampleConfig(), BUDGETS, True)[0] == 1_000_000
    assert tokens_needed(SampleConfig(), BUDGETS, False)[0] == 200_000
    assert set(CYCLE) == {"train", "val", "calibration"}


def test_sampling_goes_on_where_it_was_stopped(tiny_opt, tmp_path):
    config = SampleConfig(tokens=16 * 50, batch_size=8, seed=1)
    whole, _ = load(tiny_opt, tmp_path / "whole", Writer(), config)
    stopped = Writer(stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        load(tiny_opt, tmp_path / "cache", stopped, config)
    again = Writer()
    resumed, manifest = load(tiny_opt, tmp_path / "cache", again, config)
    assert ids(resumed) == ids(whole)
    assert [seed % 1_000_003 for seed in again.calls] == [3, 4, 5, 6]
    assert manifest.samples["tokens"] == 800 and manifest.documents["train"] == 88 and manifest.source == "self"
    assert not list(tmp_path.glob("cache/*/part_*"))
    third = Writer()
    assert ids(load(tiny_opt, tmp_path / "cache", third, config)[0]) == ids(whole) and not third.opened
    fewer, _ = load(tiny_opt, tmp_path / "cache", third, dataclasses.replace(config, tokens=16 * 25))
    assert not third.opened and ids(fewer)["val"] == ids(whole)["val"][: len(fewer["val"])]
    other = Writer()
    load(tiny_opt, tmp_path / "cache", other, dataclasses.replace(config, temperature=0.7))
    assert other.opened == 1


def test_samples_beside_the_model_are_used_and_checked(tiny_opt, tmp_path):
    config = SampleConfig(tokens=16 * 25, seed=1)
    load(tiny_opt, tmp_path / "cache", Writer(), config)
    made = next((tmp_path / "cache").glob("self-*"))
    unused = Writer()
    sets, _ = load(tiny_opt, tmp_path / "other", unused, SampleConfig(seed=1), model=made)
    assert len(sets["train"]) == 44 and not unused.opened
    path = made / "samples.xz"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="samples.xz is damaged"):
        load(tiny_opt, tmp_path / "other", unused, SampleConfig(seed=1), model=made)
    manifest = SampleManifest.load(made)
    dataclasses.replace(manifest, weight_hash="of another model").save(made)
    load(tiny_opt, tmp_path / "other", unused, SampleConfig(tokens=400, seed=1), model=made)
    assert unused.opened == 1
    (made / "samples.json").write_text(json.dumps({"schema": 1}))
    with pytest.raises(UserError, match="not a manifest"):
        SampleManifest.load(made)


def test_prompts_begin_the_samples(tiny_opt, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": make_text(40, seed=i)}) + "\n" for i in range(3)) + '{"text": "a"}')
    config = SampleConfig(tokens=16 * 25, prompts=str(prompts), prompt_tokens=5, seed=1)
    sets, _ = load(tiny_opt, tmp_path / "cache", Writer(), config)
    tokenizer = load_tokenizer(str(tiny_opt))
    wanted = [tokenizer(make_text(40, seed=i), add_special_tokens=False)["input_ids"][:5] for i in range(3)]
    first = [d.ids[:5].tolist() for d in sets["train"] if d.name.endswith(".0") or d.name.endswith(".1")]
    assert first[0] in wanted and sum(start in wanted for start in first) == 22
    with pytest.raises(UserError, match="no document of .* has 500 tokens"):
        load(tiny_opt, tmp_path / "c", Writer(), dataclasses.replace(config, prompt_tokens=500))
    with pytest.raises(UserError, match="no text file"):
        load(tiny_opt, tmp_path / "c", Writer(), dataclasses.replace(config, prompts="none.txt"))


def test_transformers_samples_from_the_models_own_distribution(tiny_opt):
    """At temperature 1 with nothing cut off the second token is distributed as the model says, </s> included."""
    import torch

    model = load_model(str(tiny_opt))
    write = transformers_writer(model, SampleConfig())
    rows = np.array(write([[2]] * 4000, 2, seed=5))
    assert rows.shape == (4000, 2) and (rows[:, 0] == 2).all()
    assert (rows == np.array(write([[2]] * 4000, 2, seed=5))).all()
    with torch.no_grad():
        wanted = model(torch.tensor([[2]])).logits[0, -1].softmax(-1).numpy()
    counts = np.bincount(rows[:, 1], minlength=len(wanted))
    assert np.abs(counts / 4000 - wanted).sum() < 0.35  # an L1 distance; 4,000 draws from it come to about 0.25
    longer = np.array(write([[2]] * 200, 40, seed=5))
    assert (longer[:, 1:] == 2).any(), "rows go on behind </s>, which is drawn like every token"


def test_what_a_folder_says_of_generation_is_no_part_of_the_own_text(tiny_opt):
    plain, penalised = load_model(str(tiny_opt)), load_model(str(tiny_opt))
    penalised.generation_config.update(repetition_penalty=5.0, suppress_tokens=list(range(4, 300)), min_p=0.9)
    expected, found = (transformers_writer(model, SampleConfig())([[2]], 40, seed=5) for model in (plain, penalised))
    assert found == expected


def test_the_engine_samples_as_transformers_does(tiny_opt):
    """Seeds differ, everything can be drawn, and the first token is distributed as the model says."""
    import torch

    model = load_model(str(tiny_opt))
    engine = DecodeEngine(model, options=EngineOptions(batch=32, context=8, ops="reference"))
    write = engine_writer(engine, SampleConfig())
    rows = np.concatenate([np.array(write([[2]] * 32, 2, seed=seed)) for seed in range(60)])
    assert rows.shape == (1920, 2) and (np.array(write([[2]] * 32, 2, seed=7)) == rows[7 * 32 : 8 * 32]).all()
    with torch.no_grad():
        wanted = model(torch.tensor([[2]])).logits[0, -1].softmax(-1).numpy()
    counts = np.bincount(rows[:, 1], minlength=len(wanted))
    assert np.abs(counts / len(rows) - wanted).sum() < 0.5  # 1,920 draws come to about 0.36; greedy ones to about 2
    greedy = np.array(engine_writer(engine, SampleConfig(temperature=1e-3))([[2, 9]] * 2, 8, seed=1))
    assert (greedy[0] == greedy[1]).all() and greedy.shape == (2, 8)


@pytest.mark.parametrize(("rows", "writer"), [(32, "engine"), (33, "transformers")])
def test_rows_that_an_engine_has_not_are_written_by_transformers(tiny_opt, monkeypatch, rows, writer):
    """As on a GPU, of which only the name is asked."""
    import torch

    monkeypatch.setattr(own_text, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(own_text, "load_model", lambda *args: load_model(str(tiny_opt)))
    monkeypatch.setattr("dejavu_train.engine.decode.DecodeEngine", lambda model, options: options)
    monkeypatch.setattr(
        "dejavu_train.kernels.common.checks.HEAD_DIMS", (dims_of(load_model(str(tiny_opt)).config).head_dim,)
    )
    assert own_text.open_writer(RunConfig(model=str(tiny_opt)), rows, 16)[1] == writer


def test_a_model_alone_is_enough(tiny_opt, tmp_path, caplog):
    """No text is named: the model writes it, and a bundle comes out."""
    caplog.set_level(logging.INFO, logger="dejavu_train")
    given = [flag for flag in flags(tiny_opt, "unused", tmp_path / "run") if not flag.startswith("--text.source")]
    given += ["--text.sample.tokens=3200", f"--text.cache={tmp_path / 'cache'}", "--mlp.steps=8", "--heads.steps=8"]
    assert exit_on_user_error(main, given) == 0
    assert "sampling 3200 tokens from the model" in caplog.text
    manifest = ActivationManifest.load(tmp_path / "run" / "activations")
    assert manifest.text["source"] == "self" and manifest.text["samples"]["writer"] == "transformers"
    assert ShardReader(tmp_path / "run" / "activations", 0, "train").rows <= 3200 * 22 / 25
    assert Bundle.from_pretrained(tmp_path / "run" / "bundle").metadata["text"]["source"] == "self"
    caplog.clear()
    assert (
        exit_on_user_error(main, [f"--output={tmp_path / 'other'}" if f.startswith("--output") else f for f in given])
        == 0
    )
    assert "sampling" not in caplog.text, "the samples of the first run are used again"


@pytest.mark.skipif(not has_extras(), reason="--plan is an extra")
def test_own_text_by_layers_is_refused_until_it_is_written(tiny_opt, tmp_path, capsys):
    """By the run, before it loads the model, by ``--check`` and by ``--plan``. What was written before is read."""
    given = [flag for flag in flags(tiny_opt, "unused", tmp_path / "run") if not flag.startswith("--text.source")]
    given += ["--text.sample.tokens=1600", f"--text.cache={tmp_path / 'cache'}"]
    layers = [*given, "--collect.by_layers=true"]
    for more in ([], ["--check"], ["--plan"]):
        assert exit_on_user_error(main, [*layers, *more]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("error: collect.by_layers has one layer at a time") and "--text FILE" in said
    assert not (tmp_path / "run" / "activations" / "manifest.json").exists()
    written, _ = own_text.sampled(parse_config(given))()
    found, _ = own_text.sampled(parse_config(layers))()
    assert all((a.ids == b.ids).all() for name in written for a, b in zip(written[name], found[name], strict=True))
    assert exit_on_user_error(main, [*layers, "--plan"]) == 0
    assert "text   " not in capsys.readouterr().out, "nothing is written anew"
