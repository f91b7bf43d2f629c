"""Which neurons rows keep live together: of real text, of independent draws, and of the benchmarks' distribution."""

import torch
from decode_helpers import random_opt

from benchmarks.active_sets import overlap_of, union_of
from benchmarks.decode_problem import UNION
from benchmarks.real_rows import shares


def test_unions_of_the_distribution_are_those_that_were_published():
    for rows in (2, 4, 8):
        assert abs(union_of(0.1, rows) - UNION["6.7b"][rows]) < 0.02
    assert union_of(0.5, 1) == 0.5 and union_of(0.5, 2) == 0.75


def test_shares_of_rows_together():
    model, ids = random_opt(n_layers=2), torch.randint(3, 300, (8, 12))
    ids[1::2] = ids[::2]  # pairs of rows that are the same
    found = shares(model, ids, 4, [1, 2, 3, 4])
    alone, pairs, fours = (found[batch] for batch in (1, 2, 4))
    assert alone["one"] == alone["live"] == pairs["live"] < fours["live"] < 1
    assert pairs["overlap"] == 1 > fours["overlap"] > 0
    assert pairs["one"] < pairs["independent"] < fours["independent"]
    assert overlap_of(torch.eye(3, dtype=torch.bool)) == 0
