"""A model without predictors: the dense model's text on every backend, saved, served by name, and what is refused."""

import logging
import re

import pytest
import torch
from family_models import random_family, save_family

from dejavu_train import Bundle, SparseCausalLM, SparseOPTForCausalLM
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model

PROMPT = torch.tensor([[2, 5, 9, 11, 40]])
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 1}


@pytest.mark.parametrize("backend", ["mask", "gather", "cpu"])
@pytest.mark.parametrize("name", ["350m", "llama", "fatrelu", "drelu", "arcee", "nemotron", "bloom"])
def test_the_text_is_the_dense_models(name, backend):
    expected = random_family(name).generate(PROMPT, **GREEDY)
    model = SparseCausalLM.from_model(random_family(name), backend=backend)
    assert torch.equal(model.generate(PROMPT, **GREEDY), expected)
    assert model.backend == backend and model.bundle.targets == []


def test_loaded_saved_and_loaded_again(tiny_opt, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="dejavu_train")
    model = SparseOPTForCausalLM.from_pretrained(str(tiny_opt), backend="gather")
    assert "holds no predictors: all units are computed" in caplog.text
    expected = load_model(str(tiny_opt)).generate(PROMPT, **GREEDY)
    assert torch.equal(model.generate(PROMPT, **GREEDY), expected)
    model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "predictors").exists()
    again = SparseOPTForCausalLM.from_pretrained(tmp_path / "saved", backend="gather")
    assert torch.equal(again.generate(PROMPT, **GREEDY), expected)


def test_saved_over_a_model_with_predictors_the_bundle_goes(tiny_opt, bundle, tmp_path):
    SparseOPTForCausalLM.from_pretrained(str(tiny_opt), bundle, "gather").save_pretrained(tmp_path)
    assert (tmp_path / "predictors" / "bundle.json").is_file()
    SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), backend="gather").save_pretrained(tmp_path)
    assert SparseOPTForCausalLM.from_pretrained(tmp_path, backend="gather").bundle.targets == []


def test_lossless_text_of_a_model_without_predictors(tiny_opt):
    model = SparseOPTForCausalLM.from_pretrained(str(tiny_opt), backend="cpu")
    expected = model.generate(PROMPT, **GREEDY)
    assert torch.equal(model.generate(PROMPT, lossless=True, **GREEDY), expected)


def test_what_is_said_and_refused(tiny_opt, tmp_path):
    model = SparseOPTForCausalLM.from_pretrained(str(tiny_opt), backend="cpu")
    assert "rows of silent neurons are not read" in model.describe()
    assert re.match(
        r"reads at most 0\.\d MB of weights for a token, less by rows of silent neurons\n", model.describe()
    )
    with pytest.raises(UserError, match="has no predictors to save"):
        model.bundle.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="zeros must be one of auto, skip, read, got never"):
        SparseOPTForCausalLM.from_pretrained(str(tiny_opt), zeros="never")
    with pytest.raises(UserError, match="the CPU engine never reads rows of silent neurons"):
        SparseOPTForCausalLM.from_pretrained(str(tiny_opt), backend="cpu", zeros="read")
    with pytest.raises(UserError, match="zeros='skip' needs an activation .* and this model has gelu"):
        SparseCausalLM.from_model(random_family("bloom"), zeros="skip")
    smooth = SparseCausalLM.from_model(random_family("bloom"), backend="cpu")
    assert "silent neurons" not in smooth.describe()


def test_nothing_is_left_out_of_a_row_that_is_no_number(tmp_path):
    folder = save_family("llama", tmp_path)
    model = SparseCausalLM.from_pretrained(folder, backend="gather")
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[3] = float("nan")
    with pytest.raises(UserError, match="not finite from layer 0 on"):
        model.generate(PROMPT, **GREEDY)


def test_a_bundle_of_a_model_without_predictors():
    model = random_family("llama")
    exact = SparseCausalLM.from_model(model, backend="gather").bundle
    assert exact == Bundle.exact(exact.model, exact.shape)
    assert repr(exact).endswith("heads)") and exact.mean_density("mlp") == 1.0
