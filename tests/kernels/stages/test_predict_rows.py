"""The first half of a predictor for several rows, in tiles. By words: test_nibbles.py."""

import pytest
import torch
from predictor_helpers import predictor_of

from dejavu_train.kernels.common.limits import Products
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.stages.predict_rows import predict_rows
from dejavu_train.kernels.stages.predictor import PredictorWeights
from dejavu_train.predictors.quantization import quantise_rows

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize(("rank", "d", "batch"), [(5, 40, 2), (33, 700, 17)])
def test_tiles(rank, d, batch, dtype, device):
    x, weight, scale = torch.randn(batch, d, device=device), torch.randn(rank, d, device=device), None
    if dtype == torch.int8:
        weight, scale = quantise_rows(weight)
    else:
        x, weight = x.to(dtype), weight.to(dtype)
    for relu in (False, True):
        own = PredictorWeights(weight, torch.zeros(1, rank, device=device), None, scale, None, relu)
        predictor = predictor_of(own, 0.0, Selection.empty(1, device), batch, Products.TILES)
        predictor.hidden.fill_(NAN)
        predict_rows(x, predictor)
        want = x.double() @ (weight.double() if scale is None else weight.double() * scale[:, None].double()).T
        want = want.relu() if relu else want
        torch.testing.assert_close(predictor.hidden.double(), want, atol=2e-3, rtol=2e-3)
