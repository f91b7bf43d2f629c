"""The decoding benchmark without a GPU: its cells, and thresholds that hit densities of a batch's union."""

import dataclasses

import pytest
import torch
from decode_helpers import random_bundle, random_opt

from benchmarks.decode import bytes_needed
from benchmarks.decode_cells import FAMILIES, Cell, read_cells, required_cells
from benchmarks.decode_hf import random_model
from benchmarks.decode_problem import (
    SHAPES,
    measured,
    random_predictors,
    random_weights,
    set_thresholds,
    start,
)
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.options import EngineOptions
from dejavu_train.families import dims_of


def test_cells_are_read_from_words():
    made = read_cells("engine=dense,sparse prompt=128,512 site=1")
    assert made[0] == Cell("dense", prompt=128, site=1) and len(made) == 4
    assert made[-1].options == "site=1" and Cell("dense", 8).options == ""
    for text, part in (
        ("colour=red", "no 'colour=red'"),
        ("batch", "key=value"),
        ("engine=other", "dense, exact, sparse"),
        ("batch=9 predictors=int4", "for up to 8 rows"),
    ):
        with pytest.raises(SystemExit, match=part):
            read_cells(text)


def test_bytes_of_a_cell():
    """A layer of 66B has 12 d^2 weights in fp16. A position has 2 d values for K and V in a layer, and d for kept
    inputs."""
    d = SHAPES["66b"].d_model
    assert bytes_needed(SHAPES["66b"], 1, 100) - bytes_needed(SHAPES["66b"], 1, 0) == 100 * 64 * 3 * d * 2
    assert 130e9 < bytes_needed(SHAPES["66b"], 1, 0) < 133e9
    assert 90e9 < bytes_needed(SHAPES["175b"], 1, 0, packed=True) < 92e9


@pytest.mark.parametrize("batch", [1, 3])
def test_thresholds_hit_the_density_of_the_union(batch):
    model = random_opt(d_ffn=400)
    bundle = random_bundle(model, targets=("mlp",))
    engine = DecodeEngine(model, bundle, EngineOptions(batch=batch, ops="reference", context=40))
    with torch.no_grad():
        start(engine, 4, 30)
        set_thresholds(engine, 0.25, 1.0)
        row = measured(engine, 6)
    assert row["mlp_union"] == pytest.approx(0.25, abs=0.04)
    assert row["mlp_selected"] <= row["mlp_union"] + 1e-6 and row["head_union"] == 1
    assert (row["mlp_selected"] == pytest.approx(row["mlp_union"])) == (batch == 1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_cells_of_other_families_run_on_random_weights(name, packed):
    """Tiny shapes of the same kinds. The stated share of all neurons is active, and predictors find it."""
    whole = SHAPES[name]
    shape = dataclasses.replace(
        whole, d_model=64, d_ffn=800, n_layers=2, n_heads=4, head_dim=32, vocab_size=300, max_positions=64,
        n_kv_heads=4 if whole.kv_group == 1 else 2, embedding_dim=64,
    )  # fmt: skip
    weights = random_weights(shape, 0.12, packed, packed, device="cpu")
    predictors = random_predictors(
        shape, 8, 0.25, 1.0, dtype="int4" if packed else "float16", device="cpu", active_share=0.12
    )
    engine = DecodeEngine(weights, predictors, EngineOptions(ops="reference", context=50))
    with torch.no_grad():
        start(engine, 4, 44)
        set_thresholds(engine, 0.25, 1.0)
        row = measured(engine, 12)
    assert row["mlp_union"] == pytest.approx(0.25, abs=0.05) and row["head_union"] == 1
    assert row["active"] == row["live"] == pytest.approx(0.12, abs=0.05) and row["recall"] > 0.9
    assert 0.25 < row["overlap"] < 0.75
    assert all(half.site is not None for half in engine.plan.halves[1::2])
    model = random_model(name, shape, "cpu", torch.float32)  # the rival has the same shape
    assert dataclasses.replace(dims_of(model.config), threshold=0.0, activation="relu") == dataclasses.replace(
        shape, threshold=0.0, activation="relu"
    ) or name.startswith("bloom")
    assert {cell.engine for cell in required_cells(name)} == {"hf-compile", "dense", "sparse"}
