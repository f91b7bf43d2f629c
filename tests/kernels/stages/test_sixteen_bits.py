"""Attention over caches of 16 bits, MLPs of bf16 and embeddings of both, in the interpreter, against float64.

test_positions.py has rows of q, k and v of 16 bits, and attention/test_out_projection.py the output projection.
"""

import pytest
import torch

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.positions import Alibi
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights
from dejavu_train.kernels.sample.sampling import TokenState, embed
from dejavu_train.kernels.stages.attend import AttentionScratch, flash_decode, flash_decode_reference
from dejavu_train.kernels.stages.hidden import kept_unit
from dejavu_train.kernels.stages.mlp import hidden_reference
from dejavu_train.kernels.stages.mlp_batch import BatchActivations, down_batch, up_batch
from dejavu_train.kernels.stages.predictor import head_selection

NAN = float("nan")
OFF = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # twice what a rounding may change, as a share
both = pytest.mark.parametrize("dtype", OFF, ids=str)


def needs_tensor_cores(dtype, device):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter multiplies no matrices of bfloat16")


def close(got, want, dtype, size=4.0):
    torch.testing.assert_close(got.double(), want.double(), rtol=OFF[dtype], atol=OFF[dtype] * size, equal_nan=True)


def projection(device, dtype, batch, positions=None, share=2, n_heads=3, head_dim=16, d=40, capacity=9):
    """(weights, cache, position, q) with kept inputs up to each row's position."""
    torch.manual_seed(batch)
    rows = (n_heads, share + 2, head_dim)
    weights = Linear.of(
        (torch.randn(*rows, d, device=device) * d**-0.5).to(dtype), torch.randn(*rows, device=device).to(dtype)
    )
    k, v = torch.full((2, batch, n_heads, capacity, head_dim), NAN, device=device).to(dtype)
    inputs = torch.randn(batch, capacity, d, device=device).to(dtype)
    position = torch.tensor([capacity - 1, 3][:batch], dtype=torch.int32, device=device)
    marks = torch.stack([position - 2, position, position * 0], 1)
    q = torch.full((batch, share * n_heads, head_dim), NAN, device=device)
    return weights, KvCache(k, v, inputs, marks, positions=positions), position, q


@both
@pytest.mark.parametrize(("density", "slopes"), [(None, True), (0.0, False), (0.6, False)])
def test_attention_over_caches(device, dtype, density, slopes):
    positions = Alibi.of(6, device) if slopes else None
    _, cache, position, q = projection(device, dtype, 2, positions, capacity=40)
    for kept in (cache.k, cache.v):
        for b in range(2):
            kept[b, :, : int(position[b]) + 1] = torch.randn(3, int(position[b]) + 1, 16, device=device).to(dtype)
    selection = None
    if density is not None:
        selection = head_selection(3, device)
        selection.set_mask(torch.rand(2, 3, device=device) < density)
    q = torch.randn(q.shape, device=device)
    out = torch.full((2, 96), NAN, device=device)
    want = out.double()
    marks = cache.watermark.clone()
    flash_decode_reference(HeadStep(q.double(), cache, position, selection), want)
    cache.watermark.copy_(marks)
    flash_decode(HeadStep(q, cache, position, selection), out, AttentionScratch.empty(2, 6, 16, 40, device))
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)  # K/V are numbers of 16 bits in both


@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("hidden", [None, Hidden("silu")], ids=str)
def test_an_mlp_of_several_rows_of_bf16(device, density, hidden):
    n, d, batch, dtype = 70, 48, 3, torch.bfloat16
    needs_tensor_cores(dtype, device)
    up, gate, down = (
        Linear.of(torch.randn(n, d, device=device).mul(size**-0.5).to(dtype), torch.randn(biases, device=device))
        for size, biases in ((d, n), (d, n), (n, d))
    )
    weights = MlpWeights(up, down) if hidden is None else MlpWeights(up, down, gate, hidden)
    x, residual = torch.randn(batch, d, device=device).to(dtype), torch.randn(batch, d, device=device)
    mask, out = torch.rand(batch, n, device=device) < density, torch.full((batch, d), NAN, device=device)
    active = BatchActivations.empty(n, batch, d, dtype, device)
    up_batch(x, weights, Selection.from_mask(mask), active)
    down_batch(active, weights, residual, out)
    h = torch.where(mask, hidden_reference(x.double(), weights), 0.0)
    assert kept_unit(weights, dtype) == 1
    close(out, h @ down.weight.dense(torch.float64) + down.bias.double() + residual, dtype)


@both
@pytest.mark.parametrize("learned", [False, True])
def test_embeddings(device, dtype, learned):
    state = TokenState.empty(2, 8, device)
    state.position.copy_(torch.tensor([0, 5]))
    state.tokens.copy_(torch.randint(0, 11, (2, 8)))
    table, positions = torch.randn(11, 37, device=device).to(dtype), torch.randn(10, 37, device=device).to(dtype)
    x = torch.full((2, 37), NAN, device=device)
    embed(state, table, positions if learned else None, x)
    want = table[state.tokens[[0, 1], [0, 5]].long()].float()
    assert torch.equal(x, want + positions[[0, 5]].float() if learned else want)
