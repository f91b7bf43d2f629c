"""The LM head in 8 or 4 bits: codes of its own beside embeddings that stay, on every way that runs such a model."""

import dataclasses
import json
import shutil

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dejavu_train.data.text import TextSource
from dejavu_train.engine.backend import EngineBackend
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.extras.export import ExportConfig, export
from dejavu_train.ground.errors import Unsupported, UserError
from dejavu_train.models.config_values import read_dims, read_values
from dejavu_train.models.int4 import CodedLinear, Int8Rows
from dejavu_train.models.int4_sizes import head_kind
from dejavu_train.models.load import load_model, weight_hash
from dejavu_train.models.stored import HEAD, SINGLE, check_folder
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.rounding import round_nearest_8
from dejavu_train.quantize.run import quantise
from dejavu_train.sparse.model import SparseOPTForCausalLM

IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """1 layer, d_model 64: one layer is enough for what comes behind the layers."""
    return save_tiny_opt(
        tmp_path_factory.mktemp("wide-opt"), hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def folders(dense, text_file, tmp_path_factory):
    """By the head's kind a folder by GPTQ, and "rtn": int4 to nearest."""
    text, parent = TextSource(source=str(text_file)), tmp_path_factory.mktemp("heads")
    config = QuantizeConfig(model=str(dense), text=text, tokens=1500, window=64, device="cpu")
    for name in ("fp16", "int8", "int4"):
        quantise(dataclasses.replace(config, lm_head=name, output=str(parent / name)))
    quantise(dataclasses.replace(config, quantizer="rtn", lm_head="int4", output=str(parent / "rtn")))
    return parent


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


@pytest.mark.parametrize(("kind", "bits", "most"), [("int8", 8, 0.01), ("int4", 4, 0.15)])
def test_the_head_has_codes_of_its_own(folders, dense, kind, bits, most, tmp_path):
    folder = str(folders / kind)
    check_folder(folder, read_dims(folder))
    assert head_kind(read_values(folder)) == kind
    model, plain = load_model(folder, "float16"), load_model(str(folders / "fp16"))
    assert isinstance(model.lm_head, CodedLinear) and model.lm_head.layout.sizes.bits == bits
    assert torch.equal(
        model.model.decoder.embed_tokens.weight, load_model(str(dense)).model.decoder.embed_tokens.weight
    )
    table = plain.lm_head.weight
    assert 0 < (model.lm_head.weight - table).norm() < most * table.norm()
    assert 0 < (logits(model) - logits(plain)).norm() < most * logits(plain).norm()
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder, dtype="float32")), logits(model))
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert weight_hash(str(tmp_path / "again"), full=True) == weight_hash(folder, full=True)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "again")
    check_folder(str(tmp_path / "again"), read_dims(folder))


def test_a_head_beside_embeddings_that_a_config_ties_counts(dense, tmp_path):
    """Training goes on with a head of its own, and config.json keeps saying that it is tied."""
    folder = shutil.copytree(dense, tmp_path / "m")
    tensors = load_file(folder / SINGLE)
    table = tensors["model.decoder.embed_tokens.weight"]
    save_file({**tensors, HEAD: table.flip(0).contiguous()}, folder / SINGLE, {"format": "pt"})
    output = str(tmp_path / "q")
    quantise(QuantizeConfig(model=str(folder), quantizer="rtn", lm_head="int8", device="cpu", output=output))
    made = load_model(output)
    assert (made.lm_head.weight - table.flip(0)).norm() < 0.01 * table.norm()
    assert torch.equal(made.model.decoder.embed_tokens.weight, table)


def test_codes_of_eight_bits_are_the_nearest():
    rows = torch.randn(5, 64)
    rows[2] = 0
    made = Int8Rows.of(*round_nearest_8(rows, 32))
    step = rows.unflatten(1, (2, 32)).abs().amax(-1, keepdim=True) / 127
    assert bool(((made.dense() - rows).unflatten(1, (2, 32)).abs() <= 0.56 * step + 1e-7).all())
    assert made.words.dtype == torch.int8 and made.words.abs().max() == 127


def test_the_head_is_calibrated_too(folders):
    reports = {name: json.loads((folders / name / "quantization.json").read_text()) for name in ("int4", "int8")}
    errors = {name: report["lm_head_errors"] for name, report in reports.items()}
    assert errors["int8"]["weight_error"] < 1e-4 < errors["int4"]["weight_error"]
    read = []
    for name in ("int4", "rtn"):  # the same layers and inputs: the rounded model's are close enough
        model = load_model(str(folders / name))
        table = model.model.decoder.embed_tokens.weight.detach()
        hidden = load_model(str(folders / "fp16")).model(IDS).last_hidden_state
        read.append(float((hidden.detach() @ (model.lm_head.weight - table).T).square().sum()))
    assert read[0] < read[1]


def test_mask_gather_and_a_joint_folder(folders, tmp_path):
    bundle = make_bundle(folders / "int4", means=True).at(0.3, 0.75)
    bundle.check_model(str(folders / "int4"))
    mask, gather = (
        SparseOPTForCausalLM.from_model(load_model(str(folders / "int4")), bundle, backend)
        for backend in ("mask", "gather")
    )
    torch.testing.assert_close(logits(mask), logits(gather), rtol=1e-3, atol=1e-3)
    mask.save_pretrained(tmp_path / "both")
    again = SparseOPTForCausalLM.from_pretrained(tmp_path / "both", backend="mask")
    assert isinstance(again.lm_head, CodedLinear)
    assert read_values(str(tmp_path / "both"))["model_type"] == "dejavu_sparse_opt"
    torch.testing.assert_close(logits(again), logits(mask), rtol=0, atol=0)
    for other in ("fp16", "int8", "rtn"):
        with pytest.raises(UserError, match="other weights"):
            bundle.check_model(str(folders / other))


def test_engines_take_the_head_or_name_it(folders):
    with pytest.raises(Unsupported, match=r"no kernel for an LM head in int8.*--lm_head int4"):
        EngineBackend(load_model(str(folders / "int8")), make_bundle(folders / "int8"), ops="reference")
    model = load_model(str(folders / "int8"))
    weights = CpuWeights.from_model(model)
    start, vocab = weights.model.lm_head, weights.model.vocab
    assert start != weights.model.embedding
    assert torch.equal(torch.as_tensor(weights.rows(start, vocab)), model.lm_head.weight)


def test_an_export_has_the_head_as_numbers(folders, dense, tmp_path):
    export(ExportConfig(model=str(folders / "int4"), output=str(tmp_path / "gptq")))
    stored = {}
    for file in (tmp_path / "gptq").glob("*.safetensors"):
        stored |= load_file(file)
    assert torch.equal(stored["lm_head.weight"], load_model(str(folders / "int4")).lm_head.weight)
    assert "lm_head.scales" not in stored


def test_a_kind_that_nobody_knows_is_refused(folders, tmp_path):
    values = read_values(str(folders / "int4"))
    values["quantization_config"]["lm_head"] = "int3"
    shutil.copytree(folders / "int4", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(values))
    for action in (load_model, lambda name: check_folder(name, read_dims(name))):
        with pytest.raises(UserError, match="LM head .* in int3; known are fp16, int8, int4"):
            action(str(tmp_path))
