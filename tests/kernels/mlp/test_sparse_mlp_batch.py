"""fc1 and fc2 of several batch rows over the union of what they selected. The predictor's first product."""

import pytest
import torch

from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.formats.matrix import Rows
from dejavu_train.kernels.mlp.predict_batch import predict_down_batch
from dejavu_train.kernels.mlp.predictor import quantize_rows
from dejavu_train.kernels.mlp.sparse_mlp_batch import (
    BatchActivations,
    fc1_batch,
    fc1_batch_reference,
    fc2_batch,
    fc2_batch_reference,
)

NAN = float("nan")


def case(n, d, batch, density, dtype, device):
    x = torch.randn(batch, d, device=device).to(dtype)
    fc1, fc2 = (torch.randn(n, d, device=device).to(dtype) * size for size in (d**-0.5, n**-0.5))
    bias, b2 = torch.randn(n, device=device).to(dtype), torch.randn(d, device=device).to(dtype)
    mask = torch.rand(batch, n, device=device) < density
    rows = BatchActivations.empty(n, batch, d, dtype, device)
    rows.ids.fill_(n - 1)
    rows.values.fill_(NAN)
    rows.partials.fill_(NAN)
    return x, fc1, bias, fc2, b2, mask, rows, torch.randn(batch, d, device=device)


@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("n", "d", "batch"), [(70, 48, 2), (130, 80, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_against_the_references(n, d, batch, density, dtype, device):
    x, fc1, bias, fc2, b2, mask, rows, residual = case(n, d, batch, density, dtype, device)
    fc1[~mask.any(0)] = NAN  # rows that nobody selected are not read
    fc1_batch(x, Rows(fc1), bias, Selection.from_mask(mask, 32), rows)
    h = rows.to_dense(batch)
    want = fc1_batch_reference(x, Rows(fc1.nan_to_num()), bias, mask)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(h, want, atol=tolerance, rtol=tolerance)
    fc2[~(h != 0).any(0)] = NAN
    out = torch.full((batch, d), NAN, device=device)
    fc2_batch(rows, Rows(fc2), b2, residual, out)
    want = fc2_batch_reference(h, Rows(fc2.nan_to_num()), b2, residual)
    torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
    assert not rows.tickets.any()  # ready for the next call


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize(("rank", "d", "batch"), [(5, 40, 2), (33, 700, 17)])
def test_predict_down_batch(rank, d, batch, dtype, device):
    x, weight, scale = torch.randn(batch, d, device=device), torch.randn(rank, d, device=device), None
    if dtype == torch.int8:
        weight, scale = quantize_rows(weight, dtype)
    else:
        x, weight = x.to(dtype), weight.to(dtype)
    for relu in (False, True):
        out = torch.full((batch, rank), NAN, device=device)
        predict_down_batch(x, weight, out, scale, relu)
        want = x.double() @ (weight.double() if scale is None else weight.double() * scale[:, None].double()).T
        torch.testing.assert_close(out.double(), want.relu() if relu else want, atol=2e-3, rtol=2e-3)


def test_refusals(device):
    x, fc1, bias, _, _, mask, rows, _ = case(40, 32, 2, 0.5, torch.float32, device)
    with pytest.raises(ValueError, match="stages.mlp"):
        fc1_batch(x[:1].contiguous(), Rows(fc1), bias, Selection.from_mask(mask[:1]), rows)
    with pytest.raises(ValueError, match="x: expected float16"):
        fc1_batch(x, Rows(fc1.half()), bias, Selection.from_mask(mask), rows)
    with pytest.raises(ValueError, match="does not fit a weight of 40"):
        fc1_batch(x, Rows(fc1), bias, Selection.empty(39, device), rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d", "batch"), [(16384, 4096, 8), (20000, 9216, 16), (9000, 5120, 32), (9000, 2048, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_real_widths_replay_bit_for_bit(n, d, batch, dtype):
    x, fc1, bias, fc2, b2, mask, rows, residual = case(n, d, batch, 0.03, dtype, "cuda")
    selection, out, made = Selection.from_mask(mask), torch.empty(batch, d, device="cuda"), []

    def run(pdl: bool) -> None:
        fc1_batch(x, Rows(fc1), bias, selection, rows, pdl)
        fc2_batch(rows, Rows(fc2), b2, residual, out, pdl)

    for pdl in (False, True, True):
        out.fill_(NAN)
        rows.values.fill_(NAN)
        rows.partials.fill_(NAN)
        run(pdl)
        made.append(out.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(True)
    out.fill_(NAN)
    graph.replay()
    want = fc2_batch_reference(fc1_batch_reference(x, Rows(fc1), bias, mask).to(dtype), Rows(fc2), b2, residual)
    torch.testing.assert_close(out, want, atol=3e-2, rtol=3e-2)
    assert all(torch.equal(out, other) for other in made)
