"""Runs vLLM in this process, one engine after the other, and compares what two of them wrote."""

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip
os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
TIE = 1e-3  # of two logits, in fp32

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Written:
    """Greedy tokens of each prompt, the logarithm of each one's probability, and how far the second one lies behind."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    margins: list[list[float]]


@dataclass(frozen=True)
class Compared:
    """How many tokens were compared, how many differ where the first is no tie, and the largest distance of logits."""

    tokens: int
    differing: int
    ties: int
    distance: float


def written(folder: Any, quantization: str | None, prompts: Prompts, new_tokens: int = 20, **options: Any) -> Written:
    """What vLLM writes. options: of its ``LLM``."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    usual = {"dtype": "float32", "max_model_len": 256, "seed": 0, "enforce_eager": True}
    llm = LLM(str(folder), quantization=quantization, **{**usual, **options})
    asked = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=2)
    try:
        answers = llm.generate([{"prompt_token_ids": list(each)} for each in prompts], asked, use_tqdm=False)
    finally:
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
    found = [each.outputs[0] for each in answers]
    rows = [[sorted((one.logprob for one in step.values()), reverse=True) for step in each.logprobs] for each in found]
    return Written(
        [list(each.token_ids) for each in found],
        [[row[0] for row in each] for each in rows],
        [[row[0] - row[1] for row in each] for each in rows],
    )


def compared(one: Written, other: Written) -> Compared:
    """Token by token until the first that differs: behind it the two write different texts."""
    tokens = differing = ties = 0
    distance = 0.0
    for i, (ours, theirs) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            tokens += 1
            if a != b:
                tied = one.margins[i][at] < TIE
                ties, differing = ties + tied, differing + (not tied)
                break
            distance = max(distance, abs(one.logprobs[i][at] - other.logprobs[i][at]))
    return Compared(tokens, differing, ties, distance)
