"""Pretraining of every family: its loss against transformers, what the L1 penalty is of, a whole tiny run."""

import json

import pytest
import torch
from conftest import make_text
from torch.nn.functional import cross_entropy

from dejavu_train.extras.pretrain.forward import penalised, training_loss
from dejavu_train.extras.pretrain.run import PretrainConfig, make_model, make_optimizers, pretrain
from dejavu_train.families import blocks_of, dims_of
from dejavu_train.families.dims import Activation
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hooks import at_module, hooked
from dejavu_train.models.load import load_model

FAMILIES = {
    "opt": Activation.RELU,
    "arcee": Activation.RELU2,
    "llama-relu": Activation.RELU,
    "llama-drelu": Activation.DRELU,
    "bloom": Activation.GELU_TANH,
    "nemotron-h": Activation.RELU2,
}


def _config(family, **changes) -> PretrainConfig:
    values = {
        "output": "unused", "text": (), "family": family, "d_model": 32,
        "n_layers": 8 if family == "nemotron-h" else 2, "n_heads": 2, "d_ffn": 128,
        "max_positions": 64, "context": 32, "batch_rows": 4, "vocab_size": 320, "steps": 3, "warmup_steps": 2,
        "device": "cpu",
    }  # fmt: skip
    return PretrainConfig(**values | changes)


@pytest.fixture(params=FAMILIES)
def model(request):
    model = make_model(_config(request.param), 320).eval()
    assert dims_of(model.config).activation == FAMILIES[request.param]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_embeddings_are_tied_and_matrices_of_layers_have_muon(model):
    tied = model.config.model_type != "nemotron_h"  # whose class ties nothing
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    muon, adam = make_optimizers(model, _config("opt"))
    matrices = {id(p) for layer in blocks_of(model) for p in layer.whole.parameters() if p.ndim == 2}
    assert {id(p) for group in muon.param_groups for p in group["params"]} == matrices
    assert sum(len(group["params"]) for group in adam.param_groups) == len(list(model.parameters())) - len(matrices)


def test_the_loss_is_transformers_and_the_penalty_adds_sizes_of_what_neurons_give(model):
    rows, kind, given = torch.randint(4, 320, (2, 20)), dims_of(model.config).activation, []
    places = [at_module(block.down, "input", given.append) for block in blocks_of(model) if block.down]
    with torch.no_grad(), hooked(places):
        logits = model(rows[:, :-1]).logits
    (alone, _), (loss, entropy) = (training_loss(model, blocks_of(model), kind, rows, l1) for l1 in (0.0, 0.5))
    assert float(alone.detach()) == float(entropy)
    torch.testing.assert_close(entropy, cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
    power = 0.5 if kind == Activation.RELU2 else 1.0
    expected = sum(float((each.abs() ** power).mean()) for each in given)
    assert float((loss - entropy).detach()) == pytest.approx(0.5 * expected, rel=1e-3) and expected > 0
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_the_penalty_of_a_square_pushes_small_values_as_hard_as_large_ones():
    x = torch.tensor([-1.0, 0.0, 0.01, 3.0], requires_grad=True)
    penalised(Activation.RELU2, x.relu().square()).sum().backward()
    assert x.grad.tolist() == pytest.approx([0, 0, 1, 1])
    y = torch.tensor([-2.0, 0.5], requires_grad=True)  # a gated neuron may be negative
    penalised(Activation.DRELU, y).sum().backward()
    assert y.grad.tolist() == [-1, 1]


@pytest.mark.parametrize("family", ["arcee", "bloom", "nemotron-h"])
def test_a_run_writes_a_model_that_loads(family, tmp_path):
    text = tmp_path / "small.txt"
    text.write_text(make_text(1500), encoding="utf-8")
    config = _config(family, output=str(tmp_path / "made"), text=(str(text),), heldout=(str(text),))
    folder = pretrain(config)
    assert load_model(str(folder)).config.model_type == family.replace("-", "_")
    told = json.loads((folder / "pretraining.json").read_text())
    assert told["config"]["l1"] == (0.0 if family == "bloom" else 0.2)
    (heldout,) = told["heldout"].values()
    assert all(0.2 < share < 0.9 for share in heldout["density"])  # of GELU what carries nine tenths, not what is > 0


def test_a_bloom_of_another_width_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"4 x d_model = 128 neurons, got --d_ffn 96"):
        make_model(_config("bloom", d_ffn=96), 320)
