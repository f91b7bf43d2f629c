"""Trains the predictor of one (layer, target): reads shards, writes ``predictors/layer_XX/<target>/``.

    predictor.safetensors, predictor.json   the finished predictor; without both the job is open
    stage.json                              what decides what it is; with other keys it is trained anew
    config.yaml                             the resolved configuration it was trained with
    csv/version_N/metrics.csv               its curves, one version per attempt
    checkpoints/                            best.ckpt and last.ckpt, gone when the job is finished

Jobs are independent. With one device a job runs in this process. With several it runs in a child process of its own,
whose command is ``run.job_process``. For under DDP every rank executes the script again, and nothing but the
fit may happen there.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pickle
import shutil
import sys
import time
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import yaml
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import save_file
from torch import Tensor, nn

from dejavu_train.data.datamodule import ShardDataModule
from dejavu_train.data.shard_reader import ShardReader, active_densities
from dejavu_train.data.shards import ActivationManifest, RecordedWeights
from dejavu_train.families import Site, Target, UnitKey
from dejavu_train.ground import signals
from dejavu_train.ground.children import run_child
from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.ground.files import read_sealed, remove_leftovers, replacing, sha256_file, write_sealed, write_text
from dejavu_train.ground.locks import ours, tried
from dejavu_train.predictors.checkpoint import check_predictor
from dejavu_train.training.build import make_predictor
from dejavu_train.training.callbacks import Progress, SaveLast
from dejavu_train.training.config import RunConfig
from dejavu_train.training.lit_predictor import LitPredictor
from dejavu_train.training.loggers import as_list
from dejavu_train.training.stages import Stage
from dejavu_train.training.trainer import build_trainer, count_devices, count_epochs, quiet, start_device
from dejavu_train.training.verdict import metrics_line, most_recall, predictor_verdict

logger = logging.getLogger(__name__)

SAVE_SECONDS = 60.0
COVARIANCE_ROWS = 16_384


def job_folder(output: str | Path, job: UnitKey) -> Path:
    return Path(output) / "predictors" / f"layer_{job[0]:02d}" / job[1]


def has_predictor(output: str | Path, job: UnitKey) -> bool:
    """Whether the job's folder holds a finished predictor, of whatever settings."""
    folder = job_folder(output, job)
    return (folder / "predictor.json").is_file() and (folder / "predictor.safetensors").is_file()


def is_finished(output: str | Path, job: UnitKey, stage: Stage) -> bool:
    """Whether the job's folder holds the finished predictor of this stage, as it was written."""
    folder = job_folder(output, job)
    if not has_predictor(output, job) or not stage.matches(stored_stage(folder)):
        return False
    try:
        check_predictor(folder)
    except UserError as error:
        logger.info("layer %d %s is trained anew: %s", *job, error)
        return False
    return True


def stored_stage(folder: Path) -> Any:
    """Content of an artefact's ``stage.json``. None where there is none."""
    path = folder / "stage.json"
    return read_sealed(path, "the description of a stage") if path.is_file() else None


def begin_stage(folder: Path, stage: Stage, density: float | None) -> None:
    """Note the stage and the density that is trained for in the folder. What another stage left there goes first."""
    before = stored_stage(folder)
    if stage.matches(before):
        return
    for path in folder.iterdir():
        if path.name != ".holders":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_sealed(folder / "stage.json", stage.to_json() | {"density": density})


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Hold the job's folder for the duration, or yield False where another process holds it."""
    with tried(folder / ".holders", uuid.uuid4().hex) as other:
        yield other is None


def run_job(config: RunConfig, job: UnitKey, title: str, stage: Stage) -> bool:
    """Train one predictor to its end, from its last checkpoint if there is one of the same ``stage``.

    Returns: False if another process is at it.

    Raises:
        UserError: shards or trainer arguments that are wrong.
    """
    folder = job_folder(config.output, job)
    with claimed(folder) as free:
        if not free:
            return False
        if is_finished(config.output, job, stage):
            return True
        begin_stage(folder, stage, config.predictor(job[1]).density)
        remove_leftovers(folder)
        write_text(folder / "config.yaml", yaml.safe_dump(config.to_json(), sort_keys=False))
        if count_devices(config.trainer) == 1:
            fit(config, job, title)
        else:
            command = [
                sys.executable,
                "-m",
                "dejavu_train.run.job_process",
                str(folder / "config.yaml"),
                str(job[0]),
                job[1],
                title,
                json.dumps(ours()),
            ]
            root = str(Path(__file__).resolve().parents[2])  # wherever train.py was called from
            paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            run_child(command, os.environ | {"PYTHONPATH": paths})
    return True


def deployed_density(config: RunConfig, job: UnitKey, activations: Path) -> float:
    """The density at which this predictor will be used, as far as it is known before calibration."""
    layer, target = job
    section = config.predictor(target)
    density = section.density
    if density is None:
        density = config.calibrate.mlp_density if target == Target.MLP else config.calibrate.head_density
    if target == Target.HEADS or density == 1.0:
        return density
    active = active_densities(activations)
    return min(1.0, density * active[layer] * len(active) / max(sum(active.values()), 1e-12))


def second_moments(
    site: ShardReader, name: str, own: ShardReader | None = None, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Mean of x x' (d, d) over a site's first rows x. With ``own`` also that of y x', for the same rows y of its
    mlp_in.

    Returns: both float64, computed on ``device``. Without ``own`` the second is the first.
    """
    width = site.manifest.shape.d_model
    totals = torch.zeros(2, width, width, dtype=torch.float64, device=device)
    seen = 0
    for start, stop in site.blocks():
        rows = site.read(name, start, stop).to(device).float()
        totals[0] += (rows.T @ rows).double()
        if own is not None:
            totals[1] += (own.read("mlp_in", start, stop).to(device).float().T @ rows).double()
        seen += len(rows)
        if seen >= COVARIANCE_ROWS:
            break
    return totals[0] / seen, totals[0 if own is None else 1] / seen


def init_module(module: LitPredictor, config: RunConfig, job: UnitKey, site: Site, shards: Path, stamp: str) -> None:
    """Set the first values of a predictor, from its layer's weights (of a hash) and the first rows of its site."""
    layer, target = job
    section = config.predictor(target)
    device = start_device(config.trainer)
    weights = RecordedWeights.load(shards, layer, stamp).to(device)
    covariance = site_to_mlp_in = None
    if section.init == "whitened_svd" and section.predictor is None:
        ahead = None if site == UnitKey(layer, Target.MLP).site else ShardReader(shards, layer, "train")
        covariance, cross = second_moments(ShardReader(shards, site.layer, "train"), site.input, ahead, device)
        if ahead is not None:
            # What the MLP reads is not seen yet; the best linear guess of it from the site stands in.
            ridge = torch.eye(len(cross), dtype=cross.dtype, device=device) * covariance.trace() / len(cross) * 1e-4
            site_to_mlp_in = torch.linalg.solve(covariance + ridge, cross, left=False)
    module.init_predictor(section.init, weights, covariance, site_to_mlp_in)


def fit(config: RunConfig, job: UnitKey, title: str) -> None:
    """Train, score the best checkpoint and export it. Every rank of a DDP run comes through here."""
    layer, target = job
    activations, folder = Path(config.output) / "activations", job_folder(config.output, job)
    section = config.predictor(target)
    manifest = ActivationManifest.load(activations)
    torch.manual_seed(config.seed * 1000 + 2 * layer + (target == Target.MLP))
    site = section.site(job, manifest.shape)
    data = ShardDataModule(activations, job, site, config.data, config.seed)
    density = deployed_density(config, job, activations)
    predictor = make_predictor(config, job, data.d_in, data.n_units)
    module = LitPredictor(
        target,
        predictor,
        data.n_units,
        density,
        section.loss,
        section.learning_rate,
        section.weight_decay,
    )
    init_module(module, config, job, site, activations, manifest.weight_hash)

    monitor = "val/retained_mass"  # at the deployed density
    best = ModelCheckpoint(
        folder / "checkpoints", "best", monitor, mode="max", save_weights_only=True, enable_version_counter=False
    )
    callbacks = [Progress(title)]
    if section.patience:
        callbacks.append(EarlyStopping(monitor, mode="max", patience=section.patience, min_delta=1e-5))
    last = folder / "checkpoints" / "last.ckpt"
    callbacks += [best, SaveLast(last, SAVE_SECONDS)]
    trainer = build_trainer(config, job, folder, callbacks)
    for each in trainer.loggers:
        each.log_hyperparams(dataclasses.asdict(section) | {"target": str(target), "density": density})
    began = time.perf_counter()
    with quiet():
        if section.steps == 0:  # the first values are the predictor
            trainer.validate(module, datamodule=data, verbose=False)
        else:
            module.epochs = count_epochs(trainer, data.train_batches(trainer.world_size))
            with signals.deferred():
                _fit_from(trainer, module, data, last)
            path = best.best_model_path
            if not path or not Path(path).is_file():
                logger.info("%s: ended before its first validation; the values of its last step are kept", title)
                path = None
            elif as_list(config.trainer.get("callbacks")):  # one may have changed the values when training ended
                trainer.validate(module, datamodule=data, verbose=False)
                path = None if trainer.callback_metrics[monitor] > best.best_model_score else path
            trainer.validate(module, datamodule=data, ckpt_path=path, weights_only=True, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    if trainer.is_global_zero:
        metrics |= {
            "steps": float(trainer.global_step),
            "seconds": time.perf_counter() - began,
        }
        low_rank = config.predictor(target).predictor is None
        verdict, numbers = predictor_verdict(metrics, target, low_rank), metrics_line(metrics)
        logger.info("%s: %s; %s, %d steps in %.0f s", title, verdict, numbers, metrics["steps"], metrics["seconds"])
        export(folder, config, job, site, predictor, (data.d_in, data.n_units), metrics)


def _fit_from(trainer: lightning.Trainer, module: LitPredictor, data: ShardDataModule, last: Path) -> None:
    resume = last if last.is_file() else None
    try:
        trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    except (MisconfigurationException, ValueError) as error:
        if isinstance(error, ValueError) and "`val_check_interval`" not in str(error):
            raise
        raise UserError(f"the trainer's arguments do not fit ({first_line(error)}); see --trainer.help") from None
    except RuntimeError as error:
        if "DataLoader" in str(error):  # a process of it was killed, or gave no batch
            raise UserError(
                f"the loader processes gave no batch ({first_line(error)}); set data.num_workers 0, or give more memory"
                " and shared memory (docker run --shm-size 1g)"
            ) from None
        _refuse_resuming(last, resume is not None and trainer.global_step == 0, error)
        raise
    except (KeyError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        _refuse_resuming(last, resume is not None and trainer.global_step == 0, error)
        raise


def _refuse_resuming(last: Path, is_resuming: bool, error: Exception) -> None:
    """Raise :class:`UserError` for an error that came while a checkpoint was read."""
    if is_resuming:
        raise UserError(f"cannot resume from {last} ({type(error).__name__}); delete it to start anew") from None


def export(
    folder: Path,
    config: RunConfig,
    job: UnitKey,
    site: Site,
    predictor: nn.Module,
    sizes: tuple[int, int],
    metrics: dict[str, float],
) -> None:
    """Write the finished predictor (``sizes``: d_in, n_out), the metadata last, and drop its checkpoints."""
    layer, target = job
    section = config.predictor(target)
    tensors = {  # copies: a module may hold one tensor under two names
        name: tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in predictor.state_dict().items()
    }
    with replacing(folder / "predictor.safetensors") as path:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    metadata = {
        "layer": layer,
        "target": target,
        "site": site.input,
        "site_layer": site.layer,
        "d_in": sizes[0],
        "n_out": sizes[1],
        **section.describe(layer),
        "loss": section.loss,
        "sha256": sha256_file(folder / "predictor.safetensors"),
        "metrics": {name.removeprefix("val/"): value for name, value in metrics.items()},
    }
    write_sealed(folder / "predictor.json", metadata)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def summary_rows(output: str | Path, jobs: Sequence[UnitKey]) -> tuple[list[str], list[list[Any]]]:
    """Columns and one row per finished predictor, for tables."""
    headings = {
        "active_density": "active", "density": "density", "recall": "recall", "at_most": "at most",
        "recall_at_active_density": "recall at active", "precision": "precision", "retained_mass": "retained mass",
        "steps": "steps", "seconds": "seconds",
    }  # fmt: skip
    rows = []
    for job in jobs:
        if has_predictor(output, job):
            metadata = read_sealed(job_folder(output, job) / "predictor.json", "a finished predictor")
            metrics = dict(metadata["metrics"])
            metrics["at_most"] = most_recall(metrics["density"], metrics["active_density"])
            rows.append([job.layer, str(job.target), metadata["rank"], *(metrics[name] for name in headings)])
    return ["layer", "target", "rank", *headings.values()], rows
