"""A tiny OPT, its text and its rows, for the tests of the frontier's methods.

Fixtures are imported under names of their own, so that a test's arguments shadow nothing.
"""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.frontier_methods import fit, score, sets
from benchmarks.frontier_methods.plain_opt import PlainOPT
from dejavu_train.models.opt import load_opt


@pytest.fixture(scope="module", name="hf")
def fixture_hf(tiny_opt):
    return load_opt(str(tiny_opt))


@pytest.fixture(scope="module", name="model")
def fixture_model(hf):
    return PlainOPT(hf)


def make_parts(seed, count=12):
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for i in range(count):
        length = int(torch.randint(20, 40, (1,), generator=generator))
        chosen.append((i // 2, [2, *torch.randint(4, 300, (length,), generator=generator).tolist()]))
    return sets.batches(chosen, 6)


@pytest.fixture(scope="module", name="parts")
def fixture_parts():
    return {name: make_parts(i) for i, name in enumerate(("train", "calibration", "test"))}


@pytest.fixture(scope="module", name="reference")
def fixture_reference(model, parts):
    return score.Reference(model, parts["test"])


@pytest.fixture(scope="module", name="rows")
def fixture_rows(model, parts):
    return fit.record_rows(model, parts["train"], 10_000)


def sites_of(model, part):
    found: dict = {}
    with torch.no_grad():
        model.blocks(model.start(part.ids), sites=found)
    return found


def activation(model, found, layer):
    weights = model.layers[layer]
    return F.relu(F.linear(found["mlp_in", layer], weights.fc1_weight, weights.fc1_bias))
