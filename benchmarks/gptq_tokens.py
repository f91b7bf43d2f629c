"""GPTQ of opt-mini by calibration tokens, seed, settings, and with second moments and their factor in float64.

    python -m benchmarks.gptq_tokens --csv benchmarks/results/gptq_tokens.csv      three minutes of a GPU

A CPU takes 20 s a row and more. Texts are those that `benchmarks/texts.py prepare` writes and the model's own that
calibrates nothing, 10,000 tokens of each (20,000 of its own); a row has the mean divergence from the fp16 model on
each, in nats. `own` and `val_docs` are what a setting may be chosen on.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from benchmarks.quantize import WINDOW, check_texts, in_memory, own_text, score
from benchmarks.rivals import log_probabilities
from benchmarks.rows import append_row, commit, five_digits
from dejavu_train.data.text import TextSource, load_documents
from dejavu_train.errors import exit_on_user_error
from dejavu_train.evaluation.perplexity import eval_batches, hold_out
from dejavu_train.models.opt import load_opt, load_tokenizer, resolve_device
from dejavu_train.quantize import gptq, layer
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.gptq import Damping, inverse_factor

TEXTS = ("val_docs", "docs", "licences", "books", "wikitext", "code")
TOKENS = (32_000, 64_000, 128_000, 256_000, 370_000)
COMPARED = (64_000, 370_000)  # with which settings, and float64 for every seed, are compared
SETTINGS: tuple[dict[str, Any], ...] = (
    *({"damp_mean": share} for share in (0.003, 0.03, 0.1)), *({"damp_own": share} for share in (0.01, 0.03, 0.1)),
    {"correct_bias": False}, {"act_order": True},
)  # fmt: skip


class WideMoments(layer.Moments):
    """The same sums in float64."""

    def add(self, inputs: Tensor, real: Tensor) -> None:
        super().add(inputs.double(), real)

    @property
    def mean(self) -> Tensor:
        return super().mean.float()

    def products(self) -> Tensor:
        return super().products().float()

    def centred(self) -> Tensor:
        return super().centred().float()


def wide_factor(hessian: Tensor, damping: Damping) -> Tensor:
    """`inverse_factor` in float64."""
    return inverse_factor(hessian.double(), damping).float()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--data", default=".data")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--csv", default="benchmarks/results/gptq_tokens.csv")
    options = parser.parse_args(argv)
    check_texts(options.data, TEXTS)
    device = resolve_device(options.device)
    model, tokenizer = load_opt(options.model, device=device), load_tokenizer(options.model)
    corpora = {"own": own_text(options.model, 20_000)}
    for name in TEXTS:
        documents = load_documents(TextSource(source=f"{options.data}/{name}.jsonl"))[0]
        corpora[name] = hold_out(documents, tokenizer, WINDOW, 10_000, seed=1 if name == "val_docs" else 0)
    batches = {name: list(eval_batches(corpus, 2048, device)) for name, corpus in corpora.items()}
    dense = {name: [log_probabilities(model, batch) for batch in several] for name, several in batches.items()}
    plain = layer.Moments, inverse_factor
    kept = commit()

    def run(tokens: int, seed: int, wide: bool = False, **settings: Any) -> None:
        layer.Moments, gptq.inverse_factor = (WideMoments, wide_factor) if wide else plain  # type: ignore[misc]
        began = time.monotonic()
        quantised = in_memory(
            QuantizeConfig(model=options.model, device=str(device), tokens=tokens, seed=seed, **settings)
        )
        label = " ".join(f"{name}={value}" for name, value in settings.items())
        row: dict[str, Any] = {"tokens": tokens, "seed": seed, "float": 64 if wide else 32, "settings": label}
        for name, several in batches.items():
            found = score(quantised, None, several, dense[name], len(corpora[name].document_tokens))
            row[name] = float(found.kl.sum() / corpora[name].tokens)
        row |= {"seconds": time.monotonic() - began, "device": str(device), "commit": kept}
        append_row(options.csv, five_digits(row), list(row))
        print(row, flush=True)

    for seed in options.seeds:
        for tokens in options.tokens:
            run(tokens, seed)
            if seed == 0 or tokens in COMPARED:
                run(tokens, seed, wide=True)
    for tokens in [each for each in options.tokens if each in COMPARED]:
        for settings in SETTINGS:
            run(tokens, 0, **settings)


if __name__ == "__main__":
    raise SystemExit(exit_on_user_error(main))
