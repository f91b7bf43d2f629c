import json
import os

import lightning
import pytest
import torch
from small_runs import activations, flags

from dejavu_train.calibrate import read_predictor
from dejavu_train.cli import parse_config
from dejavu_train.errors import UserError
from dejavu_train.jobs import (
    build_loggers,
    build_trainer,
    claimed,
    count_devices,
    deployed_density,
    fit,
    is_finished,
    job_folder,
    run_job,
    summary_rows,
    use_wandb_offline_without_key,
)


@pytest.fixture
def config(tiny_opt, text_file, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "activations").symlink_to(activations(tiny_opt, text_file))

    def parse(*more):
        return parse_config(flags(tiny_opt, text_file, tmp_path / "run", *more))

    return parse


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


def test_a_job_leaves_a_finished_predictor(config, tmp_path):
    run = config()
    assert run_job(run, (1, "mlp"), "layer 1 mlp")
    folder = job_folder(run.output, (1, "mlp"))
    assert is_finished(run.output, (1, "mlp")) and not (folder / "checkpoints").exists()
    stored = read_predictor(folder)
    assert (stored.facts["site"], stored.facts["site_layer"], stored.facts["rank"]) == ("mlp_in", 1, 16)
    assert stored.predictor.down.shape == (16, 48) and stored.predictor.up.dtype == torch.float32
    metrics = stored.facts["metrics"]
    assert metrics["retained_mass"] > 0.6 and metrics["loader_rows_per_s"] > metrics["step_rows_per_s"] > 0
    assert "val/recall" in (folder / "csv" / "version_0" / "metrics.csv").read_text()
    columns, rows = summary_rows(run.output, [(0, "mlp"), (1, "mlp")])
    assert len(rows) == 1 and len(columns) == len(rows[0])
    written = (folder / "predictor.safetensors").stat().st_mtime_ns
    assert run_job(run, (1, "mlp"), "again")
    assert (folder / "predictor.safetensors").stat().st_mtime_ns == written


def test_resuming_goes_on_where_it_stopped(config, tmp_path, monkeypatch):
    """Stopped after 30 of 80 steps, the next attempt starts from the checkpoint at step 20."""
    run = config()
    seen = []

    class Stop(Exception):
        pass

    from dejavu_train.lit_predictor import LitPredictor

    original = LitPredictor.training_step

    def step(self, raw, index):
        seen.append(self.trainer.global_step)
        if len(seen) == 31:
            raise Stop
        return original(self, raw, index)

    monkeypatch.setattr(LitPredictor, "training_step", step)
    with pytest.raises(Stop):
        fit(run, (0, "mlp"), "layer 0 mlp")
    assert seen[-1] == 30 and not is_finished(run.output, (0, "mlp"))
    checkpoint = torch.load(job_folder(run.output, (0, "mlp")) / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 20
    fit(run, (0, "mlp"), "layer 0 mlp")
    assert seen[31] == 20 and seen[-1] == 79 and is_finished(run.output, (0, "mlp"))


def test_a_damaged_checkpoint_is_named(config):
    run = config()
    path = job_folder(run.output, (0, "mlp")) / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="last.ckpt"):
        fit(run, (0, "mlp"), "layer 0 mlp")


def test_a_lock_is_held_by_one(tmp_path):
    with claimed(tmp_path) as first, claimed(tmp_path) as second:
        assert first and not second
    with claimed(tmp_path) as again:
        assert again


def test_a_locked_job_is_left_alone(config):
    run = config()
    with claimed(job_folder(run.output, (0, "mlp"))):
        assert not run_job(run, (0, "mlp"), "layer 0 mlp")
    assert not is_finished(run.output, (0, "mlp"))


def test_density_is_shared_out_by_true_density(config):
    run = config("--mlp.density=0.2")
    folder = job_folder(run.output, (0, "mlp")).parents[2] / "activations"
    densities = [deployed_density(run, (layer, "mlp"), folder) for layer in (0, 1)]
    assert sum(densities) / 2 == pytest.approx(0.2) and densities[0] != densities[1]
    assert deployed_density(run, (0, "heads"), folder) == 0.75
    assert deployed_density(config("--mlp.share_density=false"), (0, "mlp"), folder) == 0.4


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
    assert made["group"] == f"run-{run.identity()[:8]}" and made["id"] == f"{made['group']}-layer-00-mlp"


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


def test_extra_callbacks_and_look_ahead(config, tmp_path):
    callback = "lightning.pytorch.callbacks.LearningRateMonitor"
    run = config(f"--trainer.callbacks={callback}", "--mlp.lookahead=1", "--mlp.start=small", "--mlp.nonlinearity=relu")
    fit(run, (1, "mlp"), "layer 1 mlp")
    facts = json.loads((job_folder(run.output, (1, "mlp")) / "predictor.json").read_text())
    assert (facts["site"], facts["site_layer"], facts["nonlinearity"]) == ("attn_in", 1, "relu")
    assert "lr-AdamW" in (job_folder(run.output, (1, "mlp")) / "csv" / "version_0" / "metrics.csv").read_text()
