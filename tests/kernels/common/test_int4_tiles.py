"""Pieces of a row, and the assembly of products of 4-bit words beside its twin in plain arithmetic."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.common import int4_tiles
from kernels.common.int4_tiles import int4_dot, int4_outer


@pytest.mark.parametrize(
    ("columns", "lanes", "pieces"),
    [
        (4096, 128, ((0, 4),)),
        (7168, 128, ((0, 4), (512, 2), (768, 1))),
        (9216, 128, ((0, 4), (512, 4), (1024, 1))),
        (12288, 256, ((0, 4), (1024, 2))),
        (40, 4, ((0, 1), (4, 1))),  # five words are no vectors
    ],
)
def test_a_row_is_covered_by_pieces(columns, lanes, pieces):
    assert int4_tiles.pieces_of(columns // 8, lanes) == pieces
    assert int4_tiles.lane_words(columns // 8, lanes) == sum(vector for _, vector in pieces)


@triton.jit
def _dot_kernel(words, x, out, VECTOR: tl.constexpr, LANES: tl.constexpr, ASM: tl.constexpr):
    lane = tl.arange(0, LANES)
    w = ()
    for v in tl.static_range(VECTOR):
        w = w + (tl.load(words + lane * VECTOR + v),)
    planes = ()
    for k in tl.static_range(4 * VECTOR):
        planes = planes + (tl.load(x + 4 * VECTOR * lane + k),)
    tl.store(out + lane, int4_dot(w, planes, VECTOR, ASM))


@triton.jit
def _outer_kernel(first, second, factors, acc, out, LANES: tl.constexpr, ASM: tl.constexpr):
    lane = tl.arange(0, LANES)
    before = ()
    for c in tl.static_range(8):
        before = before + (tl.load(acc + 8 * lane + c),)
    one, two = tl.load(factors + lane), tl.load(factors + LANES + lane)
    after = int4_outer(before, tl.load(first + lane), tl.load(second + lane), one, two, ASM)
    for c in tl.static_range(8):
        tl.store(out + 8 * lane + c, after[c])


def words_and_codes(*shape):
    words = torch.randint(-(2**31), 2**31, shape).to(torch.int32)
    shifts = torch.tensor([4 * (c // 2) + 16 * (c % 2) for c in range(8)])
    return words, (words[..., None].long() >> shifts & 15) - 8


def rounded_dot(codes, x):
    """(lanes,) fp64 of codes and x (lanes, words, 8), each product rounded to fp16."""
    return (codes.double() * x.double()).half().double().sum((1, 2))


def products_of_words(device, vector, asm=False):
    words, codes = words_and_codes(64, vector)
    x = (torch.randn(64, vector, 8) * 3).half()
    x[::5] *= 50
    out = torch.full((64,), float("nan"), device=device)
    _dot_kernel[(1,)](words.to(device), x.view(torch.int32).to(device), out, vector, 64, asm, num_warps=2)
    torch.testing.assert_close(out.cpu().double(), rounded_dot(codes, x), atol=1e-3, rtol=1e-5)
    return out


def words_times_factors(device, factor, asm=False):
    (first, codes), (second, more) = words_and_codes(64), words_and_codes(64)
    f = (torch.randn(2, 64) * factor).half()
    acc = torch.randn(64, 8)
    out = torch.full((64, 8), float("nan"), device=device)
    pairs = torch.stack([f, f], -1).contiguous().view(torch.int32)
    _outer_kernel[(1,)](*(t.to(device) for t in (first, second, pairs, acc)), out, 64, asm, num_warps=2)
    products = [(c.double() * g.double()[:, None]).half().double() for c, g in ((codes, f[0]), (more, f[1]))]
    torch.testing.assert_close(out.cpu().double(), acc.double() + products[0] + products[1], atol=1e-5, rtol=1e-5)
    return out


@pytest.mark.parametrize("vector", [1, 2, 4])
def test_products_of_words(device, vector):
    products_of_words(device, vector)


@pytest.mark.parametrize("factor", [1.0, 1e-3])
def test_words_times_factors(device, factor):
    words_times_factors(device, factor)


@pytest.mark.gpu
@pytest.mark.parametrize("vector", [1, 2, 4])
def test_the_assembly_of_products_equals_its_twin(vector):
    torch.manual_seed(1)
    twin = products_of_words("cuda", vector, False)
    torch.manual_seed(1)
    torch.testing.assert_close(products_of_words("cuda", vector, True), twin, atol=1e-3, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1.0, 1e-3])
def test_the_assembly_of_outer_products_equals_its_twin(factor):
    torch.manual_seed(1)
    twin = words_times_factors("cuda", factor, False)
    torch.manual_seed(1)
    torch.testing.assert_close(words_times_factors("cuda", factor, True), twin, atol=1e-6, rtol=1e-6)
