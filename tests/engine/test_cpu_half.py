"""Half-precision weights in the CPU engine: kept as they are, and rounded layer by layer from mapped files."""

from pathlib import Path

import numpy as np
import pytest
from bundles import make_bundle
from conftest import save_tiny_opt
from decode_helpers import tokens
from numba import njit

from dejavu_train.engine.cpu import CpuEngine, CpuWeights
from dejavu_train.engine.cpu.half_numbers import narrowed, widened
from dejavu_train.engine.cpu.pipeline import Entry
from dejavu_train.engine.draft import Draft
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.sparse.model import SparseCausalLM

STATUS = Path("/proc/self/status")


@njit(error_model="numpy", _nrt=False, no_rewrites=True, pipeline_class=Entry)
def turn_numbers(halves, wide, numbers, near):
    for i in range(halves.shape[0]):
        wide[i] = widened(halves[i])
    for i in range(numbers.shape[0]):
        near[i] = narrowed(near, numbers[i])


def test_numbers_of_16_bits_are_those_of_ieee_754():
    """All that there are, and fp32 numbers of all sizes: between two of 16 bits, too large, too small, not finite."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    numbers = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    numbers *= np.float32(2.0) ** np.arange(-30, 20).repeat(4000)
    tie = halves.view(np.float16).astype(np.float32)  # exact numbers, and those in the middle of two
    ends = [65504, 65519, 65520, 7e4, np.inf, np.nan, 2.0**-24, 2.0**-25, 3e-8, 1e-40]
    numbers = np.concatenate([numbers, tie, (tie[:-1] + tie[1:]) / 2, np.float32(ends), -np.float32(ends)])
    wide, near = np.zeros(1 << 16, np.float32), np.zeros(len(numbers), np.uint16)
    turn_numbers(halves, wide, numbers, near)
    np.testing.assert_array_equal(wide, halves.view(np.float16).astype(np.float32))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(near.view(np.float16), numbers.astype(np.float16))


@pytest.mark.parametrize("sparse", [False, True])
def test_k_and_v_are_fp16_beside_codes(tiny_opt, sparse, monkeypatch):
    """They take half of the bytes, and cost little: beside fp32 rows, so that nothing else is rounded."""
    model, row = load_model(str(tiny_opt)), tokens(60)
    assert (
        CpuWeights.from_model(model, "int8").cached == np.uint16 and CpuWeights.from_model(model).cached == np.float32
    )
    rules, found, read = make_bundle(tiny_opt).at(1.0, 0.4) if sparse else None, [], []
    for cached in (np.float32, np.uint16):
        monkeypatch.setattr(CpuWeights, "cached", cached)
        engine = CpuEngine(CpuWeights.from_model(model), rules, threads=2)
        found.append(engine.score([row])[0])
        read.append(engine.bytes_read()["kv"])
    assert 0 < (found[0] - found[1]).abs().max() < 5e-3
    assert read[0] == 2 * read[1] or sparse


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "sparse", "cascade"])
def test_half_precision_gives_the_bits_of_the_same_numbers_in_fp32(tiny_opt, dtype, kind):
    """Scores and texts of one row, three and eight: a number is widened, and its sums are those of fp32."""
    model, twin = load_model(str(tiny_opt), dtype), load_model(str(tiny_opt), dtype).float()
    rules = None if kind == "dense" else make_bundle(tiny_opt, means=True, cascade=kind == "cascade").at(0.3, 0.4)
    halves, floats = CpuWeights.from_model(model), CpuWeights.from_model(twin)
    assert halves.formats.layers == dtype and 2 * halves.model.rows.nbytes == floats.model.rows.nbytes
    for rows in (1, 3, 8):
        prompts = [tokens(9 + row, seed=row) for row in range(rows)]
        ours, theirs = (CpuEngine(each, rules, batch=rows, threads=2) for each in (halves, floats))
        assert ours.generate(prompts, 12) == theirs.generate(prompts, 12)
        for found, expected in zip(ours.score(prompts), theirs.score(prompts), strict=True):
            assert np.array_equal(found, expected)
    if dtype == "float16":  # a draft is compiled anew for each dtype, of the functions that steps of one row have
        dense = CpuEngine(halves, threads=2).generate(prompts[:1], 12)
        assert CpuEngine(halves, rules, threads=2).generate(prompts[:1], 12, lossless=Draft(3, "int8")) == dense


def test_a_half_precision_model_runs_on_the_engine_as_it_lies(tiny_opt, tmp_path):
    sparse = SparseCausalLM.from_pretrained(str(tiny_opt), make_bundle(tiny_opt), dtype="bfloat16")
    assert sparse.backend == "cpu" and "weights in bfloat16" in sparse.describe()
    model = load_model(str(tiny_opt))
    model.model.decoder.layers[1].fc1.weight.data[0, 0] = 1e6
    with pytest.raises(UserError, match="layer 1 has weights that are not finite"):
        CpuWeights.from_model(model, "float16")  # whose largest number is 65504


@pytest.mark.skipif(not STATUS.is_file(), reason="the memory of a process is read from Linux' /proc")
def test_loading_takes_the_memory_of_the_engine_and_a_few_layers(tmp_path, monkeypatch):
    """No copy of all weights in the model's type or in fp32 is made of a model that lies in half precision."""
    layer = {"hidden_size": 512, "word_embed_proj_dim": 512, "ffn_dim": 4096, "num_attention_heads": 8}
    load_model(str(save_tiny_opt(tmp_path, num_hidden_layers=12, **layer)), "float16").save_pretrained(tmp_path)

    def held() -> int:
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    most, put = [0], CpuWeights.put

    def watched(self, *given, **options):
        put(self, *given, **options)
        most[0] = max(most[0], held())

    monkeypatch.setattr(CpuWeights, "put", watched)
    before = held()
    weights = CpuWeights.from_model(load_model(str(tmp_path), "auto"), "int4")
    one = 2 * weights.shape.layer_weights  # bytes, of 12 layers
    assert most[0] - before < weights.nbytes + 6 * one
