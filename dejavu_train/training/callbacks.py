"""Watchers of a training run: resumable checkpoints and progress."""

import logging
import signal
import time
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from dejavu_train.ground import progress, signals
from dejavu_train.ground.files import check_zip
from dejavu_train.training.state import save_state
from dejavu_train.training.verdict import metrics_line

logger = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints are written aside and renamed: a kill while saving leaves the one before."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save_state(path, checkpoint)

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        check_zip(path)
        return super().load_checkpoint(path, *arguments, **options)


class SaveLast(Checkpoint):
    """Saves ``path`` after every validation and epoch, and whenever ``seconds`` have passed. When a signal asks to end,
    saves and ends the fit.

    It is saved behind the next step at which neither a validation is due nor an epoch ends. From there Lightning goes
    on as if nothing had happened. A fit that was killed and goes on ends with the very same predictor.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__()
        self.path, self.seconds = path, seconds
        self._saved_at = 0.0
        self._due = False

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._saved_at = time.monotonic()
        self._due = False
        signals.hear()  # Lightning has taken SIGTERM, after which it would end as if all were done

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        due = self._due or time.monotonic() - self._saved_at > self.seconds
        stop = signals.pending()
        if trainer.world_size > 1:  # all ranks must take part in a save
            together = trainer.global_step % 20 == 0
            due = together and bool(trainer.strategy.reduce_boolean_decision(due, all=False))
            stop = together and bool(trainer.strategy.reduce_boolean_decision(stop, all=False))
        if (due or stop) and _resumes_here(trainer):
            trainer.save_checkpoint(self.path)
            self._saved_at, self._due = time.monotonic(), False
        if stop:
            signals.stop_if_pending()
            raise signals.Interrupted(signal.SIGTERM)  # another rank was asked

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._due = self._due or (trainer.state.fn == "fit" and not trainer.sanity_checking)

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._due = self._due or time.monotonic() - self._saved_at > 1


def _resumes_here(trainer: lightning.Trainer) -> bool:
    """Whether a checkpoint behind this step is resumed exactly: a validation that is due now would be left out."""
    epoch = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    last = epoch.batch_progress.current.ready >= trainer.num_training_batches
    accumulating = epoch.batch_progress.current.ready % trainer.accumulate_grad_batches != 0
    return not (last or accumulating or fetcher is None or epoch._should_check_val_fx(fetcher))


class Progress(Callback):
    """Shows one job to a person: a bar of its steps with the latest metrics, or now and then a line of both."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._bar: Any = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.is_global_zero:
            steps, done = int(trainer.estimated_stepping_batches), trainer.global_step
            self._bar = progress.Progress(self.title, steps, "step", done)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is not None:
            self._bar.update(trainer.global_step - self._bar.done)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        if self._bar is not None:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self._bar.describe(self.title, metrics_line(metrics))

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self._bar is not None:
            self._bar.close()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, pl_module)
