"""The forward pass of pretraining: a model's own modules, and the loss with the L1 penalty on what neurons give."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dejavu_train.families import BlockParts, family_of
from dejavu_train.families.base import logits_of
from dejavu_train.families.block import causal, forward_block, positions_like
from dejavu_train.families.dims import Activation

_LEAST_SQUARE = 1e-10  # the slope of a root has no end at zero


def penalised(kind: Activation, neurons: Tensor) -> Tensor:
    """Values (..., n) whose mean is the L1 penalty: the size of what neurons give, of squares that of the root.

    The mean of squares would hardly push a small value to zero.
    """
    return neurons.clamp_min(_LEAST_SQUARE).sqrt() if kind == Activation.RELU2 else neurons.abs()


def run_layer(
    block: BlockParts, kind: Activation | None, hidden: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor | float]:
    """A layer's states (B, T, d_model), and the mean of what is penalised of the neurons that it has.

    It is what is compiled: one graph serves all layers, so that a deep model compiles as fast as a shallow one.
    kind: None penalises nothing.
    """
    hidden, neurons = forward_block(block, hidden, causal(block), positions)
    return hidden, 0.0 if kind is None or neurons is None else penalised(kind, neurons.float()).mean()


def training_loss(
    model: PreTrainedModel,
    blocks: Sequence[BlockParts],
    kind: Activation,
    rows: Tensor,
    l1: float,
    layer: Callable[..., tuple[Tensor, Any]] = run_layer,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy (nats a token) plus ``l1`` times the summed mean activations, and the cross-entropy alone.

    Args:
        blocks: the layers' parts. kind: their activation.
        rows: (B, T + 1) int64, inputs and targets shifted by one.
        layer: :func:`run_layer`, or what compiling it gave.
    """
    family, ids, penalty = family_of(model), rows[:, :-1], 0.0
    positions = positions_like(ids)
    hidden = family.embed(model, ids, positions)
    for block in blocks:
        hidden, mean = layer(block, kind if l1 else None, hidden, positions)
        penalty = penalty + mean
    norm = family.final_norm(model)
    logits = logits_of(model, hidden if norm is None else norm(hidden)).float()
    entropy = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    return entropy + l1 * penalty, entropy.detach()
