"""Reads a bundle's predictors, writes them as the decode engine's kernels read them."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu_train.bundle.spec import check_low_rank
from dejavu_train.errors import UserError
from dejavu_train.families import Target
from dejavu_train.models.opt import DTYPES
from dejavu_train.predictors.quantization import pack_nibbles
from kernels.mlp import nibbles_batch
from kernels.mlp.predictor import PredictorWeights

Grid = tuple[Tensor, Tensor, Tensor]
Key = tuple[int, str]  # layer and target


@dataclass(frozen=True)
class TargetPredictor:
    """The predictor of one (layer, target) on the device. threshold (1) fp32; folded (h, d) = up @ down and mean
    (h, head_dim) fp32, what stands in for a skipped head, heads only. density: what one row selects on average;
    frequency (n) fp32 on the CPU, how often each unit is needed, or None. grid: of a cascade, see `Bundle.cascades`.
    ahead: reads mlp_in of the layer before, as folded then does."""

    layer: int
    target: Target
    site: str
    site_layer: int
    weights: PredictorWeights
    threshold: Tensor
    top_k: int | None
    folded: Tensor | None
    bias: Tensor
    density: float
    mean: Tensor | None = None
    frequency: Tensor | None = None
    grid: Grid | None = None

    @property
    def ahead(self) -> bool:
        return (self.site, self.site_layer) == ("mlp_in", self.layer - 1)

    @property
    def own_folded(self) -> Tensor | None:
        """folded, where the layer itself can run it."""
        return None if self.ahead else self.folded


def check_calibrated(bundle: Any) -> None:
    """Raise UserError for a predictor that is neither dense on purpose nor has a threshold, or is no low-rank one."""
    check_low_rank(bundle.specs, "the decode engine")
    for (layer, target), spec in bundle.specs.items():
        if spec.threshold is None and spec.top_k is None and not spec.keep_dense and not spec.curve:
            raise UserError(
                f"the {target} predictor of layer {layer} was never calibrated (no threshold and no curve);"
                " run python train.py with the --config and --output that trained it: it calibrates what is trained"
            )


def read_as_codes(bundle: Any, dtype: torch.dtype, rows: int) -> frozenset[Key]:
    """The (layer, target) of which an engine of so many rows reads codes: one row those of int8 and int4, two to eight
    in fp16 those of int4 whose widths their kernels take. All else is a product of numbers, which takes one dtype."""
    found = set()
    for key, spec in bundle.specs.items():
        nibbles = spec.dtype == "int4" and dtype == torch.float16
        if spec.dtype not in DTYPES and (rows == 1 or (nibbles and nibbles_batch.takes(rows, spec.rank, spec.d_in))):
            found.add(key)
    return frozenset(found)


def load_predictors(
    bundle: Any, dtype: torch.dtype, device: torch.device | str, codes: Collection[Key] = ()
) -> dict[tuple[int, str], TargetPredictor]:
    """The predictors of a bundle by (layer, target); dense specs are left out.

    A head predictor without a nonlinearity of its layer's attn_in, or of mlp_in of the layer before, is folded into one
    matrix of h rows: one stage instead of two, and fewer bytes wherever the rank exceeds h.

    Args:
        dtype: of the model; predictors are kept in it.
        codes: of those that stay codes with row scales, int4 two a byte, see :func:`read_as_codes`.
    Raises:
        UserError: thresholds that were never calibrated.
    """
    check_calibrated(bundle)
    predictors = {}
    means = bundle.head_means(device)
    grids = bundle.cascades()
    for (layer, target), spec in bundle.specs.items():
        if spec.threshold is None and spec.top_k is None:
            continue
        module = bundle.predictor(layer, target)
        down, up = module.down.detach().float(), module.up.detach().float()
        bias = torch.zeros(len(up), dtype=torch.float32) if module.bias is None else module.bias.detach().float()
        relu = module.nonlinearity == "relu"
        folded = None
        if target == "heads" and not relu and spec.top_k is None:
            if (spec.site, spec.site_layer) in (("attn_in", layer), ("mlp_in", layer - 1)):
                folded = (up @ down).to(device=device, dtype=dtype)
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
        predictors[layer, target] = TargetPredictor(
            layer,
            target,
            spec.site,
            spec.site_layer,
            weights,
            torch.tensor([spec.threshold or 0.0], dtype=torch.float32, device=device),
            spec.top_k,
            folded,
            bias.to(device),
            spec.density,
            means.get(layer) if target == "heads" else None,
            bundle.frequency(layer, target),
            grids.get(layer) if target == "mlp" else None,
        )
    return predictors
