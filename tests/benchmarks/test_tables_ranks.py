"""Tables and the picture of several GPUs, of made-up rows."""

import csv

import pytest

from benchmarks import ranks_picture, tables, tables_ranks
from benchmarks.decode import COLUMNS as ONE_GPU
from benchmarks.rows import append_row
from benchmarks.tables_decode import DECODE
from benchmarks.tensor_parallel import COLUMNS

PACKED = "head_density=0.85 predictors=int4 weights=int4 lm_head=int4 site=1"
NAMES = ["model", "gpus", "engine", "weights", "options", "batch", "prompt", "slowest_ms", "gpu"]
STEPS = [  # as NAMES
    ("66b", 2, "dense", "float16", "", 1, 128, 18, "NVIDIA H200"),
    ("66b", 2, "dense", "float16", "", 1, 128, 16, "NVIDIA H200"),  # newer
    ("66b", 2, "sparse", "float16", "", 1, 128, 8, "NVIDIA H200"),
    ("66b", 4, "dense", "float16", "", 1, 128, 12, "NVIDIA H100 80GB HBM3"),
    ("175b", 4, "dense", "float16", "", 1, 128, 20, "NVIDIA H200"),
    ("175b", 4, "dense", "float16", "mlp_density=0.29", 8, 128, 30, "NVIDIA H200"),
    ("175b", 4, "dense", "float16", "", 1, 1024, 22, "NVIDIA H200"),
    ("175b", 4, "sparse", "float16", "mlp_density=0.25 head_density=0.25", 1, 128, 10, "NVIDIA H200"),
    ("175b", 4, "dense", "int4", PACKED, 1, 128, 8, "NVIDIA H200"),
    ("175b", 4, "sparse", "int4", PACKED, 1, 128, 4, "NVIDIA H200"),
    ("tiny", 2, "dense", "float16", "", 1, 16, 5, "cpu"),
]
RIVALS = [
    ("66b", 2, "hf-device-map", "float16", "", 1, 128, 64, "NVIDIA H200"),
    ("afm-4.5b", 2, "hf-tp-plan", "float16", "", 1, 128, "", "NVIDIA H200"),
]


@pytest.fixture
def root(tmp_path):
    about = {"date": "2026-01-01", "commit": "abc", "torch": "2.11.0", "sum_us": 8, "goal_here_ms": 13}
    for values in (*STEPS, *RIVALS):
        row = dict(zip(NAMES, values, strict=True))
        if row["engine"] in ("dense", "sparse"):
            row |= {"floor_ms": 4, "share_of_floor": 4 / row["slowest_ms"], "sums": "pushed over NVLink"}
        row |= {"p50_ms": row["slowest_ms"], "note": "compiled: No | luck"}
        append_row(tmp_path / tables_ranks.RANKS_ROWS, about | row, COLUMNS)
    for engine, options, ms in (("dense", "", 32), ("sparse", "", 10), ("sparse", "site=1", 9)):
        row = {"model": "66b", "engine": engine, "options": options, "p50_ms": ms, "floor_ms": 7}
        row |= {"batch": 1, "prompt": 128, "gpu": "NVIDIA H200"}
        append_row(tmp_path / DECODE, about | row, ONE_GPU)
    return tmp_path


def test_goals_have_values_and_verdicts(root):
    lines = tables_ranks.goals_table(root).splitlines()
    assert "| 66B, 2 H200: fp16, dense | <= 17 ms | 16 ms | met |" in lines
    assert "| 66B, 2 H200: fp16, heads 50 % | <= 6.3 ms | 8 ms | missed by 27 % |" in lines
    assert "| 66B, 4 H100: fp16, dense | <= 13 ms | 12 ms | met |" in lines, "on another card the goal is moved"
    assert "| 66B, 4 H200: fp16, heads 50 % | <= 4.4 ms | | not measured |" in lines
    assert "| 175B, 4 H200: fp16, dense, prompt 1024 over 128 | <= +8 % | +10.0 % | missed by 2 % |" in lines
    assert "| 175B, 4 H200: fp16, a quarter of all units against dense | >= 2.2x | 2.00x | missed by 10 % |" in lines
    assert len(lines) == 2 + 9 + 2 + 2


def test_steps_stand_beside_the_dense_one_and_one_gpu(root):
    lines = tables_ranks.steps_table(root).splitlines()
    assert "| 66B, 2 H200 | fp16 | dense | 1, 128 | 16 | 25 % | | 2.00x | 8 |" in lines
    assert "| 66B, 2 H200 | fp16 | 10 %, heads 50 % | 1, 128 | 8 | 50 % | 2.00x | 1.25x | 8 |" in lines
    assert "| 175B, 4 H200 | 4 bits | 10 %, heads 85 % | 1, 128 | 4 | 100 % | 2.00x | | 8 |" in lines
    assert "| 66B, 4 H100 | fp16 | dense | 1, 128 | 12 | 33 % | | | 8 |" in lines, "one GPU is of the same card"
    assert len(lines) == 2 + 9 + 2 and "TINY" not in "".join(lines)


def test_rivals_stand_beside_our_steps(root, capsys):
    lines = tables_ranks.rivals_table(root).splitlines()
    assert "| 66B, 2 H200 | device map | 64 | 16 | 8 | compiled: No / luck |" in lines
    assert '| AFM-4.5B, 2 H200 | tp_plan="auto" | failed | | | compiled: No / luck |' in lines
    path = root / tables_ranks.RANKS_ROWS
    with path.open(newline="") as file:
        ours = [row for row in csv.DictReader(file) if not row["engine"].startswith("hf")]
    path.unlink()
    for row in ours:
        append_row(path, row, COLUMNS)
    empty = "<!-- table: several-gpus-rivals -->\n<!-- end -->"
    assert tables.fill(empty.replace("\n", "\n| old |\n"), root) == empty
    said = f"table several-gpus-rivals: {tables_ranks.RANKS_ROWS} has no row of transformers, left empty\n"
    assert capsys.readouterr().err == said


def test_lines_of_the_picture(root):
    by_gpus = ranks_picture.lines_of(root, "66b", "gpus")
    assert by_gpus == {"fp16, dense": {1: (32, 7), 2: (16, 4)}, "fp16, heads 50 %": {1: (10, 7), 2: (8, 4)}}
    by_prompt = ranks_picture.lines_of(root, "175b", "prompt")
    assert by_prompt["fp16, dense"] == {128: (20, 4), 1024: (22, 4)} and "fp16, heads 25 %" not in by_prompt
    picture = root / "picture.png"
    ranks_picture.draw(root, picture)
    assert picture.stat().st_size > 10_000
