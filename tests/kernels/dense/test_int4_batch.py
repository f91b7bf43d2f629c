"""Up to eight tokens with 4-bit rows. What lies beyond a matrix or a batch is poisoned by NaN."""

import pytest
import torch
from int4_helpers import assert_rounded_products, random_rows, with_outliers

from dejavu_train.kernels.attention.out_projection import project_heads, project_heads_reference
from dejavu_train.kernels.common.activation import activation_reference
from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.selection import PackedSelection, Selection
from dejavu_train.kernels.dense import dense_batch
from dejavu_train.kernels.dense.dense_batch import (
    int4_linear,
)
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear, MlpWeights
from dejavu_train.kernels.mlp.pack import pack
from dejavu_train.kernels.stages.hidden import hidden_tokens
from dejavu_train.kernels.stages.mlp import hidden_reference
from dejavu_train.kernels.stages.rows import TokenSettings, launch_tokens
from dejavu_train.kernels.stages.sink import QkvSink


def int4_linear_reference(x, weight, bias, activation):
    """Plain torch, in fp64 where x is."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide) @ weight.dense(wide).flatten(0, -2).T
    if bias is not None:
        y = y + bias
    return activation_reference(y, activation)


def inputs(device, batch, n):
    """(B, n) fp16 in front of rows that nothing may read."""
    whole = torch.full((batch + 9, n), float("nan"), dtype=torch.float16, device=device)
    whole[:batch] = with_outliers(torch.randn(batch, n, device=device)).half()
    return whole[:batch]


def magnitudes(weight):
    return Int4Rows(weight.words, weight.scales).dense(torch.float64).abs()


def by_head_case(device, n_heads, d, head_dim, batch):
    """(x, weight, bias, residual)"""
    weight = random_rows(device, n_heads, d, head_dim, group=head_dim)
    bias, residual = torch.randn(d, device=device).half(), torch.randn(batch, d, device=device)
    return inputs(device, batch, n_heads * head_dim), weight, bias, residual


def assert_by_head(x, weight, bias, residual):
    out = torch.full_like(residual, float("nan"))
    project_heads(x, weight, bias, residual, None, out)
    want = torch.empty_like(residual, dtype=torch.float64)
    project_heads_reference(x.double(), weight, bias, residual, None, want)
    wide = x.double().view(len(x), weight.shape[0], -1).abs()
    sums = torch.einsum("bhj,hij->bi", wide, magnitudes(weight))
    assert_rounded_products(out, want, sums)


def listed_case(device, n, d, group, batch, density):
    """The arguments of `hidden_tokens`."""
    x, weight = inputs(device, batch, d), random_rows(device, n, d, group=group)
    selection = Selection.from_mask(torch.rand(batch, n, device=device) < density)
    rows = PackedSelection.empty(n, device)
    pack(selection, rows)
    up = Linear(weight, torch.randn(n, device=device).half())
    return x, MlpWeights(up, up), (rows, selection.row_bits)


def assert_listed(case):
    x, weights, (_, row_bits) = case
    weight = weights.up.weight
    got = hidden_tokens(*case)
    bits = (row_bits >> torch.arange(len(x), device=x.device)[:, None]) & 1
    want = torch.where(bits != 0, hidden_reference(x.double(), weights), 0.0)
    assert_rounded_products(got, want, x.double().abs() @ magnitudes(weight).T + 1)
    assert bool((got[want == 0] == 0).all())


def assert_qkv(device, n_heads, head_dim, d, group, batch, capacity=6, pdl=False):
    """q and each row's place in the caches against float64. Nothing else is written. Returns q, k and v."""
    x, weight = inputs(device, batch, d), random_rows(device, n_heads, 3, head_dim, d, group=group)
    bias = torch.randn(n_heads, 3, head_dim, device=device).half()
    position = torch.tensor([3, 0, 5, 1, 4, 2, 2, 0][:batch], dtype=torch.int32, device=device)
    q = torch.full((batch, n_heads, head_dim), float("nan"), device=device)
    caches = [torch.full((batch, n_heads, capacity, head_dim), -77.0, device=device).half() for _ in range(2)]
    launch_tokens(x, weight, QkvSink.of(HeadStep(q, KvCache(*caches, x[:, :0]), position), bias), pdl)
    rows = weight.view(3 * n_heads * head_dim, d)
    want = int4_linear_reference(x.double(), rows, bias.flatten(), "none")
    sizes = (x.double().abs() @ magnitudes(rows).T + 1).view(batch, n_heads, 3, head_dim).unbind(2)
    every = torch.arange(batch, device=device)
    found = [q, *(cache[every, :, position.long()] for cache in caches)]
    for one, expected, size in zip(found, want.view(batch, n_heads, 3, head_dim).unbind(2), sizes, strict=True):
        assert_rounded_products(one, expected, size)
    for cache in caches:
        cache[every, :, position.long()] = -77.0
        assert bool((cache == -77.0).all())
    return found


SHAPES = [
    (40, 640, 128, 2),
    (24, 256, 128, 1),
    (16, 96, 32, 8),
    (37, 192, 64, 5),
    (9, 1152, 128, 3),
    (100, 640, 128, 7),
]


@pytest.mark.parametrize(("n", "d", "group", "batch"), SHAPES)
def test_int4_linear(device, n, d, group, batch):
    x, weight = inputs(device, batch, d), random_rows(device, n, d, group=group)
    bias, activation = (torch.randn(n, device=device).half(), "relu") if n % 2 else (None, "none")
    got = int4_linear(x, weight, bias, activation)
    want = int4_linear_reference(x.double(), weight, bias, activation)
    assert_rounded_products(got, want, x.double().abs() @ magnitudes(weight).T + 1)


@pytest.mark.parametrize(
    ("n_heads", "d", "head_dim", "batch"),
    [(3, 40, 32, 2), (9, 17, 16, 8), (2, 24, 80, 3), (5, 16, 128, 4), (3, 33, 64, 8)],
)
def test_int4_by_head(device, n_heads, d, head_dim, batch):
    assert_by_head(*by_head_case(device, n_heads, d, head_dim, batch))


@pytest.mark.parametrize(
    ("n_heads", "head_dim", "d", "group", "batch"),
    [(2, 16, 96, 32, 2), (3, 80, 256, 128, 3), (1, 128, 640, 128, 8), (2, 32, 192, 64, 1)],
)
def test_int4_qkv(device, n_heads, head_dim, d, group, batch):
    assert_qkv(device, n_heads, head_dim, d, group, batch)


@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("n", "d", "group", "batch"), [(200, 256, 128, 2), (77, 160, 32, 3), (90, 640, 128, 8)])
def test_listed_neurons(device, n, d, group, batch, density):
    assert_listed(listed_case(device, n, d, group, batch, density))


def test_a_fault_stays_with_its_token(device):
    """NaN is no zero where the row is selected, and no other token's."""
    case = listed_case(device, 64, 128, 32, 3, 0.5)
    x, (_, row_bits) = case[0], case[-1]
    clean = hidden_tokens(*case)
    x[1] = float("nan")
    got = hidden_tokens(*case)
    assert bool((got[[0, 2]] == clean[[0, 2]]).all())
    chosen = (row_bits >> 1) & 1 != 0
    assert bool(got[1][chosen].isnan().all()) and bool((got[1][~chosen] == 0).all())


@pytest.mark.parametrize(("warps", "tiles"), [(1, 3), (2, 1), (4, 2)])
def test_programs_of_several_warps_and_blocks(device, warps, tiles):
    """Units are shared out, some warps and the last block have fewer. The queue wraps around."""
    x, weight = inputs(device, 4, 1920), random_rows(device, 24, 1920)
    with TokenSettings(1, warps, tiles, 3).in_use():
        got = int4_linear(x, weight)
        assert_by_head(*by_head_case(device, 5, 20, 80, 2))
        assert_listed(listed_case(device, 40, 1920, 128, 8, 0.6))
    want = int4_linear_reference(x.double(), weight, None, "none")
    assert_rounded_products(got, want, x.double().abs() @ magnitudes(weight).T + 1)


@pytest.mark.parametrize(("tokens", "tiles"), [(2, 1), (4, 3), (8, 2)])
def test_queues_in_assembly(device, queues_in_assembly, tokens, tiles):
    """Slots that are asked for anew, in one block and from one to the next, lines of two rows and of two heads."""
    x, weight = inputs(device, tokens, 1280), random_rows(device, 50, 1280)
    with TokenSettings(1, 2, tiles, 2).in_use():
        got = int4_linear(x, weight)
        assert_by_head(*by_head_case(device, 7, 40, 80, tokens))
        assert_listed(listed_case(device, 60, 640, 128, tokens, 0.5))
    want = int4_linear_reference(x.double(), weight, None, "none")
    assert_rounded_products(got, want, x.double().abs() @ magnitudes(weight).T + 1)


@pytest.mark.parametrize("batch", [1, 2])
def test_codes_are_not_written_out_for_few_rows(device, batch, monkeypatch):
    """One row comes here from a guard's measured steps."""
    monkeypatch.setattr(dense_batch, "numbers_of", None)
    x, weight = torch.randn(batch, 64, device=device), random_rows(device, 24, 64, group=32)
    ln = LayerNormWeights(torch.ones(64, device=device), torch.zeros(64, device=device))
    got = dense_batch.dense_hidden(x, ln, weight, None, "relu")
    want = int4_linear_reference(layer_norm_reference(x, ln, torch.float16).double(), weight, None, "relu")
    torch.testing.assert_close(got.double(), want, atol=0.01, rtol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [2, 3, 8])
@pytest.mark.parametrize("d", [2560, 4096, 7168, 9216, 12288])
def test_at_true_shapes(device, d, batch):
    """True settings. Twice the same bits."""
    x, weight = inputs(device, batch, d), random_rows(device, d, d)
    want = int4_linear_reference(x.double(), weight, None, "none")
    got = int4_linear(x, weight)
    assert_rounded_products(got, want, x.double().abs() @ magnitudes(weight).T + 1)
    assert bool((got == int4_linear(x, weight)).all())
    head_dim = 80 if d == 2560 else 128
    assert_by_head(*by_head_case(device, d // head_dim, d, head_dim, batch))
    assert_listed(listed_case(device, d, d, 128, batch, 0.1))
    for pdl in (False, True):
        assert_qkv(device, d // head_dim, head_dim, d, 128, batch, pdl=pdl)


def test_errors_name_what_does_not_fit(device):
    weight = random_rows(device, 32, 64, group=32)
    with pytest.raises(ValueError, match="no pair of units"), TokenSettings(1, 1, 1, 0).in_use():
        int4_linear(torch.zeros(2, 64, device=device).half(), weight)
    with pytest.raises((ValueError, TypeError), match="bias"):
        int4_linear(torch.zeros(2, 64, device=device).half(), weight, torch.zeros(32, device=device).long())
    with pytest.raises(ValueError, match="9 tokens, expected 1 to 8"):
        int4_linear(torch.zeros(9, 64, device=device).half(), weight)
    with pytest.raises((ValueError, TypeError), match="x"):
        int4_linear(torch.zeros(2, 64, device=device), weight)
    bias, rows = torch.zeros(32, device=device), PackedSelection.empty(32, device)
    up = Linear(weight, bias)
    with pytest.raises((ValueError, TypeError), match="row_bits"):
        hidden_tokens(torch.zeros(2, 64, device=device).half(), MlpWeights(up, up), (rows, bias))
