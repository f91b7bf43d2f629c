"""Products of chunks of tokens with rows of 4 bits: every arrangement, ending and way of cutting the work."""

import pytest
import torch

from dejavu_train.kernels.dense.chunk_product import (
    PLAIN,
    Arrangement,
    ChunkSettings,
    Ending,
    chunk_product,
    chunk_product_reference,
)
from dejavu_train.kernels.formats.int4 import Int4Rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS, BESIDE, ROWS = Arrangement
CASES = {  # arrangement, leading dimensions, columns, groups
    "a scale for each part of the walk": (COLUMNS, (3, 16), 256, 2),
    "several scales in a tile": (COLUMNS, (40,), 128, 4),
    "one scale a row, odd numbers": (COLUMNS, (5, 7), 288, 1),
    "heads side by side": (BESIDE, (3, 40), 64, 1),
    "heads whose width is no power of two": (BESIDE, (2, 33), 80, 1),
    "rows are inputs": (ROWS, (72,), 512, 4),
    "rows are inputs, outputs that fill no program": (ROWS, (33,), 296, 1),
    "rows are inputs, several scales in a tile": (ROWS, (40,), 64, 4),
    "tiles that are full": (COLUMNS, (128,), 128, 1),
    "tiles of heads that are full": (BESIDE, (2, 128), 64, 2),
    "tiles that are full, rows are inputs": (ROWS, (64,), 256, 2),
}


def made(kind, leading, columns, groups, tokens):
    """(x, weight, bias) of a case."""
    generator = torch.Generator().manual_seed(0)
    n = torch.Size(leading).numel()
    codes = torch.randint(-8, 8, (n, columns), generator=generator, dtype=torch.int8)
    scales = 0.05 * torch.randn(n, groups, generator=generator).half()
    rows = Int4Rows.of(codes, scales).view(*leading, columns)
    n_in = {COLUMNS: columns, ROWS: n, BESIDE: columns * leading[0]}[kind]
    n_out = {COLUMNS: n, ROWS: columns, BESIDE: leading[-1]}[kind]
    x, bias = torch.randn(tokens, n_in, generator=generator), torch.randn(n_out, generator=generator)
    weight = Int4Rows(rows.words.to(DEVICE), rows.scales.to(DEVICE))
    return x.half().to(DEVICE), weight, bias.half().to(DEVICE)


def both(x, weight, bias, kind, ending=PLAIN, dtype=torch.float32, residual=None):
    outs = [torch.empty(len(x), bias.numel(), dtype=dtype, device=x.device) for _ in range(2)]
    chunk_product(x, weight, bias, outs[0], kind, ending, residual)
    chunk_product_reference(x, weight, bias, outs[1], kind, ending, residual)
    return outs


@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_the_numbers(case):
    kind = CASES[case][0]
    for tokens in (16, 20):
        got, want = both(*made(*CASES[case], tokens=tokens), kind)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("case", CASES)
def test_sums_of_any_cut(case):
    kind = CASES[case][0]
    given = made(*CASES[case], tokens=16)
    for outputs, inputs, programs in ((64, 64, 1), (128, 32, 60)):
        with ChunkSettings(16, outputs, inputs, programs, 4, 1).in_use():
            got, want = both(*given, kind)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("programs", [1, 60])
@pytest.mark.parametrize(
    "ending", [Ending("relu", unit=0.25, scale=0.5), Ending("relu2", 0.5), Ending("silu")], ids=lambda e: e.activation
)
def test_endings(ending, programs):
    given = made(*CASES["rows are inputs"], tokens=16)
    with ChunkSettings(16, 32, 32, programs, 4, 1).in_use():
        got, want = both(*given, ROWS, ending, torch.float16, torch.randn(16, 512, device=DEVICE))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_a_nan_stays_in_its_token():
    x, weight, bias = made(*CASES["rows are inputs"], tokens=16)
    x[3, 5] = torch.nan
    got, _ = both(x, weight, bias, ROWS, Ending("relu"))
    assert got[3].isnan().all() and not got[[t for t in range(16) if t != 3]].isnan().any()


def test_what_does_not_fit_is_refused():
    x, weight, bias = made(*CASES["rows are inputs"], tokens=16)
    out = torch.empty(16, bias.numel(), device=x.device)
    with pytest.raises(ValueError, match="x: expected float16, got float32"):
        chunk_product(x.float(), weight, bias, out, ROWS)
    with pytest.raises(ValueError, match=r"x: expected shape \(16, 512\), got \(16, 72\)"):
        chunk_product(x, weight, bias, out)
    with pytest.raises(ValueError, match="a bias of 511 numbers, expected 512"):
        chunk_product(x, weight, bias[:-1], out, ROWS)
    with pytest.raises(ValueError, match="bias: expected a contiguous tensor"):
        chunk_product(x, weight, bias.repeat_interleave(2)[::2], out, ROWS)
    with pytest.raises(ValueError, match="x: no tokens"):
        chunk_product(x[:0], weight, bias, out[:0], ROWS)
    with pytest.raises(ValueError, match="40 inputs in words, expected a multiple of 32"):
        chunk_product(x, Int4Rows(weight.words[:, :5].contiguous(), weight.scales[:, :1].contiguous()), bias, out)
