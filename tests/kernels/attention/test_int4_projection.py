"""The output projection over selected heads with 4-bit weights. What is not selected is poisoned."""

import pytest
import torch
from int4_helpers import assert_rounded_products, random_rows, with_outliers

from dejavu_train.kernels.attention.out_projection import (
    HeadRowSettings,
    project_heads,
    project_heads_reference,
)
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.stages.predictor import head_selection

NAN = float("nan")


def case(device, n_heads, head_dim, d, density, size=0.05):
    weight = random_rows(device, n_heads, d, head_dim, group=head_dim, size=size)
    mixed = with_outliers(torch.randn(1, n_heads * head_dim, device=device)).half()
    residual, bias = torch.randn(1, d, device=device), torch.randn(d, device=device)
    selection = None
    if density is not None:
        mask = torch.rand(1, n_heads, device=device) < density
        selection = head_selection(n_heads, device)
        selection.set_mask(mask)
        mixed *= mask.repeat_interleave(head_dim, 1)
    return mixed, weight, bias, residual, selection


def check(out, mixed, weight, bias, residual, selection):
    want = torch.empty(out.shape, dtype=torch.float64, device=out.device)
    project_heads_reference(mixed.double(), weight, bias, residual, selection, want)
    sums = torch.empty_like(want)
    size = Int4Rows(weight.words, weight.scales).dense(torch.float64).abs()
    x = mixed.double().abs().view(1, *weight.shape[::2])
    sums = torch.einsum("bhj,hij->bi", x, size)
    assert_rounded_products(out, want, sums)


@pytest.mark.parametrize(
    ("n_heads", "head_dim", "d", "density", "settings"),
    [(3, 32, 20, 0.5, (1, 2, 3)), (2, 64, 9, 0.0, (1, 2, 1)), (3, 80, 9, None, (2, 4)), (2, 80, 17, 1.0, (1, 2)),
     (2, 128, 16, None, (1, 8)), (5, 16, 12, 0.6, (2, 2)), (3, 128, 40, None, (1, 4, 4))],
)  # fmt: skip
def test_project_head_rows(device, n_heads, head_dim, d, density, settings):
    mixed, weight, *rest = case(device, n_heads, head_dim, d, density)
    if rest[-1] is not None:
        kept = weight.scales.clone()
        weight.scales[rest[-1].row_bits == 0] = NAN
    out = torch.full((1, d), NAN, device=device)
    with HeadRowSettings(*settings).in_use():
        project_heads(mixed, weight, *rest, out)
    if rest[-1] is not None:
        weight.scales.copy_(kept)
    check(out, mixed, weight, *rest)


@pytest.mark.parametrize("int4", [True, False])
def test_several_rows_are_a_matrix_product(device, int4):
    mixed, weight, bias, residual, _ = case(device, 2, 32, 8, None)
    mixed, residual = mixed.repeat(3, 1), residual.repeat(3, 1)
    mixed[1] *= 0.5
    out, want = torch.full((3, 8), NAN, device=device), torch.empty(3, 8, dtype=torch.float64, device=device)
    (project_heads if int4 else project_heads_reference)(mixed, weight, bias.half(), residual, None, out)
    project_heads_reference(mixed.double(), weight, bias.half(), residual, None, want)
    torch.testing.assert_close(out.double(), want, atol=0.1, rtol=5e-3)  # weights in fp16, the product rounded to it


def test_errors_name_what_does_not_fit(device):
    mixed, weight, *rest = case(device, 2, 64, 8, None)
    out = torch.empty(1, 8, device=device)
    halves = random_rows(device, 2, 8, 64, group=32)
    with pytest.raises(ValueError, match="2 groups a head, expected one"):
        project_heads(mixed, halves, *rest, out)
    with pytest.raises(ValueError, match="mixed: expected float16, got float32"):
        project_heads(mixed.float(), weight, *rest, out)
    with pytest.raises(ValueError, match="head dim 24"):
        project_heads(mixed, random_rows(device, 2, 8, 24, group=24), *rest, out)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n_heads", "head_dim", "d", "density"),
    [(72, 128, 9216, 0.5), (32, 128, 4096, None), (96, 128, 12288, 0.85), (32, 80, 2560, 0.5), (32, 64, 2048, 0.5),
     (12, 32, 384, 0.0), (4, 64, 256, 0.5), (8, 80, 640, None), (3, 128, 384, 0.7)],
)  # fmt: skip
def test_at_true_shapes(n_heads, head_dim, d, density):
    mixed, weight, *rest = case("cuda", n_heads, head_dim, d, density, d**-0.5)
    out, again = (torch.full((1, d), NAN, device="cuda") for _ in range(2))
    project_heads(mixed, weight, *rest, out)
    project_heads(mixed, weight, *rest, again, pdl=True)
    assert torch.equal(out, again)
    check(out, mixed, weight, *rest)


@pytest.mark.parametrize("density", [None, 0.6])
def test_the_queue_in_assembly(device, queues_in_assembly, density):
    mixed, weight, *rest = case(device, 7, 32, 40, density)
    out = torch.full((1, 40), NAN, device=device)
    with HeadRowSettings(1, 2, 3).in_use():
        project_heads(mixed, weight, *rest, out)
    check(out, mixed, weight, *rest)
