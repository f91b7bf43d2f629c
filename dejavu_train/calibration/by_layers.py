"""Losses of heads and sensitivities of a model larger than its device: a layer runs on all windows, then the next one.

What a window has between two layers lies on the disk. Losses of heads need the gradient of the whole loss. So weights
are read twice for them: upwards for every layer's input, downwards for the gradient. Sensitivities need one reading.
Each row that a probe made sparse goes through the layers above it beside the dense one. So the states grow with the
layers, for every token to a row for each threshold of every layer. The arithmetic is that of a model in memory, call
for call.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dejavu_train.calibration.head_losses import (
    Chosen,
    Draw,
    Measured,
    check_finite,
    feature,
    gradient_of_labels,
    losses_of_layer,
)
from dejavu_train.calibration.sensitivity import (
    DenseRun,
    SensitivityProbe,
    divergence,
    next_log_probabilities,
    run_layer,
    run_rows,
    run_sparse,
)
from dejavu_train.calibration.states import States, digest_of
from dejavu_train.families import LayerInput, Site, UnitKey, blocks_of
from dejavu_train.models.hooks import at_place, hooked
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.progress import Progress

Windows = Sequence[Sequence[int]]


class ByLayers:
    """A model that is walked through layer by layer.

    Args:
        folder: of the states. It may hold those of a calibration that was killed.
        weight_hash: of the model.
    """

    def __init__(self, walk: LayerWalk, folder: Path, weight_hash: str) -> None:
        self.walk, self.folder, self.weight_hash = walk, folder, weight_hash

    def states(self, stage: str, *identity: Any) -> States:
        return States(self.folder / stage, [self.weight_hash, str(self.walk.dtype), *identity])

    def remove_states(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def ids(self, window: Sequence[int]) -> Tensor:
        """(1, T) on the device."""
        return torch.tensor([list(window)], device=self.walk.device)

    def layers(self, numbers: Sequence[int], what: str) -> Iterator[int]:
        """Each layer in turn on the device."""
        if not numbers:
            return
        step = -1 if numbers[0] > numbers[-1] else 1
        with Progress(what, len(numbers), "layer") as progress:
            for number in numbers:
                with self.walk.layer(number, step):
                    yield number
                progress.update()

    def run(self, ids: Tensor, layer: int, hidden: Tensor | None) -> DenseRun:
        """The layer's call for ids (1, T) and hidden (1, T, d). None: what the first layer reads."""
        given, (args, kwargs) = self.walk.call(ids, layer)
        calls: list[Any] = [None] * len(self.walk.layers)
        calls[layer] = ((given if hidden is None else hidden, *args), kwargs)
        return DenseRun(calls, {}, torch.empty(0))

    def dense(self, run: DenseRun, layer: int) -> Tensor:
        """(1, T, d) behind the layer. What predictors may read of it comes to the sites of ``run``."""
        block = blocks_of(self.walk.model)[layer]
        hidden = run.calls[layer][0][0]

        def keep(site: Site, values: Tensor) -> None:
            run.sites[site] = values.reshape(*hidden.shape[:2], -1)

        with hooked([at_place(block, site, partial(keep, Site(layer, site))) for site in LayerInput]):
            return run_layer(self.walk.model, run, layer, hidden)


@torch.no_grad()
def measure_heads(model: ByLayers, chosen: Chosen, means: Mapping[int, Tensor], windows: Windows) -> Measured:
    """As :func:`dejavu_train.calibration.head_losses.measure_whole`."""
    sites = {layer: Site(metadata["site_layer"], metadata["site"]) for layer, (metadata, _) in chosen.items()}
    identity = [list(map(list, windows)), digest_of(used for _, used in chosen.values()), list(map(str, sites.items()))]
    states = model.states("heads", *identity, [means[layer].tolist() for layer in sorted(means)])
    _inputs_of_layers(model, states, chosen, sites, windows)
    _gradients_of_layers(model, states, chosen, means, windows)

    def together(name: str) -> dict[int, Tensor]:
        numbers = range(len(windows))
        return {layer: torch.cat([states.read(f"{w}-{name}-{layer}", "cpu") for w in numbers]) for layer in chosen}

    return together("feature"), together("losses")


def _inputs_of_layers(
    model: ByLayers, states: States, chosen: Chosen, sites: Mapping[int, Site], windows: Windows
) -> None:
    """Upwards: what each layer reads, and the features of predictors."""
    n_layers, device = len(model.walk.layers), model.walk.device
    done = [states.layer(f"{w}-done") or 0 for w in range(len(windows))]  # the first layer that did not run
    for layer in model.layers(range(min(done), n_layers), "running what heads cost"):
        for w in [w for w in range(len(windows)) if done[w] == layer]:
            hidden = states.read(f"{w}-input-{layer}", device) if layer else None
            run = model.run(model.ids(windows[w]), layer, hidden)
            states.write(f"{w}-input-{layer + 1}", layer + 1, model.dense(run, layer))
            if layer == 0:
                states.write(f"{w}-input-0", 0, run.calls[0][0][0])
            for target in [target for target, site in sites.items() if site.layer == layer]:
                made = feature(chosen[target][1], run.sites[sites[target]])
                states.write(f"{w}-feature-{target}", layer, made)
            done[w] = layer + 1
            states.write(f"{w}-done", done[w], torch.empty(0))


def _gradients_of_layers(
    model: ByLayers, states: States, chosen: Chosen, means: Mapping[int, Tensor], windows: Windows
) -> None:
    """Downwards: the gradient at what each layer reads, and the losses of its heads."""
    n_layers, device = len(model.walk.layers), model.walk.device
    numbers = range(len(windows))
    if any(states.layer(f"{w}-gradient") is None for w in numbers):
        draw = Draw()  # from one window to the next, so all are drawn anew
        for w in numbers:
            hidden = states.read(f"{w}-input-{n_layers}", device)
            labels = draw(next_log_probabilities(model.walk.model, hidden))
            states.write(f"{w}-gradient", n_layers, gradient_of_labels(model.walk.model, hidden, labels))
    done = [states.layer(f"{w}-gradient") or 0 for w in numbers]  # the layer in front of which it stands
    for layer in model.layers(range(max(done) - 1, -1, -1), "measuring what heads cost"):
        for w in [w for w in numbers if done[w] == layer + 1]:
            run = model.run(model.ids(windows[w]), layer, states.read(f"{w}-input-{layer}", device))
            gradient = states.read(f"{w}-gradient", device)
            gradient, losses = losses_of_layer(model.walk.model, run, layer, means[layer], gradient)
            if layer in chosen:
                check_finite(layer, losses)
                states.write(f"{w}-losses-{layer}", layer, losses)
            done[w] = layer
            states.write(f"{w}-gradient", layer, gradient)
            states.remove(f"{w}-input-{layer + 1}")


@torch.no_grad()
def loss_increases_by_layers(
    model: ByLayers, probes: Mapping[UnitKey, SensitivityProbe], windows: Windows
) -> dict[UnitKey, list[float]]:
    """As :func:`dejavu_train.calibration.sensitivity.loss_increases`."""
    about = [
        [*key, str(probe.site), list(probe.thresholds), digest_of([probe.predictor])] for key, probe in probes.items()
    ]
    states = model.states("sensitivities", list(map(list, windows)), about)
    device = model.walk.device
    done = [states.layer(f"{w}-dense") or 0 for w in range(len(windows))]
    for layer in model.layers(range(min(done), len(model.walk.layers)), "measuring sensitivities"):
        for w, window in enumerate(windows):
            if done[w] == layer:
                _advance(model, states, layer, w, window, probes)
                done[w] += 1
    sums = {key: torch.zeros(len(probe.thresholds), dtype=torch.float64) for key, probe in probes.items()}
    for w in range(len(windows)):
        dense = next_log_probabilities(model.walk.model, states.read(f"{w}-dense", device))
        for key in probes:
            hidden = states.read(_name(w, key), device)
            sums[key] += divergence(model.walk.model, dense, hidden).double().sum(dim=1).cpu()
    tokens = sum(len(window) - 1 for window in windows)
    return {key: (total / max(tokens, 1)).tolist() for key, total in sums.items()}


def _advance(
    model: ByLayers,
    states: States,
    layer: int,
    w: int,
    window: Sequence[int],
    probes: Mapping[UnitKey, SensitivityProbe],
) -> None:
    """Take what window ``w`` has in front of a layer behind it. The dense states come last: with them all is done."""
    whole, device = model.walk.model, model.walk.device
    run = model.run(model.ids(window), layer, states.read(f"{w}-dense", device) if layer else None)
    for key in probes:
        if key[0] < layer and states.layer(_name(w, key)) == layer:
            rows = run_rows(whole, run, layer, states.read(_name(w, key), device))
            states.write(_name(w, key), layer + 1, rows)
    behind = model.dense(run, layer)
    for key, probe in probes.items():
        read_later = probe.site.layer == layer < key[0]
        if read_later:
            states.write(f"{w}-site-{layer}-{probe.site.input}", layer, run.sites[probe.site])
        if key[0] == layer:
            if probe.site not in run.sites:
                run.sites[probe.site] = states.read(f"{w}-site-{probe.site.layer}-{probe.site.input}", device)
            states.write(_name(w, key), layer + 1, run_sparse(whole, run, key, probe))
            probe.predictor.cpu()
    states.write(f"{w}-dense", layer + 1, behind)


def _name(w: int, key: UnitKey) -> str:
    return f"{w}-{key[0]}-{key[1]}"
