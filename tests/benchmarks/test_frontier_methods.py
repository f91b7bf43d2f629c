"""Every method of the frontier does what it says, on a tiny random OPT."""

import math

import pytest
import torch
from frontier_helpers import (  # noqa: F401
    activation,
    fixture_hf,
    fixture_model,
    fixture_parts,
    fixture_reference,
    fixture_rows,
    sites_of,
)
from torch.nn import functional as F

from benchmarks.frontier_methods import baselines, fit, heads, plan, predictors, score, select, sets, tune
from dejavu_train.errors import UserError


def test_plain_opt_equals_transformers(hf, model, parts):
    part = parts["test"][0]
    with torch.no_grad():
        ours = model.logits(model.blocks(model.start(part.ids)))[part.scored]
        theirs = hf(part.ids).logits[part.scored]
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_dense_gates_change_nothing(reference, model):
    scored = reference.score(select.Gates(model))
    assert scored.increase == pytest.approx(0, abs=1e-6)
    assert scored.kl == pytest.approx(0, abs=1e-6)
    assert scored.tokens == reference.tokens


def test_the_bootstrap_error_is_that_of_paired_documents():
    documents = torch.arange(200).repeat_interleave(5)
    gain = torch.randn(200, generator=torch.Generator().manual_seed(0)).repeat_interleave(5) * 0.1
    dense = torch.rand(1000) * 5  # large, and the same on both sides: it must not count
    got = score.summarise(documents, dense, dense + gain, torch.zeros(1000))
    assert got.increase == pytest.approx(math.exp(float(gain.mean())) - 1, rel=1e-4)
    assert got.error == pytest.approx(0.1 / math.sqrt(200), rel=0.2)


def test_exact_maxip_equals_the_oracle_on_raw_inner_products(model, parts):
    part = parts["test"][0]
    found = sites_of(model, part)
    scorer = baselines.MaxIP()
    scorer.begin(part, model)
    act = activation(model, found, 0)
    scores = scorer.scores(0, found, act)
    weights = model.layers[0]
    inner = found["mlp_in", 0] @ weights.fc1_weight.T + weights.fc1_bias
    top = lambda values: values.topk(7, dim=-1).indices.sort(-1).values  # noqa: E731
    assert torch.equal(top(scores), top(inner))
    # with every neuron worth the same, that is the oracle as well
    most = act.topk(7, dim=-1).values
    assert torch.allclose(act.gather(-1, top(scores)).sort(-1).values, most.sort(-1).values, atol=1e-5)


def test_hnsw_finds_most_of_what_exact_search_finds(model, parts):
    pytest.importorskip("hnswlib")
    part = parts["test"][0]
    found = sites_of(model, part)
    exact = baselines.MaxIP()
    exact.begin(part, model)
    act = activation(model, found, 0)
    wanted = torch.zeros_like(act).scatter_(-1, exact.scores(0, found, act).topk(10, dim=-1).indices, 1.0)
    got = baselines.HNSW(model, [10, 10], effort=96).scores(0, found, act)
    assert float((got * wanted).sum() / wanted.sum()) > 0.9


def test_oracle_keeps_the_largest_contributions_and_all_of_them_lose_nothing(reference, model, parts):
    oracle = baselines.Oracle()
    gates = select.Gates(model, mlp=oracle, mlp_thresholds=[0.0] * 2)
    assert reference.score(gates).kl == pytest.approx(0, abs=1e-6)  # everything that is active
    report = gates.report()
    assert report["retained_mass"] == pytest.approx(1.0)
    assert report["mlp_density"] == pytest.approx(sum(r["active"] for r in report["layers"]) / 2)


def test_random_is_uniform_and_repeats(reference, model):
    gates = [select.Gates(model, mlp=baselines.Random(), mlp_thresholds=[0.7] * 2) for _ in range(2)]
    first, second = (reference.score(g) for g in gates)
    assert first == second
    assert gates[0].report()["mlp_density"] == pytest.approx(0.3, abs=0.02)


def test_static_selects_the_same_neurons_for_every_token(model, parts):
    counted = plan.count(model, None, parts["calibration"])
    frequency = (counted.frequency / counted.rows).float()
    scorer = baselines.Static(frequency)
    act = activation(model, sites_of(model, parts["test"][0]), 1)
    scores = scorer.scores(1, {}, act)
    assert bool((scores == scores[:1, :1]).all())
    assert int(scores[0, 0].argmax()) == int(scorer.frequency[1].argmax())


def test_noncontextual_depends_on_token_and_place_only(model, parts):
    part = parts["test"][0]
    scorer = baselines.NonContextual()
    scorer.begin(part, model)
    found = sites_of(model, part)
    scores = scorer.scores(1, found, activation(model, found, 1))
    # the first token of every window is </s> at place 0: the same whatever comes after
    assert torch.allclose(scores[0, 0], scores[1, 0])
    # in layer 0 a sequence of one token is exactly what the model sees at place 0
    own = scorer.scores(0, found, None)[:, 0]
    assert torch.allclose(own, activation(model, found, 0)[:, 0] * model.layers[0].fc2_norm, atol=1e-4)


def test_cats_with_threshold_zero_is_exact_and_reads_fc1_whole(reference, model):
    gates = select.Gates(model, mlp=baselines.Activation(), mlp_thresholds=[0.0] * 2)
    assert reference.score(gates).kl == pytest.approx(0, abs=1e-6)
    assert gates.report()["fc1_share"] == pytest.approx(0.5)


def test_teal_with_threshold_zero_is_exact_and_more_skips_columns(reference, model):
    exact = baselines.Teal(model, [-1.0] * 2, [0.0] * 2)
    assert reference.score(exact).kl == pytest.approx(0, abs=1e-6)
    some = baselines.Teal(model, [0.5] * 2, [0.0] * 2)
    assert reference.score(some).kl > 1e-5
    assert some.mlp_share() < exact.mlp_share()


def test_griffin_is_fixed_by_the_prompt(model, parts):
    act = activation(model, sites_of(model, parts["test"][0]), 0)
    scorer = baselines.Griffin(8)
    scores = scorer.scores(0, {}, act)
    assert bool((scores == scores[:, :1]).all())
    changed = act.clone()
    changed[:, 8:] = 0
    assert torch.equal(scorer.scores(0, {}, changed), scores)


def test_a_dense_prompt_is_not_scored_and_not_sparse(reference, model):
    gates = select.Gates(model, mlp=baselines.Random(), top_k=[1, 1], from_position=1000)
    scored = reference.score(gates)
    assert scored.kl == pytest.approx(0, abs=1e-6)


def test_full_rank_svd_is_exact_and_data_aware_is_better_on_data(model, rows):
    full = predictors.Predictors(model, "mlp", [48, 48], "fp32")
    full.start_at_svd(model, weighted=False)
    x = rows.mlp_in.float()
    weight, bias = model.layers[0].fc1_weight, model.layers[0].fc1_bias
    exact = F.linear(x[0], weight, bias)
    assert torch.allclose(full.logits(x)[0], exact, atol=1e-3)
    errors = {}
    for name, covariances in (("svd", None), ("data", rows.covariances(full.sites))):
        low = predictors.Predictors(model, "mlp", [12, 12], "fp32")
        low.start_at_svd(model, covariances, weighted=False)
        errors[name] = float((low.logits(x)[0] - exact).square().mean())
    assert errors["data"] < errors["svd"]


def test_int8_fp8_and_fp16_select_the_same_neurons(model, rows):
    x = rows.mlp_in.float()
    base = predictors.Predictors(model, "mlp", [16, 16], "fp16").start_at_svd(model)
    chosen = {kind: base.stored_as(kind).logits(x) > 0 for kind in ("fp32", "fp16", "int8", "fp8", "int4")}
    agree = {kind: float((chosen[kind] == chosen["fp32"]).float().mean()) for kind in chosen}
    assert agree["fp16"] > 0.999
    assert agree["int8"] >= 0.99
    assert agree["int8"] > agree["int4"] > 0.85
    assert agree["fp8"] > 0.97


def test_quantised_integers_use_no_more_values_than_their_bits():
    weight = torch.randn(5, 64)
    for kind, values in (("int8", 255), ("int4", 15), ("int3", 7), ("int2", 3)):
        back = predictors.quantised(weight, kind)
        assert max(len(row.unique()) for row in back) <= values
    assert predictors.stored_bytes(10, 64, "int4") == 10 * 32 + 20
    assert predictors.stored_bytes(10, 64, "fp16") == 10 * 128


def test_more_bits_of_a_sketch_are_closer_to_fc1(model, rows):
    x = rows.mlp_in[0].float()
    exact = F.linear(x, model.layers[0].fc1_weight, model.layers[0].fc1_bias)
    scale = model.layers[0].fc2_norm / model.layers[0].fc2_norm.mean()
    errors = []
    for bits in (1, 2, 4):
        sketch = baselines.Sketch(model, bits)
        sketch.begin(None, model)
        errors.append(float((sketch.scores(0, {("mlp_in", 0): x}, None) - exact * scale).square().mean()))
    assert errors[0] > errors[1] > errors[2]


def test_a_low_rank_helps_a_sketch(model, rows):
    x = rows.mlp_in[0].float()
    scale = model.layers[0].fc2_norm / model.layers[0].fc2_norm.mean()
    exact = F.linear(x, model.layers[0].fc1_weight, model.layers[0].fc1_bias) * scale
    low = predictors.Predictors(model, "mlp", [8, 8], "fp16").start_at_svd(model, rows.covariances([("mlp_in", 0)] * 2))
    alone, both = baselines.Sketch(model, 1), baselines.Sketch(model, 1, low)
    alone.begin(None, model)
    both.begin(None, model)
    found = {("mlp_in", 0): x}
    error = [float((s.scores(0, found, None) - exact).square().mean()) for s in (alone, both)]
    assert error[1] < error[0]
    assert both.fixed_bytes(0) > alone.fixed_bytes(0)


def test_a_cascade_selects_only_what_its_filter_lets_through(reference, model, parts):
    low = predictors.Predictors(model, "mlp", [16, 16], "int8").start_at_svd(model)
    first = select.Gates(model, mlp=low, mlp_thresholds=[0.0] * 2)
    both = select.Gates(model, mlp=baselines.Cascade(model, low, [0.0] * 2), mlp_thresholds=[0.0] * 2)
    reference.score(first)
    reference.score(both)
    assert both.report()["mlp_density"] < first.report()["mlp_density"]
    assert float(both.sums["survivors"].sum()) == pytest.approx(float(first.sums["selected"].sum()), rel=0.02)
    d = model.d
    assert baselines.Cascade(model, low, [0.0] * 2, "fp8", planes=True).row_bytes(0, 1, 1) == d + 2 + d


def test_the_hint_of_the_previous_token(model):
    class Flat:
        def begin(self, part, model): ...
        def scores(self, layer, sites, values):
            return torch.full_like(values, -0.5)

    values = torch.tensor([[[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]]])
    hinted = baselines.PreviousToken(Flat(), [-1.0], 1.0).scores(0, {}, values)
    # the threshold lets all pass, so the hint marks what was active one token before
    assert hinted.tolist() == [[[-0.5, -0.5], [-0.5, 0.5], [0.5, 0.5]]]


def test_one_for_all_reads_one_site_and_counts_its_hidden_layer_once(model):
    one = predictors.OneForAll(model, 8, "fp16")
    assert one.sites == [("mlp_in", 0)] * 2
    assert one.fixed_bytes(0) - one.fixed_bytes(1) == 2 * 8 * 48
    down, _, _ = one.weights()
    assert torch.equal(down[0], down[1])


def test_a_shared_projection_costs_heads_only_their_own_part(model):
    mlp = predictors.Predictors(model, "mlp", [8, 8], "fp16", distance=1)
    shared = predictors.SharedDown(model, mlp)
    assert shared.fixed_bytes(0) == 2 * (4 * 8 + 4)
    assert torch.equal(shared.weights()[0], mlp.weights()[0])


def test_distances_read_earlier_sites_and_ranks_are_checked(model):
    assert predictors.site_at("mlp", 1, 0) == ("mlp_in", 1)
    assert predictors.site_at("mlp", 1, 1) == ("attn_in", 1)
    assert predictors.site_at("heads", 1, 1) == ("mlp_in", 0)
    assert predictors.site_at("mlp", 0, 4) == ("attn_in", 0)
    with pytest.raises(UserError, match="rank must lie between 1 and the input width 48"):
        predictors.Predictors(model, "mlp", [49, 8])


def test_ranks_per_layer_leave_the_other_rows_out(model):
    mixed = predictors.Predictors(model, "mlp", [4, 16], "fp16")
    down, up, _ = mixed.weights()
    assert float(down[0, 4:].abs().sum()) == 0 and float(up[0, :, 4:].abs().sum()) == 0
    assert mixed.fixed_bytes(0) == 2 * (4 * 48 + 4 * 96 + 96)


@pytest.mark.parametrize("loss", ["paper", "contribution", "squared", "root", "worthwhile"])
def test_training_raises_retained_mass(model, rows, loss):
    made = predictors.Predictors(model, "mlp", [8, 8], "fp32")
    active, contribution = fit.labels(model, rows.mlp_in.float())

    def mass():
        logits = made.logits(rows.mlp_in.float())
        keep = logits >= logits.flatten(1).quantile(0.8, dim=1)[:, None, None]
        return float((contribution * keep).sum() / contribution.sum())

    before = mass()
    fit.fit(model, rows, made, fit.FitConfig(loss, steps=40, rows=64, learning_rate=1e-2))
    assert mass() > before + 0.05
    assert active.shape == contribution.shape


def test_the_output_error_can_join_the_loss_and_unknown_losses_are_named(model, rows):
    made = predictors.Predictors(model, "mlp", [8, 8], "fp32")
    fit.fit(model, rows, made, fit.FitConfig(steps=3, rows=32, distil=1.0))
    with pytest.raises(UserError, match="unknown loss nonsense"):
        fit.fit(model, rows, made, fit.FitConfig("nonsense", steps=1))


def test_early_stopping_keeps_the_best_state(model, rows, parts):
    made = predictors.Predictors(model, "mlp", [8, 8], "fp32")
    val = fit.record_rows(model, parts["calibration"], 1000)
    taken = fit.fit(model, rows, made, fit.FitConfig("paper", 100, 64, 2e-2, patience=1), val)
    assert taken["steps"] < 100


def test_plans_meet_their_budget_and_refuse_one_below_the_predictor(reference, model, parts):
    made = predictors.Predictors(model, "mlp", [8, 8], "int8").start_at_svd(model)
    ready = plan.make_plan(model, made, parts["calibration"], parts["calibration"][:1])
    for sharing in ("measured", "proportional", "uniform", "global"):
        densities = ready.densities(0.5, sharing)
        gates = select.Gates(model, mlp=made, mlp_thresholds=ready.thresholds(densities))
        reference.score(gates)
        assert gates.report()["mlp_share"] == pytest.approx(0.5, rel=0.15)
    for sharing in ("measured", "uniform"):
        with pytest.raises(UserError, match="cannot be met"):
            ready.densities(0.01, sharing)
    with pytest.raises(UserError, match="unknown sharing"):
        ready.densities(0.5, "nonsense")


def test_tuning_in_the_model_lowers_its_divergence_and_keeps_the_budget(model, parts):
    made = predictors.Predictors(model, "mlp", [8, 8], "int8").start_at_svd(model)
    ready = plan.make_plan(model, made, parts["calibration"], parts["calibration"][:1])
    tune.fold_thresholds(made, ready.thresholds(ready.densities(0.5, "measured")))
    config = tune.TuneConfig(steps=40, mlp_share=0.5, price=0.02)
    history = tune.tune(model, made, None, sets.endless(parts["train"][:1], 0), config)["history"]
    assert history[-1]["kl"] < history[0]["kl"]
    assert history[-1]["mlp_share"] == pytest.approx(0.5, rel=0.15)


def test_the_gate_is_a_step_forward_and_a_sigmoid_backward():
    values = torch.tensor([[1.0, 2.0]], requires_grad=True)
    logits = torch.tensor([[0.5, -0.5]], requires_grad=True)
    cost = torch.ones(1, 2)
    out, spent = tune.Gate.apply(values, logits, cost, torch.zeros(()), torch.zeros(()), 1.0)
    assert out.tolist() == [[1.0, 0.0]] and float(spent) == 1.0
    (out.sum() + 3 * spent).backward()
    assert values.grad.tolist() == [[1.0, 0.0]]
    slope = torch.sigmoid(torch.tensor(0.5)) * torch.sigmoid(torch.tensor(-0.5))
    assert torch.allclose(logits.grad, slope * torch.tensor([[1.0 + 3, 2.0 + 3]]))


def test_replacing_a_head_by_its_mean_changes_nothing_at_density_one(reference, model, parts):
    statistics = heads.head_statistics(model, parts["train"])
    scorer = heads.HeadCriterion(model, "norm_after", statistics)
    gates = select.Gates(model, heads=scorer, head_thresholds=[-1.0] * 2, replacement=statistics.mean)
    assert reference.score(gates).kl == pytest.approx(0, abs=1e-6)
    assert gates.report()["head_density"] == 1.0
    dropped = select.Gates(model, heads=scorer, head_thresholds=[1e9] * 2)
    replaced = select.Gates(model, heads=scorer, head_thresholds=[1e9] * 2, replacement=statistics.mean)
    assert reference.score(replaced).kl < reference.score(dropped).kl


def test_offsets_of_a_sparse_mlp_do_not_touch_a_dense_one(reference, model):
    offsets = torch.ones(2, 48)
    dense = select.Gates(model, mlp=baselines.Oracle(), mlp_thresholds=[None, None], offsets=offsets)
    assert reference.score(dense).kl == pytest.approx(0, abs=1e-6)


def test_head_means_and_fisher_are_moments(model, parts):
    statistics = heads.head_statistics(model, parts["train"][:1])
    tap = heads._Tap()
    part = parts["train"][0]
    with torch.no_grad():
        model.blocks(model.start(part.ids), tap)
    assert torch.allclose(statistics.mean[1], tap.out[1][part.scored].mean(0), atol=1e-4)
    assert torch.linalg.eigvalsh(statistics.fisher[0, 0]).min() > -1e-4
    assert statistics.neuron.shape == (2, 96) and bool((statistics.neuron >= 0).all())


def test_entropy_is_one_for_uniform_attention_and_none_for_a_single_place():
    qkv = torch.zeros(1, 6, 3, 2, 4)
    entropy = heads.attention_entropy(qkv)
    assert torch.allclose(entropy[0, 1:], torch.ones(5, 2), atol=1e-5)
    assert float(entropy[0, 0].abs().max()) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("criterion", heads.CRITERIA)
def test_head_plans_meet_their_density(reference, model, parts, criterion):
    statistics = heads.head_statistics(model, parts["train"])
    scorer = heads.HeadCriterion(model, criterion, statistics)
    ready = heads.make_head_plan(model, scorer, parts["calibration"], parts["calibration"][:1], statistics.mean)
    for sharing in ("uniform", "measured", "global"):
        thresholds = ready.thresholds(ready.densities(0.75, sharing))
        gates = select.Gates(model, heads=scorer, head_thresholds=thresholds, replacement=statistics.mean)
        reference.score(gates)
        assert gates.report()["head_density"] == pytest.approx(0.75, abs=0.1)


def test_head_predictors_learn_importance(model, rows, parts):
    statistics = heads.head_statistics(model, parts["train"])
    wanted = heads.importance_rows(model, heads.HeadCriterion(model, "fisher", statistics), parts["train"], 10_000)
    assert wanted.shape == (2, rows.attn_in.shape[1], 4)
    made = predictors.Predictors(model, "heads", [16, 16], "fp32")
    heads.fit_heads(rows, wanted, made, steps=60, learning_rate=1e-2, size=64)
    got = made.logits(rows.site(made.sites, slice(None)))
    for layer in range(2):
        pair = torch.stack([got[layer].flatten(), wanted[layer].clamp_min(1e-9).log().flatten()])
        assert float(torch.corrcoef(pair)[0, 1]) > 0.6
