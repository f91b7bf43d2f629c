"""A 4-bit model in the CPU engine: its codes as they are, and the logits of `gather` but for what is rounded."""

import decode_helpers
import numpy as np
import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from decode_helpers import random_opt
from family_models import save_family
from four_bit_models import four_bits

from dejavu_train.engine.cpu import CpuEngine, CpuWeights
from dejavu_train.engine.cpu.arrays import MLP_DOWN, MLP_IN, MLP_UP, QKV
from dejavu_train.engine.cpu.weights import quantise_groups
from dejavu_train.evaluation.timing import time_engine
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.run import quantise
from dejavu_train.sparse.model import SparseOPTForCausalLM

VOCAB = 97


def coded(d_model=128, n_heads=4, head=False):
    return four_bits(random_opt(d_model=d_model, n_heads=n_heads, d_ffn=90, n_layers=2, vocab=VOCAB), head).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny OPT, but of width 128, rounded to 4 bits."""
    parent = tmp_path_factory.mktemp("coded")
    dense = save_tiny_opt(parent / "dense", hidden_size=128, word_embed_proj_dim=128)
    quantise(QuantizeConfig(model=str(dense), output=str(parent / "int4"), quantizer="rtn", device="cpu"))
    return parent / "int4"


def tokens(n, seed=0):
    return decode_helpers.tokens(n, VOCAB, seed)


def gather(model, bundle, sparse_from=0):
    return SparseOPTForCausalLM.from_model(model, bundle, "gather", sparse_from=sparse_from)


def nll(model, bundle, row):
    with torch.no_grad():
        logits = gather(model, bundle)(torch.tensor([row])).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(row[1:]), reduction="none")


def round_embeddings(model, group):
    """What the engine rounds: embeddings, and with them the LM head that is tied to them."""
    table = model.model.decoder.embed_tokens.weight
    codes, scales = quantise_groups(table.detach(), group)
    table.data.copy_(codes * scales.repeat_interleave(group, 1))


@pytest.mark.parametrize(("d_model", "n_heads", "group"), [(128, 4, 128), (128, 4, None), (320, 4, 64)])
def test_codes_are_kept_exactly(d_model, n_heads, group):
    """Heads 32 and 80 wide. Every row equals the dequantised model's bit for bit."""
    model = coded(d_model, n_heads, head=True)
    weights = CpuWeights.from_model(model, group=group)
    assert weights.formats.layers == "int4" and weights.model.pair_group == (64 if d_model == 320 else 128)
    for i, layer in enumerate(model.model.decoder.layers):
        attention = layer.self_attn
        assert torch.equal(weights.part(i, MLP_UP), layer.fc1.weight)
        assert torch.equal(weights.part(i, MLP_DOWN), layer.fc2.weight.T)
        assert torch.equal(weights.out_projection(i), attention.out_proj.weight.T)
        qkv = weights.part(i, QKV).view(n_heads, 3, -1, d_model)
        for part, linear in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
            assert torch.equal(qkv[:, part].flatten(0, 1), linear.weight)
    assert torch.equal(weights.rows(weights.model.lm_head, VOCAB), model.lm_head.weight)
    assert len(weights.model.rows) == 2 * VOCAB


@pytest.mark.parametrize("name", ["arcee", "drelu"])
def test_codes_of_shared_heads_and_gates_are_kept_exactly(name, tmp_path, monkeypatch):
    """Scores equal those of fp32 rows of the same values, but for inputs of 16 bits, with K and V in fp32 too."""
    monkeypatch.setattr(CpuWeights, "cached", np.float32)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    folder = save_family(name, tmp_path, **sizes)
    bundle, model = make_bundle(folder, means=True).at(0.4, 0.6), four_bits(load_model(str(folder)))
    coded_rows, exact = CpuWeights.from_model(model), CpuWeights.from_model(model, "float32")
    layer = model.model.layers[1]
    entered = layer.mlp.gate_proj if hasattr(layer.mlp, "gate_proj") else layer.mlp.up_proj
    assert torch.equal(coded_rows.part(1, MLP_IN), entered.weight)
    assert torch.equal(coded_rows.out_projection(1), layer.self_attn.o_proj.weight.T)
    unit = coded_rows.part(1, QKV).view(2, 4, 32, 128)  # two of q, k, v
    attention = layer.self_attn
    for part, linear in (
        (unit[:, :2], attention.q_proj),
        (unit[:, 2], attention.k_proj),
        (unit[:, 3], attention.v_proj),
    ):
        assert torch.equal(part.reshape(-1, 128), linear.weight)
    n = len(coded_rows.model.rows)
    exact.model.rows[exact.model.embedding :, :128] = coded_rows.rows(coded_rows.model.embedding, n).numpy()
    found, expected = (CpuEngine(each, bundle, threads=2).score([tokens(60)])[0] for each in (coded_rows, exact))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(("mlp_density", "cascade"), [(1.0, False), (0.3, False), (0.3, True)])
def test_scores_equal_gather_with_the_same_embeddings(folder, mlp_density, cascade, monkeypatch):
    """Inputs are rounded to 16 bits: 5e-4 with heads skipped. More where a neuron lies at its threshold.

    Means stand in for skipped heads, two rows stand beside each other. K and V are fp32, as those of `gather`.
    """
    monkeypatch.setattr(CpuWeights, "cached", np.float32)
    bundle = make_bundle(folder, means=True, cascade=cascade).at(mlp_density, 0.4)
    model = load_model(str(folder))
    rows = [tokens(100, seed) for seed in (0, 1)]
    coded_rows, plain = (CpuEngine(model, bundle, batch=2, stored=stored, threads=2) for stored in (None, "float32"))
    found = coded_rows.score(rows)
    assert coded_rows.state.watermark[:, 0].min() < 100  # a head was skipped at the end
    plain.score(rows)
    read = coded_rows.bytes_read()["weights"] / plain.bytes_read()["weights"]
    assert read < 0.2 or cascade
    round_embeddings(model, 64)
    off = torch.cat([(got - nll(model, bundle, row)).abs() for row, got in zip(rows, found, strict=True)])
    assert off.median() < 2e-4 and off.max() < (5e-4 if mlp_density == 1 else 0.2)


def test_what_is_rounded_is_said_and_small():
    model, row = coded(), tokens(60)
    said = CpuEngine(model).describe()
    assert "int4 with a scale for each row" in said and "embeddings and LM head rounded to 8 bits" in said
    assert "codes, exact; embeddings rounded" in CpuEngine(coded(head=True)).describe()
    exact, found = CpuEngine(model, stored="float32").score([row])[0], CpuEngine(model).score([row])[0]
    assert 0 < (exact - found).abs().mean() < 0.05
    assert torch.equal(CpuEngine(model, release=True).score([row])[0], found)
    assert not model.model.decoder.layers[1].fc1.words.numel()


def test_groups_of_half_a_chunk_are_kept():
    model, row = coded(96, 4), tokens(20)
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0, :-1]
    dense = torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="none")
    engine = CpuEngine(model)
    assert "int4 with a scale for each 32 columns" in engine.describe()
    assert (engine.score([row])[0] - dense).abs().mean() < 0.05  # the LM head is rounded
    with pytest.raises(UserError, match="stored must be float32, float16, bfloat16, int8, int4 or left out, got codes"):
        CpuEngine(model, stored="codes")
    with pytest.raises(UserError, match="codes have groups of 128 columns, got group 192"):
        CpuEngine(coded(), group=192)
    with pytest.raises(UserError, match="a power of two from 32 up to 4096.* got 96 of int4"):
        CpuEngine(random_opt(d_model=64, n_heads=2, d_ffn=64, n_layers=1, vocab=VOCAB), stored="int4", group=96)


def test_generate_takes_the_codes(folder):
    """A prompt at once and token by token, through the public class. The same tokens as with what is rounded."""
    model, bundle = load_model(str(folder)), make_bundle(folder, means=True).at(0.3, 0.4)
    ids = torch.tensor([tokens(12)])
    sparse = SparseOPTForCausalLM.from_model(model, bundle, "cpu", sparse_from="prompt")
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 1, "attention_mask": torch.ones_like(ids)}
    found = sparse.generate(ids, **settings)
    assert "4-bit codes, exact" in sparse._runtime.engines.engine(1, 64).describe()
    engine = CpuEngine(model, bundle)
    steps = engine.generate([ids[0].tolist()], 20, prompt_phase="steps")[0]
    assert found[0, 12:].tolist() == steps
    assert time_engine(model, bundle, "cpu", ids, 4).megabytes_per_token < 0.25
    round_embeddings(model, 64)
    assert torch.equal(found, gather(model, bundle, "prompt").generate(ids, **settings))
