"""Facts of predictors that a plan needs, read from a bundle without loading them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu_train.bundle.spec import check_low_rank
from dejavu_train.families import Site, Target, UnitKey
from dejavu_train.ground.errors import UserError


@dataclass(frozen=True)
class PredictorFacts:
    """Facts of the predictor of one (layer, target) that a plan needs. No tensors.

    Attributes:
        site: layer and input that it reads. stored, format: in the bundle, and as the engine's kernels read it.
        folds: its two matrices can be one. density, union: the share of units that one row and all rows select.
        second_stage: the bundle has one. Engines for CPUs run it, others read its candidates whole.
    """

    site: Site
    rank: int
    format: str
    stored: str = ""
    top_k: int | None = None
    folds: bool = False
    density: float = 1.0
    union: float = 1.0
    second_stage: bool = False


def check_calibrated(bundle: Any, engine: str = "the decode engine") -> None:
    """Raise UserError for a predictor that is neither dense on purpose nor has a threshold, or is no low-rank one."""
    check_low_rank(bundle.specs, engine)
    for (layer, target), spec in bundle.specs.items():
        if spec.threshold is None and spec.top_k is None and not spec.keep_dense and not spec.curve:
            raise UserError(
                f"the {target} predictor of layer {layer} was never calibrated (no threshold and no curve);"
                " run python train.py with the --config and --output that trained it: it calibrates what is trained"
            )


def folds(layer: int, target: Target, spec: Any) -> bool:
    """Whether a predictor is one matrix of h rows: of heads, without a nonlinearity, of its layer's attn_in, or of
    mlp_in of the layer before. That is one stage instead of two, and fewer bytes wherever the rank exceeds h."""
    if target != Target.HEADS or spec.nonlinearity == "relu" or spec.top_k is not None:
        return False
    return spec.reads.half in (2 * layer, 2 * layer - 1)


def expected_union(density: float, batch: int, frequency: Tensor | None = None) -> float:
    """The share of units that `batch` rows of this density select together.

    Args:
        frequency: (n,) how often each unit is needed. None = all alike.

    >>> round(expected_union(0.1, 2), 4)
    0.19
    >>> expected_union(0.5, 32, torch.tensor([1.0, 0.0]))
    0.5
    """
    if batch == 1 or not 0 < density < 1:
        return density
    rates = torch.full((1,), density, dtype=torch.float32) if frequency is None else selected_rates(frequency, density)
    return float((1 - (1 - rates) ** batch).mean())


def selected_rates(frequency: Tensor, density: float) -> Tensor:
    """How often each unit is selected, (n,): min(1, c * frequency) with the factor c that gives the mean `density`."""
    frequency = frequency.float().clamp_min(0)
    low, high = 0.0, 1.0
    if not frequency.any() or float((frequency > 0).float().mean()) < density:
        return torch.full_like(frequency, density)
    while float((frequency * high).clamp_max(1).mean()) < density and high < 1e30:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        if float((frequency * middle).clamp_max(1).mean()) < density:
            low = middle
        else:
            high = middle
    return (frequency * high).clamp_max(1)


def facts_of(bundle: Any, codes: Collection[UnitKey], dtype: str, rows: int) -> dict[UnitKey, PredictorFacts | None]:
    """Facts of a bundle's predictors in an engine of so many rows, without loading them. None = left dense.

    Args:
        codes, dtype: as of `load_predictors`. An engine for CPUs reads codes of all.
    Raises:
        UserError: thresholds that were never calibrated.
    """
    check_calibrated(bundle)
    tested = bundle.cascades()
    found: dict[UnitKey, PredictorFacts | None] = {}
    for (layer, target), spec in bundle.specs.items():
        found[UnitKey(layer, Target(target))] = None
        if not spec.dense:
            union = expected_union(spec.density, rows, bundle.frequency(layer, target))
            found[UnitKey(layer, Target(target))] = PredictorFacts(
                spec.reads,
                spec.rank, spec.dtype if (layer, target) in codes else dtype, spec.dtype,
                spec.top_k, folds(layer, target, spec), spec.density, union, target == Target.MLP and layer in tested,
            )  # fmt: skip
    return found


def why_all(key: UnitKey, predictors: Mapping[UnitKey, PredictorFacts | None]) -> str:
    """Why half a layer without a predictor in use computes all units."""
    if key in predictors:
        return "its density here is 1, so its predictor is not used"
    return f"no predictor of its {'neurons' if key.target == Target.MLP else 'heads'}"
