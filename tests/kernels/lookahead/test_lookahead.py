"""The look-ahead kernels against their plain-torch references, with poisoned outputs."""

import pytest
import torch

from dejavu_train.predictors.quantization import int4_rows, pack_nibbles
from kernels.attention.flash_decode import AttentionScratch
from kernels.attention.head_select import head_selection
from kernels.attention.qkv import qkv, qkv_reference
from kernels.common.layer_norm import LayerNormWeights
from kernels.lookahead.attend_select import attend_select, attend_select_reference
from kernels.lookahead.site_predict import SiteRows, site_predict, site_predict_reference
from kernels.mlp.select import PredictorWeights, Selection, quantize_rows, select_rows
from kernels.mlp.sparse_fc2 import PackedSelection

NAN = float("nan")


def norm(d, device):
    return LayerNormWeights(1 + 0.1 * torch.randn(d, device=device), 0.1 * torch.randn(d, device=device))


@pytest.mark.parametrize("state", [0, 1, 2])
@pytest.mark.parametrize(
    ("n_heads", "head_dim", "d", "rank", "n", "relu", "stored"),
    [
        (3, 16, 48, 7, 70, False, None),
        (2, 32, 64, 16, 128, True, torch.int8),
        (2, 32, 64, 15, 70, True, torch.uint8),
        (2, 32, 64, 72, 70, True, torch.uint8),  # whole words: nine, of which no two lie at a multiple of 8 bytes
    ],
)
def test_lookahead(device, state, n_heads, head_dim, d, rank, n, relu, stored):
    """All three stages in turn, the kernels' chain against the references' chain."""
    capacity, last = 70, 66
    x, ln = torch.randn(1, d, device=device) * 2 + 1, norm(d, device)
    predictor, bias = torch.randn(n_heads, d, device=device), torch.randn(n_heads, device=device)
    halves = [(torch.randn(rank, d, device=device), None), (torch.randn(n, rank, device=device), None)]
    if stored == torch.int8:
        halves = [quantize_rows(weight, stored) for weight, _ in halves]
    elif stored == torch.uint8:  # nibbles
        halves = [(pack_nibbles(codes), scale.float()) for codes, scale in (int4_rows(weight) for weight, _ in halves)]
    (down, down_scale), (up, up_scale) = halves
    mlp = PredictorWeights(down, up, torch.randn(n, device=device), down_scale, up_scale, relu)
    zero = torch.zeros(1, device=device)
    position = torch.tensor([last], dtype=torch.int32, device=device)
    row_state = torch.tensor([state], dtype=torch.int32, device=device)
    kept, mean = torch.randn(1, capacity, d, device=device), torch.randn(n_heads, head_dim, device=device)
    weight = torch.randn(n_heads, 3, head_dim, d, device=device) / d**0.5
    weight_bias = torch.randn(n_heads, 3, head_dim, device=device)
    caches = [torch.randn(1, n_heads, capacity, head_dim, device=device) for _ in range(2)]
    for cache in caches:
        cache[:, :, last - 1 :] = NAN  # not yet valid: must be filled in, or not read
    made = []
    for kernels in (True, False):
        attn_in, watermark = kept.clone(), torch.full((1, n_heads), last - 1, dtype=torch.int32, device=device)
        heads, neurons = head_selection(n_heads, device), Selection.empty(n, device)
        heads.row_bits.fill_(-1)
        neurons.counts.fill_(9)
        hidden = torch.full((1, rank), NAN, device=device)
        q, out = (
            torch.full((1, n_heads, head_dim), NAN, device=device),
            torch.full((1, n_heads * head_dim), NAN, device=device),
        )
        k, v = (cache.clone() for cache in caches)
        scratch = AttentionScratch.empty(1, n_heads, head_dim, capacity, device)
        packed = PackedSelection.empty(n, device)
        packed.count.fill_(-1)
        packed.announced.fill_(77)  # as an earlier layer left them
        site = (x, ln, SiteRows.of(predictor, mlp, ln), bias, zero, position, row_state, attn_in, heads, hidden, packed)
        rows = (attn_in, weight, weight_bias, heads, position, watermark, None, q, k, v)
        attention = (q, k, v, heads, position, watermark, None, out, scratch)
        chosen = (mlp, hidden, zero, row_state, neurons, packed)
        (site_predict if kernels else site_predict_reference)(*site)
        (qkv if kernels else qkv_reference)(*rows)
        (attend_select if kernels else attend_select_reference)(*attention, *chosen, mean=mean)
        listed = packed.ids[: int(packed.count)].long()
        assert torch.equal(listed, neurons.indices())
        made.append((attn_in, hidden, heads.row_bits, watermark, out, listed, neurons.row_bits))
    for got, expected in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("batch", "stored"), [(1, None), (1, torch.uint8), (2, None)])
def test_hidden_values_beyond_fp16(device, batch, stored):
    """A hidden value above 65504 is no infinity: its neurons are selected as by the reference."""
    n, rank, h, hd = 70, 16, 2, 16
    up = (torch.rand(n, rank, device=device) - 0.5).half()
    scale = None
    if stored is not None:
        codes, scale = int4_rows(up.float())
        up, scale = pack_nibbles(codes), scale.float()
    hidden = torch.randn(batch, rank, device=device)
    hidden[0, 3], hidden[-1, 5] = 1.2e5, -7e4
    predictor = PredictorWeights(torch.eye(rank, device=device), up, up_scale=scale)
    numbers = up.float() if stored is None else codes.float() * scale[:, None]
    neurons, wanted = Selection.empty(n, device), Selection.empty(n, device)
    zero, row_state = torch.zeros(1, device=device), torch.ones(batch, dtype=torch.int32, device=device)
    wanted.set_mask(hidden @ numbers.T > 0)
    if batch > 1:
        select_rows(hidden, predictor, zero, neurons, row_state)
    else:
        position = torch.tensor([1], dtype=torch.int32, device=device)
        caches = [torch.zeros(1, h, 4, hd, device=device) for _ in range(2)]
        attend_select(
            torch.zeros(1, h, hd, device=device), *caches, None, position, None, None,
            torch.zeros(1, h * hd, device=device), AttentionScratch.empty(1, h, hd, 4, device), predictor, hidden, zero,
            row_state, neurons, PackedSelection.empty(n, device),
        )  # fmt: skip
    assert torch.equal(neurons.to_mask(batch), wanted.to_mask(batch)) and 0 < len(wanted.indices())


@pytest.mark.parametrize("stored", [None, torch.uint8])
def test_all_heads(device, stored):
    """Without rows of heads: K/V of all heads at the present position only, whatever the selection's state."""
    capacity, last, n_heads, head_dim, d, rank, n = 6, 4, 2, 16, 48, 7, 70
    x, ln = torch.randn(1, d, device=device) * 2 + 1, norm(d, device)
    halves = [(torch.randn(rank, d, device=device), None), (torch.randn(n, rank, device=device), None)]
    if stored is not None:
        halves = [(pack_nibbles(codes), scale.float()) for codes, scale in (int4_rows(weight) for weight, _ in halves)]
    (down, down_scale), (up, up_scale) = halves
    mlp = PredictorWeights(down, up, torch.randn(n, device=device), down_scale, up_scale)
    zero, state = torch.zeros(1, device=device), torch.ones(1, dtype=torch.int32, device=device)
    position = torch.tensor([last], dtype=torch.int32, device=device)
    watermark = torch.full((1, n_heads), -1, dtype=torch.int32, device=device)
    weight, bias = torch.randn(n_heads, 3, head_dim, d, device=device), torch.randn(n_heads, 3, head_dim, device=device)
    before = [torch.randn(1, n_heads, capacity, head_dim, device=device) for _ in range(2)]
    every = head_selection(n_heads, device)
    every.set_mask(torch.ones(1, n_heads, dtype=torch.bool, device=device))
    made = []
    for kernels in (True, False):
        inputs = torch.full((1, capacity, d), NAN, device=device)
        hidden, q = torch.full((1, rank), NAN, device=device), torch.full((1, n_heads, head_dim), NAN, device=device)
        out, (k, v) = torch.full((1, n_heads * head_dim), NAN, device=device), (each.clone() for each in before)
        neurons, packed = Selection.empty(n, device), PackedSelection.empty(n, device)
        scratch = AttentionScratch.empty(1, n_heads, head_dim, capacity, device)
        site = (x, ln, SiteRows.of(None, mlp, ln), zero, zero, position, state, inputs, every, hidden, packed)
        rows = (inputs, weight, bias, every, position, watermark, None, q, k, v)
        attention = (q, k, v, None, position, None, None, out, scratch)
        (site_predict if kernels else site_predict_reference)(*site)
        (qkv if kernels else qkv_reference)(*rows, policy="always")
        chosen = (mlp, hidden, zero, state, neurons, packed)
        (attend_select if kernels else attend_select_reference)(*attention, *chosen)
        listed = packed.ids[: int(packed.count)].long()
        assert every.row_bits.eq(1).all() and watermark.eq(-1).all()
        made.append((inputs, hidden, k, v, out, listed))
    for got, expected in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("n", "chosen"), [(32, 0.5), (33, 1.0), (33, 0.0), (1000, 0.3)])
@pytest.mark.parametrize("rank", [16, 24])
def test_the_list_in_order(device, n, chosen, rank):
    """Blocks of 32 neurons, of which the last is whole or not; none selected, all, some; twice on the same tensors."""
    h, hd, capacity = 2, 16, 4
    codes, scale = int4_rows(torch.randn(n, rank))
    predictor = PredictorWeights(torch.empty(0), pack_nibbles(codes).to(device), up_scale=scale.float().to(device))
    caches = [torch.zeros(1, h, capacity, hd, device=device) for _ in range(2)]
    packed, neurons = PackedSelection.empty(n, device), Selection.empty(n, device, 32)
    state = torch.ones(1, dtype=torch.int32, device=device)
    for _ in range(2):
        packed.announced.zero_()
        packed.ids.fill_(-1)
        hidden = torch.randn(1, rank, device=device)
        logits = hidden @ (codes.float() * scale.float()[:, None]).to(device).T
        threshold = {0.0: logits.max() + 1, 1.0: logits.min() - 1}.get(chosen, logits.quantile(1 - chosen)) + 1e-4
        attend_select(
            torch.zeros(1, h, hd, device=device), *caches, None, state - 1, None, None,
            torch.zeros(1, h * hd, device=device), AttentionScratch.empty(1, h, hd, capacity, device), predictor,
            hidden, threshold.reshape(1).to(device), state, neurons, packed,
        )  # fmt: skip
        count = int(packed.count)
        assert abs(count - chosen * n) <= 2
        assert torch.equal(packed.ids[:count].long(), neurons.to_mask(1)[0].nonzero()[:, 0])
        assert (packed.ids[count:] == -1).all()
        assert torch.equal(packed.announced, neurons.counts + 1)


def test_blocks_that_are_too_small_to_be_packed(device):
    n, rank, h, hd = 64, 16, 2, 16
    predictor = PredictorWeights(torch.empty(0), torch.zeros(n, rank, device=device))
    one = torch.ones(1, dtype=torch.int32, device=device)
    cache = torch.zeros(1, h, 4, hd, device=device)
    with pytest.raises(ValueError, match="blocks of 16 neurons are too small"):
        attend_select(
            torch.zeros(1, h, hd, device=device), cache, cache, None, one, None, None,
            torch.zeros(1, h * hd, device=device), AttentionScratch.empty(1, h, hd, 4, device), predictor,
            torch.zeros(1, rank, device=device), one.float(), one, Selection.empty(n, device, 16),
            PackedSelection.empty(n, device),
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [torch.float16, torch.uint8])
@pytest.mark.parametrize("n_heads", [32, 72, 96])
def test_at_true_shapes(n_heads, stored):
    """Thirty times in a row, each launch a dependent of the one before: the same outputs and lists as without."""
    head_dim, capacity, last, block = 128, 256, 130, 64 if n_heads == 32 else 32
    d = n_heads * head_dim
    rank, n = d // 16, 4 * d
    x, ln = torch.randn(1, d, device="cuda"), norm(d, "cuda")
    halves = [(torch.randn(size, device="cuda"), None) for size in ((rank, d), (n, rank))]
    if stored == torch.uint8:
        halves = [(pack_nibbles(codes), scale.float()) for codes, scale in (int4_rows(weight) for weight, _ in halves)]
    else:
        halves = [(weight.half(), None) for weight, _ in halves]
    (down, down_scale), (up, up_scale) = halves
    mlp = PredictorWeights(down, up, torch.randn(n, device="cuda"), down_scale, up_scale)
    zero, one = torch.zeros(1, device="cuda"), torch.ones(1, dtype=torch.int32, device="cuda")
    heads = torch.randn(n_heads, d, device="cuda").half()
    weight = (torch.randn(n_heads, 3, head_dim, d, device="cuda") / d**0.5).half()
    bias = torch.randn(n_heads, 3, head_dim, device="cuda")
    kept = torch.randn(1, capacity, d, device="cuda").half()
    filled = [torch.randn(1, n_heads, capacity, head_dim, device="cuda").half() for _ in range(2)]
    site = SiteRows.of(heads, mlp, ln)
    made = []
    for pdl in (False, True):
        selected, neurons = head_selection(n_heads, "cuda"), Selection.empty(n, "cuda", block)
        packed, hidden = PackedSelection.empty(n, "cuda"), torch.zeros(1, rank, device="cuda")
        q, out = (torch.zeros(1, *size, device="cuda") for size in ((n_heads, head_dim), (d,)))
        scratch = AttentionScratch.empty(1, n_heads, head_dim, capacity, "cuda")
        inputs, (k, v) = kept.clone(), (each.clone() for each in filled)
        marks = torch.full((1, n_heads), last, dtype=torch.int32, device="cuda")
        results = []
        for turn in range(30):
            factor = 1 + turn / 10  # other neurons each time
            position = one * (last + turn)
            torch.cuda.synchronize()
            site_predict(
                x * factor, ln, site, torch.zeros(n_heads, device="cuda"), zero, position, one, inputs, selected,
                hidden, packed, pdl=pdl,
            )  # fmt: skip
            qkv(inputs, weight, bias, selected, position, marks, None, q, k, v, pdl=pdl)
            attend_select(
                q, k, v, selected, position, marks, None, out, scratch, mlp, hidden, zero + turn - 15, one, neurons,
                packed, pdl=pdl,
            )  # fmt: skip
            torch.cuda.synchronize()
            count = int(packed.count)
            assert torch.equal(packed.ids[:count].long(), neurons.to_mask(1)[0].nonzero()[:, 0])
            results.append((count, packed.ids[:count].clone(), out.clone(), hidden.clone()))
        made.append(results)
    for plain, dependent in zip(*made, strict=True):
        for got, expected in zip(plain, dependent, strict=True):
            assert got == expected if isinstance(got, int) else torch.equal(got, expected)
