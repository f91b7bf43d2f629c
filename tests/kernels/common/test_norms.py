"""Every norm in every kernel that normalises, against torch in float64: odd sizes, half precision, large means."""

import pytest
import torch
from int4_helpers import random_rows
from torch.nn import functional as F

from dejavu_train.kernels.common.late_norm import late_sums
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind, layer_norm_reference
from dejavu_train.kernels.common.limits import Products
from dejavu_train.kernels.common.selection import PackedSelection, Selection
from dejavu_train.kernels.dense.dense_rows import dense_rows
from dejavu_train.kernels.dense.screened_head import ScreenedHead, screened_head
from dejavu_train.kernels.formats.matrix import Linear, MlpWeights, Rows
from dejavu_train.kernels.mlp.pack import pack
from dejavu_train.kernels.stages.mlp import mlp
from dejavu_train.kernels.stages.norm import layer_norm
from dejavu_train.kernels.stages.predict import predict
from dejavu_train.kernels.stages.predictor import Predictor, PredictorWeights, norm_sums

NAN = float("nan")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # of a number, and its neighbour's
# weight and bias that there are
FORMS = [(kind, weight, bias) for kind in NormKind for weight, bias in ((True, True), (True, False), (False, False))]


def norm(kind, weight, bias, d, device, dtype=torch.float16):
    w = torch.randn(d, device=device).to(dtype) if weight else None
    return LayerNormWeights(w, torch.randn(d, device=device).to(dtype) if bias else None, 1e-5, kind)


def row(d, device, mean=30.0):
    """A mean of ten deviations, and two columns far off."""
    x = 3 * torch.randn(1, d, device=device) + mean
    x[0, [1, d // 2]] = torch.tensor([-70.0, 90.0], device=device)
    return x


def expected(x, ln):
    """By torch's own norms, in float64."""
    d, x = x.shape[1], x.double()
    weight, bias = (None if t is None else t.double() for t in (ln.weight, ln.bias))
    if ln.kind is NormKind.LAYER_NORM_1P and weight is not None:
        weight = weight + 1
    if ln.kind is not NormKind.RMS_NORM:
        return F.layer_norm(x, (d,), weight, bias, ln.eps)
    y = F.rms_norm(x, (d,), weight, ln.eps)
    return y if bias is None else y + bias


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "dtype"), [(37, torch.float32), (130, torch.float16), (64, torch.bfloat16)])
def test_the_norm_of_a_batch(device, form, d, dtype):
    x = torch.cat([row(d, device), row(d, device, -5)]).to(dtype)
    ln = norm(*form, d, device, dtype)
    out = torch.full((2, d), NAN, device=device)
    layer_norm(x, ln, out)
    want = expected(x, ln)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(layer_norm_reference(x.double(), ln, torch.float64), want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "dtype"), [(37, torch.float32), (130, torch.float16), (48, torch.bfloat16)])
def test_rows_of_numbers(device, form, d, dtype):
    x, ln, weight = row(d, device), norm(*form, d, device, dtype), torch.randn(5, d, device=device).to(dtype)
    out, n = torch.full((1, 5), NAN, device=device), expected(x, ln)
    dense_rows(x, ln, Rows(weight), None, "none", out)
    size = n.abs() @ weight.double().abs().T
    assert ((out.double() - n @ weight.double().T).abs() <= 2 * ROUNDING[dtype] * size + 1e-5).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "group"), [(40, 40), (320, 32)])
def test_rows_of_4_bits(device, form, d, group):
    x, ln, weight = row(d, device), norm(*form, d, device), random_rows(device, 17, d, group=group)
    out, n = torch.full((1, 17), NAN, device=device), expected(x, ln)
    dense_rows(x, ln, weight, None, "none", out)
    dense = weight.dense(torch.float64)
    assert ((out.double() - n @ dense.T).abs() <= 2 * ROUNDING[torch.float16] * (n.abs() @ dense.abs().T)).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("int4", [False, True])
def test_the_mlp_over_a_list(device, form, int4):
    n, d = 33, 96
    x, ln = row(d, device), norm(*form, d, device)
    up, down = (
        random_rows(device, n, d, group=32, size=0.02) if int4 else Rows(0.02 * torch.randn(n, d, device=device).half())
        for _ in range(2)
    )
    biases = [torch.randn(size, device=device).half() for size in (n, d)]
    mask = torch.rand(1, n, device=device) < 0.6
    rows = PackedSelection.empty(n, device)
    pack(Selection.from_mask(mask), rows)
    out = torch.full((1, d), NAN, device=device)
    mlp(x, ln, MlpWeights(Linear(up, biases[0]), Linear(down, biases[1])), x, rows, out)
    h = (expected(x, ln) @ up.dense(torch.float64).T + biases[0].double()).relu() * mask
    want = h @ down.dense(torch.float64) + biases[1].double() + x.double()
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("form", FORMS)
def test_products_that_are_put_right_refuse_what_they_cannot_be(device, form):
    kind, weight, _ = form
    ln = norm(*form, 32, device)
    rows = torch.randn(2, 32, device=device)
    if kind is NormKind.LAYER_NORM_1P or not weight:
        for sums, given in ((norm_sums, rows), (late_sums, Rows(rows[:, None]))):
            with pytest.raises(ValueError, match="a norm with a weight that products can be put right with, got"):
                sums(given, ln)
    else:
        gains, shifts = norm_sums(rows, ln)
        torch.testing.assert_close(gains, rows @ ln.weight.float())
        torch.testing.assert_close(shifts, rows @ (torch.zeros_like(ln.weight) if ln.bias is None else ln.bias).float())
        for late, sums in zip(late_sums(Rows(rows[:, None]), ln), (gains, shifts), strict=True):
            torch.testing.assert_close(late[:, 0], sums)


@pytest.mark.parametrize("form", [form for form in FORMS if form[1] and form[0] is not NormKind.LAYER_NORM_1P])
def test_predictors_of_one_row_read_any_norm(device, form):
    """What is kept of the input, and the first half of a predictor."""
    ln, x = norm(*form, 64, device), 2 * torch.randn(1, 64, device=device) + 1
    weights = PredictorWeights(torch.randn(8, 64, device=device).half(), torch.randn(96, 8, device=device).half())
    selection = Selection.empty(96, device)
    made = Predictor.of(weights, 0.0, selection, Products.REGISTERS)
    kept = torch.zeros(1, 64, device=device)
    predict(x, ln, made, kept)
    torch.testing.assert_close(kept.double(), expected(x, ln), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(made.hidden.double(), expected(x, ln) @ weights.down.double().T, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", [NormKind.LAYER_NORM, NormKind.RMS_NORM])
def test_screened_heads_read_any_norm(device, kind):
    ln = norm(kind, True, kind is NormKind.LAYER_NORM, 64, device)
    x, weight = 2 * torch.randn(1, 64, device=device) + 1, 0.1 * torch.randn(300, 64, device=device)
    head = ScreenedHead.of(weight, ln)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    screened_head(x, head, zero, zero, torch.full((8,), -1, dtype=torch.int32, device=device))
    logits = expected(x, ln) @ weight.double().T
    best = head.best.values.argmax()
    assert int(head.best.ids[best]) == int(logits.argmax())
    bound = logits[0] - head.upper  # every logit lies below its bound, and most are ruled out
    assert bound.max() <= 1e-4 and head.rows_read() < 150


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_identity_leaves_a_row_as_it_is(device, scale):
    """In kernels that normalise before they multiply, and in those that put products right."""
    x, same = scale * row(64, device), LayerNormWeights.identity(64, device)
    out = torch.full_like(x, NAN)
    layer_norm(x, same, out)
    torch.testing.assert_close(out, x, atol=0, rtol=3e-7)
    assert torch.equal(layer_norm_reference(x, same), x)
    weight = torch.randn(8, 64, device=device)
    want = (x @ weight.T).double()
    made = Predictor.of(
        PredictorWeights(weight, torch.randn(96, 8, device=device)), 0.0, Selection.empty(96, device),
        Products.REGISTERS,
    )  # fmt: skip
    predict(x, same, made, out)
    torch.testing.assert_close(out, x, atol=0, rtol=3e-7)
    products = torch.full((1, 8), NAN, device=device)
    dense_rows(x, same, Rows(weight), None, "none", products)
    for given in (made.hidden, products):
        torch.testing.assert_close(given.double(), want, atol=3e-4 * scale, rtol=1e-5)
