"""Ways to run a model that evidence compares, each with the bytes of weights that a step of one row reads.

Static rows and thresholds get the bytes of the sparse model, whose predictors count. So only the choice differs.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import exact_mlp_bytes, spec_bytes
from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.evaluation.baselines import FixedSelections
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.families import ModelDims, Target, UnitKey, blocks_of, dims_of
from dejavu_train.families.dims import SILENT
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hooks import hooked, record
from dejavu_train.models.weight_format import WeightFormat, loaded_format
from dejavu_train.sparse.masked import masking

DENSE, EXACT, SPARSE, FOUR_BITS, BOTH = "dense", "exact skip", "sparse", "4 bits", "sparse, 4 bits"
STATIC, THRESHOLDS, SMALLER = "static", "thresholds", "smaller model"
POINTS = 1001  # of the distribution of a map's inputs


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model, the context in which its passes are the variant's, and the bytes of a step. 0: they are not asked."""

    model: Any
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    step: float = 0.0


def names(subject: Subject) -> list[str]:
    """Variants that a subject has. The first is the reference."""
    exact = [EXACT] if subject.dims.activation in SILENT else []
    sparse = [] if subject.bundle is None else [SPARSE, BOTH, STATIC, THRESHOLDS]
    return [DENSE, *exact, FOUR_BITS, *sparse, *([SMALLER] if subject.config.smaller else [])]


def build(subject: Subject, name: str) -> Variant:
    """A variant by its name. Raises UserError where the twin in 4 bits cannot be made, or takes no predictors."""
    if name == SMALLER:
        smaller = subject.smaller
        return Variant(smaller, step=step_bytes(smaller, dims_of(smaller.config), _calibration(subject)))
    model, bundle = subject.four_bits if name in (FOUR_BITS, BOTH) else subject.dense, subject.bundle
    whole = partial(step_bytes, model, subject.dims, _calibration(subject))
    if name == DENSE:
        return Variant(model, step=whole(live=1.0))
    if name in (EXACT, FOUR_BITS):
        return Variant(model, step=whole())
    assert bundle is not None, "a variant with predictors has a bundle"
    means, budget = bundle.head_means(model.device), whole(bundle=bundle)
    if name == THRESHOLDS:
        hooks, left = thresholds(
            model, _calibration(subject), budget - subject.dims.vocab_size * subject.dims.embedding_dim
        )
        return Variant(model, hooks, budget - left)
    selector: Any = FixedSelections(static_masks(bundle, loaded_format(model), model.device))
    if name != STATIC:
        selector = PredictorSelector(bundle, model.device, model)
    return Variant(model, lambda: masking(model, selector, means=means), budget)


def _calibration(subject: Subject) -> Tensor:
    """The first window of the first text."""
    return torch.tensor([next(iter(subject.texts.values())).windows[0]], device=subject.device)


@torch.no_grad()
def step_bytes(
    model: Any, dims: ModelDims, ids: Tensor, bundle: Bundle | None = None, live: float | None = None
) -> float:
    """Bytes of a step: layers, predictors, and an LM head of 8 bits, as the engines' screen of it.

    ``live``: share of neurons that are not zero. None: as on ``ids``.
    """
    if live is None:
        with record(model, {"activation"}) as got:
            model(ids)
        shares = [float((each["activation"] != 0).double().mean()) for each in got.values() if each]
        live = sum(shares) / len(shares)
    weights = loaded_format(model)
    unit = weights.unit_bytes(dims)
    whole = {Target.HEADS: unit.dense(dims, Target.HEADS), Target.MLP: exact_mlp_bytes(live, dims, unit)}
    read = dims.vocab_size * dims.embedding_dim + dims.other_weights * weights.bits / 8
    for key in dims.keys:
        spec = None if bundle is None else bundle.specs.get(key)
        read += whole[key.target] if spec is None or spec.dense else spec_bytes(spec, dims, weights)
    return read


def static_masks(bundle: Bundle, weights: WeightFormat, device: torch.device) -> dict[UnitKey, Tensor]:
    """Units that were needed most often in calibration, as many as the predictor and its selection take bytes."""
    dims, unit, made = bundle.shape, weights.unit_bytes(bundle.shape), {}
    gate = unit.up / 2 if dims.gated else unit.up
    for spec in bundle.specs.values():
        if not spec.dense:
            often, order = bundle.frequency(spec.layer, spec.target).double().sort(descending=True)
            each = torch.full_like(often, unit.head)
            if spec.target == Target.MLP:  # of a silent neuron what leads out is not read
                each = gate + often.clamp_max(1) * (unit.up - gate + unit.down)
            kept = order[each.cumsum(0) <= spec_bytes(spec, dims, weights)]
            made[spec.key] = torch.zeros(1, 1, len(order), dtype=torch.bool).index_fill_(-1, kept, True).to(device)
    return made


@torch.no_grad()
def thresholds(model: Any, ids: Tensor, budget: float) -> tuple[Callable[[], AbstractContextManager[Any]], float]:
    """Hooks by which each map of the layers sees zero for inputs near zero, and the bytes that they leave of a budget.

    As TEAL does it, with one share for all maps: a column whose input is zero is not read. Thresholds are quantiles on
    ``ids``.
    """
    points: dict[Any, Tensor] = {}

    def note(module: Any, given: tuple[Tensor, ...]) -> None:
        values = given[0].detach().abs().float().flatten().sort(descending=True).values
        points[module] = values[
            torch.linspace(0, len(values) - 1, POINTS, dtype=torch.float64, device=values.device).long()
        ]

    def cut(module: Any, given: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return (given[0] * (given[0].abs() >= bounds[module]), *given[1:])

    inner = [module for block in blocks_of(model) for module in block.whole.modules()]
    maps = [module for module in inner if getattr(getattr(module, "weight", None), "ndim", 0) == 2]
    with hooked(each.register_forward_pre_hook(note) for each in maps):
        model(ids)
    sizes = torch.tensor([[each.weight.numel() * each.weight.itemsize] for each in points], dtype=torch.float64)
    grid = torch.stack([each.cpu() for each in points.values()])
    read = (sizes * (grid > 0)).cumsum(1).sum(0) / POINTS  # at so many points, of which zeros cost nothing
    last = int((read <= budget).sum()) - 1
    if last < 0:
        raise UserError("the sparse model reads less than thresholds can leave")
    bounds = {each: float(values[last]) for each, values in points.items()}
    return lambda: hooked(each.register_forward_pre_hook(cut) for each in points), budget - float(read[last])
