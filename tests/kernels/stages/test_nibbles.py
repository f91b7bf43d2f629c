"""Predictors as nibbles: both products against the codes that a bundle stores."""

from dataclasses import replace

import pytest
import torch
from int4_helpers import with_outliers
from predictor_helpers import predict_down_reference, predict_select, predictor_of

from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.formats.codes import nibble_codes
from dejavu_train.kernels.stages.predict import predict
from dejavu_train.kernels.stages.predictor import PredictorWeights
from dejavu_train.kernels.stages.select import predict_reference, top_k_mask
from dejavu_train.predictors.quantization import int4_rows, pack_nibbles, unpack_nibbles

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


def check_several(device, d, rank, n, batch, block=64, pdl=False):
    """Logits, set, bits and list of several rows against float64."""
    predictor, ln = make_predictor(device, d, rank, n), norm(d, device)
    x = with_outliers(torch.randn(batch, d, device=device) * 2 + 1)
    logits, selection = torch.full((batch, n), NAN, device=device), Selection.empty(n, device, block)
    for tensor in (selection.ids, selection.counts, selection.row_bits):
        tensor.fill_(-77)
    normalised = torch.full((batch, d), NAN, dtype=torch.float16, device=device)
    listed = torch.full((n,), -77, dtype=torch.int32, device=device), torch.full_like(selection.counts[:1], 5)
    state = torch.tensor([1, 1, 0, 2, 1, 1, 1, 1][:batch], dtype=torch.int32, device=device)
    own = predictor_of(predictor, 0.1, selection, batch, listed=listed)
    predict_select(x, own, ln, state, normalised_out=normalised, logits_out=logits, pdl=pdl)
    want = predict_reference(normalised.double(), predictor)
    torch.testing.assert_close(logits.double(), want, atol=1e-4, rtol=1e-4)
    mask = ((logits > 0.1) & (state[:, None] > 0)) | (state[:, None] == 2)
    assert torch.equal(selection.to_mask(batch), mask)
    assert torch.equal(selection.indices(), mask.any(0).nonzero().flatten())
    assert torch.equal(listed[0][: int(listed[1])].sort().values.long(), selection.indices())
    return logits


@pytest.mark.parametrize(
    ("d", "rank", "n", "batch", "block"),
    [(64, 16, 70, 2, 64), (72, 24, 200, 3, 128), (136, 8, 200, 8, 64), (512, 128, 130, 5, 64), (1088, 40, 200, 6, 128)],
)
def test_several_rows(device, d, rank, n, batch, block):
    check_several(device, d, rank, n, batch, block)


def test_several_rows_without_relu_and_bias_whose_hidden_values_are_larger_than_fp16(device):
    predictor = replace(make_predictor(device, 64, 16, 40, relu=False), bias=None)
    x = torch.randn(3, 64, device=device).half()
    hidden = x.double() @ nibble_codes(predictor.down, 64).double().T * predictor.down_scale.double()
    predictor = replace(predictor, down_scale=predictor.down_scale * (1e5 / hidden.abs().max()).float())
    logits = torch.full((3, 40), NAN, device=device)
    predict_select(x, predictor_of(predictor, 0.0, Selection.empty(40, device), 3), logits_out=logits)
    torch.testing.assert_close(logits.double(), predict_reference(x.double(), predictor), atol=20.0, rtol=1e-3)


@pytest.mark.parametrize("batch", [2, 6])
def test_a_nan_stays_in_its_row(device, batch):
    predictor, selection = make_predictor(device, 64, 16, 40), Selection.empty(40, device)
    x = torch.randn(batch, 64, device=device).half()
    x[-1, 3] = NAN
    logits = torch.empty(batch, 40, device=device)
    predict_select(x, predictor_of(predictor, float("-inf"), selection, batch), logits_out=logits)
    assert logits[:-1].isfinite().all() and logits[-1].isnan().all()
    assert selection.to_mask(batch)[:-1].all() and not selection.to_mask(batch)[-1].any()


def test_several_rows_select_the_top_k(device):
    predictor, selection = make_predictor(device, 64, 16, 40), Selection.empty(40, device)
    x = torch.randn(3, 64, device=device).half()
    predict_select(x, predictor_of(predictor, 0.0, selection, 3, top_k=7))
    logits = predict_reference(x.double(), predictor)
    assert torch.equal(selection.to_mask(3), top_k_mask(logits, 7))


@pytest.mark.parametrize(("d", "rank", "batch"), [(60, 16, 2), (64, 12, 2), (64, 16, 9)])
def test_several_rows_that_no_kernel_takes(device, d, rank, batch):
    predictor = make_predictor(device, d, rank, 8)
    with pytest.raises(ValueError, match=f"{batch} rows of {d} columns, rank {rank}: 2 to 8 rows, .* multiples of 8"):
        own = predictor_of(predictor, 0.0, Selection.empty(8, device), batch)
        predict_select(torch.randn(batch, d, device=device).half(), own)


def test_what_several_rows_refuse_leaves_the_count(device):
    predictor, x = make_predictor(device, 64, 16, 40), torch.randn(3, 64, device=device).half()
    ln = norm(64, device)

    def ids(size=40, count_type=torch.int32):
        return torch.zeros(size, dtype=torch.int32, device=device), torch.full((1,), 5, dtype=count_type, device=device)

    def refused(message, listed, x=x, predictor=predictor, selection=None, **options):
        selection = selection or Selection.empty(40, device)
        with pytest.raises(ValueError, match=message):
            predict_select(x, predictor_of(predictor, 0.0, selection, len(x), listed=listed, **options), ln)
        assert int(listed[1]) == 5

    several = "a list without gaps is made of several rows"
    refused(several, ids(), x=x[:1])
    refused(several, ids(), top_k=3)
    refused("listed ids", ids(39))
    refused("listed count", ids(count_type=torch.int64))
    refused("blocks of 32 neurons", ids(), selection=Selection.empty(40, device, 32))
    refused("predictor.up", ids(), predictor=replace(predictor, up=predictor.up.to(torch.int8)))
    whole = Selection.empty(130, device)
    short = replace(whole, counts=whole.counts[:2], ids=whole.ids[:128])
    refused("selection.ids", ids(130), predictor=make_predictor(device, 64, 16, 130), selection=short)
    refused("selection.counts", ids(130), predictor=make_predictor(device, 64, 16, 130),
            selection=replace(whole, counts=whole.counts[:2]))  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("d", [768, 2048, 2560, 4096, 5120, 7168, 9216, 12288])
@pytest.mark.parametrize("batch", [2, 3, 8])
def test_several_rows_at_true_shapes(d, batch):
    torch.manual_seed(0)
    plain = check_several("cuda", d, d // 16, 4 * d, batch)
    torch.manual_seed(0)
    dependent = check_several("cuda", d, d // 16, 4 * d, batch, pdl=True)
    torch.testing.assert_close(plain, dependent, atol=0, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [2048, 4096, 5120, 7168, 9216, 12288])
def test_real_shapes(d):
    rank, n = d // 16, 4 * d
    predictor, ln = make_predictor("cuda", d, rank, n, relu=False), norm(d, "cuda")
    x = with_outliers(torch.randn(1, d, device="cuda"), 8)
    out = predictor_of(predictor.with_norm(ln), 0.0, Selection.empty(n, "cuda", 32))
    predict(x, ln, out, pdl=True)
    want = predict_down_reference(x.double(), ln, predictor.down, predictor.down_scale)
    torch.testing.assert_close(out.hidden.double(), want, atol=2e-3, rtol=1e-3)
    logits, selection = torch.full((1, n), NAN, device="cuda"), Selection.empty(n, "cuda", 32)
    predict_select(x, predictor_of(predictor.with_norm(ln), 0.1, selection), ln, logits_out=logits, pdl=True)
    torch.testing.assert_close(logits.double(), predict_reference(x.double(), predictor, ln), atol=5e-3, rtol=1e-3)
    assert torch.equal(selection.to_mask(1), logits > 0.1)
