"""Trains the predictors of all layers at once on activations in memory.

The losses are the library's own (``dejavu_train.predictors.losses``), mapped over layers, so that what wins here can be
set in a config as it stands. Letters: L layers, N rows, S rows of a step, d model width, n units.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.frontier_methods.plain_opt import PlainOPT, Sites
from benchmarks.frontier_methods.predictors import Predictors
from benchmarks.frontier_methods.sets import Batch
from dejavu_train.predictors import losses as library

Loss = Callable[[Tensor, library.Batch], Tensor]


@dataclass
class Rows:
    """Hidden states of the train set: ``attn_in``, ``mlp_in`` (L, N, d) fp16; ``ids`` (N) their tokens."""

    attn_in: Tensor
    mlp_in: Tensor
    ids: Tensor

    def site(self, sites: Sequence[tuple[str, int]], index: Tensor | slice) -> Tensor:
        """(L, S, d) fp32: for each layer the rows of the site it reads."""
        return torch.stack([getattr(self, name)[layer, index] for name, layer in sites]).float()

    def covariances(self, sites: Sequence[tuple[str, int]]) -> list[Tensor]:
        """(d, d) second moment of each layer's inputs."""
        found = []
        for name, layer in sites:
            x = getattr(self, name)[layer].float()
            found.append((x.T @ x / x.shape[0]).cpu())
        return found


@torch.no_grad()
def record_rows(model: PlainOPT, parts: Sequence[Batch], limit: int, gates: Any = None) -> Rows:
    """Hidden states at the scored positions of ``parts``, at most ``limit`` rows; with ``gates`` the sparse model's."""
    kept: dict[str, list[list[Tensor]]] = {name: [[] for _ in model.layers] for name in ("attn_in", "mlp_in")}
    rows = 0
    tokens = []
    for part in parts:
        if rows >= limit:
            break
        part = part.to(model.device)
        tokens.append(part.ids[part.scored])
        sites: Sites = {}
        hidden = model.start(part.ids)
        if gates is not None:
            gates.begin(part, hidden, model)
        model.blocks(hidden, gates, sites=sites)
        for name, layers in kept.items():
            for layer, found in enumerate(layers):
                found.append(sites[name, layer][part.scored].half())
        rows += int(part.scored.sum())
    stacked = {name: torch.stack([torch.cat(found)[:limit] for found in layers]) for name, layers in kept.items()}
    return Rows(stacked["attn_in"], stacked["mlp_in"], torch.cat(tokens)[:limit])


def labels(model: PlainOPT, mlp_in: Tensor, norms: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(L, S, d) -> active (L, S, n) bool and contribution (L, S, n); ``norms`` (L, n) instead of fc2's column norms."""
    weight = torch.stack([layer.fc1_weight for layer in model.layers])
    bias = torch.stack([layer.fc1_bias for layer in model.layers])
    norm = torch.stack([layer.fc2_norm for layer in model.layers]) if norms is None else norms
    activation = F.relu(torch.baddbmm(bias[:, None], mlp_in, weight.transpose(1, 2)))
    return activation > 0, activation * norm[:, None]


def squared(logits: Tensor, batch: library.Batch) -> Tensor:
    """As the contribution loss, a miss costing its contribution squared: errors of many misses add up as squares."""
    assert batch.contribution is not None
    cost = (batch.contribution.square()) * batch.active
    count = batch.active.sum().clamp_min(1)
    cost = cost * (count / cost.sum().clamp_min(1e-12))
    surplus = torch.where(batch.active, 0.0, library.NEGATIVE_WEIGHT)
    return (cost * F.softplus(-logits) + surplus * F.softplus(logits)).sum() / count


def root(logits: Tensor, batch: library.Batch) -> Tensor:
    """As the contribution loss, a miss costing the root of its contribution."""
    assert batch.contribution is not None
    return library.contribution(
        logits, library.Batch(batch.inputs, batch.active, batch.contribution.clamp_min(1e-9).sqrt())
    )


def worthwhile(logits: Tensor, batch: library.Batch) -> Tensor:
    """As the contribution loss, but an active neuron below a fifth of the mean contribution counts as surplus."""
    assert batch.contribution is not None
    mean = batch.contribution.sum() / batch.active.sum().clamp_min(1)
    return library.contribution(
        logits, library.Batch(batch.inputs, batch.contribution > 0.2 * mean, batch.contribution)
    )


STUDY_LOSSES: dict[str, Loss] = {**library.LOSSES, "squared": squared, "root": root, "worthwhile": worthwhile}


@dataclass(frozen=True)
class FitConfig:
    """How predictors are trained."""

    loss: str = "contribution"
    steps: int = 1000
    rows: int = 1024
    learning_rate: float = 6e-3
    weight_decay: float = 0.0
    patience: int | None = None
    """Stop early as the original does: after this many epochs without a better recall on ``val`` (or at 0.99)."""
    rescale: bool = True
    """Begin by multiplying each layer's logits with the power of two that the loss likes best."""
    distil: float = 0.0
    """Weight of the layer's output error under soft gates, beside the loss."""
    seed: int = 0


def fit(
    model: PlainOPT,
    rows: Rows,
    predictors: Predictors,
    config: FitConfig,
    val: Rows | None = None,
    norms: Tensor | None = None,
) -> dict[str, float]:
    """Train ``predictors`` (MLP) in place; returns seconds and steps taken.

    ``norms`` (L, n): what a unit of activation is worth, instead of the norm of its fc2 column.

    Raises:
        UserError: an unknown loss.
    """
    loss_of = STUDY_LOSSES[config.loss] if config.loss in STUDY_LOSSES else library.get_loss(config.loss)
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(config.seed)
    optimiser = torch.optim.AdamW(
        predictors.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.95)
    )
    warmup = max(1, config.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: learning_rate_share(step, warmup, config.steps)
    )
    total = rows.mlp_in.shape[1]
    fc2 = torch.stack([layer.fc2_weight for layer in model.layers]) if config.distil else None
    norm = torch.stack([layer.fc2_norm for layer in model.layers])
    best, best_state, worse, done = -1.0, None, 0, 0
    epoch = max(1, total // config.rows)

    def layer_loss(logits: Tensor, inputs: Tensor, active: Tensor, contribution: Tensor) -> Tensor:
        return loss_of(logits, library.Batch(inputs, active, contribution))

    if config.rescale:
        match_scale(model, rows, predictors, layer_loss)
    for step in range(config.steps):
        index = torch.randint(total, (config.rows,), generator=generator).to(rows.mlp_in.device)
        mlp_in = rows.mlp_in[:, index].float()
        x = rows.site(predictors.sites, index)
        with torch.no_grad():
            active, contribution = labels(model, mlp_in, norms)
        logits = predictors.logits(x, rows.ids[index])
        loss = torch.vmap(layer_loss)(logits, x, active, contribution).sum()
        if fc2 is not None:
            missed = (contribution / norm[:, None]) * torch.sigmoid(-logits)
            error = (missed @ fc2.transpose(1, 2)).square().sum((1, 2))
            size = ((contribution / norm[:, None]) @ fc2.transpose(1, 2)).square().sum((1, 2))
            loss = loss + config.distil * (error / size).sum()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
        done = step + 1
        if config.patience is not None and val is not None and done % epoch == 0:
            recall = recall_at_half(model, predictors, val)
            if recall > best:
                best, worse = recall, 0
                best_state = {name: value.clone() for name, value in predictors.state_dict().items()}
            else:
                worse += 1
            if worse >= config.patience or recall > 0.99:
                break
    if best_state is not None:
        predictors.load_state_dict(best_state)
    predictors.requires_grad_(False)
    return {"seconds": time.perf_counter() - start, "steps": float(done)}


@torch.no_grad()
def match_scale(model: PlainOPT, rows: Rows, predictors: Predictors, layer_loss: Callable[..., Tensor]) -> None:
    """A start in units of pre-activation is not one in log-odds: rescale each layer's logits to the lowest loss."""
    index = slice(0, 2048)
    x, ids = rows.site(predictors.sites, index), rows.ids[index]
    active, contribution = labels(model, rows.mlp_in[:, index].float())
    logits = predictors.logits(x, ids)
    powers = [2.0**power for power in range(-1, 6)]
    found = torch.stack([torch.vmap(layer_loss)(factor * logits, x, active, contribution) for factor in powers])
    predictors.rescale([powers[best] for best in found.argmin(0).tolist()])


def learning_rate_share(step: int, warmup: int, steps: int) -> float:
    """Warm-up, then half a cosine down to a twentieth."""
    if step < warmup:
        return (step + 1) / warmup
    import math

    return 0.05 + 0.475 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@torch.no_grad()
def recall_at_half(model: PlainOPT, predictors: Predictors, rows: Rows) -> float:
    """Recall where the predicted probability exceeds one half, over all layers: what the original stops on."""
    index = slice(0, 4096)
    active, _ = labels(model, rows.mlp_in[:, index].float())
    found = (predictors.logits(rows.site(predictors.sites, index), rows.ids[index]) > 0) & active
    return float(found.sum() / active.sum().clamp_min(1))
