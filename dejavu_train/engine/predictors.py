"""Reads a bundle's predictors, writes them as the decode engine's kernels read them."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu_train.engine.facts import PredictorFacts, check_calibrated, expected_union, folds
from dejavu_train.families import Site, Target, UnitKey
from dejavu_train.kernels.stages.predictor import PredictorWeights
from dejavu_train.models.load import DTYPES
from dejavu_train.predictors.quantization import pack_nibbles


@dataclass(frozen=True)
class TargetPredictor:
    """The predictor of one (layer, target) on the device. threshold (1) fp32. folded (h, d) = up @ down and mean
    (h, head_dim) fp32, what stands in for a skipped head, heads only. density: what one row selects on average.
    frequency (n) fp32 on the CPU, how often each unit is needed, or None. second_stage: the bundle has
    one. ahead: reads mlp_in of the layer before, as folded then does."""

    layer: int
    target: Target
    site: Site
    weights: PredictorWeights
    threshold: Tensor
    top_k: int | None
    folded: Tensor | None
    bias: Tensor
    density: float
    mean: Tensor | None = None
    frequency: Tensor | None = None
    second_stage: bool = False
    stored: str = ""

    def facts(self, rows: int) -> PredictorFacts:
        """For an engine of so many rows."""
        name = str(self.weights.up.dtype).removeprefix("torch.")
        return PredictorFacts(
            self.site, len(self.weights.down), "int4" if name == "uint8" else name, self.stored,
            self.top_k, self.folded is not None, self.density, expected_union(self.density, rows, self.frequency),
            self.second_stage,
        )  # fmt: skip


def load_predictors(
    bundle: Any, dtype: torch.dtype, device: torch.device | str, codes: Collection[UnitKey] = ()
) -> dict[UnitKey, TargetPredictor | None]:
    """The predictors of a bundle by (layer, target). None = left dense.

    Args:
        dtype: of the model. Predictors are kept in it.
        codes: of those that stay codes with row scales, int4 two a byte, see `plan.read_as_codes`.
    Raises:
        UserError: thresholds that were never calibrated.
    """
    check_calibrated(bundle)
    predictors: dict[UnitKey, TargetPredictor | None] = {}
    means = bundle.head_means(device)
    tested = bundle.cascades()
    for (layer, target), spec in bundle.specs.items():
        if spec.dense:
            predictors[UnitKey(layer, Target(target))] = None
            continue
        module = bundle.predictor(layer, target)
        down, up = module.down.detach().float(), module.up.detach().float()
        bias = torch.zeros(len(up), dtype=torch.float32) if module.bias is None else module.bias.detach().float()
        relu = spec.nonlinearity == "relu"
        folded = (up @ down).to(device=device, dtype=dtype) if folds(layer, target, spec) else None
        if spec.dtype in DTYPES or (layer, target) not in codes:
            weights = PredictorWeights(
                down.to(device=device, dtype=dtype), up.to(device=device, dtype=dtype), bias.to(device), relu=relu
            )
        else:
            (down, down_scale), (up, up_scale) = (bundle.codes(layer, target, part) for part in ("down", "up"))
            if spec.dtype == "int4":
                down, up = pack_nibbles(down), pack_nibbles(up)
            weights = PredictorWeights(
                down.to(device), up.to(device), bias.to(device), down_scale.to(device), up_scale.to(device), relu
            )
        predictors[UnitKey(layer, Target(target))] = TargetPredictor(
            layer,
            target,
            spec.reads,
            weights,
            torch.tensor([spec.threshold or 0.0], dtype=torch.float32, device=device),
            spec.top_k,
            folded,
            bias.to(device),
            spec.density,
            means.get(layer) if target == Target.HEADS else None,
            bundle.frequency(layer, target),
            target == Target.MLP and layer in tested,
            spec.dtype,
        )
    return predictors
