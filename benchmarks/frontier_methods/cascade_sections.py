"""Cascades trained and tuned as such: a low rank filters, fc1's upper bits decide, the rest of the row follows."""

import copy
from collections.abc import Sequence

from benchmarks.frontier_methods import baselines, sections
from benchmarks.frontier_methods.sections import as_trained, fitted, scaled
from benchmarks.frontier_methods.study import Study
from benchmarks.frontier_methods.tune import TuneConfig, fold_thresholds, tune
from dejavu_train.bundle.allocation import density_for_mass, read_curve
from dejavu_train.errors import UserError


def second_thresholds(study: Study, mass: float) -> list[float]:
    """For each layer the score of the second stage above which ``mass`` of the contribution lies.

    Set on that test's own scores, so that the error of its few bits is allowed for; they are negative as a rule.
    """
    plan = study.plan(baselines.SharpTest(study.model), losses=False)
    return [read_curve(c, density_for_mass(c, mass))["threshold"] for c in plan.curves]


def cascades(study: Study, shares: Sequence[float], full: bool = True) -> None:
    """A filter trained and tuned for the cascade: low rank, then fc1's upper four bits, then the rest of the row."""
    every = tuple(range(study.model.n_layers))
    for rank_at_384, kind, mass, tables, targets in (
        (64, "int4", 0.999, every, (0.078, 0.105)),
        (48, "int4", 0.998, every, (0.08,)),
        (48, "int4", 0.999, (), (0.08,)),
        (32, "int4", 0.998, every, (0.08,)),
        (64, "int4", 0.9997, every, (0.11,)),
        (48, "int4", 0.999, (0,), ()),
    )[: (1 if study.brief else None) if full else 1]:
        rank = scaled(study.model.d, rank_at_384)
        floors = second_thresholds(study, mass)
        predictors, seconds = fitted(study, rank, kind, tables=tables)
        tests = baselines.TwoTests(study.model, predictors, floors)
        plan = study.plan(tests)
        name = f"cascade r{rank} {kind}, {mass:.2%} of the mass, {len(tables)} tables"
        study.frontier("cascade", name, tests, shares, plan=plan, train_seconds=seconds)
        study.frontier("cascade", name, tests, sections.VAL_SHARES, plan=plan, on="val", train_seconds=seconds)
        for share in targets if full else ():
            made = copy.deepcopy(predictors)
            try:
                fold_thresholds(made, plan.thresholds(plan.densities(share, "measured")))
            except UserError:
                continue
            own = baselines.TwoTests(study.model, made, floors)
            config = TuneConfig(steps=study.sizes.tune_steps, mlp_share=share, price=plan.price(share))
            history = tune(
                study.model, made, None, study.train_batches(), config, tests=own, statistics=study.statistics
            )
            more = {"train_seconds": seconds + history["seconds"], "detail": history["history"][-1]}
            label = f"{name}, tuned at {share:.1%}"
            for on in ("val", "test", *study.extra):
                as_trained(study, "cascade", label, own, on=on, **more)
            own_plan = study.plan(own)
            fine = (share - 0.001, share, share + 0.001)  # budgets asked are met to a hundredth, and goals are sharp
            near = sorted({*fine, *(s for s in shares if 0.6 * share <= s <= 2.0 * share)})
            study.frontier("cascade", label, own, near, plan=own_plan)
            study.frontier("cascade", label, own, near, plan=own_plan, on="val")
