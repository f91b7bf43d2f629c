"""fc1 and fc2 of several batch rows over the union of what they selected. The predictor's first product."""

from dataclasses import replace

import pytest
import torch
from mlp_helpers import poisoned

from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights
from dejavu_train.kernels.stages.mlp import hidden_reference
from dejavu_train.kernels.stages.mlp_batch import (
    BatchActivations,
    down_batch,
    down_batch_reference,
    up_batch,
    up_batch_reference,
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


def weights_of(fc1, bias, fc2, b2):
    return MlpWeights(Linear.of(fc1, bias), Linear.of(fc2, b2))


@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("n", "d", "batch"), [(70, 48, 2), (130, 80, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_against_the_references(n, d, batch, density, dtype, device):
    x, fc1, bias, fc2, b2, mask, rows, residual = case(n, d, batch, density, dtype, device)
    fc1[~mask.any(0)] = NAN  # rows that nobody selected are not read
    up_batch(x, weights_of(fc1, bias, fc2, b2), Selection.from_mask(mask, 32), rows)
    h = rows.to_dense(batch)
    want = up_batch_reference(x, weights_of(fc1.nan_to_num(), bias, fc2, b2), mask)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(h, want, atol=tolerance, rtol=tolerance)
    fc2[~(h != 0).any(0)] = NAN
    out = torch.full((batch, d), NAN, device=device)
    down_batch(rows, weights_of(fc1, bias, fc2, b2), residual, out)
    want = down_batch_reference(h, weights_of(fc1, bias, fc2.nan_to_num(), b2), residual)
    torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
    assert not rows.tickets.any()  # ready for the next call


@pytest.mark.parametrize(
    ("dtype", "gated", "hidden", "size"),
    [
        (torch.float16, False, Hidden("relu", 0.5), 1.0),
        (torch.float32, False, Hidden("gelu"), 1.0),
        (torch.float16, False, Hidden("relu2"), 300.0),  # from 256 on a square is no fp16 number
        (torch.float16, True, Hidden("silu"), 1.0),
        (torch.float32, True, Hidden("relu", both=True), 1.0),
        (torch.float16, True, Hidden("relu2"), 1.0),
    ],
)
def test_other_activations_and_gates(dtype, gated, hidden, size, device):
    x, fc1, bias, fc2, b2, mask, rows, residual = case(70, 48, 3, 0.4, dtype, device)
    weights = MlpWeights(Linear.of(fc1 * size, bias), Linear.of(fc2 / size, b2), None, hidden)
    if gated:
        weights = replace(weights, gate=Linear.of(torch.randn_like(fc1) * 48**-0.5, torch.randn_like(bias)))
    given = poisoned(weights, ~mask.any(0), ("up", "gate"))
    up_batch(x, given, Selection.from_mask(mask, 32), rows)
    if gated and hidden.activation != "silu":  # up's rows behind a gate that is closed in every batch row are not read
        gate = MlpWeights(weights.gate, weights.down, None, hidden)
        closed = (up_batch_reference(x.double(), gate, mask).abs() < 1e-2).all(0) & mask.any(0)
        shut = closed & ((x.double() @ weights.gate.weight.dense(torch.float64).T + weights.gate.bias) < -1e-2).all(0)
        assert shut.any()
        up_batch(x, poisoned(given, shut, ("up",)), Selection.from_mask(mask, 32), rows)
    out = torch.full((3, 48), NAN, device=device)
    down_batch(rows, weights, residual, out)
    h = torch.where(mask, hidden_reference(x.double(), weights), 0.0)
    want = residual + b2.double() + h @ weights.down.weight.dense(torch.float64)
    size = h.abs() @ weights.down.weight.dense(torch.float64).abs() + residual.abs() + 1
    assert ((out - want).abs() <= (1e-5 if dtype == torch.float32 else 2e-3) * size).all()


def test_refusals(device):
    x, fc1, bias, fc2, b2, mask, rows, _ = case(40, 32, 2, 0.5, torch.float32, device)
    weights = weights_of(fc1, bias, fc2, b2)
    with pytest.raises(ValueError, match="stages.mlp"):
        up_batch(x[:1].contiguous(), weights, Selection.from_mask(mask[:1]), rows)
    with pytest.raises(ValueError, match="x: expected float16"):
        up_batch(x, weights_of(fc1.half(), bias, fc2, b2), Selection.from_mask(mask), rows)
    with pytest.raises(ValueError, match="does not fit a weight of 40"):
        up_batch(x, weights, Selection.empty(39, device), rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d", "batch"), [(16384, 4096, 8), (20000, 9216, 16), (9000, 5120, 32), (9000, 2048, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_real_widths_replay_bit_for_bit(n, d, batch, dtype):
    x, fc1, bias, fc2, b2, mask, rows, residual = case(n, d, batch, 0.03, dtype, "cuda")
    weights = weights_of(fc1, bias, fc2, b2)
    selection, out, made = Selection.from_mask(mask), torch.empty(batch, d, device="cuda"), []

    def run(pdl: bool) -> None:
        up_batch(x, weights, selection, rows, pdl)
        down_batch(rows, weights, residual, out, pdl)

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
    want = down_batch_reference(up_batch_reference(x, weights, mask).to(dtype), weights, residual)
    torch.testing.assert_close(out, want, atol=3e-2, rtol=3e-2)
    assert all(torch.equal(out, other) for other in made)
