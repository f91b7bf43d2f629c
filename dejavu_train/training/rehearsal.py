"""A fit of two epochs on random rows, before any work: what a callback, a plugin or a precision refuses is known then.

Callbacks look at metrics and at the trainer when a fit has begun, so only a fit shows whether they can work.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from dejavu_train.data.shards import RecordedWeights, pack_bits
from dejavu_train.families import Target, UnitKey
from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.predictors.low_rank import LowRankPredictor
from dejavu_train.training.callbacks import AtomicCheckpointIO
from dejavu_train.training.config import RunConfig
from dejavu_train.training.lit_predictor import LitPredictor
from dejavu_train.training.trainer import build_trainer, count_epochs, default_arguments, quiet

_WIDTH, _UNITS, _ROWS, _BATCHES = 16, 32, 8, 2
# What decides how long a fit takes and where; all else is rehearsed.
_LENGTH = (
    "max_epochs", "min_epochs", "max_time", "limit_train_batches", "val_check_interval", "check_val_every_n_epoch",
    "accumulate_grad_batches", "log_every_n_steps", "devices", "strategy", "logger", "enable_progress_bar",
    "use_distributed_sampler",
)  # fmt: skip


class _CheckpointsWithin(AtomicCheckpointIO):
    """Nothing is written outside a folder, wherever a callback wants its checkpoints."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if Path(path).is_relative_to(self.folder):
            super().save_checkpoint(checkpoint, path, storage_options)

    def remove_checkpoint(self, path: Any) -> None:
        if Path(path).is_relative_to(self.folder):
            super().remove_checkpoint(path)


def rehearse(config: RunConfig, job: UnitKey) -> None:
    """Fit a small predictor as ``config.trainer`` says, where it says anything but how long and on which devices.

    Raises:
        UserError: the fit does not work.
    """
    defaults = default_arguments()
    given = {name: value for name, value in config.trainer.items() if name not in _LENGTH}
    if all(value == defaults.get(name) for name, value in given.items() if name != "accelerator"):
        return
    mlp, heads = (dataclasses.replace(each, steps=2 * _BATCHES, validations=2) for each in (config.mlp, config.heads))
    with tempfile.TemporaryDirectory() as name, torch.random.fork_rng(devices=[]):
        small = dataclasses.replace(config, output=name, trainer=given, mlp=mlp, heads=heads)
        trainer = build_trainer(small, job, Path(name), [], _CheckpointsWithin(Path(name)))
        try:
            module = _module()
            module.epochs = count_epochs(trainer, _BATCHES)
            with quiet():
                trainer.fit(module, datamodule=_Rows())
        except UserError:
            raise
        except (MisconfigurationException, ModuleNotFoundError, RuntimeError, ValueError) as error:
            raise UserError(f"the trainer's arguments do not fit ({first_line(error)}); see --trainer.help") from None


def _module() -> LitPredictor:
    module = LitPredictor(Target.MLP, LowRankPredictor(_WIDTH, 4, _UNITS), _UNITS)
    weights = RecordedWeights(
        torch.randn(_UNITS, _WIDTH, dtype=torch.float32),
        torch.zeros(_UNITS, dtype=torch.float32),
        torch.ones(_UNITS, dtype=torch.float32),
        torch.zeros(2, 8, dtype=torch.float32),
    )
    module.init_predictor("random", weights)
    return module


class _Rows(lightning.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return _loader(_BATCHES)

    def val_dataloader(self) -> DataLoader[Any]:
        return _loader(1)


def _loader(batches: int) -> DataLoader[Any]:
    made: Any = [
        {
            "inputs": torch.randn(_ROWS, _WIDTH, dtype=torch.float32).half(),
            "active": pack_bits(torch.rand(_ROWS, _UNITS, dtype=torch.float32) < 0.3),
        }
        for _ in range(batches)
    ]
    return DataLoader(made, batch_size=None)
