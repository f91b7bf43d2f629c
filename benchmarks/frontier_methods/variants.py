"""One thing changed at a time: losses and starts, bits and hints, tuning, look-ahead. Compared on ``val``."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.frontier_methods import baselines, sections
from benchmarks.frontier_methods.allocation import batch_plan, of_ranks, ranks_and_densities
from benchmarks.frontier_methods.fit import fit, record_rows
from benchmarks.frontier_methods.plan import Plan
from benchmarks.frontier_methods.predictors import Predictors
from benchmarks.frontier_methods.sections import as_trained, fitted, scaled, tuned
from benchmarks.frontier_methods.select import WEIGHT_BYTES, Gates
from benchmarks.frontier_methods.study import Study
from benchmarks.frontier_methods.tune import TuneConfig
from dejavu_train.bundle.allocation import density_for_mass, read_curve
from dejavu_train.errors import UserError

RANK_SHARES = (0.06, 0.08, 0.10, 0.13)


def losses(study: Study) -> None:
    """The loss changed, from: rank 64, int8, data-aware SVD initialisation, contribution loss. On ``val``."""
    one_by_one(
        study,
        {
            "contribution": {},
            "paper": {"loss": "paper"},
            "pos_weight": {"loss": "pos_weight"},
            "listwise": {"loss": "listwise"},
            "squared": {"loss": "squared"},
            "root": {"loss": "root"},
            "worthwhile": {"loss": "worthwhile"},
            "contribution + layer output": {"distil": 10.0},
            "contribution, gradient weights": {"norms": study.statistics.neuron},
            "squared, gradient weights": {"loss": "squared", "norms": study.statistics.neuron},
        },
    )


def starts(study: Study) -> None:
    """The start, the form, the learning rate, the steps and the activations changed, from the same. On ``val``."""
    steps = study.sizes.fit_steps
    one_by_one(
        study,
        {
            "random start": {"start": "random"},
            "svd start": {"start": "svd"},
            "start not rescaled": {"rescale": False},
            "relu, random start": {"start": "random", "nonlinearity": "relu"},
            "no bias": {"bias": False},
            "lr 2e-3": {"learning_rate": 2e-3},
            "lr 1.5e-2": {"learning_rate": 1.5e-2},
            "steps / 3": {"steps": steps // 3},
            "steps x 3": {"steps": steps * 3},
            "token tables": {"tables": tuple(range(study.model.n_layers))},
            "token table of the first layer": {"tables": (0,)},
        },
    )
    own_activations(study)


def one_by_one(study: Study, variants: dict[str, dict[str, Any]]) -> None:
    for name, changes in variants.items():
        predictors, seconds = fitted(study, scaled(study.model.d, 64), **changes)
        study.frontier("training", name, predictors, sections.VAL_SHARES, on="val", train_seconds=seconds)


def own_activations(study: Study) -> None:
    """As many steps again on the sparse model's activations (errors of earlier layers included), or the dense one's."""
    predictors, seconds = fitted(study, scaled(study.model.d, 64))
    plan = study.plan(predictors)
    thresholds = plan.thresholds(plan.densities(0.1, "measured"))
    gates = Gates(study.model, mlp=copy.deepcopy(predictors), mlp_thresholds=thresholds)
    own = record_rows(study.model, study.sets["train"], study.sizes.rows, gates)
    config = sections.config_of(study, rescale=False, learning_rate=3e-3)
    for name, rows in (("the dense model's", study.rows()), ("the sparse model's", own)):
        made = copy.deepcopy(predictors).requires_grad_(True)
        more = fit(study.model, rows, made, config)["seconds"]
        label = f"trained again on {name} activations"
        study.frontier("training", label, made, sections.VAL_SHARES, on="val", train_seconds=seconds + more)


def allocation(study: Study) -> None:
    """Ranks shared out with densities; a batch's union known or not; counts that adapt to the token or do not."""
    model = study.model
    trained = {rank: fitted(study, rank, "int4")[0] for rank in (scaled(model.d, r) for r in (16, 32, 64, 96))}
    plans = {rank: study.plan(predictors) for rank, predictors in trained.items()}
    middle = scaled(model.d, 64)
    for rank in trained:
        study.frontier("allocation", f"rank {rank} in all layers", trained[rank], RANK_SHARES, plan=plans[rank])
    for share in RANK_SHARES:
        ranks, densities = ranks_and_densities(plans, share)
        found = [
            plans[r].thresholds([d] * model.n_layers)[i] for i, (r, d) in enumerate(zip(ranks, densities, strict=True))
        ]
        gates = Gates(model, mlp=of_ranks(model, trained, ranks), mlp_thresholds=found)
        scored = study.test.score(gates)
        detail = {"ranks": ranks, "densities": [round(d, 4) for d in densities]}
        study.write(
            "allocation", "ranks shared out", scored, gates.report(), sharing="measured", asked=share, detail=detail
        )
    batches(study, plans[middle])
    for share in sections.VAL_SHARES:
        densities = plans[middle].densities(share, "measured")
        for name, options in (
            ("counts by threshold", {"mlp_thresholds": plans[middle].thresholds(densities)}),
            ("the same count for every token", {"top_k": [max(1, round(d * model.f)) for d in densities]}),
        ):
            gates = Gates(model, mlp=trained[middle], **options)
            scored = study.test.score(gates)
            study.write("allocation", name, scored, gates.report(), sharing="measured", asked=share)


def batches(study: Study, plan: Plan, size: int = 8) -> None:
    """The bytes of a batch of ``size`` shared out knowing its union, or as if every token read for itself."""
    model = study.model
    wide = batch_plan(plan, study.sets["calibration"], size)
    dense = 2 * WEIGHT_BYTES * model.d * model.f * model.n_layers
    for budget in (0.15, 0.2, 0.3, 0.4):
        low, high = 0.0, 1.0
        blind: list[float] = []
        for _ in range(30):  # the single token's budget whose union reads just that
            middle = (low + high) / 2
            try:
                blind = plan.densities(middle, "measured")
            except UserError:
                low = middle
                continue
            low, high = (middle, high) if wide.total(blind) <= budget * dense else (low, middle)
        for name, densities in (("one token", blind), (f"a batch of {size}", wide.densities(budget, "measured"))):
            gates = Gates(model, mlp=plan.scorer, mlp_thresholds=plan.thresholds(densities), together=size)
            scored = study.test.score(gates)
            report = gates.report() | {"mlp_share": gates.union_share()}
            detail = {"densities": [round(d, 4) for d in densities]}
            label = f"batch of {size}, shared out for {name}"
            study.write("allocation", label, scored, report, sharing="measured", asked=budget, detail=detail)


def tuning(study: Study) -> None:
    """Variants of tuning in the model, on ``val``: from rank 64 int4 at 9 % of the bytes, one thing at a time."""
    rank, share = scaled(study.model.d, 64), 0.09
    steps = study.sizes.tune_steps
    base, _ = fitted(study, rank, "int4")
    narrow, _ = fitted(study, rank, "int8")
    variants: list[tuple[str, Predictors, TuneConfig, bool]] = [
        ("base", base, TuneConfig(steps=steps, mlp_share=share), False),
        ("int8", narrow, TuneConfig(steps=steps, mlp_share=share), False),
        ("first-order gates", base, TuneConfig(steps=steps, mlp_share=share), False),
        ("from SVD", study.predictors(rank, "int4"), TuneConfig(steps=steps, mlp_share=share), False),
        ("steps x 3", base, TuneConfig(steps=3 * steps, mlp_share=share), False),
        ("offsets", base, TuneConfig(steps=steps, mlp_share=share), True),
        ("lr 7e-4", base, TuneConfig(steps=steps, mlp_share=share, learning_rate=7e-4), False),
        ("lr 5e-3", base, TuneConfig(steps=steps, mlp_share=share, learning_rate=5e-3), False),
        ("width 0.5", base, TuneConfig(steps=steps, mlp_share=share, width=0.5), False),
        ("width 2", base, TuneConfig(steps=steps, mlp_share=share, width=2.0), False),
        ("from a wider share", base, TuneConfig(steps=steps, mlp_share=share, share_from=0.16), False),
    ]
    for name, start, config, offsets in variants:
        made, history, extra = tuned(study, start, share, config, offsets, curved=name != "first-order gates")
        gates = {"offsets": extra} if offsets else {}
        as_trained(
            study,
            "tuning",
            name,
            made,
            on="val",
            gates=gates,
            train_seconds=history["seconds"],
            detail=history["history"][-1],
        )
        study.frontier("tuning", name, made, (0.08, 0.09, 0.11), on="val", gates=gates)


def bytes_section(study: Study, shares: Sequence[float]) -> None:
    """Weights in fewer bits, cascades, the previous token's hint, fc2 rows that are not worth reading."""
    model = study.model
    base, _ = fitted(study, scaled(model.d, 64), "fp16")
    for kind in ("fp16", "fp8", "int8", "int4", "int4/32", "int3", "int2"):
        other = base.stored_as(kind)
        study.frontier("bytes", f"r64 trained in fp16, stored in {kind}", other, sections.VAL_SHARES, on="val")
    for kind in ("int4", "int4/32", "int3"):
        aware, _ = fitted(study, scaled(model.d, 64), kind)
        study.frontier("bytes", f"r64 trained in {kind}", aware, sections.VAL_SHARES, on="val")
    stored = base.stored_as("int8")
    plan = study.plan(stored)
    thresholds = [0.0 if t is None else t for t in plan.thresholds(plan.densities(0.1, "measured"))]
    spread = float(
        torch.tensor([read_curve(c, 0.02)["threshold"] - read_curve(c, 0.1)["threshold"] for c in plan.curves]).mean()
    )
    for bonus in (0.25, 0.5, 1.0):
        hinted = baselines.PreviousToken(stored, thresholds, bonus * spread)
        study.frontier("bytes", f"r64 int8 + previous token x {bonus}", hinted, sections.VAL_SHARES, on="val")
    floors_plan = study.plan(baselines.Oracle(), losses=False)
    for mass in (0.995, 0.98, 0.95):
        floors = [read_curve(c, density_for_mass(c, mass))["threshold"] for c in floors_plan.curves]
        study.frontier(
            "bytes",
            f"r64 int8, fc2 rows of {mass:.1%} of the mass",
            stored,
            sections.VAL_SHARES,
            on="val",
            gates={"fc2_floor": floors},
        )
    cascade(study, stored, plan)


def cascade(study: Study, filter_: Predictors, plan: Plan) -> None:
    """A filter wider than the budget, then fc1's rows in 4 bits, or their upper bytes, on the survivors."""
    model = study.model
    for wide in (0.09, 0.12, 0.16):
        densities = plan.densities(wide, "measured")
        first = [-1e9 if t is None else t for t in plan.thresholds(densities)]
        survivors = [density * model.f for density in densities]
        for kind, planes in (("int4", False), ("fp8", True)):
            scorer = baselines.Cascade(model, filter_, first, kind, planes)
            made = study.plan(scorer, survivors=survivors)
            label = f"cascade r64 int8 at {wide:.0%}, then {'upper bytes' if planes else kind}"
            study.frontier("bytes", label, scorer, sections.VAL_SHARES, on="val", plan=made)


def look_ahead(study: Study) -> None:
    """Quality against the distance of the site, in half-blocks; tuned predictors for the distances that goals name."""
    shares = (0.06, 0.07, 0.08, 0.10, 0.13) if study.brief else (0.08, 0.10, 0.13, 0.15, 0.20)
    rank = scaled(study.model.d, 64)
    trained = {}
    for distance in (0, 1, 2, 4):
        predictors, seconds = fitted(study, rank, "int4", distance)
        plan = study.plan(predictors)
        label = f"layer by layer, distance {distance}"
        study.frontier("look-ahead", label, predictors, shares, plan=plan, train_seconds=seconds)
        trained[distance] = predictors, plan
    for distance in (0, 1, 2) if not study.brief else ():
        made, history, _ = tuned(study, trained[distance][0], 0.105, plan=trained[distance][1])
        label, more = f"tuned at 10.5%, distance {distance}", {"train_seconds": history["seconds"]}
        as_trained(study, "look-ahead", label, made, **more)
        study.frontier("look-ahead", label, made, shares, **more)
