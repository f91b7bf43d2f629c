"""The ops ``torch.ops.dejavu.*``: linear maps whose silent neurons are left out, for as many tokens as pay.

    live_rows        the map out of the neurons, (n, d) with a row a neuron: rows of neurons that are not zero
    gated_rows       gates and their other maps in one matrix (2 n, d): of the other maps the rows of open gates
    predicted_rows   the map into the neurons, gates first: rows that a predictor chooses, zeros elsewhere

Which neurons count is the union over the tokens of a call. Above ``most`` tokens a map is computed whole. The number of
tokens decides, so nothing waits for the GPU, and CUDA graphs and torch.compile hold. On a GPU kernels run, elsewhere
plain torch. Letters: B tokens, n neurons, d columns.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu_vllm.kernels import chosen_rows as into
from dejavu_vllm.kernels import live_rows as out_of

OPS = ("live_rows", "gated_rows", "predicted_rows")
TOKENS = "DEJAVU_VLLM_TOKENS"  # in the environment: up to how many tokens rows are left out, in place of the table
_library: Any = None


@functools.cache
def most_tokens(op: str, device: str) -> int:
    """Tokens up to which an op leaves out rows on a device, as measured (crossover.json), or as the environment says.

    device: a GPU's name as the driver tells it, or cpu.
    """
    if given := os.environ.get(TOKENS):
        return int(given)
    table = json.loads(Path(__file__).with_name("crossover.json").read_text("utf-8"))
    words = device.replace("-", " ").split()
    return int(next((row for name, row in table.items() if name in words), table["other"])[op])


def live_rows(h: Tensor, weight: Tensor, bias: Tensor | None, most: int) -> Tensor:
    """(B, d) of h (B, n), behind the activation, and weight (n, d)."""
    if len(h) > most or not len(h):
        return F.linear(h, weight.t(), bias)
    return out_of.live_rows(h, weight, bias) if h.is_cuda else out_of.live_rows_reference(h, weight, bias)


def gated_rows(x: Tensor, weight: Tensor, bias: Tensor | None, threshold: float, most: int) -> Tensor:
    """(B, 2 n) of x (B, d) and weight (2 n, d). A gate is open above its threshold. Behind a closed one stands 0."""
    if len(x) > most or not len(x):
        return F.linear(x, weight, bias)
    n = len(weight) // 2
    halves = (None, None) if bias is None else bias.split(n)
    gates = F.linear(x, weight[:n], halves[0])
    if not x.is_cuda:
        others = into.chosen_rows_reference(x, weight[n:], halves[1], gates > threshold)
        return torch.cat([gates, others], 1)
    out = torch.empty(len(x), 2 * n, dtype=x.dtype, device=x.device)
    out[:, :n] = gates
    into.chosen_rows(x, weight[n:], halves[1], gates, threshold, out[:, n:])
    return out


def predicted_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    offset: Tensor,
    relu: bool,
    cut: float,
    most: int,
) -> Tensor:
    """(B, n) or (B, 2 n) of x (B, d) and weight with as many rows.

    A token chooses neuron i where its score up[i] act(down x) + offset[i] lies above ``cut``. down (r, d), up (n, r).
    """
    if len(x) > most or not len(x):
        return F.linear(x, weight, bias)
    if x.is_cuda:
        return into.chosen_rows(x, weight, bias, into.Scorer(down, up, offset, relu, cut))
    hidden = F.linear(x.float(), down.float())
    keep = F.linear(F.relu(hidden) if relu else hidden, up.float(), offset.float()) > cut
    return into.chosen_rows_reference(x, weight, bias, keep)


def _columns(weight: Tensor, op: str) -> int:
    return weight.shape[1] if op == "live_rows" else weight.shape[0]


def register_ops() -> None:
    """Make them ``torch.ops.dejavu.*`` through vLLM. A second call does nothing."""
    global _library
    if _library is not None:
        return
    from vllm.utils.torch_utils import direct_register_custom_op

    _library = torch.library.Library("dejavu", "FRAGMENT")
    for op in OPS:

        def fake(x: Tensor, weight: Tensor, *_: Any, op: str = op, **__: Any) -> Tensor:
            return x.new_empty(x.shape[0], _columns(weight, op))

        direct_register_custom_op(op, globals()[op], fake_impl=fake, target_lib=_library)
