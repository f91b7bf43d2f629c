"""Which layers of an engine run sparsely: chosen once, before capture, from measured crossovers by width and batch.

A sparse block reads what the rows of a batch select together. Rows that chose independently, unit i with rate p_i,
would together take the mean of 1 - (1 - p_i)^B; the rates follow how often each unit was needed on the calibration
text, scaled to the density of one row. Units that every row wants are counted once that way, and real rows agree more
than independent ones, so the estimate errs towards the dense form. A layer that runs densely computes everything: more
than its predictor would have kept, never less.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu_train.decode_weights import TargetPredictor
from kernels import launch

# Share of the heads from which our dense attention block beats the sparse one, with its predictor and with missing K/V
# to fill in, at batch 1 and context 256: benchmarks/results/sparse_attention.csv. Below 2048: not measured.
HEADS_DENSE_FROM = ((0, 0.3), (2048, 0.7), (4096, 0.85), (7168, 0.9), (9216, 0.93))


@dataclass(frozen=True)
class Form:
    """How one (layer, target) runs. density: of one row; union: expected of the whole batch."""

    layer: int
    target: str
    density: float
    union: float
    sparse: bool


def expected_union(density: float, batch: int, frequency: Tensor | None = None) -> float:
    """The share of units that `batch` rows of this density select together.

    Args:
        frequency: (n,) how often each unit is needed; None = all alike.

    >>> round(expected_union(0.1, 2), 4)
    0.19
    >>> expected_union(0.5, 32, torch.tensor([1.0, 0.0]))
    0.5
    """
    if batch == 1 or not 0 < density < 1:
        return density
    rates = torch.full((1,), density) if frequency is None else _scaled(frequency.float().clamp_min(0), density)
    return float((1 - (1 - rates) ** batch).mean())


def _scaled(frequency: Tensor, density: float) -> Tensor:
    """min(1, c * frequency) with the factor c that gives the mean `density`."""
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


def heads_pay(d: int, density: float, batch: int) -> bool:
    """Whether attention over selected heads beats all of them; between two widths, the narrower decides.

    Several rows are not trusted: every row brings its own missing positions, and at 8 rows they cost what the skipped
    heads saved from 20 % (d = 4096: 65 us against 66) or 31 % of the heads a row on (9216: 215 against 217).
    """
    return batch == 1 and density < [limit for width, limit in HEADS_DENSE_FROM if width <= d][-1]


def choose_forms(
    predictors: Mapping[tuple[int, str], TargetPredictor], d_model: int, batch: int, measured: bool = True
) -> dict[tuple[int, str], Form]:
    """The form of every (layer, target) that has a predictor. measured: False = sparse wherever there is one."""
    forms = {}
    for (layer, target), predictor in predictors.items():
        union = expected_union(predictor.density, batch, predictor.frequency)
        pays = launch.sparse_pays if target == "mlp" else heads_pay
        forms[layer, target] = Form(
            layer, target, predictor.density, union, not measured or pays(d_model, union, batch)
        )
    return forms


def describe_forms(forms: Mapping[tuple[int, str], Form], n_layers: int) -> str:
    """A line a target: how many layers are sparse, at which densities, and which went dense."""
    lines = []
    for target in ("mlp", "heads"):
        mine = [form for (_, name), form in sorted(forms.items()) if name == target]
        sparse = [form for form in mine if form.sparse]
        line = f"{target}: {len(sparse)} of {n_layers} layers sparse"
        if sparse:
            row, union = (sum(getattr(form, name) for form in sparse) / len(sparse) for name in ("density", "union"))
            line += f", density {row:.3f} a row, {union:.3f} together"
        dense = [form for form in mine if not form.sparse]
        if dense:
            line += "; sparse does not pay in layers " + ", ".join(f"{form.layer} ({form.union:.2f})" for form in dense)
        lines.append(line)
    return "\n".join(lines)
