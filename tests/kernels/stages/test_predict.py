"""A short matrix times a normalised vector, the LayerNorm folded into the product."""

import pytest
import torch
from predictor_helpers import predict_down_reference

from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.limits import Products
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.stages.predict import PredictSettings, predict
from dejavu_train.kernels.stages.predictor import Predictor, PredictorWeights, norm_sums
from dejavu_train.predictors.quantization import quantise_rows

NAN = float("nan")


def predict_down(x, ln, weight, sums, out, scale=None, relu=False, normalised_out=None, pdl=False):
    """The first half alone: out (1, rank) receives hidden."""
    zero = torch.zeros(1, len(weight), device=x.device)
    own = PredictorWeights(weight, zero, None, scale, None, relu, sums)
    predictor = Predictor(own, zero, Selection.empty(1, x.device), out, Products.REGISTERS)
    predict(x, ln, predictor, normalised_out, pdl)


def test_a_mean_far_from_zero_and_settings(device):
    """x^2 - mean^2 cancels: a mean of 30 deviations costs digits, not the result."""
    x = torch.randn(1, 200, device=device) + 30
    ln = LayerNormWeights(torch.ones(200, device=device), torch.zeros(200, device=device))
    weight = torch.randn(9, 200, device=device)
    want = predict_down_reference(x.double(), ln, weight)
    for settings in (PredictSettings(1, 64, 2), PredictSettings(2, 128, 4), PredictSettings(6, 32, 1)):
        out = torch.full((1, 9), NAN, device=device)
        with settings.in_use():
            predict_down(x, ln, weight, norm_sums(weight, ln), out)
        torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=1e-2)


def test_refusals(device):
    x, weight = torch.randn(1, 16, device=device), torch.randn(4, 16, device=device)
    ln = LayerNormWeights(torch.ones(16, device=device), torch.zeros(16, device=device))
    out = torch.empty(1, 4, device=device)
    with pytest.raises(ValueError, match="got 2"):
        predict_down(x.repeat(2, 1), ln, weight, norm_sums(weight, ln), out)
    with pytest.raises(ValueError, match="needs a scale"):
        predict_down(x, ln, weight.to(torch.int8), norm_sums(weight, ln), out)
    with pytest.raises(ValueError, match="sums: expected shape"):
        predict_down(x, ln, weight, norm_sums(weight[:3], ln), out)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [2048, 4096, 5120, 7168, 9216, 12288])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_real_widths(d, dtype):
    x = torch.randn(1, d, device="cuda")
    ln = LayerNormWeights(torch.rand(d, device="cuda").half() + 0.5, torch.randn(d, device="cuda").half())
    weight, scale = torch.randn(d // 16, d, device="cuda").half() * d**-0.5, None
    if dtype == torch.int8:
        weight, scale = quantise_rows(weight)
    sums, made = norm_sums(weight, ln), []
    for pdl in (False, True):
        out, normalised = torch.full((1, d // 16), NAN, device="cuda"), torch.full((1, d), NAN, device="cuda").half()
        predict_down(x, ln, weight, sums, out, scale, normalised_out=normalised, pdl=pdl)
        made.append((out, normalised))
    torch.testing.assert_close(
        out.double(), predict_down_reference(x.double(), ln, weight, scale), atol=2e-3, rtol=1e-3
    )
    torch.testing.assert_close(normalised, layer_norm_reference(x, ln, torch.float16), atol=4e-3, rtol=2e-3)
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
