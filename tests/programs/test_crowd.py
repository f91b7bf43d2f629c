"""Sixteen callers of one model at once: every text is what it is alone, and nobody is left behind."""

import os

import pytest
from bundles import make_bundle
from conftest import save_tiny_opt

from dejavu_train.engine.cpu.engine import SUPPORTED

from .crowd import Crowd

SECONDS = float(os.environ.get("CROWD_SECONDS", "2.5"))
LONG = 5.0  # times as long where a call takes longer
PATIENCE = 1.5  # seconds: sixteen threads, and a machine with other work beside them


@pytest.mark.parametrize(
    "backend",
    [
        "cpu",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("mask", "gather")),
        pytest.param("triton", marks=pytest.mark.gpu),
    ],
)
def test_a_crowd_of_callers(tiny_opt, tmp_path, backend):
    if backend == "cpu" and not SUPPORTED:
        pytest.skip("no POSIX threads")
    device, folder = "cpu", tiny_opt
    if backend == "triton":  # whose kernels have no head dim of the tiny model
        device, folder = "cuda", save_tiny_opt(tmp_path, hidden_size=64, word_embed_proj_dim=64)
    crowd = Crowd(str(folder), make_bundle(folder).at(0.3, 0.5), backend, device)
    row = crowd.run(SECONDS if backend == "cpu" else LONG * SECONDS)
    assert row["wrong"] == 0, row["examples"]
    assert row["calls"] >= 16 and row["raised"] >= 2 and row["set_bundle"] >= 2, row
    assert row["beyond_earlier_calls_s"] < PATIENCE, row
