"""Some random files, and that their judge sees what is wrong. More: ``python -m tests.files --seeds 0-499``."""

import re

import numpy as np
import pytest
from programs.program import quiet

from dejavu_train.ground.errors import UserError

from .kinds import KINDS, Base, Drawn
from .run import run

SEEDS = range(250)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with quiet():
        yield Base(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("kind", KINDS)
def test_files(base, kind):
    """Each is read as another reader reads it, or refused in a line. Of each kind some are read, and some refused."""
    outcomes = {seed: run(seed, base) for seed in SEEDS if list(KINDS)[seed % len(KINDS)] == kind}
    found = [f"seed {seed}, {each.about}: {each.finding}" for seed, each in outcomes.items() if each.finding]
    assert not found, f"{found}; python -m tests.files --seeds {SEEDS[0]}-{SEEDS[-1]}"
    refused = sum(each.refusal is not None for each in outcomes.values())
    assert 0.1 * len(outcomes) < refused < 0.95 * len(outcomes)
    assert all(len(each.refusal.splitlines()) <= 2 for each in outcomes.values() if each.refusal)


def refuse():
    raise UserError("no")


@pytest.mark.parametrize(("drawn", "finding"), [
    (Drawn("", lambda: [1], lambda: [1]), None),
    (Drawn("", lambda: [1], lambda: [2]), "read .1., not .2."),
    (Drawn("", lambda: [1], lambda: None), "no other reader can"),
    (Drawn("", lambda: {"a": np.ones(2)}, lambda: {"a": np.zeros(2)}), "a is off by 1"),
    (Drawn("", refuse, lambda: None), None),
    (Drawn("", refuse, lambda: [1], is_whole=True), "a whole file is refused"),
    (Drawn("", lambda: {}["a"], lambda: None), "KeyError"),
], ids=["right", "wrong", "damaged", "off", "refused", "whole", "exception"])  # fmt: skip
def test_the_judge(base, monkeypatch, drawn, finding):
    monkeypatch.setitem(KINDS, next(iter(KINDS)), lambda *_: drawn)
    got = run(0, base).finding
    assert (got is None) if finding is None else re.search(finding, got)


def test_a_seed_is_a_file(base):
    assert [run(seed, base).about for seed in (3, 4)] == [run(seed, base).about for seed in (3, 4)]
    assert run(5, base).about != run(10, base).about
