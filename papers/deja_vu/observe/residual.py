"""The residual stream: how slowly it turns (Fig. 5 and App. B of the paper).

Letters: B windows, T positions, N measured positions, d model width.
"""

import dataclasses
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from papers.deja_vu.observe.statistics import Distribution, cosine

DISTANCES = 8


@dataclasses.dataclass(frozen=True)
class CosineRow:
    """Cosine similarity of the stream before layer ``layer`` and before layer ``layer + distance`` (Fig. 5a, b).

    The stream "before" layer n_layers is what leaves the last layer, before the final LayerNorm.
    """

    layer: int
    distance: int
    median: float
    p10: float
    p25: float
    p75: float
    p90: float
    mean: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class NormRow:
    """Around one part F (attention or mlp) of a layer with input X (Fig. 5c, d): norms, and what F turns.

    ``input``, ``output``: medians of ‖X‖ and ‖F(X)‖. ``ratio`` of ‖F(X)‖ / ‖X‖. ``cosine_output`` of X and F(X).
    ``cosine_sum`` of X and X + F(X). X is the residual stream, F includes its LayerNorm and its bias.
    """

    layer: int
    part: str
    input: float
    output: float
    ratio: float
    ratio_p10: float
    ratio_p90: float
    cosine_output: float
    cosine_output_p10: float
    cosine_output_p90: float
    cosine_sum: float
    cosine_sum_p10: float
    cosine_sum_p90: float


class Residual:
    """Follows the residual stream through the layers of each batch."""

    places = frozenset({"residual", "attn_out", "middle", "mlp_out"})

    def __init__(self, n_layers: int) -> None:
        self.n_layers = n_layers
        self.recent: deque[tuple[int, Tensor]] = deque(maxlen=DISTANCES)
        pairs = [(layer, n) for n in range(1, DISTANCES + 1) for layer in range(n_layers + 1 - n)]
        self.turning = {pair: Distribution(-1, 1) for pair in pairs}
        parts = [(layer, part) for layer in range(n_layers) for part in ("attention", "mlp")]
        self.logs = {key: [Distribution(-6, 6) for _ in range(3)] for key in parts}  # log10 of ‖X‖, ‖F(X)‖, their ratio
        self.cosines = {key: [Distribution(-1, 1) for _ in range(2)] for key in parts}

    def layer(self, layer: int, got: Mapping[str, Tensor], real: Tensor) -> None:
        """Add one layer of one batch: ``got`` has the places (B, T, d), ``real`` (B, T) says which positions count."""
        if layer == 0:
            self.recent.clear()
        self._state(layer, got["residual"], real)
        self._part(layer, "attention", got["residual"][real], got["attn_out"][real])
        self._part(layer, "mlp", got["middle"][real], got["mlp_out"][real])
        if layer == self.n_layers - 1:
            self._state(self.n_layers, got["middle"] + got["mlp_out"], real)

    def _state(self, layer: int, states: Tensor, real: Tensor) -> None:
        measured = states[real]
        for earlier, before in self.recent:
            self.turning[earlier, layer - earlier].add(cosine(measured, before))
        self.recent.append((layer, measured))

    def _part(self, layer: int, part: str, x: Tensor, fx: Tensor) -> None:
        x, fx = x.float(), fx.float()
        norms = [torch.linalg.vector_norm(values, dim=-1).clamp_min(1e-6) for values in (x, fx)]
        for seen, values in zip(self.logs[layer, part], (*norms, norms[1] / norms[0]), strict=True):
            seen.add(values.log10())
        for seen, values in zip(self.cosines[layer, part], (cosine(x, fx), cosine(x, x + fx)), strict=True):
            seen.add(values)

    def cosine_rows(self) -> list[CosineRow]:
        rows = []
        for pair, seen in self.turning.items():
            median, p10, p25, p75, p90 = (seen.quantile(q) for q in (0.5, 0.1, 0.25, 0.75, 0.9))
            rows.append(CosineRow(*pair, median, p10, p25, p75, p90, seen.mean, seen.count))
        return rows

    def norm_rows(self) -> list[NormRow]:
        rows = []
        for key, (x, fx, ratio) in self.logs.items():
            spread = [seen.quantile(q) for seen in self.cosines[key] for q in (0.5, 0.1, 0.9)]
            powers = [10**value for value in (x.quantile(0.5), fx.quantile(0.5))]
            powers += [10 ** ratio.quantile(q) for q in (0.5, 0.1, 0.9)]
            rows.append(NormRow(*key, *powers, *spread))
        return rows
