"""What skipping a head costs: the gradient's square, its fit, and a head that moves much and means nothing."""

import copy

import pytest
import torch

from dejavu_train.calibration import head_losses
from dejavu_train.calibration.head_losses import LIMIT, fit_log_mean, refit_heads, skip_losses
from dejavu_train.calibration.sensitivity import dense_pass
from dejavu_train.families import Site
from dejavu_train.ground.errors import UserError
from dejavu_train.predictors.low_rank import LowRankPredictor

WINDOWS = [[2, *torch.randint(4, 300, (40,), generator=torch.Generator().manual_seed(i)).tolist()] for i in range(6)]


@pytest.mark.parametrize("layer", [0, 1])
def test_a_loss_is_half_the_square_of_the_change_of_the_log_likelihood(model, layer):
    ids, position, head, step = torch.tensor([WINDOWS[0]]), 7, 2, 1e-3
    means = {i: torch.full((4, 12), 0.1 * i) for i in range(2)}
    found = skip_losses(model, dense_pass(model, ids), means, ids[0, 1:])[layer]
    assert found.shape == (40, 4)

    def log_likelihood(share):
        def towards_the_mean(_, args):
            values = args[0].clone()
            part = values.view(41, 4, 12)[position, head]
            part += share * (means[layer][head] - part)
            return (values,)

        handle = model.model.decoder.layers[layer].self_attn.out_proj.register_forward_pre_hook(towards_the_mean)
        with torch.no_grad():
            scored = model(ids).logits[0, :-1].double().log_softmax(-1)
        handle.remove()
        return float(scored.gather(1, ids[0, 1:, None]).sum())

    slope = (log_likelihood(step) - log_likelihood(-step)) / (2 * step)
    assert float(found[position, head]) == pytest.approx(slope**2 / 2, rel=0.02)


def test_the_fit_finds_the_logarithm_of_a_scattered_mean():
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(20_000, 3, generator=draw) * torch.tensor([1.0, 0.1, 10.0]) + 2
    weight, offset = torch.tensor([[0.5, 2.0, 0.0], [0.0, -3.0, 0.05]]), torch.tensor([-8.0, -1.0])
    mean = (z @ weight.T + offset).exp()
    scattered = mean * torch.randn(mean.shape, generator=draw).square()
    assert float((scattered > LIMIT).float().mean()) < 0.01
    losses = torch.cat([scattered, torch.zeros(len(z), 1)], 1)
    up, bias = fit_log_mean(z, losses)
    error = z @ up.T + bias - mean.log().nan_to_num() @ torch.eye(2, 3)
    assert float(error[:, :2].abs().mean()) < 0.1
    assert float((z @ up.T + bias)[:, 2].max()) < -15  # nothing is lost without it


def test_a_head_that_moves_what_every_layer_norm_removes_comes_last(model):
    changed = copy.deepcopy(model)
    weight = changed.model.decoder.layers[1].self_attn.out_proj.weight
    with torch.no_grad():
        weight[:, 24:36] = 3.0  # far from its mean, in a direction that no LayerNorm lets through
    torch.manual_seed(0)
    predictors = {i: ({"site": "attn_in", "site_layer": i}, LowRankPredictor(48, 8, 4, bias=i == 0)) for i in range(2)}
    down = predictors[1][1].down.detach().clone()
    refitted = refit_heads(changed, predictors, {i: torch.zeros(4, 12) for i in range(2)}, "float32", WINDOWS)
    site = dense_pass(changed, torch.tensor([WINDOWS[0]])).sites[Site(1, "attn_in")]
    with torch.no_grad():
        logits = refitted[1](site[0])
    assert bool((logits.argmin(-1) == 2).all())
    assert torch.equal(refitted[1].down, down) and refitted[1].bias is not None


@pytest.mark.parametrize(("name", "words"), [("final_layer_norm", "output is not finite"), ("layers.0", "layer 0")])
def test_what_is_not_finite_is_one_line(model, monkeypatch, name, words):
    changed = copy.deepcopy(model)
    if name == "layers.0":  # what a gradient that overflows would leave
        monkeypatch.setattr(head_losses, "skip_losses", lambda *_: {0: torch.full((40, 4), float("inf"))})
    else:
        changed.model.decoder.final_layer_norm.bias.data[3] = float("nan")
    predictors = {0: ({"site": "attn_in", "site_layer": 0}, LowRankPredictor(48, 8, 4))}
    with pytest.raises(UserError, match=words):
        refit_heads(changed, predictors, {i: torch.zeros(4, 12) for i in range(2)}, "float32", WINDOWS)
