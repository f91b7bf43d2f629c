"""One spec of a bundle: what a predictor selects, what it reads, how it is stored, and what must be there of it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from dejavu_train.bundle.allocation import read_curve
from dejavu_train.families import LayerInput, ModelDims, Site, Target, UnitKey
from dejavu_train.families.dims import listed
from dejavu_train.ground.errors import Unsupported, UserError
from dejavu_train.models.load import DTYPES
from dejavu_train.predictors.custom import described_dtype
from dejavu_train.predictors.quantization import SCALED

KINDS = ("low_rank", "cascade", "custom")
PREDICTOR_DTYPES = (*DTYPES, *SCALED)
GOOD_MASS = 0.95  # of the contribution of all units: where a selection keeps less, a text suffers
CURVE_COLUMNS = ("density", "threshold", "recall", "precision", "retained_mass")

Curve = dict[str, list[float]]
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype by a tensor's name


@dataclasses.dataclass(frozen=True)
class PredictorSpec:
    """One predictor: what it selects, what it reads, from which logit on, and how good that was on ``calibration``.

    ``threshold`` and ``top_k`` exclude each other, with neither the layer is dense. ``curve`` holds equally long lists
    ``density`` (rising), ``threshold`` (falling), ``recall``, ``precision``, ``retained_mass`` and perhaps
    ``loss_increase``. It may be empty, then ``Bundle.at`` cannot move the threshold. ``replacement`` says what stands
    in for a skipped head: nothing (``none``) or the mean of its output (``mean``).

    A ``cascade`` (MLP only) is a low-rank predictor whose selection is tested once more on the upper plane of ``up``,
    see ``bit_planes``. What it selects are the candidates, and what passes is selected. Its density is the candidates',
    ``stage2_retained_mass`` the share of the contribution that the second stage lets through, and its curve has a
    column ``selected``.

    A ``custom`` predictor is a module of the class ``class_path``, built with ``init_args``. ``tensors`` describes its
    ``state_dict``, by name ``[dtype, *shape]``. rank, nonlinearity and bias say nothing about it."""

    layer: int
    target: Target
    site: LayerInput
    site_layer: int
    rank: int
    d_in: int
    n_out: int
    kind: str = "low_rank"
    nonlinearity: str = "none"
    bias: bool = True
    dtype: str = "float16"
    threshold: float | None = None
    top_k: int | None = None
    keep_dense: bool = False
    replacement: str = "none"
    stage2_retained_mass: float | None = None
    density: float = 1.0
    recall: float = 1.0
    precision: float | None = None
    retained_mass: float = 1.0
    active_density: float | None = None
    curve: Curve = dataclasses.field(default_factory=dict)
    class_path: str | None = None
    init_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    tensors: dict[str, list[Any]] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> UnitKey:
        return UnitKey(self.layer, self.target)

    @property
    def reads(self) -> Site:
        return Site(self.site_layer, LayerInput(self.site))  # a file holds its text

    @property
    def dense(self) -> bool:
        return self.threshold is None and self.top_k is None

    def at(self, density: float, top_k: bool = False) -> "PredictorSpec":
        """The same predictor with the threshold (or the k) that selects ``density``, read from the curve.

        Raises:
            UserError: the spec has no curve, or the density lies outside (0, 1].
        """
        if not 0 < density <= 1:
            raise UserError(f"a density lies above 0 and at most at 1, got {density} for {self.target} {self.layer}")
        if density == 1 or self.keep_dense:
            read: dict[str, Any] = {"density": 1.0, "recall": 1.0, "retained_mass": 1.0}
            return dataclasses.replace(self, threshold=None, top_k=None, precision=self.active_density, **read)
        if not self.curve:
            raise UserError(f"{self.target} of layer {self.layer} has no calibration curve; calibrate the bundle again")
        k = max(1, round(density * self.n_out)) if top_k else None
        row = read_curve(self.curve, density if k is None else k / self.n_out)
        read = {column: row[column] for column in CURVE_COLUMNS} | {"top_k": k}
        if k is not None:
            read["threshold"] = None
        return dataclasses.replace(self, **read)


_SHARE = ((int, float), 0.0, 1.0)
_NUMBERS: tuple[tuple[str, Any, float, float], ...] = (
    *((name, int, 0, 1e6) for name in ("layer", "site_layer", "rank")),
    *((name, int, 1, 1e9) for name in ("d_in", "n_out", "top_k")),
    *((name, *_SHARE) for name in ("density", "recall", "precision", "retained_mass", "active_density")),
    ("stage2_retained_mass", *_SHARE),
    ("threshold", (int, float), -math.inf, math.inf),
)
CASCADE_PARTS = {"fc1_scale": torch.float32, "fc1_steps": torch.int16, "stage2_threshold": torch.float32}  # of a layer
_OPEN = ("top_k", "precision", "active_density", "stage2_retained_mass", "threshold")


def tensor_name(layer: int, target: Target, part: str) -> str:
    """Name of a tensor in ``predictors.safetensors``. ``part`` as in ``Bundle``."""
    return f"layers.{layer}.{target}.{part}"


def predictor_layout(spec: PredictorSpec) -> Layout:
    """The tensors of the predictor alone, without what else belongs to a spec, by the last part of their names.

    Raises:
        UserError: tensors of a custom predictor that are not described as they should be.
    """
    if spec.kind == "custom":
        return _custom_tensors(spec)
    packed = spec.dtype == "int4"
    dtype = DTYPES.get(spec.dtype, torch.uint8 if packed else torch.int8)
    needed: Layout = {
        "down": ((spec.rank, (spec.d_in + 1) // 2 if packed else spec.d_in), dtype),
        "up": ((spec.n_out, (spec.rank + 1) // 2 if packed else spec.rank), dtype),
    }
    if spec.dtype in SCALED:
        scale = torch.float16 if packed else torch.float32
        needed |= {"down_scale": ((spec.rank,), scale), "up_scale": ((spec.n_out,), scale)}
    if spec.bias:
        needed["bias"] = ((spec.n_out,), torch.float16 if spec.dtype in SCALED else dtype)
    return needed


def _custom_tensors(spec: PredictorSpec) -> Layout:
    part = f"the {spec.target} predictor of layer {spec.layer}"
    try:
        return {name: (tuple(shape), described_dtype(dtype)) for name, (dtype, *shape) in spec.tensors.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{part}: its tensors are not described as [dtype, *shape] ({error})") from None


def check_spec(spec: PredictorSpec, shape: ModelDims, where: str) -> Layout:
    """The tensors that a spec needs: name -> (shape, dtype)."""
    part = f"{where}: {spec.target} of layer {spec.layer}"
    for name, kinds, least, most in _NUMBERS:
        value = getattr(spec, name)
        if value is None and name in _OPEN:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            raise UserError(f"{part}: {name} must be a number from {least:g} to {most:g}, got {value!r}")
    lists = spec.curve.values() if isinstance(spec.curve, dict) else [None]
    if not all(isinstance(values, list) for values in lists):
        raise UserError(f"{part}: the calibration curve must hold a list for each column")
    if not isinstance(spec.bias, bool) or not isinstance(spec.keep_dense, bool):
        raise UserError(f"{part}: bias and keep_dense must be true or false")
    if spec.layer not in shape.layers_of(spec.target):
        raise UserError(f"{part}: the model has {spec.target} in layers {listed(shape.layers_of(spec.target))}")
    if spec.kind not in KINDS:
        raise UserError(f"{part} is of kind {spec.kind}; this version knows {', '.join(KINDS)}")
    if (spec.kind == "custom") != (spec.class_path is not None):
        raise UserError(
            f"{part} is of kind {spec.kind} with class_path {spec.class_path}; only a custom one has a class"
        )
    if (spec.kind == "custom") != (spec.rank == 0):
        raise UserError(f"{part} is of kind {spec.kind} with rank {spec.rank}; a custom one has rank 0, no other has")
    if spec.kind == "custom" and spec.dtype in SCALED:
        raise UserError(f"{part} is stored in {spec.dtype}, which is for low-rank predictors")
    if (spec.kind == "cascade") != (spec.stage2_retained_mass is not None) or (
        spec.kind == "cascade" and spec.target != Target.MLP
    ):
        raise UserError(
            f"{part} is of kind {spec.kind} with stage2_retained_mass {spec.stage2_retained_mass}; a cascade selects"
            " neurons and has one, nothing else does"
        )
    if spec.kind == "cascade" and shape.gated:
        raise UserError(f"{part} is a cascade, which tests a neuron by its one map, and the model's MLP is gated")
    known = ", ".join((*PREDICTOR_DTYPES, "none", "relu"))
    if spec.dtype not in PREDICTOR_DTYPES or spec.nonlinearity not in ("none", "relu"):
        raise UserError(
            f"{part} has an unknown dtype {spec.dtype} or nonlinearity {spec.nonlinearity}, known are {known}"
        )
    if spec.site not in tuple(LayerInput) or spec.reads > spec.key.site or spec.reads not in shape.sites:
        raise UserError(f"{part} reads {spec.site} of layer {spec.site_layer}, which is no site before its target")
    if spec.replacement not in (("none", "mean") if spec.target == Target.HEADS else ("none",)):
        raise UserError(f"{part} has an unknown replacement {spec.replacement}, known are none, and mean for heads")
    if spec.d_in != shape.d_model or spec.n_out != shape.units(spec.target):
        need = f"{shape.d_model} -> {shape.units(spec.target)}"
        raise UserError(f"{part} maps {spec.d_in} -> {spec.n_out}, the model needs {need}")
    if spec.threshold is not None and (spec.top_k is not None or not math.isfinite(spec.threshold)):
        raise UserError(f"{part} needs one finite threshold or one top_k, got {spec.threshold} and {spec.top_k}")
    if spec.top_k is not None and not 1 <= spec.top_k <= spec.n_out:
        raise UserError(f"{part}: top_k must lie in 1..{spec.n_out}, got {spec.top_k}")
    if spec.curve:
        numbers = [value for values in spec.curve.values() for value in values]
        if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in numbers):
            raise UserError(f"{part}: the calibration curve holds a value that is not a finite number")
        lengths = {len(spec.curve.get(column, [])) for column in CURVE_COLUMNS} | {
            len(values) for values in spec.curve.values()
        }
        grid = spec.curve.get("density", [])
        if spec.kind == "cascade" and "selected" not in spec.curve:
            raise UserError(f"{part}: the calibration curve of a cascade has no column selected")
        if len(lengths) != 1 or len(grid) < 2 or any(a >= b for a, b in zip(grid, grid[1:], strict=False)):
            raise UserError(f"{part}: the calibration curve is not one (rising densities, equally long columns)")
        thresholds = spec.curve["threshold"]
        if any(a < b for a, b in zip(thresholds, thresholds[1:], strict=False)) or not 0 < grid[0] <= grid[-1] <= 1:
            raise UserError(f"{part}: the calibration curve needs falling thresholds and densities above 0, at most 1")
    needed = predictor_layout(spec)
    needed["frequency"] = ((spec.n_out,), torch.float32)
    if spec.kind == "cascade":
        needed |= {name: ((spec.n_out,), dtype) for name, dtype in CASCADE_PARTS.items()}
    if spec.replacement == "mean":
        needed["mean"] = ((shape.n_kv_heads, shape.group_dim), torch.float16)
    return {tensor_name(spec.layer, spec.target, part): value for part, value in needed.items()}


def check_low_rank(specs: Mapping[UnitKey, PredictorSpec], what: str) -> None:
    """Raise :class:`Unsupported` in the name of ``what``, an engine, for a sparse layer with a custom predictor."""
    for (layer, target), spec in specs.items():
        if spec.kind == "custom" and not spec.dense:
            name = f"the {target} predictor of layer {layer} is a {spec.class_path}"
            raise Unsupported(f"{what} runs low-rank predictors, and {name}")
