"""Scorers that need no training: the reference selections and what other systems do.

Each has the interface of ``select.Scorer``. Letters: B batch, T positions, n neurons, d model width, L layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.frontier_methods.plain_opt import PlainOPT, Sites
from benchmarks.frontier_methods.predictors import BITS, Predictors, quantised, stored_bytes
from benchmarks.frontier_methods.select import WEIGHT_BYTES
from benchmarks.frontier_methods.sets import Batch


class _NoBytes:
    def begin(self, part: Batch, model: PlainOPT) -> None:
        self.model = model

    def fixed_bytes(self, layer: int) -> float:
        return 0.0


class Recorder:
    """An edit that changes nothing and keeps every layer's activations (fp16) and mean over nothing else."""

    def __init__(self) -> None:
        self.activations: list[Tensor] = []

    def heads(self, layer: int, sites: Sites, out: Tensor) -> Tensor:
        return out

    def mlp(self, layer: int, sites: Sites, activation: Tensor) -> Tensor:
        self.activations.append(activation.half())
        return activation

    def offset(self, layer: int, target: str) -> Tensor | None:
        return None


class Oracle(_NoBytes):
    """The largest contributions of this token in the dense pass (two passes, as in the paper's section 3.1)."""

    def begin(self, part: Batch, model: PlainOPT) -> None:
        super().begin(part, model)
        recorder = Recorder()
        model.blocks(model.start(part.ids), recorder)
        self.dense = recorder.activations

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        return self.dense[layer].float() * self.model.layers[layer].fc2_norm


class Random(_NoBytes):
    """Uniform per token, fixed seed."""

    def begin(self, part: Batch, model: PlainOPT) -> None:
        self.generator = torch.Generator(device=model.device).manual_seed(int(part.ids.sum()) % 2**31)

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        return torch.rand(values.shape[:3], generator=self.generator, device=values.device)


class Static(_NoBytes):
    """The neurons that are most often active on calibration documents, whatever the token. ``frequency`` (L, n)."""

    def __init__(self, frequency: Tensor) -> None:
        # frequencies tie; a tiny rising term makes the order, and so the density, definite
        self.frequency = frequency + torch.linspace(0, 1e-6, frequency.shape[1], device=frequency.device)

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        return self.frequency[layer].expand(values.shape)


class NonContextual(_NoBytes):
    """The embedding at the model's input through each block alone: largest contributions (the paper's section 5.2).

    A token then selects the same neurons everywhere, a list that can be stored: 2 bytes for each neuron of it.
    """

    def begin(self, part: Batch, model: PlainOPT) -> None:
        self.model, self.embedded = model, model.start(part.ids)

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        model, weights = self.model, self.model.layers[layer]
        x = model.normed(self.embedded, weights.attn_norm)
        value = F.linear(x, weights.qkv_weight[2 * model.d :], weights.qkv_bias[2 * model.d :])
        hidden = self.embedded + F.linear(value, weights.out_weight, weights.out_bias)  # a sequence of one token
        x = model.normed(hidden, weights.mlp_norm)
        return F.relu(F.linear(x, weights.fc1_weight, weights.fc1_bias)) * weights.fc2_norm

    def row_bytes(self, layer: int, selected: float, survivors: float) -> float:
        return (WEIGHT_BYTES * self.model.d + 2) * selected


class MaxIP(_NoBytes):
    """Exact maximum inner product search over fc1's rows: the largest pre-activations. It reads all of fc1."""

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        weights = self.model.layers[layer]
        return F.linear(sites["mlp_in", layer], weights.fc1_weight, weights.fc1_bias)

    def row_bytes(self, layer: int, selected: float, survivors: float) -> float:
        return WEIGHT_BYTES * self.model.d * self.model.f


class HNSW(_NoBytes):
    """Approximate search over fc1's rows with hnswlib, as in the paper's appendix; ``k`` neighbours per layer.

    Rows are (w, b), queries (x, 1). What the graph walk reads is not counted by hnswlib; ``effort`` rows are a floor.
    """

    def __init__(self, model: PlainOPT, k: Sequence[int], effort: int = 200) -> None:
        import hnswlib  # optional: pip install hnswlib

        self.k, self.effort = list(k), effort
        self.indexes: list[Any] = []
        for layer in model.layers:
            index = hnswlib.Index(space="ip", dim=model.d + 1)
            index.init_index(max_elements=model.f, ef_construction=200, M=16, random_seed=0)
            index.add_items(torch.cat([layer.fc1_weight, layer.fc1_bias[:, None]], 1).cpu().numpy())
            index.set_ef(effort)
            self.indexes.append(index)

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        x = sites["mlp_in", layer].flatten(0, 1)
        query = torch.cat([x, torch.ones_like(x[:, :1])], 1).cpu().numpy()
        labels, _ = self.indexes[layer].knn_query(query, k=self.k[layer])
        found = torch.zeros(x.shape[0], values.shape[-1])
        found.scatter_(1, torch.from_numpy(labels.astype("int64")), 1.0)
        return found.to(values.device).view(values.shape)

    def row_bytes(self, layer: int, selected: float, survivors: float) -> float:
        return WEIGHT_BYTES * self.model.d * (selected + self.effort)


class Activation(_NoBytes):
    """CATS: fc1 is read whole, and fc2 rows only where the activation is above a threshold."""

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        return values

    def row_bytes(self, layer: int, selected: float, survivors: float) -> float:
        return WEIGHT_BYTES * self.model.d * self.model.f


class Griffin(_NoBytes):
    """GRIFFIN: the neurons that were strongest over the prompt, fixed from there on (Dong 2024, the flocking score)."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        prompt = values[:, : self.prompt]
        relative = prompt / prompt.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        return relative.norm(dim=1, keepdim=True).expand(values.shape)


class Sketch(_NoBytes):
    """fc1 itself in 1 to 4 bits, one scale per row (SparseInfer's sign bits and better), perhaps plus a low rank.

    Scores are pre-activations in units of contribution. With ``low_rank`` the sketch is of what the low rank leaves.
    """

    def __init__(self, model: PlainOPT, bits: int, low_rank: Predictors | None = None) -> None:
        self.bits, self.low_rank, self.rows = bits, low_rank, []
        for i, layer in enumerate(model.layers):
            weight = layer.fc1_weight * (layer.fc2_norm / layer.fc2_norm.mean())[:, None]
            if low_rank is not None:
                down, up, _ = low_rank.weights()
                weight = weight - (up[i] @ down[i]).detach()
            self.rows.append(sketched(weight, bits))

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        weights = self.model.layers[layer]
        x = sites["mlp_in", layer]
        if self.low_rank is not None:
            return self.low_rank.scores(layer, sites, values) + F.linear(x, self.rows[layer])
        return F.linear(x, self.rows[layer], weights.fc1_bias * weights.fc2_norm / weights.fc2_norm.mean())

    def fixed_bytes(self, layer: int) -> float:
        n, d = self.rows[layer].shape
        own = n * d * self.bits / 8 + 2 * n
        return own + (2 * n if self.low_rank is None else self.low_rank.fixed_bytes(layer))


def sketched(weight: Tensor, bits: int) -> Tensor:
    """``weight`` (n, d) as it reads back from ``bits`` bits a value and one scale a row."""
    if bits == 1:
        return weight.sign() * weight.abs().mean(-1, keepdim=True)  # the scale of least squared error
    return quantised(weight, {2: "int2", 3: "int3", 4: "int4"}[bits])


class Cascade:
    """A cheap filter, then a sharper test on its survivors: fc1's rows in few bits, read only where the filter fires.

    Args:
        filter_: the first scorer.
        first_thresholds: its thresholds, one per layer.
        kind: how the second stage stores fc1's rows. With ``planes`` those bits are not an extra copy but the upper
            bits of the weights themselves, so that a selected row needs its lower bits only.
        second_thresholds: contributions below are not selected; with them the filter's scores decide, without them
            (the default) the sharper test's do.
    """

    def __init__(
        self,
        model: PlainOPT,
        filter_: Any,
        first_thresholds: Sequence[float] | None,
        kind: str = "int4",
        planes: bool = False,
        second_thresholds: Sequence[float] | None = None,
    ) -> None:
        self.model, self.filter, self.kind, self.planes = model, filter_, kind, planes
        self.first = list(first_thresholds or [0.0] * model.n_layers)
        self.second = None if second_thresholds is None else list(second_thresholds)
        self.rows = [quantised(layer.fc1_weight, kind) for layer in model.layers]
        self.survivors = torch.empty(0)

    def begin(self, part: Batch, model: PlainOPT) -> None:
        self.filter.begin(part, model)

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        weights = self.model.layers[layer]
        first = self.filter.scores(layer, sites, values)
        sharp = F.linear(sites["mlp_in", layer], self.rows[layer], weights.fc1_bias) * weights.fc2_norm
        if self.second is not None:
            self.filter_scores, self.passed = first, sharp > self.second[layer]
            return torch.where(self.passed, first, -1e4)
        passed = first > self.first[layer]
        self.survivors = passed.sum(-1, keepdim=True)
        return torch.where(passed, sharp, -1e4)

    def fixed_bytes(self, layer: int) -> float:
        return self.filter.fixed_bytes(layer)

    def row_bytes(self, layer: int, selected: float, survivors: float) -> float:
        d = self.model.d
        second = WEIGHT_BYTES - BITS[self.kind] / 8 if self.planes else WEIGHT_BYTES
        return stored_bytes(1, d, self.kind) * survivors + second * d * selected


class TwoTests(Cascade):
    """A cascade whose second thresholds are fixed, so that a budget moves the filter's: what tuning needs.

    The densities of its ``Plan`` are the filter's.
    """

    def __init__(
        self, model: PlainOPT, filter_: Any, second_thresholds: Sequence[float], kind: str = "int4", planes: bool = True
    ) -> None:
        super().__init__(model, filter_, None, kind, planes, second_thresholds)

    def counted(self, threshold: float) -> Tensor:
        """(B, T, 1): neurons that the filter let through at ``threshold`` in the latest call of ``scores``."""
        return (self.filter_scores > threshold).sum(-1, keepdim=True)


class SharpTest(_NoBytes):
    """The second stage of a cascade by itself: what each neuron would add, by fc1's rows in few bits."""

    def __init__(self, model: PlainOPT, kind: str = "int4") -> None:
        self.model = model
        self.rows = [quantised(layer.fc1_weight, kind) for layer in model.layers]

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        weights = self.model.layers[layer]
        return F.linear(sites["mlp_in", layer], self.rows[layer], weights.fc1_bias) * weights.fc2_norm


class PreviousToken:
    """Adds a constant to the scores of neurons that the previous token selected and found active: a hint for free.

    Which neurons those are follows from the scores themselves; three rounds settle it for whole sequences at once.
    """

    def __init__(self, scorer: Any, thresholds: Sequence[float], bonus: float) -> None:
        self.scorer, self.thresholds, self.bonus = scorer, list(thresholds), bonus

    def begin(self, part: Batch, model: PlainOPT) -> None:
        self.scorer.begin(part, model)

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        own = self.scorer.scores(layer, sites, values)
        hinted = own
        for _ in range(3):
            used = (hinted > self.thresholds[layer]) & (values > 0)
            before = F.pad(used[:, :-1], (0, 0, 1, 0))
            hinted = own + self.bonus * before
        return hinted

    def fixed_bytes(self, layer: int) -> float:
        return self.scorer.fixed_bytes(layer)


class Teal:
    """TEAL: small entries of the hidden states are taken for zero, so that whole columns of fc1 are not read.

    An edit of its own kind: the threshold is on inputs, not on neurons. ``thresholds`` one per layer on |mlp_in|.
    """

    def __init__(self, model: PlainOPT, thresholds: Sequence[float], floors: Sequence[float]) -> None:
        self.model, self.thresholds, self.floors = model, list(thresholds), list(floors)
        self.kept, self.rows, self.tokens = 0.0, 0.0, 0.0

    def begin(self, part: Batch, final: Tensor, model: PlainOPT) -> None:
        self.valid = part.scored[..., None].double()
        self.tokens += float(self.valid.sum())

    def heads(self, layer: int, sites: Sites, out: Tensor) -> Tensor:
        return out

    def mlp(self, layer: int, sites: Sites, activation: Tensor) -> Tensor:
        weights, x = self.model.layers[layer], sites["mlp_in", layer]
        keep = x.abs() > self.thresholds[layer]
        got = F.relu(F.linear(x * keep, weights.fc1_weight, weights.fc1_bias))
        got = torch.where(got > self.floors[layer], got, 0.0)
        self.kept += float((keep.sum(-1, keepdim=True) * self.valid).sum())
        self.rows += float(((got > 0).sum(-1, keepdim=True) * self.valid).sum())
        return got

    def offset(self, layer: int, target: str) -> Tensor | None:
        return None

    def mlp_share(self) -> float:
        """Bytes read / dense: columns of fc1, rows of fc2."""
        steps = self.tokens * self.model.n_layers
        return 0.5 * (self.kept / (steps * self.model.d) + self.rows / (steps * self.model.f))
