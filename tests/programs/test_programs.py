"""Some random programs, and that their judge sees what is wrong. More: ``python -m tests.programs --seeds 0-499``."""

import json
from pathlib import Path

import pytest
import torch

from . import program as module
from .program import draw, quiet, run, shrink
from .refusals import allowed
from .world import Base, submodule

SEEDS = range(24)
EACH_KIND = (2, 6, 7, 12, 14, 15, 16, 17, 20, 21, 22, 23)  # all that the programs of SEEDS do, some of these do
MOST_REFUSED = 0.15
FOUND = json.loads((Path(__file__).parent / "found.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with quiet():
        yield Base(tmp_path_factory.mktemp("programs"))


def fours(seeds, *marks):
    seeds = sorted(seeds)
    return [pytest.param(seeds[i : i + 4], id=str(seeds[i]), marks=marks) for i in range(0, len(seeds), 4)]


@pytest.mark.parametrize("seeds", [*fours(EACH_KIND), *fours({*SEEDS} - {*EACH_KIND}, pytest.mark.long)])
def test_programs(base, seeds):
    calls = refused = 0
    for seed in seeds:
        outcome = run(draw(seed), base)
        assert outcome.finding is None, f"seed {seed}: {outcome.finding}; python -m tests.programs --seeds {seed}"
        calls, refused = calls + outcome.calls, refused + len(outcome.refusals)
    assert calls >= 4 * len(seeds) and refused <= MOST_REFUSED * calls + 1


@pytest.mark.parametrize("row", FOUND, ids=[f"{row['kind']} {row['what']}" for row in FOUND])
def test_what_programs_found(base, row):
    """Shrunk programs: each failed once, as its ``finding`` says."""
    assert run(row["program"], base).finding is None


def written(backend, exact, calls, **made):
    profile = {"backend": backend, "dtype": "float32", "coded": False, "exact": exact, "density": [0.3, 0.5, False]}
    made = {"cascade": False, "means": False, "lookahead": False, "dtype": "float16"} | made
    load = {"call": "load", "kind": "from_model", "dtype": "float32"}
    return {"seed": 0, **profile, "made": made, "start": 0, "calls": [load, *calls]}


FORWARD = {"call": "forward", "kind": "batch", "seed": 3}
GREEDY = {"call": "generate", "kind": "batch", "new": 8, "seed": 3}


@pytest.mark.parametrize("exact", [True, False], ids=["density 1", "sparse"])
@pytest.mark.parametrize("backend", ["mask", "gather", "auto", "reference"])
@pytest.mark.parametrize("call", [FORWARD, GREEDY], ids=["forward", "generate"])
def test_a_wrong_number_is_found(base, monkeypatch, backend, exact, call):
    """The model loses a bias that the truth keeps: what it computes is judged wrong, and a right model is not."""
    made = written(backend, exact, [call], cascade=not exact)
    assert run(made, base).finding is None
    monkeypatch.setattr(module, "same_weights", lambda *_: None)
    load, (drawn, _, weight) = module.DRAWS["load"][1], module.DRAWS["load"]

    def lossy(world, asked):
        load(world, asked)
        with torch.no_grad():
            submodule(world.model, "layers.1.fc2").bias.zero_()

    monkeypatch.setitem(module.DRAWS, "load", (drawn, lossy, weight))
    assert run(made, base).kind == "mismatch"


def test_a_program_is_shrunk_to_what_fails(base, monkeypatch):
    edit = {"call": "edit", "way": "no_grad", "paths": ["layers.0.fc1"], "part": "bias", "factor": 2.0, "seed": 1}
    drawn, _, weight = module.DRAWS["edit"]
    monkeypatch.setattr(module, "same_weights", lambda *_: None)

    def forgotten(world, _):
        submodule(world.truth, "layers.0.fc1").bias.data.add_(1)

    monkeypatch.setitem(module.DRAWS, "edit", (drawn, forgotten, weight))
    shorter, outcome = shrink(written("mask", True, [GREEDY, FORWARD, edit, FORWARD, GREEDY]), base)
    assert [call["call"] for call in shorter["calls"]] == ["load", "edit", "forward"]
    assert "logits off" in outcome.finding


def test_a_seed_is_a_program():
    assert draw(7) == draw(7) and draw(7) != draw(8)
    assert {draw(seed)["exact"] for seed in range(4)} == {True, False}


def kinds(seeds):
    """Of models, and of calls."""
    found = set()
    for program in map(draw, seeds):
        found |= {(name, program[name]) for name in ("backend", "dtype", "coded", "exact", "start")}
        for call in program["calls"]:
            found |= {(call["call"], call.get("kind"), call.get("way")), ("then", call.get("then", {}).get("call"))}
    return found


def test_the_programs_of_make_test_have_every_kind():
    assert len(kinds(SEEDS)) > 70 and kinds(EACH_KIND) == kinds(SEEDS) and {*EACH_KIND} < {*SEEDS}


def test_refusals_are_those_of_the_table():
    assert allowed("generate", "generate(num_beams=3) is not for the decode engine; use backend='gather'")
    assert not allowed("copy", "generate(num_beams=3) is not for the decode engine; use backend='gather'")
    assert not allowed("generate", "the logits of row 0 for the token at position 3 are not finite; check the weights")
