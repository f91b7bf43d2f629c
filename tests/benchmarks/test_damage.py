"""Short forms of benchmarks/mutations.py and benchmarks/soak.py. Their rows stand in benchmarks/results."""

import pytest

from benchmarks.mutations import KINDS, Run, mutate
from benchmarks.soak import Soak


@pytest.mark.long
def test_mutations_are_refused_or_change_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a mutated path may be a relative one
    found = mutate(Run(tmp_path), len(KINDS), 7)
    assert sorted(found["found"]) == sorted(KINDS) and found["wrong"] == []


@pytest.mark.long
def test_interruptions_leave_the_same_bundle(tmp_path):
    soak = Soak(tmp_path)
    for number in range(3):  # on a machine that has much else to do a run may end before its signal comes
        found = soak.run(number, 7, most=2)
        assert found["same_bundle"] and not found["wrong"]
        if found["interruptions"] == 2:
            return
    raise AssertionError("no run was interrupted twice")
