"""The look-ahead kernels against their plain-torch references, with poisoned outputs."""

import pytest
import torch

from kernels.flash_decode import AttentionScratch
from kernels.head_select import head_selection
from kernels.layer_norm import LayerNormWeights
from kernels.lookahead import attend_select, attend_select_reference, site_predict, site_predict_reference
from kernels.select import PredictorWeights, Selection, quantize_rows

NAN = float("nan")


def norm(d, device):
    return LayerNormWeights(1 + 0.1 * torch.randn(d, device=device), 0.1 * torch.randn(d, device=device))


@pytest.mark.parametrize("state", [0, 1, 2])
@pytest.mark.parametrize(
    ("n_heads", "head_dim", "d", "rank", "n", "relu", "stored"),
    [(3, 16, 48, 7, 70, False, None), (2, 32, 64, 16, 128, True, torch.int8)],
)
def test_lookahead(device, state, n_heads, head_dim, d, rank, n, relu, stored):
    capacity, last = 70, 66
    x, ln = torch.randn(1, d, device=device) * 2 + 1, norm(d, device)
    predictor, bias = torch.randn(n_heads, d, device=device), torch.randn(n_heads, device=device)
    down, up = torch.randn(rank, d, device=device), torch.randn(n, rank, device=device)
    scale = None
    if stored is not None:
        up, scale = quantize_rows(up, stored)
    mlp = PredictorWeights(down, up, torch.randn(n, device=device), up_scale=scale, relu=relu)
    zero = torch.zeros(1, device=device)
    position = torch.tensor([last], dtype=torch.int32, device=device)
    row_state = torch.tensor([state], dtype=torch.int32, device=device)
    kept, mean = torch.randn(1, capacity, d, device=device), torch.randn(n_heads, head_dim, device=device)
    q = torch.randn(1, n_heads, head_dim, device=device)
    k, v = (torch.randn(1, n_heads, capacity, head_dim, device=device) for _ in range(2))
    for cache in (k, v):
        cache[:, :, last + 1 :] = NAN  # not yet valid: must not be read
    made = []
    for first, third in ((site_predict, attend_select), (site_predict_reference, attend_select_reference)):
        attn_in, watermark = kept.clone(), torch.full((1, n_heads), last - 1, dtype=torch.int32, device=device)
        heads, neurons = head_selection(n_heads, device), Selection.empty(n, device)
        heads.row_bits.fill_(-1)
        neurons.counts.fill_(9)
        hidden = torch.full((1, rank), NAN, device=device)
        out = torch.full((1, n_heads * head_dim), NAN, device=device)
        scratch = AttentionScratch.empty(1, n_heads, head_dim, capacity, device)
        first(x, ln, predictor, bias, zero, position, row_state, attn_in, heads, mlp, hidden)
        third(
            q, k, v, heads, position, watermark, None, out, scratch, mlp, hidden, zero, row_state, neurons, mean=mean
        )  # fmt: skip
        made.append((attn_in, hidden, heads.row_bits, watermark, out, neurons.indices(), neurons.row_bits))
    for got, expected in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
