"""low_rank.py: the formula, and that the SVD initialisations are the best of their rank."""

import pytest
import torch

from dejavu_train.ground.errors import UserError
from dejavu_train.predictors.low_rank import LowRankPredictor, svd_init


def _error(predictor: LowRankPredictor, weight: torch.Tensor, inputs: torch.Tensor) -> float:
    approximation = (predictor.up @ predictor.down).double()
    return (inputs @ (weight - approximation).T).square().mean().item()


def test_logits_follow_the_formula():
    predictor = LowRankPredictor(6, 3, 5, nonlinearity="relu")
    torch.nn.init.normal_(predictor.bias)
    x = torch.randn(2, 4, 6)
    expected = torch.relu(x @ predictor.down.T) @ predictor.up.T + predictor.bias
    torch.testing.assert_close(predictor(x), expected)
    assert predictor(x.bfloat16()).dtype == torch.bfloat16
    assert LowRankPredictor(6, 3, 5, bias=False).bias is None


@pytest.mark.parametrize(("units", "rank"), [(40, 12), (7, 7), (4, 9)])
def test_full_information_is_reproduced(units, rank):
    weight, bias = torch.randn(units, 12), torch.randn(units)
    predictor = LowRankPredictor(12, rank, units)
    svd_init(predictor, weight, bias)
    x = torch.randn(5, 12)
    torch.testing.assert_close(predictor(x), x @ weight.T + bias, rtol=1e-4, atol=1e-4)


def test_data_aware_start_beats_the_plain_one_on_the_data():
    torch.manual_seed(1)
    weight = torch.randn(64, 16).double()
    inputs = torch.randn(500, 16).double() * torch.logspace(-2, 1, 16).double()  # a few loud directions
    errors = {}
    for name, covariance in (("plain", None), ("data", inputs.T @ inputs / len(inputs))):
        predictor = LowRankPredictor(16, 4, 64)
        svd_init(predictor, weight, None, covariance)
        errors[name] = _error(predictor, weight, inputs)
    assert errors["data"] < 0.5 * errors["plain"]
    # Eckart-Young: no rank-4 map does better on these inputs than the truncated SVD of the outputs.
    outputs = inputs @ weight.T
    values = torch.linalg.svdvals(outputs)
    best = values[4:].square().sum().item() / outputs.numel()
    assert errors["data"] == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("rank", [0, 13])
def test_a_rank_that_does_not_fit_is_refused(rank):
    with pytest.raises(UserError, match="between 1 and the input width 12"):
        LowRankPredictor(12, rank, 5)
    with pytest.raises(UserError, match="none or relu"):
        LowRankPredictor(12, 3, 5, nonlinearity="gelu")
