"""The whole job on a BLOOM by the two commands: from its own samples to a bundle, then scored."""

import json

import pytest
import torch
from conftest import save_tiny_tokenizer
from small_runs import flags
from transformers import BloomConfig, BloomForCausalLM

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import mlp_share, predictor_bytes
from dejavu_train.cli import main
from dejavu_train.errors import exit_on_user_error
from dejavu_train.evaluation.cli import main as infer
from dejavu_train.families import Target
from dejavu_train.models.weight_format import FLOAT32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bloom") / "model"
    torch.manual_seed(0)
    config = BloomConfig(
        vocab_size=save_tiny_tokenizer(folder), hidden_size=48, n_layer=2, n_head=6, seq_length=256,
        initializer_range=0.15, bos_token_id=2, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    BloomForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder, text_file):
    output = folder.parent / "run"
    small = ["--text.source=self", "--text.sample.tokens=6400", f"--text.cache={folder.parent}"]
    small += ["--collect.train_tokens=5000", "--collect.val_tokens=200", "--collect.calibration_tokens=400"]
    small += ["--calibrate.sensitivity_tokens=64", "--calibrate.head_loss_tokens=64", "--mlp.init=whitened_svd"]
    assert exit_on_user_error(main, [*flags(folder, text_file, output), *small]) == 0
    return output


def test_a_run_writes_its_own_text_trains_and_calibrates(run):
    bundle = Bundle.from_pretrained(run / "bundle")
    assert (bundle.shape.positions, bundle.shape.activation) == ("alibi", "gelu_tanh")
    for layer in range(2):
        spec = bundle.specs[layer, "mlp"]
        assert 0.2 < spec.active_density < 0.8  # of GELU those that carry most of the contribution
        assert spec.recall > spec.density + 0.04 and spec.retained_mass > 0.5 and "loss_increase" in spec.curve
    read = mlp_share(bundle, FLOAT32)  # all that is selected, its rows in and out
    predictors = sum(predictor_bytes(bundle.specs[layer, "mlp"]) for layer in range(2))
    dense = 2 * FLOAT32.unit_bytes(bundle.shape).dense(bundle.shape, Target.MLP)
    assert read == pytest.approx(bundle.mean_density(Target.MLP) + predictors / dense, rel=1e-3)


def test_the_bundle_is_scored(folder, run, text_file, tmp_path):
    few = ["--tokens=200", "--window=64", "--selections=dense,predicted,oracle,noncontextual", "--densities=0.4"]
    few += ["--curve_densities=", "--head_densities=", "--sparse_from=0", "--device=cpu", "--generate=the token"]
    few += ["--new_tokens=4", "--prompt=8", f"--text={text_file}"]
    paths = [f"--model={folder}", f"--bundle={run / 'bundle'}", f"--output={tmp_path}"]
    assert exit_on_user_error(infer, [*paths, *few]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    rows = {row["selection"]: row for row in found["quality"] if row["asked_mlp_density"] in (0.4, 1)}
    assert 0.4 < rows["predicted"]["mlp_recall"] < rows["oracle"]["mlp_recall"] <= 1
    assert {timing["backend"] for timing in found["timing"]} == {"dense", "dense-cpu", "cpu"}
