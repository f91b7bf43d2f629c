"""Losses of heads and sensitivities of a model larger than its device: a layer runs on all windows, then the next one.

What a window has between two layers lies on the disk. Losses of heads need the gradient of the whole loss. So weights
are read twice for them: upwards for every layer's input, downwards for the gradient. Sensitivities need one reading.
Each row that a probe made sparse goes through the layers above it beside the dense one. So the states grow with the
layers, for every token to a row for each threshold of every layer. The arithmetic is that of a model in memory, call
for call.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dejavu_train.calibration.head_losses import (
    Draw,
    HeadPredictors,
    Measured,
    check_finite,
    feature,
    gradient_of_labels,
    losses_of_layer,
)
from dejavu_train.calibration.parts import Plan, read_plan
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
from dejavu_train.families import LayerInput, Site, Target, UnitKey, blocks_of
from dejavu_train.ground.progress import Progress
from dejavu_train.models.hooks import at_place, hooked
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.models.load import resolve_device

logger = logging.getLogger(__name__)
Windows = Sequence[Sequence[int]]
INPUTS, GRADIENTS, SENSITIVITIES = "inputs", "gradients", "sensitivities"  # what processes share


@dataclass(frozen=True)
class Sharing:
    """How several processes are started.

    Attributes:
        model: folder or hub id. device, dtype: as configured.
        start: called with a stage's folder, and what of it is shared. Returns when all processes have ended.
    """

    model: str
    revision: str | None
    device: str
    dtype: str
    start: Callable[[Path, str], None]


class ByLayers:
    """A model that is walked through layer by layer.

    Args:
        folder: of the states. It may hold those of a calibration that was killed.
        weight_hash: of the model.
        sharing: None runs all windows here.
        part: the number of this process among those that share the windows, and how many these are.
    """

    def __init__(
        self,
        walk: LayerWalk,
        folder: Path,
        weight_hash: str,
        sharing: Sharing | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.walk, self.folder, self.weight_hash, self.sharing, self.part = walk, folder, weight_hash, sharing, part

    def own(self, windows: Windows) -> list[int]:
        """The numbers of the windows that this process runs."""
        return own_windows(len(windows), self.part)

    def share(self, states: States, what: str, plan: Plan) -> None:
        """Have processes do what they can of a stage, each for its windows. What is missing then is for the caller."""
        if self.sharing is None or len(plan.windows) < 2:
            return
        if not plan.is_shareable:
            logger.info("calibrating in one process: predictors of a class of yours stay where they are")
            return
        about = {name: getattr(self.sharing, name) for name in ("model", "revision", "device", "dtype")}
        plan.save(states.folder, about)
        self.sharing.start(states.folder, what)

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
        """As :func:`run_of_layer`, for ids (1, T)."""
        return run_of_layer(self.walk, ids, layer, hidden)

    def dense(self, run: DenseRun, layer: int) -> Tensor:
        """(1, T, d) behind the layer. What predictors may read of it comes to the sites of ``run``."""
        block = blocks_of(self.walk.model)[layer]
        hidden = run.calls[layer][0][0]

        def keep(site: Site, values: Tensor) -> None:
            run.sites[site] = values.reshape(*hidden.shape[:2], -1)

        with hooked([at_place(block, site, partial(keep, Site(layer, site))) for site in block.inputs]):
            return run_layer(self.walk.model, run, layer, hidden)


def run_of_layer(walk: LayerWalk, ids: Tensor, layer: int, hidden: Tensor | None = None) -> DenseRun:
    """The layer's call for ids (B, T) and hidden (B, T, d). None: what the first layer reads."""
    given, (args, kwargs) = walk.call(ids, layer)
    calls: list[Any] = [None] * len(walk.layers)
    calls[layer] = ((given if hidden is None else hidden, *args), kwargs)
    return DenseRun(calls, {}, torch.empty(0, dtype=torch.float32))


@torch.no_grad()
def measure_heads(model: ByLayers, chosen: HeadPredictors, means: Mapping[int, Tensor], windows: Windows) -> Measured:
    """As :func:`dejavu_train.calibration.head_losses.measure_whole`."""
    sites = {layer: Site(metadata["site_layer"], metadata["site"]) for layer, (metadata, _) in chosen.items()}
    identity = [list(map(list, windows)), digest_of(used for _, used in chosen.values()), list(map(str, sites.items()))]
    states = model.states("heads", *identity, [means[layer].tolist() for layer in sorted(means)])
    probes = {
        UnitKey(layer, Target.HEADS): SensitivityProbe(
            used, Site(sites[layer].layer, LayerInput(sites[layer].input)), ()
        )
        for layer, (_, used) in chosen.items()
    }
    plan = Plan(windows, probes, means)
    model.share(states, INPUTS, plan)
    _inputs_of_layers(model, states, plan)
    _gradients_behind(model, states, windows)
    model.share(states, GRADIENTS, plan)
    _gradients_of_layers(model, states, plan)

    def together(name: str) -> dict[int, Tensor]:
        numbers = range(len(windows))
        return {layer: torch.cat([states.read(f"{w}-{name}-{layer}", "cpu") for w in numbers]) for layer in chosen}

    return together("feature"), together("losses")


def _inputs_of_layers(model: ByLayers, states: States, plan: Plan) -> None:
    """Upwards: what each layer reads, and the features of predictors."""
    n_layers, device = len(model.walk.layers), model.walk.device
    done = {w: states.layer(f"{w}-done") or 0 for w in model.own(plan.windows)}  # the first layer that did not run
    for layer in model.layers(range(min(done.values()), n_layers), "running what heads cost"):
        for w in [w for w in done if done[w] == layer]:
            hidden = states.read(f"{w}-input-{layer}", device) if layer else None
            run = model.run(model.ids(plan.windows[w]), layer, hidden)
            states.write(f"{w}-input-{layer + 1}", layer + 1, model.dense(run, layer))
            if layer == 0:
                states.write(f"{w}-input-0", 0, run.calls[0][0][0])
            for (target, _), probe in plan.probes.items():
                if probe.site.layer == layer:
                    used: Any = probe.predictor
                    states.write(f"{w}-feature-{target}", layer, feature(used, run.sites[probe.site]))
            done[w] = layer + 1
            states.write(f"{w}-done", done[w], torch.empty(0, dtype=torch.float32))


def _gradients_behind(model: ByLayers, states: States, windows: Windows) -> None:
    """The gradient behind the last layer, of tokens that are drawn from one window to the next."""
    n_layers, device = len(model.walk.layers), model.walk.device
    if all(states.layer(f"{w}-gradient") is not None for w in range(len(windows))):
        return
    draw = Draw()
    for w in range(len(windows)):
        hidden = states.read(f"{w}-input-{n_layers}", device)
        labels = draw(next_log_probabilities(model.walk.model, hidden))
        states.write(f"{w}-gradient", n_layers, gradient_of_labels(model.walk.model, hidden, labels))


def _gradients_of_layers(model: ByLayers, states: States, plan: Plan) -> None:
    """Downwards: the gradient at what each layer reads, and the losses of its heads."""
    device, chosen = model.walk.device, {layer for layer, _ in plan.probes}
    done = {w: states.layer(f"{w}-gradient") or 0 for w in model.own(plan.windows)}  # the layer in front of which
    for layer in model.layers(range(max(done.values()) - 1, -1, -1), "measuring what heads cost"):
        for w in [w for w in done if done[w] == layer + 1]:
            run = model.run(model.ids(plan.windows[w]), layer, states.read(f"{w}-input-{layer}", device))
            gradient = states.read(f"{w}-gradient", device)
            gradient, losses = losses_of_layer(model.walk.model, run, layer, plan.means.get(layer), gradient)
            if layer in chosen and losses is not None:
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
    plan, device = Plan(windows, probes, {}), model.walk.device
    model.share(states, SENSITIVITIES, plan)
    _rows_of_layers(model, states, plan)
    sums = {key: torch.zeros(len(probe.thresholds), dtype=torch.float64) for key, probe in probes.items()}
    for w in range(len(windows)):
        dense = next_log_probabilities(model.walk.model, states.read(f"{w}-dense", device))
        for key in probes:
            hidden = states.read(_name(w, key), device)
            sums[key] += divergence(model.walk.model, dense, hidden).double().sum(dim=1).cpu()
    tokens = sum(len(window) - 1 for window in windows)
    return {key: (total / max(tokens, 1)).tolist() for key, total in sums.items()}


def _rows_of_layers(model: ByLayers, states: States, plan: Plan) -> None:
    """Upwards: dense states, and those of each row that a probe made sparse."""
    done = {w: states.layer(f"{w}-dense") or 0 for w in model.own(plan.windows)}
    for layer in model.layers(range(min(done.values()), len(model.walk.layers)), "measuring sensitivities"):
        for w in [w for w in done if done[w] == layer]:
            _advance(model, states, layer, w, plan.windows[w], plan.probes)
            done[w] += 1


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


PARTS = {INPUTS: _inputs_of_layers, GRADIENTS: _gradients_of_layers, SENSITIVITIES: _rows_of_layers}


def own_windows(windows: int, part: tuple[int, int]) -> list[int]:
    """Which of so many windows are those of a part."""
    return [w for w in range(windows) if w * part[1] // windows == part[0]]


@torch.no_grad()
def calibrate_part(folder: Path, what: str, number: int, count: int) -> None:
    """Do a part ``number`` of ``count`` of what is shared of the stage with this folder."""
    stored = read_plan(folder)
    if not own_windows(len(stored["windows"]), (number, count)):
        return
    about = stored["about"]
    device = resolve_device(about["device"])
    walk = LayerWalk(about["model"], device, about["dtype"], about["revision"])
    model = ByLayers(walk, folder.parent, "", part=(number, count))
    PARTS[what](model, States(folder), Plan.load(folder))
