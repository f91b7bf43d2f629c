"""Lays requests for log-likelihoods out in rows, so that no token is computed twice without need.

Answers to one question share their context: a row is the context with the answers behind it. Each stands at the
positions that it would have alone. A mask lets it see the context and itself. Answers that differ in their last token
alone are one branch, because that token is never an input.

Letters: B rows, T tokens of the longest row, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

PADDING = -1  # position and branch of padding


@dataclasses.dataclass
class Row:
    """A context and what may follow it: a branch is a continuation without its last token, maybe empty.

    ``requests``: by branch the numbers of the requests that it answers.
    """

    context: tuple[int, ...]
    branches: dict[tuple[int, ...], list[int]]

    @property
    def start(self) -> int:
        """Position of every branch's first token."""
        return len(self.context)

    def __len__(self) -> int:
        return len(self.context) + sum(map(len, self.branches))

    def columns(self) -> dict[tuple[int, ...], list[int]]:
        """By branch, the columns whose logits predict its tokens and the one behind them."""
        found, begin = {}, self.start
        for branch in self.branches:
            found[branch] = [self.start - 1, *range(begin, begin + len(branch))]
            begin += len(branch)
        return found


def build_rows(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], longest: int, shared: bool) -> list[Row]:
    """Rows for requests of (context, continuation), the longest first.

    Args:
        longest: positions of the model. What a context has more is cut off at its beginning.
        shared: whether branches may stand behind one context. They do where that is at least as long as they are,
            for attention runs over the whole row.
    """
    rows: dict[tuple, Row] = {}
    for i, (context, continuation) in enumerate(pairs):
        branch = tuple(continuation[:-1])
        kept = tuple(context[max(0, len(context) + len(branch) - longest) :])
        key = (kept,) if shared and len(kept) >= len(branch) else (kept, branch)
        rows.setdefault(key, Row(kept, {})).branches.setdefault(branch, []).append(i)
    return sorted(rows.values(), key=lambda row: (-len(row), row.context))


@dataclasses.dataclass(frozen=True)
class Packed:
    """What a batch of rows is to a model.

    ``ids`` (B, T) int64. ``attention_mask`` (B, T) of ones and zeros, or (B, 1, T, T) bool where rows have several
    branches. ``position_ids`` (B, T) int64 goes with the mask of branches, else None. ``columns`` (C,) int64: whose
    logits are needed of any row.
    """

    ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor | None
    columns: Tensor


def pack(rows: Sequence[Row], pad: int) -> Packed:
    """Rows as the tensors of one forward pass, padded on the right."""
    size = max(map(len, rows))
    ids = torch.full((len(rows), size), pad)
    positions, branches = torch.full_like(ids, PADDING), torch.full_like(ids, PADDING)
    for b, row in enumerate(rows):
        parts = [(row.context, 0, 0)]
        parts += [(branch, row.start, number) for number, branch in enumerate(row.branches, 1)]
        begin = 0
        for tokens, first, number in parts:
            end = begin + len(tokens)
            ids[b, begin:end] = torch.tensor(tokens)
            positions[b, begin:end] = torch.arange(first, first + len(tokens))
            branches[b, begin:end] = number
            begin = end
    columns = torch.tensor(
        sorted({column for row in rows for row_columns in row.columns().values() for column in row_columns})
    )
    if all(len(row.branches) == 1 for row in rows):
        return Packed(ids, (branches != PADDING).long(), None, columns)
    seen = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    return Packed(ids, (seen & torch.ones(size, size, dtype=torch.bool).tril())[:, None], positions, columns)
