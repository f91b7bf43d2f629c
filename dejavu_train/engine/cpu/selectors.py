"""Reads a bundle, writes the arrays of its selection rules for the CPU engine. predictors stay as they are stored."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu_train.engine.cpu.arrays import FLOAT16, FLOAT32, HEADS, INT4, INT8, MLP, MLP_UP, Selectors, padded
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.engine.facts import PredictorFacts, check_calibrated, expected_union, facts_of
from dejavu_train.families import Site, Target, UnitKey
from dejavu_train.predictors.bit_planes import BitPlanes
from dejavu_train.predictors.quantization import pack_nibbles

COLUMNS = {Target.HEADS: HEADS, Target.MLP: MLP}
KINDS = {"float32": FLOAT32, "bfloat16": FLOAT32, "float16": FLOAT16, "int8": INT8, "int4": INT4}
ARRAYS = ("float32", "float16", "int8", "int4")
DTYPES = {"float32": np.float32, "float16": np.uint16, "int8": np.int8, "int4": np.uint8}


@dataclasses.dataclass(frozen=True)
class CpuPredictor:
    """One predictor: down (rank, d) and up (n, rank), fp32, or int8 codes with a scale for each row. bias (n).

    Attributes:
        stored: float32, float16, int8 or int4: how ``Selectors`` keeps the two matrices. int4 codes lie in -8..7.
        site: what it reads. threshold, top_k: what it selects, one of the two.
        density: the share of units that a row selects.
    """

    layer: int
    target: Target
    site: Site
    stored: str
    down: Tensor
    up: Tensor
    bias: Tensor
    down_scale: Tensor | None = None
    up_scale: Tensor | None = None
    relu: bool = False
    threshold: float | None = None
    top_k: int | None = None
    density: float = 1.0


@dataclasses.dataclass(frozen=True)
class Rules:
    """A bundle as engines with the same weights read it: the arrays of compiled code, and what a plan needs.

    Attributes:
        facts: by (layer, target), of an engine of so many rows. See `facts_of`.
    """

    selectors: Selectors
    facts: Callable[[int], Mapping[UnitKey, PredictorFacts | None]]


def read_predictors(bundle: Any) -> list[CpuPredictor]:
    """The predictors of a bundle's sparse entries, in order of layers.

    Raises:
        UserError: thresholds that were never calibrated.
        Unsupported: a predictor that is no low-rank one.
    """
    check_calibrated(bundle, "the CPU engine")
    found = []
    for (layer, target), entry in sorted(bundle.specs.items()):
        if entry.dense:
            continue
        module = bundle.predictor(layer, target)
        bias = (
            torch.zeros(module.up.shape[0], dtype=torch.float32)
            if module.bias is None
            else module.bias.detach().float()
        )
        parts: dict[str, Tensor] = {"down": module.down.detach().float(), "up": module.up.detach().float()}
        if entry.dtype in ("int8", "int4"):
            for part in ("down", "up"):
                parts[part], parts[f"{part}_scale"] = bundle.codes(layer, target, part)
        found.append(
            CpuPredictor(
                layer, target, entry.reads, entry.dtype, bias=bias, relu=module.nonlinearity == "relu",
                threshold=entry.threshold, top_k=entry.top_k, density=entry.density, **parts,
            )
        )  # fmt: skip
    return found


def read_rules(weights: CpuWeights, bundle: Any, up: Any = None) -> Rules:
    """The rules of a bundle, of a list of predictors, or of none. See `make_selectors` for ``up``."""
    if bundle is None or isinstance(bundle, list):
        predictors: list[CpuPredictor] = bundle or []
        alone = {
            UnitKey(p.layer, p.target): PredictorFacts(
                p.site, len(p.down), p.stored, p.stored, p.top_k, density=p.density
            )
            for p in predictors
        }
        return Rules(make_selectors(weights, predictors), partial(_facts_of_rows, alone))
    selectors = make_selectors(weights, read_predictors(bundle), bundle.head_means(), bundle.cascades(), up)
    return Rules(selectors, partial(facts_of, bundle, frozenset(bundle.specs), "float32"))


def _facts_of_rows(alone: Mapping[UnitKey, PredictorFacts], rows: int) -> dict[UnitKey, PredictorFacts]:
    return {key: dataclasses.replace(each, union=expected_union(each.density, rows)) for key, each in alone.items()}


class _Flat:
    """Grows one flat array for each kind. ``add`` returns where an addition starts."""

    def __init__(self) -> None:
        self.parts: dict[str, list[np.ndarray]] = {name: [] for name in (*ARRAYS, "scale", "bias")}
        self.sizes = dict.fromkeys(self.parts, 0)

    def add(self, name: str, array: np.ndarray) -> int:
        start = self.sizes[name]
        self.parts[name].append(array.ravel())
        self.sizes[name] += array.size
        return start

    def arrays(self) -> dict[str, np.ndarray]:
        result = {}
        for name, parts in self.parts.items():
            dtype = DTYPES.get(name, np.float32)
            result[name] = np.concatenate(parts).astype(dtype) if parts else np.zeros(1, dtype)
        return result


def _stored(weight: Tensor, kind: int) -> np.ndarray:
    if kind == FLOAT16:
        return weight.half().numpy().view(np.uint16)
    if kind == INT4:
        return pack_nibbles(weight).numpy()
    return weight.numpy()


def _spec(predictor: CpuPredictor, flat: _Flat) -> list[int]:
    kind = KINDS[predictor.stored]
    n, rank = predictor.up.shape
    # up is transposed, so that the sums of many units run side by side.
    matrices = _stored(predictor.down, kind), _stored(predictor.up, kind).T
    offsets = [flat.add(ARRAYS[kind], matrix) for matrix in matrices]
    for scale, rows in ((predictor.down_scale, rank), (predictor.up_scale, n)):
        offsets.append(flat.add("scale", np.ones(rows, np.float32) if scale is None else scale.float().numpy()))
    offsets.append(flat.add("bias", predictor.bias.numpy()))
    return [kind, rank, n, int(predictor.relu), predictor.top_k or 0, *offsets]


def make_selectors(
    weights: CpuWeights,
    predictors: list[CpuPredictor],
    means: dict[int, Tensor] | None = None,
    cascades: dict[int, tuple[Tensor, Tensor, Tensor]] | None = None,
    up: Any = None,
) -> Selectors:
    """The arrays for these predictors. None = a dense engine.

    Args:
        means: by layer (h, e) fp32, what stands in for skipped heads.
        cascades: by layer (scale, steps, stage-2 threshold), each (f,).
        up: ``up(layer)`` gives the layer's up (f, d) as the model has it, for the planes of cascades.
    """
    shape = weights.shape
    n_layers, h, e, f, d = shape.n_layers, shape.n_heads, shape.head_dim, shape.d_ffn, shape.d_model
    flat = _Flat()
    at = np.full((n_layers, 2), -1, np.int64)
    readers: list[list[int]] = [[] for _ in range(2 * n_layers)]
    spec = np.zeros((len(predictors), 10), np.int64)
    for number, predictor in enumerate(predictors):
        spec[number] = _spec(predictor, flat)
        at[predictor.layer, COLUMNS[predictor.target]] = number
        readers[predictor.site.half].append(number)
    kept = np.full(n_layers, -1, np.int64)
    sparse_heads = np.flatnonzero(at[:, HEADS] >= 0)
    kept[sparse_heads] = np.arange(len(sparse_heads))
    all_means, out_bias = np.zeros((n_layers, h, e), np.float32), weights.out_bias.copy()
    for layer, mean in (means or {}).items():
        if kept[layer] >= 0:
            all_means[layer] = mean.view(h, e).numpy()
            out_bias[layer] += (mean.flatten() @ weights.out_projection(layer)).numpy()
    fine = np.full(n_layers, -1, np.int64)
    tested = sorted(layer for layer in cascades or {} if at[layer, MLP] >= 0)
    fine[tested] = np.arange(len(tested))
    columns, n_tested = padded(d), max(1, len(tested) * f)
    upper = np.zeros((n_tested, columns // 2 if tested else 1), np.uint8)
    whole = np.zeros((n_tested, columns if tested else 1), np.int16)
    whole_scale, grid = np.zeros((n_tested, 1), np.float32), np.zeros((n_tested, 2), np.float32)
    for number, layer in enumerate(tested):
        assert cascades is not None
        scale, steps, threshold = cascades[layer]
        rows = slice(number * f, (number + 1) * f)
        weight = weights.part(layer, MLP_UP) if up is None else up(layer)
        planes = BitPlanes.of(weight.detach().float().cpu(), scale, steps)
        codes = torch.nn.functional.pad(planes.codes().to(torch.int8), (0, columns - d))
        upper[rows] = pack_nibbles(codes).numpy()
        whole[rows, :d] = (planes.weight() / planes.scale[:, None]).round().numpy()
        whole_scale[rows, 0] = planes.scale.numpy()
        grid[rows] = torch.stack([planes.step, threshold.cpu().float()], dim=1).numpy()
    return Selectors(
        at=at,
        sites=np.cumsum([0, *map(len, readers)]).astype(np.int64),
        readers=np.array([number for each in readers for number in each], np.int64).reshape(-1),
        spec=spec,
        threshold=np.array([predictor.threshold or 0.0 for predictor in predictors], np.float32),
        **flat.arrays(),
        out_bias=out_bias,
        means=all_means,
        kept=kept,
        fine=fine,
        upper=upper,
        whole=whole,
        whole_scale=whole_scale,
        grid=grid,
    )
