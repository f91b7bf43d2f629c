"""Reads calibrate windows, returns nats: how much loss each layer and target costs when it alone is sparse.

The loss of a density is measured as the divergence KL(dense || sparse) of the next-token distributions, in nats per
token. Its expectation under the model's own text is the increase of the cross-entropy. It scatters far less than a
difference of two cross-entropies, so a few thousand tokens are enough to share out a budget.

The dense pass is done once per window. A layer is then rerun from its recorded input, all densities as one batch,
together with the layers above it. The layers below are dense and stay as they were. This halves the work, and needs
nothing of the model but hooks, so it holds for every attention implementation and transformers version.

Letters: K densities, T positions, d model width, n units, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dejavu_train.families import BlockParts, LayerInput, Site, Target, UnitKey, blocks_of, family_of
from dejavu_train.families.base import logits_of
from dejavu_train.models.hooks import at_place, hooked
from dejavu_train.predictors.bit_planes import SecondStage
from dejavu_train.progress import progress


@dataclass(frozen=True)
class SensitivityProbe:
    """What to measure of one (layer, target): its predictor, the site that it reads, and rising thresholds to try.

    ``thresholds`` fall as densities rise. Each is one sparse run of the layer. ``mean`` (n_heads, head_dim) stands in
    for skipped heads.
    """

    predictor: nn.Module
    site: Site
    thresholds: Sequence[float]
    mean: Tensor | None = None
    second_stage: SecondStage | None = None
    """Of a cascade: what passes it of those above the threshold is selected."""


@contextmanager
def masked(block: BlockParts, target: Target, keep: Tensor, mean: Tensor | None = None) -> Iterator[None]:
    """Zero the skipped units of one decoder layer, or put ``mean`` in the place of skipped heads.

    Args:
        block: the layer's parts.
        target: ``mlp`` or ``heads``.
        keep: (B, T, n) bool, true for selected units.
        mean: (n_heads, head_dim) or None.
    """
    if target == Target.MLP:
        wide, rest = keep, keep.new_zeros((), dtype=torch.float32)
    else:
        module = block.out
        wide = keep.repeat_interleave(module.in_features // keep.shape[-1], dim=-1)
        rest = torch.zeros(module.in_features) if mean is None else mean.flatten().float()

    def zero(values: Tensor) -> Tensor:  # with whatever leading shape the model gives it
        return torch.where(wide.to(values.device).reshape(values.shape), values, rest.to(values))

    with hooked([at_place(block, "activation" if target == Target.MLP else "head_out", zero)]):
        yield


@torch.no_grad()
def loss_increases(
    model: Any,
    probes: Mapping[UnitKey, SensitivityProbe],
    windows: Sequence[Sequence[int]],
) -> dict[UnitKey, list[float]]:
    """Mean nats per token that each probe loses at each of its thresholds, everything else dense.

    Args:
        model: of a registered family.
        probes: what to measure.
        windows: token ids of calibration documents, each starting with ``</s>``.
    """
    device = next(model.parameters()).device
    sums = {key: torch.zeros(len(probe.thresholds), dtype=torch.float64) for key, probe in probes.items()}
    tokens = 0
    for window in progress(windows, "measuring sensitivities", len(windows), "window"):
        ids = torch.tensor([list(window)], device=device)
        run = dense_pass(model, ids)
        for key, probe in probes.items():
            site = run.sites[probe.site].float()  # on the device of its layer
            logits = probe.predictor.to(site.device)(site)  # (1, T, n)
            thresholds = torch.tensor(list(probe.thresholds), device=site.device).reshape(-1, 1, 1)
            keep = logits > thresholds
            if probe.second_stage is not None:
                keep = keep & probe.second_stage.passed(run.sites[key.site]).to(keep.device)
            divergence = _rerun(model, run, key, keep, probe.mean)
            sums[key] += divergence.double().sum(dim=1).cpu()
        tokens += ids.shape[1] - 1
    return {key: (total / max(tokens, 1)).tolist() for key, total in sums.items()}


@dataclass
class DenseRun:
    """The dense pass of one window: the layers' arguments, the sites, and the log-probabilities (1, T, V)."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    sites: dict[Site, Tensor]
    log_probabilities: Tensor


@torch.no_grad()
def dense_pass(model: Any, ids: Tensor) -> DenseRun:
    """Run ``ids`` (1, T) through the dense model and keep what a layer needs to be run again."""
    blocks = blocks_of(model)
    calls: list[Any] = [None] * len(blocks)
    sites: dict[Site, Tensor] = {}

    def keep_call(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[index] = (args, dict(kwargs))

        return hook

    def keep_site(site: Site, output: Tensor) -> None:
        sites[site] = output.reshape(ids.shape[0], ids.shape[1], -1)

    handles: list[Any] = []
    for index, block in enumerate(blocks):
        handles.append(block.whole.register_forward_pre_hook(keep_call(index), with_kwargs=True))
        handles += [at_place(block, site, partial(keep_site, Site(index, site))) for site in LayerInput]
    with hooked(handles):
        logits = model(input_ids=ids, use_cache=False).logits
    return DenseRun(calls, sites, F.log_softmax(logits.float(), dim=-1))


def layer_input(run: DenseRun, layer: int) -> Tensor:
    """(1, T, d), the hidden states that entered ``layer``."""
    args, kwargs = run.calls[layer]
    return args[0] if args else kwargs["hidden_states"]


def run_layer(model: Any, run: DenseRun, layer: int, hidden: Tensor) -> Tensor:
    """(B, T, d), what ``layer`` gives for ``hidden`` (B, T, d) in place of its input in ``run``."""
    args, kwargs = run.calls[layer]
    if args:
        args = (hidden, *args[1:])
    else:
        kwargs = {**kwargs, "hidden_states": hidden}
    output = blocks_of(model)[layer].whole(*args, **kwargs)
    return output[0] if isinstance(output, tuple) else output


def next_log_probabilities(model: Any, hidden: Tensor) -> Tensor:
    """(B, T - 1, V) fp32 of the tokens that follow, from the last layer's output (B, T, d)."""
    norm = family_of(model).final_norm(model)
    hidden = hidden if norm is None else norm(hidden)
    return F.log_softmax(logits_of(model, hidden[:, :-1]).float(), dim=-1)


def _rerun(model: Any, run: DenseRun, key: UnitKey, keep: Tensor, mean: Tensor | None) -> Tensor:
    """KL (K, T - 1) of the scored positions, layer ``key`` sparse by ``keep`` (K, T, n), run from its own input."""
    first, target = key
    blocks = blocks_of(model)
    if len(keep) > 1 and blocks[first].slopes is not None:  # what ALiBi adds belongs to the rows of the dense pass
        return torch.cat([_rerun(model, run, key, each[None], mean) for each in keep])
    hidden = layer_input(run, first).expand(keep.shape[0], -1, -1)
    with masked(blocks[first], target, keep, mean):
        hidden = run_layer(model, run, first, hidden)
    for index in range(first + 1, len(blocks)):
        hidden = run_layer(model, run, index, hidden)
    sparse = next_log_probabilities(model, hidden)
    dense = run.log_probabilities[:, :-1]
    return (dense.exp() * (dense - sparse)).sum(-1)
