"""Rows as numbers: what a step's state holds of a row when it begins, written in one transfer from the host.

A copy to a GPU that waits for it also waits for all steps before it. So the numbers lie in pinned memory, and nothing
waits. What reads them on the GPU has no sizes that change, and may be recorded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dejavu_train.engine.inputs import MAX_BATCH, Row
from dejavu_train.engine.step import DecodeStep

WHOLE = ("known", "least", "limit", "sparse_from", "top_k", "seed")  # int32 in the state, the others fp32
FRACTIONS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
FIRST = 2 + len(WHOLE) + len(FRACTIONS)  # number of the first token, behind the row and its prefilled tokens


def row_numbers(first: int, rows: Sequence[Row], width: int) -> Tensor:
    """(n, FIRST + width) fp64 on the host, of rows from place ``first`` on. width: tokens, at least the longest row's.

    fp64 holds every integer of them exactly.
    """
    made = torch.zeros(len(rows), FIRST + width, dtype=torch.float64)
    for b, row in enumerate(rows, first):
        said = row.sampling
        numbers = [b, row.prefilled, len(row.tokens), row.least, row.total, row.sparse_from, said.top_k]
        numbers += [said.seed * MAX_BATCH + row.number]
        given = [said.temperature, said.top_p, said.min_p, said.repetition_penalty]
        given += [said.presence_penalty, said.frequency_penalty]
        made[b - first, : FIRST + len(row.tokens)] = torch.tensor([*numbers, *given, *row.tokens], dtype=torch.float64)
    return made


def sent(values: Tensor, device: torch.device) -> Tensor:
    """values on the device. A GPU copies them behind what it was asked for before, and nobody waits."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def write_rows(core: DecodeStep, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Begin rows in the state of a step.

    Args:
        given: of `row_numbers`, on the step's device.
    Returns:
        places and prefilled tokens (n,) int64, and tokens (n, width) int32.
    """
    state, numbers = core.state, given[:, :FIRST].long()
    rows, prefilled, tokens = numbers[:, 0], numbers[:, 1], given[:, FIRST:].int()
    whole, fractions = numbers.int(), given[:, FIRST - len(FRACTIONS) : FIRST].float()
    state.tokens[:, : tokens.shape[1]].index_copy_(0, rows, tokens)
    for i, name in enumerate(WHOLE, 2):
        getattr(state, name).index_copy_(0, rows, whole[:, i])
    for i, name in enumerate(FRACTIONS):
        getattr(state, name).index_copy_(0, rows, fractions[:, i])
    state.position.index_copy_(0, rows, whole[:, 1] - 1)
    for tensor in (state.done, state.fault):
        tensor.index_fill_(0, rows, 0)
    core.watermark.index_copy_(
        1, rows, whole[None, :, 1, None].expand(len(core.watermark), -1, core.watermark.shape[2])
    )
    return rows, prefilled, tokens
