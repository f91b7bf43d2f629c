"""One entry of a bundle: what a predictor selects, what it reads, how it is stored, and what must be there of it."""

import dataclasses
import math
from typing import Any

import torch

from dejavu_train.allocate import read_curve
from dejavu_train.errors import UserError
from dejavu_train.opt_model import DTYPES, OPTShape
from dejavu_train.quantise import SCALED

TARGETS = ("mlp", "heads")
SITES = ("attn_in", "mlp_in")
KINDS = ("low_rank", "cascade")
PREDICTOR_DTYPES = (*DTYPES, *SCALED)
CURVE_COLUMNS = ("density", "threshold", "recall", "precision", "retained_mass")

Key = tuple[int, str]
Curve = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One predictor: what it selects, what it reads, from which logit on, and how good that was on ``calibrate``.

    ``threshold`` and ``top_k`` exclude each other; with neither the layer is dense. ``curve`` holds equally long lists
    ``density`` (rising), ``threshold`` (falling), ``recall``, ``precision``, ``retained_mass`` and perhaps
    ``loss_increase``; it may be empty, then ``Bundle.at`` cannot move the threshold. ``replacement`` says what stands
    in for a skipped head: nothing (``none``) or the mean of its output (``mean``).

    A ``cascade`` (MLP only) is a low-rank predictor whose selection, the candidates, is tested once more on the upper
    plane of fc1 (see ``planes``); what passes is selected. Its density is that of the candidates, ``passes`` the share
    of the contribution that the second test lets through, and its curve has a column ``selected``.
    """

    layer: int
    target: str
    site: str
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
    passes: float | None = None
    density: float = 1.0
    recall: float = 1.0
    precision: float | None = None
    retained_mass: float = 1.0
    active_density: float | None = None
    curve: Curve = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.layer, self.target

    @property
    def dense(self) -> bool:
        return self.threshold is None and self.top_k is None

    def at(self, density: float, top_k: bool = False) -> "Entry":
        """The same predictor with the threshold (or the k) that selects ``density``, read from the curve.

        Raises:
            UserError: the entry has no curve, or the density lies outside (0, 1].
        """
        if not 0 < density <= 1:
            raise UserError(f"a density lies above 0 and at most at 1, got {density} for {self.target} {self.layer}")
        if density == 1 or self.keep_dense:
            read: dict[str, Any] = {"density": 1.0, "recall": 1.0, "retained_mass": 1.0}
            return dataclasses.replace(self, threshold=None, top_k=None, precision=self.active_density, **read)
        if not self.curve:
            raise UserError(f"{self.target} of layer {self.layer} has no calibration curve; calibrate the bundle again")
        row = read_curve(self.curve, density)
        read = {column: row[column] for column in CURVE_COLUMNS}
        if top_k:
            read |= {"threshold": None, "top_k": max(1, round(density * self.n_out))}
        else:
            read |= {"top_k": None}
        return dataclasses.replace(self, **read)


def tensor_name(layer: int, target: str, part: str) -> str:
    """Name of a tensor in ``predictors.safetensors``; ``part`` as in ``Bundle``."""
    return f"layers.{layer}.{target}.{part}"


def check_entry(entry: Entry, shape: OPTShape, where: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The tensors that an entry needs: name -> (shape, dtype)."""
    part = f"{where}: {entry.target} of layer {entry.layer}"
    if not 0 <= entry.layer < shape.n_layers:
        raise UserError(f"{part}: the model has layers 0 to {shape.n_layers - 1}")
    if entry.kind not in KINDS:
        raise UserError(f"{part} is of kind {entry.kind}; this version knows {', '.join(KINDS)}")
    if (entry.kind == "cascade") != (entry.passes is not None) or (entry.kind == "cascade" and entry.target != "mlp"):
        raise UserError(
            f"{part} is of kind {entry.kind} with passes {entry.passes}; a cascade selects neurons, with one"
        )
    if entry.dtype not in PREDICTOR_DTYPES or entry.nonlinearity not in ("none", "relu"):
        raise UserError(f"{part} has an unknown dtype {entry.dtype} or nonlinearity {entry.nonlinearity}")
    earlier = (entry.site_layer, SITES.index(entry.site)) if entry.site in SITES else None
    own = (entry.layer, 1 if entry.target == "mlp" else 0)
    if earlier is None or not (0, 0) <= earlier <= own:
        raise UserError(f"{part} reads {entry.site} of layer {entry.site_layer}, which is no site before its target")
    if entry.replacement not in (("none", "mean") if entry.target == "heads" else ("none",)):
        raise UserError(f"{part} has an unknown replacement {entry.replacement} of what is skipped")
    if entry.d_in != shape.d_model or entry.n_out != shape.units(entry.target):
        need = f"{shape.d_model} -> {shape.units(entry.target)}"
        raise UserError(f"{part} maps {entry.d_in} -> {entry.n_out}, the model needs {need}")
    if entry.threshold is not None and (entry.top_k is not None or not math.isfinite(entry.threshold)):
        raise UserError(f"{part} needs one finite threshold or one top_k, got {entry.threshold} and {entry.top_k}")
    if entry.top_k is not None and not 1 <= entry.top_k <= entry.n_out:
        raise UserError(f"{part}: top_k must lie in 1..{entry.n_out}, got {entry.top_k}")
    if entry.curve:
        lengths = {len(entry.curve.get(column, [])) for column in CURVE_COLUMNS} | {
            len(values) for values in entry.curve.values()
        }
        grid = entry.curve.get("density", [])
        if entry.kind == "cascade" and "selected" not in entry.curve:
            raise UserError(f"{part}: the calibration curve of a cascade has no column selected")
        if len(lengths) != 1 or len(grid) < 2 or any(a >= b for a, b in zip(grid, grid[1:], strict=False)):
            raise UserError(f"{part}: the calibration curve is not one (rising densities, equally long columns)")
    packed = entry.dtype == "int4"
    dtype = DTYPES.get(entry.dtype, torch.uint8 if packed else torch.int8)
    needed: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "down": ((entry.rank, (entry.d_in + 1) // 2 if packed else entry.d_in), dtype),
        "up": ((entry.n_out, (entry.rank + 1) // 2 if packed else entry.rank), dtype),
        "frequency": ((entry.n_out,), torch.float32),
    }
    if entry.dtype in SCALED:
        scale = torch.float16 if packed else torch.float32
        needed |= {"down_scale": ((entry.rank,), scale), "up_scale": ((entry.n_out,), scale)}
    if entry.bias:
        needed["bias"] = ((entry.n_out,), torch.float16 if entry.dtype in SCALED else dtype)
    if entry.kind == "cascade":
        grid_dtypes = {"fc1_scale": torch.float32, "fc1_steps": torch.int16, "bar": torch.float32}
        needed |= {name: ((entry.n_out,), dtype) for name, dtype in grid_dtypes.items()}
    if entry.replacement == "mean":
        needed["mean"] = ((shape.n_heads, shape.head_dim), torch.float16)
    return {tensor_name(entry.layer, entry.target, part): value for part, value in needed.items()}
