"""The decode engine in plain torch on the CPU: its state, back-fill, look-ahead, rows of own lengths, errors."""

import copy

import pytest
import torch
from decode_helpers import masked_nll, random_bundle, random_opt, rows_of
from decode_helpers import reference_engine as engine

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.facts import expected_union
from dejavu_train.engine.inputs import Row, Sampling
from dejavu_train.engine.model_weights import weights_of_model
from dejavu_train.evaluation.timing import time_engine
from dejavu_train.ground.errors import UserError
from dejavu_train.kernels.formats.matrix import Linear


@pytest.fixture(scope="module")
def model():
    return random_opt()


def test_dense_engine_generates_what_hugging_face_does(model):
    prompts = rows_of(5, 3, 9)
    for phase in ("dense", "steps"):
        got = engine(model, batch=4).generate(prompts, 10, stop_tokens=(), prompt_phase=phase)
        for prompt, tokens in zip(prompts, got, strict=True):
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None)
            assert tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lookahead": 1, "targets": ("mlp",), "relu": True},
        {"relu": True},
        {"int8": True},
        {"cascade": True},
        {"cascade": True, "lookahead": 1, "dense_layers": (1,)},
        {"top_k": 0.4},
        {"lookahead": 1},
        {"lookahead": 2, "int8": True},
        {"targets": ("mlp",)},
        {"means": True},
        {"targets": ("heads",)},
        {"dense_layers": (1,)},
        {"threshold": 1e9},
        {"threshold": -1e9},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 2])
def test_scores_equal_the_masked_forward_pass(model, options, batch):
    bundle = random_bundle(model, **options)
    rows = rows_of(20, 7, 13)
    sparse = engine(model, bundle, batch=batch)
    sparse_from = 0 if batch == 1 else 6
    for row, nll in zip(rows, sparse.score(rows, sparse_from), strict=True):
        torch.testing.assert_close(nll, masked_nll(model, bundle, row, sparse_from), atol=2e-5, rtol=1e-5)


def test_engines_on_one_set_of_weights_leave_each_other_alone(model):
    """Each arranges layers for itself. A second one must not take from the first what its graph has captured."""
    weights = weights_of_model(model, torch.float32, "cpu")
    bundle, rows = random_bundle(model), rows_of(9)
    linears = {name: each for name, each in vars(weights.layers[0]).items() if isinstance(each, Linear)}
    before = {name: (each.weight.numbers.data_ptr(), each.bias.data_ptr()) for name, each in linears.items()}
    assert set(before) == {"qkv", "out", "up", "down"}
    sparse = engine(weights, bundle)
    held = [layer.mlp.weights.down.weight.numbers for layer in sparse.core.layers]
    copies = [tensor.clone() for tensor in held]
    tested, dense = engine(weights, random_bundle(model, cascade=True)), engine(weights)
    for name, pointers in before.items():
        each = getattr(weights.layers[0], name)
        found = each.weight.numbers.data_ptr(), each.bias.data_ptr()
        assert found == pointers, f"{name} of the given weights was replaced"
    now = [layer.mlp.weights.down.weight.numbers for layer in sparse.core.layers]
    assert [t.data_ptr() for t in now] == [t.data_ptr() for t in held]
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    one, other = (each.weights.layers[0].up.weight.numbers for each in (sparse, dense))
    assert one.data_ptr() == other.data_ptr(), "the same layout is shared"
    torch.testing.assert_close(dense.score(rows)[0], masked_nll(model, None, rows[0]), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(sparse.score(rows)[0], masked_nll(model, bundle, rows[0]), atol=2e-5, rtol=1e-5)
    one, other = (each.weights.layers[0].up.weight.numbers for each in (tested, dense))
    assert one.data_ptr() == other.data_ptr(), "candidates of a second stage are rows of the same up"


def test_weights_that_are_released_exist_once(model):
    weights = weights_of_model(model, torch.float32, "cpu")
    first = engine(weights, random_bundle(model))
    row, expected = rows_of(9), first.score(rows_of(9))[0]
    second = engine(weights, None, release=True)
    assert not weights.layers
    torch.testing.assert_close(second.score(row)[0], masked_nll(model, None, row[0]), atol=2e-5, rtol=1e-5)
    assert torch.equal(first.score(row)[0], expected)
    one, other = (each.weights.layers[0].up.weight.numbers for each in (second, first))
    assert one.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("mode", ["generate", "score", "logits"])
def test_nan_logits_are_an_error_that_names_them(model, mode):
    broken = engine(copy.deepcopy(model), batch=2)
    broken.weights.embedding[7] = float("nan")  # also the LM head's row: every logit of token 7 is NaN
    rows = rows_of(6, 9)
    with pytest.raises(UserError, match=r"row 0 for the token at position \d+ hold NaN.*bfloat16 or float32"):
        {"generate": lambda: broken.generate(rows, 5), "score": lambda: broken.score(rows),
         "logits": lambda: broken.logits(rows)}[mode]()  # fmt: skip


def test_seeds_that_overflow_are_refused(model):
    last = Sampling(temperature=1.0, seed=2**26 - 1)
    assert len(engine(model, batch=32).generate(rows_of(3) * 32, 2, sampling=last)) == 32
    for seed in (2**26, -1):
        with pytest.raises(UserError, match="seed must lie in 0 to 67108863"):
            Sampling(temperature=1.0, seed=seed)


def test_a_step_that_fails_while_it_is_captured_changes_nothing(model):
    """`undone` holds what a capture runs before it records."""
    used = engine(model, random_bundle(model))
    used.begin([Row.of_prompt(rows_of(9)[0], 20)])
    state = {name: tensor.clone() for name, tensor in vars(used.state).items()}
    watermark = used.core.watermark.clone()

    def fail():
        used.core.eager("greedy", False)
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError), used.core.undone():
        fail()
    assert all(torch.equal(tensor, getattr(used.state, name)) for name, tensor in state.items())
    assert torch.equal(used.core.watermark, watermark)


@pytest.mark.parametrize("options", [{}, {"cascade": True}, {"lookahead": 1, "means": True, "relu": True}], ids=str)
def test_a_layer_that_computes_all_selects_the_same(model, options, monkeypatch):
    """Whatever the crossover says, the bundle's selection counts: scores of one row and of several equal the mask."""
    bundle, rows = random_bundle(model, **options), rows_of(*range(3, 35))
    expected = [masked_nll(model, bundle, row) for row in rows]
    monkeypatch.setattr("dejavu_train.engine.plan.crossover_measured", lambda engine: True)
    for batch in (1, 8, 32):
        made = engine(model, bundle, batch=batch)
        assert ("computed whole and masked" in made.describe()) == (batch > 1)
        for nll, want in zip(made.score(rows[: max(batch, 4)]), expected, strict=False):
            torch.testing.assert_close(nll, want, atol=2e-5, rtol=1e-5)


def test_no_stop_token_before_the_least_length(model):
    dense, prompts = engine(model, batch=2), rows_of(5, 8)
    full = dense.generate(prompts, 10, stop_tokens=())
    stop = full[0][3]
    assert len(dense.generate(prompts, 10, stop_tokens=(stop,))[0]) == full[0].index(stop) + 1
    late = dense.generate(prompts, 10, stop_tokens=(stop,), min_new_tokens=7)
    assert all(stop not in row[:7] and len(row) >= 7 for row in late)
    assert late[0][: full[0].index(stop)] == full[0][: full[0].index(stop)]


def test_reset_and_reuse(model):
    bundle = random_bundle(model)
    used = engine(model, bundle, batch=2)
    for tensor in [t for cache in used.core.caches for t in (cache.k, cache.v, cache.attn_in)]:
        tensor.fill_(float("nan"))
    first = used.generate(rows_of(9, 5), 7, stop_tokens=())
    used.score(rows_of(30))
    assert used.generate(rows_of(9, 5), 7, stop_tokens=()) == first


@pytest.mark.parametrize(
    ("action", "part"),
    [
        (lambda m: DecodeEngine(m), "needs a CUDA device"),
        (lambda m: time_engine(m, None, "dense-engine", torch.tensor([[2]]), 3), "needs a CUDA device"),
        (lambda m: engine(m, context=129), "129 tokens does not fit"),
        (lambda m: engine(m, batch=33), "1 to 32 rows"),
        (lambda m: engine(m, context=20).generate([[2] * 15], 6), "21 tokens do not fit the engine's context of 20"),
        (lambda m: engine(m).generate([[2], [2]], 6), "holds 1 rows, got 2"),
        (lambda m: engine(m).generate([[]], 6), "empty prompt"),
        (lambda m: engine(m).generate([[300]], 6), "0 to 299"),
        (lambda m: engine(m).generate([[2]], 0), "at least 1"),
        (lambda m: engine(m).score([[2]]), "at least 2 tokens"),
        (lambda m: Sampling(temperature=-1), "a number from 0 to"),
        (lambda m: Sampling(top_p=0), "above 0"),
        (lambda m: engine(m, random_bundle(random_opt(n_layers=3))), "another shape"),
    ],
)
def test_mistakes_are_one_line(model, action, part, monkeypatch):
    monkeypatch.setattr("dejavu_train.kernels.common.checks.INTERPRET", False)
    with pytest.raises(UserError) as caught:
        action(model)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_an_uncalibrated_bundle_is_refused(model):
    bundle = random_bundle(model)
    bundle.specs[1, "mlp"].threshold = None
    with pytest.raises(UserError, match="mlp predictor of layer 1 was never calibrated"):
        engine(model, bundle)


def test_a_head_dim_without_kernels_is_refused(model, monkeypatch):
    monkeypatch.setattr("dejavu_train.kernels.common.checks.INTERPRET", True)
    with pytest.raises(UserError, match="head dim 24 has no kernels"):
        DecodeEngine(random_opt(d_model=48))


def test_what_independent_rows_select_together():
    for batch in (1, 2, 8):
        assert expected_union(0.1, batch) == pytest.approx(1 - 0.9**batch)
    even, skewed = torch.ones(1000), torch.linspace(0, 1, 1000) ** 4
    assert expected_union(0.1, 8, even) == pytest.approx(1 - 0.9**8, rel=1e-3)
    assert 0.1 < expected_union(0.1, 8, skewed) < 0.45, "units that all rows want count once"
    masks = torch.rand(2000, 8, 1000) < (skewed * 0.1 / skewed.mean())
    assert expected_union(0.1, 8, skewed) == pytest.approx(masks.any(1).float().mean().item(), rel=0.02)
    assert expected_union(0.3, 4, torch.zeros(10)) == pytest.approx(1 - 0.7**4)
    assert expected_union(0.3, 4, torch.tensor([1.0, *[0.0] * 9])) == pytest.approx(1 - 0.7**4)
