"""Checkpoints of other packages, packed here as their formats say. Codes come over exactly where our rows can hold
them, and every other matrix as the numbers that they stand for."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_opt
from safetensors.torch import load_file, save_file

from dejavu_train.extras import export
from dejavu_train.families import ModelDims, dims_of
from dejavu_train.families.opt import OPTFamily
from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import CONVERTED
from dejavu_train.models.int4 import row_layouts
from dejavu_train.models.load import load_model
from dejavu_train.quantize import foreign
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.foreign import MatrixReader
from dejavu_train.quantize.run import quantise
from dejavu_train.quantize.source import StoredTensors

N, M, GROUP = 64, 128, 64
MATRICES = OPTFamily.matrices.values()


def packed(nibbles, order=tuple(range(8))):
    """(..., 8 w) in 0..15 -> (..., w) int32: nibble i of a word is number order[i] of its eight."""
    eights = nibbles.long().unflatten(-1, (-1, 8))
    words = sum(eights[..., order[i]] << 4 * i for i in range(8))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def weights(n=N, m=M, group=GROUP, zero=8):
    generator = torch.Generator().manual_seed(n + m)
    stored = torch.randint(0, 16, (n, m), generator=generator)
    scales = (torch.rand(n, m // group, generator=generator) * 0.1 + 0.01).half()
    return stored, scales, (stored - zero) * scales.float().repeat_interleave(group, 1)


def gptq(stored, scales, zero=8, v2=False, g_idx=None):
    zeros = torch.full((scales.shape[1], len(stored)), zero - (0 if v2 else 1))
    own = torch.arange(stored.shape[1]) // (stored.shape[1] // scales.shape[1]) if g_idx is None else g_idx
    qweight = packed(stored).T.contiguous()  # packed along inputs
    return {"qweight": qweight, "qzeros": packed(zeros), "scales": scales.T.contiguous(), "g_idx": own.int()}


SMALL = ModelDims(d_model=64, d_ffn=64, n_layers=1, n_heads=4, vocab_size=9, max_positions=9)
LAYOUT = row_layouts("opt", SMALL)["fc1"]


def test_rows_of_ours_hold_what_has_one_scale_for_a_group_and_no_zero_point():
    """Other codes come as numbers. What each form stores is read in tests/files, by a second reader."""
    stored, scales, expected = weights()
    decode = foreign.DECODERS["gptq"]({"bits": 4})
    torch.testing.assert_close(foreign.exact_rows(decode(gptq(stored, scales)), LAYOUT).dense(), expected)
    order = torch.randperm(M) // GROUP  # activation order
    for other in (gptq(stored, scales, g_idx=order), gptq(stored, scales, zero=5)):
        assert foreign.exact_rows(decode(other), LAYOUT) is None


@pytest.mark.parametrize(("method", "config", "message"), [
    ("gptq", {"bits": 8}, "8 bits"),
    ("compressed-tensors", {"format": "pack-quantized", "config_groups": 3}, "config_groups 3"),
    ("compressed-tensors", {"format": "pack-quantized", "config_groups": {"a": 3}}, "symmetric integers"),
    ("gptq", {"bits": 4, "checkpoint_format": "marlin"}, "the format marlin"),
    ("gptq", {"bits": 4, "is_marlin_format": True}, "the format marlin"),
    (
        "compressed-tensors",
        {"format": "pack-quantized", "config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "block"}}}},
        "the strategy block",
    ),
    ("awq", {"bits": 4, "version": "gemv"}, "gemv"),
    ("compressed-tensors", {"format": "float-quantized"}, "float-quantized"),
    ("bitsandbytes", {"load_in_8bit": True}, "NF4"),
])  # fmt: skip
def test_what_is_not_read_is_named(method, config, message):
    with pytest.raises(UserError, match=message):
        foreign.DECODERS[method](config)


@pytest.mark.parametrize(("method", "config", "changed", "message"), [
    ("gptq", {"sym": True}, {"qzeros": packed(torch.arange(2 * N).view(2, N) % 9 + 1)}, "config says sym"),
    ("gptq", {"group_size": 32}, {}, "2 scales for 128 inputs in groups of 32"),
    ("gptq", {"group_size": 64.0}, {}, "group_size must be"),
    ("gptq", {"group_size": 64}, {"g_idx": torch.zeros(M, dtype=torch.int32)}, "does not sort"),
    ("gptq", {"group_size": 64}, {"g_idx": torch.full((M,), -1, dtype=torch.int32)}, "does not sort"),
    ("gptq", {"group_size": 64}, {"g_idx": torch.zeros(M - 1, dtype=torch.int32)}, "g_idx is int32"),
    ("gptq", {}, {"scales": torch.full((2, N), torch.inf)}, "not finite"),
    ("gptq", {}, {"scales": torch.ones(2, N - 1)}, "scales are float32"),
    ("gptq", {}, {"scales": torch.ones(3, N)}, "qzeros are"),
    ("gptq", {}, {"g_idx": torch.empty(0, dtype=torch.int32)}, "says no group_size"),
    ("gptq", {"group_size": 64, "desc_act": True}, {"g_idx": torch.empty(0, dtype=torch.int32)}, "without g_idx"),
    ("gptq", {}, {"qweight": torch.zeros(16, N)}, "not int32"),
    ("gptq", {}, {"qzeros": torch.zeros(2, 1, dtype=torch.int32)}, "qzeros are"),
])  # fmt: skip
def test_parts_that_contradict_each_other_are_refused(method, config, changed, message):
    stored, scales, _ = weights()
    with pytest.raises(UserError, match=message):
        foreign.DECODERS[method]({"bits": 4, **config})(gptq(stored, scales) | changed)


def test_a_gptq_folder_becomes_ours(tmp_path, capsys):
    """Groups of 64 inputs, heads of 16: q, k, v, fc1 and the output projection are taken over, fc2 is rounded anew."""
    source = save_tiny_opt(tmp_path / "dense", hidden_size=64, word_embed_proj_dim=64, ffn_dim=128)
    folder = shutil.copytree(source, tmp_path / "gptq")
    tensors, dense = load_file(folder / "model.safetensors"), load_model(str(source))
    for name in [name for name in tensors if name.endswith("weight") and any(f".{part}." in name for part in MATRICES)]:
        n, m = tensors.pop(name).shape
        stored, scales, weight = weights(n, m)
        tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in gptq(stored, scales).items()}
        dense.get_submodule(name.removesuffix(".weight")).weight.data = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    (folder / "config.json").write_text(json.dumps(values))
    quantise(QuantizeConfig(model=str(folder), output=str(tmp_path / "out"), quantizer="rtn", device="cpu"))
    said = capsys.readouterr().out
    assert "out_proj: 2 exact, 0 rounded" in said and "fc2: 0 exact, 2 rounded" in said
    made = load_model(str(tmp_path / "out"))
    for name, linear in ((f"model.decoder.layers.1.{part}", part) for part in MATRICES):
        ours, theirs = made.get_submodule(name).weight, dense.get_submodule(name).weight.detach()
        error = float((ours - theirs).norm() / theirs.norm())
        assert error == 0 if linear != "fc2" else 0 < error < 0.15


def test_neurons_that_no_group_divides_are_not_exported(tmp_path):
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_attention_heads": 4}
    save_tiny_opt(tmp_path / "dense", **sizes)
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    quantise(QuantizeConfig(model=str(tmp_path / "dense"), output=ours, quantizer="rtn", device="cpu"))
    with pytest.raises(UserError, match="groups of 64 do not divide"):
        export.export(export.ExportConfig(ours, theirs))
    assert not Path(theirs).exists()


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
def test_an_exported_folder_is_read_back(tmp_path, capsys, v2, heads):
    """Heads of 32 divide into groups of 32 inputs, so that all but fc2 is exact. Heads of 16 do not."""
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_attention_heads": heads}
    dense, ours, theirs = (str(tmp_path / name) for name in ("dense", "ours", "theirs"))
    save_tiny_opt(tmp_path / "dense", **sizes)
    quantise(QuantizeConfig(model=dense, output=ours, quantizer="rtn", device="cpu"))
    with pytest.raises(UserError, match="not in 4-bit rows"):
        export.export(export.ExportConfig(dense, theirs))
    errors = export.export(export.ExportConfig(ours, theirs, v2=v2))
    inexact = {"fc2"} if heads == 2 else {"fc2", "self_attn.out_proj"}
    assert {part for part, error in errors.items() if error} == inexact and errors["fc2"] < 0.03
    values = json.loads((tmp_path / "theirs" / "config.json").read_text())
    reader, made = MatrixReader(StoredTensors(theirs), values), load_model(ours)
    layouts, negative = row_layouts("opt", dims_of(values, theirs)), 0
    for part, layout in layouts.items():
        exact = made.get_submodule(f"model.decoder.layers.1.{part}")
        weight, rows = reader.read(f"decoder.layers.1.{part}", layout)
        assert torch.equal(weight, exact.weight) == (part not in inexact)
        if part not in inexact:
            assert torch.equal(rows.dense(), exact.rows.dense())
            negative += int((exact.rows.scales < 0).sum())
            assert bool((exact.rows.codes == -8).any())
    assert negative and bool((load_file(tmp_path / "theirs" / "model-00002.safetensors")[
        "model.decoder.layers.0.fc1.scales"] > 0).all())  # fmt: skip
    assert made.model.decoder.layers[0].fc1.bias is not None
    quantise(QuantizeConfig(model=theirs, output=str(tmp_path / "again"), quantizer="rtn", device="cpu"))
    assert "fc1: 2 exact, 0 rounded" in capsys.readouterr().out


def test_what_an_error_offers_is_read():
    assert set(foreign.DECODERS) == set(CONVERTED)


def foreign_folder(tmp_path, method, store, config, change=lambda tensors: tensors):
    """A folder whose matrices are stored by ``store(stored, scales)``, and by name the weights that they stand for."""
    source = save_tiny_opt(tmp_path / "dense", hidden_size=64, word_embed_proj_dim=64, ffn_dim=128)
    folder = shutil.copytree(source, tmp_path / "foreign")
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("weight") and any(f".{part}." in name for part in MATRICES)]:
        if ".fc" in name:  # left out of the quantisation
            expected[name] = tensors[name]
            continue
        stored, scales, expected[name] = weights(*tensors.pop(name).shape)
        tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in store(stored, scales).items()}
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": method, **config}
    (folder / "config.json").write_text(json.dumps(values))
    return folder, values, expected


def awq(stored, scales):
    parts = {"qweight": packed(stored.T.contiguous(), foreign.AWQ_ORDER), "scales": scales.T.contiguous()}
    return parts | {"qzeros": packed(torch.full((scales.shape[1], len(stored)), 8), foreign.AWQ_ORDER)}


def compressed(stored, scales):
    shape = torch.tensor(list(stored.shape))
    return {"weight_packed": packed(stored), "weight_scale": scales, "weight_shape": shape}


def nf4(stored, scales):
    n, m = stored.shape
    state = {"blocksize": GROUP, "shape": [n, m], "dtype": "float16", "quant_type": "nf4"}
    flat, table = stored.flatten(), torch.arange(-8.0, 8.0)
    return {
        "weight": (flat[::2] << 4 | flat[1::2]).to(torch.uint8)[:, None],
        "weight.quant_map": table,
        "weight.absmax": scales.float().flatten(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


FORMS = {
    "gptq": (gptq, {"bits": 4, "modules_in_block_to_quantize": [["self_attn.q_proj"]]}),
    "awq": (awq, {"bits": 4, "modules_to_not_convert": ["fc1", "fc2"]}),
    "compressed-tensors": (compressed, {"format": "pack-quantized", "ignore": ["re:.*fc[12]", "lm_head"]}),
    "bitsandbytes": (
        nf4,
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["fc1", "fc2"]},
    ),
}


def reader_of(folder, values):
    return MatrixReader(StoredTensors(str(folder)), values)


@pytest.mark.parametrize("method", CONVERTED)
def test_matrices_that_were_left_out_are_read_as_they_are(tmp_path, method):
    folder, values, expected = foreign_folder(tmp_path, method, *FORMS[method])
    reader, layouts = reader_of(folder, values), row_layouts("opt", dims_of(values))
    for name, weight in expected.items():
        prefix = name.removeprefix("model.").removesuffix(".weight")
        found, _ = reader.read(prefix, layouts[prefix.split(".", 3)[3]])
        torch.testing.assert_close(found, weight, rtol=0, atol=0)


@pytest.mark.parametrize("method", CONVERTED)
def test_a_part_that_is_missing_is_named_before_anything_is_read(tmp_path, method):
    lost = {"compressed-tensors": "weight_shape", "bitsandbytes": "weight.quant_map"}.get(method, "qzeros")
    name = f"model.decoder.layers.1.self_attn.k_proj.{lost}"
    folder, values, _ = foreign_folder(tmp_path, method, *FORMS[method], lambda tensors: {
        key: value for key, value in tensors.items() if key != name
    })  # fmt: skip
    with pytest.raises(UserError, match=f"lack the tensor {name.removeprefix('model.')}, which {method} stores"):
        reader_of(folder, values)


def test_what_is_no_matrix_of_4_bits_is_refused_by_name(tmp_path):
    def eight_bits(stored, scales):
        return gptq(torch.cat([stored, stored], 1), torch.cat([scales, scales], 1))

    folder, values, _ = foreign_folder(tmp_path / "a", "gptq", eight_bits, {"bits": 4})
    layouts = row_layouts("opt", dims_of(values))
    with pytest.raises(UserError, match=r"q_proj of .* is by gptq with 4 bits float32 \[64, 128\], where .*64\]"):
        reader_of(folder, values).read("decoder.layers.0.self_attn.q_proj", layouts["self_attn.q_proj"])

    def whole(tensors):
        key = "model.decoder.layers.0.fc1.weight"
        return tensors | {key: tensors[key].to(torch.int8)}

    folder, values, _ = foreign_folder(tmp_path / "b", "gptq", gptq, {"bits": 4}, whole)
    with pytest.raises(UserError, match=r"fc1 of .* is stored as int8 \[128, 64\]"):
        reader_of(folder, values).read("decoder.layers.0.fc1", layouts["fc1"])

    def head(tensors):
        return tensors | {"lm_head.qweight": torch.zeros(8, 320, dtype=torch.int32)}

    folder, values, _ = foreign_folder(tmp_path / "c", "gptq", gptq, {"bits": 4}, head)
    with pytest.raises(UserError, match="holds lm_head.qweight: of gptq checkpoints only the layers' matrices"):
        reader_of(folder, values)
