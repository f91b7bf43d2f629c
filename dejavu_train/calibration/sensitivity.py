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

from dejavu_train.families import BlockParts, Site, Target, UnitKey, blocks_of, family_of
from dejavu_train.families.base import logits_of
from dejavu_train.ground.progress import progress
from dejavu_train.models.hooks import at_place, hooked
from dejavu_train.models.layer_exchange import first
from dejavu_train.predictors.bit_planes import build_second_stage

BLOCK_LOGITS = 1 << 23  # of the vocabulary's logits that are made at once: 32 MiB in fp32


@dataclass(frozen=True)
class SensitivityProbe:
    """Probe of one (layer, target): its predictor, the site that it reads, and rising thresholds to try.

    ``thresholds`` fall as densities rise. Each is one sparse run of the layer. ``mean`` (n_heads, head_dim) stands in
    for skipped heads.
    """

    predictor: nn.Module
    site: Site
    thresholds: Sequence[float]
    mean: Tensor | None = None
    cascade: Sequence[Tensor] | None = None
    """(scale, steps, threshold) of a second stage, which is made of the layer's weights where and while these lie. What
    passes it of those above the threshold is selected."""


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
        rest = torch.zeros(module.in_features, dtype=torch.float32) if mean is None else mean.flatten().float()

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
        dense = next_log_probabilities(model, run.behind)
        for key, probe in probes.items():
            sums[key] += _rerun(model, run, dense, key, probe).double().sum(dim=1).cpu()
        tokens += ids.shape[1] - 1
    return {key: (total / max(tokens, 1)).tolist() for key, total in sums.items()}


@dataclass
class DenseRun:
    """The dense pass of one window: the layers' arguments, the sites, and ``behind`` (1, T, d) the last layer."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    sites: dict[Site, Tensor]
    behind: Tensor


@torch.no_grad()
def dense_pass(model: Any, ids: Tensor) -> DenseRun:
    """Run ``ids`` (1, T) through the dense model and keep what a layer needs to be run again."""
    blocks = blocks_of(model)
    calls: list[Any] = [None] * len(blocks)
    sites: dict[Site, Tensor] = {}
    behind: list[Tensor] = []

    def keep_call(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[index] = (args, dict(kwargs))

        return hook

    def keep_site(site: Site, output: Tensor) -> None:
        sites[site] = output.reshape(ids.shape[0], ids.shape[1], -1)

    handles: list[Any] = []
    for index, block in enumerate(blocks):
        handles.append(block.whole.register_forward_pre_hook(keep_call(index), with_kwargs=True))
        handles += [at_place(block, site, partial(keep_site, Site(index, site))) for site in block.inputs]
    handles.append(blocks[-1].whole.register_forward_hook(lambda _, __, output: behind.append(first(output))))
    with hooked(handles):
        model.base_model(input_ids=ids, use_cache=False)
    return DenseRun(calls, sites, behind[0])


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
    return first(blocks_of(model)[layer].whole(*args, **kwargs))


def block_positions(vocab_size: int) -> int:
    """How many positions have their logits made at once."""
    return max(1, BLOCK_LOGITS // vocab_size)


def blocks_of_positions(model: Any, hidden: Tensor) -> Iterator[slice]:
    """The positions T - 1 that are scored, of hidden (B, T, d), in blocks. A whole window's logits may be gigabytes."""
    step, last = block_positions(model.config.vocab_size), hidden.shape[1] - 1
    return (slice(start, min(start + step, last)) for start in range(0, last, step))


def log_probabilities(model: Any, hidden: Tensor) -> Tensor:
    """(T, V) fp32 of the tokens that follow, from the last layer's output (T, d)."""
    norm = family_of(model).final_norm(model)
    logits = logits_of(model, hidden if norm is None else norm(hidden)).float()
    return F.log_softmax(logits, dim=-1).to(hidden.device)


def next_log_probabilities(model: Any, hidden: Tensor) -> Tensor:
    """(T - 1, V) fp32 of the tokens that follow, from the last layer's output (1, T, d). Made block by block."""
    made = hidden.new_empty((hidden.shape[1] - 1, model.config.vocab_size), dtype=torch.float32)
    for block in blocks_of_positions(model, hidden):
        made[block] = log_probabilities(model, hidden[0, block])
    return made


def rows_of(model: Any, hidden: Tensor) -> Sequence[Tensor]:
    """Rows (K, T, d) as they run together: what ALiBi adds belongs to the rows of the dense pass, so one by one."""
    return hidden.split(1) if blocks_of(model)[0].slopes is not None else [hidden]


def run_rows(model: Any, run: DenseRun, layer: int, hidden: Tensor) -> Tensor:
    """(K, T, d), what ``layer`` gives for K rows in place of its input in ``run``."""
    return torch.cat([run_layer(model, run, layer, rows) for rows in rows_of(model, hidden)])


def run_sparse(model: Any, run: DenseRun, key: UnitKey, probe: SensitivityProbe) -> Tensor:
    """(K, T, d), what the layer of ``key`` gives for its input in ``run`` at each threshold of its probe."""
    site = run.sites[probe.site].float()  # on the device of its layer
    logits = probe.predictor.to(site.device)(site)  # (1, T, n)
    thresholds = torch.tensor(list(probe.thresholds), device=site.device, dtype=torch.float32).reshape(-1, 1, 1)
    keep = logits > thresholds
    layer, target = key
    if probe.cascade is not None:
        up: Any = blocks_of(model)[layer].up
        second_stage = build_second_stage(up.weight, up.bias, *probe.cascade)
        keep = keep & second_stage.passed(run.sites[UnitKey(*key).site]).to(keep.device)
        del second_stage  # as large as the layer's weights
    hidden, made, start = layer_input(run, layer).expand(len(keep), -1, -1), [], 0
    for rows in rows_of(model, hidden):
        with masked(blocks_of(model)[layer], target, keep[start : start + len(rows)], probe.mean):
            made.append(run_layer(model, run, layer, rows))
        start += len(rows)
    return torch.cat(made)


def divergence(model: Any, dense: Tensor, hidden: Tensor) -> Tensor:
    """KL (K, T - 1) of the scored positions: of log-probabilities (T - 1, V), and of rows (K, T, d) behind the last
    layer. A row's logits are made block by block."""
    made = hidden.new_empty((len(hidden), len(dense)), dtype=torch.float32)
    for block in blocks_of_positions(model, hidden):
        own, given = dense[block], dense[block].exp()
        for row, each in zip(made, hidden, strict=True):
            lost = log_probabilities(model, each[block]).neg_().add_(own)  # dense - sparse
            row[block] = lost.mul_(given).sum(-1)
    return made


def _rerun(model: Any, run: DenseRun, dense: Tensor, key: UnitKey, probe: SensitivityProbe) -> Tensor:
    """KL (K, T - 1), the layer of ``key`` sparse at each threshold, run from its own input. ``dense`` (T - 1, V) are
    the log-probabilities of the dense pass."""
    hidden = run_sparse(model, run, key, probe)
    for layer in range(key[0] + 1, len(run.calls)):
        hidden = run_rows(model, run, layer, hidden)
    return divergence(model, dense, hidden)
