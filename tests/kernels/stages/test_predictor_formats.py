"""Both halves of a predictor in every format, by all products, against float64: odd sizes, ties, none and all."""

import pytest
import torch
from predictor_helpers import predict_down_reference, predict_select, predictor_of

from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.limits import Products
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.formats.codes import unscaled
from dejavu_train.kernels.stages.predict import predict, site_predict
from dejavu_train.kernels.stages.predict_rows import predict_rows
from dejavu_train.kernels.stages.predictor import HeadPredictor, HeadSite, PredictorWeights, head_selection
from dejavu_train.kernels.stages.select import logits_reference, predict_reference, select
from dejavu_train.predictors.quantization import int4_rows, pack_nibbles, quantise_rows

NAN = float("nan")
NUMBERS = ("float32", "float16", "bfloat16")
BYTES = (*NUMBERS, "int8")
# What a hidden value's parts leave out, beside what a reference in float64 has.
BANDS = {Products.REGISTERS: 1e-5, Products.TILES: 2e-4, Products.ROW_TILES: 1e-5}


def stored(numbers, form):
    """A matrix and its scales in a format."""
    if form == "int4":
        codes, scale = int4_rows(numbers.cpu())
        return pack_nibbles(codes).to(numbers.device), scale.float().to(numbers.device)
    if form in NUMBERS:
        return numbers.to(getattr(torch, form)), None
    return quantise_rows(numbers)


def weights_of(device, form, n, rank, d, bias=True, relu=False):
    (down, down_scale), (up, up_scale) = (
        stored(torch.randn(*shape, device=device) * shape[1] ** -0.5, form) for shape in ((rank, d), (n, rank))
    )
    return PredictorWeights(down, up, torch.randn(n, device=device) if bias else None, down_scale, up_scale, relu)


WAYS = [
    *((Products.REGISTERS, form, 1, rank, 64) for form in BYTES for rank in (3, 40)),
    *((Products.ROW_TILES, form, 1, rank, 32) for form in (*NUMBERS, "int8", "int4") for rank in (7, 72)),
    *((Products.TILES, form, batch, 23, 64) for form in BYTES for batch in (2, 5, 17)),
    *((Products.ROW_WORDS, "int4", 1, rank, block) for rank, block in ((8, 32), (40, 64), (128, 32))),
    *((Products.WORDS, "int4", batch, rank, block) for batch, rank, block in ((2, 8, 64), (5, 40, 128), (8, 128, 64))),
]


@pytest.mark.parametrize(("products", "form", "batch", "rank", "block"), WAYS)
def test_the_second_half(device, products, form, batch, rank, block):
    if form == "bfloat16" and products in (Products.TILES, Products.ROW_TILES) and device == "cpu":
        pytest.skip("Triton's interpreter multiplies no matrices of bfloat16")
    torch.manual_seed(rank)
    n, d = 2 * block + 5, 64
    weights = weights_of(device, form, n, rank, d)
    selection = Selection.empty(n, device, block)
    predictor = predictor_of(weights, 0.0, selection, batch, products)
    if products is Products.WORDS:  # the first half leaves hidden in another order
        x = torch.randn(batch, d, device=device).half()
        predict_rows(x, predictor)
        want = predict_reference(x.double(), weights)
    else:
        predictor.hidden.copy_(torch.randn(batch, rank, device=device))
        want = logits_reference(predictor.hidden.double(), weights)
    band = BANDS.get(products, 1e-5) * want.abs().max()
    for threshold in (float("inf"), float("-inf"), float(want.median())):
        for tensor in (selection.ids, selection.counts, selection.row_bits):
            tensor.fill_(-77)
        logits = torch.full((batch, n), NAN, device=device)
        predictor.threshold.fill_(threshold)
        select(predictor, logits_out=logits)
        assert ((logits - want).abs() <= band).all()
        mask = selection.to_mask(batch)
        assert torch.equal(mask, logits > threshold)
        assert torch.equal(selection.indices(), mask.any(0).nonzero().flatten())
        assert int(selection.counts.sum()) == int(mask.any(0).sum())


@pytest.mark.parametrize(("products", "form", "batch", "rank", "block"), WAYS[::3])
@pytest.mark.parametrize("state", [0, 1, 2])
def test_a_tie_is_not_selected_and_states_are_heeded(device, products, form, batch, rank, block, state):
    n, d = block + 3, 64
    weights = weights_of(device, form, n, rank, d)
    weights.bias.copy_(torch.arange(n) % 3 * 0.5)
    weights.up.fill_(0x88) if form == "int4" else weights.up.zero_()  # codes of zero
    selection = Selection.empty(n, device, block)
    predictor = predictor_of(weights, 0.5, selection, batch, products)
    predictor.hidden.zero_()
    select(predictor, torch.full((batch,), state, dtype=torch.int32, device=device))
    want = {0: torch.zeros(n, dtype=torch.bool), 1: torch.arange(n) % 3 == 2, 2: torch.ones(n, dtype=torch.bool)}[state]
    assert torch.equal(selection.to_mask(batch).cpu(), want.expand(batch, n))


@pytest.mark.parametrize("form", [*BYTES, "int4"])
@pytest.mark.parametrize(("d", "rank"), [(33, 5), (64, 16), (130, 9)])
def test_the_first_half_of_one_row(device, form, d, rank):
    weights = weights_of(device, form, 1, rank, d, relu=d == 64)
    ln = LayerNormWeights(torch.rand(d, device=device) + 0.5, torch.randn(d, device=device))
    x, kept = torch.randn(1, d, device=device) * 2 + 1, torch.full((1, d), NAN, device=device)
    products = Products.ROW_TILES if form == "int4" else Products.REGISTERS
    predictor = predictor_of(weights.with_norm(ln), 0.0, Selection.empty(1, device), 1, products)
    predictor.hidden.fill_(NAN)
    predict(x, ln, predictor, kept)
    want = predict_down_reference(x.double(), ln, weights.down, weights.down_scale, weights.relu)
    torch.testing.assert_close(predictor.hidden.double(), want, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(kept, layer_norm_reference(x, ln), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["float32", "float16"])
@pytest.mark.parametrize(("batch", "d", "n_heads"), [(1, 33, 3), (3, 64, 9), (32, 40, 5)])
@pytest.mark.parametrize("threshold", [float("-inf"), 0.0, float("inf")])
def test_heads_of_several_rows(device, form, batch, d, n_heads, threshold):
    """Without and with the first half of an MLP's predictor in the grid, which is of one row."""
    torch.manual_seed(d)
    ln = LayerNormWeights(torch.rand(d, device=device) + 0.5, torch.randn(d, device=device))
    x, rows = torch.randn(batch, d, device=device) + 2, torch.randn(n_heads, d, device=device).to(getattr(torch, form))
    bias, position = torch.randn(n_heads, device=device), torch.arange(batch, dtype=torch.int32, device=device) % 2
    row_state = torch.arange(batch, dtype=torch.int32, device=device) % 3 + (batch == 1)
    bias[0] = NAN  # a NaN logit is never selected
    logits = layer_norm_reference(x.double(), ln, torch.float64) @ rows.double().T + bias
    want = ((logits > threshold) & (row_state[:, None] > 0)) | (row_state[:, None] == 2)
    for form_of_mlp in (None, "int8", "int4") if batch == 1 else (None,):
        attn_in, selection = torch.full((batch, 2, d), NAN, device=device), head_selection(n_heads, device)
        selection.row_bits.fill_(-1)
        heads = HeadPredictor(rows, bias, torch.full((1,), threshold, device=device), selection)
        mlp = None
        if form_of_mlp is not None:
            own = weights_of(device, form_of_mlp, 1, 11, d).with_norm(ln)
            mlp = predictor_of(own, 0.0, Selection.empty(1, device), 1, Products.ROW_TILES)
        site_predict(x, HeadSite.of(heads, ln, row_state), position, attn_in, mlp)
        near = (logits - threshold).abs() < 1e-4
        assert ((selection.to_mask(batch) == want) | near).all()
        kept = attn_in[torch.arange(batch), position.long()]
        torch.testing.assert_close(kept, layer_norm_reference(x, ln), atol=1e-5, rtol=1e-5)
        assert attn_in.isnan().sum() == batch * d  # no other position is written
        if mlp is not None:
            hidden = (
                layer_norm_reference(x.double(), ln, torch.float64)
                @ unscaled(own.down, own.down_scale, torch.float64, d).T
            )
            torch.testing.assert_close(mlp.hidden.double(), hidden, atol=2e-4, rtol=1e-4)


def test_a_site_that_keeps_its_input_alone(device):
    d, n_heads = 48, 3
    ln = LayerNormWeights(torch.rand(d, device=device) + 0.5, torch.randn(d, device=device))
    x, state = torch.randn(2, d, device=device), torch.ones(2, dtype=torch.int32, device=device)
    attn_in, selection = torch.full((2, 3, d), NAN, device=device), head_selection(n_heads, device)
    selection.row_bits.fill_(-1)
    site_predict(x, HeadSite(HeadPredictor(None, None, None, selection), ln, state), state, attn_in)
    torch.testing.assert_close(attn_in[:, 1], layer_norm_reference(x, ln), atol=1e-5, rtol=1e-5)
    assert attn_in.isnan().sum() == 2 * 2 * d and selection.row_bits.eq(-1).all()


def test_products_that_do_not_fit_are_refused(device):
    ln = LayerNormWeights(torch.ones(64, device=device), torch.zeros(64, device=device))
    for products, form, batch, rank in (
        (Products.REGISTERS, "int4", 1, 16),
        (Products.ROW_WORDS, "int4", 1, 12),
        (Products.ROW_WORDS, "int8", 1, 16),
        (Products.TILES, "int4", 2, 16),
        (Products.WORDS, "int8", 2, 16),
    ):
        weights = weights_of(device, form, 70, rank, 64)
        predictor = predictor_of(weights, 0.0, Selection.empty(70, device), batch, products)
        x = torch.randn(batch, 64, device=device).half()
        with pytest.raises(ValueError, match=f"{products}: not for {batch} rows"):
            predict_select(x, predictor, ln)
