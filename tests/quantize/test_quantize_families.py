"""Every family in 4 bits by the command: what it writes is loaded, run by all backends, exported, read back."""

import dataclasses
from pathlib import Path

import pytest
import torch
from bundles import make_bundle
from family_models import CASES, padded, save_family
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from dejavu_train.data.text import TextSource
from dejavu_train.engine.cpu.engine import CpuEngine
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.extras.export import ExportConfig, export, export_together
from dejavu_train.families import blocks_of, family_of
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_json
from dejavu_train.models.config_values import read_dims, read_values
from dejavu_train.models.int4 import CodedLinear
from dejavu_train.models.load import load_model, weight_hash
from dejavu_train.models.stored import check_folder
from dejavu_train.quantize.check import written_bytes
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.run import calibration_windows, quantise
from dejavu_train.quantize.source import StoredTensors
from dejavu_train.quantize.stream import Skeleton, embed
from dejavu_train.sparse.model import SparseCausalLM

WIDE = {  # sizes that have a 4-bit form; BLOOM's and OPT's keys are other ones
    "hidden_size": 64, "word_embed_proj_dim": 64, "intermediate_size": 128, "ffn_dim": 128, "n_layer": 2,
    "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
OWN = {"350m": {"word_embed_proj_dim": 32}, "nemotron": {"head_dim": 24}, "jais2": {"num_key_value_heads": 4}}


@pytest.fixture(scope="module", params=CASES)
def dense(request, tmp_path_factory):
    name = request.param
    return save_family(name, tmp_path_factory.mktemp("wide") / name, **WIDE | OWN.get(name, {}))


@pytest.fixture(scope="module")
def config(dense, text_file):
    text = TextSource(source=str(text_file))
    return QuantizeConfig(str(dense), text=text, tokens=2560, window=64, device="cpu", lm_head="int4")


@pytest.fixture(scope="module")
def coded(config, tmp_path_factory):
    """By the quantizer the folder that it wrote, with an LM head in 4 bits as well."""
    parent = tmp_path_factory.mktemp("coded")
    for kind in ("gptq", "rtn"):
        quantise(dataclasses.replace(config, quantizer=kind, output=str(parent / kind)))
    return {kind: str(parent / kind) for kind in ("gptq", "rtn")}


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs).logits[inputs["attention_mask"].bool()]


def test_the_folder_is_a_model_whose_every_matrix_is_in_codes(dense, coded, tmp_path):
    for folder in coded.values():
        check_folder(folder, read_dims(folder))
    model, plain, inputs = load_model(coded["gptq"]), load_model(str(dense)), padded()
    names = set(family_of(model).matrices.values())
    assert all(isinstance(block.whole.get_submodule(name), CodedLinear) for block in blocks_of(model) for name in names)
    assert isinstance(model.get_output_embeddings(), CodedLinear)
    expected = logits(plain, inputs)
    assert 0 < (logits(model, inputs) - expected).norm() < 0.5 * expected.norm()
    model.save_pretrained(tmp_path)
    assert weight_hash(str(tmp_path), full=True) == weight_hash(coded["gptq"], full=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name, head", [("arcee", "fp16"), ("arcee", "int4"), ("nemotron", "int4"), ("350m", "fp16")])
def test_what_check_states_is_what_is_written(name, head, dtype, tmp_path):
    """Of a head of its own, and of one that is the embedding."""
    load_model(str(save_family(name, tmp_path, **WIDE | OWN.get(name, {})))).to(dtype).save_pretrained(tmp_path)
    config = QuantizeConfig(str(tmp_path), output=str(tmp_path / "out"), quantizer="rtn", lm_head=head, device="cpu")
    quantise(config)
    stored = StoredTensors(config.output)
    made = [tensor.nbytes for tensor in (stored[each] for each in stored) if tensor.dim() == 2]
    assert written_bytes(config, read_dims(str(tmp_path))) == pytest.approx(sum(made), rel=0.005)


def test_transformers_loads_the_folder_as_we_do(coded):
    """Gates have their thresholds, and no first values of a family stay in what is made of codes."""
    inputs = padded()
    model = AutoModelForCausalLM.from_pretrained(coded["rtn"], dtype="float32").eval()
    assert torch.equal(logits(model, inputs), logits(load_model(coded["rtn"]), inputs))
    for block in blocks_of(model):
        block.out.weight.fill_(1.0)
    assert torch.equal(logits(model, inputs), logits(load_model(coded["rtn"]), inputs))


def test_text_undoes_some_of_what_rounding_loses(dense, coded, config, tmp_path):
    """On the text that GPTQ reads. What its first layer sees is what the model's sees."""
    plain, shape = load_model(str(dense)), read_dims(str(dense))
    windows = [window for window in calibration_windows(config, shape, "")[0] if len(window) == 64][:8]
    ids = torch.stack([torch.from_numpy(window) for window in windows]).long()
    skeleton = Skeleton(read_values(str(dense)), StoredTensors(str(dense)), torch.device("cpu"))
    (batch,) = embed(skeleton, windows, 8, tmp_path, "a test")
    at = torch.arange(64).expand(8, -1)
    with torch.no_grad():
        torch.testing.assert_close(batch.hidden, family_of(plain).embed(plain, ids, at), rtol=1e-5, atol=1e-5)
        expected = plain(ids).logits
        lost = {kind: float((load_model(folder)(ids).logits - expected).norm()) for kind, folder in coded.items()}
    assert lost["gptq"] < 0.9 * lost["rtn"]


def linear_maps(model):
    """The linear maps of a model by the names under which what they lost is reported."""
    names = dict.fromkeys(family_of(model).matrices.values())
    layers = [{name: block.whole.get_submodule(name) for name in names} for block in blocks_of(model)]
    return [*layers, {"lm_head": model.get_output_embeddings()}]


@torch.no_grad()
def inputs_of(model, windows):
    """What each of those maps reads of the text, (tokens, m), in transformers' own forward pass."""
    read = [{name: [] for name in maps} for maps in linear_maps(model)]
    for maps, kept in zip(linear_maps(model), read, strict=True):
        for name, module in maps.items():
            module.register_forward_pre_hook(lambda _, given, kept=kept[name]: kept.append(given[0].flatten(0, -2)))
    for length in {len(window) for window in windows}:  # none is padded
        model(torch.stack([torch.from_numpy(window) for window in windows if len(window) == length]).long())
    return [{name: torch.cat(rows) for name, rows in kept.items()} for kept in read]


def test_what_a_matrix_lost_is_told_of_what_it_reads_in_the_model(dense, coded, config):
    """Each error by another way: hooks in the finished model. Nothing but matrices and biases differs from it."""
    plain, models = load_model(str(dense)), {kind: load_model(folder) for kind, folder in coded.items()}
    told = {kind: read_json(Path(folder) / "quantization.json", "the report") for kind, folder in coded.items()}
    before, at = plain.state_dict(), dict(models["gptq"].state_dict())
    same = [name for name in before if name in at and not name.endswith((".bias", "lm_head.weight"))]
    assert all(torch.equal(before[name], at[name]) for name in same)
    assert torch.equal(plain.get_input_embeddings().weight, models["gptq"].get_input_embeddings().weight)
    windows = calibration_windows(config, read_dims(str(dense)), "")[0]
    reports = {kind: [*report["layers"], {"lm_head": report["lm_head_errors"]}] for kind, report in told.items()}
    read, rounded = inputs_of(models["gptq"], windows), linear_maps(models["rtn"])
    for i, (maps, made) in enumerate(zip(linear_maps(plain), linear_maps(models["gptq"]), strict=True)):
        assert set(maps) == set(reports["gptq"][i]) == set(reports["rtn"][i])
        for name, linear in maps.items():
            x, weight = read[i][name].double(), linear.weight.detach().double()
            x = x - x.mean(0) if linear.bias is not None else x  # the bias makes up for the mean
            lost = {kind: of.weight.double() - weight for kind, of in (("gptq", made[name]), ("rtn", rounded[i][name]))}
            wrong = {kind: float((x @ lost[kind].T).square().sum() / (x @ weight.T).square().sum()) for kind in lost}
            for kind, most in (("gptq", 0.1), ("rtn", 0.01)):
                error = float(lost[kind].square().sum() / weight.square().sum())
                assert error < most and reports[kind][i][name]["weight_error"] == pytest.approx(error, rel=1e-4)
            assert reports["gptq"][i][name]["output_error"] == pytest.approx(wrong["gptq"], rel=1e-3), (i, name)
            assert wrong["gptq"] < wrong["rtn"], (i, name)


@torch.no_grad()
def test_all_backends_run_it_alike(coded):
    folder, inputs = coded["gptq"], padded(30)
    bundle, found = make_bundle(folder, means=True).at(0.4, 0.6), {}
    for backend in ("mask", "gather", "triton"):
        ops = {"ops": "reference"} if backend == "triton" else {}
        model = SparseCausalLM.from_model(load_model(folder), bundle, backend, sparse_from=3, **ops)
        found[backend] = logits(model, inputs)
    for backend in found:
        torch.testing.assert_close(found[backend], found["mask"], rtol=1e-3, atol=1e-3)
    model, ids = load_model(folder), inputs["input_ids"][1]
    expected = -model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    found = CpuEngine(CpuWeights.from_model(model), threads=1).score([ids.tolist()])[0]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.15)  # embeddings in 8 bits


def test_an_exported_folder_is_quantised_again_to_the_same_codes(coded, tmp_path, capsys):
    if read_dims(coded["rtn"]).head_dim == 24:
        with pytest.raises(UserError, match="96 columns of heads, which GPTQ groups of 64 do not divide"):
            export(ExportConfig(coded["rtn"], str(tmp_path / "gptq")))
        return
    errors = export(ExportConfig(coded["rtn"], str(tmp_path / "gptq")))
    exact = {name for name, error in errors.items() if not error}
    quantise(QuantizeConfig(str(tmp_path / "gptq"), output=str(tmp_path / "again"), quantizer="rtn", device="cpu"))
    said = capsys.readouterr().out
    assert exact and all(f"{name}: 2 exact, 0 rounded" in said for name in exact)


def test_transformers_reads_a_folder_for_vllm_and_warns_of_nothing(tmp_path, caplog):
    export_together(ExportConfig(bundle="checkpoints/opt-mini/bundle", vllm=str(tmp_path / "both")))
    transformers_logging.enable_propagation()
    try:
        AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    finally:
        transformers_logging.disable_propagation()
    assert "quantization" not in caplog.text
