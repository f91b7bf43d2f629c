import os

import lightning
import pytest
from small_runs import flags

from dejavu_train.cli import parse_config
from dejavu_train.stages import trained_identity
from dejavu_train.training.trainer import build_loggers, build_trainer, count_devices, use_wandb_offline_without_key


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
        ({"devices": 1, "num_nodes": 2}, 2),
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
    loggers = build_loggers(run, wanted, tmp_path, "layer-00-mlp")
    assert type(loggers[0]).__name__ == "CSVLogger" and len(loggers) == 2
    assert made["name"] == "layer-00-mlp" and made["save_dir"] == run.output and made["project"] == "mine"
    assert made["group"] == f"run-{trained_identity(run)[:8]}" and made["id"] == f"{made['group']}-layer-00-mlp"


def test_any_lightning_logger(config, tmp_path):
    run = config("--trainer.logger=lightning.pytorch.loggers.CSVLogger", f"--trainer.logger.save_dir={tmp_path}")
    trainer = build_trainer(run, (0, "mlp"), tmp_path, [])
    assert len(trainer.loggers) == 1  # CSV is there anyway
    assert build_trainer(config("--trainer.logger=false"), (0, "mlp"), tmp_path, []).loggers


def test_no_key_means_offline_and_a_key_does_not(monkeypatch, tmp_path):
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    use_wandb_offline_without_key()
    assert "WANDB_MODE" not in os.environ
    monkeypatch.delenv("WANDB_API_KEY")
    use_wandb_offline_without_key()
    assert os.environ.pop("WANDB_MODE") == "offline"


def test_steps_end_on_a_validation_and_epochs_are_obeyed(config, tmp_path):
    trainer = build_trainer(config("--mlp.steps=83"), (0, "mlp"), tmp_path, [])
    assert trainer.max_steps == 80 and trainer.val_check_interval == 20
    trainer = build_trainer(config("--trainer.max_epochs=3"), (0, "mlp"), tmp_path, [])
    assert trainer.max_epochs == 3 and trainer.max_steps == -1
