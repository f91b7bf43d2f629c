import math

import pytest
import torch

from dejavu_train.ground.errors import UserError
from dejavu_train.predictors.losses import LOSSES, Batch, get_loss, needs_contribution


def softplus(x):
    return math.log1p(math.exp(x))


LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.0]])
BATCH = Batch(torch.zeros(1, 3), torch.tensor([[True, False, True, False]]), torch.tensor([[1.0, 0.0, 3.0, 0.0]]))


def test_paper_weights():
    share = 0.5 + 0.005
    expected = (softplus(-2) + softplus(-0.5) + share * (softplus(-1) + softplus(0))) / 4
    assert LOSSES["paper"](LOGITS, BATCH).item() == pytest.approx(expected, rel=1e-5)


def test_pos_weight_is_negatives_over_positives():
    active = torch.tensor([[True, False, False, False]])
    expected = (3 * softplus(-2) + softplus(-1) + softplus(0.5) + softplus(0)) / 4
    assert LOSSES["pos_weight"](LOGITS, Batch(BATCH.inputs, active)).item() == pytest.approx(expected, rel=1e-5)


def test_a_missed_neuron_costs_its_contribution():
    costs = [1 / 2, 3 / 2]  # in units of the mean over the two active ones
    negatives = 0.1 * (softplus(-1) + softplus(0))
    expected = (costs[0] * softplus(-2) + costs[1] * softplus(-0.5) + negatives) / 2
    assert LOSSES["contribution"](LOGITS, BATCH).item() == pytest.approx(expected, rel=1e-5)


def test_arguments_of_a_loss_are_settings():
    more = get_loss({"class_path": "contribution", "init_args": {"negative_weight": 0.3}})
    surplus = softplus(-1) + softplus(0)
    change = more(LOGITS, BATCH) - LOSSES["contribution"](LOGITS, BATCH)
    assert change.item() == pytest.approx(0.2 * surplus / 2, rel=1e-4)
    assert get_loss({"class_path": "contribution"})(LOGITS, BATCH) == LOSSES["contribution"](LOGITS, BATCH)
    assert needs_contribution({"class_path": "contribution"}) and not needs_contribution({"class_path": "paper"})
    with pytest.raises(UserError, match=r"mlp.loss: .*contribution cannot be called with .*weight"):
        get_loss({"class_path": "contribution", "init_args": {"weight": 0.3}}, "mlp.loss")
    for wrong in ("much", True, -1, float("nan")):
        with pytest.raises(
            UserError, match=f"mlp.loss.init_args.negative_weight must be a number from 0 on, got {wrong}"
        ):
            get_loss({"class_path": "contribution", "init_args": {"negative_weight": wrong}}, "mlp.loss")


def test_share_is_least_where_logits_are_log_contributions():
    contribution = torch.tensor([[0.5, 1.0, 2.0]])
    batch = Batch(torch.zeros(1, 1), contribution > 0, contribution)
    logits = contribution.log().clone().requires_grad_()
    LOSSES["listwise"](logits, batch).backward()
    assert logits.grad.abs().max() < 1e-6


def test_regression_is_least_at_relative_contributions():
    assert LOSSES["regression"](BATCH.contribution / BATCH.contribution.mean(), BATCH).item() == 0


def test_log_contribution_is_least_at_the_logarithm():
    contribution = torch.tensor([[0.5, 1.0, 0.0]])
    batch = Batch(torch.zeros(1, 1), contribution > 0, contribution)
    wanted = torch.tensor([[0.5, 1.0, 0.5e-4]]).log()
    assert LOSSES["log_contribution"](wanted, batch).item() == pytest.approx(0, abs=1e-9)
    assert LOSSES["log_contribution"](wanted + 2, batch).item() == pytest.approx(4, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_active_and_gradients(name):
    logits = torch.randn(3, 5, requires_grad=True)
    nothing = Batch(torch.zeros(3, 2), torch.zeros(3, 5, dtype=torch.bool), torch.zeros(3, 5))
    loss = get_loss(name)(logits, nothing)
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all()


def test_unknown_loss_lists_the_known():
    with pytest.raises(UserError, match="paper, pos_weight, contribution"):
        get_loss("focal")
