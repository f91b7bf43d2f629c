"""The whole job by the two commands, with the recipe of opt-mini: from family to family only ``--model`` differs."""

import json
import logging

import pytest
from conftest import REPOSITORY
from family_models import CASES, HYBRIDS, save_family
from published_models import CONFIGS, save_published

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.cpu import bandwidth
from dejavu_train.evaluation.command import main as infer
from dejavu_train.families.dims import SILENT
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.run.command import main

SMALL = {  # of a tiny model, whatever its family
    "config": REPOSITORY / "configs" / "opt-mini.yaml", "text.sample.tokens": 1280, "collect.window": 64,
    "collect.shard_tokens": 4096, "data.batch_size": 256, "mlp.rank": 8, "mlp.steps": 4, "mlp.validations": 1,
    "heads.steps": 4, "heads.validations": 1, "calibrate.sensitivity_tokens": 32, "calibrate.head_loss_tokens": 32,
    "trainer.logger": "false",
}  # fmt: skip
SCORED = {
    "tokens": 120, "window": 64, "selections": "dense,predicted,oracle", "sparse_from": 0, "device": "cpu",
    "prompt": 8, "generate": "the token", "new_tokens": 3,
}  # fmt: skip


def flags(values):
    return [f"--{key}={value}" for key, value in values.items()]


# Gated, ALiBi, norms behind halves, squares, layers without a target, a checkpoint as it is published. Others: long.
QUICK = ("llama", "bloom", "350m", "nanochat", "nemotron_h", "prosparse")
LONG = [name for name in dict.fromkeys((*CASES, *HYBRIDS, "sparselm")) if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_only_the_model_differs(name, tmp_path, text_file, caplog, monkeypatch, no_pictures):
    monkeypatch.setattr(bandwidth.read_bandwidth, "__defaults__", (None, 8, 0.01))  # a look at memory takes seconds
    model, output = (save_published if name in CONFIGS else save_family)(name, tmp_path / "model"), tmp_path / "run"
    caplog.set_level(logging.INFO, "dejavu_train")
    own = {"model": model, "output": output, "text.cache": tmp_path}
    own |= {"llama": {"tune.steps": 2, "tune.tokens": 128}, "nemotron_h": {"mlp.lookahead": 1}}.get(name, {})
    assert exit_on_user_error(main, flags(SMALL | own)) == 0
    bundle = Bundle.from_pretrained(output / "bundle")
    gated, neurons = bundle.shape.gated, [spec for key, spec in bundle.specs.items() if key.target == "mlp"]
    assert sorted(bundle.specs) == sorted(bundle.shape.keys)
    if name == "nemotron_h":  # the first MLP has no site before it
        assert [spec.reads for spec in neurons] == [(1, "mlp_in"), (3, "attn_in"), (4, "mlp_in"), (6, "mlp_in")]
    assert {spec.kind for spec in neurons} == {"low_rank" if gated else "cascade"}
    assert caplog.text.count("calibrating without a second stage") == gated
    assert all("loss_increase" in spec.curve for spec in bundle.specs.values())
    assert all(0.2 < spec.active_density < 0.8 for spec in neurons)
    assert bundle.metadata["text"]["source"] == "self" and bundle.metadata["head_loss_tokens"] > 0
    own = {"bundle": output / "bundle", "output": tmp_path / "results", "text": text_file}
    assert exit_on_user_error(infer, flags(SCORED | own)) == 0
    found = json.loads((tmp_path / "results" / "results.json").read_text())
    rows = {row["selection"]: row for row in found["quality"]}
    predicted, oracle = rows["predicted"], rows["oracle"]
    assert predicted["perplexity"] != rows["dense"]["perplexity"] and 0 < predicted["mlp_selected"] < 0.4
    mass = [predicted["mlp_retained_mass"], oracle["mlp_retained_mass"]]
    assert predicted["mlp_selected"] < mass[0] < mass[1] and 0 < predicted["mlp_bytes"] < 1
    timed = {"dense", "gather"} if name in HYBRIDS else {"dense", "dense-cpu", "cpu"}
    reads = {"dense-cpu-read"} if "cpu" in timed and bundle.shape.activation in SILENT else set()  # others read all
    assert {timing["backend"] for timing in found["timing"]} == timed | reads


def test_a_second_stage_of_a_gated_mlp_is_refused(tmp_path, text_file, capsys):
    own = {"model": save_family("llama", tmp_path / "model"), "output": tmp_path / "run", "text.source": text_file}
    assert exit_on_user_error(main, flags(SMALL | own | {"calibrate.cascade": 0.99})) == 2
    assert "MLP is gated; pass --calibrate.cascade null" in capsys.readouterr().err
