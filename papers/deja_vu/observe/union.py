"""What a batch reads: the union of its rows' sets (Fig. 8 and App. C.1 of the paper), and what grouping rows gains.

Each window is a request: its first half is the prompt, and at some positions of its second half its sets are kept.
Requests are grouped by what is known before they decode, and the unions are counted afterwards.

Letters: W requests, S steps (positions), L layers, n units.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from dejavu_train.families import Target

BATCHES = (1, 2, 4, 8, 16, 32)
STEPS = 8
REPEATS = 8  # random orders that are averaged


@dataclasses.dataclass(frozen=True)
class UnionRow:
    """Share of a layer's units in the union of a batch's sets, mean over steps and batches. ``sparsity`` is the rest.

    ``grouping``: ``documents``, requests as they come, all at the same position. ``random``, tokens of any requests and
    positions. ``embedding``, requests whose prompts' mean embeddings are alike. ``selections``, requests whose prompts
    used the same neurons. ``independent``, not measured: the mean over units of 1 - (1 - f)^batch, where f is how often
    the unit is in a set. Tokens would need it whose sets have nothing else in common.
    ``gain``: 1 - union / that of ``documents``. ``error``: of the mean over batches, None with fewer than two.
    """

    target: str
    layer: int
    grouping: str
    batch: int
    union: float
    sparsity: float
    gain: float
    error: float | None
    batches: int


def group_alike(features: np.ndarray, size: int) -> list[list[int]]:
    """Batches of ``size`` requests that are alike, greedily: the request least like the mean, then its nearest ones.

    Args: ``features`` (W, k). Compared by cosine after the mean is taken off.
    Returns: W // size batches of indices. Requests that are left over are in none.
    """
    centred = features.astype(np.float32) - features.mean(0, dtype=np.float32)
    length = np.linalg.norm(centred, axis=1)
    alike = (centred @ centred.T) / np.maximum(np.outer(length, length), 1e-12)
    left = list(np.argsort(-length, kind="stable"))
    groups = []
    while len(left) >= size:
        near = sorted(left, key=lambda other: -alike[left[0], other] if other != left[0] else -2)[:size]
        groups.append([int(index) for index in near])
        left = [index for index in left if index not in near]
    return groups


def union_share(sets: np.ndarray, groups: Sequence[Sequence[int]], n_units: int) -> np.ndarray:
    """Share of the units in the union of each group's sets.

    Args: ``sets`` (W, ..., bytes) bit-packed. ``groups`` of indices into W.
    Returns: (len(groups), ...) float64.
    """
    unions = (np.bitwise_or.reduce(sets[list(group)], axis=0) for group in groups)
    return np.stack([np.bitwise_count(union).sum(-1) / n_units for union in unions])


class Unions:
    """Keeps, bit-packed, the sets of up to ``requests`` windows of full length.

    Args:
        n_layers: of the model. window: positions of a full window. requests: windows kept at most.
    """

    places = frozenset({"residual"})

    def __init__(self, n_layers: int, window: int, requests: int) -> None:
        self.n_layers, self.window, self.requests = n_layers, window, requests
        self.prompt = window // 2
        self.steps = np.unique(np.linspace(self.prompt, window - 1, STEPS).astype(int))
        self.units: dict[Target, int] = {}
        self.kept: dict[Target, list[list[np.ndarray]]] = {Target.MLP: [[] for _ in range(n_layers)]}
        self.kept[Target.HEADS] = [[] for _ in range(n_layers)]
        self.embedding: list[np.ndarray] = []
        self.selections: list[list[np.ndarray]] = [[] for _ in range(n_layers)]

    def layer(self, layer: int, got: Mapping[str, Tensor], real: Tensor, sets: Mapping[Target, Tensor]) -> None:
        """Add one layer of one batch. ``sets`` (B, T, n) bool by target."""
        full = (real.sum(-1) == self.window).nonzero()[:, 0].tolist()
        full = full[: self.requests - len(self.kept[Target.MLP][layer])]
        for row in full:
            for target, own in sets.items():
                self.units[target] = own.shape[-1]
                self.kept[target][layer].append(np.packbits(own[row, self.steps].cpu().numpy(), axis=-1))
            used = sets[Target.MLP][row, : self.prompt].half().mean(0)
            self.selections[layer].append(used.cpu().numpy())
            if layer == 0:
                self.embedding.append(got["residual"][row, : self.prompt].float().mean(0).cpu().numpy())

    @property
    def count(self) -> int:
        return len(self.embedding)

    def rows(self, seed: int = 0) -> list[UnionRow]:
        """Rows of every target, layer, grouping and batch that there are enough requests for."""
        if self.count == 0:
            return []
        features = {
            "embedding": np.stack(self.embedding),
            "selections": np.concatenate([np.stack(part) for part in self.selections], axis=1),
        }
        sizes = [size for size in BATCHES if size <= self.count]
        groups = {(name, size): group_alike(values, size) for name, values in features.items() for size in sizes}
        rows = []
        for target in self.kept:
            for layer in range(self.n_layers):
                sets = np.stack(self.kept[target][layer])
                for size in sizes:
                    alike = {name: groups[name, size] for name in features}
                    rows += list(_rows(target, layer, sets, self.units[target], size, alike, seed))
        return rows


def _rows(
    target: Target,
    layer: int,
    sets: np.ndarray,
    n_units: int,
    size: int,
    alike: Mapping[str, list[list[int]]],
    seed: int,
) -> Iterator[UnionRow]:
    """The rows of one layer and batch size. ``sets`` (W, S, bytes)."""
    generator = np.random.default_rng(seed)
    orders = [np.arange(len(sets)), *(generator.permutation(len(sets)) for _ in range(REPEATS - 1))]
    documents = np.concatenate([union_share(sets, _cut(order, size), n_units).mean(1) for order in orders])
    tokens = sets.reshape(-1, sets.shape[-1])
    mixed = union_share(tokens, _cut(generator.permutation(len(tokens)), size), n_units)
    frequency = np.unpackbits(tokens, axis=-1, count=n_units).mean(0)
    groupings = {"documents": documents, "random": mixed}
    groupings |= {name: union_share(sets, groups, n_units).mean(1) for name, groups in alike.items()}
    groupings["independent"] = (1 - (1 - frequency) ** size).mean(keepdims=True)
    for name, shares in groupings.items():
        # Random orders share their requests, so only one order's batches count as measurements of their own.
        n = len(shares) // len(orders) if name == "documents" else len(shares)
        error = float(shares.std(ddof=1) / np.sqrt(n)) if n > 1 else None
        union = float(shares.mean())
        yield UnionRow(target, layer, name, size, union, 1 - union, 1 - union / float(documents.mean()), error, n)


def _cut(order: np.ndarray, size: int) -> list[list[int]]:
    return order[: len(order) // size * size].reshape(-1, size).tolist()


def mean_over_layers(rows: Sequence[UnionRow]) -> list[UnionRow]:
    """One row for every target, grouping and batch, layer -1: unions are means over the layers, without an error."""
    by_key: dict[tuple[str, str, int], list[UnionRow]] = {}
    for row in rows:
        by_key.setdefault((row.target, row.grouping, row.batch), []).append(row)
    mean = {key: sum(row.union for row in own) / len(own) for key, own in by_key.items()}
    means = []
    for (target, grouping, batch), own in by_key.items():
        union = mean[target, grouping, batch]
        gain = 1 - union / mean[target, "documents", batch]
        means.append(UnionRow(target, -1, grouping, batch, union, 1 - union, gain, None, own[0].batches))
    return means
