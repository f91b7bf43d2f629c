"""The table, section by section; each function writes its rows and returns nothing that a later one must have.

Variants are compared on ``val``; ``test`` rows are of methods fixed beforehand or picked on ``val``.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.frontier_methods import baselines
from benchmarks.frontier_methods.fit import FitConfig, Rows, fit
from benchmarks.frontier_methods.plan import Plan, count
from benchmarks.frontier_methods.predictors import OneForAll, Predictors
from benchmarks.frontier_methods.score import Scored
from benchmarks.frontier_methods.select import Gates
from benchmarks.frontier_methods.study import Study
from benchmarks.frontier_methods.tables import add_tables
from benchmarks.frontier_methods.tune import TuneConfig, fold_thresholds, tune
from dejavu_train.errors import UserError

SHARES = (0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.10, 0.11, 0.13, 0.15, 0.20, 0.25)
BRIEF_SHARES = (0.06, 0.07, 0.08, 0.10, 0.11, 0.13, 0.15, 0.20, 0.25)
QUICK_SHARES = (0.08, 0.11, 0.15, 0.25)
VAL_SHARES = (0.08, 0.11, 0.15)


def references(study: Study, shares: Sequence[float], full: bool = True) -> None:
    """Oracle, random, static, non-contextual, searches, and systems without training."""
    model = study.model
    oracle = baselines.Oracle()
    if study.brief:
        study.frontier("reference", "oracle", oracle, (0.01, 0.015, 0.02, 0.03, 0.04, 0.05), layers=True)
        return
    oracle_shares = [0.01, 0.015, 0.02, 0.03, *shares][: 9 if full else 6]
    plan = study.plan(oracle)
    study.frontier("reference", "oracle", oracle, oracle_shares, plan=plan, layers=True)
    if full:
        study.frontier("reference", "oracle", oracle, oracle_shares, "uniform", plan=plan)
    study.frontier("reference", "random", baselines.Random(), shares[::3])
    counted = count(model, None, study.sets["calibration"])
    frequency = (counted.frequency / counted.rows).float()
    study.frontier("reference", "static", baselines.Static(frequency), shares[::3])
    study.frontier("reference", "non-contextual", baselines.NonContextual(), shares[::3])
    study.frontier("reference", "exact MaxIP", baselines.MaxIP(), [0.52, 0.53, 0.55])
    study.frontier("reference", "CATS", baselines.Activation(), [0.505, 0.51, 0.52, 0.53])
    hnsw(study)
    teal(study)
    griffin(study)


def hnsw(study: Study) -> None:
    """Approximate search, if hnswlib is installed; on 2,000 tokens, it runs on the host."""
    try:
        import hnswlib  # noqa: F401
    except ImportError:
        print("hnswlib is not installed: the HNSW row is left out (pip install hnswlib)", flush=True)
        return
    plan = study.plan(baselines.MaxIP(), losses=False)
    for mean in (0.1, 0.2):
        scorer = baselines.HNSW(study.model, [max(1, round(mean * study.model.f))] * study.model.n_layers)
        gates = Gates(study.model, mlp=scorer, mlp_thresholds=[0.5] * study.model.n_layers)
        scored = study.test.score(gates)
        study.write("reference", "HNSW", scored, gates.report(), sharing="uniform", asked=mean)
    del plan


def teal(study: Study) -> None:
    """Thresholds on the inputs, by quantile on calibration documents; fc2 rows of tiny activations are skipped too."""
    model = study.model
    rows = study.rows("calibration").mlp_in.float().abs()
    for density in (0.3, 0.5, 0.7):
        thresholds = [
            float(rows[i].flatten()[:: max(1, rows[i].numel() // 10**6)].quantile(1 - density))
            for i in range(model.n_layers)
        ]
        edit = baselines.Teal(model, thresholds, [0.0] * model.n_layers)
        scored = study.test.score(edit)  # type: ignore[arg-type]
        study.write("reference", "TEAL", scored, {"mlp_share": edit.mlp_share()}, sharing="uniform", asked=density)


def griffin(study: Study) -> None:
    """Neurons fixed by the first half of a window; scored on the second half, against the dense model there."""
    prompt = study.sizes.window // 2
    for density in (0.1, 0.2, 0.5):
        k = [round(density * study.model.f)] * study.model.n_layers
        gates = Gates(study.model, mlp=baselines.Griffin(prompt), top_k=k, from_position=prompt)
        scored = study.test.score(gates, from_position=prompt)
        study.write("reference", "GRIFFIN", scored, gates.report(), sharing="uniform", asked=density)


def training_free(study: Study, shares: Sequence[float], full: bool) -> None:
    """Truncated SVD of fc1 (SVDP's predictor), data-aware SVD, sketches."""
    d = study.model.d
    ranks = [scaled(d, r) for r in ((32, 64, 128) if full and not study.brief else (64,))]
    full = full and not study.brief
    for rank in ranks:
        for kind in ("fp16", "int8") if full or study.brief else ("fp16",):
            plain = study.predictors(rank, kind, start="svd", weighted=False)
            study.frontier("svd", f"SVD r{rank} {kind}", plain, shares)
    for rank in ranks:
        for kind in ("fp16", "fp8", "int8", "int4") if full and rank == ranks[1] else ("int8",):
            study.frontier("svd", f"data-aware SVD r{rank} {kind}", study.predictors(rank, kind), shares)
    if full:
        middle = study.predictors(ranks[1], "int8")
        for sharing in ("proportional", "uniform", "global"):
            study.frontier("svd", f"data-aware SVD r{ranks[1]} int8", middle, shares[::2], sharing)
    if study.brief:
        study.frontier("svd", f"data-aware SVD r{ranks[0]} int4", study.predictors(ranks[0], "int4"), shares)
        return
    for bits in (1, 2, 4) if full else (1,):
        study.frontier("sketch", f"fc1 in {bits} bit", baselines.Sketch(study.model, bits), shares)
    if full:
        for rank in (ranks[0] // 2, ranks[0]):
            low = study.predictors(rank, "int8")
            study.frontier(
                "sketch", f"data-aware SVD r{rank} int8 + 1 bit", baselines.Sketch(study.model, 1, low), shares
            )


def scaled(d: int, rank_at_384: int) -> int:
    """A rank in proportion to the width, so that its share of the MLP's bytes is the same for every model."""
    return max(4, round(rank_at_384 * d / 384))


def original(study: Study, shares: Sequence[float]) -> None:
    """The recipe as published: rank 1000 of 12288, random start, its loss, its early stop; the same k everywhere."""
    predictors = study.predictors(math.ceil(1000 * study.model.d / 12288), start="random")
    steps = 20 * max(1, study.rows().mlp_in.shape[1] // 1024)
    config = FitConfig("paper", min(steps, 4 * study.sizes.fit_steps), 1024, 1e-3, 0.01, patience=5)
    taken = fit(study.model, study.rows(), predictors, config, study.rows("val"))
    plan = study.plan(predictors)
    for sharing in ("uniform", "measured"):
        study.frontier(
            "trained", "original recipe", predictors, shares, sharing, plan=plan, train_seconds=taken["seconds"]
        )
    # as published the number of neurons is the same for every token too
    for share in shares[len(shares) // 2 :: 2]:
        densities = plan.densities(share, "uniform")
        k = [max(1, round(x * study.model.f)) for x in densities]
        gates = Gates(study.model, mlp=predictors, top_k=k)
        scored = study.test.score(gates)
        study.write("trained", "original recipe, top-k", scored, gates.report(), sharing="uniform", asked=share)


def one_for_all(study: Study, shares: Sequence[float]) -> None:
    """ShadowLLM's shape, with the contribution loss."""
    torch.manual_seed(0)
    predictors = OneForAll(study.model, scaled(study.model.d, 64), "int8")
    taken = fit(study.model, study.rows(), predictors, config_of(study, learning_rate=2e-3))
    study.frontier("trained", "one predictor for all layers", predictors, shares, train_seconds=taken["seconds"])


def config_of(study: Study, **changes: Any) -> FitConfig:
    base = {"steps": study.sizes.fit_steps, "rows": study.sizes.fit_rows}
    return FitConfig(**{**base, **changes})


def fitted(
    study: Study, rank: int, kind: str = "int8", distance: int = 0, start: str = "data", **changes: Any
) -> tuple[Predictors, float]:
    """Predictors trained layer by layer, and the seconds it took."""
    norms, tables = changes.pop("norms", None), changes.pop("tables", ())
    nonlinearity, bias = changes.pop("nonlinearity", "none"), changes.pop("bias", True)
    predictors = study.predictors(rank, kind, distance, start, nonlinearity)
    if not bias:
        predictors.bias.data.zero_()
        predictors.bias.requires_grad_(False)
    rows: Rows = study.rows()
    if tables:
        add_tables(study.model, predictors, study.tune_parts, rows, tables, study.sizes.tune_tokens)
    taken = fit(study.model, rows, predictors, config_of(study, **changes), norms=norms)
    return predictors, taken["seconds"]


def tuned(
    study: Study,
    predictors: Predictors,
    share: float,
    config: TuneConfig | None = None,
    offsets: bool = False,
    plan: Plan | None = None,
    curved: bool = True,
) -> tuple[Predictors, dict[str, Any], torch.Tensor | None]:
    """A copy of ``predictors`` trained inside the sparse model at ``share``; its biases hold the thresholds."""

    plan = plan or study.plan(predictors)
    made = copy.deepcopy(predictors)
    fold_thresholds(made, plan.thresholds(plan.densities(share, "measured")))
    extra = torch.zeros(study.model.n_layers, study.model.d, device=study.model.device) if offsets else None
    config = config or TuneConfig(steps=study.sizes.tune_steps, mlp_share=share)
    if config.price is None:
        config = dataclasses.replace(config, price=plan.price(share))
    known = study.statistics if curved else None
    history = tune(study.model, made, None, study.train_batches(), config, offsets=extra, statistics=known)
    return made, history, extra


def as_trained(
    study: Study, section: str, method: str, scorer: Any, on: str = "test", gates: Any = None, **more: Any
) -> Scored:
    """The row of a tuned scorer at the thresholds it was tuned with: zero everywhere."""
    edit = Gates(study.model, mlp=scorer, mlp_thresholds=[0.0] * study.model.n_layers, **(gates or {}))
    reference = {"test": study.test, "val": study.val, **study.extra}[on]
    scored = reference.score(edit)
    study.write(section, method, scored, edit.report(), set=on, sharing="as trained", **more)
    return scored


# (rank at width 384, dtype, shares of the MLP's bytes that it is tuned at)
CANDIDATES = (
    (64, "int4", (0.08, 0.11)),
    (64, "int8", (0.08,)),
    (96, "int4", (0.11, 0.15)),
    (32, "int8", ()),
    (128, "int4", ()),
)


def winners(study: Study, shares: Sequence[float], full: bool) -> None:
    """Layer-by-layer and tuned predictors over ranks and dtypes; the best of each budget is picked on ``val``.

    Tuning takes a GPU: the steps that a CPU has time for gain a tenth.
    """
    for rank_at_384, kind, targets in CANDIDATES[: 1 if study.brief else None] if full else ((64, "int8", ()),):
        rank = scaled(study.model.d, rank_at_384)
        predictors, seconds = fitted(study, rank, kind)
        plan = study.plan(predictors)
        name = f"layer by layer r{rank} {kind}"
        study.frontier("trained", name, predictors, VAL_SHARES, plan=plan, on="val", train_seconds=seconds)
        study.frontier("trained", name, predictors, shares, plan=plan, train_seconds=seconds, layers=True)
        for share in targets:
            try:
                made, history, _ = tuned(study, predictors, share, plan=plan)
            except UserError:  # the predictor alone reads more
                continue
            label, seconds_in_all = f"tuned at {share:.1%} r{rank} {kind}", seconds + history["seconds"]
            more = {"train_seconds": seconds_in_all, "detail": history["history"][-1]}
            as_trained(study, "trained", label, made, on="val", **more)
            as_trained(study, "trained", label, made, **more)
            near = [s for s in shares if 0.55 * share <= s <= 2.0 * share]
            own = study.plan(made)
            study.frontier("trained", label, made, near, plan=own, train_seconds=seconds_in_all, layers=True)
            study.frontier("trained", label, made, near, plan=own, on="val", train_seconds=seconds_in_all)
            if not study.brief:
                study.frontier("trained", label, made, near, "global", plan=own, train_seconds=seconds_in_all)
            for name_of_text in study.extra:
                as_trained(study, "trained", label, made, on=name_of_text, **more)
