"""What the frontier tries beyond one predictor per layer: shared-out ranks, batches, tables, refined shares, losses."""

import copy

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

from benchmarks.frontier_methods import allocation, baselines, fit, heads, plan, predictors, score, select, tables, tune
from dejavu_train.bundle.allocation import density_for_mass, read_curve
from dejavu_train.errors import UserError


def svd(model, rank, kind="int8"):
    return predictors.Predictors(model, "mlp", [rank] * 2, kind).start_at_svd(model)


@pytest.fixture(scope="module")
def plans(model, parts):
    made = {rank: svd(model, rank) for rank in (4, 16)}
    ready = {r: plan.make_plan(model, p, parts["calibration"], parts["calibration"][:1]) for r, p in made.items()}
    return made, ready


def test_ranks_follow_what_a_layer_loses(model, plans):
    made, ready = plans
    ready = {rank: copy.deepcopy(one) for rank, one in ready.items()}
    for rank, one in ready.items():  # layer 0 does not care about rank, layer 1 needs it
        one.curves[0]["loss_increase"] = [1.0 - d for d in one.curves[0]["density"]]
        scale = 5.0 if rank == 4 else 0.1
        one.curves[1]["loss_increase"] = [scale * (1.0 - d) for d in one.curves[1]["density"]]
    ranks, densities = allocation.ranks_and_densities(ready, 0.5)
    assert ranks == [4, 16]
    spent = sum(ready[rank].cost(layer, densities[layer]) for layer, rank in enumerate(ranks))
    assert 0.4 < spent / (2 * 2 * 48 * 96 * 2) <= 0.5
    joined = allocation.of_ranks(model, made, ranks)
    x = torch.randn(2, 5, 48)
    assert torch.allclose(joined.logits(x)[0], made[4].logits(x)[0], atol=1e-5)
    assert torch.allclose(joined.logits(x)[1], made[16].logits(x)[1], atol=1e-5)
    assert [joined.fixed_bytes(i) for i in (0, 1)] == [made[4].fixed_bytes(0), made[16].fixed_bytes(1)]
    with pytest.raises(UserError, match="cannot be met"):
        allocation.ranks_and_densities(ready, 0.01)


def test_the_allocation_knows_that_the_union_of_a_batch_grows(model, plans, parts):
    ready = plans[1][16]
    wide = {size: allocation.batch_plan(ready, parts["calibration"], size) for size in (1, 4)}
    for density in (0.05, 0.2, 0.5):
        one, four = (wide[size].cost(0, density) for size in (1, 4))
        assert one == pytest.approx(ready.cost(0, density), rel=0.1)
        rows_of_one = one - ready.scorer.fixed_bytes(0)
        assert one < four <= ready.scorer.fixed_bytes(0) + 4.2 * rows_of_one
    asked = [sum(wide[size].densities(0.6, "measured")) for size in (1, 4)]
    assert asked[1] < asked[0]  # the same bytes let each token select less


def test_the_union_is_that_of_the_windows(reference, model, parts):
    low = svd(model, 16)
    gates = select.Gates(model, mlp=low, mlp_thresholds=[0.0] * 2, together=3)
    reference.score(gates)
    part = parts["test"][0]  # six windows: two batches of three
    keep = low.scores(0, sites_of(model, part), None) > 0
    whole = part.scored.view(3, 2, -1).all(0)
    wanted = keep.view(3, 2, *keep.shape[1:]).any(0)[whole]
    alone = select.Gates(model, mlp=low, mlp_thresholds=[0.0] * 2, together=3)
    score.Reference(model, [part]).score(alone)
    assert float(alone.sums["steps"][0]) == float(whole.sum())
    assert float(alone.sums["rows"][0]) == float(wanted.sum())
    assert gates.report()["mlp_share"] < gates.union_share() < 1.1


def test_counts_by_threshold_adapt_to_the_token(model, parts):
    found = sites_of(model, parts["test"][0])
    low, act = svd(model, 16), activation(model, found, 0)
    fixed = select.Gates(model, mlp=low, top_k=[9, 9])
    assert bool((fixed._keep(low.scores(0, found, act), None, 9).sum(-1) == 9).all())
    adaptive = fixed._keep(low.scores(0, found, act), 0.0, None).sum(-1)
    assert len(adaptive.unique()) > 3


def test_groups_of_columns_have_scales_of_their_own():
    weight = torch.randn(6, 100) * torch.linspace(0.1, 3, 100)
    errors = {
        kind: float((predictors.quantised(weight, kind) - weight).square().mean()) for kind in ("int4", "int4/32")
    }
    assert errors["int4/32"] < errors["int4"]
    assert predictors.stored_bytes(6, 100, "int4/32") == 6 * 50 + 2 * 6 * 4


def test_rows_of_the_sparse_model_carry_its_errors(model, parts):
    dense = fit.record_rows(model, parts["train"], 200)
    everything = select.Gates(model, mlp=svd(model, 16), mlp_thresholds=[-1e9] * 2)
    same = fit.record_rows(model, parts["train"], 200, everything)
    assert torch.allclose(same.mlp_in.float(), dense.mlp_in.float(), atol=2e-3)
    nothing = select.Gates(model, mlp=svd(model, 16), mlp_thresholds=[1e9] * 2)
    sparse = fit.record_rows(model, parts["train"], 200, nothing)
    assert torch.equal(sparse.attn_in[0], dense.attn_in[0]) and torch.equal(sparse.mlp_in[0], dense.mlp_in[0])
    assert float((sparse.attn_in[1].float() - dense.attn_in[1].float()).abs().max()) > 0.01


def test_distillation_lowers_the_error_of_the_layers_output(model, rows):
    """||MLP(x) - MLP_S(x)|| at the same density, trained with and without the term."""
    x = rows.mlp_in.float()
    fc2 = torch.stack([layer.fc2_weight for layer in model.layers])
    _, contribution = fit.labels(model, x)
    values = contribution / torch.stack([layer.fc2_norm for layer in model.layers])[:, None]
    errors = []
    for weight in (0.0, 30.0):
        torch.manual_seed(0)
        made = predictors.Predictors(model, "mlp", [8, 8], "fp32")
        fit.fit(model, rows, made, fit.FitConfig("pos_weight", 80, 64, 1e-2, distil=weight))
        logits = made.logits(x)
        missed = values * (logits < logits.flatten(1).quantile(0.8, dim=1)[:, None, None])
        errors.append(float((missed @ fc2.transpose(1, 2)).square().sum()))
    assert errors[1] < errors[0]


def test_the_listwise_loss_learns_an_order_not_a_level(model, rows):
    torch.manual_seed(0)
    made = predictors.Predictors(model, "mlp", [8, 8], "fp32")
    fit.fit(model, rows, made, fit.FitConfig("listwise", 60, 64, 1e-2))
    _, contribution = fit.labels(model, rows.mlp_in.float())
    logits = made.logits(rows.mlp_in.float())
    best = logits.argmax(-1, keepdim=True)
    assert float(contribution.gather(-1, best).mean()) > 2.5 * float(contribution.mean())


def test_predictors_without_a_bias_keep_none(model, rows):
    made = svd(model, 8)
    made.bias.data.zero_()
    made.bias.requires_grad_(False)
    fit.fit(model, rows, made, fit.FitConfig(steps=3, rows=32))
    assert float(made.bias.abs().max()) == 0


def test_token_tables_hold_means_and_cost_one_row(model, parts, rows):
    made = predictors.Predictors(model, "mlp", [4, 4], "fp16")
    plain = made.fixed_bytes(0)
    tables.add_tables(model, made, parts["train"], rows, (0,), 10_000)
    assert made.tables[1] is None and made.fixed_bytes(1) == plain
    assert made.fixed_bytes(0) == plain + 96 / 2 + 2
    means = tables.token_means(model, parts["train"], (0,), 10_000)[0]
    token = int(rows.ids.bincount().argmax())  # </s>, in every window
    weights = model.layers[0]
    own = F.linear(rows.mlp_in[0][rows.ids == token].float(), weights.fc1_weight, weights.fc1_bias)
    prior = tables.PRIOR * tables.alone(model, 0)[token]
    assert torch.allclose(means[token], (own.sum(0) + prior) / (len(own) + tables.PRIOR), atol=1e-2)
    part = parts["test"][0]
    made.begin(part, model)
    found = sites_of(model, part)
    with_table = made.scores(0, found, None)
    made.tables[0] = None
    difference = with_table - made.scores(0, found, None)
    assert torch.allclose(difference[0, 0], difference[1, 0])  # both windows begin with the same token


def test_the_second_test_of_a_cascade_keeps_the_share_it_was_set_for(model, parts):
    sharp = baselines.SharpTest(model)
    ready = plan.make_plan(model, sharp, parts["calibration"], parts["calibration"][:1], losses=False)
    floors = [read_curve(c, density_for_mass(c, 0.98))["threshold"] for c in ready.curves]
    gates = select.Gates(model, mlp=sharp, mlp_thresholds=floors)
    score.Reference(model, parts["calibration"]).score(gates)
    assert gates.report()["retained_mass"] == pytest.approx(0.98, abs=0.01)
    low = svd(model, 16)
    tests = baselines.TwoTests(model, low, floors)
    both = select.Gates(model, mlp=tests, mlp_thresholds=[-1e3] * 2)  # a filter that lets everything through
    score.Reference(model, parts["calibration"]).score(both)
    assert both.report()["mlp_density"] == pytest.approx(gates.report()["mlp_density"], abs=1e-3)
    upper = 96 * 48 / 2 + 2 * 96  # the upper bits of every row were read, with a scale each
    lower = 1.5 * 48 * both.report()["layers"][0]["density"] * 96
    assert both.report()["layers"][0]["bytes"]["fc1"] == pytest.approx(upper + lower, rel=1e-3)


def test_the_gate_knows_what_dropping_costs_at_second_order():
    """f(1) - f(0) = f'(s) + (1/2 - s) f'' of a quadratic, whatever side the gate is on."""
    target, curvature = torch.tensor([[1.0, 0.2]]), torch.tensor([[2.0, 2.0]])
    values = torch.ones(1, 2)
    for side in (1.0, -1.0):
        logits = torch.full((1, 2), side, requires_grad=True)
        out, _ = tune.Gate.apply(values, logits, torch.zeros(1, 2), torch.zeros(()), curvature, 1.0)
        (out - target).square().sum().backward()
        slope = torch.sigmoid(torch.tensor(1.0)) * torch.sigmoid(torch.tensor(-1.0))
        gain = (1 - target).square() - target.square()  # what switching on does to the loss
        assert torch.allclose(logits.grad, slope * gain, atol=1e-6)


def test_refined_shares_keep_the_mean_and_lower_the_joint_loss(model, parts):
    statistics = heads.head_statistics(model, parts["train"])
    scorer = heads.HeadCriterion(model, "from_mean", statistics)
    ready = heads.make_head_plan(model, scorer, parts["calibration"], parts["calibration"][:1], statistics.mean)
    start = [0.3, 0.9]
    found = heads.refine(ready, start, parts["calibration"][:1], statistics.mean)
    assert sum(found) == pytest.approx(sum(start)) and all(0 < d <= 1 for d in found)

    def loss(densities):
        gates = select.Gates(
            model, heads=scorer, head_thresholds=ready.thresholds(densities), replacement=statistics.mean
        )
        return score.Reference(model, parts["calibration"][:1]).score(gates).kl

    assert loss(found) <= loss(start)


def test_the_criteria_of_heads_are_what_their_names_say(model, parts):
    statistics = heads.head_statistics(model, parts["train"])
    width = 12
    out = torch.randn(2, 3, 4, width)
    weight = model.layers[0].out_weight  # (d, heads x width)
    by_head = weight.view(48, 4, width)

    def scores(name, values):
        return heads.HeadCriterion(model, name, statistics).scores(0, {}, values)

    def through(values):
        return torch.einsum("bthe,dhe->bthd", values, by_head).norm(dim=-1)

    rest = out - statistics.mean[0]
    quadratic = torch.einsum("bthe,hef,bthf->bth", rest, statistics.fisher[0], rest)
    assert torch.allclose(scores("norm_before", out), out.norm(dim=-1))
    assert torch.allclose(scores("norm_after", out), through(out), rtol=1e-3)
    assert torch.allclose(scores("from_mean", out), through(rest), rtol=1e-3)
    assert torch.allclose(scores("fisher", out).square(), quadratic.clamp_min(0), rtol=1e-3, atol=1e-9)
    at_the_mean = statistics.mean[0].expand(1, 2, 4, width)
    assert float(scores("from_mean", at_the_mean).max()) < 1e-3 and float(scores("fisher", at_the_mean).max()) < 1e-6
