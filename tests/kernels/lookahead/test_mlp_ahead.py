"""Layers without a stage before q/k/v: an MLP makes the next layer's input, whose norm comes late."""

import pytest
import torch
from int4_helpers import random_rows
from mlp_helpers import mlp_reference
from predictor_helpers import products_of

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.late_norm import LateNorm, late_factors_reference, late_store_reference, late_sums
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind, layer_norm_reference
from dejavu_train.kernels.common.positions import Rotary
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.formats.matrix import Linear, MlpWeights
from dejavu_train.kernels.lookahead import mlp_ahead as module
from dejavu_train.kernels.lookahead.mlp_ahead import LateSite, add_ahead_reference, mlp_ahead
from dejavu_train.kernels.lookahead.qkv_select import qkv_select, qkv_select_reference
from dejavu_train.kernels.mlp.pack import PackedSelection
from dejavu_train.kernels.stages.predictor import HeadPredictor, HeadSite, Predictor, PredictorWeights, head_selection
from dejavu_train.predictors.quantization import int4_rows, pack_nibbles

NAN = float("nan")


def norm(d, device, rms=False):
    gain, shift = 1 + 0.1 * torch.randn(d, device=device), 0.1 * torch.randn(d, device=device)
    return LayerNormWeights(gain, None, kind=NormKind.RMS_NORM) if rms else LayerNormWeights(gain, shift)


def nibbles(rank, d, n, relu, device):
    halves = [torch.randn(rank, d, device=device), torch.randn(n, rank, device=device)]
    (down, down_scale), (up, up_scale) = (int4_rows(half) for half in halves)
    return PredictorWeights(
        pack_nibbles(down), pack_nibbles(up), torch.randn(n, device=device), down_scale.float(), up_scale.float(), relu
    )


class Layer:
    """A layer with poisoned outputs, and the MLP before it. Made twice alike from one seed."""

    def __init__(
        self, device, n_heads, head_dim, d, rank, n, relu, state, with_heads, share=1, rms=False, group=32, kept=3,
        last=5,
    ):  # fmt: skip
        torch.manual_seed(7)
        self.x = torch.randn(1, d, device=device) * 2 + 1
        self.ln2, ln1 = norm(d, device, rms), norm(d, device, rms)
        fc1, fc2 = (random_rows(device, n, d, group=group, size=0.01) for _ in range(2))
        b1, b2 = torch.randn(n, device=device), torch.randn(d, device=device)
        self.weights = MlpWeights(Linear(fc1, b1), Linear(fc2, b2))
        self.listed = PackedSelection.empty(n, device)
        ids = torch.randperm(n)[: n // 2].sort().values
        self.listed.ids[: len(ids)] = ids.int()
        self.listed.count.fill_(len(ids))
        self.position = torch.tensor([last], dtype=torch.int32, device=device)
        self.row_state = torch.tensor([state], dtype=torch.int32, device=device)
        self.zero = torch.zeros(1, device=device)
        self.heads = head_selection(n_heads, device)
        self.heads.row_bits.fill_(1)
        ahead = None
        if with_heads:
            rows, bias = torch.randn(n_heads, d, device=device), torch.randn(n_heads, device=device)
            ahead = HeadSite.of(HeadPredictor(rows, bias, self.zero, self.heads), self.ln2, self.row_state)
        self.mlp = nibbles(rank, d, n, relu, device)
        weight = random_rows(device, n_heads, share + 2, head_dim, d, group=group)
        self.qkv = Linear(weight, torch.randn(n_heads, share + 2, head_dim, device=device))
        self.rotary = Rotary(torch.randn(last + 2, head_dim // 2, 2, device=device)) if share > 1 else None
        inputs = torch.full((1, last + 2, d), NAN, device=device).half()
        late = LateNorm.empty(ln1, last + 2, torch.zeros(2, device=device), torch.ones(2, device=device).long())
        late.factors.fill_(NAN)
        for place in range(last - kept, last):  # as earlier steps kept them
            before = torch.randn(1, d, device=device)
            late_store_reference(late, before, before + torch.randn(1, d, device=device), inputs[:, place])
            late.factors[place] = late_factors_reference(late, d)
        arrived = torch.full((1,), 9, dtype=torch.int32, device=device)
        self.late = LateSite.of(late, inputs, self.position, self.qkv, self.mlp, arrived, ahead)
        self.watermark = None  # every head is selected, and nothing is missing
        if with_heads:
            self.watermark = torch.full((1, n_heads), last - kept, dtype=torch.int32, device=device)
            self.watermark[:, 0] = last  # lacks the present position alone
        self.out = torch.full_like(self.x, NAN)
        self.hidden = torch.full((1, rank), NAN, device=device)
        self.q = torch.full((1, n_heads * share, head_dim), NAN, device=device)
        self.caches = [torch.full((1, n_heads, last + 2, head_dim), NAN, device=device) for _ in range(2)]
        self.neurons = Selection.empty(n, device)

    def rows(self):
        cache = KvCache(*self.caches, self.late.attn_in, self.watermark, positions=self.rotary)
        mlp = Predictor(self.mlp, self.zero, self.neurons, self.hidden, products_of(self.mlp))
        return self.qkv, HeadStep(self.q, cache, self.position, self.heads), mlp, self.row_state

    def made(self):
        return {
            "sum": self.out,
            "input": self.late.attn_in,
            "factors": self.late.norm.factors,
            "heads": self.heads.row_bits,
            "hidden": self.hidden,
            "q": self.q,
            "k": self.caches[0],
            "v": self.caches[1],
            "neurons": self.neurons.row_bits,
        }


@pytest.mark.parametrize(
    ("tiled", "n_heads", "head_dim", "d", "rank", "n", "relu", "state", "with_heads", "share", "rms"),
    [
        (False, 4, 16, 64, 8, 70, False, 1, True, 1, False),
        (True, 4, 16, 64, 8, 70, False, 1, True, 1, False),
        (True, 4, 16, 64, 8, 70, False, 1, True, 3, True),  # groups of heads, whose q and k are turned
        (False, 3, 16, 64, 8, 70, False, 1, False, 2, True),
        (True, 2, 32, 96, 24, 70, True, 2, True, 1, False),  # all heads, whatever the logits say
        (False, 2, 16, 64, 7, 70, True, 1, False, 1, False),  # nibbles that are no whole words
    ],
)
def test_an_mlp_and_the_next_layers_rows(
    monkeypatch, device, tiled, n_heads, head_dim, d, rank, n, relu, state, with_heads, share, rms
):
    monkeypatch.setattr(module, "TILED_FROM", 0 if tiled else 1 << 20)
    got, want = (Layer(device, n_heads, head_dim, d, rank, n, relu, state, with_heads, share, rms) for _ in range(2))
    assert got.late.tiled == tiled
    for each in (got, want):
        if each is got:
            mlp_ahead(each.x, each.ln2, each.weights, each.listed, each.out, each.late, early="list")
            qkv_select(*each.rows(), late=each.late)
        else:
            mask = torch.zeros(1, n, dtype=torch.bool, device=device)
            mask[0, each.listed.ids[: int(each.listed.count)].long()] = True
            mlp_reference(each.x, each.ln2, each.weights, each.x, mask, each.out)
            add_ahead_reference(each.x, each.out, each.late)
            qkv_select_reference(*each.rows(), late=each.late)
    if with_heads and state == 1:
        assert 0 < int(want.heads.row_bits.sum()) < n_heads
    assert int(got.late.arrived) == got.late.sizes(rank).DOWN
    for name, expected in want.made().items():
        torch.testing.assert_close(
            got.made()[name], expected, atol=2e-2, rtol=5e-3, equal_nan=True, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("rms", [False, True])
def test_late_products_equal_those_of_the_norm(device, rms):
    """The formula, whatever the estimate: of a row far from the one that is normalised too."""
    torch.manual_seed(0)
    d, weight = 96, random_rows(device, 3, 5, 96, group=32)
    ln, x = norm(d, device, rms), torch.randn(1, d, device=device) * 3 - 2
    late = LateNorm.empty(ln, 1, torch.zeros(2, device=device), torch.zeros(2, device=device).long())
    gains, shifts = late_sums(weight, ln)
    want = weight.dense(torch.float64) @ layer_norm_reference(x.double(), ln, torch.float64)[0]
    for before in (x * 1.01, x + 0.1 * torch.randn_like(x), torch.randn(1, d, device=device) * 0.3 + 1):
        u = torch.empty(1, d, device=device)  # not rounded
        late_store_reference(late, before, x, u)
        a, c = late_factors_reference(late, d)
        got = a * (weight.dense() @ u[0]) + c * gains + shifts
        torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=1e-4)


def test_what_does_not_fit_is_refused(device):
    layer = Layer(device, 2, 16, 64, 8, 70, False, 1, True)
    with pytest.raises(ValueError, match="gains"):
        layer.late.check(torch.zeros(1, 3, 16), 8, random_rows(device, 3, 3, 16, 64, group=32))
    with pytest.raises(ValueError, match="one batch row"):
        layer.late.check(torch.zeros(2, 2, 16), 8, layer.qkv.weight)
    with pytest.raises(ValueError, match="down"):
        layer.late.check(torch.zeros(1, 2, 16), 24, layer.qkv.weight)
