"""Every family on tiny random models: as transformers has it, gather as mask, texts written, saved and loaded."""

import dataclasses
import json
import pickle

import pytest
import torch
from bundles import make_bundle, without_inputs
from conftest import save_tiny_tokenizer
from family_models import CASES, SIZES, YARN, padded, random_family, save_family, sparse
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    ArceeConfig,
    AutoModel,
    AutoModelForCausalLM,
    Jais2Config,
    LlamaConfig,
    MistralConfig,
    NanoChatConfig,
    TextStreamer,
    pipeline,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dejavu_train import SparseForCausalLM
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.evaluation.perplexity import EvalCorpus, eval_batches, window_nats
from dejavu_train.families import Target, blocks_of, dims_of
from dejavu_train.families.block import active_neurons, causal, mix_heads, positions_like
from dejavu_train.families.dims import Activation, Positions
from dejavu_train.families.standard import StandardFamily
from dejavu_train.ground.errors import UserError, exit_on_user_error
from dejavu_train.models.config_values import read_dims, read_values
from dejavu_train.models.hooks import head_contribution, record
from dejavu_train.models.load import load_model, load_tokenizer, random_model
from dejavu_train.models.stored import check_folder
from dejavu_train.sparse.model import SparseCausalLM


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    return save_family(request.param, tmp_path_factory.mktemp("families") / request.param)


@pytest.fixture(scope="module")
def bundle(folder):
    bundle = make_bundle(folder, means=True)
    return bundle.at(0.4, 0.6)


@pytest.fixture(scope="module")
def dense(folder):
    return load_model(str(folder))


def test_recorded_places_belong_together(dense):
    ids = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), record(dense, {"residual", "attn_in", "head_out", "mlp_in", "activation"}) as recorded:
        dense(ids)
        for number, block in enumerate(blocks_of(dense)):
            got = recorded[number]
            torch.testing.assert_close(block.neurons(got["mlp_in"]), got["activation"])
            mixed = mix_heads(block, got["attn_in"], causal(block), positions_like(ids))
            assert got["head_out"].shape == (2, 9, block.n_groups, mixed.shape[-1] // block.n_groups)
            torch.testing.assert_close(mixed, got["head_out"].flatten(-2), rtol=1e-4, atol=1e-5)
            assert torch.equal(got["residual"], got["attn_in"]) == block.post_norm


def test_one_k_v_head_for_all_is_recorded_as_a_group():
    model = random_family("llama", num_key_value_heads=1)
    with torch.no_grad(), record(model, {"attn_in", "head_out"}) as recorded:
        model(torch.arange(3, 12)[None])
        block, got = blocks_of(model)[0], recorded[0]
        mixed = mix_heads(block, got["attn_in"], causal(block), torch.arange(9)[None])
    assert got["head_out"].shape == (1, 9, 1, 48)
    torch.testing.assert_close(mixed, got["head_out"][:, :, 0], rtol=1e-4, atol=1e-5)
    assert head_contribution(got["head_out"], block.out.weight).shape == (1, 9, 1)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_matrices(folder, dense, tied):
    """By the config alone, as `--plan` counts them."""
    values = {**read_values(str(folder)), "tie_word_embeddings": tied}
    made = [tensor for tensor in random_model(values).parameters() if tensor.dim() == 2]
    assert dims_of(values).weights == pytest.approx(sum(tensor.numel() for tensor in made), rel=0.002)
    assert dims_of(values) == dims_of(dense.config)  # a bundle is for either


@pytest.mark.parametrize("backend", ["mask", "gather"])
def test_given_positions_count_where_transformers_counts_them(folder, bundle, dense, backend):
    ids = torch.randint(3, 300, (2, 10), generator=torch.Generator().manual_seed(1))
    model = sparse(folder, bundle.at(1.0, 1.0), backend)
    for positions in (torch.arange(10) * 3, torch.arange(10) % 5, torch.arange(10).flip(0)):
        given = {"input_ids": ids, "position_ids": positions.expand(2, 10)}
        with torch.no_grad():
            torch.testing.assert_close(model(**given).logits, dense(**given).logits, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["mask", "gather", "auto"])
def test_padding_within_a_row_counts_where_transformers_counts_it(folder, bundle, dense, backend):
    """Rotary families turn by columns where no positions are given, as under peft's prompt tuning of a batch."""
    ids = torch.randint(3, 300, (2, 10), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, 3:6] = 0
    model = sparse(folder, bundle.at(1.0, 1.0), backend)
    with torch.no_grad():
        got, expected = (each(ids, attention_mask=mask).logits[mask.bool()] for each in (model, dense))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_sparse_from_counts_the_positions_that_a_family_has(folder, bundle, dense):
    """Given ones, but for ALiBi, which counts off the mask."""
    ids, late = torch.arange(3, 11)[None], torch.arange(8)[None] + 40
    for backend in ("mask", "gather"):
        model = sparse(folder, bundle, backend, sparse_from=40)
        with torch.no_grad():
            got, expected = (each(ids, position_ids=late).logits for each in (model, dense))
        alike = torch.allclose(got, expected, rtol=1e-5, atol=2e-5)
        assert alike == (dims_of(dense.config).positions == Positions.ALIBI), backend


@pytest.mark.parametrize("columns", [40, pytest.param(256, marks=pytest.mark.long)])
def test_gather_selects_as_mask_does_over_skipped_and_back_filled_groups(folder, bundle, columns):
    inputs = padded(columns)
    real = inputs["attention_mask"].bool()
    mask = sparse(folder, bundle, "mask", sparse_from=3)
    gather = sparse(folder, bundle, "gather", sparse_from=3)
    kept = []
    gather._runtime.gather(gather).on_select = lambda layer, target, column, keep: kept.append((target, keep))
    with torch.no_grad():
        torch.testing.assert_close(gather(**inputs).logits[real], mask(**inputs).logits[real], rtol=1e-4, atol=1e-4)
    groups = torch.stack([keep for target, keep in kept if target == Target.HEADS])
    assert groups.shape[-1] == bundle.shape.n_kv_heads and 0.3 < groups.float().mean() < 0.9  # some were skipped
    assert (groups[1:, 1].int() - groups[:-1, 1].int()).amax() == 1  # and selected again


@pytest.mark.parametrize("backend", ["gather", "cpu", "triton"])
def test_texts_are_saved_and_written_alike(folder, bundle, tmp_path, backend):
    """Texts of rows with padding on the left: as `mask` writes them, and as the saved model does."""
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    inputs, model = padded(9, 4), sparse(folder, bundle, backend, "prompt")
    written = model.generate(**inputs, **settings)
    assert model.backend == backend and (backend == "gather") == (model._runtime.gatherer is not None)
    assert torch.equal(written, sparse(folder, bundle, "mask", "prompt").generate(**inputs, **settings))
    model.save_pretrained(tmp_path)
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == f"dejavu_sparse_{kind}"
    assert Bundle.from_pretrained(tmp_path / "predictors").shape == bundle.shape
    for cls in (AutoModelForCausalLM, SparseForCausalLM):
        loaded = cls.from_pretrained(tmp_path)
        loaded.sparse_from = "prompt"
        assert torch.equal(loaded.generate(**inputs, **settings), written)


def test_pipelines_streamers_and_the_guard_take_every_family(folder, bundle, capsys):
    model = sparse(folder, bundle, "gather", guard=Guard(every=2))
    tokenizer = load_tokenizer(str(folder))
    streamer = TextStreamer(tokenizer)
    written = pipeline("text-generation", model=model, tokenizer=tokenizer)("the token", max_new_tokens=4)
    assert written[0]["generated_text"].startswith("the token") and model.guard_report()
    ids = torch.tensor([[2, 9, 30]])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, streamer=streamer)
    assert capsys.readouterr().out


def test_the_papers_observations_are_of_opt_alone(folder, capsys):
    from papers.deja_vu.observe.__main__ import main

    if folder.name == "galactica":
        return
    assert exit_on_user_error(main, [f"--model={folder}", "--bundle=null", f"--output={folder / 'out'}"]) == 2
    assert "are those of a pre-norm OPT" in capsys.readouterr().err


def test_fatrelu_has_the_threshold_of_the_config(tmp_path):
    save_tiny_tokenizer(tmp_path)
    MODEL_FOR_CAUSAL_LM_MAPPING[LlamaConfig](CASES["fatrelu"]).save_pretrained(tmp_path)
    gate = torch.tensor([-1.0, 0.1, 0.19, 0.21])
    for load in (load_model, AutoModelForCausalLM.from_pretrained):
        block = blocks_of(load(str(tmp_path)))[0]
        assert block.activate(gate).tolist() == [0, 0, 0, gate[3]]
    assert read_dims(str(tmp_path)).threshold == 0.2


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig])
def test_drelu_activates_both_maps(kind, tmp_path):
    save_tiny_tokenizer(tmp_path)
    config = kind(**SIZES, num_key_value_heads=2, hidden_act="drelu")
    MODEL_FOR_CAUSAL_LM_MAPPING[kind](config).save_pretrained(tmp_path)
    x = torch.randn(5, 48)
    loaded = load_model(str(tmp_path)), AutoModelForCausalLM.from_pretrained(tmp_path)
    for model in (*loaded, pickle.loads(pickle.dumps(loaded[0])), AutoModel.from_pretrained(tmp_path)):
        mlp = model.base_model.layers[0].mlp
        expected = mlp.down_proj(mlp.gate_proj(x).relu() * mlp.up_proj(x).relu())
        torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("name", ["arcee", "nemotron", "jais2"])
def test_squares_of_fp16_do_not_overflow(name, tmp_path):
    """Pre-activations of 300 and more, whose squares are more than fp16 holds."""
    save_tiny_tokenizer(tmp_path)
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(CASES[name])](CASES[name])
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data *= 300
        layer.mlp.down_proj.weight.data /= 90_000
    model.half().save_pretrained(tmp_path)
    bundle = without_inputs(make_bundle(tmp_path)).at(0.5, 1.0)
    ids = torch.randint(3, 300, (1, 12), generator=torch.Generator().manual_seed(0))
    largest = []
    whole = load_model(str(tmp_path))
    blocks_of(whole)[0].up.register_forward_hook(lambda _, __, output: largest.append(float(output.max())))
    with torch.no_grad():
        expected = SparseCausalLM.from_model(whole, bundle, "mask", sparse_from=4)(ids).logits
        half = SparseCausalLM.from_model(load_model(str(tmp_path), "float16"), bundle, "gather", sparse_from=4)
        found = half(ids).logits
    assert max(largest) > 256 and found.isfinite().all()
    assert (found.float() - expected).norm() < 0.02 * expected.norm()


def test_capped_logits_are_those_that_are_scored(tmp_path):
    """A cap changes the perplexity and not the likeliest token."""
    save_tiny_tokenizer(tmp_path)
    MODEL_FOR_CAUSAL_LM_MAPPING[NanoChatConfig](CASES["nanochat"]).save_pretrained(tmp_path)
    dense = load_model(str(tmp_path))
    held = EvalCorpus([[2, *range(5, 30)]], [0], [25], 99)
    (batch,) = eval_batches(held, 64, torch.device("cpu"))
    with torch.no_grad():
        logits = dense(batch.ids).logits
        expected = torch.nn.functional.cross_entropy(logits[0], batch.targets[0], reduction="sum")
        assert logits.abs().max() < 2 and read_dims(str(tmp_path)).logit_cap == 2
        assert window_nats(dense, batch)[0] == pytest.approx(float(expected), rel=1e-5)


def test_of_gelu_the_neurons_are_active_that_carry_most():
    neurons = torch.tensor([[0.5, -3.0, 0.1, 1.0], [1.0, 1.0, 1.0, 1.0]])
    norms = torch.tensor([1.0, 1.0, 1.0, 2.0])  # contributions 0.5, 3, 0.1, 2 of 5.6, then 1, 1, 1, 2 of 5
    assert active_neurons(Activation.GELU, neurons, norms).tolist() == [[True, True, False, True], [True] * 4]
    assert active_neurons(Activation.RELU, neurons.relu(), norms).tolist() == [[True, False, True, True], [True] * 4]


def test_bloom_is_named_by_either_name_of_its_sizes(folder):
    released = {"model_type": "bloom", "n_embed": 64, "n_layer": 2, "num_attention_heads": 4, "vocab_size": 320}
    assert dims_of(released).d_ffn == 256 and dims_of(released).max_positions == 2048
    with pytest.raises(UserError, match="apply_residual_connection_post_layernorm"):
        dims_of({**released, "apply_residual_connection_post_layernorm": True})


@pytest.mark.parametrize(
    "changes, said",
    [({"hidden_act": "silu"}, "uses the activation silu.*dejavu survey --model MODEL"),
     ({"hidden_act": "relu2"}, "activation relu2; supported in its family are relu, fatrelu, drelu;"),
     ({"mlp_bias": True}, "biases in its attention or its MLP alone"),
     ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "of the kind dynamic"),
     ({"head_dim": 7}, "turns 7 dimensions of a head .head_dim 7, partial_rotary_factor 1"),
     ({"model_type": "nemotron", "hidden_act": "relu2", "head_dim": 10, "rope_parameters": None},
      "turns 5 dimensions of a head .head_dim 10, partial_rotary_factor 0.5"),
     ({"num_key_value_heads": 4}, "4 num_key_value_heads, which do not divide its 6 heads"),
     ({"intermediate_size": None}, "intermediate_size of this model must be a whole number"),
     ({"model_type": "nemotron", "hidden_act": "relu2", "num_key_value_heads": None}, "num_key_value_heads of this"),
     ({"model_type": "nanochat", "hidden_act": "relu2", "head_dim": None}, "head_dim of this model must be a whole")],
)  # fmt: skip
def test_what_a_family_does_not_run_is_said(changes, said):
    values = {**LlamaConfig(**SIZES, hidden_act="relu").to_dict(), **changes}
    with pytest.raises(UserError, match=said):
        dims_of(values)


@pytest.mark.parametrize("kind, said", [("bitnet", "kernels for ternary weights"), ("jamba", "has Mamba layers")])
def test_what_can_have_no_sparse_form_is_named(kind, said):
    with pytest.raises(UserError, match=said):
        dims_of({"model_type": kind})


def test_a_sliding_window_is_all_positions_that_there_are():
    config = MistralConfig(**SIZES, num_key_value_heads=2, hidden_act="relu", sliding_window=64)
    assert dims_of(config).max_positions == 64
    long = {**config.to_dict(), "max_position_embeddings": 8192}
    del long["sliding_window"]  # then it is the one that transformers fills in
    assert dims_of(long).max_positions == dims_of(MistralConfig.from_dict(long)).max_positions == 4096
    assert dims_of({**long, "sliding_window": None}).max_positions == 8192


@pytest.mark.parametrize("name", CASES)
def test_what_a_config_leaves_out_is_what_transformers_fills_in(name):
    config = CASES[name]
    for key in config.to_dict().keys() - {"model_type"}:
        values = {other: value for other, value in config.to_dict().items() if other != key}
        try:
            expected = dims_of(type(config).from_dict(values))
            assert dims_of(values) == expected
        except (UserError, StrictDataclassError):  # a size that must be given, or that fits no other
            pass


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, ArceeConfig, Jais2Config, NanoChatConfig])
def test_whole_heads_are_turned_whatever_a_config_says(kind):
    values = {**CASES["llama"].to_dict(), "model_type": kind.model_type, "partial_rotary_factor": 0.5}
    values["hidden_act"] = "relu"
    rotary = MODEL_FOR_CAUSAL_LM_MAPPING[kind](kind.from_dict(values)).model.rotary_emb
    cosines, _ = rotary(torch.zeros(1, 1, 8), torch.zeros(1, 1, dtype=torch.long))
    assert cosines.shape[-1] == 8 and dims_of(values).rotary_share == dims_of(kind.from_dict(values)).rotary_share == 1
    with pytest.raises(UserError, match="partial_rotary_factor 0.5 beside rotary positions of the kind yarn"):
        dims_of({**values, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}})


def test_of_two_names_of_rotary_positions_transformers_takes_the_older():
    values = CASES["llama"].to_dict() | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert LlamaConfig.from_dict(values).rope_parameters["rope_type"] == "dynamic"
    with pytest.raises(UserError, match="of the kind dynamic"):
        dims_of(values)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama", {"final_logit_softcapping": 2.0}), ("arcee", {"final_logit_softcapping": 2.0}),
     ("persimmon", {"num_key_value_heads": 2}), ("bloom", {"num_hidden_layers": 3, "n_embed": 96})],
)  # fmt: skip
def test_keys_count_as_the_classes_of_transformers_read_them(name, changes, tmp_path):
    config = type(CASES[name]).from_dict({**CASES[name].to_dict(), **changes})
    save_tiny_tokenizer(tmp_path)
    dense = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    dense.save_pretrained(tmp_path)
    both = {**CASES[name].to_dict(), **changes}  # of two names of a size one is out of date
    (tmp_path / "config.json").write_text(json.dumps(both))
    check_folder(str(tmp_path), read_dims(str(tmp_path)))
    model = sparse(tmp_path, make_bundle(tmp_path).at(1.0, 1.0), "gather")
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense.eval()(ids).logits, rtol=1e-5, atol=2e-5)


def test_a_threshold_of_zero_is_one():
    assert dims_of({**CASES["fatrelu"].to_dict(), "hidden_act_param": 0.0}).threshold == 0
    assert dims_of({**CASES["fatrelu"].to_dict(), "hidden_act_param": None}).threshold == 0.01


def test_a_family_is_registered_by_one_call():
    class Own(StandardFamily):
        classes = {"stablelm": "StableLm"}

    from dejavu_train.families import base

    with pytest.raises(UserError, match="is of type stablelm; supported are"):
        dims_of({"model_type": "stablelm"})
    base.register(Own())
    try:
        values = {key: value for key, value in SIZES.items()} | {"model_type": "stablelm", "hidden_act": "relu"}
        assert dims_of(values).d_model == 48
        assert dataclasses.asdict(dims_of(values))["positions"] == "rotary"
    finally:
        del base._FAMILIES["stablelm"]
