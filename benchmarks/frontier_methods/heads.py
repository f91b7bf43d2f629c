"""What makes a head unimportant, how a skipped one is replaced, and which densities that gives the layers.

Criteria are scorers (``select.Scorer``) that see the true heads, so each is an oracle of its own kind.

Letters: B batch, T positions, h heads, e head width, d model width, L layers, N rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.frontier_methods.fit import Rows, learning_rate_share
from benchmarks.frontier_methods.plain_opt import PlainOPT, Sites
from benchmarks.frontier_methods.predictors import Predictors, quantised
from benchmarks.frontier_methods.score import Reference, layer_losses
from benchmarks.frontier_methods.select import Gates
from benchmarks.frontier_methods.sets import Batch
from dejavu_train.bundle.allocation import density_choices, read_curve, spend
from dejavu_train.calibration.curves import HEAD_GRID, head_curve, spread_loss
from dejavu_train.models.hooks import head_contribution, output_gram

CRITERIA = ("fisher", "from_mean", "norm_after", "norm_before", "entropy")
PROBES = (0.25, 0.42, 0.58, 0.75, 0.88, 0.96)


@dataclass
class HeadStatistics:
    """Taken on train documents.

    ``mean`` (L, h, e): mean output of each head. ``fisher`` (L, h, e, e): second moment of the loss's gradient with
    respect to it. ``neuron`` (L, f): root mean square gradient of each active neuron's activation.
    """

    mean: Tensor
    fisher: Tensor
    neuron: Tensor


class _Tap:
    """An edit that changes nothing and keeps heads' outputs and activations, to be differentiated."""

    def __init__(self) -> None:
        self.out: list[Tensor] = []
        self.activation: list[Tensor] = []

    def heads(self, layer: int, sites: Sites, out: Tensor) -> Tensor:
        self.out.append(out)
        return out

    def mlp(self, layer: int, sites: Sites, activation: Tensor) -> Tensor:
        self.activation.append(activation)
        return activation

    def offset(self, layer: int, target: str) -> Tensor | None:
        return None


def head_statistics(model: PlainOPT, parts: Sequence[Batch]) -> HeadStatistics:
    """Means and gradient moments over ``parts``."""
    width = model.d // model.n_heads
    device = model.device
    mean = torch.zeros(model.n_layers, model.n_heads, width, device=device)
    fisher = torch.zeros(model.n_layers, model.n_heads, width, width, device=device)
    neuron = torch.zeros(model.n_layers, model.f, device=device)
    live = torch.zeros_like(neuron)
    tokens = 0
    for part in parts:
        part = part.to(device)
        tap = _Tap()
        hidden = model.start(part.ids).requires_grad_(True)
        final = model.blocks(hidden, tap)
        loss = F.cross_entropy(model.logits(final[part.scored]), part.targets, reduction="sum")
        gradients = torch.autograd.grad(loss, tap.out + tap.activation)
        for layer in range(model.n_layers):
            out, g = tap.out[layer].detach()[part.scored], gradients[layer][part.scored]
            mean[layer] += out.sum(0)
            fisher[layer] += torch.einsum("nhe,nhf->hef", g, g)
            active = tap.activation[layer].detach() > 0
            moment = (gradients[model.n_layers + layer].square() * active)[part.scored]
            neuron[layer] += moment.sum(0)
            live[layer] += active[part.scored].sum(0)
        tokens += int(part.scored.sum())
    # a neuron that was hardly ever active gets its layer's mean, not noise
    prior = neuron.sum(1, keepdim=True) / live.sum(1, keepdim=True).clamp_min(1)
    rms = ((neuron + 20 * prior) / (live + 20)).sqrt()
    return HeadStatistics(mean / tokens, fisher / tokens, rms)


class HeadCriterion:
    """The true importance of a head for a token, by one of ``CRITERIA``."""

    def __init__(self, model: PlainOPT, name: str, statistics: HeadStatistics) -> None:
        self.model, self.name, self.statistics = model, name, statistics
        self.grams = [output_gram(layer.out_weight, model.n_heads) for layer in model.layers]

    def begin(self, part: Batch, model: PlainOPT) -> None:
        pass

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        """(B, T, h)."""
        if self.name == "norm_before":
            return values.norm(dim=-1)
        if self.name == "entropy":
            return -attention_entropy(sites["qk", layer])
        weight, gram = self.model.layers[layer].out_weight, self.grams[layer]
        if self.name == "norm_after":
            return head_contribution(values, weight, gram)
        rest = values - self.statistics.mean[layer]
        if self.name == "from_mean":
            return head_contribution(rest, weight, gram)
        squares = torch.einsum("bthe,hef,bthf->bth", rest, self.statistics.fisher[layer], rest)
        return squares.clamp_min(0).sqrt()

    def fixed_bytes(self, layer: int) -> float:
        return 0.0


def attention_entropy(qkv: Tensor) -> Tensor:
    """Entropy (B, T, h) of causal attention; ``qkv`` (B, T, 3, h, e). High for the paper's uniform heads."""
    q, k = qkv[:, :, 0].transpose(1, 2), qkv[:, :, 1].transpose(1, 2)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    length = scores.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    entropy = -(weights * weights.clamp_min(1e-12).log()).sum(-1)
    # relative to the largest that a position can have, else late positions count as uniform
    most = torch.arange(1, length + 1, device=scores.device).float().log().clamp_min(1e-3)
    return (entropy / most).transpose(1, 2)


@dataclass
class HeadPlan:
    """Curves of every layer's heads; gives thresholds for a mean density."""

    model: PlainOPT
    scorer: Any
    curves: list[dict[str, list[float]]]

    def densities(self, mean: float, how: str) -> list[float]:
        """``measured``: the summed loss is least; ``uniform``; ``global``: one threshold for all layers."""
        n = self.model.n_layers
        if how == "uniform":
            return [mean] * n
        if how == "measured":
            choices = {i: density_choices(curve, 0.0, True) for i, curve in enumerate(self.curves)}
            chosen = spend(choices, mean * n)
            return [chosen[i].density for i in range(n)]
        from benchmarks.frontier_methods.plan import density_above

        low = min(curve["threshold"][-1] for curve in self.curves)
        high = max(curve["threshold"][0] for curve in self.curves)
        for _ in range(40):
            middle = (low + high) / 2
            if sum(density_above(curve, middle) for curve in self.curves) / n > mean:
                low = middle
            else:
                high = middle
        return [density_above(curve, low) for curve in self.curves]

    def price(self, mean: float) -> float:
        """Nats per token that all heads are worth at ``mean``: the slope of the summed loss."""
        here, there = (
            sum(
                read_curve(curve, density)["loss_increase"]
                for curve, density in zip(self.curves, self.densities(at, "measured"), strict=True)
            )
            for at in (mean, mean + 0.05)
        )
        return max((here - there) / 0.05, 1e-3)

    def thresholds(self, densities: Sequence[float]) -> list[float | None]:
        return [
            None if density >= 1.0 else read_curve(curve, density)["threshold"]
            for curve, density in zip(self.curves, densities, strict=True)
        ]


class _Collect:
    """A dense edit that keeps a scorer's scores and the heads' contributions at scored positions."""

    def __init__(self, model: PlainOPT, scorer: Any) -> None:
        self.model, self.scorer = model, scorer
        self.scores: list[list[Tensor]] = [[] for _ in model.layers]
        self.truth: list[list[Tensor]] = [[] for _ in model.layers]
        self.scored = torch.empty(0)

    def heads(self, layer: int, sites: Sites, out: Tensor) -> Tensor:
        self.scores[layer].append(self.scorer.scores(layer, sites, out)[self.scored].cpu())
        self.truth[layer].append(head_contribution(out, self.model.layers[layer].out_weight)[self.scored].cpu())
        return out

    def mlp(self, layer: int, sites: Sites, activation: Tensor) -> Tensor:
        return activation

    def offset(self, layer: int, target: str) -> Tensor | None:
        return None


@torch.no_grad()
def make_head_plan(
    model: PlainOPT, scorer: Any, parts: Sequence[Batch], probe_parts: Sequence[Batch], replacement: Tensor | None
) -> HeadPlan:
    """Curves on ``parts``, losses on ``probe_parts`` (both of the calibration set), skipped heads replaced."""
    collect = _Collect(model, scorer)
    for part in parts:
        part = part.to(model.device)
        collect.scored = part.scored
        scorer.begin(part, model)
        model.blocks(model.start(part.ids), collect)
    curves = [
        head_curve(torch.cat(scores).float(), torch.cat(truth), HEAD_GRID)
        for scores, truth in zip(collect.scores, collect.truth, strict=True)
    ]
    thresholds = [[read_curve(curve, density)["threshold"] for density in PROBES] for curve in curves]
    gates = Gates(model, heads=scorer, replacement=replacement)
    measured = layer_losses(model, probe_parts, gates, "heads", thresholds)
    for curve, row in zip(curves, measured, strict=True):
        curve["loss_increase"] = spread_loss(PROBES, row, curve["density"])
    return HeadPlan(model, scorer, curves)


def refine(
    plan: HeadPlan, densities: Sequence[float], parts: Sequence[Batch], replacement: Tensor | None, rounds: int = 4
) -> list[float]:
    """Move density between layers while the divergence of all layers together falls on ``parts``; the sum stays.

    Losses measured one layer at a time do not add up when many heads are skipped. Each round tries every layer up and
    down by a step and makes the best exchange that helps; the step is halved when none does.
    """
    reference = Reference(plan.model, parts)

    def loss(at: Sequence[float]) -> float:
        gates = Gates(plan.model, heads=plan.scorer, head_thresholds=plan.thresholds(at), replacement=replacement)
        return reference.score(gates).kl

    def moved(at: Sequence[float], changes: dict[int, float]) -> list[float]:
        return [density + changes.get(layer, 0.0) for layer, density in enumerate(at)]

    best = list(densities)
    lowest = loss(best)
    for step in (0.12, 0.06, 0.03):
        for _ in range(rounds):
            up = {i: loss(moved(best, {i: step})) for i, d in enumerate(best) if d + step <= 1.0}
            down = {i: loss(moved(best, {i: -step})) for i, d in enumerate(best) if d - step > 0.0}
            pairs = sorted((up[i] + down[j], i, j) for i in up for j in down if i != j)
            for _, i, j in pairs[:3]:
                tried = moved(best, {i: step, j: -step})
                if (found := loss(tried)) < lowest:
                    best, lowest = tried, found
                    break
            else:
                break
    return best


@torch.no_grad()
def importance_rows(model: PlainOPT, criterion: HeadCriterion, parts: Sequence[Batch], limit: int) -> Tensor:
    """(L, N, h): the criterion at the scored positions of ``parts``, row by row as ``fit.record_rows`` records them."""
    collect = _Collect(model, criterion)
    rows = 0
    for part in parts:
        if rows >= limit:
            break
        part = part.to(model.device)
        collect.scored = part.scored
        model.blocks(model.start(part.ids), collect)
        rows += int(part.scored.sum())
    return torch.stack([torch.cat(scores)[:limit] for scores in collect.scores]).to(model.device)


def fit_heads(
    rows: Rows,
    importance: Tensor,
    predictors: Predictors,
    steps: int,
    learning_rate: float = 2e-3,
    size: int = 1024,
    vocabulary: int = 0,
) -> None:
    """Train head predictors in place on the logarithm of the importance (L, N, h), so that layers compare.

    With ``vocabulary`` (its size) every token has a row of mean log-importances per layer, which the low rank corrects.
    """
    generator = torch.Generator().manual_seed(0)
    wanted = importance.clamp_min(importance.mean() * 1e-4).log()
    wanted = wanted - wanted.mean()
    with torch.no_grad():
        predictors.bias.copy_(wanted.mean(1))
        predictors.up.mul_(0.1)
        if vocabulary:
            for layer in range(len(wanted)):
                apart = wanted[layer] - wanted[layer].mean(0)
                sums = torch.zeros(vocabulary, apart.shape[1], device=apart.device).index_add_(0, rows.ids, apart)
                counts = torch.full((vocabulary, 1), 8.0, device=apart.device)
                counts.index_add_(0, rows.ids, torch.ones_like(apart[:, :1]))
                predictors.tables[layer] = quantised(sums / counts, "int4")
    optimiser = torch.optim.AdamW(predictors.parameters(), lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: learning_rate_share(s, steps // 20 + 1, steps))
    for _ in range(steps):
        index = torch.randint(wanted.shape[1], (size,), generator=generator).to(wanted.device)
        logits = predictors.logits(rows.site(predictors.sites, index), rows.ids[index])
        loss = F.mse_loss(logits, wanted[:, index])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
    predictors.requires_grad_(False)
