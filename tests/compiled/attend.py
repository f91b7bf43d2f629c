"""Attention and the choice of the next token at the shapes of whole families, as calls for `tests.compiled`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.sample.sampling import TokenState, advance
from dejavu_train.kernels.stages.attend import AttentionScratch, flash_decode

SHAPES = {  # heads of K and V, heads of q that share each, head_dim
    "OPT-2.7B": (32, 1, 80),
    "AFM-4.5B": (4, 5, 128),
    "Nemotron-15B": (8, 6, 128),
    "ProSparse-7B": (32, 1, 128),
}
WORDS = {"OPT": 50_272, "AFM": 128_256, "Nemotron": 256_000}


def attend_call(name: str, rows: int, capacity: int, position: int, pdl: bool = True) -> Callable[[], None]:
    """One layer's attention of a shape: rows of which each is at that position, all heads."""
    groups, share, head_dim = SHAPES[name]
    heads, at = groups * share, torch.full((rows,), position, dtype=torch.int32)
    k, v = (torch.empty(rows, groups, capacity, head_dim, dtype=torch.float16) for _ in range(2))
    cache = KvCache(k, v, torch.empty(rows, 0, heads * head_dim, dtype=torch.float16))
    scratch = AttentionScratch.empty(rows, heads, head_dim, capacity, k.device)
    q, out = torch.empty(rows, heads, head_dim), torch.empty(rows, heads * head_dim)
    return partial(flash_decode, HeadStep(q, cache, at), out, scratch, pdl)


def advance_call(name: str, rows: int, pdl: bool = True) -> Callable[[], None]:
    """The greedy choice of a family's next token, of rows that never end."""
    logits = torch.empty(rows, WORDS[name])
    state = TokenState.empty(rows, 4096, logits.device)
    _ = state.done.zero_(), state.limit.fill_(4096)
    return partial(advance, logits, state, pdl=pdl)


def attend_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, call) of each shape, of one row and of several, of short texts and of long ones."""
    for name in SHAPES:
        for rows, capacity in ((1, 1024), (1, 2048), (8, 1024), (8, 2048)):
            yield f"attention {name} rows {rows} of {capacity}", attend_call(name, rows, capacity, 128)
    for name in WORDS:
        yield f"choice {name}", advance_call(name, 1)
