"""How each layer of an engine computes what is selected: chosen once, before capture, from measured crossovers.

A sparse block reads what the rows of a batch select together. Rows that chose independently, unit i with rate p_i,
would together take the mean of 1 - (1 - p_i)^B; the rates follow how often each unit was needed on the calibration
text, scaled to the density of one row. Units that every row needs are counted once that way, and real rows agree more
than independent ones, so the estimate errs towards computing the whole. A layer that computes the whole masks each row
by its own selection afterwards: which units count never depends on this choice.

One row always reads its selection only. Against the dense block that is slower only where nearly everything is selected
(`benchmarks/results/sparse_attention.csv`: above 0.85 to 0.93 of the heads by width, `sparse_mlp.csv`: 0.84 to 1 of the
neurons), and a masked dense block would need the predictor as well. A second stage is never left out either: at one row
its kernel is slower than reading all candidates whole (`benchmarks/results/cascade.csv`), but what passes it is what is
selected, and no other kernel finds that out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu_train.engine.predictors import TargetPredictor
from kernels.common import launch
from kernels.mlp.int4_fc2 import MOST_TOKENS


@dataclass(frozen=True)
class ExecutionMode:
    """How one (layer, target) runs: sparse, or whole and masked. density: of one row; union: expected of the batch."""

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


def heads_pay(batch: int, kv_policy: str = "backfill") -> bool:
    """Whether attention reads the selected heads only, instead of computing K/V of all heads and masking.

    Every row of several brings its own missing positions: at 8 rows they cost what the skipped heads saved from 20 %
    (d = 4096: 65 us against 66) or 31 % of the heads a row on (9216: 215 against 217). The policy "stale" needs to know
    what was skipped.
    """
    return batch == 1 or kv_policy == "stale"


def choose_execution(
    predictors: Mapping[tuple[int, str], TargetPredictor],
    d_model: int,
    batch: int,
    measured: bool = True,
    kv_policy: str = "backfill",
    packed: bool = False,
) -> dict[tuple[int, str], ExecutionMode]:
    """How every (layer, target) with a predictor runs.

    measured: False = sparse wherever there is one. packed: 4-bit weights, whose MLP has a sparse kernel of up to eight
    rows, which reads no more than all neurons; that of more rows is computed whole and masked.
    """
    modes = {}
    for (layer, target), predictor in predictors.items():
        union = expected_union(predictor.density, batch, predictor.frequency)
        pays = launch.sparse_pays(d_model, union, batch) if target == "mlp" else heads_pay(batch, kv_policy)
        sparse = not measured or pays
        if packed and target == "mlp":
            sparse = batch <= MOST_TOKENS
        modes[layer, target] = ExecutionMode(layer, target, predictor.density, union, sparse)
    return modes


def fused_layers(
    predictors: Mapping[tuple[int, str], TargetPredictor], n_layers: int, batch: int, packed: bool
) -> set[int]:
    """Layers whose MLP's predictor can run in the grids of q/k/v and attention: of selected heads or, packed, of all.

    One row, and a predictor of the layer's attn_in. packed: 4-bit weights. In fp16 q/k/v of all heads is faster as a
    dense product, beside a predictor on a stream of its own (6.7B on one H200: 1.83 ms a step, fused 1.87).
    """
    found = set()
    for layer in range(n_layers):
        heads = predictors.get((layer, "heads"))
        if _beside_attention(predictors, layer, batch) and (packed if heads is None else heads.own_folded is not None):
            found.add(layer)
    return found


def _beside_attention(predictors: Mapping[tuple[int, str], TargetPredictor], layer: int, batch: int) -> bool:
    """Whether the MLP's predictor can run in attention's grids: one row, with a threshold, of the layer's attn_in."""
    mlp = predictors.get((layer, "mlp"))
    return batch == 1 and mlp is not None and mlp.top_k is None and (mlp.site, mlp.site_layer) == ("attn_in", layer)


def late_layers(predictors: Mapping[tuple[int, str], TargetPredictor], n_layers: int, batch: int) -> set[int]:
    """Layers that need no stage of their own before q/k/v, of those with 4-bit weights: `kernels.lookahead.mlp_ahead`.

    The MLP before makes their input and selects their heads, if not all are kept: by a predictor of that MLP's own
    input. Else as `fused_layers`, of which the layer before is one, or one of these; the MLP's predictor is of int4.
    """
    fused, found = fused_layers(predictors, n_layers, batch, packed=True), set[int]()
    for layer in range(1, n_layers):
        heads = predictors.get((layer, "heads"))
        ahead = heads is None or (heads.ahead and heads.folded is not None)
        if ahead and layer - 1 in fused | found and _beside_attention(predictors, layer, batch):
            if predictors[layer, "mlp"].weights.down.dtype == torch.uint8:
                found.add(layer)
    return found


def describe_execution(modes: Mapping[tuple[int, str], ExecutionMode], n_layers: int) -> str:
    """A line a target: how many layers apply their selection, at which densities, and which compute all units first."""
    lines = []
    for target in ("mlp", "heads"):
        mine = [mode for (_, name), mode in sorted(modes.items()) if name == target]
        line = f"{target}: {len(mine)} of {n_layers} layers sparse"
        if mine:
            row, union = (sum(getattr(mode, name) for mode in mine) / len(mine) for name in ("density", "union"))
            line += f", density {row:.3f} a row, {union:.3f} together"
        masked = [mode for mode in mine if not mode.sparse]
        if masked:
            line += "; computed whole and masked: layers "
            line += ", ".join(f"{mode.layer} ({mode.union:.2f})" for mode in masked)
        lines.append(line)
    return "\n".join(lines)
