import numpy as np
import pytest
import torch

from dejavu_train.predictors.metrics import SelectionSums, at_density, logit_histograms, top_units


def test_sums_match_numpy_over_uneven_batches():
    generator = np.random.default_rng(0)
    selected, active = generator.random((50, 7)) < 0.4, generator.random((50, 7)) < 0.2
    mass = generator.random((50, 7)) * active
    sums = SelectionSums()
    for rows in (slice(0, 32), slice(32, 49), slice(49, 50)):
        sums.update(*(torch.from_numpy(part[rows]) for part in (selected, active, mass)))
    assert sums.recall == pytest.approx((selected & active).sum() / active.sum())
    assert sums.precision == pytest.approx((selected & active).sum() / selected.sum())
    assert sums.density == pytest.approx(selected.mean())
    assert sums.active_density == pytest.approx(active.mean())
    assert sums.retained_mass == pytest.approx(mass[selected].sum() / mass.sum())


def test_nothing_active_and_nothing_selected():
    sums = SelectionSums()
    sums.update(torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3))
    assert (sums.recall, sums.precision, sums.density, sums.retained_mass) == (1.0, 1.0, 0.0, 1.0)


def test_logits_are_refused():
    with pytest.raises(AssertionError, match="booleans"):
        SelectionSums().update(torch.randn(2, 3), torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize("density", [0.01, 0.1, 0.37, 1.0])
def test_figures_at_a_density_match_sorting(density):
    torch.manual_seed(0)
    logits, noise = torch.randn(400, 50) * 2, torch.randn(400, 50)
    active = logits + noise > 3
    mass = torch.rand(400, 50) * active
    halves = [logit_histograms(logits[r], active[r], mass[r]) for r in (slice(0, 100), slice(100, 400))]
    metrics = at_density(halves[0] + halves[1], density)
    order = logits.flatten().argsort(descending=True)[: round(density * logits.numel())]
    chosen = torch.zeros(logits.numel(), dtype=torch.bool)
    chosen[order] = True
    sums = SelectionSums()
    sums.update(chosen.view_as(logits), active, mass)
    for name in ("recall", "precision", "retained_mass", "density"):
        assert metrics[name] == pytest.approx(getattr(sums, name), abs=2e-3)
    if density < 1:
        assert metrics["threshold"] == pytest.approx(logits.flatten()[order[-1]].item(), abs=0.02)


def test_extreme_logits_fall_into_the_outer_bins():
    logits = torch.tensor([[1e6, -1e6, 0.0]])
    active = torch.tensor([[True, False, False]])
    assert at_density(logit_histograms(logits, active, active.float()), 1 / 3)["recall"] == 1.0


def test_top_units():
    contribution = torch.tensor([[0.1, 0.5, 0.3], [3.0, 1.0, 2.0]])
    assert top_units(contribution, 2).tolist() == [[False, True, True], [True, False, True]]
    assert top_units(contribution, 9).all()
