"""The table's rows about heads, and about the whole block."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.frontier_methods import baselines
from benchmarks.frontier_methods.cascade_sections import second_thresholds
from benchmarks.frontier_methods.heads import (
    CRITERIA,
    HeadCriterion,
    HeadPlan,
    fit_heads,
    importance_rows,
    make_head_plan,
    refine,
)
from benchmarks.frontier_methods.plan import Plan
from benchmarks.frontier_methods.predictors import Predictors, SharedDown
from benchmarks.frontier_methods.sections import fitted, scaled
from benchmarks.frontier_methods.select import Gates
from benchmarks.frontier_methods.study import Study
from benchmarks.frontier_methods.tune import TuneConfig, fold_thresholds, tune

MEANS = (0.75, 0.85)
# losses of single layers add up where few heads are skipped
JOINTLY: dict[float, tuple[str, ...]] = {0.75: ("measured", "joint"), 0.85: ("measured",)}


def head_row(study: Study, method: str, sharing: str, gates: Gates, asked: float, **more: Any) -> None:
    """The same row on ``val`` and on ``test``."""
    for name, reference in (("val", study.val), ("test", study.test)):
        gates.reset()
        scored = reference.score(gates)
        study.write("heads", method, scored, gates.report(), set=name, sharing=sharing, asked=asked, **more)


def plan_of(study: Study, scorer: Any, replacement: torch.Tensor | None) -> HeadPlan:
    return make_head_plan(study.model, scorer, study.sets["calibration"], study.probe_parts(), replacement)


def meeting(study: Study, plan: HeadPlan, mean: float, densities: Sequence[float], rest: torch.Tensor | None) -> Gates:
    """Gates that select ``mean`` of all heads on ``val``: layers that follow sparse ones select more or less than on
    the dense model, and methods are compared at equal density."""
    shift = 0.0
    for _ in range(4):
        moved = [d if d >= 1.0 else max(0.01, d + shift) for d in densities]
        gates = Gates(study.model, heads=plan.scorer, head_thresholds=plan.thresholds(moved), replacement=rest)
        study.val.score(gates)
        gap = mean - gates.report()["head_density"]
        if abs(gap) < 5e-4:
            break
        shift += gap * len(densities) / max(1, sum(d < 1.0 for d in densities))
    return gates


def shared_rows(
    study: Study,
    method: str,
    plan: HeadPlan,
    rest: torch.Tensor | None,
    mean: float,
    sharings: Sequence[str],
    **more: Any,
) -> None:
    """Rows of one scorer at equal density, its budget shared out in several ways; ``joint`` is ``measured`` refined."""
    for sharing in sharings:
        densities = plan.densities(mean, "measured" if sharing == "joint" else sharing)
        if sharing == "joint":
            densities = refine(plan, densities, study.probe_parts(), rest, 2 if study.brief else 4)
        gates = meeting(study, plan, mean, densities, rest)
        head_row(study, method, sharing, gates, mean, **more)


def criteria(study: Study, full: bool) -> None:
    """True importances by each criterion, skipped heads dropped or replaced by their mean, ways to share out."""
    model, statistics = study.model, study.statistics
    full = full and not study.brief
    for name in CRITERIA if full else ("norm_after", "fisher"):
        for replacement in (None, statistics.mean) if full else (statistics.mean,):
            scorer = HeadCriterion(model, name, statistics)
            plan = plan_of(study, scorer, replacement)
            suffix = "dropped" if replacement is None else "mean"
            method = f"oracle {name}, {suffix}"
            for mean in MEANS:
                k = round(mean * model.n_heads)
                head_row(
                    study, method, "top-k", Gates(model, heads=scorer, head_top_k=k, replacement=replacement), mean
                )
                shared_rows(
                    study, method, plan, replacement, mean, ("uniform", "measured", "global") if full else ("measured",)
                )


def importance_of(study: Study, name: str = "fisher") -> torch.Tensor:
    criterion = HeadCriterion(study.model, name, study.statistics)
    return importance_rows(study.model, criterion, study.sets["train"], study.sizes.rows)


def predicted(study: Study, full: bool) -> None:
    """Head predictors trained on the logarithm of the importance, then (on a GPU) tuned with their replacements."""
    model, statistics = study.model, study.statistics
    importance = importance_of(study)
    oracle = plan_of(study, HeadCriterion(model, "fisher", statistics), statistics.mean)
    for mean in MEANS if full else ():
        shared_rows(study, "oracle fisher, mean", oracle, statistics.mean, mean, JOINTLY[mean])
    rank = scaled(model.d, 48)
    variants: list[tuple[str, dict[str, Any]]] = [(f"predicted r{rank}", {})]
    if full and not study.brief:
        variants += [
            (f"predicted r{2 * rank}, token tables, steps x 4", {"rank": 2 * rank, "tables": True, "steps": 2400}),
            (f"predicted r{2 * rank}", {"rank": 2 * rank}),
            (f"predicted r{rank}, steps x 4", {"steps": 4 * study.sizes.fit_steps}),
            (f"predicted r{rank}, token tables", {"tables": True}),
            (f"predicted r{rank}, from_mean labels", {"labels": "from_mean"}),
        ]
    for name, changes in variants:
        labels = importance if "labels" not in changes else importance_of(study, changes["labels"])
        options = {key: value for key, value in changes.items() if key != "labels"}
        made = head_predictors(study, importance=labels, **{"rank": rank, **options})
        plan = plan_of(study, made, statistics.mean)
        tuned = full and (not changes or name == f"predicted r{2 * rank}, token tables, steps x 4")
        for mean in MEANS:
            shared_rows(study, name, plan, statistics.mean, mean, JOINTLY[mean] if tuned else ("measured",))
            if tuned:
                tuned_heads(study, f"{name}, tuned", made, plan, mean)


def tuned_heads(study: Study, name: str, made: Predictors, plan: HeadPlan, mean: float) -> None:
    """Tune a copy of ``made`` in the model, with what stands in for skipped heads; its rows."""
    model, statistics = study.model, study.statistics
    rest = statistics.mean.clone()
    better = copy.deepcopy(made)
    densities = plan.densities(mean, "measured")
    if "joint" in JOINTLY[mean]:
        densities = refine(plan, densities, study.probe_parts(), rest, 2 if study.brief else 4)
    fold_thresholds(better, plan.thresholds(densities))
    price = plan.price(mean)
    config = TuneConfig(study.sizes.tune_steps, 5e-4, None, head_density=mean, head_price=price, bias_rate=8.0)
    history = tune(model, None, better, study.train_batches(), config, replacement=rest, statistics=statistics)
    more = {"train_seconds": history["seconds"], "detail": history["history"][-1]}
    gates = Gates(model, heads=better, head_thresholds=[0.0] * model.n_layers, replacement=rest)
    head_row(study, name, "as trained", gates, mean, **more)
    shared_rows(study, name, plan_of(study, better, rest), rest, mean, JOINTLY[mean], **more)


def head_predictors(
    study: Study, rank: int, importance: torch.Tensor, distance: int = 0, steps: int | None = None, tables: bool = False
) -> Predictors:
    torch.manual_seed(0)
    made = Predictors(study.model, "heads", [rank] * study.model.n_layers, "int8", distance)
    size = study.model.embed.shape[0] if tables else 0
    fit_heads(study.rows(), importance, made, steps or study.sizes.fit_steps, vocabulary=size)
    return made


def look_ahead(study: Study) -> None:
    """Heads from earlier sites, in half-blocks."""
    importance, statistics = importance_of(study), study.statistics
    for distance in (0, 1, 2, 4):
        made = head_predictors(study, scaled(study.model.d, 48), importance, distance)
        plan = plan_of(study, made, statistics.mean)
        for mean in MEANS:
            shared_rows(study, f"look-ahead, distance {distance}", plan, statistics.mean, mean, JOINTLY[mean])


def whole_block(study: Study) -> None:
    """MLP and heads together, tuned jointly: bytes of blocks and predictors against the dense blocks'."""
    model, statistics = study.model, study.statistics
    importance = importance_of(study)
    every = tuple(range(model.n_layers))
    studied = (
        ("cascade and tables", 64, 0, True, every, ((0.08, 0.85), (0.09, 0.80))),
        ("low rank", 64, 0, False, (), ((0.11, 0.85), (0.15, 0.85))),
        ("one first projection", 64, 1, False, (), ((0.11, 0.85),)),
    )
    floors = second_thresholds(study, 0.999)
    for name, rank, distance, cascade, tables, pairs in studied[: 1 if study.brief else None]:
        mlp, _ = fitted(study, scaled(model.d, rank), "int4", distance, tables=tables)
        tests = baselines.TwoTests(model, mlp, floors) if cascade else None
        mlp_plan: Plan = study.plan(tests or mlp)
        shared = name == "one first projection"
        if shared:
            torch.manual_seed(0)
            heads: Predictors = SharedDown(model, mlp)
            fit_heads(study.rows(), importance, heads, study.sizes.fit_steps)
        else:
            heads = head_predictors(study, scaled(model.d, 48), importance, tables=cascade)
        head_plan = plan_of(study, heads, statistics.mean)
        for share, mean in pairs:
            mlp_start = mlp_plan.thresholds(mlp_plan.densities(share, "measured"))
            head_start = head_plan.thresholds(head_plan.densities(mean, "measured"))
            gates = Gates(model, tests or mlp, heads, mlp_start, head_start, replacement=statistics.mean)
            for on, reference in (("val", study.val), ("test", study.test)):
                gates.reset()
                scored = reference.score(gates)
                study.write("block", f"{name}, each by itself", scored, gates.report(), set=on, asked=mean)
            own_mlp, own_heads = copy.deepcopy(mlp), copy.deepcopy(heads)
            if shared:
                own_heads.source = [own_mlp]  # type: ignore[assignment]
            fold_thresholds(own_mlp, mlp_start)
            fold_thresholds(own_heads, head_start)
            own_tests = baselines.TwoTests(model, own_mlp, floors) if cascade else None
            rest = statistics.mean.clone()
            prices = {"price": mlp_plan.price(share), "head_price": head_plan.price(mean)}
            config = TuneConfig(study.sizes.tune_steps, 1e-3, mlp_share=share, head_density=mean, **prices)
            history = tune(
                model, own_mlp, own_heads, study.train_batches(), config, rest, tests=own_tests, statistics=statistics
            )
            zeros = [0.0] * model.n_layers
            gates = Gates(model, own_tests or own_mlp, own_heads, zeros, zeros, replacement=rest)
            more = {"train_seconds": history["seconds"], "detail": history["history"][-1], "asked": mean}
            for on, reference in (("val", study.val), ("test", study.test)):
                gates.reset()
                scored = reference.score(gates)
                label = f"{name}, tuned together"
                study.write("block", label, scored, gates.report(), set=on, sharing="as trained", **more)
