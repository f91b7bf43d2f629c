"""Two models on the same examples: the difference of accuracies with an error that knows of the pairing, and flips.

For perplexities there is ``perplexity.increase``, a paired bootstrap over documents.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


def mcnemar(correct: Sequence[float], correct_dense: Sequence[float]) -> tuple[float, float]:
    """Difference of two accuracies on the same examples, and its standard error.

    Of n examples only the first answers b correctly, and only the second c. The difference is ``(b - c) / n``. Its
    variance is ``(b + c - (b - c)^2 / n) / n^2``. Examples on which both agree drop out (McNemar).

    >>> mcnemar([1, 1, 0, 0], [1, 0, 0, 0])
    (0.25, 0.21650635094610965)
    """
    n = len(correct)
    b = sum(a > d for a, d in zip(correct, correct_dense, strict=True))
    c = sum(a < d for a, d in zip(correct, correct_dense, strict=True))
    return (b - c) / n, float(np.sqrt(max(b + c - (b - c) ** 2 / n, 0.0)) / n)


def answers(samples: Sequence[dict[str, Any]]) -> list[int]:
    """Answers of the model: of several continuations the likeliest. Of one, whether it is the greedy one.

    Args:
        samples: logged by lm-eval, one a document, in the order of the documents.
    """
    chosen = []
    for sample in samples:
        answers = sample["filtered_resps"]
        chosen.append(int(np.argmax([nats for nats, _ in answers])) if len(answers) > 1 else int(answers[0][1]))
    return chosen


def flip_rate(samples: Sequence[dict[str, Any]], samples_dense: Sequence[dict[str, Any]]) -> float:
    """Share of the examples whose answer changed."""
    pairs = list(zip(answers(samples), answers(samples_dense), strict=True))
    return sum(a != b for a, b in pairs) / len(pairs)
