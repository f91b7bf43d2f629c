"""Adds what ``infer.py`` measured to the experiment that made the bundle: perplexities, their increases, times.

They go to the experiment's CSV, and to the runs of TensorBoard and Weights & Biases that training logged to.
"""

import logging
from collections.abc import Mapping
from typing import Any

from dejavu_train.evaluation.html_report import start_wandb
from dejavu_train.ground.experiments import Record, offline_folder, say_offline
from dejavu_train.ground.machine import has_package

logger = logging.getLogger(__name__)


def numbers_of(found: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a ``results.json``, by name: of the dense model, the bundle as calibrated and at other densities."""
    numbers: dict[str, float] = {}
    for row in found["quality"]:
        dense = row["selection"] == "dense"
        if not dense and (row["selection"] != "predicted" or row["sparse_from"]):
            continue
        asked = f"mlp-{row['asked_mlp_density']:g}-heads-{row['asked_head_density']:g}"
        which = "dense" if dense else "calibrated" if row["as_calibrated"] else asked
        for name in ("perplexity", *(() if dense else ("increase", "increase_error", "mlp_bytes"))):
            if row[name] is not None:
                numbers[f"{name}/{row['text']}/{which}"] = row[name]
    for row in found["timing"]:
        numbers[f"ms_per_token/{row['backend']}"] = row["ms_per_token"]["p50"]
    return numbers


def attach(found: Mapping[str, Any], record: Record, wandb_too: bool = True) -> None:
    """Add the numbers of a ``results.json`` to an experiment.

    Args:
        wandb_too: False where whoever calls logs them there.
    """
    numbers = numbers_of(found)
    record.add((name, None, value) for name, value in numbers.items())
    said = [str(record.path.with_suffix(".csv"))]
    board, run = record.logger("tensorboard"), record.logger("wandb")
    if board is not None and has_package("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(board["folder"]) as writer:
            for name, value in numbers.items():
                writer.add_scalar(name, value)
        said.append(board["folder"])
    if run is not None and wandb_too and has_package("wandb"):
        with start_wandb(run["project"], record.path.parent.parent, run) as started:
            started.log(numbers)
            folder = offline_folder(started)
        say_offline(folder)
        said.append(f"the run {run['id']} of Weights & Biases")
    logger.info("added the numbers to %s", ", ".join(said))
