from pathlib import Path

import lightning
import pytest
import torch
from small_runs import activations

from dejavu_train.data.config import DataConfig
from dejavu_train.data.datamodule import ShardDataModule
from dejavu_train.families import Site, UnitKey
from dejavu_train.predictors.low_rank import LowRankPredictor
from dejavu_train.training.callbacks import AtomicCheckpointIO, Progress, SaveLast
from dejavu_train.training.lit_predictor import LitPredictor


@pytest.fixture
def fit(tiny_opt, text_file, tmp_path_factory):
    """Fit a heads predictor for eight steps with some callbacks. Returns the trainer."""

    def run(*watching):
        folder = activations(tiny_opt, text_file)
        data = ShardDataModule(folder, UnitKey(0, "heads"), Site(0, "attn_in"), DataConfig(batch_size=64), 0)
        module = LitPredictor("heads", LowRankPredictor(48, 4, 4), 4, density=0.5, loss="listwise")
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=8, val_check_interval=4, check_val_every_n_epoch=None, logger=False,
            enable_checkpointing=True, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            callbacks=list(watching), plugins=[AtomicCheckpointIO()],
            default_root_dir=tmp_path_factory.mktemp("trainer"),
        )  # fmt: skip
        trainer.fit(module, datamodule=data)
        return trainer

    return run


@pytest.mark.parametrize("seconds, saved_at", [(1e9, [5]), (0, [1, 2, 3, 5, 6, 7])])
def test_saves_behind_validations_and_when_time_has_passed(fit, tmp_path, monkeypatch, seconds, saved_at):
    """Validations are due at steps 4 and 8, from which a resumed fit would leave them out: it is saved behind them."""
    path = tmp_path / "checkpoints" / "last.ckpt"
    steps = []
    original = lightning.Trainer.save_checkpoint

    def save(self, where, *more, **options):
        if where == path:
            steps.append(self.global_step)
        original(self, where, *more, **options)

    monkeypatch.setattr(lightning.Trainer, "save_checkpoint", save)
    fit(SaveLast(path, seconds))
    assert steps == saved_at
    assert torch.load(path, weights_only=True)["global_step"] == saved_at[-1]


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)

    def killed(file, data):
        with file.open("wb") as half:
            half.write(data[: len(data) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    monkeypatch.undo()
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_terminal_gets_a_bar_and_a_file_no_line_for_a_validation(fit, capsys, caplog, monkeypatch):
    caplog.set_level("INFO", logger="dejavu_train")
    fit(Progress("[3/12] layer 2 heads"))
    assert not [record for record in caplog.records if "layer 2 heads" in record.message]
    capsys.readouterr()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    fit(Progress("[3/12] layer 2 heads"))
    shown = capsys.readouterr().err
    assert "[3/12] layer 2 heads" in shown and "8/8" in shown and "recall" in shown
    assert not [record for record in caplog.records if "layer 2 heads" in record.message]
