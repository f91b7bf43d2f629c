"""The benchmark of models larger than a device, on a tiny shape: it makes the model, and appends a row a stage."""

import argparse
import csv
import dataclasses
import functools

import torch

from benchmarks import by_layers
from dejavu_train.data import collect_layers
from dejavu_train.training.config import TuneConfig


def test_stages_append_their_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(by_layers, "TINY", dataclasses.replace(by_layers.TINY, n_layers=2))
    arguments = argparse.Namespace(
        shape="tiny", layers=None, folder=tmp_path / "model", device="cpu", tokens=1024, calibration_tokens=512,
        tune_steps=1, results=tmp_path / "rows.csv",
    )  # fmt: skip
    monkeypatch.setattr(by_layers, "TuneConfig", functools.partial(TuneConfig, tokens=512, batch_tokens=512))
    model, run = arguments.folder, arguments.folder / "run"
    by_layers.make(by_layers.sizes_of(arguments), model, torch.device("cpu"))
    monkeypatch.setattr(collect_layers, "_collect_layer", collect_layers._collect_layer)  # put back afterwards
    for stage in by_layers.STAGES:
        by_layers.run_stage(arguments, stage)
    rows = list(csv.DictReader(arguments.results.open()))
    assert [row["stage"] for row in rows] == list(by_layers.STAGES)
    assert all(float(row["host_gb"]) > 0 and float(row["minutes"]) >= 0 for row in rows)
    assert not list(run.rglob("*.h5")) and not (run / "states").exists()
