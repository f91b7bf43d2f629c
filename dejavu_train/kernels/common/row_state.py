"""States of a row of the batch, which decide its selection. 0, done: nothing. 1, what its logits say. 2, everything."""

import triton
import triton.language as tl  # noqa: F401  the interpreter looks for it in a jit function's module
from torch import Tensor


@triton.jit
def by_state(chosen, state, everything=None):
    """chosen (bool) of a row in state `1`, all in state `2`, none in state `0`. everything: what may be selected, if
    not all."""
    found = chosen & (state > 0)
    if everything is None:
        found = found | (state == 2)
    else:
        found = found | (everything & (state == 2))
    return found


def mask_by_state(mask: Tensor, row_state: Tensor | None) -> Tensor:
    """The same of mask (B, n) bool and row_state (B,) int32. None: all rows are in state 1."""
    if row_state is None:
        return mask
    return (mask & (row_state[:, None] > 0)) | (row_state[:, None] == 2)
