"""The output projection over selected heads against its reference in float64. Other heads' columns are poisoned."""

from contextlib import nullcontext

import pytest
import torch

from dejavu_train.kernels.attention.out_projection import (
    ProjectSettings,
    project_heads,
    project_heads_reference,
)
from dejavu_train.kernels.formats.matrix import Rows
from dejavu_train.kernels.stages.predictor import head_selection

NAN = float("nan")


def case(device, batch, n_heads, head_dim, d, density, dtype=torch.float32):
    """(mixed, weight, bias, residual, selection). Columns of heads that no row selects are NaN in the weight."""
    width = n_heads * head_dim
    mixed, residual = torch.randn(batch, width, device=device), torch.randn(batch, d, device=device)
    weight = (torch.randn(d, width, device=device) / width**0.5).to(dtype)
    bias = torch.randn(d, device=device).to(dtype)
    if density is None:
        return mixed, weight, bias, residual, None
    mask = torch.rand(batch, n_heads, device=device) < density
    selection = head_selection(n_heads, device)
    selection.set_mask(mask)
    if batch == 1:  # several rows are a product over all columns
        weight[:, ~mask.any(0).repeat_interleave(head_dim)] = NAN
    return mixed * mask.repeat_interleave(head_dim, 1), weight, bias, residual, selection


ROWS, TILES = ProjectSettings(4, 16, 0, 4), ProjectSettings(16, 0, 3, 1)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-4), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
@pytest.mark.parametrize(
    ("batch", "n_heads", "head_dim", "d", "density", "settings"),
    [(1, 3, 16, 40, 0.5, ROWS), (1, 4, 16, 64, 0.0, ROWS), (1, 2, 80, 33, None, ROWS), (2, 3, 32, 20, None, None),
     (1, 3, 16, 40, 0.5, TILES), (1, 4, 16, 64, 0.0, TILES), (1, 3, 80, 33, 0.6, TILES), (3, 2, 80, 33, 0.6, None)],
)  # fmt: skip
def test_project_heads(device, batch, n_heads, head_dim, d, density, settings, dtype, off):
    if settings is TILES and dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter multiplies no matrices of bfloat16")
    mixed, weight, *rest = case(device, batch, n_heads, head_dim, d, density, dtype)
    out, expected = (torch.full((batch, d), NAN, dtype=kind, device=device) for kind in (torch.float32, torch.float64))
    with nullcontext() if settings is None else settings.in_use():
        project_heads(mixed, Rows(weight), *rest, out)
    project_heads_reference(mixed.double(), Rows(weight.nan_to_num().double()), *rest, expected)
    torch.testing.assert_close(out.double(), expected, atol=off * (1 if dtype == torch.float32 else 4), rtol=off)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("batch", "n_heads", "d", "density"),
    [(1, 72, 9216, 0.5), (1, 32, 4096, None), (4, 40, 5120, 0.5), (16, 9, 1152, 0.3)],
)
def test_at_true_shapes(device, dtype, batch, n_heads, d, density):
    mixed, weight, *rest = case(device, batch, n_heads, 128, d, density, dtype)
    out, again, expected = (torch.full((batch, d), NAN, device=device) for _ in range(3))
    project_heads(mixed, Rows(weight), *rest, out)
    project_heads(mixed, Rows(weight), *rest, again, pdl=True)
    project_heads_reference(mixed, Rows(weight.nan_to_num()), *rest, expected)
    assert torch.equal(out, again)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def test_mistakes_are_one_line(device):
    mixed, weight, bias, residual, selection = case(device, 1, 3, 16, 40, 0.5)
    with pytest.raises(ValueError, match=r"weight: expected shape \(40, 32\), got \(40, 48\)"):
        project_heads(mixed[:, :32].contiguous(), Rows(weight), bias, residual, selection, residual.clone())
