"""Reads text, returns the four disjoint sets as padded batches of windows.

``train`` is learned from, ``calibration`` sets thresholds and shares, ``val`` picks between variants, ``test`` is
only ever scored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu_train.data.text import (
    INSTALLED_DOCS,
    TextSource,
    load_documents,
    load_sets,
    read_paragraph_hashes,
    split_documents,
    windows,
)


@dataclass(frozen=True)
class Batch:
    """Windows side by side: ``ids`` (B, T) padded on the right, ``scored`` (B, T) bool marks positions that predict
    a token of the window, ``document`` (B) numbers the document."""

    ids: Tensor
    scored: Tensor
    document: Tensor

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(self.ids.to(device), self.scored.to(device), self.document.to(device))

    @property
    def targets(self) -> Tensor:
        """(N) the token that follows each scored position."""
        return self.ids.roll(-1, 1)[self.scored]


def read_texts(source: str, model: str) -> dict[str, list[tuple[str, str]]]:
    """Set -> (name, text) of each document.

    Raises:
        UserError: nothing there, or an empty set.
    """
    if Path(source).name.startswith(INSTALLED_DOCS):
        # prepared on another machine: the same documents, so split as there, without installing the same packages
        documents, _ = load_documents(TextSource(source))
        sets, _ = split_documents(documents, INSTALLED_DOCS, read_paragraph_hashes(model))
    else:
        sets, _ = load_sets(TextSource(source), model)
    return {name: [(d.name, d.text) for d in documents] for name, documents in sets.items()}


def take(tokenizer: Any, documents: Sequence[tuple[str, str]], window: int, tokens: int, seed: int) -> list[Any]:
    """(document number, window) in random document order until ``tokens`` scored tokens are there."""
    order = np.random.default_rng(seed).permutation(len(documents))
    chosen: list[tuple[int, list[int]]] = []
    left = tokens
    for number in order:
        for ids in windows(tokenizer, documents[number][1], window)[: max(4, left // window)]:
            if left <= 0:
                return chosen
            if len(ids) > 1:
                chosen.append((int(number), ids))
                left -= len(ids) - 1
    return chosen


def batches(chosen: Sequence[tuple[int, list[int]]], rows: int) -> list[Batch]:
    """Batches of windows of like length, padded with 1 on the right (causal attention never looks there)."""
    ordered = sorted(chosen, key=lambda pair: -len(pair[1]))
    return [_pack(ordered[start : start + rows]) for start in range(0, len(ordered), rows)]


def _pack(part: Sequence[tuple[int, list[int]]]) -> Batch:
    longest = max(len(ids) for _, ids in part)
    ids = torch.ones(len(part), longest, dtype=torch.long)
    scored = torch.zeros(len(part), longest, dtype=torch.bool)
    for row, (_, window) in enumerate(part):
        ids[row, : len(window)] = torch.tensor(window)
        scored[row, : len(window) - 1] = True
    return Batch(ids, scored, torch.tensor([number for number, _ in part]))


def endless(parts: Sequence[Batch], seed: int) -> Iterator[Batch]:
    """Batches in a new random order, over and over."""
    generator = np.random.default_rng(seed)
    while True:
        for i in generator.permutation(len(parts)):
            yield parts[i]
