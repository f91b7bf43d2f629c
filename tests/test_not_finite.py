"""A number that is not finite is an error that names layer and target, in every phase. It never becomes a result."""

import dataclasses
import math
import shutil

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from small_runs import activations, flags

from dejavu_train.bundle.spec import check_spec
from dejavu_train.data.collect import collect
from dejavu_train.data.text import TextSource
from dejavu_train.data.windows import CollectConfig
from dejavu_train.engine.cpu.engine import CpuEngine
from dejavu_train.families import UnitKey
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.run.command import parse_config
from dejavu_train.sparse.model import SparseOPTForCausalLM
from dejavu_train.training.job import fit


def broken(tiny_opt, name, value=math.nan):
    """The model with one weight of layer 1, or of the final norm, that is not a number."""
    model = load_model(str(tiny_opt))
    with torch.no_grad():
        model.get_parameter(f"model.decoder.{name}").view(-1)[3] = value
    return model


@pytest.mark.parametrize(
    "name, words",
    [
        ("layers.1.fc1.bias", "MLP's activation of layer 1"),
        ("layers.1.self_attn.v_proj.bias", "layer 1"),
        ("layers.0.fc2.bias", "of layer 1 is not finite"),
    ],
)
def test_collecting(tiny_opt, text_file, tmp_path, name, words):
    folder = save_tiny_opt(tmp_path / "opt")
    broken(folder, name).save_pretrained(folder)
    settings = CollectConfig(window=64, train_tokens=200, val_tokens=100, calibration_tokens=100, device="cpu")
    with pytest.raises(UserError, match=words):
        collect(str(folder), TextSource(source=str(text_file)), settings, tmp_path / "activations")


def test_training(tiny_opt, text_file, tmp_path):
    shutil.copytree(activations(tiny_opt, text_file), tmp_path / "activations")
    more = ("--mlp.learning_rate=1e30", "--mlp.steps=8", "--mlp.validations=1")
    config = parse_config(flags(tiny_opt, text_file, tmp_path, *more))
    with pytest.raises(UserError, match="predictor of the target mlp is not finite after 8 steps; lower mlp.learning"):
        fit(config, UnitKey(0, "mlp"), "layer 0 mlp")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("stored", ["float32", "int8"])
@pytest.mark.parametrize(
    "name, words",
    [
        ("final_layer_norm.bias", "the final LayerNorm"),
        ("embed_tokens.weight", "the embedding"),
        ("layers.1.fc1.weight", "layer 1"),
        ("layers.0.self_attn.out_proj.bias", "layer 0"),
        ("layers.1.final_layer_norm.weight", "layer 1"),
    ],
)
def test_weights_for_decoding_on_a_cpu(tiny_opt, value, stored, name, words):
    with pytest.raises(UserError, match=f"{words}\\b.*has weights that are not finite"):
        CpuEngine(broken(tiny_opt, name, value), context=24, stored=stored)


def overflowing(tiny_opt, name, threads=1):
    """An engine that is sound at first. What makes the part of this name of layer 1 overflow, behind the copy."""
    engine = CpuEngine(load_model(str(tiny_opt)), make_bundle(tiny_opt).at(0.5, 0.6), context=40, threads=threads)

    def overflow():
        model = engine.weights.model
        {
            "MLP": model.down_bias[1],
            "attention": engine.selectors.out_bias[1],
            "embedding": model.positions[5:],
            "LM head": model.norms[-2, 1],
            "neurons": model.up_bias[1],
        }[name][:] = math.nan if name == "neurons" else 3e38

    return engine, overflow


@pytest.mark.parametrize(
    "name, words",
    [
        ("MLP", "the MLP of layer 1"),
        ("neurons", "the MLP of layer 1"),
        ("attention", "the attention of layer 1"),
        ("embedding", "the embedding"),
        ("LM head", "the LM head"),
    ],
)
def test_what_comes_up_while_a_cpu_decodes_names_its_layer(tiny_opt, name, words):
    row, heard = [2, 5, 6, 7, 8, 9, 10], []
    engine, overflow = overflowing(tiny_opt, name)

    def callback(_, token):
        heard.append(token)
        if len(heard) == 4:
            overflow()

    sound = engine.generate([row], 10, stop_tokens=())[0]
    found = rf"{words} gives numbers that are not finite \(row 0, position"
    with pytest.raises(UserError, match=rf"{found} 10\)"):
        engine.generate([row], 10, stop_tokens=(), callback=callback)
    assert heard == sound[:4]  # nothing that follows from the numbers was given away
    if name not in ("LM head", "neurons"):
        with pytest.raises(UserError, match=found):  # in the prompt, many tokens at once
            engine.generate([row], 4)
    with pytest.raises(UserError, match=rf"{found} {5 if name == 'embedding' else 0}\)"):
        engine.score([row])
    for _ in range(2):
        other = CpuEngine(load_model(str(tiny_opt)), context=40, threads=1)
        assert len(other.generate([row], 4, stop_tokens=())[0]) == 4 and torch.isfinite(other.score([row])[0]).all()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"threshold": math.nan}, "threshold"),
        ({"density": 7.0}, "density must be a number from 0 to 1, got 7.0"),
        ({"recall": math.nan}, "recall"),
        ({"top_k": 3.5, "threshold": None}, "top_k"),
        ({"rank": True}, "rank"),
        ({"rank": "8"}, "rank"),
    ],
)
def test_a_bundles_spec(tiny_opt, changes, words):
    bundle = make_bundle(tiny_opt)
    spec = dataclasses.replace(bundle.specs[1, "mlp"], **changes)
    with pytest.raises(UserError, match=f"here: mlp of layer 1.*{words}"):
        check_spec(spec, bundle.shape, "here")


@pytest.mark.parametrize(
    "column, change",
    [("recall", lambda v: [math.nan, *v[1:]]), ("threshold", sorted), ("density", lambda v: [-1, *v[1:]])],
)
def test_a_bundles_curve(tiny_opt, column, change):
    bundle = make_bundle(tiny_opt)
    spec = bundle.specs[0, "heads"]
    spec = dataclasses.replace(spec, curve=spec.curve | {column: change(spec.curve[column])})
    with pytest.raises(UserError, match="heads of layer 0: the calibration curve"):
        check_spec(spec, bundle.shape, "here")


@pytest.mark.parametrize("backend", ["mask", "gather"])
def test_a_whole_text_is_not_scored_as_a_prompt(tiny_opt, backend):
    dense = load_model(str(tiny_opt))
    model = SparseOPTForCausalLM.from_model(dense, make_bundle(tiny_opt), backend, sparse_from="prompt")
    ids = torch.tensor([[2, 5, 6, 7]])
    model(ids)
    with pytest.raises(UserError, match="leaves every position dense; set sparse_from"):
        model(ids, labels=ids)
    model.sparse_from = 0
    assert torch.isfinite(model(ids, labels=ids).loss)
