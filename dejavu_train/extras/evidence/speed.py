"""Part 2: milliseconds of a token, by variant, rows and length of the prompt, through the engines."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dejavu_train.evaluation.timing import (
    CPU,
    DENSE_CPU,
    DENSE_ENGINE,
    READ_CPU,
    READ_ENGINE,
    TRITON,
    WARM_UP,
    time_decoding,
    time_engine,
)
from dejavu_train.extras.evidence.cell import Cell, Row, Work
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.families.dims import SILENT
from dejavu_train.ground.errors import UserError
from dejavu_train.sparse.model import SparseCausalLM

OPTIONS = ("text", "window", "seed", "rows", "prompts", "new_tokens", "four_bits")
HUGGING_FACE, ALL_ROWS, EXACT, SPARSE = "transformers", "dense", "exact skip", "sparse"
FOUR_BITS, BOTH, LOSSLESS = "4 bits", "sparse, 4 bits", "lossless"
CALLS = 3  # of lossless decoding that count
_BITS = {FOUR_BITS: 0.28, BOTH: 0.28}  # of a dense step, about


def names(subject: Subject) -> list[str]:
    """Variants that this subject can have."""
    exact = [EXACT] if subject.dims.activation in SILENT else []
    sparse = [SPARSE, FOUR_BITS, BOTH, LOSSLESS] if subject.bundle is not None else [FOUR_BITS]
    return [HUGGING_FACE, ALL_ROWS, *exact, *sparse]


def work(subject: Subject) -> Work:
    """Cells for every variant: rows behind the first prompt, then longer prompts of one row."""
    config, made, rates = subject.config, Work(), subject.rates
    limit = subject.dims.max_positions
    room = limit - config.new_tokens - WARM_UP
    fitting = [prompt for prompt in config.prompts if prompt <= room]
    for prompt in config.prompts:
        if prompt not in fitting:
            made.missing.append((f"speed behind a prompt of {prompt:,}", f"the model has {limit:,} positions"))
    if not fitting:
        return made
    pairs = [(rows, fitting[0]) for rows in config.rows] + [(1, prompt) for prompt in fitting[1:]]
    if subject.bundle is None:
        made.missing.append(("speed of the sparse model, and lossless", "no bundle was given (--bundle)"))
    if EXACT not in names(subject):
        made.missing.append(("exact skip", f"{subject.dims.activation} makes no neuron silent"))
    for variant in names(subject):
        for rows, prompt in pairs[:1] if variant == HUGGING_FACE else pairs:
            if variant == LOSSLESS and rows > 1:
                continue
            steps = (config.new_tokens + WARM_UP) * _BITS.get(variant, 1.0) * (1 + 0.15 * rows)
            seconds = rates.load / 2 + steps * rates.step + rows * prompt * rates.token
            label = f"{variant}, {rows} row{'s' * (rows > 1)}, prompt {prompt}"
            made.cells.append(Cell(label, seconds, partial(measure, subject, variant, rows, prompt)))
    return made


def measure(subject: Subject, variant: str, rows: int, length: int) -> list[Row]:
    """One row. Raises UserError where an engine refuses."""
    prompt, n = prompt_of(subject, rows, length), subject.config.new_tokens
    if variant == LOSSLESS:
        return [_lossless(subject, prompt, n)]
    if variant == HUGGING_FACE:
        timing = time_decoding(subject.dense, variant, prompt, n)
    else:
        model = subject.four_bits if variant in (FOUR_BITS, BOTH) else subject.dense
        bundle = subject.bundle if variant in (SPARSE, BOTH) else None
        timing = time_engine(model, bundle, engine_of(subject, variant), prompt, n)
    ms, rows = timing.ms_per_token, timing.batch
    return [
        {"variant": variant, "rows": rows, "prompt": timing.prompt, "ms": ms["p50"], "low": ms["p20"],
         "high": ms["p80"], "tokens_per_second": 1e3 * rows / ms["p50"], "megabytes": timing.megabytes_per_token,
         "accepted": None, "device": timing.device}
    ]  # fmt: skip


def engine_of(subject: Subject, variant: str) -> str:
    """The engine's name in ``evaluation.timing``."""
    read, exact, sparse = (READ_CPU, DENSE_CPU, CPU) if subject.on_cpu else (READ_ENGINE, DENSE_ENGINE, TRITON)
    silent = subject.dims.activation in SILENT
    return {ALL_ROWS: read if silent else exact, SPARSE: sparse, BOTH: sparse}.get(variant, exact)


def prompt_of(subject: Subject, rows: int, length: int) -> Tensor:
    """(rows, length) token ids of the first text, windows one behind the other."""
    tokens = [token for window in next(iter(subject.texts.values())).windows for token in window]
    tokens = tokens * -(-length // len(tokens))
    return torch.tensor([tokens[:length]]).repeat(rows, 1)


def _lossless(subject: Subject, prompt: Tensor, n: int) -> Row:
    """The median of the last `CALLS` calls. As many before compile, record, and measure lengths of drafts."""
    bundle: Any = subject.bundle
    backend = "cpu" if subject.on_cpu else "triton"
    model = SparseCausalLM.from_model(subject.dense, bundle, backend, sparse_from="prompt")
    ids = prompt.to(subject.device)
    settings = {"max_new_tokens": n, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    reports = []
    for _ in range(2 * CALLS):
        model.generate(ids, attention_mask=torch.ones_like(ids), lossless=True, **settings)
        reports.append(model.lossless_report() or {})
    found = sorted(reports[CALLS:], key=lambda report: report.get("tokens_per_second", 0.0))[CALLS // 2]
    if not found.get("tokens_per_second"):
        raise UserError("lossless decoding wrote nothing")
    rate = found["tokens_per_second"]
    return {
        "variant": LOSSLESS, "rows": 1, "prompt": prompt.shape[1], "ms": 1e3 / rate, "low": None, "high": None,
        "tokens_per_second": rate, "megabytes": None, "accepted": found["acceptance"], "device": str(subject.device),
    }  # fmt: skip
