"""Reads documents, writes nothing: which windows are recorded, and which of them make which shard.

The plan follows from text, seed and budgets alone, so that a run which was killed makes the same one again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dejavu_train.data.config import CollectConfig
from dejavu_train.data.text import Document
from dejavu_train.data.tokens import cut_windows, start_token, windows


@dataclasses.dataclass(frozen=True)
class Window:
    """One sequence of token ids of a document."""

    document: int
    ids: np.ndarray


def plan_windows(
    documents: Sequence[Document], tokenizer: Any, config: CollectConfig, budget: int | None, seed: int
) -> list[Window]:
    """Draw documents in random order and take their windows until ``budget`` tokens (exactly) are planned."""
    generator = np.random.default_rng(seed)
    planned: list[Window] = []
    total = 0
    for number in generator.permutation(len(documents)):
        document = documents[number]
        if document.ids is None:
            ids = windows(tokenizer, document.text, config.window)
        else:
            ids = cut_windows(document.ids.tolist(), config.window, start_token(tokenizer))
        if config.windows_per_document is not None and len(ids) > config.windows_per_document:
            ids = [ids[i] for i in sorted(generator.permutation(len(ids))[: config.windows_per_document])]
        for window_ids in ids:
            if budget is not None and total + len(window_ids) > budget:
                window_ids = window_ids[: budget - total]
            if len(window_ids) < 2:
                continue
            planned.append(Window(int(number), np.array(window_ids, np.int32)))
            total += len(window_ids)
        if budget is not None and total >= budget - 1:
            break
    return planned


def plan_shards(planned: Sequence[Window], shard_tokens: int) -> list[list[Window]]:
    """Cut into runs of whole windows, each of at least ``shard_tokens`` (the last may be smaller).

    Within a shard windows stand by length, so that a batch has little padding.
    """
    shards: list[list[Window]] = []
    room = 0
    for window in planned:
        if room <= 0:
            shards.append([])
            room = shard_tokens
        shards[-1].append(window)
        room -= len(window.ids)
    return [sorted(shard, key=lambda window: -len(window.ids)) for shard in shards]
