"""Norms of heads in float64, and attention token by token against that of four families in transformers."""

import pytest
import torch
from test_positions import Kind
from transformers import LlamaConfig, NanoChatConfig, NemotronConfig, PersimmonConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.nanochat.modeling_nanochat import NanoChatAttention, NanoChatRotaryEmbedding
from transformers.models.nemotron.modeling_nemotron import NemotronAttention, NemotronRotaryEmbedding
from transformers.models.persimmon.modeling_persimmon import PersimmonAttention, PersimmonRotaryEmbedding

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind
from dejavu_train.kernels.common.positions import Rotary, pair_order
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.stages.attend import AttentionScratch, flash_decode
from dejavu_train.kernels.stages.norm import HeadNorms, norm_heads, norm_heads_reference
from dejavu_train.kernels.stages.predictor import head_selection
from dejavu_train.kernels.stages.qkv import qkv

NAN = float("nan")
RMS = LayerNormWeights(None, None, 1e-6, NormKind.RMS_NORM)


@pytest.mark.parametrize(
    ("filled", "batch", "n_heads", "share", "head_dim", "kind", "selected"),
    [
        (True, 1, 3, 2, 16, "partial", 0.6),
        (True, 2, 2, 3, 80, "full", 0.7),
        (True, 1, 2, 1, 32, None, 1.0),
        (True, 2, 2, 2, 16, "nanochat", 0.0),
        (False, 2, 3, 1, 16, "full", 1.0),
        (False, 1, 2, 4, 16, "full", None),
    ],
)
def test_norm_heads(device, filled, batch, n_heads, share, head_dim, kind, selected):
    capacity = 45
    k = torch.randn(batch, n_heads, capacity, head_dim, device=device) * 3 + 1
    q = torch.randn(batch, n_heads * share, head_dim, device=device) * 3 + 1
    position = torch.randint(capacity // 2, capacity, (batch,), dtype=torch.int32, device=device)
    marks = (torch.rand(batch, n_heads, device=device) * (position[:, None] + 1)).to(torch.int32)
    marks[:, 0] = 0  # more than one round of programs
    marks = marks if filled else None
    rotary = None if kind is None else Rotary(Kind(kind, head_dim, capacity, device).rotary.table, later=True)
    selection = None
    if selected is not None:
        selection = head_selection(n_heads, device)
        selection.set_mask(torch.rand(batch, n_heads, device=device) < selected)
    gain, shift = 1 + 0.2 * torch.randn(2, head_dim, device=device), torch.randn(2, head_dim, device=device)
    norms = HeadNorms(LayerNormWeights(gain[0], shift[0]), LayerNormWeights(gain[1], shift[1]))
    if kind == "nanochat":
        norms = HeadNorms(RMS, RMS)
    exact = KvCache(k.double(), k, k[:, 0, :0], marks, positions=rotary), q.double()
    norm_heads_reference(HeadStep(exact[1], exact[0], position, selection), norms)
    norm_heads(HeadStep(q, KvCache(k, k, k[:, 0, :0], marks, positions=rotary), position, selection), norms)
    torch.testing.assert_close(q.double(), exact[1], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(k.double(), exact[0].k, atol=2e-5, rtol=1e-5)


def persimmon(length):
    """(its attention in float64, its positions, norms in the order of pairs, fused rows (h, 3, head_dim, d))."""
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = PersimmonConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=64, vocab_size=16, rope_parameters=parameters
    )
    config._attn_implementation = "eager"
    attention = PersimmonAttention(config, layer_idx=0).eval()
    for parameter in attention.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    cos, sin = PersimmonRotaryEmbedding(config)(torch.zeros(1, 1), torch.arange(length)[None])
    order = pair_order(16, cos.shape[-1])
    made = [LayerNormWeights(n.weight.data[order], n.bias.data[order], n.eps)
            for n in (attention.q_layernorm, attention.k_layernorm)]  # fmt: skip
    fused = attention.query_key_value
    rows = Linear.of(fused.weight.data.view(4, 3, 16, 64).clone(), fused.bias.data.view(4, 3, 16).clone())
    return attention, cos, sin, Rotary.of(cos[0], sin[0], 16, later=True), HeadNorms(*made), rows, order


def moved(ln, device):
    weight, bias = (each if each is None else each.to(device) for each in (ln.weight, ln.bias))
    return LayerNormWeights(weight, bias, ln.eps, ln.kind)


def nanochat(length):
    config = NanoChatConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, vocab_size=16
    )
    config._attn_implementation = "eager"
    attention = NanoChatAttention(config, layer_idx=0).eval()
    for parameter in attention.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    cos, sin = NanoChatRotaryEmbedding(config)(torch.zeros(1, 1), torch.arange(length)[None])
    parts = [
        linear.weight.data.view(2, -1, 16, 64) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    rows = Linear.of(torch.cat(parts, 1), torch.zeros(2, 4, 16))
    norm = LayerNormWeights(None, None, config.rms_norm_eps, NormKind.RMS_NORM)
    rotary = Rotary.of(cos[0], -sin[0], 16, later=True)
    return attention, cos, sin, rotary, HeadNorms(norm, norm), rows, pair_order(16, 16)


def turned_by_qkv(config, attention_class, rotary_class, length):
    config._attn_implementation = "eager"
    attention = attention_class(config, layer_idx=0).eval()
    for parameter in attention.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    cos, sin = rotary_class(config)(torch.zeros(1, 1), torch.arange(length)[None])
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    parts = [linear.weight.data.view(2, -1, 16, 64) for linear in linears]
    rows = Linear.of(torch.cat(parts, 1), torch.zeros(2, parts[0].shape[1] + 2, 16))
    return attention, cos, sin, Rotary.of(cos[0], sin[0], 16), None, rows, pair_order(16, cos.shape[-1])


def llama(length):
    """Queries are wider than the model."""
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
        vocab_size=16,
    )  # fmt: skip
    return turned_by_qkv(config, LlamaAttention, LlamaRotaryEmbedding, length)


def nemotron(length):
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = NemotronConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
        vocab_size=16, rope_parameters=parameters,
    )  # fmt: skip
    return turned_by_qkv(config, NemotronAttention, NemotronRotaryEmbedding, length)


@pytest.mark.parametrize("model", [persimmon, nanochat, llama, nemotron])
def test_heads_equal_those_of_transformers(device, model):
    """Token by token, a group skipped and filled in: what the output projection reads, against the whole sequence."""
    torch.manual_seed(0)
    length = 7
    attention, cos, sin, rotary, norms, rows, order = model(length)
    x = torch.randn(1, length, 64)
    mask = torch.full((length, length), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)[None, None]
    read = []
    out = attention.dense if model is persimmon else attention.o_proj
    out.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    attention.double()(x.double(), position_embeddings=(cos.double(), sin.double()), attention_mask=mask)
    n_heads, per_head, head_dim, _ = rows.weight.shape
    share = per_head - 2
    numbers, bias = rows.weight.dense().to(device), rows.bias.to(device)
    for each in (numbers, bias):
        each[:, : share + 1] = each[:, : share + 1, order].clone()
    k, v = (torch.full((1, n_heads, length, head_dim), NAN, device=device) for _ in range(2))
    marks = torch.zeros(1, n_heads, dtype=torch.int32, device=device)
    cache = KvCache(k, v, x.to(device), marks, positions=Rotary(rotary.table.to(device), rotary.later))
    scratch = AttentionScratch.empty(1, n_heads * share, head_dim, length, device)
    selection = head_selection(n_heads, device)
    for t in range(length):
        chosen = torch.ones(1, n_heads, dtype=torch.bool, device=device)
        chosen[0, 0] = t in (0, 4, 6)
        selection.set_mask(chosen)
        position = torch.tensor([t], dtype=torch.int32, device=device)
        q = torch.full((1, n_heads * share, head_dim), NAN, device=device)
        got = torch.full((1, n_heads * share * head_dim), NAN, device=device)
        step = HeadStep(q, cache, position, selection)
        qkv(Linear.of(numbers, bias), step)
        if norms is not None:
            norm_heads(step, HeadNorms(moved(norms.q, device), moved(norms.k, device)))
        flash_decode(step, got, scratch)
        want = read[0][0, t].view(n_heads, -1) * chosen[0, :, None].cpu()
        torch.testing.assert_close(got.cpu().double(), want.view(1, -1), atol=2e-5, rtol=1e-4)


def test_mistakes_are_one_line(device):
    k, q = torch.randn(1, 2, 4, 16, device=device), torch.randn(1, 2, 16, device=device)
    position, rotary = torch.zeros(1, dtype=torch.int32, device=device), Kind("full", 16, 4, device).rotary
    with pytest.raises(ValueError, match="turn by this table already"):
        norm_heads(HeadStep(q, KvCache(k, k, k[:, 0, :0], positions=rotary), position), HeadNorms(RMS, RMS))
    wrong = LayerNormWeights(torch.ones(8, device=device), None)
    with pytest.raises(ValueError, match=r"a norm of heads: expected shape \(16,\)"):
        norm_heads(HeadStep(q, KvCache(k, k, k[:, 0, :0]), position), HeadNorms(wrong, RMS))
