"""Scores predictors on rows of the ``calibration`` set: the curve of each, and the thresholds of a cascade's second
stage.

Rows stream through in blocks. Logits are counted, not kept (see ``curves``), so memory is the same for any number.

Letters: N rows, d model width, n units.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dejavu_train.bundle.allocation import density_for_mass, read_curve
from dejavu_train.calibration.curves import HEAD_GRID, MLP_GRID, LogitHistogram, head_curve, spread_blocks
from dejavu_train.families import LayerInput, Site, Target
from dejavu_train.ground.errors import UserError
from dejavu_train.predictors.bit_planes import SecondStage, build_second_stage, choose_grid

BLOCK_ROWS = 1024
STAGE2_LIMIT = 1e30  # the threshold of a neuron whose column of ``down`` is zero, or its negative


class RowBlock(NamedTuple):
    """inputs (N, d) of the predictor, active (N, n) bool, contribution (N, n), and for neurons mlp_in (N, d)."""

    inputs: Tensor
    active: Tensor
    contribution: Tensor
    mlp_in: Tensor | None


class PredictorScore(NamedTuple):
    """curve: see ``allocate``. active_density: None for heads, all of which contribute something. frequency (n,): how
    often a neuron is active, or a head's mean contribution. logits (N, n): a sample of them, where asked, or none."""

    curve: dict[str, list[float]]
    active_density: float | None
    frequency: Tensor
    logits: Tensor


def row_blocks(
    weights: Any, target: Target, site: LayerInput, inputs: Any, own: Any, rows: int, device: torch.device
) -> Callable[[], Iterator[RowBlock]]:
    """Passes over ``rows`` rows in evenly spread blocks.

    Args:
        weights: ``RecordedWeights`` of the target's layer on ``device``, for what a neuron contributes.
        site: what the predictor reads, of the layer of the reader ``inputs``. ``own`` reads the target's layer.
    """

    def run() -> Iterator[RowBlock]:
        for start, stop in spread_blocks(own.rows, rows, BLOCK_ROWS):
            x = inputs.read(site, start, stop).to(device).float()
            if target == Target.HEADS:
                contribution = own.read("head_norm", start, stop).to(device).float()
                yield RowBlock(x, contribution > 0, contribution, None)
                continue
            active = own.read("mlp_active", start, stop).to(device).bool()
            reads_own = Site(inputs.layer, site) == Site(own.layer, LayerInput.MLP)
            mlp_in = x if reads_own else own.read("mlp_in", start, stop).to(device).float()
            yield RowBlock(x, active, weights.contribution(mlp_in) * active, mlp_in)

    return run


@torch.no_grad()
def fit_second_stage(
    weights: Any, blocks: Iterator[RowBlock], retained_mass: float
) -> tuple[SecondStage, dict[str, Tensor]]:
    """The second stage of a layer that lets ``retained_mass`` of the contribution through, and what a bundle stores of
    it.

    A layer has one threshold, on pre-activation x norm of the column of ``down``. The pre-activation is that of the
    test's own four bits, so that their error is allowed for.

    Args:
        weights: ``RecordedWeights`` of a layer without a gate.
    """
    scale, steps = choose_grid(weights.up_weight)
    norms = weights.down_norm
    second_stage = build_second_stage(weights.up_weight, weights.up_bias, scale, steps, norms)
    histogram = LogitHistogram()
    for part in blocks:
        assert part.mlp_in is not None, "only neurons are tested twice"
        histogram.add(second_stage.scores(part.mlp_in) * norms, part.active, part.contribution)
    curve = histogram.curve(MLP_GRID)
    stage2_threshold = read_curve(curve, density_for_mass(curve, retained_mass))["threshold"]
    stage2_thresholds = (stage2_threshold / norms.clamp_min(1e-20)).clamp(-STAGE2_LIMIT, STAGE2_LIMIT)
    stored = {"fc1_scale": scale, "fc1_steps": steps, "stage2_threshold": stage2_thresholds}
    return SecondStage(second_stage.planes, second_stage.bias, stage2_thresholds), {
        name: tensor.cpu() for name, tensor in stored.items()
    }


@torch.no_grad()
def score_predictor(
    predictor: nn.Module,
    target: Target,
    blocks: Iterator[RowBlock],
    keep_logits: bool = False,
    second_stage: SecondStage | None = None,
) -> PredictorScore:
    """Curve and true density of one predictor, with ``second_stage`` those of a cascade, over the density of its
    candidates."""
    counts = _Counts()
    frequency: Tensor | float = 0.0
    rows = 0
    kept: list[Tensor] = []
    contributions: list[Tensor] = []
    for part in blocks:
        logits = predictor(part.inputs)
        if not bool(torch.isfinite(logits.sum())):
            raise UserError("the predictor's logits are not finite; train it again, with a lower learning rate")
        rows += len(logits)
        frequency = frequency + (part.contribution if target == Target.HEADS else part.active).double().sum(0)
        if target == Target.HEADS:
            contributions.append(part.contribution.cpu())
        else:
            counts.add(logits, part, second_stage)
        if target == Target.HEADS or (keep_logits and rows <= 8 * BLOCK_ROWS):
            kept.append(logits.half().cpu() if target == Target.MLP else logits.cpu())
    if rows == 0:
        raise UserError("the calibration set has no rows; collect more documents")
    all_logits = torch.cat(kept) if kept else torch.empty(0, dtype=torch.float32)
    frequency = torch.as_tensor(frequency) / rows
    if target == Target.HEADS:
        return PredictorScore(head_curve(all_logits, torch.cat(contributions), HEAD_GRID), None, frequency, all_logits)
    active = float(frequency.mean())
    return PredictorScore(
        counts.curve() if second_stage is None else counts.two_stage_curve(active), active, frequency, all_logits
    )


class _Counts:
    """Tallies of neurons: of what a selection finds, and with a second stage of what passes it."""

    def __init__(self) -> None:
        self.found, self.passed = LogitHistogram(), LogitHistogram()
        self.active, self.mass = 0.0, 0.0

    def add(self, logits: Tensor, part: RowBlock, second_stage: SecondStage | None) -> None:
        wanted = part.active
        if second_stage is not None:
            assert part.mlp_in is not None
            passed = second_stage.passed(part.mlp_in)
            self.passed.add(logits, passed, passed.float())
            self.active += float(wanted.sum())
            self.mass += float(part.contribution.sum(dtype=torch.float64))
            wanted = wanted & passed
        self.found.add(logits, wanted, part.contribution)

    def curve(self) -> dict[str, list[float]]:
        return self.found.curve(MLP_GRID)

    def two_stage_curve(self, active_density: float) -> dict[str, list[float]]:
        """Shares of all that is active and of its contribution, not of what passes. ``selected`` is what passes."""
        curve = self.found.curve(MLP_GRID)
        recall, mass = float(self.found.active.sum()) / max(self.active, 1.0), float(self.found.mass.sum()) / self.mass
        share = float(self.passed.active.sum() / self.passed.all.sum())
        curve["recall"] = [recall * value for value in curve["recall"]]
        curve["retained_mass"] = [mass * value for value in curve["retained_mass"]]
        curve["selected"] = [share * value for value in self.passed.curve(MLP_GRID)["recall"]]
        pairs = zip(curve["recall"], curve["selected"], strict=True)
        curve["precision"] = [min(1.0, hit * active_density / max(selected, 1e-12)) for hit, selected in pairs]
        return curve
