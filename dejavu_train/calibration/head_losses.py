"""Reads calibration windows, returns head predictors whose logits are the logarithm of the loss that a skip costs.

Heads whose outputs lie equally far from their means differ in what they do to the next token. So ``up`` and ``bias``
are fitted anew: a logit is the logarithm of the expected loss in nats.

The loss of a head's mean in its place at one position is taken to second order. It is half the variance of the change
of log p(y) over tokens y that the model draws. One backward pass with one drawn token a position gives it for all heads
and positions, with what it does to all later positions:

    loss = (gradient of the summed log p(y) at the head's output . (output - mean))^2 / 2

With z, which ``down`` gives, eta = up z + bias minimises loss exp(-eta) + eta. Its minimum is at exp(eta) = the mean
loss given z, a gamma regression with a logarithmic link.

Letters: T positions, N of all windows, d width, n heads, e head width, r rank.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dejavu_train.calibration.sensitivity import (
    DenseRun,
    blocks_of_positions,
    dense_pass,
    layer_input,
    log_probabilities,
    next_log_probabilities,
    run_layer,
)
from dejavu_train.families import Site, blocks_of
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.progress import progress
from dejavu_train.models.hooks import at_place, hooked
from dejavu_train.predictors.checkpoint import as_stored, stored_tensors
from dejavu_train.predictors.low_rank import LowRankPredictor

LIMIT = 1.0  # nats: beyond, the second order says no more than that the head is needed
LEAST = 1e-7  # of a head that does nothing; its logarithm is finite
RIDGE = 1e-2  # per square of a coefficient of a feature of unit variance
SEED = 0  # of the drawn tokens


@torch.no_grad()
def skip_losses(model: Any, run: DenseRun, means: Mapping[int, Tensor], labels: Tensor) -> dict[int, Tensor]:
    """By layer (T - 1, n) fp32: nats that skipping each head at each position costs, to second order.

    A layer is run again from its recorded input, so that the graph of one layer is held at a time.

    Args:
        run: of one window.
        means: by layer (n, e), what stands in for skipped heads. Zeros where nothing does.
        labels: (T - 1,) a token drawn from the model at each position.
    """
    gradient = gradient_of_labels(model, run.behind, labels)
    fitted = {}
    for layer in reversed(range(len(run.calls))):
        gradient, losses = losses_of_layer(model, run, layer, means.get(layer), gradient)
        if losses is not None:
            fitted[layer] = losses
    return fitted


def gradient_of_labels(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """(1, T, d), of the summed log p of labels (T - 1,), with respect to hidden (1, T, d) behind the last layer."""
    made = torch.zeros_like(hidden)
    for block in blocks_of_positions(model, hidden):
        own = hidden[0, block].detach().requires_grad_()
        with torch.enable_grad():
            drawn = log_probabilities(model, own).gather(1, labels[block, None])
            (made[0, block],) = torch.autograd.grad(drawn.sum(), own)
    return made


def losses_of_layer(
    model: Any, run: DenseRun, layer: int, mean: Tensor | None, gradient: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradient (1, T, d) at a layer's input, and nats (T - 1, n), for the gradient (1, T, d) at its output.

    mean: None of a layer without heads, which has no nats.
    """
    hidden = layer_input(run, layer).detach().requires_grad_()
    heads: list[Tensor] = []
    places = [] if mean is None else [at_place(blocks_of(model)[layer], "head_out", heads.append)]
    with torch.enable_grad(), hooked(places):
        output = run_layer(model, run, layer, hidden)
    if mean is None:
        return torch.autograd.grad(output, hidden, gradient.to(output.device))[0], None
    gradient, at_heads = torch.autograd.grad(output, (hidden, heads[0]), gradient.to(output.device))
    # Whatever leading shape the model gives it, positions come one after the other.
    difference = heads[0].detach().float().reshape(-1, *mean.shape) - mean.to(output.device).float()
    return gradient, (at_heads.float().reshape(-1, *mean.shape) * difference).sum(-1).square()[:-1] / 2


def fit_log_mean(features: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients (n, r) and offsets (n,), fp32, of the logarithm of the mean of ``losses`` given ``features``.

    Args:
        features: (N, r).
        losses: (N, n), not negative.
    """
    z, target = features.double(), losses.double().clamp(max=LIMIT) + LEAST
    mean, scale = z.mean(0), z.std(0).clamp_min(1e-6)
    z = (z - mean) / scale
    weight = z.new_zeros(target.shape[1], z.shape[1]).requires_grad_()
    offset = target.mean(0).log().requires_grad_()
    fit = torch.optim.LBFGS([weight, offset], max_iter=300, history_size=20, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        fit.zero_grad()
        eta = F.linear(z, weight, offset).clamp(-30, 10)  # no overflow on the way
        value = (target * (-eta).exp() + eta).mean(0).sum() + RIDGE * weight.square().sum()
        value.backward()
        return value.detach()

    with torch.enable_grad():
        fit.step(objective)
    weights = weight.detach() / scale
    return weights.float(), (offset.detach() - weights @ mean).float()


HeadPredictors = Mapping[int, tuple[Mapping[str, Any], LowRankPredictor]]
"""By layer what training wrote of a predictor, and the predictor."""
Measured = tuple[dict[int, Tensor], dict[int, Tensor]]
"""By layer features (N, r) and nats (N, n), both fp32."""
Measure = Callable[[Any, HeadPredictors, Mapping[int, Tensor], Sequence[Sequence[int]]], Measured]


class Draw:
    """Draws a token at each position from a model's log-probabilities (T - 1, V), window after window."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, log_probabilities: Tensor) -> Tensor:
        """(T - 1,) int64. The log-probabilities are used up. Raises :class:`UserError` where they are not finite."""
        probabilities = log_probabilities.exp_()
        if not bool(torch.isfinite(probabilities.sum())):
            raise UserError("the dense model's output is not finite; check its weights, or --collect.dtype float32")
        where = probabilities.device
        draw = self._generators.setdefault(where, torch.Generator(where).manual_seed(SEED))
        return torch.multinomial(probabilities, 1, generator=draw)[:, 0]


def feature(predictor: LowRankPredictor, site: Tensor) -> Tensor:
    """(T - 1, r) fp32 on the CPU, for its site (1, T, d)."""
    return predictor.project(site.float().cpu()[0, :-1])


def check_finite(layer: int, losses: Tensor) -> None:
    """Raise :class:`UserError` for losses (T - 1, n) of a layer that are not finite."""
    if not bool(torch.isfinite(losses.sum())):
        raise UserError(
            f"heads of layer {layer}: the gradient of the loss is not finite; calibrate with --collect.dtype"
            " bfloat16 or float32, or --calibrate.head_loss_tokens 0"
        )


def measure_whole(
    model: Any, chosen: HeadPredictors, means: Mapping[int, Tensor], windows: Sequence[Sequence[int]]
) -> Measured:
    """Features and losses of a model that is in memory, window after window."""
    features: dict[int, list[Tensor]] = {layer: [] for layer in chosen}
    losses: dict[int, list[Tensor]] = {layer: [] for layer in chosen}
    device, draw = next(model.parameters()).device, Draw()
    for window in progress(windows, "measuring what heads cost", len(windows), "window"):
        run = dense_pass(model, torch.tensor([list(window)], device=device))
        found = skip_losses(model, run, means, draw(next_log_probabilities(model, run.behind)))
        for layer, (metadata, used) in chosen.items():
            check_finite(layer, found[layer])
            features[layer].append(feature(used, run.sites[Site(metadata["site_layer"], metadata["site"])]))
            losses[layer].append(found[layer].cpu())
    made = [{layer: torch.cat(parts) for layer, parts in each.items()} for each in (features, losses)]
    return made[0], made[1]


@torch.no_grad()
def refit_heads(
    model: Any,
    predictors: Mapping[int, tuple[Mapping[str, Any], nn.Module]],
    means: Mapping[int, Tensor],
    dtype: str,
    windows: Sequence[Sequence[int]],
    measure: Measure = measure_whole,
) -> dict[int, LowRankPredictor]:
    """By layer a predictor with the ``down`` of its low-rank one, whose logits are log nats that skipping costs.

    Args:
        model: of a registered family, as ``measure`` takes it.
        predictors: by layer what training wrote of it (its site above all) and the predictor. Custom ones are left out.
        means: as in :func:`skip_losses`, of every layer.
        dtype: to which predictors are rounded. ``up`` is fitted to the rounded ``down``.
        windows: token ids of calibration documents, each starting with ``</s>``.

    Raises:
        UserError: an output of the model, or gradients, that are not finite.
    """
    chosen: dict[int, tuple[Mapping[str, Any], LowRankPredictor]] = {}
    for layer, (metadata, predictor) in predictors.items():
        if isinstance(predictor, LowRankPredictor):
            as_stored(predictor, stored_tensors(predictor, dtype))
            chosen[layer] = metadata, predictor.cpu()
    if not chosen:
        return {}
    features, losses = measure(model, chosen, means, windows)
    refitted = {}
    for layer, (_, used) in chosen.items():
        up, bias = fit_log_mean(features[layer], losses[layer])
        rank, d_in = used.down.shape
        new = LowRankPredictor(d_in, rank, len(up), used.nonlinearity)
        new.load_state_dict({"down": used.down, "up": up, "bias": bias})
        refitted[layer] = new.requires_grad_(False).eval()
    return refitted
