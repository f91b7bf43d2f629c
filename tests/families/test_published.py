"""Published checkpoints whose code is not in transformers: each as its own code computes, through every engine."""

import json
import logging

import pytest
import torch
from bundles import make_bundle
from published_models import CONFIGS, EXTRA, published_logits, published_tensors, save_published
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dejavu_train import SparseCausalLM
from dejavu_train.engine.cpu import CpuEngine
from dejavu_train.families import dims_of
from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.load import load_model
from dejavu_train.models.stored import check_folder
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.run import quantise

BACKENDS = [("mask", {}), ("gather", {}), ("triton", {"ops": "reference"})]
IDS = torch.randint(3, 300, (2, 17), generator=torch.Generator().manual_seed(5))
WRITTEN = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}


@pytest.fixture(scope="module", params=CONFIGS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def folder(name, tmp_path_factory):
    return save_published(name, tmp_path_factory.mktemp("published") / "model")


@pytest.fixture(scope="module")
def bundle(folder):
    return make_bundle(folder, means=True)


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("backend, options", BACKENDS)
@pytest.mark.parametrize("with_bundle", [True, False])
def test_logits_are_those_of_the_published_code(name, folder, bundle, backend, options, with_bundle):
    predictors = bundle.at(1.0, 1.0) if with_bundle else None
    model = SparseCausalLM.from_model(load_model(str(folder)), predictors, backend, **options)
    torch.testing.assert_close(logits(model), published_logits(name, IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend, options", BACKENDS)
def test_fp16_is_near_its_twin(name, folder, bundle, backend, options):
    """The published code in fp32, of the weights that fp16 holds: 0.5 % of the logits' norm is for the arithmetic."""
    twin = {part: each.half().float() for part, each in published_tensors(name).items()}
    expected = published_logits(name, IDS, twin)
    dense = load_model(str(folder), "float16")
    model = SparseCausalLM.from_model(dense, bundle.at(1.0, 1.0), backend, **options)
    assert model.dtype == torch.float16
    assert 0 < (logits(model).float() - expected).norm() < 0.005 * expected.norm()


@pytest.mark.parametrize("with_bundle", [True, False])
def test_the_cpu_engine_scores_and_writes_it(name, folder, bundle, with_bundle):
    chosen = bundle.at(1.0, 1.0) if with_bundle else None
    model = SparseCausalLM.from_pretrained(folder, chosen, "cpu")
    expected = published_logits(name, IDS).log_softmax(-1)
    nll = -expected[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    engine = CpuEngine(load_model(str(folder)), chosen or model.bundle, batch=2, threads=2)
    for got, row in zip(engine.score(IDS.tolist()), nll, strict=True):
        torch.testing.assert_close(got, row, rtol=1e-5, atol=1e-5)
    ids = IDS.clone()
    for _ in range(9):
        ids = torch.cat([ids, published_logits(name, ids)[:, -1:].argmax(-1)], 1)
    assert model.backend == "cpu" and torch.equal(model.generate(IDS, **WRITTEN), ids)


def test_a_saved_model_keeps_what_the_origins_code_reads(name, folder, tmp_path):
    load_model(str(folder)).save_pretrained(tmp_path / "dense")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "auto")
    SparseCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "sparse")
    for kind in ("dense", "auto", "sparse"):
        saved = json.loads((tmp_path / kind / "config.json").read_text())
        plain = dict(CONFIGS[name])
        if kind == "sparse":
            plain |= {key: saved[key] for key in ("model_type", "architectures")}
        assert {key: saved.get(key) for key in plain} == plain
        assert saved["rope_parameters"]["rope_theta"] == saved["rope_theta"] == plain.get("rope_theta", 10000.0)
        tensors = load_file(tmp_path / kind / "model.safetensors")
        expected = published_tensors(name)
        assert set(tensors) == set(expected) and all(torch.equal(tensors[part], expected[part]) for part in expected)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")), published_logits(name, IDS),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


def test_an_activation_that_the_code_does_not_use_is_named(name, folder, caplog):
    with caplog.at_level(logging.WARNING):
        load_model(str(folder))
    named = [line for line in caplog.messages if "hidden_act" in line]
    wanted = {"sparselm": ("silu", "relu"), "bamboo": ("relu", "drelu")}.get(name)
    assert len(named) == (wanted is not None) and all(each in named[0] for each in wanted or ())
    assert caplog.text.count("names code of its own (trust_remote_code), which is not run") == 1


def test_tensors_that_do_not_fit_are_named(name, tmp_path):
    folder = save_published(name, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    wide = {"intermediate_size": 104} | ({"sparsity_new_intermediate_size": 104} if name == "sparselm" else {})
    for changes, said in (
        (wide, r"mlp.gate_proj.weight of .* is 96x48, its config asks for 104x48"),
        ({"num_hidden_layers": 2}, r"hold layers\.2\.\S+, which its config has no place for .num_hidden_layers is 2"),
        ({"num_hidden_layers": 4}, r"lack layers\.3\.input_layernorm.weight and 8 more, which its config asks for"),
    ):
        (folder / "config.json").write_text(json.dumps({**values, **changes}))
        for door in (lambda: check_folder(str(folder), read_dims(str(folder))), lambda: load_model(str(folder))):
            with pytest.raises(UserError, match=said):
                door()


def test_extra_tensors_of_one_are_surplus_in_another(tmp_path):
    assert EXTRA["bamboo"].keys().isdisjoint(EXTRA["sparselm"])
    folder = save_published("bamboo", tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "mistral"}))
    with pytest.raises(UserError, match=r"mlp.predictor\S+ which .* .no layer of the type mistral has it"):
        check_folder(str(folder), read_dims(str(folder)))


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("minicpm", {"num_experts": 8}, "has experts"),
        ("minicpm", {"scale_depth": 0}, "scale_depth of .* must be a number above 0, got 0"),
        ("minicpm", {"hidden_act": "silu"}, "uses the activation silu"),
        ("sparselm", {"sparsity_gated_mlp": False}, "without a gate"),
        ("sparselm", {"sparsity_new_intermediate_size": 80}, "80 neurons .* intermediate_size 96"),
    ],
)  # fmt: skip
def test_forms_that_are_not_read_are_refused(name, keys, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], **keys}))
    with pytest.raises(UserError, match=said):
        read_dims(str(tmp_path))


@pytest.mark.parametrize(
    ("keys", "nearest"),
    [({"model_type": "prollama", "hidden_act": "relu", "hidden_size": 48}, "llama"),
     ({"model_type": "afm", "hidden_act": "relu2", "hidden_size": 48, "rms_norm_eps": 1e-6}, "arcee"),
     ({"model_type": "zeta", "hidden_size": 48, "hybrid_override_pattern": "M-*", "ssm_state_size": 8}, "nemotron_h"),
     ({"model_type": "gal", "hidden_size": 48, "ffn_dim": 96, "activation_function": "gelu"}, "opt")],
)  # fmt: skip
def test_an_unknown_type_names_the_nearest_what_was_found_and_the_guide(keys, nearest):
    for code, said in (({}, "dejavu survey"), ({"auto_map": {"AutoConfig": "a.B"}}, "trust_remote_code is not taken")):
        with pytest.raises(UserError) as refusal:
            dims_of({**keys, **code}, "their/model")
        found = [f"{key} {keys[key]}" for key in ("hidden_act", "activation_function", "hidden_size") if key in keys]
        wanted = (f"the nearest is {nearest},", "families.md", said, *found)
        assert all(each in str(refusal.value) for each in wanted), refusal.value


def test_four_bits_run_in_every_engine(name, tmp_path):
    """Against the same codes multiplied out, by `mask`. Tensors that no module reads stay in the folder."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "sparsity_new_intermediate_size": 128} if name == "sparselm" else {}
    folder = save_published(name, tmp_path / "model", **sizes)
    quantise(QuantizeConfig(str(folder), output=str(tmp_path / "coded"), quantizer="rtn", device="cpu"))
    coded = tmp_path / "coded"
    check_folder(str(coded), read_dims(str(coded)))
    expected = logits(SparseCausalLM.from_pretrained(coded, None, "mask"))
    plain = logits(SparseCausalLM.from_pretrained(folder, None, "mask"))
    assert 0 < (expected - plain).norm() < 0.6 * plain.norm()
    for backend, options in (("gather", {}), ("triton", {"ops": "reference"})):
        model = SparseCausalLM.from_model(load_model(str(coded)), None, backend, **options)
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)
    nll = -expected.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    bundle = SparseCausalLM.from_pretrained(coded).bundle
    for got, row in zip(CpuEngine(load_model(str(coded)), bundle, batch=2).score(IDS.tolist()), nll, strict=True):
        torch.testing.assert_close(got, row, rtol=0.05, atol=0.05)
