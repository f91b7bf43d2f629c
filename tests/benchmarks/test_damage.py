"""Short forms of benchmarks/mutations.py and benchmarks/soak.py; their rows stand in benchmarks/results."""

from benchmarks.mutations import mutate
from benchmarks.soak import soak


def test_mutations_are_refused_or_change_nothing(tmp_path):
    found = mutate(12, 7, tmp_path, seconds=60)
    assert found["count"] >= 3 and found["wrong"] == []


def test_interruptions_leave_the_same_bundle(tmp_path):
    found = soak(2, 7, tmp_path)
    assert found["interruptions"] >= 2 and not found["bundles_that_differ"] and not found["wrong_exit_codes"]
