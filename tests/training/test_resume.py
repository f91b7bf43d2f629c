"""A fit that is killed at any step and goes on ends with the very predictor of one that was left alone."""

import itertools
import shutil

import pytest
import torch
from small_runs import activations, flags

from dejavu_train.families import UnitKey
from dejavu_train.run.command import parse_config
from dejavu_train.training import job
from dejavu_train.training.job import fit, job_folder
from dejavu_train.training.lit_predictor import LitPredictor

STEPS = 12


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def folder(tiny_opt, text_file, tmp_path_factory):
    output = tmp_path_factory.mktemp("resume") / "run"
    shutil.copytree(activations(tiny_opt, text_file), output / "activations")
    return output


CASES = {
    "epochs of 5 steps": ["--data.batch_size=2400", "--mlp.validations=3", "--mlp.patience=2"],
    "streamed by two workers": ["--data.batch_size=1200", "--data.memory_gb=0", "--data.num_workers=2"],
    "gradients of two batches": ["--data.batch_size=1200", "--trainer.accumulate_grad_batches=2"],
}
LONG = {
    "one long epoch": ["--data.batch_size=256", "--mlp.validations=4"],
    "epochs of one step": ["--data.batch_size=99999", "--mlp.validations=5"],
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)])
def test_a_killed_fit_ends_with_the_same_predictor(folder, tiny_opt, text_file, monkeypatch, case):
    argv = flags(tiny_opt, text_file, folder, f"--mlp.steps={STEPS}", *(CASES | LONG)[case])
    config = parse_config(argv)
    monkeypatch.setattr(job, "SAVE_SECONDS", -1.0)  # at every step
    original = LitPredictor.training_step
    calls = itertools.count()
    kill_at = -1

    def step(self, raw, index):
        if next(calls) == kill_at:
            raise Killed
        return original(self, raw, index)

    monkeypatch.setattr(LitPredictor, "training_step", step)
    own = job_folder(folder, UnitKey(0, "mlp"))

    def trained(*kills):
        nonlocal calls, kill_at
        shutil.rmtree(own, ignore_errors=True)
        for kill in kills:
            kill_at = kill
            calls = itertools.count()
            with pytest.raises(Killed):
                fit(config, UnitKey(0, "mlp"), "layer 0 mlp")
        calls, kill_at = itertools.count(), -1
        fit(config, UnitKey(0, "mlp"), "layer 0 mlp")
        return (own / "predictor.safetensors").read_bytes()

    undisturbed = trained()
    steps = next(calls)
    for kills in ((5, 1, 3), (steps - 1,)):
        assert trained(*kills) == undisturbed, kills


def test_random_numbers_go_on_where_they_stopped():
    module = LitPredictor("mlp", 4, 2, 3)
    module.trainer = type("Trainer", (), {"state": type("State", (), {"fn": "fit"})()})()
    checkpoint: dict = {}
    module.on_save_checkpoint(checkpoint)
    first = torch.rand(3)
    module.on_load_checkpoint(checkpoint)
    assert torch.equal(torch.rand(3), first)
