"""Training and running a Llama with grouped K/V heads and a ReLU gate."""

import json

import pytest
import torch
from conftest import save_tiny_tokenizer
from small_runs import flags
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.families import base
from dejavu_train.ground.errors import UserError, exit_on_user_error
from dejavu_train.models.load import load_model
from dejavu_train.run.command import main
from dejavu_train.sparse.model import SparseCausalLM, SparseOPTForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=save_tiny_tokenizer(folder), hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512, hidden_act="relu",
        initializer_range=0.15, bos_token_id=2, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder, text_file):
    """From text to a bundle, by train.py."""
    output = folder.parent / "run"
    measured = ["--calibrate.sensitivity_tokens=300", "--calibrate.head_loss_tokens=300"]
    small = [*measured, "--mlp.init=whitened_svd", "--tune.steps=2", "--tune.tokens=128"]
    assert exit_on_user_error(main, flags(folder, text_file, output, *small)) == 0
    return output


@pytest.fixture(scope="module")
def bundle(run):
    return Bundle.from_pretrained(run / "bundle")


@pytest.fixture
def dense(folder):
    return load_model(str(folder))


def padded(seed=0):
    """Two rows of 12 columns, the first with 5 of padding on the left."""
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    ids[0, :5], mask[0, :5] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


def test_a_run_trains_calibrates_and_bundles(bundle):
    shape = bundle.shape
    assert (shape.norm, shape.positions, shape.n_kv_heads, shape.gated) == ("rms_norm", "rotary", 2, True)
    for layer in range(2):
        spec, heads = bundle.specs[layer, "mlp"], bundle.specs[layer, "heads"]
        assert 0.2 < spec.active_density < 0.8 and spec.recall > 0.4 and spec.retained_mass > 0.5
        assert heads.n_out == 2 and heads.retained_mass > 0.4
        assert "loss_increase" in spec.curve


@pytest.mark.parametrize("backend", ["mask", "gather"])
def test_a_dense_bundle_gives_what_transformers_gives(dense, bundle, backend):
    inputs = padded()
    expected = dense(**inputs).logits[inputs["attention_mask"].bool()]
    model = SparseCausalLM.from_model(dense, bundle.at(1.0, 1.0), backend)
    torch.testing.assert_close(model(**inputs).logits[inputs["attention_mask"].bool()], expected, atol=2e-5, rtol=1e-4)


def test_gather_agrees_with_mask(folder, dense, bundle):
    mask = SparseCausalLM.from_model(load_model(str(folder)), bundle, "mask", sparse_from=3)
    gather = SparseCausalLM.from_model(dense, bundle, "gather", sparse_from=3)
    assert type(gather).__name__ == "SparseLlamaForCausalLM" and isinstance(gather, LlamaForCausalLM)
    for seed in range(3):
        inputs = padded(seed)
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(gather(**inputs).logits[real], mask(**inputs).logits[real], atol=1e-3, rtol=1e-3)


def test_generate_with_a_cache_gives_what_a_full_pass_selects(folder, dense, bundle):
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    inputs = padded(4)
    gather = SparseCausalLM.from_model(dense, bundle, "gather", sparse_from="prompt")
    mask = SparseCausalLM.from_model(load_model(str(folder)), bundle, "mask", sparse_from="prompt")
    out = gather.generate(**inputs, **settings)
    assert out.shape == (2, 22) and torch.equal(out, mask.generate(**inputs, **settings))
    gather.sparse_from = torch.tensor([7, 12])
    again = gather.generate(**inputs, **settings, use_cache=False)
    assert torch.equal(out, again)


def test_the_guard_measures_a_gated_mlp(dense, bundle):
    from dejavu_train.bundle.guard_config import Guard

    model = SparseCausalLM.from_model(dense, bundle, "gather", sparse_from=1, guard=Guard(every=2))
    assert model(**padded()).logits.isfinite().all() and model.guard_report()


def test_a_model_is_saved_and_loaded_with_its_bundle(dense, bundle, tmp_path):
    model = SparseCausalLM.from_model(dense, bundle, "gather")
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "dejavu_sparse_llama"
    assert AutoConfig.from_pretrained(tmp_path).intermediate_size == 96
    for cls in (AutoModelForCausalLM, SparseCausalLM):
        loaded = cls.from_pretrained(tmp_path)
        assert type(loaded) is type(model) and torch.equal(loaded(**padded()).logits, model(**padded()).logits)
    bundle.save_pretrained(tmp_path / "bundle")
    assert Bundle.from_pretrained(tmp_path / "bundle").shape == bundle.shape
    with pytest.raises(UserError, match="takes no hidden_act"):
        SparseCausalLM.from_pretrained(tmp_path, hidden_act="silu")


def test_another_class_than_an_opts_is_refused_in_one_line(dense, bundle):
    with pytest.raises(UserError, match="takes an OPT.*, got a Llama.*; SparseCausalLM takes every family"):
        SparseOPTForCausalLM.from_model(dense, bundle)
    assert SparseCausalLM.from_model(dense, bundle).backend == "cpu"


def test_what_no_gated_mlp_has_is_refused(folder, text_file, tmp_path, capsys):
    cascade = flags(folder, text_file, tmp_path / "run", "--calibrate.cascade=0.99")
    assert exit_on_user_error(main, cascade) == 2
    assert "MLP is gated; pass --calibrate.cascade null" in capsys.readouterr().err
    silu = LlamaConfig.from_pretrained(folder, hidden_act="silu")
    with pytest.raises(UserError, match="uses the activation silu"):
        base.dims_of(silu)


def test_an_exchanged_gate_is_refused(dense, bundle):
    dense.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match="gate_proj has a hook"):
        SparseCausalLM.from_model(dense, bundle, "gather")
    assert isinstance(dense.model.layers[0].mlp.act_fn, nn.ReLU)
