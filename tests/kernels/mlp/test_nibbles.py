"""Predictors as nibbles: both products against the codes that a bundle stores."""

import pytest
import torch
from int4_helpers import with_outliers

from dejavu_train.predictors.quantization import int4_rows, pack_nibbles, unpack_nibbles
from kernels.common.layer_norm import LayerNormWeights
from kernels.mlp.codes import nibble_codes
from kernels.mlp.predict import predict_down, predict_down_reference
from kernels.mlp.select import PredictorWeights, Selection, norm_sums, predict_reference, predict_select

NAN = float("nan")


def make_predictor(device, d, rank, n, relu=True):
    parts = []
    for rows, columns in ((rank, d), (n, rank)):
        codes, scale = int4_rows(torch.randn(rows, columns) * columns**-0.5)
        parts.append((pack_nibbles(codes).to(device), scale.float().to(device)))
    (down, down_scale), (up, up_scale) = parts
    return PredictorWeights(down, up, torch.randn(n, device=device), down_scale, up_scale, relu)


def norm(d, device):
    return LayerNormWeights(torch.rand(d, device=device) + 0.5, torch.randn(d, device=device) * 0.1)


@pytest.mark.parametrize("columns", [1, 6, 7])
def test_nibbles_are_those_of_a_bundle(columns):
    stored = pack_nibbles(torch.randint(-7, 8, (3, columns)).to(torch.int8))
    assert torch.equal(nibble_codes(stored, columns), unpack_nibbles(stored, columns))


@pytest.mark.parametrize(("d", "rank", "n"), [(64, 16, 70), (49, 7, 33), (40, 33, 20), (17, 1, 5)])
def test_both_products(device, d, rank, n):
    predictor, ln = make_predictor(device, d, rank, n), norm(d, device)
    x = with_outliers(torch.randn(1, d, device=device) * 2 + 1)
    logits, selection = torch.full((1, n), NAN, device=device), Selection.empty(n, device, 16)
    normalised = torch.full((1, d), NAN, device=device)
    predict_select(
        x, predictor.with_norm(ln), 0.1, selection, ln, normalised_out=normalised, logits_out=logits
    )  # fmt: skip
    want = predict_reference(x.double(), predictor, ln)
    torch.testing.assert_close(logits.double(), want, atol=1e-3, rtol=1e-3)
    assert torch.equal(selection.to_mask(1), logits > 0.1)
    assert normalised.isfinite().all()


def test_several_rows_are_refused(device):
    predictor = make_predictor(device, 16, 4, 8)
    with pytest.raises(ValueError, match="one row at a time|expected"):
        predict_select(torch.randn(2, 16, device=device), predictor, 0.0, Selection.empty(8, device))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [2048, 4096, 5120, 7168, 9216, 12288])
def test_real_shapes(d):
    rank, n = d // 16, 4 * d
    predictor, ln = make_predictor("cuda", d, rank, n, relu=False), norm(d, "cuda")
    x = with_outliers(torch.randn(1, d, device="cuda"), 8)
    out = torch.full((1, rank), NAN, device="cuda")
    predict_down(x, ln, predictor.down, norm_sums(predictor.down, ln), out, predictor.down_scale, pdl=True)
    want = predict_down_reference(x.double(), ln, predictor.down, predictor.down_scale)
    torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=1e-3)
    logits, selection = torch.full((1, n), NAN, device="cuda"), Selection.empty(n, "cuda", 32)
    predict_select(x, predictor.with_norm(ln), 0.1, selection, ln, logits_out=logits, pdl=True)
    torch.testing.assert_close(logits.double(), predict_reference(x.double(), predictor, ln), atol=5e-3, rtol=1e-3)
    assert torch.equal(selection.to_mask(1), logits > 0.1)
