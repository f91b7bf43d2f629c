"""Some random requests, and that their judge sees what is wrong. More: ``python -m tests.asked --seeds 0-499``."""

import shutil

import pytest

from . import judge as module
from .judge import asked
from .world import World

SEEDS = range(80)


@pytest.fixture(scope="module")
def world(tiny_opt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("asked") / "model"
    shutil.copytree(tiny_opt, folder)
    return World(folder)


def test_requests(world, capfd):
    kinds = []
    for seed in SEEDS:
        outcome = world.ask(seed)
        assert outcome.finding is None, f"seed {seed}: {outcome.finding}; python -m tests.asked --seeds {seed}"
        kinds.append(outcome.kind)
    assert kinds.count("text") > 25 and kinds.count("refused") > 25 and kinds.count("too close to call") < 10
    assert world.alive and "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "change", [{"finish_reason": "stop "}, {"text": "other"}, {"logprobs": {}}, {"message": {"content": "other"}}]
)
def test_a_wrong_answer_is_found(world, monkeypatch, change):
    """Each is found within the first requests."""

    def lies(*given):
        status, body = asked(*given)
        for choice in body.get("choices", []):
            choice |= {name: value for name, value in change.items() if name in choice}
        return status, body

    monkeypatch.setattr(module, "asked", lies)
    assert any(world.ask(seed).finding for seed in range(60))


def test_an_answer_to_what_must_be_refused_is_found(world, monkeypatch):
    monkeypatch.setattr(module, "asked", lambda *_: (200, {"choices": [], "usage": None}))
    assert all(world.ask(seed).finding for seed in range(20))
