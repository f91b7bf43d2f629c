"""Reads a model and a prompt, writes milliseconds per decoded token: median, 20th and 80th percentile.

The prompt is processed once, dense, and not counted; the first steps warm up and are not counted either. What a
predictor costs is inside the measured time. Greedy, batch rows alike.
"""

import dataclasses
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import OPTForCausalLM

WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Timing:
    """Conditions and milliseconds per token of one backend."""

    backend: str
    device: str
    batch: int
    prompt: int
    new_tokens: int
    ms_per_token: dict[str, float]


@torch.no_grad()
def time_decoding(model: OPTForCausalLM, backend: str, prompt: Tensor, new_tokens: int) -> Timing:
    """Decode ``new_tokens`` tokens one by one, each step timed.

    Args:
        model: a dense OPTForCausalLM or a SparseOPTForCausalLM with ``sparse_from="prompt"``.
        backend: its name, for the result.
        prompt: (B, P) token ids; P + new_tokens + 3 must fit the model's positions.
    """
    assert prompt.shape[1] + new_tokens + WARM_UP <= model.config.max_position_embeddings, "the prompt is too long"
    device = model.device
    options: dict[str, Any] = {"use_cache": True}
    out = model(prompt.to(device), logits_to_keep=1, **options)
    milliseconds = []
    for _ in range(WARM_UP + new_tokens):
        token = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        _wait(device)
        start = time.perf_counter()
        out = model(token, past_key_values=out.past_key_values, **options)
        _wait(device)
        milliseconds.append(1e3 * (time.perf_counter() - start))
    points = np.percentile(milliseconds[WARM_UP:], [20, 50, 80])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    figures = dict(zip(("p20", "p50", "p80"), (round(float(point), 4) for point in points), strict=True))
    return Timing(backend, name, prompt.shape[0], prompt.shape[1], new_tokens, figures)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
