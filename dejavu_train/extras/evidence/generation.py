"""Part 5: long answers, written and judged through lm-eval: accuracy, tokens an answer, right answers a second.

Answers are greedy, one row at a time. Dense is the exact engine, which leaves rows of silent neurons out.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from dejavu_train.extras.evidence.cell import Cell, Row, Work
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.extras.evidence.variants import DENSE, FOUR_BITS, SPARSE
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import write_text
from dejavu_train.sparse.model import SparseCausalLM

OPTIONS = ("sets", "contexts", "run_code", "local", "limit", "set_shots", "answer_tokens", "four_bits", "seed")
LOSSLESS = "lossless"
_FACTORS = {SPARSE: 0.7, LOSSLESS: 0.9, FOUR_BITS: 0.3}  # of a dense step, about


def work(subject: Subject) -> Work:
    """A cell for each set and variant. Sets that are nowhere are named with the reason."""
    made, rates, config = Work(), subject.rates, subject.config
    for name in subject.set_names:
        try:
            count = len(subject.questions(name))
        except UserError as error:
            made.missing.append((f"answers to {name}", str(error)))
            continue
        for variant in [DENSE, FOUR_BITS] if subject.bundle is None else [DENSE, SPARSE, LOSSLESS, FOUR_BITS]:
            step = rates.step * _FACTORS.get(variant, 1.0) * config.answer_tokens
            seconds = rates.load + count * (step + 700 * rates.token)
            made.cells.append(Cell(f"{name}, {variant}", seconds, partial(measure, subject, name, variant)))
    return made


def _writer(subject: Subject, variant: str) -> Any:
    """A variant as a model of lm-eval."""
    from dejavu_train.extras.tasks.model import DejavuLM  # imports lm-eval

    sparse = subject.bundle if variant in (SPARSE, LOSSLESS) else None
    model = subject.four_bits if variant == FOUR_BITS else subject.dense
    made = SparseCausalLM.from_model(model, sparse or subject.exact, "auto", sparse_from="prompt")
    return DejavuLM(made, subject.tokenizer, batch_size=1, lossless=variant == LOSSLESS)


def measure(subject: Subject, name: str, variant: str) -> list[Row]:
    """One row. The answers are written beside the page."""
    from dejavu_train.extras.tasks.sets import SETS, build_set
    from dejavu_train.extras.tasks.tasks import ask

    config, known, made = subject.config, name.split()[0], _writer(subject, variant)
    asked = build_set(known, subject.set(name), config.limit, config.set_shots, made, config.answer_tokens)
    instances = asked.tasks[known].instances
    made.generate_until(instances[:1])  # compiles what is compiled once
    made.written.clear()
    run = ask(made, asked)
    right = [float(each[SETS[known].metric]) for each in run.samples[known]]
    texts = [each.resps[0] for each in instances]
    lines = [json.dumps({"record": i, "right": good, "answer": texts[i]}) for i, good in enumerate(right)]
    stem = f"{name}-{variant}".replace(" ", "-")
    write_text(Path(config.output) / "answers" / f"{stem}.jsonl", "\n".join([*lines, ""]))
    counts, n, hits = made.written, len(texts), sum(right)
    most = instances[0].args[1]["max_gen_toks"]
    return [{
        "set": name, "variant": variant, "examples": n, "accuracy": hits / n,
        "error": math.sqrt(hits * (n - hits) / n**3), "tokens_per_answer": sum(counts) / n,
        "tokens_per_second": sum(counts) / run.seconds, "right_per_second": hits / run.seconds, "seconds": run.seconds,
        "cut": sum(count >= most for count in counts) / n, "beginning_cut": 1 - asked.fitting, "shots": asked.shots,
    }]  # fmt: skip
