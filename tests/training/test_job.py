import dataclasses
import json

import lightning
import pytest
import torch
from small_runs import activations, flags

from dejavu_train.calibration.calibrate import read_predictor
from dejavu_train.families import UnitKey
from dejavu_train.ground.errors import UserError
from dejavu_train.run.command import parse_config
from dejavu_train.training.job import (
    claimed,
    deployed_density,
    fit,
    has_predictor,
    is_finished,
    job_folder,
    run_job,
    summary_rows,
)
from dejavu_train.training.stages import train_stage
from dejavu_train.training.trainer import resolved_arguments


@pytest.fixture
def config(tiny_opt, text_file, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "activations").symlink_to(activations(tiny_opt, text_file))

    def parse(*more):
        read = parse_config(flags(tiny_opt, text_file, tmp_path / "run", *more))
        return dataclasses.replace(read, trainer=resolved_arguments(read.trainer))

    return parse


def test_a_job_leaves_a_finished_predictor(config, tmp_path):
    run = config()
    stage = train_stage(run, "mlp")
    assert run_job(run, UnitKey(1, "mlp"), "layer 1 mlp", stage)
    folder = job_folder(run.output, UnitKey(1, "mlp"))
    assert is_finished(run.output, UnitKey(1, "mlp"), stage) and not (folder / "checkpoints").exists()
    stored = read_predictor(folder)
    assert (stored.metadata["site"], stored.metadata["site_layer"], stored.metadata["rank"]) == ("mlp_in", 1, 16)
    assert stored.predictor.down.shape == (16, 48) and stored.predictor.up.dtype == torch.float32
    metrics = stored.metadata["metrics"]
    assert metrics["retained_mass"] > 0.6
    assert "val/recall" in (folder / "csv" / "version_0" / "metrics.csv").read_text()
    columns, rows = summary_rows(run.output, [UnitKey(0, "mlp"), UnitKey(1, "mlp")])
    assert len(rows) == 1 and len(columns) == len(rows[0])
    written = (folder / "predictor.safetensors").stat().st_mtime_ns
    assert run_job(run, UnitKey(1, "mlp"), "again", stage)
    assert (folder / "predictor.safetensors").stat().st_mtime_ns == written
    other = config("--mlp.rank=8")
    assert run_job(other, UnitKey(1, "mlp"), "with another rank", train_stage(other, "mlp"))
    assert read_predictor(folder).metadata["rank"] == 8 and not is_finished(run.output, UnitKey(1, "mlp"), stage)


def test_a_damaged_checkpoint_is_named(config):
    run = config()
    path = job_folder(run.output, UnitKey(0, "mlp")) / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="last.ckpt"):
        fit(run, UnitKey(0, "mlp"), "layer 0 mlp")


def test_a_locked_job_is_left_alone(config):
    run = config()
    with claimed(job_folder(run.output, UnitKey(0, "mlp"))):
        assert not run_job(run, UnitKey(0, "mlp"), "layer 0 mlp", train_stage(run, "mlp"))
    assert not has_predictor(run.output, UnitKey(0, "mlp"))


def test_density_is_shared_out_by_true_density(config):
    run = config("--mlp.density=0.2")
    folder = job_folder(run.output, UnitKey(0, "mlp")).parents[2] / "activations"
    densities = [deployed_density(run, (layer, "mlp"), folder) for layer in (0, 1)]
    assert sum(densities) / 2 == pytest.approx(0.2) and densities[0] != densities[1]
    assert deployed_density(run, UnitKey(0, "heads"), folder) == 0.75


def test_extra_callbacks_and_look_ahead(config, tmp_path):
    callback = "lightning.pytorch.callbacks.LearningRateMonitor"
    run = config(f"--trainer.callbacks={callback}", "--mlp.lookahead=1", "--mlp.init=small", "--mlp.nonlinearity=relu")
    fit(run, UnitKey(1, "mlp"), "layer 1 mlp")
    metadata = json.loads((job_folder(run.output, UnitKey(1, "mlp")) / "predictor.json").read_text())
    assert (metadata["site"], metadata["site_layer"], metadata["nonlinearity"]) == ("attn_in", 1, "relu")
    assert "lr-AdamW" in (job_folder(run.output, UnitKey(1, "mlp")) / "csv" / "version_0" / "metrics.csv").read_text()


def test_weights_that_a_callback_leaves_at_the_end_are_taken_only_where_they_are_better(config, monkeypatch):
    """SWA leaves averages. This one leaves zeros, which are worse than the best that was validated."""

    class Ending(lightning.Callback):
        def on_train_end(self, trainer, module):
            with torch.no_grad():
                module.predictor.up.zero_()

    monkeypatch.setattr("dejavu_train.training.trainer._build", lambda entry: Ending() if entry == "it" else entry)
    run = config("--mlp.steps=20", "--mlp.validations=2")
    fit(dataclasses.replace(run, trainer=run.trainer | {"callbacks": ["it"]}), UnitKey(1, "mlp"), "layer 1 mlp")
    assert bool(read_predictor(job_folder(run.output, UnitKey(1, "mlp"))).predictor.up.any())


def test_a_fit_that_time_ends_before_a_validation_keeps_its_values(config, caplog):
    caplog.set_level("INFO")
    run = config("--trainer.max_time=00:00:00:00")
    fit(run, UnitKey(1, "mlp"), "layer 1 mlp")
    assert "ended before its first validation; the values of its last step are kept" in caplog.text
    metrics = read_predictor(job_folder(run.output, UnitKey(1, "mlp"))).metadata["metrics"]
    assert metrics["steps"] == 0 and 0 < metrics["recall"] <= 1


@pytest.mark.parametrize("said", [
    "DataLoader timed out after 300 seconds", "DataLoader worker (pid 7) is killed by signal: Bus error.",
])  # fmt: skip
def test_loader_processes_without_a_batch_are_one_line(config, monkeypatch, said):
    def lost(*_, **__):
        raise RuntimeError(said)

    monkeypatch.setattr(lightning.Trainer, "fit", lost)
    with pytest.raises(UserError, match=f"gave no batch .{said[:17]}.*set data.num_workers 0"):
        fit(config(), UnitKey(0, "mlp"), "layer 0 mlp")
