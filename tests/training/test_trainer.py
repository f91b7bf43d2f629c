import dataclasses
import inspect
import json
import os
import re

import lightning
import pytest
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins.environments import MPIEnvironment
from small_runs import flags

from dejavu_train.families import UnitKey
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.experiments import clean_id, use_wandb_offline_without_key
from dejavu_train.run.command import main, parse_config
from dejavu_train.training import rehearsal
from dejavu_train.training.loggers import build_loggers
from dejavu_train.training.stages import calibrate_stage, trained_identity
from dejavu_train.training.trainer import (
    MPI,
    REFUSED,
    build_trainer,
    count_devices,
    count_epochs,
    quiet,
    resolved_arguments,
)


@pytest.fixture
def config(tiny_opt, text_file, tmp_path):
    return lambda *more: parse_config(flags(tiny_opt, text_file, tmp_path / "run", *more))


@pytest.mark.parametrize(
    "trainer, count",
    [
        ({"devices": 1}, 1),
        ({"devices": "2"}, 2),
        ({"devices": [0, 3]}, 2),
        ({"devices": "0,1,2"}, 3),
        ({"devices": "auto", "accelerator": "cpu"}, 1),
        ({}, 1),
    ],
)
def test_count_devices(trainer, count):
    assert count_devices(trainer) == count


def test_loggers_know_run_group_and_folder(config, tmp_path, monkeypatch):
    made = {}

    class WandbLogger(lightning.pytorch.loggers.CSVLogger):
        def __init__(self, name=None, save_dir=".", id=None, project="lightning_logs", **kwargs):
            made.update(name=name, save_dir=save_dir, id=id, project=project, **kwargs)
            super().__init__(save_dir)

    monkeypatch.setattr("lightning.pytorch.loggers.WandbLogger", WandbLogger)
    run = config()
    path = "lightning.pytorch.loggers.WandbLogger"
    wanted = [{"class_path": path, "init_args": {"project": "mine", "name": None, "save_dir": "."}}]
    assert len(build_loggers(with_logger(run, wanted))) == 1
    assert made["name"] == "run" and made["save_dir"] == run.output and made["project"] == "mine"
    assert made["group"] == f"run-{trained_identity(run)[:8]}"
    assert made["id"] == f"run-{calibrate_stage(run).identity[:8]}"
    build_loggers(dataclasses.replace(with_logger(run, wanted), bundle="at-20"))
    assert made["name"] == "run/at-20"


WANDB = "lightning.pytorch.loggers.WandbLogger"


def with_logger(run, entry):
    entries = resolved_arguments({"logger": entry})["logger"]
    return dataclasses.replace(run, trainer=run.trainer | {"logger": entries})


def wandb_id(run, **init_args):
    return build_loggers(with_logger(run, {"class_path": WANDB, "init_args": init_args}))[0]._wandb_init["id"]


def test_ids_of_wandb_are_clean_and_differ(config, tmp_path):
    wandb = pytest.importorskip("wandb")
    folders = [tmp_path / name for name in ("50%_a#b", "50#_a%b", " x: y? ", "é" * 120, "a" * 250)]
    ids = [wandb_id(dataclasses.replace(config(), output=str(folder))) for folder in folders]
    ids += [wandb_id(config(*more)) for more in ((), ("--mlp.rank=8",), ("--calibrate.mlp_density=0.3",))]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", each) for each in ids)
    for each in ids:
        wandb.Settings(run_id=each)
    assert clean_id("run-12-layer-00-mlp") == "run-12-layer-00-mlp"
    assert wandb_id(config(), id="mine") == "mine" == wandb_id(config(), version="mine")


def test_a_trial_of_a_sweep_is_one_run(config, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_RUN_ID", "r1")
    assert wandb_id(config()) != "r1"
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    assert wandb_id(config()) == "r1"


@pytest.mark.parametrize(
    "init_args, words",
    [({"project": "a/b"}, "wandb refuses.*project"), ({"projct": "a"}, "no argument projct"), ({"mode": "x"}, "mode")],
)
def test_what_wandb_refuses_is_known_before(config, tmp_path, init_args, words):
    pytest.importorskip("wandb")
    with pytest.raises(UserError, match=words):
        wandb_id(config(), **init_args)


def test_online_without_a_key_is_known_before(config, tmp_path, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = with_logger(config(), "WandbLogger")
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(UserError, match="is to be online and has no key; type wandb login, or set WANDB_MODE=offline"):
        build_loggers(run)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert len(build_loggers(run)) == 1


def test_nobody_has_a_home(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path))  # a folder: it cannot be read
    use_wandb_offline_without_key()
    assert os.environ.pop("WANDB_MODE") == "offline"


def test_any_lightning_logger(config, tmp_path):
    run = with_logger(config(), {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path)}})
    trainer = build_trainer(run, UnitKey(0, "mlp"), tmp_path, [])
    assert len(trainer.loggers) == 1 and not build_loggers(run)  # CSV is there anyway
    assert build_trainer(config("--trainer.logger=false"), UnitKey(0, "mlp"), tmp_path, []).loggers


def test_no_key_means_offline_and_a_key_does_not(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    use_wandb_offline_without_key()
    assert "WANDB_MODE" not in os.environ
    monkeypatch.delenv("WANDB_API_KEY")
    use_wandb_offline_without_key()
    assert os.environ.pop("WANDB_MODE") == "offline"


def test_steps_end_on_a_validation_and_epochs_are_obeyed(config, tmp_path):
    trainer = build_trainer(config("--mlp.steps=83"), UnitKey(0, "mlp"), tmp_path, [])
    assert trainer.max_steps == 80 and trainer.val_check_interval == 20
    trainer = build_trainer(config("--trainer.max_epochs=3"), UnitKey(0, "mlp"), tmp_path, [])
    assert trainer.max_epochs == 3 and trainer.max_steps == -1


class Rows(lightning.LightningDataModule):
    """Seven batches an epoch, so that its last step has fewer than the others."""

    def train_dataloader(self):
        return rehearsal._loader(7)

    def val_dataloader(self):
        return rehearsal._loader(1)


class Validated(lightning.Callback):
    def __init__(self):
        self.steps = []

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


def validated(config, folder, *more, **stop):
    """The steps behind which a fit of 24 steps is validated."""
    seen = Validated()
    callbacks = [seen, *([EarlyStopping("val/recall", mode="max", min_delta=9, **stop)] if stop else [])]
    run = config("--mlp.steps=24", "--mlp.validations=4", "--trainer.accelerator=cpu", *more)
    trainer = build_trainer(run, UnitKey(0, "mlp"), folder, callbacks)
    module = rehearsal._module()
    module.epochs = count_epochs(trainer, 7)
    with quiet():
        trainer.fit(module, datamodule=Rows())
    return seen.steps


SCHEDULER = "lightning.pytorch.callbacks.GradientAccumulationScheduler"
SCHEDULING = f"--trainer.callbacks=[{{class_path: {SCHEDULER}, init_args: {{scheduling: {{0: 3, 2: 2}}}}}}]"


@pytest.mark.parametrize("more", [
    (), ("--trainer.accumulate_grad_batches=2",), ("--trainer.accumulate_grad_batches=3",), (SCHEDULING,),
    ("--trainer.limit_train_batches=5", "--trainer.accumulate_grad_batches=4"), ("--trainer.max_epochs=-1",),
    ("--trainer.accumulate_grad_batches=30",),
])  # fmt: skip
def test_validations_are_counted_in_steps(config, tmp_path, more):
    assert validated(config, tmp_path, *more) == [6, 12, 18, 24]


def test_patience_is_counted_in_validations_of_steps(config, tmp_path):
    plain = validated(config, tmp_path, patience=2)
    assert plain == validated(config, tmp_path, "--trainer.accumulate_grad_batches=3", patience=2) == [6, 12, 18]


def test_what_says_when_to_validate_is_obeyed(config, tmp_path):
    assert validated(config, tmp_path, "--trainer.check_val_every_n_epoch=2") == [14]  # of 24 steps, seven an epoch
    assert validated(config, tmp_path, "--trainer.val_check_interval=4") == [4, 11, 18]  # batches, in each epoch


def test_epochs_in_place_of_steps_are_said(caplog):
    caplog.set_level("INFO", logger="dejavu_train")
    resolved_arguments({"devices": 1})
    assert not caplog.text
    resolved_arguments({"max_epochs": 3})
    assert "mlp.steps and heads.steps do not" in caplog.text


SAMPLES = {
    "accelerator": "cpu", "strategy": "auto", "devices": 2, "precision": "bf16-mixed", "logger": False,
    "callbacks": ["lightning.pytorch.callbacks.Timer"], "max_epochs": 3, "min_epochs": 2, "max_time": "00:00:10:00",
    "limit_train_batches": 3, "val_check_interval": 5, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 1,
    "log_every_n_steps": 7, "enable_progress_bar": False, "enable_model_summary": True, "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value", "deterministic": True, "benchmark": True,
    "inference_mode": False, "profiler": "simple", "detect_anomaly": True, "sync_batchnorm": True,
    "plugins": ["lightning.pytorch.plugins.io.TorchCheckpointIO"], "enable_autolog_hparams": False,
    "model_registry": "mine",
}  # fmt: skip


def test_every_argument_of_the_trainer_is_a_flag_or_refused():
    arguments = list(inspect.signature(lightning.Trainer.__init__).parameters)[1:]
    assert sorted(arguments) == sorted([*SAMPLES, *REFUSED])
    flags = [f"--trainer.{name}={json.dumps(value)}" for name, value in SAMPLES.items()]
    found = resolved_arguments(parse_config(flags).trainer)
    assert list(found["callbacks"][0]) == ["class_path", "init_args"] and found["logger"] is None
    for name in SAMPLES.keys() - {"callbacks", "plugins", "logger"}:
        assert found[name] == SAMPLES[name], name
    assert resolved_arguments(found) == found
    resolved_arguments(found)["callbacks"].clear()  # a parser is kept, its values are not
    assert resolved_arguments(found) == found
    for name in REFUSED:
        value = "elsewhere" if name == "default_root_dir" else 3
        with pytest.raises(UserError, match=f"trainer.{name} has no use here: "):
            resolved_arguments(parse_config([f"--trainer.{name}={value}"]).trainer)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("max_epoch=3", "no argument trainer.max_epoch; did you mean trainer.max_epochs?"),
        ("precision=7", "trainer.precision cannot be 7"),
        ("max_epochs=many", "trainer.max_epochs cannot be many"),
        ("callbacks=[Nope]", "Nope"),
        ("callbacks=[{class_path: EarlyStopping}]", "monitor"),
        ("limit_train_batches=0", "trainer.limit_train_batches must lie above 0, got 0; predictors with their first"),
        ("max_epochs=0", "trainer.max_epochs must lie above 0, got 0; predictors with their first values alone"),
        ("max_epochs=-2", "trainer.max_epochs must lie above 0, got -2"),
        ("val_check_interval=0", "trainer.val_check_interval must lie above 0, got 0"),
        ("check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch must lie above 0, got 0"),
        ("logger=3", "trainer.logger must name classes by class_path, got 3"),
    ],
)
def test_mistakes_in_the_trainers_arguments_are_one_line(flag, words):
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        resolved_arguments(parse_config([f"--trainer.{flag}"]).trainer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("nowhere.Logger", "there is no nowhere.Logger"),
        ("NoLogger", "there is no lightning.pytorch.loggers.NoLogger"),
        ({"class_path": "MLFlowLogger", "init_args": {"nme": 1}}, "MLFlowLogger has no argument nme"),
    ],
)
def test_a_logger_that_cannot_be_made_is_named(config, tmp_path, entry, words):
    with pytest.raises(UserError, match=words):
        build_loggers(with_logger(config(), entry))


def test_help_lists_the_trainers_arguments(capsys):
    main(["--trainer.help"])
    printed = capsys.readouterr().out
    assert "--trainer.max_time" in printed and "--trainer.max_steps: set mlp.steps" in printed


def test_no_trainer_asks_mpi_that_nobody_has_started(config, tmp_path, monkeypatch):
    """Where mpi4py is installed and MPI cannot start, asking it ends the process."""
    asked: list[str] = []
    monkeypatch.setattr(MPIEnvironment, "detect", lambda: asked.append("mpi") or False)
    for name in MPI:
        monkeypatch.delenv(name, raising=False)
    trainer = build_trainer(config(), UnitKey(0, "mlp"), tmp_path, [])
    assert not asked and trainer.world_size == 1
    build_trainer(
        config("--trainer.plugins={class_path: lightning.pytorch.plugins.environments.LightningEnvironment}"),
        UnitKey(0, "mlp"),
        tmp_path,
        [],
    )
    assert not asked, "an environment of the user's own stays the only one"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    build_trainer(config(), UnitKey(0, "mlp"), tmp_path, [])
    assert asked
