"""Layers without a target: their numbers stay the model's, and what has no target is as transformers runs it."""

import pytest
import torch
from bundles import make_bundle
from family_models import HYBRIDS, padded, save_family, sparse

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.data.config import CollectConfig
from dejavu_train.data.text import TextSource
from dejavu_train.extras.export import ExportConfig, export
from dejavu_train.families import Target, UnitKey, blocks_of, dims_of
from dejavu_train.families.dims import ModelDims, engine_refusal
from dejavu_train.ground.errors import UserError, exit_on_user_error
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.hooks import record
from dejavu_train.models.load import load_model
from dejavu_train.models.stored import check_folder
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.run import quantise
from dejavu_train.run import estimate
from dejavu_train.run.command import main
from dejavu_train.sparse.model import SparseCausalLM
from dejavu_train.training.config import RunConfig

IDS = torch.randint(3, 300, (2, 21), generator=torch.Generator().manual_seed(1))
WRITTEN = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
KEYS = [(1, "mlp"), (3, "heads"), (4, "mlp"), (6, "mlp"), (7, "mlp")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_family("nemotron_h", tmp_path_factory.mktemp("hybrid") / "model")


@pytest.fixture(scope="module")
def bundle(folder):
    return make_bundle(folder, means=True)


def test_sizes_name_the_targets_that_there_are(folder):
    shape, model = read_dims(str(folder)), load_model(str(folder))
    check_folder(str(folder), shape)
    assert shape.keys == KEYS and shape.pattern == ".-.*-.--"
    assert shape.layers_of(Target.MLP) == [1, 4, 6, 7] and shape.layers_of() == [1, 3, 4, 6, 7]
    assert shape.weights == sum(each.numel() for each in model.parameters() if each.dim() > 1)
    assert ModelDims.from_stored(shape.stored()) == shape
    assert [block.targets for block in blocks_of(model)] == [shape.targets_of(i) for i in range(8)]


def test_hooks_hand_over_what_a_layer_has(folder):
    dense = load_model(str(folder))
    with torch.no_grad(), record(dense, {"attn_in", "head_out", "mlp_in", "activation"}) as got:
        dense(IDS)
    assert {layer: sorted(each) for layer, each in got.items()} == {
        3: ["attn_in", "head_out"], **dict.fromkeys((1, 4, 6, 7), ["activation", "mlp_in"])
    }  # fmt: skip
    assert got[3]["head_out"].shape == (2, 21, 2, 24) and got[6]["activation"].shape == (2, 21, 96)


@pytest.mark.parametrize("backend", ["mask", "gather"])
@pytest.mark.parametrize("with_bundle", [True, False])
@pytest.mark.parametrize("sparse_from", [0, 9, "prompt"])
def test_at_density_one_logits_are_those_of_transformers(folder, bundle, backend, with_bundle, sparse_from):
    model = sparse(folder, bundle.at(1.0, 1.0) if with_bundle else None, backend, sparse_from=sparse_from)
    inputs = padded(21)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        got, expected = (each(**inputs).logits[real] for each in (model, load_model(str(folder))))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_gather_selects_as_mask_does(folder, bundle):
    chosen, inputs = bundle.at(0.4, 0.6), padded(40)
    real = inputs["attention_mask"].bool()
    mask, gather = (sparse(folder, chosen, backend, sparse_from=3) for backend in ("mask", "gather"))
    kept = {}
    gather._runtime.gather(gather).on_select = lambda layer, target, _, keep: kept.setdefault(
        (layer, str(target)), []
    ).append(keep.float().mean())
    with torch.no_grad():
        got, expected, dense = (each(**inputs).logits[real] for each in (gather, mask, load_model(str(folder))))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert sorted(kept) == KEYS and all(0.1 < torch.stack(each).mean() < 0.9 for each in kept.values())
    assert (got - dense).norm() > 0.01 * dense.norm()


def test_texts_are_written_and_saved_alike(folder, bundle, tmp_path):
    inputs, chosen = padded(12, 4), bundle.at(0.4, 0.6)
    mask, gather = (sparse(folder, chosen, backend, sparse_from="prompt") for backend in ("mask", "gather"))
    written = gather.generate(**inputs, **WRITTEN)
    assert torch.equal(written, mask.generate(**inputs, **WRITTEN))
    gather.save_pretrained(tmp_path)
    loaded = SparseCausalLM.from_pretrained(tmp_path, backend="gather", sparse_from="prompt")
    assert torch.equal(loaded.generate(**inputs, **WRITTEN), written)


def test_beams_and_a_guard_carry_the_states_along(folder, bundle):
    dense, inputs = load_model(str(folder)), padded(12, 4)
    beams = {**WRITTEN, "num_beams": 3}
    whole = sparse(folder, bundle.at(1.0, 1.0), "gather")
    assert torch.equal(whole.generate(**inputs, **beams), dense.generate(**inputs, **beams))
    guarded = sparse(folder, bundle.at(0.4, 0.6), "gather", guard=Guard(every=2))
    guarded.generate(**inputs, **WRITTEN)
    assert sorted((row["layer"], row["target"]) for row in guarded.guard_report()["layers"]) == KEYS


def test_a_prompt_goes_on_in_a_cache_that_takes_no_token_back(folder, bundle):
    model = sparse(folder, bundle.at(1.0, 1.0), "gather")
    cache = model.new_cache()
    with torch.no_grad():
        parts = [model(ids, past_key_values=cache).logits for ids in IDS.split((9, 11, 1), 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(IDS).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="takes no token back"):
        cache.crop(-1)
    assert cache.get_seq_length() == 21


@pytest.mark.parametrize(
    "backend, layer, said",
    [("mask", 0, "from layer 0 on"), ("mask", 5, "from layer 5 on"), ("gather", 0, "from layer 2 or an earlier layer"),
     ("gather", 5, "from layer 7 or an earlier layer")],
)  # fmt: skip
def test_numbers_that_are_not_finite_are_placed(folder, backend, layer, said):
    """As near as is known: gather keeps what attention reads, and no other layer's input."""
    model = load_model(str(folder))
    model.model.layers[layer].mixer.out_proj.weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match=said), torch.no_grad():
        SparseCausalLM.from_model(model, None, backend)(IDS)


def test_engines_refuse_in_a_line(folder, bundle):
    assert engine_refusal(read_dims(str(folder)), {}).count("layers without attention or an MLP") == 1
    for backend in ("cpu", "triton"):
        with pytest.raises(UserError, match=r"layers .* \(mask and gather run, and vLLM with the plug-in"):
            sparse(folder, bundle, backend)
    assert sparse(folder, bundle, "auto").backend == "gather"


def test_a_bundle_holds_what_there_is(folder, bundle, tmp_path):
    bundle.save_pretrained(tmp_path)
    assert sorted(Bundle.from_pretrained(tmp_path).specs) == KEYS
    with pytest.raises(UserError, match=r"no predictor for mlp of layer 0; it has mlp of layers 1,4,6-7 and heads of"):
        bundle.with_densities({UnitKey(0, Target.MLP): 0.5})


@pytest.mark.parametrize(
    "changes, said",
    [({"mlp_hidden_act": "silu"}, "uses the activation silu"),
     ({"layers_block_type": ["mlp", "moe"]}, "no layer with attention"),
     ({"layers_block_type": ["mamba", "attention"]}, "no layer with an MLP"),
     ({"layers_block_type": ["attention", "rwkv"]}, "layers of the kind rwkv"),
     ({"num_key_value_heads": 4}, "4 num_key_value_heads, which do not divide its 6 heads"),
     ({"ssm_state_size": None}, "ssm_state_size of this model must be a whole number")],
)  # fmt: skip
def test_what_is_not_run_is_said(changes, said):
    with pytest.raises(UserError, match=said):
        dims_of({**HYBRIDS["nemotron_h"].to_dict(), **changes})


def test_shared_experts_of_another_width_stay_dense(tmp_path):
    folder = save_family("nemotron_h", tmp_path / "model", moe_shared_expert_intermediate_size=64)
    shape = read_dims(str(folder))
    check_folder(str(folder), shape)
    assert shape.layers_of(Target.MLP) == [1, 4, 7]
    gather = sparse(folder, make_bundle(folder).at(1.0, 1.0), "gather")
    with torch.no_grad():
        torch.testing.assert_close(gather(IDS).logits, load_model(str(folder))(IDS).logits, rtol=1e-5, atol=1e-5)


def test_a_pattern_of_letters_is_that_of_names():
    named = HYBRIDS["nemotron_h"].to_dict()
    lettered = {**named, "hybrid_override_pattern": "M-M*-ME-", "num_hidden_layers": 8}
    del lettered["layers_block_type"]
    assert dims_of(lettered) == dims_of(named)
    older = [{"linear_attention": "mamba", "full_attention": "attention"}.get(k, k) for k in named["layers_block_type"]]
    assert dims_of({**named, "layers_block_type": older}) == dims_of(named)


@pytest.mark.parametrize("quantizer", ["rtn", "gptq"])
def test_matrices_of_mlps_and_attention_go_into_four_bits(quantizer, text_file, tmp_path):
    """Shared experts, routed ones and Mamba layers stay numbers, in the names that a checkpoint has."""
    wide = {"hidden_size": 64, "intermediate_size": 128, "moe_shared_expert_intermediate_size": 128, "head_dim": 16}
    folder, coded = save_family("nemotron_h", tmp_path / "model", **wide), str(tmp_path / "coded")
    config = QuantizeConfig(
        str(folder), output=coded, quantizer=quantizer, device="cpu", text=TextSource(source=str(text_file)),
        tokens=2560, window=64,
    )  # fmt: skip
    errors = quantise(config)
    assert [sorted(made) for made in errors] == [
        sorted(f"mixer.{part}_proj" for part in {"-": ("up", "down"), "*": "qkvo"}.get(letter, ()))
        for letter in "M-M*-ME-"
    ]
    check_folder(coded, read_dims(coded))
    mask, gather = (SparseCausalLM.from_pretrained(coded, None, backend) for backend in ("mask", "gather"))
    with torch.no_grad():
        got, expected, dense = (model(IDS).logits for model in (gather, mask, load_model(str(folder))))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert 0 < (got - dense).norm() < 0.5 * dense.norm()
    assert torch.equal(load_model(coded).model.layers[6].mixer.experts.up_proj, whole_experts(folder))
    with pytest.raises(UserError, match="a GPTQ checkpoint of it cannot be written"):
        export(ExportConfig(coded, str(tmp_path / "exported")))


def whole_experts(folder):
    return load_model(str(folder)).model.layers[6].mixer.experts.up_proj


def test_layers_that_are_asked_for_must_have_a_target(folder, tmp_path, capsys):
    asked = [f"--model={folder}", f"--output={tmp_path / 'run'}", "--mlp.rank=8", "--collect.window=64", "--check"]
    assert exit_on_user_error(main, [*asked, "--layers=0,2"]) == 2
    said = "--layers 0,2 names no layer with a target; the model has mlp in layers 1,4,6-7 and heads in layers 3"
    assert said in capsys.readouterr().err
    assert exit_on_user_error(main, [*asked, "--collect.window=300"]) == 2
    assert "the model has 256 positions; give --collect.window 256" in capsys.readouterr().err
    assert RunConfig(layers="0-3").own_jobs(read_dims(str(folder))) == [(1, "mlp"), (3, "heads")]


def test_an_estimate_times_a_layer_of_each_kind(folder, monkeypatch):
    config = RunConfig(str(folder), collect=CollectConfig(window=16, batch_size=1, device="cpu", dtype="float32"))
    monkeypatch.setattr(estimate, "timed", lambda work, _: [work(), 48.0][1])
    made = estimate.Estimate.measure(config, read_dims(str(folder)))
    assert (made.block, made.row) == (48 / 16 / 3, 48 / 32 / 3)  # of a Mamba, an attention and an MLP
