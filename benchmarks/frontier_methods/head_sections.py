"""The table's rows about heads, and about the whole block."""

import copy
from typing import Any

import torch

from benchmarks.frontier_methods.heads import (
    CRITERIA,
    HeadCriterion,
    HeadPlan,
    fit_heads,
    importance_rows,
    make_head_plan,
)
from benchmarks.frontier_methods.plan import Plan
from benchmarks.frontier_methods.predictors import Predictors, SharedDown
from benchmarks.frontier_methods.sections import fitted, scaled
from benchmarks.frontier_methods.select import Gates
from benchmarks.frontier_methods.study import Study
from benchmarks.frontier_methods.tune import TuneConfig, fold_thresholds, tune

MEANS = (0.85, 0.75, 0.5)


def head_row(study: Study, method: str, sharing: str, gates: Gates, asked: float, **more: Any) -> None:
    """The same row on ``choose`` and on ``report``."""
    for name, reference in (("choose", study.choose), ("report", study.report)):
        gates.reset()
        scored = reference.score(gates)
        study.write("heads", method, scored, gates.report(), set=name, sharing=sharing, asked=asked, **more)


def plan_of(study: Study, scorer: Any, replacement: torch.Tensor | None) -> HeadPlan:
    return make_head_plan(study.model, scorer, study.sets["calibrate"], study.probe_parts(), replacement)


def criteria(study: Study, full: bool) -> None:
    """True importances by each criterion, skipped heads dropped or replaced by their mean, three ways to share out."""
    model, statistics = study.model, study.statistics
    for name in CRITERIA if full else ("norm_after", "fisher"):
        for replacement in (None, statistics.mean) if full else (statistics.mean,):
            scorer = HeadCriterion(model, name, statistics)
            plan = plan_of(study, scorer, replacement)
            suffix = "dropped" if replacement is None else "mean"
            for mean in MEANS[:2]:
                for sharing in ("top-k", "uniform", "measured", "global"):
                    options: dict[str, Any] = {"heads": scorer, "replacement": replacement}
                    if sharing == "top-k":
                        options["head_top_k"] = round(mean * model.n_heads)
                    else:
                        options["head_thresholds"] = plan.thresholds(plan.densities(mean, sharing))
                    head_row(study, f"oracle {name}, {suffix}", sharing, Gates(model, **options), mean)


def predicted(study: Study, full: bool) -> tuple[Predictors, torch.Tensor]:
    """Head predictors on the Fisher importance, then tuned in the model with learned replacements."""
    model, statistics = study.model, study.statistics
    importance = importance_rows(
        model, HeadCriterion(model, "fisher", statistics), study.sets["train"], study.sizes.rows
    )
    made = head_predictors(study, scaled(model.d, 48), importance)
    plan = plan_of(study, made, statistics.mean)
    for mean in MEANS[:2]:
        for sharing in ("measured", "global"):
            thresholds = plan.thresholds(plan.densities(mean, sharing))
            gates = Gates(model, heads=made, head_thresholds=thresholds, replacement=statistics.mean)
            head_row(study, "predicted", sharing, gates, mean)
    for mean in MEANS[:2]:
        rest = statistics.mean.clone()
        better = copy.deepcopy(made)
        fold_thresholds(better, plan.thresholds(plan.densities(mean, "measured")))
        config = TuneConfig(
            steps=study.sizes.tune_steps, mlp_share=None, head_density=mean, head_price=plan.price(mean)
        )
        history = tune(model, None, better, study.train_batches(), config, replacement=rest)
        gates = Gates(model, heads=better, head_thresholds=[0.0] * model.n_layers, replacement=rest)
        head_row(
            study,
            "predicted, tuned",
            "as trained",
            gates,
            mean,
            train_seconds=history["seconds"],
            detail=history["history"][-1],
        )
        if full:
            again = plan_of(study, better, rest)
            thresholds = again.thresholds(again.densities(mean, "measured"))
            gates = Gates(model, heads=better, head_thresholds=thresholds, replacement=rest)
            head_row(study, "predicted, tuned", "measured", gates, mean)
            # what the tuned replacement alone is worth: the oracle with it
            oracle = HeadCriterion(model, "fisher", statistics)
            oracle_plan = plan_of(study, oracle, rest)
            thresholds = oracle_plan.thresholds(oracle_plan.densities(mean, "measured"))
            gates = Gates(model, heads=oracle, head_thresholds=thresholds, replacement=rest)
            head_row(study, "oracle fisher, tuned replacement", "measured", gates, mean)
    return made, statistics.mean


def head_predictors(study: Study, rank: int, importance: torch.Tensor, distance: int = 0) -> Predictors:
    torch.manual_seed(0)
    made = Predictors(study.model, "heads", [rank] * study.model.n_layers, "int8", distance)
    fit_heads(study.rows(), importance, made, study.sizes.fit_steps)
    return made


def whole_block(study: Study, kind: str = "int4", rank: int = 64) -> None:
    """MLP and heads together, tuned jointly: bytes of blocks and predictors against the dense blocks'."""
    model, statistics = study.model, study.statistics
    importance = importance_rows(
        model, HeadCriterion(model, "fisher", statistics), study.sets["train"], study.sizes.rows
    )
    for distance, shared in ((0, False), (1, True)):
        mlp, _ = fitted(study, scaled(model.d, rank), kind, distance)
        mlp_plan: Plan = study.plan(mlp)
        if shared:
            torch.manual_seed(0)
            heads: Predictors = SharedDown(model, mlp)
            fit_heads(study.rows(), importance, heads, study.sizes.fit_steps)
        else:
            heads = head_predictors(study, scaled(model.d, 48), importance)
        head_plan = plan_of(study, heads, statistics.mean)
        for share, mean in ((0.08, 0.85), (0.09, 0.75)) if not shared else ((0.08, 0.85),):
            own_mlp, own_heads = copy.deepcopy(mlp), copy.deepcopy(heads)
            if shared:
                own_heads.source = [own_mlp]  # type: ignore[assignment]
            fold_thresholds(own_mlp, mlp_plan.thresholds(mlp_plan.densities(share, "measured")))
            fold_thresholds(own_heads, head_plan.thresholds(head_plan.densities(mean, "measured")))
            rest = statistics.mean.clone()
            prices = {"price": mlp_plan.price(share), "head_price": head_plan.price(mean)}
            config = TuneConfig(steps=study.sizes.tune_steps, mlp_share=share, head_density=mean, **prices)
            history = tune(model, own_mlp, own_heads, study.train_batches(), config, replacement=rest)
            zeros = [0.0] * model.n_layers
            gates = Gates(model, own_mlp, own_heads, zeros, zeros, replacement=rest)
            scored = study.report.score(gates)
            name = f"both tuned, {'one first projection' if shared else 'own projections'}"
            study.write(
                "block",
                name,
                scored,
                gates.report(),
                sharing="as trained",
                asked=mean,
                train_seconds=history["seconds"],
                detail=history["history"][-1],
            )
