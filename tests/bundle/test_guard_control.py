"""The guard's controller on made-up logits: a wrong threshold comes back, a right one stays. Bad values are refused."""

import dataclasses

import pytest
import torch
from bundles import make_bundle

from dejavu_train import Guard
from dejavu_train.bundle.guard import GuardState
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.calibration.curves import MLP_GRID, LogitHistogram
from dejavu_train.ground.errors import UserError

N = 400


def tokens(count, seed, shift=0.0):
    """Logits (count, N) and contributions: neurons of larger logits are active more often and contribute more."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, N, generator=generator) - shift
    noisy = logits + shift + torch.randn(count, N, generator=generator)
    return logits, (noisy - 1.5).relu() * torch.rand(count, 1, generator=generator)


@pytest.fixture(scope="module")
def spec():
    logits, contribution = tokens(4000, 0)
    histogram = LogitHistogram()
    histogram.add(logits, contribution > 0, contribution)
    sizes = {"rank": 4, "d_in": 8, "n_out": N}
    return PredictorSpec(0, "mlp", "mlp_in", 0, **sizes, curve=histogram.curve(MLP_GRID)).at(0.2)


def settle(state, steps, rows, shift=0.0, seed=1):
    """Run measured steps. Returns the mean retained mass of fresh tokens at the threshold that is left."""
    everyone = torch.ones(rows, dtype=torch.bool)
    path = []
    for step in range(steps):
        logits, contribution = tokens(rows, seed * 10_000 + step, shift)
        keep = logits > state.threshold((0, "mlp"))
        state.measure((0, "mlp"), everyone, keep, keep, contribution)
        state.move(everyone)
        path.append(float(state.threshold((0, "mlp"))))
    logits, contribution = tokens(4000, 99, shift)
    keep = logits > state.threshold((0, "mlp"))
    return float((contribution * keep).sum() / contribution.sum()), path


@pytest.mark.parametrize(("wrong", "rows"), [(-1.0, 8), (0.8, 8), (0.8, 32)])
def test_a_wrong_threshold_is_brought_back(spec, wrong, rows):
    state = GuardState(Guard(memory=256), {(0, "mlp"): spec}, "cpu")
    state.thresholds[:, 0] += wrong
    retained, path = settle(state, 2048 // rows, rows)
    assert abs(path[0] - spec.threshold) > 0.1, "one step must not be enough"
    assert retained == pytest.approx(spec.retained_mass, abs=0.01)
    assert path[-1] == pytest.approx(spec.threshold, abs=0.1)


@pytest.mark.parametrize("shift", [-0.7, 0.7])
def test_another_text_gets_another_threshold(spec, shift):
    """All logits lie lower (or higher): the threshold follows, and the promise holds."""
    without, _ = settle(GuardState(Guard(control=False), {(0, "mlp"): spec}, "cpu"), 1, 32, shift)
    assert abs(without - spec.retained_mass) > 0.05
    retained, path = settle(GuardState(Guard(memory=256), {(0, "mlp"): spec}, "cpu"), 64, 32, shift)
    assert retained == pytest.approx(spec.retained_mass, abs=0.01)
    assert path[-1] == pytest.approx(spec.threshold - shift, abs=0.1)


def test_a_right_threshold_stays(spec):
    """It wanders by no more than the noise that the docstring names, and is pulled to neither side."""
    path = []
    for seed in range(4):
        state = GuardState(Guard(memory=128), {(0, "mlp"): spec}, "cpu")
        path += settle(state, 100, 8, seed=seed + 1)[1][20:]
    values = torch.tensor(path) - spec.threshold
    logits, contribution = tokens(4000, 0)
    error = ((contribution * (logits > spec.threshold)).sum(1) - spec.retained_mass * contribution.sum(1)).std()
    noise = float(error / contribution.sum(1).mean()) / (2 * 128) ** 0.5 * float(state.rate)
    assert values.std() < 1.5 * noise
    assert abs(values.mean()) < noise


def test_rows_that_are_not_sparse_count_nothing(spec):
    state = GuardState(Guard(), {(0, "mlp"): spec}, "cpu")
    logits, contribution = tokens(3, 5)
    keep = logits > 5
    for rows, measured in ((torch.zeros(3, dtype=torch.bool), 0), (torch.tensor([True, False, False]), 1)):
        state.measure((0, "mlp"), rows, keep, keep, contribution)
        state.move(rows)
        assert state.report()["tokens"] == measured
        assert (float(state.threshold((0, "mlp"))) == pytest.approx(spec.threshold)) == (measured == 0)
    found = state.report()["layers"][0]
    assert found["retained_mass"] == float((contribution[0] * keep[0]).sum() / contribution[0].sum())
    state.reset()
    assert state.report()["tokens"] == 0 and float(state.threshold((0, "mlp"))) == pytest.approx(spec.threshold)


def test_thresholds_stay_within_the_curve(spec):
    limits = spec.curve["threshold"]
    for selects, end in ((0.0, min(limits)), (1.0, max(limits))):
        state = GuardState(Guard(memory=1), {(0, "mlp"): spec}, "cpu")
        keep = torch.full((1, N), selects) > 0
        for _ in range(600):
            state.measure((0, "mlp"), torch.tensor([True]), keep, keep, torch.ones(1, N))
            state.move(torch.tensor([True]))
        assert float(state.threshold((0, "mlp"))) == pytest.approx(end)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every": 1}, "guard.every must be at least 2"),
        ({"retained_mass": 1.0}, "guard.retained_mass must lie between 0 and 1"),
        ({"retained_mass": 0.0}, "guard.retained_mass must lie between 0 and 1"),
        ({"memory": 0}, "guard.memory must be at least 1"),
    ],
)
def test_bad_settings_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        Guard(**values)


def test_bundles_that_cannot_be_guarded_are_refused(tiny_opt):
    bundle = make_bundle(tiny_opt)
    with pytest.raises(UserError, match="mlp predictor of layer 0 selects by top_k"):
        GuardState(Guard(), bundle.at(0.3, 0.5, top_k=True).specs, "cpu")
    GuardState(Guard(control=False), bundle.at(0.3, 0.5, top_k=True).specs, "cpu")
    with pytest.raises(UserError, match="dense everywhere"):
        GuardState(Guard(), bundle.at(1.0, 1.0).specs, "cpu")
    bare = {key: dataclasses.replace(spec, curve={}) for key, spec in bundle.at(0.3, 0.5).specs.items()}
    with pytest.raises(UserError, match="mlp predictor of layer 0 has none"):
        GuardState(Guard(), bare, "cpu")
    specs = {key: dataclasses.replace(spec, curve=spec.curve | {"retained_mass": [0.9] * 10}) for key, spec in
             bundle.at(0.3, 0.5).specs.items()}  # fmt: skip
    with pytest.raises(UserError, match=r"guard.retained_mass 0.95 is more than"):
        GuardState(Guard(retained_mass=0.95), specs, "cpu")
