"""Rows of 4 bits in the CPU engine: products against plain sums, scores, drafts, and rounding on demand."""

import logging

import numpy as np
import pytest
import torch
from bundles import make_bundle
from decode_helpers import tokens
from numba import njit

from dejavu_train.engine.cpu import CpuEngine, CpuWeights
from dejavu_train.engine.cpu.arrays import LEVELS, MLP_DOWN, MLP_IN, MLP_UP, OUT, QKV
from dejavu_train.engine.cpu.pipeline import Entry
from dejavu_train.engine.cpu.rounded import MOST, read_weights
from dejavu_train.engine.cpu.vector_ops import dot_list, round_to_levels, sum_packed
from dejavu_train.engine.cpu.weights import pack_pairs, unpack_pairs
from dejavu_train.engine.cpu_limits import BLOCK
from dejavu_train.engine.draft import Draft
from dejavu_train.ground.errors import UserError
from dejavu_train.sparse.model import SparseCausalLM

PARTS = (QKV, OUT, MLP_UP, MLP_DOWN)


@njit(error_model="numpy", _nrt=False, no_rewrites=True, pipeline_class=Entry)
def multiply(rows, scales, most, group, numbers, inputs, operands, units, out, factors, sums):
    for b in range(inputs.shape[0]):
        units[b] = round_to_levels(inputs[b], LEVELS, operands[b])
    live, n = (1 << inputs.shape[0]) - 1, numbers.shape[0]
    dot_list(rows, scales, group, numbers, n, operands, units, live, out)
    sum_packed(sums, rows, scales, most, group, numbers, factors, 0, n, live, units)


def scales_of(halves):
    """Scales (n, groups) fp16 in whole blocks, and the largest of each row."""
    whole = torch.nn.functional.pad(halves, (0, -halves.shape[1] % BLOCK))
    return whole.numpy().view(np.uint16), halves.abs().amax(1).float().numpy()


@pytest.mark.parametrize(("columns", "group"), [(64, 32), (192, 64), (512, 128), (832, 32)])
def test_products_of_packed_rows(columns, group):
    """Against fp64, of one, two, four and seven rows of a list that ends early. A row is the same beside others."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (21, columns), generator=generator, dtype=torch.int8)
    halves = torch.randn(21, columns // group, generator=generator).half()  # of either sign
    weight = codes.double() * halves.double().repeat_interleave(group, 1)
    pairs, numbers = pack_pairs(codes).numpy(), np.array([3, 20, 0, 7, 7, 11, 19], np.int32)
    assert torch.equal(unpack_pairs(torch.from_numpy(pairs)), codes)
    alone = None
    for count in (1, 2, 4, 7):
        x, factors = (torch.randn(7, n, generator=torch.Generator().manual_seed(n)) for n in (columns, len(numbers)))
        x, factors = x[:count].numpy(), factors[:count].numpy()
        out, sums = np.zeros((count, len(numbers) + 3), np.float32), np.zeros((count + 1, columns), np.float32)
        operands, units = np.zeros((count + 1, columns), np.int16), np.zeros(count, np.float32)
        multiply(pairs, *scales_of(halves), group, numbers, x, operands, units, out, factors.copy(), sums)
        listed = weight[numbers].numpy()
        np.testing.assert_allclose(out[:, : len(numbers)], x @ listed.T, atol=2e-4 * np.abs(x @ listed.T).max())
        np.testing.assert_allclose(sums[:count], factors @ listed, atol=1e-5 * np.abs(listed).max() * 20)
        alone = (out[0].copy(), sums[0].copy()) if alone is None else alone
        assert np.array_equal(out[0], alone[0]) and np.array_equal(sums[0], alone[1])


@njit(error_model="numpy", _nrt=False, no_rewrites=True, pipeline_class=Entry)
def add_up(rows, scales, most, group, numbers, factors, sums, units):
    sum_packed(sums, rows, scales, most, group, numbers, factors, 0, numbers.shape[0], 1, units)


@pytest.mark.parametrize("factor", [1.0, float("nan"), float("inf")])
def test_sums_of_packed_rows_at_their_ends(factor):
    """All codes and levels at their ends, in a list so long that its unit is larger. What is not finite is seen."""
    pairs, halves = pack_pairs(torch.full((1, 64), -8, dtype=torch.int8)).numpy(), torch.tensor([[0.25, -0.5]]).half()
    factors, sums = np.full((1, 30_000), 3, np.float32), np.zeros((2, 64), np.float32)
    factors[0, 7_000] *= factor
    add_up(pairs, *scales_of(halves), 32, np.zeros(30_000, np.int32), factors, sums, np.zeros(1, np.float32))
    if factor == 1:
        np.testing.assert_allclose(sums[0], np.repeat([-180_000, 360_000], 32), rtol=1e-4)
    assert np.isfinite(sums[0]).all() == (factor == 1)


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    return make_bundle(tiny_opt, means=True).at(0.3, 0.4)


def exact_twin(weights: CpuWeights, model) -> CpuWeights:
    """In fp32, what the codes of ``weights`` stand for."""
    twin = CpuWeights.from_model(model)
    for layer in range(twin.shape.n_layers):
        for part in PARTS:
            twin.part(layer, part).copy_(weights.part(layer, part))
    twin.rows(twin.model.embedding, twin.shape.vocab_size).copy_(
        weights.rows(weights.model.embedding, twin.shape.vocab_size)
    )
    return twin


@pytest.mark.parametrize("wide", [(), (MLP_DOWN, QKV)])
def test_scores_equal_those_of_the_same_numbers_in_fp32(model, bundle, wide):
    """But for inputs of 16 bits. Some matrices may have 8."""
    kept = np.zeros((len(model.model.decoder.layers), 5), bool)
    kept[0, list(wide)] = True
    weights, rows = CpuWeights.from_model(model, "int4", wide=kept), [tokens(60), tokens(40, seed=1)]
    assert weights.model.packed.sum() == kept.size - kept[0].sum()
    assert torch.equal(weights.part(0, MLP_IN), weights.part(0, MLP_UP))
    for rules in (None, bundle):
        found, expected = (
            torch.cat(CpuEngine(each, rules, batch=2, threads=2).score(rows))
            for each in (weights, exact_twin(weights, model))
        )
        off = (found - expected).abs()
        assert off.median() < 2e-4 and (rules is not None or off.max() < 2e-3)


def test_a_prompt_at_once_is_one_by_steps(model, bundle):
    engine, prompt = CpuEngine(CpuWeights.from_model(model, "int4"), bundle, threads=2), tokens(30)
    written = engine.generate([prompt], 20, stop_tokens=())
    assert engine.generate([prompt], 20, stop_tokens=(), prompt_phase="steps") == written
    assert engine.generate([prompt], 20, stop_tokens=(), lossless=Draft(4)) == CpuEngine(
        engine.weights, threads=2
    ).generate([prompt], 20, stop_tokens=())


def test_what_rounding_costs_bounds_how_many_matrices_have_four_bits(model, caplog):
    """A model of random weights stands it. Where some matrices hold a few large numbers, those have 8 bits first."""
    with caplog.at_level(logging.WARNING, "dejavu_train"):
        weights = read_weights(model, "int4")
    assert weights.formats.layers == "int4" and "nats of KL" in weights.note
    assert "dejavu_train.quantize rounds better" in caplog.text
    assert float(weights.note.split()[1]) <= MOST
    assert read_weights(model, "int8").formats.layers == "int8"


@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_the_public_class_takes_the_format(tiny_opt, bundle, stored):
    ids = torch.tensor([tokens(12)])
    sparse = SparseCausalLM.from_pretrained(str(tiny_opt), bundle, stored=stored, dtype="float16")
    written = sparse.generate(ids, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids))
    assert written.shape[1] > 12 and f"weights in {stored}" in sparse.describe()
    for options, said in (({"backend": "mask"}, "the backend is mask"), ({"stored": "int3"}, "got int3")):
        with pytest.raises(UserError, match=said):
            SparseCausalLM.from_pretrained(str(tiny_opt), bundle, **({"stored": "int8"} | options))
