"""Our own bugs keep their traceback, in whatever phase of training or of infer.py they are."""

import shutil

import pytest
from small_runs import activations, flags

from dejavu_train.evaluation.command import main as infer
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.run.command import main


def bug(*_args, **_options):
    raise RuntimeError("a bug")


TRAIN_PHASES = {  # what breaks, and what was done before it
    "claim": ("dejavu_train.run.pipeline.claimed_folder", ""),
    "text": ("dejavu_train.data.collect.load_sets", ""),
    "collecting": ("dejavu_train.data.collect.record_batch", ""),
    "predictor": ("dejavu_train.training.job.make_predictor", "collected"),
    "training step": ("dejavu_train.training.lit_predictor.LitPredictor.training_step", "collected"),
    "validation": ("dejavu_train.training.lit_predictor.LitPredictor.validation_step", "collected"),
    "export": ("dejavu_train.training.job.export", "collected"),
    "calibration": ("dejavu_train.run.pipeline.measure_curves", "collected, trained"),
    "tuning": ("dejavu_train.training.passes.divergence", "collected, trained, tuned"),
    "bundle": ("dejavu_train.bundle.artifact.save_file", "collected, trained"),
}
INFER_PHASES = (
    "run.checked", "run.load_tokenizer", "run.load_text", "run.load_model", "run.evaluate", "perplexity.masking",
    "run.time_decoding", "run.report.write_results", "run.plot_curves", "run.write_report", "run._generate",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tiny_opt, text_file, tmp_path_factory):
    output = tmp_path_factory.mktemp("bugs") / "run"
    shutil.copytree(activations(tiny_opt, text_file), output / "activations")
    few = [f"--{target}.{key}" for target in ("mlp", "heads") for key in ("steps=2", "validations=1")]
    assert exit_on_user_error(main, flags(tiny_opt, text_file, output, *few)) == 0
    return output, few


@pytest.mark.parametrize("phase", TRAIN_PHASES)
def test_a_bug_in_a_phase_of_training_keeps_its_traceback(trained, monkeypatch, tiny_opt, text_file, tmp_path, phase):
    (whole, few), (function, before) = trained, TRAIN_PHASES[phase]
    for part in ("activations", "predictors"):
        if {"activations": "collected", "predictors": "trained"}[part] in before:
            shutil.copytree(whole / part, tmp_path / "run" / part)
    more = ["--tune.steps=1", "--tune.tokens=64", "--bundle=again"] if "tuned" in before else []
    monkeypatch.setattr(function, bug)
    with pytest.raises(RuntimeError, match="^a bug$"):
        exit_on_user_error(main, flags(tiny_opt, text_file, tmp_path / "run", *few, *more))


@pytest.mark.parametrize("function", INFER_PHASES)
def test_a_bug_in_a_phase_of_infer_keeps_its_traceback(trained, monkeypatch, tiny_opt, text_file, tmp_path, function):
    given = {
        "model": tiny_opt, "bundle": trained[0] / "bundle", "output": tmp_path, "text": text_file, "tokens": 60,
        "window": 32, "mlp_density": 0.3, "curve_mlp_density": "[]", "head_density": "[]", "sparse_from": "[0]",
        "selections": "predicted", "timing_backends": "dense", "prompt": 4, "new_tokens": 2, "generate": "the",
        "device": "cpu", "backend": "gather",
    }  # fmt: skip
    monkeypatch.setattr(f"dejavu_train.evaluation.{function}", bug)
    with pytest.raises(RuntimeError, match="^a bug$"):
        exit_on_user_error(infer, [f"--{name}={value}" for name, value in given.items()])
