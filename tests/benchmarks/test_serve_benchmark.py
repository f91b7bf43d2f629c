"""Who a server is compared with, and what it is timed with on a GPU."""

import argparse
import contextlib

import pytest

from benchmarks import serve
from benchmarks.cpu_decode import our_rival, run_in_turns
from benchmarks.random_folder import write
from dejavu_train.families import ModelDims
from dejavu_train.sparse.model import SparseOPTForCausalLM


def compared(monkeypatch, engine_rates):
    """Rows of contestants with known rates. The first turn, whose rates are others, must not count."""
    turns, asked = iter([1.0, *engine_rates]), []

    async def ask(url, model, rows, new, more):
        asked.append((url, more))
        return 1.0 if len(asked) < 3 else {"ours": 90.0, "theirs": 10.0}[url]

    @contextlib.contextmanager
    def process(found):
        yield found

    monkeypatch.setattr(serve, "tokens_per_second", ask)
    monkeypatch.setattr(serve, "serving", lambda command: process("ours"))
    monkeypatch.setattr(serve, "engine_alone", lambda options: process((lambda: next(turns), 2)))
    monkeypatch.setattr(serve, "transformers_serve", lambda *_: process("theirs"))
    options = argparse.Namespace(model="m", bundle="b", device="cpu", rows=8, new=16, turns=3, rival=True)
    options.rival_options = []
    rows = serve.compare(options)
    assert asked[:2] == [("ours", {"min_tokens": 16}), ("theirs", {})]
    return {row["contestant"]: row for row in rows}


def test_a_server_is_compared_with_its_engine_by_medians(monkeypatch):
    rows = compared(monkeypatch, [100.0, 50.0, 100.0])
    assert rows["server"]["ratio"] == pytest.approx(0.9) and rows["engine"]["tokens_per_second"] == 100
    assert rows["transformers serve"]["ratio"] == pytest.approx(0.1) and rows["engine"]["turns"] == 3
    assert rows["engine"]["p20"] == pytest.approx(70) and rows["engine"]["threads"] == 2


def test_a_folder_of_random_weights_selects_what_was_asked(tmp_path):
    """What a server on a GPU is timed with. Here a small shape, on the CPU engine."""
    shape = ModelDims(64, 1024, 2, 4, 8192, 64)
    write("opt", shape, tmp_path / "m", (0.2, 0.5), 16)
    model = SparseOPTForCausalLM.from_pretrained(tmp_path / "m", backend="cpu", sparse_from="prompt")
    rival = our_rival("sparse", model.engine_pool().engine(1, 64), [[2, 3, 4]], 40)
    run_in_turns([rival], 1, 30)
    assert sum(rival.mlp) / len(rival.mlp) == pytest.approx(0.2, abs=0.08)
    assert model.bundle.mean_density("mlp") == 0.2 and model.bundle.mean_density("heads") == 0.5
