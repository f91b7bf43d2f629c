"""What a callback, a plugin or a precision refuses is known before any work, and what works is let through."""

import dataclasses

import pytest

from dejavu_train.families import UnitKey
from dejavu_train.ground.errors import UserError
from dejavu_train.training.config import RunConfig
from dejavu_train.training.rehearsal import rehearse
from dejavu_train.training.trainer import resolved_arguments


def resolved(**trainer):
    return RunConfig(trainer=resolved_arguments({"accelerator": "cpu", **trainer}))


def callback(name, **init_args):
    return {"callbacks": [{"class_path": name, "init_args": init_args}]}


@pytest.mark.parametrize(
    "trainer",
    [
        callback("StochasticWeightAveraging", swa_lrs=0.01),
        callback("EarlyStopping", monitor="val/loss", patience=1),
        callback("GradientAccumulationScheduler", scheduling={0: 2}),
        callback("LearningRateFinder"),
        {"precision": "64-true"},
        {"precision": "bf16-mixed"},
        {"profiler": "simple", "gradient_clip_val": 1, "accumulate_grad_batches": 1000},
        {"devices": 2, "max_epochs": 10**6, "limit_train_batches": 10**6},  # how long and where is not rehearsed
    ],
)
def test_what_works_is_let_through(trainer):
    rehearse(resolved(**trainer), UnitKey(0, "mlp"))


@pytest.mark.parametrize(
    "trainer, words",
    [
        (callback("EarlyStopping", monitor="nothing"), "metric `nothing` which is not available"),
        (callback("ModelCheckpoint", monitor="nothing"), "could not find the monitored key"),
        (callback("BatchSizeFinder"), "batch_size"),
        ({"precision": "16-true"}, "in 16 bits, in which small steps are lost; use 16-mixed or 32-true"),
        ({"precision": "bf16-true"}, "use bf16-mixed or 32-true"),
        (
            {
                "plugins": [
                    {"class_path": "lightning.pytorch.plugins.HalfPrecision", "init_args": {"precision": "16-true"}}
                ]
            },
            "use 16-mixed or 32-true",
        ),
    ],
)
def test_what_does_not_work_is_one_line(trainer, words):
    with pytest.raises(UserError, match=words) as caught:
        rehearse(resolved(**trainer), UnitKey(0, "heads"))
    assert "\n" not in str(caught.value)


def test_nothing_is_written_where_a_callback_wants_its_checkpoints(tmp_path):
    rehearse(resolved(**callback("ModelCheckpoint", dirpath=str(tmp_path), monitor="val/recall")), UnitKey(0, "mlp"))
    assert not list(tmp_path.iterdir())


def test_without_arguments_there_is_nothing_to_rehearse(monkeypatch):
    monkeypatch.setattr("dejavu_train.training.rehearsal.build_trainer", None)
    rehearse(resolved(), UnitKey(0, "mlp"))
    rehearse(resolved(devices=2, strategy="ddp", logger=False), UnitKey(0, "mlp"))
    with pytest.raises(TypeError):
        rehearse(
            dataclasses.replace(RunConfig(), trainer=resolved_arguments({"profiler": "simple"})), UnitKey(0, "mlp")
        )
