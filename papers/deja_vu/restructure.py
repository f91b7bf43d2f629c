"""Runs an OPT's blocks in other orders: parallel, or with some skipped (Deja Vu, appendix C.3).

Definitions, with y the residual stream before a block, MHA and MLP each behind its own LayerNorm:

- ``sequential``: z = y + MHA(y), z + MLP(z), the model as it is.
- ``parallel 2``: y + MHA(y) + MLP(y).
- ``parallel 4``: two blocks from one y: y + MHA_1(y) + MLP_1(y) + MHA_2(y) + MLP_2(y). A last odd block is parallel 2.
- ``skip k/n``: of every n consecutive blocks the last k are left out. ``skip 1/2`` is every second, ``skip 1/4`` every
  fourth. Which blocks the paper leaves out we could not read. This choice is ours.

Modules keep their places and their hooks, so ``mask`` works within. A skipped block still passes its input through its
LayerNorms, because predictors of later blocks may read them. For whole sequences without a cache.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dejavu_train.ground.errors import UserError
from dejavu_train.models.hooks import decoder_layers

STRUCTURES = ("sequential", "parallel 2", "parallel 4", "skip 2/8", "skip 2/4", "skip 1/2", "skip 1/4")


@contextmanager
def restructured(model: nn.Module, structure: str) -> Iterator[None]:
    """Within the context every forward pass of ``model`` runs its blocks as ``structure`` says.

    Args:
        model: a pre-norm OPTForCausalLM in evaluation mode.
        structure: one of ``STRUCTURES``, or any other ``skip k/n``.
    Raises:
        UserError: an unknown structure.
    """
    check_structure(structure)
    blocks = decoder_layers(model)
    shared: list[Tensor] = []  # parallel 4: the y of the first block of a pair
    if structure != "sequential":
        for layer, block in enumerate(blocks):
            block.forward = _forward(structure, layer, block, shared)
    try:
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


def check_structure(structure: str) -> None:
    """Raises UserError for an unknown structure."""
    skip = re.fullmatch(r"skip (\d+)/(\d+)", structure)
    if structure not in STRUCTURES and not (skip and 0 < int(skip[1]) < int(skip[2])):
        raise UserError(f"{structure} is no structure; known are {', '.join(STRUCTURES)}")


def skipped_layers(structure: str, n_layers: int) -> list[int]:
    """Numbers of the blocks that are left out.

    >>> skipped_layers("skip 2/4", 6)
    [2, 3]
    """
    skip = re.fullmatch(r"skip (\d+)/(\d+)", structure)
    return (
        []
        if skip is None
        else [layer for layer in range(n_layers) if layer % int(skip[2]) >= int(skip[2]) - int(skip[1])]
    )


def _forward(structure: str, layer: int, block: Any, shared: list[Tensor]) -> Any:
    def skipped(hidden: Tensor, *_args: Any, **_: Any) -> Tensor:
        block.self_attn_layer_norm(hidden)
        block.final_layer_norm(hidden)
        return hidden

    def parallel(hidden: Tensor, attention_mask: Tensor | None = None, **rest: Any) -> Tensor:
        y = hidden
        if structure == "parallel 4":
            if layer % 2 == 0:
                shared[:] = [hidden]
            y = shared[0]
        for name in ("past_key_values", "use_cache"):
            rest.pop(name, None)
        attended, _ = block.self_attn(block.self_attn_layer_norm(y), attention_mask=attention_mask, **rest)
        normed = block.final_layer_norm(y.reshape(-1, y.shape[-1]))
        return hidden + attended + block.fc2(block.activation_fn(block.fc1(normed))).view(hidden.shape)

    if structure.startswith("parallel"):
        return parallel
    # A block that is not left out runs its own forward.
    return skipped if layer in skipped_layers(structure, layer + 1) else type(block).forward.__get__(block)
