"""Scores a text with the best neurons or heads of every token alone, and counts how many neurons a token needs.

All selections run side by side, the dense model first among them. The oracle of a survey keeps what contributes most
in the sparse pass itself. The row ``oracle`` of ``infer.py`` keeps what contributes most in the dense pass. Where
little is lost both are alike. A skipped head gives its mean over the text.

Letters: W windows, S selections, T positions, d model width, n neurons, h heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.data.untrained import warn_of_logits
from dejavu_train.evaluation.perplexity import EvalCorpus, eval_batches
from dejavu_train.extras.survey.decoder import DecoderParts, routed_experts, rows_in
from dejavu_train.extras.survey.layerwise import LayerRunner
from dejavu_train.families import Target
from dejavu_train.families.dims import CARRIED
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import replacing
from dejavu_train.ground.progress import Progress
from dejavu_train.models.hooks import at_module, head_contribution, hooked, output_gram

SAVED_EVERY = 60.0  # seconds between two states on the disk


@dataclass(frozen=True)
class Selection:
    """Share that one row keeps. ``target`` None: everything."""

    target: Target | None = None
    share: float = 1.0

    def count(self, parts: DecoderParts) -> int:
        """How many neurons or head groups are kept of a layer."""
        total = parts.d_ffn if self.target == Target.MLP else parts.groups
        return max(1, min(total, round(self.share * total)))

    def kept(self, parts: DecoderParts) -> float:
        """The share that ``count`` comes to."""
        return self.count(parts) / (parts.d_ffn if self.target == Target.MLP else parts.groups)


@dataclass
class LayerNeeds:
    """Needs of one layer, means over tokens of the dense pass.

    Attributes:
        nonzero: share of neurons that are not exactly zero.
        needed: share of neurons that carry ``CARRIED`` of the contribution, the largest first.
        mass: by the share of neurons that is kept, the share of the contribution that they carry.
        experts: (E, 2), of routed experts: tokens that chose one, and the sum of their shares of nonzero neurons in it.
    """

    nonzero: float
    needed: float
    mass: dict[float, float]
    experts: Tensor


@dataclass
class SurveyResult:
    """``nats`` (S, D): summed per selection and document. layers: by number those with neurons. experts: a row each."""

    selections: list[Selection]
    layers: dict[int, LayerNeeds]
    experts: list[dict[str, Any]]
    nats: np.ndarray


class Survey:
    """One survey of a model on a text. Goes on where an earlier one of the same ``identity`` was interrupted.

    Args:
        runner: of the model's layers.
        selections: the dense one first.
        state: file of what is done so far. ``identity``: of model, text and selections.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        runner: LayerRunner,
        parts: DecoderParts,
        held: EvalCorpus,
        selections: Sequence[Selection],
        state: Path,
        identity: str,
        clock: Callable[[], float],
    ) -> None:
        self.runner, self.parts, self.held, self.selections = runner, parts, held, list(selections)
        self.state, self.clock = state, clock
        self.identity = f"{identity}, windows by length"  # in the order of the text, they were of earlier versions
        room = len(held.windows) * max(map(len, held.windows))
        (whole,) = eval_batches(held, room, torch.device("cpu"))
        self.ids, self.targets, self.real, self.document = whole.ids, whole.targets, whole.real, whole.document

    @torch.no_grad()
    def run(self) -> SurveyResult:
        """All layers, then the logits. Raises :class:`UserError` for logits that are not finite."""
        hidden = self.runner.embed(self.ids, len(self.selections))
        done, stored = self._load()
        hidden = hidden if stored is None else stored
        windows = len(self.ids)
        saved = self.clock()
        total = (self.parts.n_layers + 1) * windows
        with Progress("surveying", total, "window", done=len(done) * windows) as bar:
            for number in range(len(done), self.parts.n_layers):
                bar.describe(f"layer {number + 1} of {self.parts.n_layers}")
                done.append(self._layer(number, hidden, bar.update))
                if self.clock() - saved > SAVED_EVERY:
                    self._save(done, hidden)
                    saved = self.clock()
            bar.describe("scoring")
            nats = self._score(hidden, bar.update)
        self.state.unlink(missing_ok=True)
        layers = self.parts.layers_of(Target.MLP)
        counted = [(i, n, *sums) for i, each in enumerate(done) for n, sums in enumerate(each.experts.tolist())]
        experts = [dict(layer=i, expert=n, tokens=int(t), nonzero=fired / t) for i, n, t, fired in counted if t]
        return SurveyResult(self.selections, {number: done[number] for number in layers}, experts, nats)

    def _layer(self, number: int, hidden: Tensor, update: Callable[[int], object]) -> LayerNeeds:
        """Send (W, S, T, d) through one layer, in place."""
        counts = _Counts({each.share: 0.0 for each in self.selections if each.target == Target.MLP}, self.parts.experts)
        real = torch.empty(0, dtype=torch.bool)

        def keep_heads(weight: Tensor, gram: Tensor, mean: Tensor, values: Tensor) -> Tensor:
            grouped = values.view(len(self.selections), -1, *mean.shape)
            kept = self._kept(head_contribution(grouped, weight, gram, mean), Target.HEADS)
            return torch.where(kept.unsqueeze(-1), grouped, mean).reshape(values.shape)

        def keep_neurons(norms: Tensor, values: Tensor) -> Tensor:
            rows = values.view(len(self.selections), -1, self.parts.d_ffn)
            contribution = rows.abs() * norms
            counts.add(rows[0][real], contribution[0][real])
            return (rows * self._kept(contribution, Target.MLP)).view_as(values)

        def note_experts(experts: Any, given: Any) -> None:
            counts.add_experts(experts, *(each[: len(real)][real] for each in given[:2]))

        with self.runner.layer(number) as (layer, call):
            acts: list[tuple[Any, Any]] = []
            if self.parts.out[number]:
                out = layer.get_submodule(self.parts.out[number])
                gram, mean = output_gram(rows_in(out), self.parts.groups), self._head_means(hidden, out, call)
                acts.append((out, partial(keep_heads, rows_in(out), gram, mean)))
            if self.parts.down[number]:
                down = layer.get_submodule(self.parts.down[number])
                acts.append((down, partial(keep_neurons, torch.linalg.vector_norm(rows_in(down).float(), dim=0))))
            handles = [at_module(module, "input", act) for module, act in acts]
            if (experts := routed_experts(layer)) is not None:  # the rows of the dense pass come first
                handles.append(experts.register_forward_pre_hook(note_experts))
            with hooked(handles):
                for window in range(len(hidden)):
                    real = self.real[window].to(hidden.device)
                    hidden[window] = call(hidden[window])
                    update(1)
        return counts.means()

    def _head_means(self, hidden: Tensor, out: Any, call: Callable[[Tensor], Tensor]) -> Tensor:
        """(g, h / g * e), the mean over tokens of what each group's heads give in the dense pass."""
        total = torch.zeros(
            self.parts.groups, rows_in(out).shape[1] // self.parts.groups, device=hidden.device, dtype=torch.float32
        )

        def add(values: Tensor) -> None:
            total.add_(values.view(len(self.real[0]), *total.shape)[self.real[window].to(hidden.device)].sum(0))

        with hooked([at_module(out, "input", add)]):
            for window in range(len(hidden)):
                call(hidden[window, :1])
        return total / self.real.sum().to(hidden.device)

    def _kept(self, contribution: Tensor, target: Target) -> Tensor:
        """(S, T, u) bool, what every selection keeps of units that contribute (S, T, u)."""
        keep = torch.ones_like(contribution, dtype=torch.bool)
        for row, each in enumerate(self.selections):
            if each.target == target:
                largest = contribution[row].topk(each.count(self.parts), sorted=False).indices
                keep[row] = torch.zeros_like(keep[row]).scatter_(-1, largest, True)
        return keep

    def _score(self, hidden: Tensor, update: Callable[[int], object]) -> np.ndarray:
        nats = np.zeros((len(self.selections), len(self.held.document_tokens)))
        for window, document in enumerate(self.document):
            real = self.real[window]
            for row in range(len(self.selections)):
                logits = self.runner.logits(self.ids[window : window + 1], hidden[window, row : row + 1])
                if window == row == 0:
                    ids = self.ids[0][real].numpy()
                    warn_of_logits(logits.shape[-1], [ids], [logits[:, : len(ids)]])
                losses = F.cross_entropy(logits[0].cpu()[real], self.targets[window][real], reduction="none")
                if not bool(losses.isfinite().all()):
                    raise UserError("the model gives logits that are not finite; check its weights")
                nats[row, document] += float(losses.double().sum())
            update(1)
        return nats

    def _save(self, done: Sequence[LayerNeeds], hidden: Tensor) -> None:
        rows = [[each.nonzero, each.needed, *each.mass.values()] for each in done]
        tensors = {"hidden": hidden.cpu(), "needs": torch.tensor(rows, dtype=torch.float32)}
        tensors["experts"] = torch.stack([each.experts for each in done])
        with replacing(self.state) as temporary:
            save_file(tensors, str(temporary), {"identity": self.identity})

    def _load(self) -> tuple[list[LayerNeeds], Tensor | None]:
        """State of an interrupted survey: layers, and the hidden states behind the last of them."""
        try:
            with safe_open(str(self.state), "pt") as stored:
                if (stored.metadata() or {}).get("identity") != self.identity:
                    return [], None
                needs, experts, hidden = map(stored.get_tensor, ("needs", "experts", "hidden"))
        except (OSError, SafetensorError):  # none, or one that was cut off
            return [], None
        shares = [each.share for each in self.selections if each.target == Target.MLP]
        rows = zip(needs.tolist(), experts, strict=True)
        layers = [LayerNeeds(a, b, dict(zip(shares, mass, strict=True)), each) for (a, b, *mass), each in rows]
        return layers, hidden.to(self.runner.device)


class _Counts:
    """Sums over the tokens of a layer."""

    def __init__(self, mass: dict[float, float], experts: int) -> None:
        self.tokens, self.nonzero, self.needed, self.mass = 0, 0.0, 0.0, mass
        self.experts = torch.zeros(experts, 2, dtype=torch.float64)

    def add(self, values: Tensor, contribution: Tensor) -> None:
        """Neurons (N, n) of tokens, and what they contribute."""
        running = contribution.sort(-1, descending=True).values.cumsum(-1)
        whole, n = running[:, -1:], values.shape[-1]
        silent = whole <= 0  # tokens that need no neuron
        self.tokens += len(values)
        self.nonzero += float((values != 0).double().mean(-1).sum())
        needed = ((running < CARRIED * whole).sum(-1) + 1).clamp_max(n).double() / n
        self.needed += float(needed.masked_fill(silent[:, 0], 0).sum())
        for share in self.mass:
            last = max(1, min(n, round(share * n))) - 1
            self.mass[share] += float((running[:, last : last + 1] / whole).masked_fill(silent, 1).double().sum())

    def add_experts(self, experts: Any, x: Tensor, chosen: Tensor) -> None:
        """Count of what fires. x: what experts read of tokens, (N, d). chosen: numbers of each one's, (N, k)."""
        for number in chosen.unique().tolist():
            routed = x[(chosen == number).any(-1)]
            fires = experts.act_fn(F.linear(routed, experts.up_proj[number])) != 0
            self.experts[number] += torch.tensor([len(routed), float(fires.double().mean(-1).sum())])

    def means(self) -> LayerNeeds:
        tokens = max(self.tokens, 1)  # none of a layer without neurons
        mass = {share: each / tokens for share, each in self.mass.items()}
        return LayerNeeds(self.nonzero / tokens, self.needed / tokens, mass, self.experts)
