"""The decoding benchmark without a GPU: its cells, and thresholds that hit densities of a batch's union."""

import csv
import dataclasses

import pytest
import torch
from decode_helpers import random_bundle, random_opt

from benchmarks import alternate
from benchmarks.decode import bytes_needed
from benchmarks.decode_cells import FAMILIES, Cell, read_cells, required_cells
from benchmarks.decode_hf import random_model
from benchmarks.decode_plot import line
from benchmarks.decode_problem import (
    SHAPES,
    UNION,
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
    made = read_cells("engine=dense,sparse prompt=128,512 pdl=False")
    assert made[0] == Cell("dense", prompt=128, pdl=False) and len(made) == 4
    assert made[-1].options == "pdl=False" and Cell("dense", 8).options == ""
    for text, part in (
        ("colour=red", "no 'colour=red'"),
        ("batch", "key=value"),
        ("engine=other", "dense, exact, sparse"),
        ("batch=9 predictors=int4", "for up to 8 rows"),
    ):
        with pytest.raises(SystemExit, match=part):
            read_cells(text)


def test_the_required_cells_are_there():
    for model in ("6.7b", "30b", "66b"):
        found = {(cell.engine, cell.prompt) for cell in required_cells(model) if cell.batch == 1 and not cell.site}
        assert found >= {(engine, prompt) for engine in ("dense", "sparse") for prompt in (128, 256, 512, 1024)}
    for model in ("1.3b", "13b"):
        assert {cell.engine for cell in required_cells(model)} >= {"dense", "sparse"}
    for model in ("1.3b", "6.7b"):
        assert {cell.engine for cell in required_cells(model)} >= {"hf", "hf-compile"}
    for model in ("6.7b", "66b"):
        batches = {cell.batch: cell.mlp_density for cell in required_cells(model) if cell.engine == "sparse"}
        assert {batch: batches[batch] for batch in (2, 4, 8, 16, 32)} == UNION[model]
    assert any(cell.mlp_density == 0.195 and cell.head_density == 0.37 for cell in required_cells("66b"))


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


def test_a_line_of_the_plot_has_its_rows_in_order():
    rows = {(6.7, prompt, "sparse"): {"p50_ms": ms} for prompt, ms in ((512, "3"), (128, "2"))}
    assert line(rows | {(66, 128, "sparse"): {}, (6.7, 128, "dense"): {}}, "6.7b", "sparse", "p50_ms") == (
        [128, 512],
        [2, 3],
    )


def test_two_versions_are_compared_cell_by_cell(tmp_path):
    """A fake benchmark in each folder: what it takes is known, and one cell fails in one version."""
    fake = """
import argparse, csv
parser = argparse.ArgumentParser()
for name in ("--models", "--out"):
    parser.add_argument(name)
parser.add_argument("--cells", nargs="+")
args = parser.parse_args()
with open(args.out, "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow("gpu,model,engine,batch,options,mlp_union,head_union,p50_ms,commit".split(","))
    for number, _ in enumerate(args.cells):
        time = "" if number == 1 and {slow} > 1 else (number + 1) * {slow}
        writer.writerow(["none", args.models, number, 1, "", 0.1, 1, time, "{slow}"])
"""
    for name, slow in (("old", 1.0), ("new", 1.5)):
        (tmp_path / name / "benchmarks").mkdir(parents=True)
        (tmp_path / name / "benchmarks" / "__init__.py").touch()
        (tmp_path / name / "benchmarks" / "decode.py").write_text(fake.replace("{slow}", str(slow)))
    found = {}
    for turn in range(2):
        for name in ("before", "after"):
            rows = alternate.run(tmp_path / ("old" if name == "before" else "new"), name, 4 + turn, tmp_path)
            for number, row in enumerate(rows):
                found.setdefault((4, number), {}).setdefault(name, []).append(row)
    assert alternate.compare(found, tmp_path / "alternate.csv") == pytest.approx(1.5)
    with open(tmp_path / "alternate.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["before_ms"], row["after_ms"], row["change"]) for row in table] == [
        ("1.0", "1.5", "+0.5000"),
        ("3.0", "4.5", "+0.5000"),
    ]
    assert table[0]["rounds"] == "2" and (table[0]["before_commit"], table[0]["after_commit"]) == ("1.0", "1.5")
    assert (
        sum(len(cells) for _, cells in alternate.GROUPS)
        < 20
        == sum(len(read_cells(text)) for _, cells in alternate.GROUPS for text in cells)
    )
