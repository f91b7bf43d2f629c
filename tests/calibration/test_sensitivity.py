"""Sensitivities: zero at density 1, equal to a plain masked forward pass, and nothing left hooked."""

import pytest
import torch
from torch.nn import functional as F

from dejavu_train.calibration.sensitivity import SensitivityProbe, loss_increases, masked
from dejavu_train.families import Site, UnitKey, blocks_of
from dejavu_train.predictors.low_rank import LowRankPredictor

WINDOWS = [[2, *range(10, 40)], [2, *range(50, 75)]]


def predictor_for(target, seed=0):
    torch.manual_seed(seed)
    return LowRankPredictor(48, 8, 96 if target == "mlp" else 4)


@pytest.mark.parametrize("target", ["mlp", "heads"])
def test_everything_selected_loses_nothing_and_less_loses_more(model, target):
    probe = SensitivityProbe(predictor_for(target), UnitKey(1, target).site, [1e4, 0.0, -1e4])
    losses = loss_increases(model, {(1, target): probe}, WINDOWS)[1, target]
    assert losses[-1] == pytest.approx(0.0, abs=1e-6)
    assert losses[0] > losses[1] > 0


def test_equals_a_masked_forward_pass(model):
    predictor = predictor_for("mlp", 3)
    probes = {(0, "mlp"): SensitivityProbe(predictor, Site(0, "mlp_in"), [0.2])}
    measured = loss_increases(model, probes, WINDOWS)[0, "mlp"][0]
    layer = model.model.decoder.layers[0]
    total, tokens = 0.0, 0
    for window in WINDOWS:
        ids = torch.tensor([window])
        seen = []
        handle = layer.final_layer_norm.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out))
        with torch.no_grad():
            dense = F.log_softmax(model(ids).logits, -1)[0, :-1]
            handle.remove()
            keep = predictor(seen[0].reshape(1, len(window), -1)) > 0.2
            with masked(blocks_of(model)[0], "mlp", keep):
                sparse = F.log_softmax(model(ids).logits, -1)[0, :-1]
        total += float((dense.exp() * (dense - sparse)).sum())
        tokens += len(window) - 1
    assert measured == pytest.approx(total / tokens, rel=1e-4)


def test_a_mean_takes_the_place_of_skipped_heads(model):
    layer = model.model.decoder.layers[0]
    ids = torch.tensor([WINDOWS[0]])
    seen = []
    handle = layer.self_attn.out_proj.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    mean = torch.arange(48.0).view(4, 12)
    keep = torch.zeros(1, ids.shape[1], 4, dtype=torch.bool)
    keep[..., 1] = True
    with torch.no_grad(), masked(blocks_of(model)[0], "heads", keep, mean):
        model(ids)
    handle.remove()
    got = seen[0].view(1, ids.shape[1], 4, 12)
    assert torch.equal(got[:, :, 0], mean[0].expand_as(got[:, :, 0]))
    assert not torch.allclose(got[:, :, 1], mean[1].expand_as(got[:, :, 1]))


def test_masking_every_head_removes_attention_and_hooks_leave_no_trace(model):
    layer = model.model.decoder.layers[1]
    ids = torch.tensor([WINDOWS[0]])
    with torch.no_grad():
        before = model(ids).logits
        with masked(blocks_of(model)[1], "heads", torch.zeros(1, ids.shape[1], 4, dtype=torch.bool)):
            without = model(ids).logits
        after = model(ids).logits
    assert not torch.allclose(before, without)
    assert torch.equal(before, after)
    assert not layer.fc2._forward_pre_hooks and not layer._forward_pre_hooks
