"""Statistics of any number of values in fixed memory, and the two measures that several observations share."""

import numpy as np
import torch
from torch import Tensor


class Distribution:
    """Counts of values in equal bins: mean exact, quantiles to a bin's width, of any number of values.

    Args:
        low, high: of the bins. Values outside fall into the outer ones.
        bins: how many.

    >>> seen = Distribution(0, 1)
    >>> seen.add(torch.tensor([0.1, 0.2, 0.9]))
    >>> seen.count, round(seen.mean, 3), round(seen.quantile(0.5), 2)
    (3, 0.4, 0.2)
    """

    def __init__(self, low: float, high: float, bins: int = 20_000) -> None:
        self.low, self.high, self.bins = low, high, bins
        self.counts = np.zeros(bins, dtype=np.int64)
        self.sum = 0.0

    def add(self, values: Tensor) -> None:
        """Add finite values of any shape."""
        flat = values.detach().flatten().double()
        place = ((flat - self.low) * (self.bins / (self.high - self.low))).long().clamp_(0, self.bins - 1)
        self.counts += torch.bincount(place, minlength=self.bins).cpu().numpy()
        self.sum += float(flat.sum())

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else float("nan")

    def quantile(self, share: float) -> float:
        """The middle of the bin below whose upper edge ``share`` of the values lie. NaN without values."""
        if not self.count:
            return float("nan")
        place = int(np.searchsorted(self.counts.cumsum(), max(1, share * self.count)))
        return self.low + (place + 0.5) * (self.high - self.low) / self.bins


def cosine(first: Tensor, second: Tensor) -> Tensor:
    """Cosine similarity of rows: (..., d), (..., d) -> (...) fp32. 0 where a row is zero."""
    return torch.cosine_similarity(first.float(), second.to(first.device).float(), dim=-1)


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Rank correlation within rows: the Pearson correlation of the ranks. Ties get ranks in the order they stand.

    Args: ``first``, ``second``: (..., n), n > 1.
    Returns: (...) fp64.

    >>> float(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 30.0, 20.0])))
    0.5
    """
    n = first.shape[-1]
    places = [values.argsort(dim=-1, stable=True).argsort(dim=-1).double() for values in (first, second)]
    return 1 - 6 * ((places[0] - places[1]) ** 2).sum(-1) / (n * (n * n - 1))
