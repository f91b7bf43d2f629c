"""Makes the gradients of one step of tuning: from a model that is in memory, or a layer at a time.

By layers a step is one walk up and one down, with all its passes, so weights are read twice a step. Upwards each pass
goes through a layer dense and sparse, and what the sparse one reads is kept. Downwards a layer runs again from there,
with its graph, and hands the gradient to the layer below. What a later layer's predictor reads of an earlier layer
has a gradient of its own on the way. The arithmetic is that of a model in memory, call for call.

Letters: B windows, T positions, d model width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.calibration.by_layers import run_of_layer
from dejavu_train.calibration.sensitivity import DenseRun, run_layer
from dejavu_train.families import Site
from dejavu_train.ground import signals
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.training.gates import Gates, Sites

Loss = Callable[[Tensor, Tensor], Tensor]
"""Loss to minimise, of the divergence and the bytes that a pass spent."""


class UnfinishedStep(Exception):
    """A signal came within a step, which is given up."""


class Passes(Protocol):
    """Maker of a step's gradients."""

    def gradients(self, batches: Sequence[Sequence[Sequence[int]]], loss: Loss) -> list[tuple[float, float]]:
        """Add those of ``loss`` over all batches of (B, T) token ids to the predictors. Divergence and bytes of each.

        Raises:
            UnfinishedStep: a signal waits.
        """


def divergence(dense: Tensor, sparse: Tensor) -> Tensor:
    """Mean KL(dense || sparse) of the next-token distributions of logits (B, T, V), in nats."""
    with torch.no_grad():
        dense = F.log_softmax(dense.float(), dim=-1)
    sparse = F.log_softmax(sparse.float(), dim=-1)
    dense = dense.to(sparse.device)
    return (dense.exp() * (dense - sparse)).sum(-1)[:, :-1].mean()


class WholePasses:
    """Passes of a model in memory, on one device or spread over several."""

    def __init__(self, model: Any, gates: Gates) -> None:
        self.model, self.gates = model, gates
        self.layers = range(len(gates.blocks))
        for layer in self.layers:
            gates.place(layer)

    def gradients(self, batches: Sequence[Sequence[Sequence[int]]], loss: Loss) -> list[tuple[float, float]]:
        return [self._pass(torch.tensor(batch, device=next(self.model.parameters()).device), loss) for batch in batches]

    def _pass(self, ids: Tensor, loss: Loss) -> tuple[float, float]:
        with torch.no_grad():
            dense = self.model(input_ids=ids, use_cache=False).logits
        with self.gates.on((ids.shape[0], ids.shape[1]), self.layers, {}):
            sparse = self.model(input_ids=ids, use_cache=False).logits
        nats = divergence(dense, sparse)
        spent = torch.stack([each.to(nats.device) for each in self.gates.spent]).sum()
        loss(nats, spent).backward()
        return float(nats.detach()), float(spent.detach())


@dataclass
class _Pass:
    """One pass of a step on its way: upwards its states, downwards their gradients.

    Attributes:
        ids: (B, T) on the device.
        dense, sparse: (B, T, d) in front of the next layer.
        inputs: by layer what the sparse pass read, on the CPU.
        sites: what later layers' predictors read, on the CPU.
        spent: bytes per token, by layer.
        behind: the gradient at what the layer gives.
        of_sites: gradients of ``sites``, and ``of_spent`` that of each of ``spent``.
    """

    ids: Tensor
    dense: Tensor | None = None
    sparse: Tensor | None = None
    inputs: dict[int, Tensor] = field(default_factory=dict)
    sites: Sites = field(default_factory=dict)
    spent: list[Tensor] = field(default_factory=list)
    behind: Tensor | None = None
    of_sites: dict[Site, Tensor] = field(default_factory=dict)
    of_spent: Tensor | None = None
    made: tuple[float, float] = (0.0, 0.0)


class LayerPasses:
    """Passes of a model of which one layer at a time is on the device. So are predictors, at home on the CPU."""

    def __init__(self, walk: LayerWalk, gates: Gates) -> None:
        self.walk, self.gates, self.model = walk, gates, walk.model

    def gradients(self, batches: Sequence[Sequence[Sequence[int]]], loss: Loss) -> list[tuple[float, float]]:
        passes = [_Pass(torch.tensor(batch, device=self.walk.device)) for batch in batches]
        last = len(self.walk.layers) - 1
        for layer in range(last):
            self._turn(layer, 1, [self._up], passes)
        self._turn(last, -1, [self._up, lambda _, each: self._behind(each, loss), self._down], passes)
        for layer in reversed(range(last)):
            self._turn(layer, -1 if layer else 0, [self._down], passes)  # the next step begins with layer 0 again
        return [each.made for each in passes]

    def _turn(self, layer: int, step: int, works: Sequence[Callable[[int, _Pass], None]], passes: list[_Pass]) -> None:
        with self.walk.layer(layer, step), self.gates.placed(layer):
            for work in works:
                for each in passes:
                    if signals.pending():
                        raise UnfinishedStep
                    work(layer, each)

    @torch.no_grad()
    def _up(self, layer: int, each: _Pass) -> None:
        run = self._run(layer, each)
        if layer == 0:
            each.dense = each.sparse = run.calls[0][0][0]
        assert each.dense is not None and each.sparse is not None
        each.inputs[layer] = each.sparse.cpu()
        each.dense = run_layer(self.model, run, layer, each.dense)
        sites = self._sites_ahead(layer, each)
        each.sparse = self._gated(run, layer, each.sparse, sites)
        each.sites |= {site: sites[site].cpu() for site in self.gates.read_later(layer)}
        each.spent += self.gates.spent

    def _behind(self, each: _Pass, loss: Loss) -> None:
        """The divergence, and its gradients behind the last layer."""
        assert each.dense is not None and each.sparse is not None
        dense, sparse = each.dense, each.sparse.requires_grad_()
        with torch.no_grad():
            logits = self.walk.logits(each.ids, lambda: dense)
        nats = divergence(logits, self.walk.logits(each.ids, lambda: sparse))
        spent = torch.stack(each.spent).sum().requires_grad_()
        each.behind, each.of_spent = torch.autograd.grad(loss(nats, spent), (sparse, spent))
        each.made = float(nats.detach()), float(spent.detach())
        each.dense = each.sparse = None

    def _down(self, layer: int, each: _Pass) -> None:
        run = self._run(layer, each)
        hidden = each.inputs.pop(layer).to(self.walk.device).requires_grad_()
        ahead = {site: values.requires_grad_() for site, values in self._sites_ahead(layer, each).items()}
        sites, later = dict(ahead), self.gates.read_later(layer)
        ends = {self._gated(run, layer, hidden, sites): each.behind}
        ends |= {sites[site]: each.of_sites.pop(site) for site in later if site in each.of_sites}
        ends |= dict.fromkeys(self.gates.spent, each.of_spent)
        torch.autograd.backward(list(ends), list(ends.values()))
        each.behind = hidden.grad
        for site, values in ahead.items():
            if values.grad is not None:  # heads are selected without one
                before = each.of_sites.get(site)
                each.of_sites[site] = values.grad if before is None else before + values.grad
        for site in later:
            each.sites.pop(site)

    @torch.no_grad()
    def _run(self, layer: int, each: _Pass) -> DenseRun:
        return run_of_layer(self.walk, each.ids, layer)

    def _sites_ahead(self, layer: int, each: _Pass) -> Sites:
        return {site: each.sites[site].to(self.walk.device) for site in self.gates.read_ahead(layer)}

    def _gated(self, run: DenseRun, layer: int, hidden: Tensor, sites: Sites) -> Tensor:
        with self.gates.on((hidden.shape[0], hidden.shape[1]), [layer], sites):
            return run_layer(self.model, run, layer, hidden)
