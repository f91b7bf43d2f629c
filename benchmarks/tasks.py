"""Rows of downstream tasks: python -m benchmarks.tasks [engine] --config configs/eval/opt-mini.yaml

Takes the options of `python -m dejavu_train.extras.tasks`. Appends the rows with their conditions, as they come,
to tasks.csv in benchmarks/results (or in the folder that DEJAVU_RESULTS names). `engine` asks the same questions
of `mask` and of the backend that is named, and appends how far the log-likelihoods are apart to task_engine.csv.
`apart_beyond` is the goal of the dtype, beyond which a request counts as apart.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import append_row, device_name, five_digits, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.extras.tasks.config import TasksConfig
from dejavu_train.extras.tasks.model import DENSE, DejavuLM
from dejavu_train.extras.tasks.run import all_questions, asked_model, read_config, tasks, versions
from dejavu_train.extras.tasks.tasks import quiet
from dejavu_train.families import Target
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.models.opt import resolve_device

RESULTS = Path(os.environ.get("DEJAVU_RESULTS", "benchmarks/results"))
# Nats a token, beyond which two log-likelihoods count as apart: the goals; bfloat16 has none and rounds 8 times as
# coarsely as float16.
GOALS = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.16}


def conditions(config: Any) -> dict[str, Any]:
    """What every row of a run shares."""
    shared = {"model": Path(config.model).name, "limit": config.limit, "dtype": config.dtype}
    shared |= {"device": device_name(resolve_device(config.device)), **versions()}
    return shared | made_now("dejavu_train", "kernels")


def log_likelihoods(config: TasksConfig) -> list[Any]:
    """lm-eval's requests of all questions that ask for a log-likelihood."""
    instances = [i for part in all_questions(config) for task in part.tasks.values() for i in task.instances]
    return [instance for instance in instances if instance.request_type == "loglikelihood"]


def selection(config: TasksConfig) -> dict[str, Any]:
    """How the sparse model of a run selects."""
    used = Bundle.from_pretrained(config.bundle).at(config.mlp_density, config.head_density)
    about = {"backend": config.backend, "sparse_from": config.sparse_from}
    mlp, heads = used.mean_density(Target.MLP), used.mean_density(Target.HEADS)
    return about | {"asked_mlp_density": mlp, "asked_head_density": heads}


def against_mask(config: TasksConfig) -> dict[str, Any]:
    """Log-likelihoods of the named backend and of `mask` for the same requests. Their seconds, and transformers'.

    Tokenizing counts for all of them alike.
    """
    instances = log_likelihoods(config)
    likelihoods: dict[str, np.ndarray] = {}
    seconds: dict[str, float] = {}
    for backend in (DENSE, "mask", config.backend):  # the engine last: it lays weights out anew
        lm = DejavuLM.load(dataclasses.replace(asked_model(config), backend=backend))
        tokens = np.array([len(lm._encode_pair(*instance.args)[1]) for instance in instances])
        lm.loglikelihood(instances[:8], disable_tqdm=True)  # compiles and captures
        began = time.perf_counter()
        likelihoods[backend] = np.array([nats for nats, _ in lm.loglikelihood(instances)])
        seconds[backend] = time.perf_counter() - began
    apart = np.abs(likelihoods[config.backend] - likelihoods["mask"]) / tokens
    return {
        "requests": len(instances),
        "tokens": int(tokens.sum()),
        "nats_apart_mean": float(apart.mean()),
        "nats_apart_99_percent": float(np.quantile(apart, 0.99)),
        "nats_apart_most": float(apart.max()),
        "apart_beyond": GOALS[config.dtype],
        "requests_apart": int((apart > GOALS[config.dtype]).sum()),
        "seconds": seconds[config.backend],
        "seconds_mask": seconds["mask"],
        "seconds_dense": seconds[DENSE],
    }


def answered(config: TasksConfig) -> Iterator[list[dict[str, Any]]]:
    """Rows of the tasks, as they come."""
    return ([dataclasses.asdict(row) for row in rows] for rows in tasks(config))


def main(argv: Sequence[str] | None = None) -> None:
    flags = list(sys.argv[1:] if argv is None else argv)
    engine = flags[:1] == ["engine"]
    quiet()
    config: TasksConfig = read_config(TasksConfig, flags[engine:], __doc__ or "")
    shared = conditions(config)  # the commit at the start: a run may outlast it
    path = RESULTS / ("task_engine.csv" if engine else "tasks.csv")
    asked = selection(config)
    made: Iterable[list[dict[str, Any]]] = [[against_mask(config)]] if engine else answered(config)
    for rows in made:
        for row in rows:
            append_row(path, five_digits(asked | row) | shared)
        print(f"appended {len(rows)} rows to {path}", flush=True)


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
