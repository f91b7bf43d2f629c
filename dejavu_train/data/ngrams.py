"""How much of a text stands in another one: n-grams of words that both have."""

from collections.abc import Iterable

import numpy as np

from dejavu_train.data.text import Document


def _ngram_hashes(text: str, n: int) -> np.ndarray:
    words = text.split()
    if len(words) < n:
        return np.empty(0, np.uint64)
    ids = np.array([hash(word) & 0xFFFFFFFFFFFF for word in words], dtype=np.uint64)
    total = np.zeros(len(ids) - n + 1, dtype=np.uint64)
    for offset in range(n):  # a polynomial hash modulo 2^64
        total = total * np.uint64(1099511628211) + ids[offset : offset + len(total)]
    return total


def shared_ngrams(report: Iterable[Document], train: Iterable[Document], n: int = 8) -> float:
    """Share of the ``n``-grams of words of ``report`` that also occur in ``train``."""
    asked = np.concatenate([_ngram_hashes(document.text, n) for document in report])
    known = np.unique(np.concatenate([_ngram_hashes(document.text, n) for document in train]))
    return float(np.isin(asked, known).mean()) if len(asked) else 0.0
