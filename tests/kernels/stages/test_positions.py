"""Rotations and groups of heads in q/k/v, one row and several, of fp32, 16 and 4 bits, against transformers in fp64."""

import dataclasses

import pytest
import torch
from int4_helpers import random_rows
from transformers import LlamaConfig, NanoChatConfig, NemotronConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_turn
from transformers.models.nanochat.modeling_nanochat import NanoChatRotaryEmbedding
from transformers.models.nanochat.modeling_nanochat import apply_rotary_pos_emb as nanochat_turn
from transformers.models.nemotron.modeling_nemotron import NemotronRotaryEmbedding
from transformers.models.nemotron.modeling_nemotron import apply_rotary_pos_emb as nemotron_turn

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.limits import Products
from dejavu_train.kernels.common.positions import Rotary, pair_order
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.dense.dense_rows import qkv_dense
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.lookahead.qkv_select import qkv_select
from dejavu_train.kernels.stages.predictor import Predictor, PredictorWeights, head_selection
from dejavu_train.kernels.stages.qkv import QkvSettings, qkv

NAN = float("nan")
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 16, "max_position_embeddings": 64}


class Kind:
    """A model's rotation. turn: its own function, on (h, n, head_dim). table: what kernels are given."""

    def __init__(self, name: str, head_dim: int, capacity: int, device: str) -> None:
        given = SIZES | {"head_dim": head_dim}
        self.flipped = name == "nanochat"
        if name == "nanochat":
            module, self.function = NanoChatRotaryEmbedding(NanoChatConfig(**given)), nanochat_turn
        elif name == "partial":
            parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
            module = NemotronRotaryEmbedding(NemotronConfig(**given, rope_parameters=parameters))
            self.function = nemotron_turn
        else:
            config = LlamaConfig(**given, **({"rope_parameters": YARN} if name == "yarn" else {}))
            module, self.function = LlamaRotaryEmbedding(config), llama_turn
        positions = torch.arange(capacity)
        cos, sin = module(torch.zeros(1, 1), positions[None])
        self.cos, self.sin = cos[0].to(device), sin[0].to(device)
        self.rotary = Rotary.of(self.cos, -self.sin if self.flipped else self.sin, head_dim)
        self.order = pair_order(head_dim, self.cos.shape[-1]).to(device)

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = (each[positions.long()].double()[None] for each in (self.cos, self.sin))
        return self.function(x[None], x[None], cos, sin)[0][0]


def ordered(rows, order, share):
    """Rows (h, r + 2, head_dim, ..) of a model in the order of pairs: those of q and k, not those of v."""
    made = rows.clone()
    made[:, : share + 1] = rows[:, : share + 1, order]
    return made


@dataclasses.dataclass
class Case:
    kind: Kind | None
    weights: Linear
    cache: KvCache
    selection: Selection
    position: torch.Tensor
    q: torch.Tensor
    exact: torch.Tensor  # rows of the model, fp64
    bias: torch.Tensor

    def wanted(self, inputs, first):
        """q, k, v (fp64, NaN where nothing is written): of the model's order. inputs (B, T, d), first (B, h)."""
        batch, n_heads, capacity, head_dim = self.cache.k.shape
        share = self.q.shape[1] // n_heads
        q = torch.full((batch, n_heads, share, head_dim), NAN, dtype=torch.float64, device=self.q.device)
        k, v = (torch.full(self.cache.k.shape, NAN, dtype=torch.float64, device=self.q.device) for _ in range(2))
        mask = self.selection.to_mask(batch)
        for b in range(batch):
            t = int(self.position[b])
            for head in range(n_heads):
                if first[b, head] < 0:
                    continue
                p = torch.arange(int(first[b, head]), t + 1, device=self.q.device)
                rows = inputs[b, p].double() @ self.exact[head].transpose(1, 2) + self.bias[head].double()[:, None]
                turns = rows[:-1] if self.kind is None else self.kind.turn(rows[:-1], p)
                k[b, head, p], v[b, head, p] = turns[-1], rows[-1]
                if mask[b, head]:
                    q[b, head] = turns[:-1, -1]
        return q.view(batch, -1, head_dim), k, v

    def check(self, inputs, first, tolerance=2e-5, rtol=None):
        order = torch.arange(self.q.shape[-1]) if self.kind is None else self.kind.order
        q, k, v = self.wanted(inputs, first)
        for got, want in ((self.q, q[..., order]), (self.cache.k, k[..., order]), (self.cache.v, v)):
            torch.testing.assert_close(got.double(), want, equal_nan=True, atol=tolerance, rtol=rtol or tolerance)


def case(
    device, kind, batch, n_heads, share, head_dim, d, capacity, density, four_bits, dtype=torch.float32, size=0.02
):
    found = None if kind is None else Kind(kind, head_dim, capacity + 3, device)
    order = torch.arange(head_dim, device=device) if found is None else found.order
    bias = torch.randn(n_heads, share + 2, head_dim, device=device).to(dtype)
    if four_bits:
        rows = random_rows(device, n_heads, share + 2, head_dim, d, group=32, size=size)
        exact = rows.dense(torch.float64)
        weight = Int4Rows(*(ordered(part, order, share).contiguous() for part in rows.parts()))
        weights = Linear(weight, ordered(bias, order, share))
    else:
        numbers = (torch.randn(n_heads, share + 2, head_dim, d, device=device) / d**0.5).to(dtype)
        exact, weights = numbers.double(), Linear.of(ordered(numbers, order, share), ordered(bias, order, share))
    attn_in = torch.randn(batch, capacity, d, device=device).to(torch.float16 if four_bits else dtype)
    position = torch.randint(capacity // 2, capacity, (batch,), dtype=torch.int32, device=device)
    for b in range(batch):
        attn_in[b, int(position[b]) + 1 :] = NAN
    watermark = (torch.rand(batch, n_heads, device=device) * (position[:, None] + 1)).to(torch.int32)
    watermark[:, 0] = 0  # many positions to fill in
    selection = head_selection(n_heads, device)
    selection.set_mask(torch.rand(batch, n_heads, device=device) < density)
    k, v = (torch.full((batch, n_heads, capacity, head_dim), NAN, device=device, dtype=dtype) for _ in range(2))
    cache = KvCache(k, v, attn_in, watermark, positions=None if found is None else found.rotary)
    q = torch.full((batch, n_heads * share, head_dim), NAN, device=device)
    return Case(found, weights, cache, selection, position, q, exact, bias)


def filled_from(case):
    """(B, h): the first position that is written, -1 where nothing is."""
    marks = case.position[:, None] if case.cache.watermark is None else case.cache.watermark
    return torch.where(case.selection.to_mask(len(case.q)), marks, -1)


KINDS = ("full", "partial", "yarn", "nanochat")
SIXTEEN = [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]  # with twice what a rounding may change, as a share


@pytest.mark.parametrize(
    ("four_bits", "kind", "batch", "n_heads", "share", "head_dim", "d", "density"),
    [
        *((False, kind, 1, 3, 2, 32, 96, 0.6) for kind in KINDS),
        (False, None, 2, 3, 3, 16, 64, 0.5),
        (False, None, 11, 3, 1, 32, 40, 0.6),
        (False, "full", 3, 2, 1, 80, 64, 0.7),
        (False, "partial", 2, 2, 4, 16, 160, 1.0),
        (False, "full", 1, 3, 2, 16, 64, None),
        (False, "full", 1, 2, 5, 16, 64, 0.0),
        (True, "yarn", 1, 2, 2, 32, 96, 0.6),
        (True, "nanochat", 2, 2, 1, 16, 160, 1.0),
        (True, "partial", 1, 3, 2, 16, 64, None),
        (True, None, 1, 2, 3, 16, 64, 0.0),
    ],
)
def test_qkv(device, four_bits, kind, batch, n_heads, share, head_dim, d, density):
    """density None: without watermarks, where every head is selected and nothing is missing."""
    made = case(device, kind, batch, n_heads, share, head_dim, d, 11, 1.0 if density is None else density, four_bits)
    if density is None:
        made.cache = dataclasses.replace(made.cache, watermark=None)
    qkv(made.weights, HeadStep(made.q, made.cache, made.position, made.selection))
    made.check(made.cache.attn_in, filled_from(made), 2e-4 if four_bits else 2e-5)


@pytest.mark.parametrize(("dtype", "off"), SIXTEEN, ids=str)
@pytest.mark.parametrize(("kind", "batch", "density"), [("full", 1, 0.0), ("partial", 2, 0.6), (None, 1, 1.0)])
def test_rows_of_16_bits(device, kind, batch, density, dtype, off):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter multiplies no matrices of bfloat16")
    made = case(device, kind, batch, 3, 2, 16, 40, 9, density, False, dtype)
    qkv(made.weights, HeadStep(made.q, made.cache, made.position, made.selection))
    made.check(made.cache.attn_in, filled_from(made), 4 * off, off)


@pytest.mark.parametrize(
    ("four_bits", "settings"),
    [(False, QkvSettings(16, 8, 64, 2, 1, 16)), (False, QkvSettings(16, 4, 64, 2, 1, 2)),
     (True, QkvSettings(16, 2, 32, 4, 1, 4))],
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 3])
def test_a_head_idle_for_long_is_filled_in_where_it_lies(device, batch, four_bits, settings):
    """Groups of pairs beyond a program's first ones, which other programs take."""
    made = case(device, "partial", batch, 3, 1, 16, 64, 40, 1.0, four_bits)
    made.selection.set_mask(torch.ones(batch, 3, device=device) > torch.tensor([0, 0, 1], device=device))
    with settings.in_use():
        qkv(made.weights, HeadStep(made.q, made.cache, made.position, made.selection))
    made.check(made.cache.attn_in, filled_from(made), 2e-4 if four_bits else 2e-5)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 2e-5), *SIXTEEN, ("4 bits", 1e-2)], ids=str)
@pytest.mark.parametrize("kind", [None, "partial", "nanochat"])
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_all_heads(device, batch, kind, dtype, off):
    share, head_dim = (1, 80) if kind is None else (2, 16)
    stored = (True,) if dtype == "4 bits" else (False, dtype)
    made = case(device, kind, batch, 3, share, head_dim, 64, 7, 1.0, *stored)
    made.cache = dataclasses.replace(made.cache, watermark=None)
    ln = LayerNormWeights(1 + 0.1 * torch.randn(64, device=device), 0.1 * torch.randn(64, device=device))
    x = torch.randn(batch, 64, device=device) * 2 + 1
    qkv_dense(x, ln, made.weights, HeadStep(made.q, made.cache, made.position))
    inputs = torch.full((batch, 7, 64), NAN, dtype=torch.float64, device=device)
    inputs[torch.arange(batch), made.position.long()] = layer_norm_reference(x, ln, made.cache.attn_in.dtype).double()
    made.check(inputs, made.position[:, None].expand(batch, 3), off * (8 if (dtype, off) in SIXTEEN else 1), off)


@pytest.mark.parametrize("four_bits", [False, True], ids=["numbers", "4 bits"])
def test_beside_a_predictor(device, four_bits):
    made = case(device, "full", 1, 3, 2, 16, 128, 11, 0.6, four_bits)
    n, rank = 70, 16
    mlp = PredictorWeights(torch.empty(0), torch.randn(n, rank, device=device), torch.randn(n, device=device))
    hidden, neurons = torch.randn(1, rank, device=device), Selection.empty(n, device)
    predictor = Predictor(mlp, torch.zeros(1, device=device), neurons, hidden, Products.ROW_TILES)
    state = torch.ones(1, dtype=torch.int32, device=device)
    qkv_select(made.weights, HeadStep(made.q, made.cache, made.position, made.selection), predictor, state)
    made.check(made.cache.attn_in, filled_from(made), 2e-4 if four_bits else 2e-5)
    assert torch.equal(neurons.indices(), (mlp.up @ hidden[0] + mlp.bias > 0).nonzero()[:, 0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("four_bits", "dtype"), [(False, torch.float16), (False, torch.bfloat16), (True, torch.float16)]
)
@pytest.mark.parametrize(
    ("kind", "batch", "n_heads", "share", "head_dim", "d"),
    [
        ("yarn", 1, 4, 5, 128, 2560),
        ("partial", 1, 8, 6, 128, 4096),
        ("full", 4, 8, 4, 128, 4096),
        ("full", 1, 32, 1, 80, 2560),
    ],
)
def test_at_true_shapes(kind, batch, n_heads, share, head_dim, d, four_bits, dtype):
    """With dependent launches and without: the same, bit for bit."""
    made = case("cuda", kind, batch, n_heads, share, head_dim, d, 60, 0.6, four_bits, dtype, size=d**-0.5 / 5)
    marks, tolerance = made.cache.watermark, 4e-2 if dtype is torch.bfloat16 else 1e-2
    marks[:, 1:] = torch.maximum(marks[:, 1:], made.position[:, None] - 3)
    qkv(made.weights, HeadStep(made.q, made.cache, made.position, made.selection))
    made.check(made.cache.attn_in, filled_from(made), tolerance)
    before = [each.clone() for each in (made.q, made.cache.k, made.cache.v)]
    qkv(made.weights, HeadStep(made.q, made.cache, made.position, made.selection), pdl=True)
    torch.testing.assert_close([made.q, made.cache.k, made.cache.v], before, equal_nan=True, atol=0, rtol=0)


def test_mistakes_are_one_line(device):
    made = case(device, "full", 1, 2, 2, 16, 64, 11, 1.0, False)
    with pytest.raises(ValueError, match="the two halves of cos or sin differ"):
        Rotary.of(torch.randn(4, 8), torch.randn(4, 8), 16)
    with pytest.raises(ValueError, match="turn no heads of 16 columns"):
        Rotary.of(torch.randn(4, 32), torch.randn(4, 32), 16)
    short = dataclasses.replace(made.cache, positions=Rotary(made.kind.rotary.table[:10].contiguous()))
    with pytest.raises(ValueError, match="table of positions has 10, the cache 11"):
        qkv(made.weights, HeadStep(made.q, short, made.position, made.selection))
    with pytest.raises(ValueError, match="2 heads of K and V do not divide 3 heads"):
        qkv(made.weights, HeadStep(made.q[:, :3].contiguous(), made.cache, made.position, made.selection))
