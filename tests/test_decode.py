"""The decode engine in plain torch on the CPU: its state, back-fill, look-ahead, rows of own lengths, errors."""

import dataclasses

import pytest
import torch

from dejavu_train.decode import DecodeEngine, Sampling
from dejavu_train.decode_crossover import choose_forms, describe_forms, expected_union, heads_pay
from dejavu_train.decode_weights import DecodeWeights, load_predictors
from dejavu_train.errors import UserError
from dejavu_train.timing import time_engine
from tests.decode_helpers import masked_logits, masked_nll, random_bundle, random_opt


@pytest.fixture(scope="module")
def model():
    return random_opt()


def rows_of(*lengths, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [[2, *torch.randint(3, 300, (n - 1,), generator=generator).tolist()] for n in lengths]


def engine(model, bundle=None, **options):
    return DecodeEngine(model, bundle, ops="reference", **options)


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
def test_scores_equal_the_masked_forward_pass(model, options):
    bundle = random_bundle(model, **options)
    rows = rows_of(20, 7, 13)
    sparse = engine(model, bundle, batch=2)
    for sparse_from in (0, 6):
        for row, nll in zip(rows, sparse.score(rows, sparse_from), strict=True):
            torch.testing.assert_close(nll, masked_nll(model, bundle, row, sparse_from), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", ["backfill", "always", "stale"])
def test_policies_of_skipped_heads(model, policy):
    bundle = random_bundle(model, threshold=0.8, targets=("heads",))
    row = rows_of(30)[0]
    _, masks = masked_logits(model, bundle, row)
    assert 0.1 < masks[0, "heads"].float().mean() < 0.9, "the case must skip some heads"
    nll = engine(model, bundle, kv_policy=policy).score([row])[0]
    torch.testing.assert_close(nll, masked_nll(model, bundle, row, stale=policy == "stale"), atol=2e-5, rtol=1e-5)


def test_sparse_generation_after_a_dense_prompt(model):
    bundle = random_bundle(model)
    prompts = rows_of(6, 11)
    got = engine(model, bundle, batch=2).generate(prompts, 12, stop_tokens=())
    again = engine(model, bundle, batch=2).generate(prompts, 12, stop_tokens=(), prompt_phase="steps")
    assert got == again
    for prompt, tokens in zip(prompts, got, strict=True):
        row = list(prompt)
        for token in tokens:
            logits, _ = masked_logits(model, bundle, row, sparse_from=len(prompt))
            assert logits[-1].argmax() == token
            row.append(token)


def test_a_row_does_not_depend_on_its_mates(model):
    bundle = random_bundle(model)
    prompts = rows_of(6, 11, 4)
    together = engine(model, bundle, batch=3).generate(prompts, 8, stop_tokens=())
    shuffled = engine(model, bundle, batch=3).generate(prompts[::-1], 8, stop_tokens=())
    alone = [engine(model, bundle).generate([prompt], 8, stop_tokens=())[0] for prompt in prompts]
    assert together == alone == shuffled[::-1]


def test_weights_come_back_from_planes(model):
    """One set of weights for a cascade, then for a dense engine: fc1 as its planes hold it, in the same dtype."""
    weights = DecodeWeights.from_model(model, torch.float32, "cpu")
    exact = weights.layers[0].fc1
    engine(weights, random_bundle(model, cascade=True))
    assert weights.layers[0].cascade is not None and weights.layers[0].fc1.numel() == 0
    limit = weights.layers[0].cascade.scale[:, None] * 0.51
    assert ((weights.layers[0].whole_fc1() - exact).abs() <= limit).all()
    rows = rows_of(9)
    dense = engine(weights).score(rows)[0]
    assert weights.layers[0].cascade is None
    torch.testing.assert_close(dense, masked_nll(model, None, rows[0]), atol=1e-2, rtol=1e-2)


def test_reset_and_reuse(model):
    bundle = random_bundle(model)
    used = engine(model, bundle, batch=2)
    for tensor in [*used.core.k, *used.core.v, *used.core.attn_in]:
        tensor.fill_(float("nan"))
    first = used.generate(rows_of(9, 5), 7, stop_tokens=())
    used.score(rows_of(30))
    assert used.generate(rows_of(9, 5), 7, stop_tokens=()) == first


def test_stop_tokens_and_streaming(model):
    dense = engine(model, batch=2)
    prompts = rows_of(5, 8)
    full = dense.generate(prompts, 10, stop_tokens=())
    stop = full[0][3]
    heard: dict[int, list[int]] = {0: [], 1: []}
    got = dense.generate(prompts, 10, stop_tokens=(stop,), callback=lambda row, token: heard[row].append(token))
    assert got[0] == full[0][: full[0].index(stop) + 1]
    assert got == [heard[0], heard[1]]


def test_sampling_follows_the_distribution(model):
    dense = engine(model)
    prompt = rows_of(6)[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    for sampler in (Sampling(temperature=0.7), Sampling(temperature=1.0, top_p=0.3)):
        draws = [
            dense.generate([prompt], 1, sampling=dataclasses.replace(sampler, seed=seed), stop_tokens=())[0][0]
            for seed in range(300)
        ]
        p = (logits / sampler.temperature).softmax(0)
        order = p.argsort(descending=True)
        n_kept = int((p[order].cumsum(0) < sampler.top_p).sum()) + 1 if sampler.top_p < 1 else len(p)
        kept = set(order[:n_kept].tolist())
        assert set(draws) <= kept
        top = int(order[0])
        expected = float(p[top] / p[order[:n_kept]].sum())
        assert abs(draws.count(top) / 300 - expected) < 4 * (expected * (1 - expected) / 300) ** 0.5 + 1e-9


@pytest.mark.parametrize(
    ("action", "part"),
    [
        (lambda m: DecodeEngine(m), "needs a CUDA device"),
        (lambda m: time_engine(m, None, "engine", torch.tensor([[2]]), 3), "needs a CUDA device"),
        (lambda m: engine(m, context=129), "129 tokens does not fit"),
        (lambda m: engine(m, batch=33), "1 to 32 rows"),
        (lambda m: engine(m, kv_policy="never"), "backfill, always, stale"),
        (lambda m: engine(m, context=20).generate([[2] * 15], 6), "21 tokens do not fit the engine's context of 20"),
        (lambda m: engine(m).generate([[2], [2]], 6), "holds 1 rows, got 2"),
        (lambda m: engine(m).generate([[]], 6), "empty prompt"),
        (lambda m: engine(m).generate([[300]], 6), "0 to 299"),
        (lambda m: engine(m).generate([[2]], 0), "at least 1"),
        (lambda m: engine(m).score([[2]]), "at least 2 tokens"),
        (lambda m: Sampling(temperature=-1), "at least 0"),
        (lambda m: Sampling(top_p=0), "above 0"),
        (lambda m: engine(m, random_bundle(random_opt(n_layers=3))), "another shape"),
    ],
)
def test_mistakes_are_one_line(model, action, part, monkeypatch):
    monkeypatch.setattr("dejavu_train.decode.INTERPRET", False)
    with pytest.raises(UserError) as caught:
        action(model)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_an_uncalibrated_bundle_is_refused(model):
    bundle = random_bundle(model)
    bundle.entries[1, "mlp"].threshold = None
    with pytest.raises(UserError, match="mlp predictor of layer 1 was never calibrated"):
        engine(model, bundle)


def test_a_head_dim_without_kernels_is_refused(model, monkeypatch):
    monkeypatch.setattr("dejavu_train.decode.INTERPRET", True)
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


def test_heads_pay_below_the_measured_share_at_one_row():
    assert heads_pay(9216, 0.85, 1) and not heads_pay(9216, 0.95, 1)
    assert heads_pay(5120, 0.5, 1) and not heads_pay(64, 0.5, 1)
    assert not heads_pay(9216, 0.1, 2)


def test_layers_that_do_not_pay_run_densely(model, monkeypatch):
    """The table decides by width, batch and expected union, before capture; the report says so."""
    asked = []
    monkeypatch.setattr("kernels.launch.sparse_pays", lambda d, union, batch: asked.append((d, batch)) or union < 0.9)
    bundle = random_bundle(model)
    bundle.entries[1, "mlp"].density = 0.95
    predictors = load_predictors(bundle, engine(model).shape, torch.float32, "cpu")
    forms = choose_forms(predictors, 64, 2)
    assert set(asked) == {(64, 2)}
    assert forms[0, "mlp"].sparse and not forms[1, "mlp"].sparse
    assert all(form.sparse for form in choose_forms(predictors, 64, 2, measured=False).values())
    text = describe_forms(forms, 2)
    assert "mlp: 1 of 2 layers sparse, density 0.500 a row" in text and "does not pay in layers 1 (0.9" in text


def test_a_dense_form_selects_everything_in_its_layer(model, monkeypatch):
    """On a machine without the measured GPU nothing is moved; where something is, the engine equals that bundle."""
    bundle = random_bundle(model)
    assert all(form.sparse for form in engine(model, bundle, crossover=True).forms.values())
    monkeypatch.setattr(
        "dejavu_train.decode.choose_forms",
        lambda predictors, d, batch, measured: {
            key: dataclasses.replace(form, sparse=key[0] > 0)
            for key, form in choose_forms(predictors, d, batch).items()
        },
    )
    row = rows_of(20)[0]
    moved = engine(model, bundle)
    assert "sparse does not pay in layers 0" in moved.describe()
    expected = masked_nll(model, random_bundle(model, dense_layers=(0,)), row)
    torch.testing.assert_close(moved.score([row])[0], expected, atol=2e-5, rtol=1e-5)
