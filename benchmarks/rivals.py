"""Other ways to choose neurons or heads, in their best form: what each scores, what it reads, thresholds for a budget.

Every rival gets what the library's predictors get: a threshold per layer from calibration text, and a budget shared out
over the layers by the divergence that each layer costs alone. Bytes are counted on the scored positions: what is read
to choose, fc1 rows of what is selected, fc2 rows of what is active besides.

Letters: B windows, T positions, d model width, n units (inputs d, neurons f, heads h), e head width, M neighbours.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.bundle.allocation import OperatingPoint, mlp_bytes, read_curve, spend
from dejavu_train.bundle.cost_model import predictor_bytes
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.calibration.curves import HEAD_GRID, HEAD_PROBES, MLP_GRID, LogitHistogram, spread_loss
from dejavu_train.evaluation.perplexity import EvalBatch, window_nats
from dejavu_train.models.hooks import decoder_layers, head_contribution, output_gram
from dejavu_train.models.weight_format import UnitBytes
from dejavu_train.predictors.low_rank import LowRankPredictor, svd_init

PROMPT_SHARE = 0.5  # of a window that Griffin reads densely
NEIGHBOURS = 16
ENTRIES = 16
EXPANSIONS = 160
INPUTS, NEURONS, HEADS = "inputs", "neurons", "heads"  # of fc1, of fc2, of the output projection
PROBES = {INPUTS: (0.02, 0.05, 0.1, 0.2, 0.4, 0.7), NEURONS: (0.005, 0.02, 0.05, 0.1, 0.2, 0.4), HEADS: HEAD_PROBES}
Key = tuple[int, str]
Thresholds = Mapping[Key, float]


class Seen(NamedTuple):
    """What a rival may look at in one layer: x (B, T, d), what fc1 reads; values (B, T, n) or (B, T, h, e) of the units
    it chooses from; real (B, T) bool, false where a window is padded."""

    x: Tensor
    values: Tensor
    real: Tensor


class MlpWeights(NamedTuple):
    """fc1 (f, d), its bias (f,), and the norms (f,) of fc2's columns, fp32."""

    fc1: Tensor
    bias: Tensor
    norms: Tensor

    @classmethod
    def of(cls, model: Any) -> "list[MlpWeights]":
        return [
            cls(
                block.fc1.weight.detach().float(),
                block.fc1.bias.detach().float(),
                torch.linalg.vector_norm(block.fc2.weight.detach().float(), dim=0),
            )
            for block in decoder_layers(model)
        ]


class Rival:
    """Selects neurons by a score of its own. ``parts``: the kinds of units that have a threshold of their own."""

    name = ""
    parts: tuple[str, ...] = (NEURONS,)

    def __init__(self, weights: Sequence[MlpWeights]) -> None:
        self.weights = weights

    def scores(self, layer: int, part: str, seen: Seen) -> Tensor:
        """(B, T, n): selected is what exceeds the threshold of (layer, part)."""
        raise NotImplementedError

    def first(self, real: Tensor) -> Tensor:
        """(B, T) bool: the positions that are sparse, and so are scored and counted."""
        return real

    def fixed_bytes(self, layer: int) -> float:
        """Bytes read per token whatever is selected."""
        return 0.0

    def dense_bytes(self, layer: int) -> float:
        """Bytes that the dense model reads per token of what this rival makes sparse."""
        return 4.0 * self.weights[layer].fc1.numel()

    def expected_bytes(self, key: Key, density: float, recall: float, active: float) -> float:
        """Bytes per token at a point of a calibration curve; ``active``: share of neurons that are active."""
        f, d = self.weights[key[0]].fc1.shape
        return self.fixed_bytes(key[0]) + mlp_bytes(density, recall, active, f, UnitBytes(2.0 * d, 2.0 * d, 0.0))

    def read_bytes(self, key: Key, seen: Seen, keep: Tensor, threshold: float) -> Tensor:
        """(B, T): bytes read per position for the selection ``keep`` (B, T, n)."""
        rows = keep.sum(-1) + (keep & (seen.values > 0)).sum(-1)
        return self.fixed_bytes(key[0]) + 2.0 * seen.x.shape[-1] * rows


class Oracle(Rival):
    """The largest contributions of the token, given the layer's own input; reads nothing to know them."""

    name = "oracle"

    def scores(self, layer: int, part: str, seen: Seen) -> Tensor:
        return seen.values.float() * self.weights[layer].norms


class WhitenedSVD(Rival):
    """The low rank that best approximates contributions before the ReLU, over the inputs' second moment, quantised."""

    def __init__(
        self, weights: Sequence[MlpWeights], moments: Sequence[Tensor], rank: int, dtype: str = "int4"
    ) -> None:
        super().__init__(weights)
        self.name = f"whitened SVD, rank {rank} {dtype}"
        self.predictors, self.specs = [], []
        for layer, (own, moment) in enumerate(zip(weights, moments, strict=True)):
            f, d = own.fc1.shape
            predictor = LowRankPredictor(d, rank, f).to(own.fc1.device)
            svd_init(predictor, own.fc1 * own.norms[:, None], own.bias * own.norms, moment)
            predictor.rounded_to = dtype
            self.predictors.append(predictor.requires_grad_(False))
            self.specs.append(PredictorSpec(layer, "mlp", "mlp_in", layer, rank, d, f, dtype=dtype))

    def scores(self, layer: int, part: str, seen: Seen) -> Tensor:
        found: Tensor = self.predictors[layer](seen.x.float())
        return found

    def fixed_bytes(self, layer: int) -> float:
        return predictor_bytes(self.specs[layer])


class Griffin(Rival):
    """The neurons that were strongest over the prompt, fixed from there on (Dong et al. 2024: the flocking statistic).

    The first half of a window is the prompt: dense, not counted, not scored.
    """

    name = "GRIFFIN"

    def scores(self, layer: int, part: str, seen: Seen) -> Tensor:
        prompt = (seen.real & ~self.first(seen.real))[..., None]
        relative = F.normalize(seen.values.float(), dim=-1)
        mean = (relative.square() * prompt).sum(1, keepdim=True) / prompt.sum(1, keepdim=True).clamp_min(1)
        return mean.expand_as(relative)

    def first(self, real: Tensor) -> Tensor:
        positions = torch.arange(real.shape[1], device=real.device)
        return real & (positions >= (real.sum(1, keepdim=True) * PROMPT_SHARE).ceil())


class GraphSearch(Rival):
    """Search of a graph of nearest neighbours, as HNSW walks its lowest level; every row that it visits is selected.

    Best first, from the rows that are most often active, until the best row not yet expanded falls below the
    threshold; a row's score is the threshold at which it is visited. Edges join rows whose pre-activations correlate
    most over text, which serves better than the distance of the weights; they are read as 16-bit numbers.
    """

    name = "graph search (HNSW)"

    def __init__(self, weights: Sequence[MlpWeights], moments: Sequence[Tensor], frequency: Sequence[Tensor]) -> None:
        super().__init__(weights)
        self.edges, self.entries = [], []
        for own, moment, often in zip(weights, moments, frequency, strict=True):
            products = own.fc1 @ moment.to(own.fc1) @ own.fc1.T
            scale = products.diagonal().clamp_min(1e-12).rsqrt()
            alike = (products * scale[:, None] * scale).fill_diagonal_(-torch.inf)
            self.edges.append(alike.topk(min(NEIGHBOURS, len(alike) - 1)).indices)
            self.entries.append(often.topk(min(ENTRIES, len(often))).indices)

    def _values(self, layer: int, x: Tensor) -> Tensor:
        own = self.weights[layer]
        return F.linear(x.float(), own.fc1, own.bias) * own.norms

    def scores(self, layer: int, part: str, seen: Seen) -> Tensor:
        edges = self.edges[layer]
        values = self._values(layer, seen.x).flatten(0, 1)  # (B T, f)
        visited_at = torch.full_like(values, -torch.inf)
        waiting = visited_at.clone()
        start = self.entries[layer].expand(len(values), -1)
        visited_at.scatter_(1, start, torch.inf)
        waiting.scatter_(1, start, values.gather(1, start))
        level = values.new_full((len(values), 1), torch.inf)
        for _ in range(min(EXPANSIONS, values.shape[1])):
            best, row = waiting.max(1, keepdim=True)
            level = torch.minimum(level, best)
            waiting.scatter_(1, row, -torch.inf)
            near = edges[row[:, 0]]  # (B T, M)
            before = visited_at.gather(1, near)
            new = before == -torch.inf
            visited_at.scatter_(1, near, torch.where(new, level, before))
            waiting.scatter_(1, near, torch.where(new, values.gather(1, near), waiting.gather(1, near)))
        return visited_at.view(*seen.x.shape[:2], -1)

    def fixed_bytes(self, layer: int) -> float:
        return 2.0 * len(self.entries[layer])

    def read_bytes(self, key: Key, seen: Seen, keep: Tensor, threshold: float) -> Tensor:
        expanded = (keep & (self._values(key[0], seen.x) > threshold)).sum(-1).clamp_max(EXPANSIONS)
        return super().read_bytes(key, seen, keep, threshold) + 2.0 * self.edges[key[0]].shape[1] * expanded


class Teal(Rival):
    """Drops small entries of what fc1 and fc2 read, a threshold each (Liu et al. 2024); zeros of the ReLU are free."""

    name = "TEAL"
    parts = (INPUTS, NEURONS)

    def scores(self, layer: int, part: str, seen: Seen) -> Tensor:
        return seen.values.float().abs()

    def expected_bytes(self, key: Key, density: float, recall: float, active: float) -> float:
        share = density if key[1] == INPUTS else min(density, recall * active)
        return 2.0 * self.weights[key[0]].fc1.numel() * share

    def read_bytes(self, key: Key, seen: Seen, keep: Tensor, threshold: float) -> Tensor:
        f, d = self.weights[key[0]].fc1.shape
        return 2.0 * (f if key[1] == INPUTS else d) * (keep & (seen.values != 0)).sum(-1)


class OracleHeads(Rival):
    """Heads whose output lies farthest from the mean that stands in for a skipped one; bytes are attention's."""

    name = "oracle, shared out"
    parts = (HEADS,)

    def __init__(self, model: Any, means: Mapping[int, Tensor]) -> None:
        self.means = means
        self.projections = [block.self_attn.out_proj.weight.detach() for block in decoder_layers(model)]
        self.n_heads = decoder_layers(model)[0].self_attn.num_heads
        self.grams = [output_gram(weight, self.n_heads) for weight in self.projections]

    def scores(self, layer: int, part: str, seen: Seen) -> Tensor:
        return head_contribution(seen.values, self.projections[layer], self.grams[layer], self.means[layer])

    def dense_bytes(self, layer: int) -> float:
        return self.expected_bytes((layer, HEADS), 1.0, 1.0, 1.0)

    def expected_bytes(self, key: Key, density: float, recall: float, active: float) -> float:
        d = len(self.projections[key[0]])
        return 8.0 * density * d * d

    def read_bytes(self, key: Key, seen: Seen, keep: Tensor, threshold: float) -> Tensor:
        return self.expected_bytes(key, 1.0, 1.0, 1.0) * keep.float().mean(-1)


@dataclass
class Ledger:
    """Sums over scored positions: bytes by (layer, part), and positions."""

    read: dict[Key, float] = field(default_factory=dict)
    positions: int = 0

    def share(self, rival: Rival) -> float:
        """Bytes read over those that the dense model reads."""
        dense = sum(rival.dense_bytes(layer) for layer in {layer for layer, _ in self.read})
        return sum(self.read.values()) / max(self.positions, 1) / dense


@contextmanager
def watched(model: Any, rival: Rival, real: Tensor, at: Any) -> Iterator[None]:
    """Within the context ``at(layer, part, seen)`` may give other values for what a module of the model reads."""
    inputs: dict[int, Tensor] = {}

    def hooked(layer: int, part: str, n_heads: int) -> Any:
        def hook(_module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            values = args[0].view(*real.shape, -1)
            if part == HEADS:
                values = values.unflatten(-1, (n_heads, -1))
            if part == INPUTS:
                inputs[layer] = values
            new = at(layer, part, Seen(inputs.get(layer, values), values, real)) if part in rival.parts else None
            if part == INPUTS and new is not None:
                inputs[layer] = new
            return None if new is None else (new.reshape(args[0].shape), *args[1:])

        return hook

    with ExitStack() as hooks:
        for layer, block in enumerate(decoder_layers(model)):
            modules = {INPUTS: block.fc1, NEURONS: block.fc2, HEADS: block.self_attn.out_proj}
            for part, module in modules.items():
                handle = module.register_forward_pre_hook(hooked(layer, part, block.self_attn.num_heads))
                hooks.callback(handle.remove)
        yield


@contextmanager
def sparse(
    model: Any, rival: Rival, thresholds: Thresholds, real: Tensor, ledger: Ledger | None = None
) -> Iterator[None]:
    """Within the context passes of windows with the positions ``real`` (B, T) are sparse where there is a threshold."""
    where = rival.first(real)
    means = rival.means if isinstance(rival, OracleHeads) else {}

    def at(layer: int, part: str, seen: Seen) -> Tensor | None:
        threshold = thresholds.get((layer, part))
        if threshold is None:
            return None
        keep = rival.scores(layer, part, seen) > threshold
        if ledger is not None:
            read = float(rival.read_bytes((layer, part), seen, keep, threshold)[where].sum(dtype=torch.float64))
            ledger.read[layer, part] = ledger.read.get((layer, part), 0.0) + read
        keep = keep | ~where[..., None]
        instead = means[layer].to(seen.values) if part == HEADS else seen.values.new_zeros(())
        return torch.where(keep[..., None] if part == HEADS else keep, seen.values, instead)

    with watched(model, rival, real, at):
        yield
    if ledger is not None:
        ledger.positions += int(where.sum())


@torch.no_grad()
def second_moments(model: Any, batches: Iterable[EvalBatch]) -> tuple[list[Tensor], list[Tensor]]:
    """Of each layer over text: the second moment (d, d) of what fc1 reads, and how often (f,) a neuron is active."""
    weights = MlpWeights.of(model)
    moments = [torch.zeros(w.fc1.shape[1], w.fc1.shape[1], dtype=torch.float64, device=w.fc1.device) for w in weights]
    active = [torch.zeros(len(w.fc1), dtype=torch.float64, device=w.fc1.device) for w in weights]
    rows = 0
    for batch in batches:
        rows += int(batch.real.sum())

        def add(layer: int, part: str, seen: Seen) -> None:
            if part == INPUTS:
                x = seen.x[seen.real].double()
                moments[layer] += x.T @ x
            else:
                active[layer] += (seen.values[seen.real] > 0).double().sum(0)

        with watched(model, Teal(weights), batch.real, add):
            model.model.decoder(input_ids=batch.ids, use_cache=False)
    return [moment / rows for moment in moments], [(count / rows).float() for count in active]


@torch.no_grad()
def log_probabilities(model: Any, batch: EvalBatch) -> Tensor:
    """(real positions, V) fp32."""
    hidden = model.model.decoder(input_ids=batch.ids, use_cache=False).last_hidden_state
    return F.log_softmax(model.lm_head(hidden[batch.real]).float(), dim=-1)


class Calibration:
    """Curves of one rival over densities by (layer, part), and the thresholds that they give for a budget.

    Args:
        batches: calibration text. Thresholds are set on all of it, losses measured on the first ``len(dense)``.
        dense: their ``log_probabilities``.
    """

    def __init__(self, model: Any, rival: Rival, batches: Sequence[EvalBatch], dense: Sequence[Tensor]) -> None:
        self.model, self.rival, self.batches, self.dense = model, rival, batches, dense
        self.curves: dict[Key, dict[str, list[float]]] = {}
        for key, histogram in self._histograms().items():
            curve = histogram.curve(HEAD_GRID if key[1] == HEADS else MLP_GRID)
            probes = PROBES[key[1]]
            losses = [self.divergence({key: read_curve(curve, density)["threshold"]}) for density in probes]
            curve["loss_increase"] = spread_loss(probes, losses, curve["density"])
            active = float(histogram.active.sum() / histogram.all.sum())
            points = zip(curve["density"], curve["recall"], strict=True)
            curve["bytes"] = [rival.expected_bytes(key, density, recall, active) for density, recall in points]
            self.curves[key] = curve

    @torch.no_grad()
    def _histograms(self) -> dict[Key, LogitHistogram]:
        found: dict[Key, LogitHistogram] = {}
        for batch in self.batches:
            where = self.rival.first(batch.real)

            def count(layer: int, part: str, seen: Seen, where: Tensor = where) -> None:
                scores = self.rival.scores(layer, part, seen)[where].float()
                live = seen.values[where] > 0 if part == NEURONS else torch.ones_like(scores, dtype=torch.bool)
                found.setdefault((layer, part), LogitHistogram()).add(scores, live, live.float())

            with watched(self.model, self.rival, batch.real, count):
                self.model.model.decoder(input_ids=batch.ids, use_cache=False)
        return found

    @torch.no_grad()
    def divergence(self, thresholds: Thresholds) -> float:
        """Mean KL(dense || sparse) of the next-token distributions over the sparse positions, in nats."""
        total, positions = 0.0, 0
        for batch, dense in zip(self.batches, self.dense, strict=False):
            with sparse(self.model, self.rival, thresholds, batch.real):
                found = log_probabilities(self.model, batch)
            where = self.rival.first(batch.real)[batch.real]
            total += float((dense.exp() * (dense - found)).sum(-1)[where].double().sum())
            positions += int(where.sum())
        return total / max(positions, 1)

    @torch.no_grad()
    def thresholds(self, share: float) -> dict[Key, float]:
        """Thresholds that read ``share`` of the dense bytes, counted on the calibration text.

        Raises:
            UserError: the least that this rival reads is more.
        """
        columns = ("bytes", "loss_increase", "density")
        choices = {
            key: [OperatingPoint(*point) for point in zip(*(curve[name] for name in columns), strict=True)]
            for key, curve in self.curves.items()
        }
        dense = sum(self.rival.dense_bytes(layer) for layer in {layer for layer, _ in choices})
        asked, found = share, dict[Key, float]()
        for _ in range(4):  # a sparse model's inputs are others than the dense one's, which gave the curves
            chosen = spend(choices, asked * dense)
            found = {key: read_curve(self.curves[key], point.density)["threshold"] for key, point in chosen.items()}
            ledger = Ledger()
            for batch in self.batches:
                with sparse(self.model, self.rival, found, batch.real, ledger):
                    self.model.model.decoder(input_ids=batch.ids, use_cache=False)
            measured = ledger.share(self.rival)
            if abs(measured / share - 1) < 0.005:
                break
            asked *= share / measured
        return found


@torch.no_grad()
def score(
    model: Any, rival: Rival, thresholds: Thresholds, batches: Iterable[EvalBatch], n_documents: int
) -> tuple[np.ndarray, np.ndarray, Ledger]:
    """Summed nats and scored positions by document of a text, and what was read."""
    nats, positions, ledger = np.zeros(n_documents), np.zeros(n_documents), Ledger()
    for batch in batches:
        with sparse(model, rival, thresholds, batch.real, ledger):
            np.add.at(nats, batch.document, window_nats(model, batch))
        np.add.at(positions, batch.document, rival.first(batch.real).sum(1).cpu().numpy())
    return nats, positions, ledger
