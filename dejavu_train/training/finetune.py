"""Tunes neuron predictors inside the sparse model: reads a calibrated bundle and windows of text, returns predictors.

Forward is the true selection, by the bundle's thresholds and second stages. Backward passes through a sigmoid of the
logit (straight-through). The loss is the divergence of the sparse model's output from the dense model's. So a miss
costs what it does to the output, and every layer sees the errors of earlier ones. A price on the bytes read is steered
so that they stay what the bundle reads. How they are shared over layers and tokens is learned with the rest. Head
predictors select as they are calibrated and are not changed. Calibrate again afterwards.

Interrupted, it goes on from the last state: predictors, optimiser, schedule, price and step. No random numbers are
drawn but the windows' order, which follows from seed and step. On a CPU the result is that of an undisturbed tuning,
bit for bit. On a GPU as nearly as its sums over atomics repeat.

Letters: B windows, T positions, n units, e width of a unit, d model width, V vocabulary.
"""

import copy
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dejavu_train.bundle.allocation import read_curve
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import mlp_share, predictor_bytes, spec_bytes
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.families import Target, UnitKey
from dejavu_train.ground import signals
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import json_digest
from dejavu_train.ground.progress import Progress
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.models.weight_format import WeightFormat
from dejavu_train.predictors.low_rank import LowRankPredictor
from dejavu_train.training.config import TuneConfig
from dejavu_train.training.gates import Gates
from dejavu_train.training.passes import LayerPasses, Passes, UnfinishedStep, WholePasses
from dejavu_train.training.state import load_state, save_state

logger = logging.getLogger(__name__)
UNKNOWN_PRICE = 0.1  # nats, where no sensitivity was measured
HIGHEST_TURN = 0.2  # of the price's logarithm, in one step
SAVE_SECONDS = 60.0  # between two saves, and longer where one takes more than a twentieth of it


def next_price(price: float, share: float, budget: float) -> float:
    """The price of bytes after a step that read ``share`` of the dense MLPs' bytes where the budget was ``budget``."""
    turn = 0.7 * (share / budget - 1)
    return price * float(torch.tensor(min(max(turn, -HIGHEST_TURN), HIGHEST_TURN), dtype=torch.float32).exp())


def finetune(
    model: Any,
    bundle: Bundle,
    windows: Sequence[Sequence[int]],
    config: TuneConfig,
    weights: WeightFormat,
    seed: int = 0,
    state_path: Path | None = None,
) -> tuple[dict[int, LowRankPredictor], list[dict[str, float]]]:
    """Tune the neuron predictors of ``bundle`` at the bytes it reads.

    Args:
        model: the dense model on the device where it is done, or a walk through it by layers. It is not changed.
        bundle: calibrated with thresholds. Layers that it keeps dense stay so.
        windows: token ids of train documents. The longest ones of one length are used.
        weights: format in which the model's are read where bytes are counted.
        seed: of the windows' order.
        state_path: where the state is kept while it is tuned, for the same call to go on from. None: nowhere.
    Returns: by layer the predictor in fp32 on the CPU, and metrics of some steps: step, nats, share of the MLPs' bytes.

    Raises:
        UserError: nothing to tune, a bundle without thresholds, no windows, or a state that is damaged.
        Interrupted: a signal came. The state was saved.
    """
    sparse = {key: spec for key, spec in bundle.specs.items() if key[1] == Target.MLP and not spec.dense}
    if not sparse:
        raise UserError("tune.steps: every MLP of the bundle is dense; ask for fewer bytes, or set tune.steps to 0")
    if any(spec.threshold is None for spec in sparse.values()):
        raise UserError("tune.steps needs thresholds; set calibrate.selection to threshold")
    if not windows:
        raise UserError("tune.steps: the train set has no windows; collect more documents")
    length = max(map(len, windows))
    whole = [list(window) for window in windows if len(window) == length]
    by_layers = isinstance(model, LayerWalk)
    whole_model = model.model if by_layers else model
    was_grad = [parameter.requires_grad for parameter in whole_model.parameters()]
    whole_model.requires_grad_(False)
    gates = Gates(whole_model, bundle, config.width, weights)
    passes: Passes = LayerPasses(model, gates) if by_layers else WholePasses(model, gates)
    parameters = [parameter for predictor in gates.trained.values() for parameter in predictor.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=config.learning_rate, betas=(0.9, 0.95))
    warm = max(1, config.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm, 1.0) * (1.0 - 0.95 * max(0, step - warm) / config.steps)
    )
    count, size = config.passes(length)
    ledger = _Ledger(bundle, sparse, weights)
    price = ledger.first_price() if config.price is None else config.price
    metrics: list[dict[str, float]] = []
    first = 0
    specs = [dataclasses.asdict(bundle.specs[key]) for key in sorted(bundle.specs)]
    identity = json_digest([bundle.weight_hash, specs, dataclasses.asdict(config), whole, seed])
    stored = None if state_path is None else load_state(state_path, "cpu")
    if stored is not None and stored.get("identity") != identity:
        logger.info("tuning: %s is of other settings and is left; it begins anew", state_path)
    elif stored is not None:
        for layer, predictor in gates.trained.items():
            predictor.load_state_dict(stored["predictors"][layer])
        optimiser.load_state_dict(stored["optimiser"])
        schedule.load_state_dict(stored["schedule"])
        first, price, metrics = stored["step"], stored["price"], stored["metrics"]
        logger.info("tuning: going on from step %d of %d", first, config.steps)
    saved_at, took = time.monotonic(), 0.0

    def save(step: int) -> None:
        state = {"identity": identity, "step": step, "price": price, "metrics": metrics}
        state |= {"optimiser": optimiser.state_dict(), "schedule": schedule.state_dict()}
        predictors = {layer: predictor.state_dict() for layer, predictor in gates.trained.items()}
        if state_path is not None:
            save_state(state_path, state | {"predictors": predictors})

    def loss(divergence: Tensor, spent: Tensor) -> Tensor:
        return (divergence + price * spent / ledger.dense) / count

    batches = itertools.islice(_batches(whole, size, seed), first * count, None)
    with signals.deferred(), Progress("tuning", config.steps, "step", first) as bar:
        for step in range(first, config.steps):
            optimiser.zero_grad(set_to_none=True)
            try:
                made = passes.gradients(list(itertools.islice(batches, count)), loss)
            except UnfinishedStep:
                save(step)
                signals.stop_if_pending()
                raise
            nats = sum(divergence for divergence, _ in made) / count
            share = sum(ledger.share(spent) for _, spent in made) / count
            if not math.isfinite(nats):
                raise UserError(
                    f"tuning: the loss is not finite at step {step}; lower tune.learning_rate or tune.width"
                )
            optimiser.step()
            schedule.step()
            price = next_price(price, share, ledger.budget)
            if step % max(1, config.steps // 10) == 0 or step == config.steps - 1:
                metrics.append({"step": float(step), "nats": nats, "share": share, "price": price})
                percent = 100 * share
                logger.info("tuning: step %d of %d, %.4f nats, %.2f %% of the bytes", step, config.steps, nats, percent)
            bar.update()
            if signals.pending() or time.monotonic() - saved_at >= SAVE_SECONDS + 20 * took:
                began = time.monotonic()
                save(step + 1)
                signals.stop_if_pending()
                saved_at = time.monotonic()
                took = saved_at - began
    for parameter, before in zip(whole_model.parameters(), was_grad, strict=True):
        parameter.requires_grad_(before)
    return {layer: _plain(predictor) for layer, predictor in gates.trained.items()}, metrics


class _Ledger:
    """Bytes of the MLPs: of the dense ones, of what a tuned model reads whatever it selects, and of what was asked."""

    def __init__(self, bundle: Bundle, sparse: Mapping[UnitKey, PredictorSpec], weights: WeightFormat) -> None:
        shape = bundle.shape
        self.shape, self.sparse, self.weights = shape, sparse, weights
        one = weights.unit_bytes(shape).dense(shape, Target.MLP)
        layers = len(shape.layers_of(Target.MLP))
        self.dense = one * layers
        self.fixed = sum(predictor_bytes(spec) for spec in sparse.values())
        self.fixed += one * (layers - len(sparse))
        self.budget = mlp_share(bundle, weights)

    def first_price(self) -> float:
        """Price by the sensitivities: nats saved by 15 % more density, per share of the bytes that it costs."""
        saved = cost = 0.0
        for spec in self.sparse.values():
            if "loss_increase" not in spec.curve:
                return UNKNOWN_PRICE
            denser = spec.at(min(0.99, 1.15 * spec.density))
            here, there = (read_curve(spec.curve, e.density)["loss_increase"] for e in (spec, denser))
            saved += here - there
            cost += spec_bytes(denser, self.shape, self.weights) - spec_bytes(spec, self.shape, self.weights)
        return max(saved, 1e-6) * self.dense / max(cost, 1.0)

    def share(self, spent: float) -> float:
        return (self.fixed + spent) / self.dense


def _batches(windows: Sequence[list[int]], size: int, seed: int) -> Iterator[list[list[int]]]:
    """Windows in random orders, ``size`` at a time, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(windows), generator=generator).tolist()
        for first in range(0, max(1, len(order) - size + 1), size):
            yield [windows[i] for i in order[first : first + size]]


def _plain(predictor: LowRankPredictor) -> LowRankPredictor:
    plain = copy.deepcopy(predictor).requires_grad_(False).float().cpu()
    plain.rounded_to = None
    return plain
