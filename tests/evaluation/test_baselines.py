"""Which units are selected, on cases that can be counted by hand."""

import pytest
import torch

from dejavu_train.bundle.selector import select
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.evaluation.baselines import keep_top, random_ranks, ranks

ENTRY = {"layer": 0, "target": "mlp", "site": "mlp_in", "site_layer": 0, "rank": 1, "d_in": 4, "n_out": 4}
NAN = float("nan")


@pytest.mark.parametrize(
    ("logits", "options", "expected"),
    [
        ([0.0, 1.0, 2.0, 3.0], {"threshold": 1.0}, [0, 0, 1, 1]),  # a tie is not selected
        ([NAN, 9.0, float("inf"), -9.0], {"threshold": 1.0}, [0, 1, 1, 0]),
        ([0.0, 3.0, 2.0, 1.0], {"top_k": 2}, [0, 1, 1, 0]),
        ([NAN, NAN, NAN, 1.0], {"top_k": 2}, [0, 0, 0, 1]),
        ([5.0, 5.0, 5.0, 5.0], {"threshold": 5.0}, [0, 0, 0, 0]),
    ],
)
def test_select(logits, options, expected):
    got = select(torch.tensor([logits]), PredictorSpec(**ENTRY, **options))
    assert got.tolist() == [[bool(value) for value in expected]]


def test_ranks_and_take_count_exactly_in_spite_of_ties():
    scores = torch.tensor([[0.0, 0.0, 0.0, 2.0], [1.0, 3.0, 2.0, 0.0]])
    places = ranks(scores)
    assert sorted(places[0].tolist()) == [0, 1, 2, 3]
    assert places[1].tolist() == [2, 0, 1, 3]
    counts = torch.tensor([3, 2])
    assert keep_top(places, counts).sum(-1).tolist() == [3, 2]
    assert keep_top(places, counts)[1].tolist() == [False, True, True, False]
    assert keep_top(places[1], counts).tolist() == [[True, True, True, False], [False, True, True, False]]


def test_random_ranks_are_uniform():
    places = random_ranks((4000, 6), torch.Generator().manual_seed(0))
    share = keep_top(places, torch.full((4000,), 2)).float().mean(0)
    assert ((share - 1 / 3).abs() < 0.03).all()
