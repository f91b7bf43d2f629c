"""Trains predictors inside the sparse model: its output against the dense model's, at a budget of bytes.

Every layer then sees the errors of earlier ones, and what a miss costs is what it does to the output, not its norm.
Forward is the true selection; backward passes through a sigmoid of the logit (straight-through). A multiplier on the
bytes read is steered so that the budget is kept; how it is shared over layers, tokens and targets is learned with it.

Letters: B batch, T positions, n units, h heads, e head width, L layers.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.frontier_methods.baselines import TwoTests
from benchmarks.frontier_methods.fit import learning_rate_share
from benchmarks.frontier_methods.heads import HeadStatistics
from benchmarks.frontier_methods.plain_opt import PlainOPT, Sites
from benchmarks.frontier_methods.predictors import BITS, Predictors
from benchmarks.frontier_methods.select import WEIGHT_BYTES
from benchmarks.frontier_methods.sets import Batch
from dejavu_train.training.finetune import Gate


class SoftGates:
    """The differentiable counterpart of ``select.Gates``; thresholds are folded into the predictors' biases."""

    def __init__(
        self,
        model: PlainOPT,
        mlp: Predictors | None,
        heads: Predictors | None,
        replacement: Tensor | None,
        offsets: Tensor | None,
        width: float,
        tests: TwoTests | None = None,
        statistics: HeadStatistics | None = None,
    ) -> None:
        self.statistics, self.tokens = statistics, 1
        self.model, self.mlp_predictors, self.head_predictors, self.tests = model, mlp, heads, tests
        self.replacement, self.offsets, self.width = replacement, offsets, width

    def begin(self, tokens: int = 1) -> None:
        self.tokens = tokens
        self.mlp_weights = None if self.mlp_predictors is None else self.mlp_predictors.weights()
        self.head_weights = None if self.head_predictors is None else self.head_predictors.weights()
        self.mlp_cost: list[Tensor] = []
        self.head_cost: list[Tensor] = []

    def mlp(self, layer: int, sites: Sites, activation: Tensor) -> Tensor:
        if self.mlp_predictors is None:
            return activation
        logits = self.mlp_predictors.layer_logits(layer, sites[self.mlp_predictors.sites[layer]], self.mlp_weights)
        live = (activation > 0).float()
        cost = 1.0 + live  # an fc1 row, and an fc2 row where it is active
        if self.tests is not None:
            # the filter's survivors read the upper bits of their row, those that pass the second stage the rest
            weights, upper = self.model.layers[layer], BITS[self.tests.kind] / 16
            assert self.tests.second is not None
            sharp = F.linear(sites["mlp_in", layer].detach(), self.tests.rows[layer], weights.fc1_bias)
            passed = (sharp * weights.fc2_norm > self.tests.second[layer]).float()
            activation = activation * passed
            cost = upper + passed * ((1.0 - upper if self.tests.planes else 1.0) + live)
        cost = cost / (2 * self.model.f)
        curvature = activation.new_zeros(())
        if self.statistics is not None:
            curvature = (activation.detach() * self.statistics.neuron[layer]).square() / self.tokens
        out, spent = Gate.apply(activation, logits, cost, activation.new_zeros(()), curvature, self.width)
        self.mlp_cost.append(spent)
        return out

    def heads(self, layer: int, sites: Sites, out: Tensor) -> Tensor:
        if self.head_predictors is None:
            return out
        logits = self.head_predictors.layer_logits(layer, sites[self.head_predictors.sites[layer]], self.head_weights)
        rest = out.new_zeros(out.shape[-2:]) if self.replacement is None else self.replacement[layer]
        cost = torch.full_like(logits, 1.0 / self.model.n_heads)
        curvature = out.new_zeros(())
        if self.statistics is not None:
            apart = (out - rest).detach()
            curvature = torch.einsum("bthe,hef,bthf->bth", apart, self.statistics.fisher[layer], apart) / self.tokens
        kept, spent = Gate.apply(out, logits, cost, rest, curvature, self.width)
        self.head_cost.append(spent)
        return kept

    def offset(self, layer: int, target: str) -> Tensor | None:
        return self.offsets[layer] if target == "mlp" and self.offsets is not None else None


@dataclass(frozen=True)
class TuneConfig:
    """How predictors are tuned in the model."""

    steps: int = 300
    learning_rate: float = 2e-3
    mlp_share: float | None = 0.08
    """Bytes of the MLP over dense, predictors included."""
    head_density: float | None = None
    width: float = 1.0
    """Width of the sigmoid in the backward pass."""
    price: float | None = None
    """The first multiplier: nats per token that the whole MLP's bytes are worth; None: 0.3, or from a plan."""
    head_price: float | None = None
    """The same for all heads; None: 0.06."""
    bias_rate: float = 1.0
    """Learning rate of the biases over that of the rest: they must move as far as the budget asks."""
    share_from: float | None = None
    """Begin at this share and narrow it to ``mlp_share`` over the first half."""


def tune(
    model: PlainOPT,
    mlp: Predictors | None,
    heads: Predictors | None,
    parts: Iterator[Batch],
    config: TuneConfig,
    replacement: Tensor | None = None,
    offsets: Tensor | None = None,
    tests: TwoTests | None = None,
    statistics: HeadStatistics | None = None,
) -> dict[str, Any]:
    """Train the predictors (and ``replacement``, ``offsets`` where given) in place.

    With ``tests`` the MLP's predictors are the filter of a cascade; with ``statistics`` the gates know the curvature.
    """
    start = time.perf_counter()
    groups = [module for module in (mlp, heads) if module is not None]
    parameters = [p for module in groups for p in module.parameters()]
    extras = [tensor for tensor in (replacement, offsets) if tensor is not None]
    for tensor in parameters + extras:
        tensor.requires_grad_(True)
    biases = {id(module.bias) for module in groups}
    param_groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if id(p) not in biases]},
        {"params": [module.bias for module in groups], "lr": config.bias_rate * config.learning_rate},
    ]
    if extras:
        param_groups.append({"params": extras, "lr": 0.3 * config.learning_rate})
    optimiser = torch.optim.Adam(param_groups, lr=config.learning_rate, betas=(0.9, 0.95))
    warmup = max(1, config.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: learning_rate_share(s, warmup, config.steps))
    gates = SoftGates(model, mlp, heads, replacement, offsets, config.width, tests, statistics)
    dense_bytes = 2 * WEIGHT_BYTES * model.d * model.f
    fixed = (
        0.0 if mlp is None else sum(mlp.fixed_bytes(i) for i in range(model.n_layers)) / model.n_layers / dense_bytes
    )
    mlp_price = torch.tensor(config.price or 0.3, device=model.device)
    head_price = torch.tensor(config.head_price or 0.06, device=model.device)
    history = []
    for step in range(config.steps):
        part = next(parts).to(model.device)
        with torch.no_grad():
            hidden = model.start(part.ids)
            dense = F.log_softmax(model.logits(model.blocks(hidden)[part.scored]), -1)
        gates.begin(int(part.scored.sum()))
        for module in groups:
            module.begin(part, model)
        got = F.log_softmax(model.logits(model.blocks(hidden, gates)[part.scored]), -1)
        divergence = (dense.exp() * (dense - got)).sum(-1).mean()
        loss = divergence
        zero = divergence.new_zeros(())
        mlp_cost = torch.stack(gates.mlp_cost).mean() if gates.mlp_cost else zero
        head_cost = torch.stack(gates.head_cost).mean() if gates.head_cost else zero
        if mlp is not None and config.mlp_share is not None:
            wanted = config.mlp_share
            if config.share_from is not None:
                late = min(1.0, 2 * step / config.steps)
                wanted = config.share_from + late * (config.mlp_share - config.share_from)
            loss = loss + mlp_price * mlp_cost
            gap = (mlp_cost.detach() + fixed) / wanted - 1
            mlp_price = mlp_price * torch.exp((0.7 * gap).clamp(-0.2, 0.2))
        if heads is not None and config.head_density is not None:
            loss = loss + head_price * head_cost
            gap = head_cost.detach() / config.head_density - 1
            head_price = head_price * torch.exp((1.5 * gap).clamp(-0.2, 0.2))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % max(1, config.steps // 10) == 0 or step == config.steps - 1:
            history.append(
                {
                    "step": step,
                    "kl": float(divergence.detach()),
                    "mlp_share": float(mlp_cost.detach()) + fixed,
                    "head_density": float(head_cost.detach()),
                    "price": float(mlp_price),
                }
            )
    for tensor in parameters + extras:
        tensor.requires_grad_(False)
    return {"seconds": time.perf_counter() - start, "history": history}


def fold_thresholds(predictors: Predictors, thresholds: list[float | None]) -> None:
    """Move thresholds into the biases, so that zero selects the same units; a dense layer's bias goes up by 20."""
    with torch.no_grad():
        for layer, threshold in enumerate(thresholds):
            predictors.bias[layer] += 20.0 if threshold is None else -threshold
