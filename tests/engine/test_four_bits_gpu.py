"""The decode engine with 4-bit weights on a GPU: kernels against the masked forward pass of the same model.

python -m pytest -m gpu tests/engine/test_four_bits_gpu.py
"""

import pytest
import torch
from decode_helpers import masked_logits, masked_nll, mlp_ahead, random_bundle, random_opt, rows_of
from four_bit_models import four_bits

from benchmarks.random_weights import weights_of_shape
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row, Sampling
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.planned import Packer
from dejavu_train.families import ModelDims

pytestmark = pytest.mark.gpu
SIZES = {16: (64, 4), 32: (128, 4), 64: (256, 4), 80: (640, 8), 128: (384, 3)}


def poison(engine):
    """Caches and scratch full of NaN: nothing may be read that was not written."""
    core = engine.core
    kept = [tensor for cache in core.caches for tensor in (cache.k, cache.v, cache.attn_in)]
    sites = [layer.attention.late for layer in core.layers if layer.attention.late is not None]
    carried = core.work.carried
    kept += [carried.inputs, carried.estimate, *(site.norm.factors for site in sites)]
    for tensor in [*kept, core.work.q, core.work.heads_out, core.work.partials, core.x, core.logits]:
        tensor.fill_(float("nan"))


def assert_alike(off, plain, where):
    """Bounds on what the kernels are off by that of plain torch, for both flip at single tokens. Returns a message."""
    said = [f"{each.median():.2g} / {each.mean():.2g} / {each.max():.2g}" for each in (off, plain)]
    message = f"{where}: median, mean and maximum off {said[0]}; plain torch's {said[1]}"
    print(message)
    assert off.median() <= 3 * plain.median() + 0.01 and off.mean() <= 2 * plain.mean() + 0.05, message
    return message


def assert_as_close_as_plain_torch(model, bundle, rows, expected, where, **options):
    """Log-likelihoods (nats) of the kernels and of plain torch on inputs rounded alike, both against the fp32 mask's.

    fp16 moves a logit that stands at a threshold across it, and what comes after follows. So plain torch itself is off
    by up to 2 nats at single tokens of a sparse model with random weights. Sparse is off dense by 1 to 2 nats in the
    median. Dense, the largest error is bounded by plain torch's own, which depends on the model.
    """
    offs = {}
    for ops in ("triton", "reference"):
        engine = DecodeEngine(
            model, bundle, EngineOptions(batch=len(rows), device="cuda", dtype=torch.float16, ops=ops, **options)
        )
        poison(engine)
        found = engine.score(rows)
        offs[ops] = torch.cat([(nll - want).abs() for nll, want in zip(found, expected, strict=True)])
    off, plain = offs["triton"], offs["reference"]
    message = assert_alike(off, plain, where)
    if bundle is None:
        assert off.max() <= 2 * plain.max() + 0.05, message


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("head_dim", list(SIZES))
def test_kernels_equal_the_masked_forward_pass(head_dim, batch):
    d_model, n_heads = SIZES[head_dim]
    model = four_bits(random_opt(d_model=d_model, n_heads=n_heads, d_ffn=3 * d_model + 7, positions=256))
    cases = (
        {},
        {"lookahead": 1},
        {"relu": True},
        {"int8": True, "means": True},
        {"int4": True},
        {"dense_layers": (0,)},
        None,
    )
    fused = ({"lookahead": 1, "means": True}, {"lookahead": 1, "int4": True}, {"lookahead": 1, "targets": ("mlp",)})
    for options, how in (*((options, "stream") for options in cases), *((options, "fused") for options in fused)):
        bundle = None if options is None else random_bundle(model, rank=16, **options)
        bundle = mlp_ahead(bundle) if how == "fused" else bundle
        rows = rows_of(70, 40, 50)[:batch]
        where = f"{options} {how} head dim {head_dim} batch {batch}"
        expected = [masked_nll(model, bundle, row) for row in rows]
        assert_as_close_as_plain_torch(model, bundle, rows, expected, where, crossover=False, look_ahead=how)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_layers_whose_input_the_mlp_before_makes(monkeypatch, head_dim, tiled):
    """Heads selected one half ahead, or all of them: a LayerNorm that comes late, and no stage before q/k/v."""
    monkeypatch.setattr("dejavu_train.kernels.lookahead.mlp_ahead.TILED_FROM", 0 if tiled else 1 << 20)
    d_model, n_heads = SIZES[head_dim]
    model = four_bits(random_opt(d_model=d_model, n_heads=n_heads, d_ffn=3 * d_model + 7, n_layers=3, positions=256))
    rows = rows_of(70)
    for options in ({"int4": True}, {"int4": True, "means": True}, {"int4": True, "targets": ("mlp",)}):
        bundle = random_bundle(model, rank=16, lookahead=1, **options)
        engine = DecodeEngine(model, bundle, EngineOptions(device="cuda", dtype=torch.float16))
        assert all(half.late for half in engine.plan.halves[2::2])
        expected = [masked_nll(model, bundle, row) for row in rows]
        assert_as_close_as_plain_torch(model, bundle, rows, expected, f"late {options} head dim {head_dim}")


def test_a_dense_step_with_fc2_on_its_own(monkeypatch):
    monkeypatch.setattr("dejavu_train.engine.plan.CODES_FROM", 0)
    model, rows = four_bits(random_opt(d_model=256, n_heads=4, d_ffn=776, positions=256)), rows_of(70)
    assert_as_close_as_plain_torch(model, None, rows, [masked_nll(model, None, rows[0])], "fc2 on its own")


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_the_choice_of_batches(batch):
    model = four_bits(random_opt(d_model=256, n_heads=4, d_ffn=776, positions=256))
    bundle, rows = random_bundle(model, rank=16), rows_of(*range(60, 60 + batch))
    expected = [masked_nll(model, bundle, row) for row in rows]
    assert_as_close_as_plain_torch(model, bundle, rows, expected, f"batch {batch}")


@pytest.mark.parametrize("options", [{}, {"int4": True}], ids=str)
def test_greedy_tokens_are_those_of_the_mask(options):
    """Behind the tokens written so far, each by how far it lies below the mask's largest logit."""
    model = four_bits(random_opt(d_model=256, n_heads=4, d_ffn=776, positions=256))
    bundle, prompt = random_bundle(model, rank=16, **options), rows_of(20)[0]
    row, chosen = list(prompt), {}
    for ops in ("triton", "reference"):
        engine = DecodeEngine(model, bundle, EngineOptions(device="cuda", dtype=torch.float16, ops=ops))
        if ops == "triton":
            row += engine.generate([prompt], 40, stop_tokens=())[0]
        engine.begin([Row(row, len(row), sparse_from=len(prompt), prefilled=len(prompt))], score=True)
        chosen[ops] = [int(engine.core.logits[0].argmax())]
        while len(chosen[ops]) < 40:
            engine.step("greedy", score=True)
            chosen[ops].append(int(engine.core.logits[0].argmax()))
    assert chosen["triton"] == row[len(prompt) :]
    expected = masked_logits(model, bundle, row, sparse_from=len(prompt))[0][len(prompt) - 1 : -1]
    below = [expected.amax(1) - expected[range(40), chosen[ops]] for ops in ("triton", "reference")]
    assert_alike(*below, f"greedy tokens {options}")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("d_model", "n_heads"), [(64, 4), (640, 8), (384, 3)])
def test_a_head_of_four_bits(d_model, n_heads, batch):
    """The vocabulary of 301 is no multiple of a program's sixteen rows."""
    plain = random_opt(d_model=d_model, n_heads=n_heads, d_ffn=2 * d_model, vocab=301, positions=256)
    model, rows = four_bits(plain, head=True), rows_of(70, 40, 50)[:batch]
    for bundle in (None, random_bundle(model, rank=16)):
        expected = [masked_nll(model, bundle, row) for row in rows]
        where = f"LM head in 4 bits, width {d_model}, batch {batch}"
        assert_as_close_as_plain_torch(model, bundle, rows, expected, where)


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_replay_equals_eager_bit_for_bit(batch):
    model = four_bits(random_opt(d_model=256, n_heads=4, d_ffn=776, positions=256))
    late, nibbles = (random_bundle(model, rank=16, lookahead=ahead, int4=True) for ahead in (1, 0))
    for bundle in (None, random_bundle(model, rank=16), late, nibbles):
        made = [
            DecodeEngine(
                model, bundle, EngineOptions(batch=batch, device="cuda", dtype=torch.float16, graph=graph, pdl=pdl)
            )
            for graph, pdl in ((True, True), (False, True), (False, False))
        ]
        if bundle is nibbles and batch > 1:  # their kernels leave a list, by a count that each replay begins anew
            assert any(half.packer is Packer.PREDICTOR for half in made[0].plan.halves)
        rows = rows_of(*range(90, 90 + batch))
        first, *others = [engine.score(rows) for engine in made]
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_random_model_of_a_true_width_decodes():
    """Widths and groups as of OPT-6.7B, two layers, words made on the device."""
    shape = ModelDims(4096, 16384, 2, 32, 1000, 256)
    weights = weights_of_shape(shape, torch.float16, "cuda", packed=True)
    engine = DecodeEngine(weights)
    plain = DecodeEngine(weights, options=EngineOptions(ops="reference"))
    rows = rows_of(24)
    torch.testing.assert_close(engine.score(rows)[0], plain.score(rows)[0], atol=2e-2, rtol=2e-3)
    assert len(engine.generate(rows, 20, sampling=Sampling(), stop_tokens=())[0]) == 20
