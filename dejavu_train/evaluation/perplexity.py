"""Reads held-out documents, a dense model and a bundle. Writes perplexity rows and a table per layer.

Every row scores the same tokens through the backend ``mask``, batch by batch. First comes the dense pass, which gives
the reference and the contributions for the oracle. For each pair of densities the predicted selection follows, then
the yardsticks at the counts that the predictor took. Errors are those of a paired bootstrap over documents.

Letters: B windows, T positions, n units, V vocabulary.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import measured_mlp_share
from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.data.text import Document
from dejavu_train.data.tokens import windows
from dejavu_train.evaluation.baselines import (
    FixedSelections,
    keep_top,
    noncontextual_contributions,
    random_ranks,
    ranks,
)
from dejavu_train.families import Target, UnitKey, blocks_of, dims_of
from dejavu_train.families.base import logits_of
from dejavu_train.families.block import active_neurons
from dejavu_train.families.dims import SMOOTH
from dejavu_train.ground.errors import UserError
from dejavu_train.models.finite import check_logits
from dejavu_train.models.hooks import head_contribution, output_gram, record
from dejavu_train.models.weight_format import WeightFormat, loaded_format
from dejavu_train.predictors.metrics import SelectionSums
from dejavu_train.sparse.masked import Select, masking

BOOTSTRAPS = 1000
DOCUMENTS = 20  # at least so many share a budget of tokens, if there are so many
HIGHEST_NATS = 700  # a token, on the mean: exp of more is no number
SCORED_AT_ONCE = 1024  # positions whose logits (times V) are held at a time


@dataclasses.dataclass(frozen=True)
class EvalSetting:
    """One line of the quality table that is asked for.

    Densities are means over the layers. 1.0 is dense, None as the bundle was calibrated.
    """

    selection: str
    mlp_density: float | None = 1.0
    head_density: float | None = 1.0
    sparse_from: int = 0

    @property
    def as_calibrated(self) -> bool:
        return self.mlp_density is None and self.head_density is None


@dataclasses.dataclass
class EvalCorpus:
    """Held-out text, cut into windows.

    ``windows[i]`` are token ids that begin with ``</s>`` and belong to document ``document[i]``. ``truncated`` says
    that a budget of tokens left out windows or documents.
    """

    windows: list[list[int]]
    document: list[int]
    document_tokens: list[int]
    bytes: int
    truncated: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.document_tokens)


@dataclasses.dataclass
class EvalResult:
    """Result of one row.

    ``nats`` are summed per document, ``sums`` per (layer, target). Predicted rows also have ``candidates``, by layer
    how many neurons passed the first of two stages. Their ``mlp_bytes`` are what the MLPs and their predictors read
    over what the dense MLPs read. They are counted on the measured positions. ``calibrated``: the bundle's own
    densities of MLPs and heads, which stand where the row asks for no other.
    """

    row: EvalSetting
    nats: np.ndarray
    sums: dict[UnitKey, SelectionSums]
    candidates: dict[int, int] = dataclasses.field(default_factory=dict)
    mlp_bytes: float | None = None
    calibrated: tuple[float, float] = (1.0, 1.0)

    @property
    def asked(self) -> tuple[float, float]:
        """Densities of MLPs and heads."""
        pairs = zip((self.row.mlp_density, self.row.head_density), self.calibrated, strict=True)
        mlp, heads = (own if asked is None else asked for asked, own in pairs)
        return mlp, heads


def hold_out(
    documents: Sequence[Document],
    tokenizer: Any,
    window: int,
    tokens: int | None,
    seed: int = 0,
    spread: int = DOCUMENTS,
) -> EvalCorpus:
    """Cut documents into windows. About ``next_tokens`` tokens at most, documents drawn in a fixed random order.

    A budget is spread over ``spread`` documents, so that no long one stands for a whole text. In rounds each gives at
    most its share, and at least a window.
    """
    order = list(range(len(documents)))
    if tokens is not None:
        order.sort(key=lambda i: hashlib.sha256(f"{seed}|{documents[i].name}".encode()).digest())
    cut = (windows(tokenizer, documents[i].text, window) for i in order)
    taken = _spread(cut, window, math.inf if tokens is None else tokens, spread)
    held = EvalCorpus([], [], [], 0, truncated=len(taken) < len(order))
    for index, (parts, complete) in zip(order, taken, strict=False):
        text = documents[index].text
        if not complete:
            held.truncated = True
            text = tokenizer.decode([token for part in parts for token in part[1:]])
        if parts:
            held.windows += parts
            held.document += [len(held.document_tokens)] * len(parts)
            held.document_tokens.append(sum(len(part) - 1 for part in parts))
            held.bytes += len(text.encode("utf-8"))
    return held


def _spread(
    documents: Iterator[list[list[int]]], window: int, tokens: float, spread: int
) -> list[tuple[list[list[int]], bool]]:
    """The first windows of each document, about ``next_tokens`` tokens in all, and whether they are all it has.

    Documents are read in order, and no further than is needed.
    """
    at_once = math.inf if tokens == math.inf else max(1, int(tokens / (window - 1) / spread))
    read: list[list[list[int]]] = []
    count: list[int] = []
    left = tokens

    def read_more(place: int) -> None:
        nonlocal left
        start, available = count[place], len(read[place])
        stop = min(start + at_once, start + max(left, 0) / (window - 1), available)
        count[place] = math.ceil(stop)
        left -= sum(len(part) - 1 for part in read[place][start : count[place]])

    for parts in documents:
        read.append(parts)
        count.append(0)
        read_more(len(read) - 1)
        if left <= 0:
            break
    while left > 0 and any(taken < len(parts) for taken, parts in zip(count, read, strict=True)):
        for place in range(len(read)):
            read_more(place)
    return [(parts[:taken], taken == len(parts)) for taken, parts in zip(count, read, strict=True)]


def evaluate(
    model: PreTrainedModel,
    bundle: Bundle,
    held: EvalCorpus,
    rows: Sequence[EvalSetting],
    batch_tokens: int = 4096,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
    weights: WeightFormat | None = None,
) -> list[EvalResult]:
    """Score every row on the held-out text.

    Args:
        model: dense, in evaluation mode.
        bundle: of this model. Moved to each row's densities.
        rows: what to score. A dense row costs nothing extra.
        batch_tokens: positions in one forward pass.
        seed: of the random selection.
        progress: called with the number of tokens after each of the ``passes(rows)`` passes over them.
        weights: format in which the model's count as bytes. None: that which they have.
    Raises:
        UserError: logits that are not finite.
    """
    weights = weights or loaded_format(model)
    evaluation = _Evaluation(model, bundle, rows, held, seed, progress, weights)
    for batch in eval_batches(held, batch_tokens, model.device):
        evaluation.add(batch)
    return evaluation.result(rows)


def passes(rows: Sequence[EvalSetting]) -> int:
    """Forward passes over the text that ``rows`` need, the dense one included. For telling the time it takes."""
    sparse = [row for row in rows if row.selection != "dense"]
    groups = {(row.mlp_density, row.head_density, row.sparse_from) for row in sparse}
    return 1 + len(groups) + sum(row.selection != "predicted" for row in sparse)


@dataclasses.dataclass
class EvalBatch:
    """Windows side by side: ids and targets (B, T), real (B, T) bool, document (B,)."""

    ids: Tensor
    targets: Tensor
    real: Tensor
    document: np.ndarray


def eval_batches(held: EvalCorpus, batch_tokens: int, device: torch.device) -> Iterator[EvalBatch]:
    """Windows of like length together, long ones first, so that little padding is computed and memory shows early."""
    order = sorted(range(len(held.windows)), key=lambda i: -len(held.windows[i]))
    start = 0
    while start < len(order):
        width = len(held.windows[order[start]]) - 1
        stop = start + max(1, batch_tokens // width)
        chosen = order[start:stop]
        ids = torch.zeros(len(chosen), width, dtype=torch.long)
        targets, real = ids.clone(), torch.zeros(len(chosen), width, dtype=torch.bool)
        for place, index in enumerate(chosen):
            window = torch.tensor(held.windows[index])
            ids[place, : len(window) - 1] = window[:-1]
            targets[place, : len(window) - 1] = window[1:]
            real[place, : len(window) - 1] = True
        document = np.array([held.document[index] for index in chosen])
        # Padding stands on the right and attention is causal, so no attention mask is needed.
        yield EvalBatch(ids.to(device), targets.to(device), real.to(device), document)
        start = stop


class _Evaluation:
    """The passes over one batch, and the sums over all of them."""

    def __init__(
        self,
        model: PreTrainedModel,
        bundle: Bundle,
        rows: Sequence[EvalSetting],
        held: EvalCorpus,
        seed: int,
        progress: Callable[[int], object] | None,
        weights: WeightFormat,
    ) -> None:
        self.model, self.bundle, self.weights = model, bundle, weights
        self.tokens, n_documents = held.tokens, len(held.document_tokens)
        calibrated = (bundle.mean_density(Target.MLP), bundle.mean_density(Target.HEADS))
        keys = dims_of(model.config).keys
        self.scored = {
            row: EvalResult(row, np.zeros(n_documents), {key: SelectionSums() for key in keys}, calibrated=calibrated)
            for row in rows
        }
        self.selections = {row.selection for row in rows}
        self.groups: dict[tuple[float | None, float | None, int], dict[str, EvalSetting]] = {}
        for row in rows:
            if row.selection != "dense":
                key = (row.mlp_density, row.head_density, row.sparse_from)
                self.groups.setdefault(key, {})[row.selection] = row
        self.bundles = {key[:2]: bundle.at(*key[:2]) for key in self.groups}
        self.predicted = PredictorSelector(bundle, model.device, model)
        self.means = bundle.head_means(model.device)
        self.meter = _Meter(model, self.means)
        self.generator = torch.Generator().manual_seed(seed)
        self.progress = progress or (lambda tokens: None)

    def result(self, rows: Sequence[EvalSetting]) -> list[EvalResult]:
        """The sums of all batches added, in the order of ``rows``."""
        for row, quality in self.scored.items():
            if quality.nats.sum() > HIGHEST_NATS * self.tokens:
                raise UserError(
                    f"{row.selection} loses {quality.nats.sum() / self.tokens:.3g} nats a token, of which no perplexity"
                    " is a number; check the model's weights"
                )
            if row.selection == "predicted":
                moved = self.bundles[row.mlp_density, row.head_density]
                quality.mlp_bytes = measured_mlp_share(moved, quality.sums, self.weights, quality.candidates)
        return [self.scored[row] for row in rows]

    @torch.no_grad()
    def add(self, batch: EvalBatch) -> None:
        """Score all rows on one batch: dense, then per pair of densities the predicted selection, then the others."""
        orders = self._dense_pass(batch)
        positions = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)
        for (mlp_density, head_density, sparse_from), rows in self.groups.items():
            sparse = positions >= sparse_from
            self.predicted.bundle = self.bundles[mlp_density, head_density]
            counts: dict[UnitKey, Tensor] = {}
            self._sparse_pass(batch, self.predicted, sparse, rows.get("predicted"), counts)
            for name, row in rows.items():
                if name != "predicted":
                    order = orders[name]
                    given = FixedSelections(
                        {key: keep_top(order[key].to(count.device), count) for key, count in counts.items()}
                    )
                    self._sparse_pass(batch, given, sparse, row)

    def _dense_pass(self, batch: EvalBatch) -> dict[str, dict[UnitKey, Tensor]]:
        """Score the dense row. Returns for each yardstick in which order it takes units: (B, T, n) or (n,)."""
        orders: dict[str, dict[UnitKey, Tensor]] = {name: {} for name in self.selections}

        def count_active(layer: int, got: dict[str, Tensor]) -> None:
            for row, quality in self.scored.items():
                if row.selection == "dense" and "activation" in got:
                    sums = quality.sums[UnitKey(layer, Target.MLP)]
                    self.meter.add(sums, layer, Target.MLP, None, got["activation"], batch.real)

        def rank_contributions(layer: int, got: dict[str, Tensor]) -> None:
            for target in self.bundle.shape.targets_of(layer):
                values = got["activation" if target == Target.MLP else "head_out"]
                orders["oracle"][UnitKey(layer, target)] = ranks(self.meter.contribution(layer, target, values))

        if "oracle" in self.selections:
            with record(self.model, {"activation", "head_out"}, on_layer=rank_contributions):
                nats = window_nats(self.model, batch)
        elif not self.bundle.specs:  # of a model without predictors: what they could select
            with record(self.model, {"activation"}, on_layer=count_active):
                nats = window_nats(self.model, batch)
        else:
            nats = window_nats(self.model, batch)
        for row, quality in self.scored.items():
            if row.selection == "dense":
                np.add.at(quality.nats, batch.document, nats)
        for layer, target in self.bundle.specs:
            if "noncontextual" in self.selections and UnitKey(layer, target) not in orders["noncontextual"]:
                alone = noncontextual_contributions(self.model, batch.ids, layer, self.means.get(layer))
                alone = {name: values for name, values in alone.items() if name in self.bundle.targets}
                orders["noncontextual"] |= {UnitKey(layer, name): ranks(values) for name, values in alone.items()}
            if "static" in self.selections:
                frequency = self.bundle.frequency(layer, target)
                orders["static"][UnitKey(layer, target)] = ranks(frequency).to(batch.ids.device)
            if "random" in self.selections:
                size = (*batch.ids.shape, self.bundle.shape.units(target))
                orders["random"][UnitKey(layer, target)] = random_ranks(size, self.generator, batch.ids.device)
        self.progress(int(batch.real.sum()))
        return orders

    def _sparse_pass(
        self,
        batch: EvalBatch,
        selector: Select,
        sparse: Tensor,
        row: EvalSetting | None,
        counts: dict[UnitKey, Tensor] | None = None,
    ) -> None:
        """One sparse pass. Adds to ``row`` if there is one, and notes in ``counts`` how many units were selected."""
        measured = batch.real & sparse
        quality = None if row is None else self.scored[row]

        def observe(layer: int, target: Target, keep: Tensor | None, values: Tensor) -> None:
            if counts is not None and keep is not None:
                counts[UnitKey(layer, target)] = keep.sum(dim=-1)
            if quality is None:
                return
            self.meter.add(quality.sums[UnitKey(layer, target)], layer, target, keep, values, measured)
            if target == Target.MLP and isinstance(selector, PredictorSelector) and layer in selector.candidates:
                passed = int(selector.candidates[layer][measured.to(selector.candidates[layer].device)].sum())
                quality.candidates[layer] = quality.candidates.get(layer, 0) + passed

        with masking(self.model, selector, None if bool(sparse.all()) else sparse, observe, self.means):
            nats = window_nats(self.model, batch)
        if quality is not None:
            np.add.at(quality.nats, batch.document, nats)
        self.progress(int(batch.real.sum()))


def window_nats(model: PreTrainedModel, batch: EvalBatch) -> np.ndarray:
    """Summed nats of each window's real tokens: (B,) float64. Raises UserError for logits that are not finite."""
    hidden = model.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state
    real = batch.real.flatten()
    flat, targets = hidden.flatten(0, 1)[real.to(hidden.device)], batch.targets.flatten()[real]
    pieces = []
    for states, next_tokens in zip(flat.split(SCORED_AT_ONCE), targets.split(SCORED_AT_ONCE), strict=True):
        logits = logits_of(model, states).float()
        pieces.append(F.cross_entropy(logits, next_tokens.to(logits.device), reduction="none"))
    logs = torch.cat(pieces).double()
    check_logits(logs, model, batch.ids)
    losses = logs.cpu().numpy()
    window = np.repeat(np.arange(len(batch.ids)), batch.real.sum(dim=1).cpu().numpy())
    return np.bincount(window, weights=losses, minlength=len(batch.ids))


class _Meter:
    """Contributions of a model's units, with what depends on the weights only computed once."""

    def __init__(self, model: PreTrainedModel, means: Mapping[int, Tensor]) -> None:
        self.means = means
        self.blocks, self.kind = blocks_of(model), dims_of(model.config).activation
        self.norms: dict[int, Tensor] = {}
        self.grams: dict[int, Tensor] = {}
        for layer, block in enumerate(self.blocks):
            if block.down is not None:
                self.norms[layer] = torch.linalg.vector_norm(block.down.weight.float(), dim=0)
            if block.out is not None:
                self.grams[layer] = output_gram(block.out.weight, block.n_groups)

    def contribution(self, layer: int, target: Target, values: Tensor) -> Tensor:
        """Contribution of each unit, for what neurons or heads give."""
        if target == Target.MLP:
            return values.float().abs() * self.norms[layer]
        weight = self.blocks[layer].out.weight
        return head_contribution(values, weight, self.grams[layer], self.means.get(layer))

    def add(
        self, sums: SelectionSums, layer: int, target: Target, keep: Tensor | None, values: Tensor, measured: Tensor
    ) -> None:
        """Add the measured positions (B, T) bool of a pass: ``keep`` (B, T, n), ``values`` as ``masking`` gives them.

        A neuron is active as :func:`active_neurons` says of this layer, given its (sparse) input, before zeroing. A
        head has no such notion: the "active" ones are as many as were selected, those with the largest contributions.
        """
        measured = measured.to(values.device)
        if not bool(measured.all()):
            values, keep = values[measured], None if keep is None else keep[measured]
        if target == Target.MLP:
            values = values.flatten(0, -2).abs()
            kept = values if keep is None else torch.where(keep.flatten(0, -2), values, 0.0)
            # Sums over positions first: the contribution of a neuron is its activation times a constant.
            norms = self.norms[layer].double()
            mass, held = (float(v.float().sum(0).double() @ norms) for v in (values, kept))
            if self.kind in SMOOTH:
                needed = active_neurons(self.kind, values, self.norms[layer])
                active, hit = int(needed.sum()), int((needed & (kept != 0)).sum())
            else:
                active, hit = int(values.count_nonzero()), int(kept.count_nonzero())
            units = values.numel()
        else:
            contribution = self.contribution(layer, target, values).flatten(0, -2)
            chosen = torch.ones_like(contribution, dtype=torch.bool) if keep is None else keep.flatten(0, -2)
            largest = keep_top(ranks(contribution), chosen.sum(-1))
            mass, held = float(contribution.double().sum()), float((contribution * chosen).double().sum())
            active, hit = int(largest.sum()), int((largest & chosen).sum())
            units = contribution.numel()
        selected = units if keep is None else int(keep.sum())
        sums.tp += hit
        sums.fp += selected - hit
        sums.fn += active - hit
        sums.units += units
        sums.kept += held
        sums.mass += mass


def increase(sparse: np.ndarray, dense: np.ndarray, tokens: Sequence[int], seed: int = 0) -> tuple[float, float | None]:
    """Increase of perplexity as a fraction, and its error: a paired bootstrap over documents.

    Args:
        sparse, dense: summed nats per document.
        tokens: per document.
    Returns: the increase, and the standard deviation over resampled sets of documents. None with one document.

    >>> increase(np.array([2.2, 4.4]), np.array([2.0, 4.0]), [10, 20])[0]  # doctest: +ELLIPSIS
    0.0202...
    """
    difference, counts = sparse - dense, np.asarray(tokens, dtype=np.float64)
    value = math.expm1(difference.sum() / counts.sum())
    if len(counts) < 2:
        return value, None
    picks = np.random.default_rng(seed).integers(len(counts), size=(BOOTSTRAPS, len(counts)))
    resampled = np.expm1(difference[picks].sum(axis=1) / counts[picks].sum(axis=1))
    return value, float(resampled.std(ddof=1))
