"""Tunes neuron predictors inside the sparse model: reads a calibrated bundle and windows of text, returns predictors.

Forward is the true selection, by the bundle's thresholds and second stages. Backward passes through a sigmoid of the
logit (straight-through). The loss is the divergence of the sparse model's output from the dense model's. So a miss
costs what it does to the output, and every layer sees the errors of earlier ones. A price on the bytes read is steered
so that they stay what the bundle reads. How they are shared over layers and tokens is learned with the rest. Head
predictors select as they are calibrated and are not changed. Calibrate again afterwards.

It takes a GPU to be worth it: on a CPU the minutes are better spent on more steps of training.

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
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dejavu_train import signals
from dejavu_train.bundle.allocation import plane_bytes, read_curve
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import mlp_share, predictor_bytes, spec_bytes
from dejavu_train.bundle.selector import select
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.config import TuneConfig
from dejavu_train.errors import UserError
from dejavu_train.families import LayerInput, Site, Target, UnitKey, blocks_of
from dejavu_train.files import json_digest
from dejavu_train.models.hooks import at_place, hooked
from dejavu_train.models.weight_format import WeightFormat
from dejavu_train.predictors.bit_planes import SecondStage
from dejavu_train.predictors.low_rank import LowRankPredictor
from dejavu_train.predictors.quantization import SCALED
from dejavu_train.progress import Progress
from dejavu_train.training.state import load_state, save_state

logger = logging.getLogger(__name__)
Sites = dict[Site, Tensor]
UNKNOWN_PRICE = 0.1  # nats, where no sensitivity was measured
HIGHEST_TURN = 0.2  # of the price's logarithm, in one step
SAVE_SECONDS = 60.0


class Gate(torch.autograd.Function):
    """values where logit > 0 and ``rest`` elsewhere, and the mean cost of what is kept. Backward as if by a sigmoid.

    ``logits`` (..., n) against ``values`` (..., n) or (..., n, e). ``cost`` (..., n) is what one kept unit costs.
    ``curvature`` (..., n), or 0, is the loss's second derivative along a unit's switch. Near the dense model the
    gradient of what is kept vanishes, although dropping it would cost half the curvature. So the gradient of a logit is
    f(1) - f(0) = f'(s) + (1/2 - s) f'', not f'(s).
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, logits: Tensor, cost: Tensor, rest: Tensor, curvature: Tensor, width: float
    ) -> Any:
        keep = logits > 0
        ctx.save_for_backward(values, logits, cost, rest, curvature)
        ctx.width = width
        wide = keep if values.dim() == logits.dim() else keep[..., None]
        return torch.where(wide, values, rest), (keep * cost).sum(-1).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        grad, grad_cost = gradients
        values, logits, cost, rest, curvature = ctx.saved_tensors
        keep = logits > 0
        wide = keep if values.dim() == logits.dim() else keep[..., None]
        soft = torch.sigmoid(logits / ctx.width)
        slope = soft * (1 - soft) / ctx.width
        gain = grad * (values - rest)
        if values.dim() > logits.dim():
            gain = gain.sum(-1)
        rows = logits.numel() // logits.shape[-1]
        gain = gain + (0.5 - keep.to(gain.dtype)) * curvature
        grad_logits = slope * (gain + grad_cost * cost / rows)
        grad_rest = None
        if ctx.needs_input_grad[3]:
            grad_rest = (grad * ~wide).sum(tuple(range(grad.dim() - rest.dim())))
        return grad * wide, grad_logits, None, grad_rest, None, None


def next_price(price: float, share: float, budget: float) -> float:
    """The price of bytes after a step that read ``share`` of the dense MLPs' bytes where the budget was ``budget``."""
    turn = 0.7 * (share / budget - 1)
    return price * float(torch.tensor(min(max(turn, -HIGHEST_TURN), HIGHEST_TURN)).exp())


class _Gates:
    """The differentiable counterpart of ``mask``: hooks that gate every layer's neurons and select its heads."""

    def __init__(self, model: Any, bundle: Bundle, width: float, weights: WeightFormat) -> None:
        self.unit = weights.unit_bytes(bundle.shape)
        self.blocks = blocks_of(model)
        device = next(model.parameters()).device
        self.bundle, self.width = bundle, width
        self.means = bundle.head_means(device)
        self.second_stages = bundle.second_stages([block.up for block in self.blocks])
        self.predictors: dict[UnitKey, nn.Module] = {}
        self.trained: dict[int, LowRankPredictor] = {}
        for (layer, target), spec in bundle.specs.items():
            if not spec.dense:
                block = self.blocks[layer]  # of a model over several devices each layer has its own
                place = (block.up if target == Target.MLP else block.out).weight.device
                self.predictors[UnitKey(layer, target)] = bundle.predictor(layer, target).to(place)
                if target == Target.MLP:
                    predictor = self.predictors[UnitKey(layer, target)]
                    assert isinstance(predictor, LowRankPredictor), "train.py tunes no other"
                    self.trained[layer] = predictor.requires_grad_(True).train()
                    predictor.rounded_to = spec.dtype if spec.dtype in SCALED else None
        self.spent: list[Tensor] = []

    @contextmanager
    def on(self, shape: tuple[int, int]) -> Iterator[None]:
        """Within the context passes of (B, T) = ``shape`` are gated. ``spent`` collects bytes per token and layer."""
        sites: Sites = {}
        self.spent.clear()

        def keep(site: Site, output: Tensor) -> None:
            sites[site] = output.reshape(*shape, -1)

        def gated(layer: int, target: Target, given: Tensor) -> Tensor:
            gate = self._neurons if target == Target.MLP else self._heads
            return gate(layer, given.reshape(*shape, -1), sites).reshape(given.shape)

        handles: list[Any] = []
        for layer, block in enumerate(self.blocks):
            handles += [at_place(block, name, partial(keep, Site(layer, name))) for name in LayerInput]
            for target, place in ((Target.HEADS, "head_out"), (Target.MLP, "activation")):
                if UnitKey(layer, target) in self.predictors:
                    handles.append(at_place(block, place, partial(gated, layer, target)))
        with hooked(handles):
            yield

    def _neurons(self, layer: int, activation: Tensor, sites: Sites) -> Tensor:
        spec = self.bundle.specs[UnitKey(layer, Target.MLP)]
        logits = self.predictors[UnitKey(layer, Target.MLP)](sites[spec.reads].float().to(activation.device))
        assert spec.threshold is not None
        is_active = (activation != 0).to(activation.dtype)
        if layer in self.second_stages:
            passed = self._passed(self.second_stages[layer], sites[spec.key.site]).to(activation)
            activation = activation * passed
            upper, rest = plane_bytes(self.bundle.shape.d_model)
            cost = upper + passed * (rest + self.unit.down * is_active)
        else:
            cost = self.unit.up + self.unit.down * is_active
        zero = activation.new_zeros(())
        out, spent = Gate.apply(activation, logits - spec.threshold, cost, zero, zero, self.width)
        self.spent.append(spent)
        return out

    @torch.no_grad()
    def _passed(self, second_stage: SecondStage, mlp_in: Tensor) -> Tensor:
        return second_stage.passed(mlp_in)

    def _heads(self, layer: int, values: Tensor, sites: Sites) -> Tensor:
        spec: PredictorSpec = self.bundle.specs[UnitKey(layer, Target.HEADS)]
        with torch.no_grad():
            site = sites[spec.reads].float().to(values.device)
            keep = select(self.predictors[UnitKey(layer, Target.HEADS)](site), spec)
        by_head = values.unflatten(-1, (keep.shape[-1], -1))
        instead = self.means[layer].to(values) if layer in self.means else values.new_zeros(())
        return torch.where(keep[..., None], by_head, instead).flatten(-2)


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
        model: the dense model in fp32, on the device where it is done. Its weights are not changed.
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
    was_grad = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(False)
    gates = _Gates(model, bundle, config.width, weights)
    parameters = [parameter for predictor in gates.trained.values() for parameter in predictor.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=config.learning_rate, betas=(0.9, 0.95))
    warm = max(1, config.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm, 1.0) * (1.0 - 0.95 * max(0, step - warm) / config.steps)
    )
    passes = max(1, round(config.tokens / max(config.batch_tokens, length)))
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
    saved_at = time.monotonic()

    def save(step: int) -> None:
        state = {"identity": identity, "step": step, "price": price, "metrics": metrics}
        state |= {"optimiser": optimiser.state_dict(), "schedule": schedule.state_dict()}
        predictors = {layer: predictor.state_dict() for layer, predictor in gates.trained.items()}
        if state_path is not None:
            save_state(state_path, state | {"predictors": predictors})

    batches = itertools.islice(_batches(whole, max(1, config.batch_tokens // length), seed), first * passes, None)
    with signals.deferred(), Progress("tuning", config.steps, "step", first) as bar:
        for step in range(first, config.steps):
            nats = share = 0.0
            optimiser.zero_grad(set_to_none=True)
            for _ in range(passes):
                ids = torch.tensor(next(batches), device=next(model.parameters()).device)
                divergence = _divergence(model, gates, ids)
                spent = torch.stack([spent.to(divergence.device) for spent in gates.spent]).sum()
                ((divergence + price * spent / ledger.dense) / passes).backward()
                nats += float(divergence.detach()) / passes
                share += ledger.share(float(spent.detach())) / passes
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
            if signals.pending() or time.monotonic() - saved_at >= SAVE_SECONDS:
                save(step + 1)
                signals.stop_if_pending()
                saved_at = time.monotonic()
    for parameter, before in zip(model.parameters(), was_grad, strict=True):
        parameter.requires_grad_(before)
    return {layer: _plain(predictor) for layer, predictor in gates.trained.items()}, metrics


class _Ledger:
    """Bytes of the MLPs: of the dense ones, of what a tuned model reads whatever it selects, and of what was asked."""

    def __init__(self, bundle: Bundle, sparse: Mapping[UnitKey, PredictorSpec], weights: WeightFormat) -> None:
        shape = bundle.shape
        self.shape, self.sparse, self.weights = shape, sparse, weights
        one = weights.unit_bytes(shape).dense(shape, Target.MLP)
        self.dense = one * shape.n_layers
        self.fixed = sum(predictor_bytes(spec) for spec in sparse.values())
        self.fixed += one * (shape.n_layers - len(sparse))
        self.budget = mlp_share(bundle, weights)

    def first_price(self) -> float:
        """What the sensitivities say: nats saved by 15 % more density, per share of the bytes that it costs."""
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


def _divergence(model: Any, gates: _Gates, ids: Tensor) -> Tensor:
    """Mean KL(dense || sparse) of the next-token distributions over ids (B, T), in nats."""
    with torch.no_grad():
        dense = F.log_softmax(model(input_ids=ids, use_cache=False).logits.float(), dim=-1)
    with gates.on((ids.shape[0], ids.shape[1])):
        sparse = F.log_softmax(model(input_ids=ids, use_cache=False).logits.float(), dim=-1)
    dense = dense.to(sparse.device)
    return (dense.exp() * (dense - sparse)).sum(-1)[:, :-1].mean()


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
