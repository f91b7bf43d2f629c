"""The packed list of one token: closing gaps, fc2 over it."""

import pytest
import torch

from kernels.formats.matrix import Rows
from kernels.mlp.selection import Selection
from kernels.mlp.sparse_fc2 import Fc2Settings, PackedSelection, pack, partial_sums, sparse_fc2, sparse_fc2_reference

NAN = float("nan")


def poisoned(n, device):
    """Buffers whose ids are in range, as those of an earlier list, and whose values must not be used."""
    rows = PackedSelection.empty(n, device)
    rows.ids.fill_(n - 1)
    rows.values.fill_(NAN)
    rows.count.fill_(n)
    return rows


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("n", "block"), [(1, 64), (70, 16), (2100, 64), (300, 48)])
def test_pack_of_a_selection(device, n, block, density):
    selection = Selection.from_mask(torch.rand(1, n, device=device) < density, block)
    rows = poisoned(n, device)
    pack(selection, rows)
    assert torch.equal(rows.ids[: int(rows.count)].long(), selection.indices())


@pytest.mark.parametrize(("n", "d", "density"), [(70, 48, 0.4), (130, 33, 1.0), (40, 64, 0.0), (130, 96, 0.05)])
def test_sparse_fc2(device, n, d, density):
    h = torch.where(torch.rand(1, n, device=device) < density, torch.randn(1, n, device=device), 0.0)
    h[0, ::3] = 0  # listed, but zero: not read
    rows = poisoned(n, device)
    rows.set_dense(h + 7)
    rows.values[: int(rows.count)] -= 7
    weight, bias = torch.randn(n, d, device=device), torch.randn(d, device=device)
    residual = torch.randn(1, d, device=device)
    out, expected = torch.full((1, d), NAN, device=device), torch.empty(1, d, device=device)
    sparse_fc2_reference(rows.to_dense(), Rows(weight), bias, residual, expected)
    weight[rows.to_dense()[0] == 0] = NAN
    partials = partial_sums(d, device).fill_(NAN)
    sparse_fc2(rows, Rows(weight), bias, residual, out, partials)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_a_list_of_nothing_gives_the_residual(device):
    rows = poisoned(40, device)
    rows.count.zero_()
    bias, residual = torch.randn(64, device=device), torch.randn(1, 64, device=device)
    out = torch.full((1, 64), NAN, device=device)
    sparse_fc2(rows, Rows(torch.full((40, 64), NAN, device=device)), bias, residual, out)
    torch.testing.assert_close(out, bias + residual)


def test_refusals(device):
    rows, x = PackedSelection.empty(40, device), torch.randn(1, 16, device=device)
    weight = torch.randn(40, 16, device=device)
    with pytest.raises(ValueError, match="residual"):
        sparse_fc2(rows, Rows(weight), weight[0], x[:, :8].contiguous(), x)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d"), [(16384, 4096), (8192, 2048), (9000, 9216), (5000, 12288), (6000, 7168)])
def test_real_widths_replay_bit_for_bit(n, d):
    """fc2 at its own settings: against fp32, with and without dependent launches, and from a graph."""
    residual, b2 = torch.randn(1, d, device="cuda"), torch.randn(d, device="cuda").half()
    fc2 = torch.randn(n, d, device="cuda").half() * n**-0.5
    mask = torch.rand(1, n, device="cuda") < 0.1
    selection, rows = Selection.from_mask(mask, 32), poisoned(n, "cuda")
    out, partials = torch.full((1, d), NAN, device="cuda"), partial_sums(d, "cuda")
    expected = torch.empty(1, d, device="cuda")
    h = torch.where(mask, torch.randn(1, n, device="cuda").relu(), 0.0)  # half of what is listed is zero
    values = h[mask]
    sparse_fc2_reference(h, Rows(fc2), b2, residual, expected)
    made = []

    def run(pdl: bool) -> None:
        pack(selection, rows, pdl)
        rows.values[: len(values)].copy_(values)
        sparse_fc2(rows, Rows(fc2), b2, residual, out, partials, pdl)

    for pdl in (False, True, True):
        out.fill_(NAN)
        rows.values.fill_(NAN)
        partials.fill_(NAN)
        run(pdl)
        made.append(out.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(True)
    out.fill_(NAN)
    graph.replay()
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    assert all(torch.equal(out, other) for other in made)


def test_settings_do_not_change_the_sum_beyond_rounding(device):
    rows, weight = poisoned(90, device), torch.randn(90, 80, device=device)
    h = torch.randn(1, 90, device=device)
    rows.set_dense(h)
    residual, out = torch.zeros(1, 80, device=device), torch.full((1, 80), NAN, device=device)
    for settings in (Fc2Settings(16, 1, 1), Fc2Settings(64, 5, 4), Fc2Settings(128, 7, 8)):
        sparse_fc2(rows, Rows(weight), residual[0], residual, out, settings=settings)
        torch.testing.assert_close(out, h @ weight, atol=1e-4, rtol=1e-4)
