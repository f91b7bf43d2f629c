"""What benchmarks/fidelity.py compares on a GPU, here with the plain-torch operations: it finds what differs."""

import dataclasses

import pytest
import torch
from bundles import make_bundle

from benchmarks import fidelity
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.models.opt import load_opt

MODEL = "checkpoints/opt-mini"


def plain_torch(model, bundle=None, options=None):
    """The engine in plain torch, whatever was asked for."""
    return DecodeEngine(model, bundle, dataclasses.replace(options, ops="reference"))


@pytest.fixture(scope="module")
def made():
    generator = torch.Generator().manual_seed(2)  # no near-tie at these tokens
    rows = [[2, *torch.randint(3, 8000, (11,), generator=generator).tolist()] for _ in range(3)]
    return load_opt(MODEL), make_bundle(MODEL, means=True).at(0.2, 0.7), rows


def test_equal_sets_are_seen_as_equal(made, monkeypatch):
    model, bundle, rows = made
    monkeypatch.setattr(fidelity, "DecodeEngine", plain_torch)
    found = fidelity.compare_sets(model, bundle, rows, 2, "stream")
    assert found["tokens"] == 33 and found["rows"] == 3
    units = sum(bundle.shape.units(target) for (_, target), spec in bundle.specs.items() if not spec.dense)
    assert found["units_compared"] == 33 * units
    assert found["of_them_by_more_than_a_near_tie"] == 0 and abs(found["perplexity_difference_percent"]) < 0.1


def test_a_wrong_threshold_is_found_where_it_is(made, monkeypatch):
    model, bundle, rows = made
    spec = bundle.specs[3, "mlp"]
    wrong = dataclasses.replace(spec, threshold=spec.threshold + 0.5)
    other = dataclasses.replace(bundle, specs=bundle.specs | {(3, "mlp"): wrong})
    monkeypatch.setattr(
        fidelity,
        "DecodeEngine",
        lambda model, _, options: plain_torch(model, other, options),
    )
    found = fidelity.compare_sets(model, bundle, rows, 3, "stream")
    far = found["partings_by_more_than_a_near_tie"]
    assert found["of_these_by_more_than_4_times_what_fp32_is_off"] == len(far) > 0
    assert {(parting["layer"], parting["target"]) for parting in far} == {(3, "mlp")}
    assert all(0.001 < parting["margin"] <= 0.5 for parting in far)


def test_other_tokens_than_gathers_are_counted(made, monkeypatch):
    model, bundle, rows = made

    class Engine(DecodeEngine):
        shift = 0

        def __init__(self, model, used, options):
            super().__init__(model, used, dataclasses.replace(options, ops="reference"))

        def generate(self, *args, **options):
            return [
                [token + self.shift * (i == 2) for i, token in enumerate(row)]
                for row in super().generate(*args, **options)
            ]

    monkeypatch.setattr(fidelity, "DecodeEngine", Engine)
    equal = fidelity.compare_tokens(model, bundle, [rows[0][:4], rows[1][:5]], 6, "cpu")
    assert equal["tokens"] == 12 and equal["that_differ"] == 0
    monkeypatch.setattr(Engine, "shift", 1)
    other = fidelity.compare_tokens(model, bundle, [rows[0][:4]], 6, "cpu")
    assert other["that_differ"] >= 1 and other["of_them_by_more_than_a_tie"] >= 1


def test_what_fp16_costs_is_told(made, monkeypatch):
    """Dense and sparse in fp16 stay near fp32, are not the same numbers, and a wrong bundle shows."""
    model, bundle, rows = made
    monkeypatch.setattr(fidelity, "DecodeEngine", plain_torch)
    found = fidelity.compare_half(model, bundle, rows[:2], 2, "stream")
    assert found["tokens"] == 22
    for name in ("dense", "sparse"):
        assert found[f"perplexity_{name}_fp16_engine"] != found[f"perplexity_{name}_fp32"]
    assert abs(found["dense_difference_percent"]) < 1 and abs(found["sparse_difference_percent"]) < 3
    other = bundle.at(0.05, 0.3)
    monkeypatch.setattr(
        fidelity,
        "DecodeEngine",
        lambda model, used, options: plain_torch(model, other if used else None, options),
    )
    wrong = fidelity.compare_half(model, bundle, rows[:2], 2, "stream")
    assert abs(wrong["sparse_difference_percent"]) > 3
