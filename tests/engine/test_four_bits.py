"""The decode engine with 4-bit weights in plain torch on the CPU, against the masked forward pass of the same model."""

import pytest
import torch
from decode_helpers import masked_logits, masked_nll, random_bundle, random_opt, rows_of
from decode_helpers import reference_engine as engine
from family_models import random_family
from four_bit_models import four_bits

from benchmarks.random_weights import weights_of_shape
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.memory import check_room, late_bytes, weight_bytes
from dejavu_train.engine.model_weights import weights_of_model
from dejavu_train.engine.ops import TorchOps
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.plan import read_as_codes
from dejavu_train.engine.planned import Kernels, Run
from dejavu_train.ground.errors import UserError
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.models.int4 import CodedLinear


@pytest.fixture(scope="module")
def model():
    return four_bits(random_opt())


def test_codes_and_scales_are_the_models_own(model):
    layer = weights_of_model(model, torch.float16, "cpu").layers[1]
    block = model.model.decoder.layers[1]
    assert all(isinstance(each.weight, Int4Rows) for each in (layer.qkv, layer.out, layer.up, layer.down))
    exact = torch.stack([getattr(block.self_attn, f"{name}_proj").weight.view(2, 32, 64) for name in "qkv"], 1)
    assert torch.equal(layer.qkv.weight.dense(), exact)
    assert torch.equal(layer.whole_out(torch.float32), block.self_attn.out_proj.weight)
    assert torch.equal(layer.up.weight.dense(), block.fc1.weight)
    assert torch.equal(layer.down.weight.dense(), block.fc2.weight.T)


@pytest.mark.parametrize(
    "options",
    [None, {}, {"means": True, "relu": True, "lookahead": 1}, {"top_k": 0.4, "dense_layers": (1,)},
     {"int4": True}, {"lookahead": 1, "int4": True, "targets": ("mlp",)}, {"lookahead": 1, "int4": True, "means": True},
     {"cascade": True, "lookahead": 1}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("lengths", "sparse_from"), [((80,), 0), ((40, 7, 31), 6)])
def test_scores_equal_the_masked_forward_pass(model, options, lengths, sparse_from):
    bundle, rows = None if options is None else random_bundle(model, **options), rows_of(*lengths)
    made = engine(model, bundle, batch=len(rows))
    for row, nll in zip(rows, made.score(rows, sparse_from), strict=True):
        torch.testing.assert_close(nll, masked_nll(model, bundle, row, sparse_from), atol=2e-5, rtol=1e-5)


def test_fc2_of_a_wide_dense_step_is_a_kernel_of_its_own(monkeypatch, device):
    own, row = four_bits(random_opt(d_model=256, n_layers=1, d_ffn=40)), rows_of(12)[0]
    kernels = {"dtype": torch.float16, "device": device, "graph": False}
    outputs = []
    for width in (9216, 256):
        monkeypatch.setattr("dejavu_train.engine.plan.CODES_FROM", width)
        torch.testing.assert_close(engine(own).score([row])[0], masked_nll(own, None, row), atol=2e-5, rtol=1e-5)
        core = DecodeEngine(own, options=EngineOptions(context=16, **kernels)).core
        x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0)).to(device)
        outputs.append(torch.full_like(x, float("nan")))
        core.layers[0].mlp.multiply(x, outputs[-1])
        assert (core.plan.halves[1].kernels is Kernels.LISTED_GRID) == (width == 9216)
    torch.testing.assert_close(*outputs, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("lengths", [(40,), (20, 7, 31)])
def test_a_head_of_four_bits(lengths):
    own, rows = four_bits(random_opt(), head=True), rows_of(*lengths)
    bundle = random_bundle(own)
    expected = [masked_nll(own, bundle, row) for row in rows]
    whole = engine(four_bits(random_opt()), batch=len(rows), context=48)
    made = engine(own, bundle, batch=len(rows), context=48)
    for nll, want in zip(made.score(rows), expected, strict=True):
        torch.testing.assert_close(nll, want, atol=2e-5, rtol=1e-5)
    assert "LM head in int4" in made.describe() and "LM head in float32" in whole.describe()
    shape, plain = made.shape, engine(own, batch=len(rows), context=48)
    codes = shape.vocab_size * (shape.d_model // 2 + 2 * shape.d_model // 64)
    assert plain.memory["weights"] - whole.memory["weights"] == codes, "the embeddings are still there"
    assert plain.weights.lm_head.shape == (shape.vocab_size, shape.d_model)
    shared = weights_of_model(own, torch.float32, "cpu", share=True)
    assert shared.lm_head.words.data_ptr() == own.lm_head.words.data_ptr()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = DecodeEngine(
        own, options=EngineOptions(batch=len(rows), context=8, dtype=torch.float16, device=device, graph=False)
    )
    for each in (plain, kernels):  # the LM head's kernel alone
        each.core.x[-1].copy_(torch.randn(len(rows), shape.d_model, generator=torch.Generator().manual_seed(0)))
        each.core.tail("greedy", score=False)
    torch.testing.assert_close(kernels.core.logits.cpu(), plain.core.logits, atol=2e-2, rtol=2e-3)
    random = weights_of_shape(shape, torch.float32, "cpu", packed=True, packed_head=True)
    assert [t.shape for t in random.tensors()] == [t.shape for t in shared.tensors()]


@pytest.mark.parametrize("late", [False, True])
def test_greedy_tokens_after_a_prompt(model, late):
    bundle, prompts = random_bundle(model), rows_of(6, 11)
    if late:  # one row; what a prompt that is run at once leaves behind is never read
        bundle = random_bundle(model, lookahead=1, int4=True)
        made = engine(model, bundle)
        site = made.core.layers[1].attention.late
        site.norm.factors.fill_(float("nan"))
        site.attn_in.fill_(float("nan"))
        got = [made.generate([prompt], 12, stop_tokens=())[0] for prompt in prompts]
    else:
        got = engine(model, bundle, batch=2).generate(prompts, 12, stop_tokens=())
    for prompt, tokens in zip(prompts, got, strict=True):
        row = list(prompt)
        for token in tokens:
            logits, _ = masked_logits(model, bundle, row, sparse_from=len(prompt))
            assert logits[-1].argmax() == token
            row.append(token)


@pytest.mark.parametrize("name", ["llama", "nemotron", "nanochat", "bloom"])
def test_late_norms_of_families_give_what_a_norm_in_front_gives(name):
    """RMSNorm and LayerNorm, gates and squares, turned and grouped heads."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "n_head": 4}
    own, rows = four_bits(random_family(name, **sizes, num_hidden_layers=3, n_layer=3)), rows_of(30)
    for targets in (("mlp", "heads"), ("mlp",)):
        bundle = random_bundle(own, lookahead=1, int4=True, targets=targets)
        late, plain = (engine(own, bundle, look_ahead=how) for how in ("fused", "inline"))
        assert all(half.late for half in late.plan.halves[2::2]) and not any(half.late for half in plain.plan.halves)
        torch.testing.assert_close(late.score(rows)[0], plain.score(rows)[0], atol=1e-4, rtol=1e-4)
        sites = [layer.attention.late for layer in late.core.layers[1:]]
        held = [tensor.nbytes for site in sites for tensor in (site.gains, site.shifts, site.norm.factors)]
        assert sum(held) == late_bytes(late.shape, late.context, [8, 8])


def test_a_shared_model_stays_what_it_was(model):
    own = four_bits(random_opt())
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    row = torch.tensor(rows_of(9))
    expected = own(row).logits
    weights = weights_of_model(own, torch.float32, "cpu", share=True)
    after = own.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    for module in own.modules():
        if isinstance(module, CodedLinear):
            module._kept = None  # what was multiplied with before
    assert torch.equal(own(row).logits, expected)
    attention, layer = own.model.decoder.layers[0].self_attn, weights.layers[0]
    owners = {tensor.untyped_storage().data_ptr() for tensor in weights.tensors()}
    held = (attention.q_proj.words, attention.v_proj.scales, attention.out_proj.words, layer.down.weight.words)
    assert all(tensor.untyped_storage().data_ptr() in owners for tensor in held), "nothing exists twice"


def test_random_layers_lie_as_those_of_a_model(model):
    given = weights_of_model(model, torch.float16, "cpu")
    made = weights_of_shape(given.shape, torch.float16, "cpu", packed=True)
    for mine, other in zip(made.tensors(), given.tensors(), strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
    assert 0.018 < made.layers[0].up.weight.dense().std() < 0.022
    assert abs(made.layers[0].up.weight.dense().mean()) < 1e-3


def test_which_predictors_are_read_as_codes():
    model = random_opt(d_model=64, n_heads=2, d_ffn=72, positions=32)
    bundle = random_bundle(model, rank=8, int4=True)
    for dtype, rows in ((torch.float16, 2), (torch.float16, 8), (torch.float32, 1)):
        assert read_as_codes(bundle, dtype, rows) == frozenset(bundle.specs)
    for dtype, rows in ((torch.float32, 2), (torch.float16, 9)):
        assert not read_as_codes(bundle, dtype, rows)
    assert not read_as_codes(random_bundle(model, rank=5, int4=True), torch.float16, 2)
    assert not read_as_codes(random_bundle(model, rank=8, int8=True), torch.float16, 2)


@pytest.mark.parametrize("targets", [("mlp",), ("mlp", "heads")])
def test_layers_of_all_heads_share_the_inputs_that_a_fused_predictor_reads(model, targets):
    """Of selected heads each layer keeps its own. The heads' predictors of this bundle are not folded, so not fused."""
    bundle = random_bundle(model, lookahead=1, targets=targets)
    made = engine(model, bundle, context=40)
    inputs, halves = made.core.work.carried.inputs, made.plan.halves[::2]
    fused = [i for i, half in enumerate(halves) if half.kernels is Kernels.QKV_WITH_PREDICTOR and half.run is Run.ALL]
    assert len(fused) == (2 if targets == ("mlp",) else 0)
    assert all(made.core.caches[layer].attn_in is inputs for layer in fused)
    kept = {id(each): each.nbytes for each in (inputs, *(cache.attn_in for cache in made.core.caches))}
    assert made.memory["kept inputs"] == sum(kept.values()) > 0
    streams = engine(model, bundle, context=40, look_ahead="stream")
    assert not any(half.kernels is Kernels.QKV_WITH_PREDICTOR for half in streams.plan.halves)


def test_layers_whose_input_the_mlp_before_makes(model):
    def late(batch=1, **options):
        halves = engine(model, random_bundle(model, lookahead=1, **options), batch=batch).plan.halves[::2]
        return [layer for layer, half in enumerate(halves) if half.late]

    assert late(int4=True) == late(int4=True, targets=("mlp",)) == [1]
    assert late(int4=True, batch=2) == late(int8=True) == late(int4=True, relu=True) == []
    bundle = random_bundle(model, lookahead=1, int4=True)
    made = engine(model, bundle)
    first, second = made.core.layers
    assert first.attention.late is second.mlp.ahead is None
    assert first.mlp.ahead is second.attention.late is not None
    assert engine(model, bundle, look_ahead="stream").core.layers[0].mlp.ahead is None
    scratch = made.memory["scratch"] - engine(model, bundle, look_ahead="stream").memory["scratch"]
    site = made.core.layers[1].attention.late
    assert scratch == sum(each.nbytes for each in (site.gains, site.shifts, site.norm.factors))
    bundle.specs[1, "heads"].site, bundle.specs[1, "heads"].site_layer = "attn_in", 1  # heads at their own site
    assert not any(half.late for half in engine(model, bundle).plan.halves)


def test_layers_of_all_kinds_beside_each_other():
    """Late ones with selected and with all heads, and one whose heads are selected at their own site between them."""
    own, row = four_bits(random_opt(n_layers=5)), rows_of(40)[0]
    bundle = random_bundle(own, lookahead=1, int4=True)
    bundle.specs[2, "heads"].site, bundle.specs[2, "heads"].site_layer = "attn_in", 2
    bundle.specs[3, "heads"].threshold, bundle.specs[3, "heads"].keep_dense = None, True
    made = engine(own, bundle)
    kinds = [layer.attention.late is not None for layer in made.core.layers]
    assert kinds == [False, True, False, True, True]
    assert (
        made.plan.half(3, "heads").run is Run.ALL and made.plan.half(3, "heads").kernels is Kernels.QKV_WITH_PREDICTOR
    )
    torch.testing.assert_close(made.score([row])[0], masked_nll(own, bundle, row), atol=2e-5, rtol=1e-5)


def test_memory_is_counted_before_it_is_taken(model):
    made = engine(model, random_bundle(model, rank=8), batch=2, context=40)
    shape, held = made.shape, made.memory
    caches = made.core.caches
    assert held["K/V"] == sum(cache.k.nbytes + cache.v.nbytes for cache in caches)
    assert held["kept inputs"] == sum(cache.attn_in.nbytes for cache in caches) > 0
    assert held["predictors"] == 4 * shape.n_layers * (
        8 * (2 * shape.d_model + shape.d_ffn + shape.n_heads) + shape.n_heads * shape.d_model
    )
    tables = (made.weights.embedding, made.weights.positions)
    packed = 4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ffn  # half a byte each, and the scales
    assert held["weights"] - sum(table.nbytes for table in tables) == shape.n_layers * (
        packed // 2 + 2 * ((3 * shape.d_model + 2 * shape.d_ffn) + shape.n_heads * shape.d_model)
    )
    assert "memory: weights" in made.describe()
    assert "launch settings" not in made.describe()  # plain torch launches none
    own = weight_bytes(model, torch.float32)  # biases and LayerNorms beside them
    assert held["weights"] < own < held["weights"] + 4 * 20 * shape.n_layers * (shape.d_model + shape.d_ffn)


@pytest.mark.parametrize("name", ["350m", "fatrelu", "drelu", "nemotron", "bloom"])
def test_a_prompt_multiplies_codes_as_it_multiplies_numbers(monkeypatch, name):
    """Chunks of few tokens take the product of codes, longer ones write matrices out. Both round weights alike."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "n_head": 4}
    own, (row,) = four_bits(random_family(name, **sizes, intermediate_size=128, ffn_dim=128)), rows_of(40)
    asked, kept = [], []
    product = TorchOps.chunk_product
    monkeypatch.setattr(TorchOps, "chunk_product", staticmethod(lambda *given: (asked.append(given), product(*given))))
    for most, ops in ((0, "reference"), (128, "reference"), (128, "triton")):
        monkeypatch.setattr("dejavu_train.engine.prefill.MULTIPLIED", most)
        monkeypatch.setattr("dejavu_train.engine.prefill.MULTIPLIED_ROWS", most)
        made = DecodeEngine(own, None, EngineOptions(dtype=torch.float16, ops=ops, context=64))
        made.begin([Row.of_prompt(row, 60)])
        assert bool(asked) == bool(most)
        kept.append(torch.cat([cache.k[0, :, :39].flatten().float() for cache in made.core.caches]))
    for other in kept[1:]:
        torch.testing.assert_close(other, kept[0], rtol=0.02, atol=0.01 * kept[0].abs().max().item())


def test_what_does_not_fit_is_refused_with_the_parts(monkeypatch):
    for name, value in (("memory_reserved", 0), ("memory_allocated", 0), ("mem_get_info", (10**9, 2 * 10**9))):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    check_room({"K/V": 5 * 10**8}, torch.device("cuda"))
    with pytest.raises(UserError, match=r"does not fit: memory: K/V 9 GB; 9 GB in all .* 1 GB free.*smaller context"):
        check_room({"K/V": 9 * 10**9}, torch.device("cuda"))


def test_what_is_not_done_is_refused(model):
    with pytest.raises(UserError, match="float16 inputs in the decode engine, not float32"):
        DecodeEngine(
            model,
            options=EngineOptions(
                ops="triton", dtype=torch.float32, device="cuda" if torch.cuda.is_available() else None
            ),
        )
    with pytest.raises(UserError, match="up to 8 rows at once, not 9"):
        engine(model, random_bundle(model), batch=9)
