"""fc2 over all neurons with 4-bit weights, one to eight tokens, against float64."""

from contextlib import nullcontext

import pytest
import torch
from int4_helpers import random_rows, with_outliers

from dejavu_train.kernels.common.limits import takes_down
from dejavu_train.kernels.common.partial_sums import partial_sums
from dejavu_train.kernels.mlp import int4_fc2 as module
from dejavu_train.kernels.mlp.int4_fc2 import Int4Fc2Settings, int4_fc2, int4_fc2_reference

NAN = float("nan")


def check(device, n, d, group, batch, live=0.6, pdl=False):
    torch.manual_seed(n + d)
    weight = random_rows(device, n, d, group=group, size=n**-0.5)
    h = with_outliers(torch.randn(batch, n, device=device)).abs() * (torch.rand(batch, n, device=device) < live)
    # Behind h, what nothing may read; as the kernel takes it.
    h = torch.cat((h, torch.full_like(h, NAN))).to(torch.float32 if batch == 1 else torch.float16)[:batch]
    bias, residual = torch.randn(d, device=device), torch.randn(batch, d, device=device)
    out, partials = torch.full((batch, d), NAN, device=device), partial_sums(d, device).fill_(NAN)
    int4_fc2(h, weight, bias, residual, out, partials, pdl)
    want = torch.empty(batch, d, dtype=torch.float64, device=device)
    int4_fc2_reference(h.double(), weight, bias, residual, want)
    size = h.double() @ weight.dense(torch.float64).abs() + bias.abs() + residual.abs()
    assert ((out - want).abs() <= 2**-10 * size).all()  # h * scale is rounded to fp16, products are exact
    return out


@pytest.mark.parametrize(
    ("n", "d", "group", "batch", "live", "settings"),
    [
        (71, 256, 128, 1, 0.6, None),
        (129, 192, 32, 1, 0.0, None),
        (100, 1088, 32, 1, 1.0, Int4Fc2Settings(2, 4, 4, 128, 0)),  # a program's columns beyond the row's end
        (203, 128, 64, 1, 0.7, Int4Fc2Settings(1, 3, 2, 128, 0)),  # four rounds of a list
        (70, 256, 128, 2, 0.6, None),
        (131, 640, 64, 2, 0.6, Int4Fc2Settings(4, 4, 2, 128, 0)),
        (67, 256, 128, 3, 0.05, None),
        (38, 512, 128, 7, 0.6, None),
        (38, 1536, 384, 8, 0.6, Int4Fc2Settings(2, 2, 4, 168, 0)),  # halves of a warp with one scale and with two
    ],
)
def test_int4_fc2(device, n, d, group, batch, live, settings, monkeypatch):
    if settings is not None:
        monkeypatch.setattr(module, "n_sms", lambda _: 1)  # its programs are those of the grid
    with nullcontext() if settings is None else settings.in_use():
        check(device, n, d, group, batch, live)


@pytest.mark.parametrize(("d", "group", "batch"), [(320, 32, 1), (640, 64, 2), (512, 128, 8)])
def test_the_queue_in_assembly(device, queues_in_assembly, d, group, batch, monkeypatch):
    monkeypatch.setattr(module, "n_sms", lambda _: 1)
    with Int4Fc2Settings(2, 2, 2, 128, 0).in_use():
        check(device, 90, d, group, batch)


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_that_no_token_needs_are_not_read(device, batch):
    weight = random_rows(device, 24, 256, group=128)
    weight.scales[11] = NAN
    h = torch.ones(batch, 24, device=device).to(torch.float32 if batch == 1 else torch.float16)
    zero, out = torch.zeros(batch, 256, device=device), torch.empty(batch, 256, device=device)
    for value, whole in ((0.0, True), (1.0, False)):
        h[:, 11] = 0.0
        h[-1, 11] = value
        int4_fc2(h, weight, zero[0], zero, out)
        assert bool(out.isfinite().all()) == whole


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_a_nan_stays_in_its_row(device, batch):
    weight = random_rows(device, 64, 256, group=128)
    h = torch.zeros(batch, 64, device=device).to(torch.float32 if batch == 1 else torch.float16)
    zero, out = torch.zeros(batch, 256, device=device), torch.empty(batch, 256, device=device)
    h[-1, 50] = NAN
    int4_fc2(h, weight, zero[0], zero, out)
    assert out[:-1].isfinite().all() and out[-1].isnan().all()


def test_what_the_l2_is_asked_for_early_lies_within(device, monkeypatch):
    if device == "cuda":
        pytest.skip("the kernel itself asks")
    asked = []

    def note(at, there, size):
        size = getattr(size, "value", size)
        asked.extend((int(place), size) for place in at.handle.data[there.handle.data.astype(bool)])

    monkeypatch.setattr(module, "fetch_ahead", note)
    monkeypatch.setattr(module, "fetches_rows", lambda _: True)
    monkeypatch.setattr(module, "n_sms", lambda _: 1)
    n, d = 60, 576  # 72 words a row: of the second stripe, which has 8, as many are asked for as of the first
    weight = random_rows(device, n, d, group=32)
    h, zero = torch.ones(1, n, device=device), torch.zeros(1, d, device=device)
    with Int4Fc2Settings(2, 1, 4, 128, 8).in_use():
        int4_fc2(h, weight, zero[0], zero, zero.clone())
    assert asked and all(at % 16 == 0 and size % 16 == 0 for at, size in asked)
    words, scales = ((t.data_ptr(), t.data_ptr() + t.nbytes) for t in (weight.words, weight.scales))
    rows = {(at - words[0], size) for at, size in asked if words[0] <= at < words[1]}
    first_rows = [30 * split + row for split in (0, 1) for row in range(8)]
    assert rows == {(4 * (72 * row + start), 256) for row in first_rows for start in (0, 8)}
    others = sorted((at, size) for at, size in asked if not words[0] <= at < words[1])
    assert [size for _, size in others] == [8 * 2 * 18] * 2
    for (at, size), split in zip(others, (0, 1), strict=True):
        first = scales[0] + 30 * split * 36
        assert first - 16 < at <= first and at + size <= scales[1]


def test_what_does_not_fit_is_refused(device):
    narrow = random_rows(device, 32, 256, group=64)
    assert [takes_down(64, 256, rows) for rows in (0, 1, 2, 3)] == [False, True, True, False]
    assert not takes_down(128, 256, 9)
    h, zero = torch.zeros(9, 32, device=device), torch.zeros(9, 256, device=device)
    for d, group in ((128, 128), (160, 32)):
        weight = random_rows(device, 32, d, group=group)
        assert not takes_down(group, d, 1)
        row = torch.zeros(1, d, device=device)
        with pytest.raises(ValueError, match=f"groups of {group} of {d} columns: .* even number of multiples of 32"):
            int4_fc2(h[:1], weight, row[0], row, row.clone())
    with pytest.raises(ValueError, match="groups of 64 of 256 columns: expected an even number of multiples of 128"):
        int4_fc2(h[:3].half(), narrow, zero[0], zero[:3], zero[:3].clone())
    with pytest.raises(ValueError, match="9 tokens, expected 1 to 8"):
        int4_fc2(h.half(), narrow, zero[0], zero, zero.clone())
    for given, expected, got in ((h[:2], "float16", "float32"), (h[:1].half(), "float32", "float16")):
        rows = zero[: len(given)]
        with pytest.raises(ValueError, match=f"h: expected {expected}, got {got}"):
            int4_fc2(given, narrow, zero[0], rows, rows.clone())
    for fetched in (12, 40, -8):
        refused = pytest.raises(ValueError, match=f"{fetched} rows fetched, expected a multiple of 8, at most 32")
        with refused, Int4Fc2Settings(1, 2, 4, 128, fetched).in_use():
            int4_fc2(h[:1], narrow, zero[0], zero[:1], zero[:1].clone())


@pytest.mark.gpu
@pytest.mark.parametrize("d", [768, 2048, 2560, 4096, 7168, 9216, 12288])
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_at_true_shapes(d, batch):
    plain, dependent = (check("cuda", 4 * d, d, 128, batch, pdl=pdl) for pdl in (False, True))
    torch.testing.assert_close(plain, dependent, atol=0, rtol=0)
