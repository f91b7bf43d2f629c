"""Scores of `study`: how far a bundle's sparse model is from the dense one, on the same tokens of every text."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.texts import VAL, WINDOW
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import measured_mlp_share
from dejavu_train.bundle.selector import Predicted
from dejavu_train.calibration.calibrate import windows_within
from dejavu_train.data.text import TextSource, load_documents
from dejavu_train.evaluation.perplexity import EvalBatch, EvalCorpus, _Meter, eval_batches, hold_out, increase
from dejavu_train.models.hooks import decoder_layers
from dejavu_train.models.opt import load_tokenizer
from dejavu_train.models.weight_format import FLOAT16
from dejavu_train.predictors.metrics import SelectionSums
from dejavu_train.sparse.masked import masking


def read_corpora(options: argparse.Namespace) -> dict[str, EvalCorpus]:
    tokenizer = load_tokenizer(options.model)
    found = {}
    for name in VAL:
        documents = load_documents(TextSource(source=str(next(Path(options.data).glob(f"{name}.jsonl*")))))[0]
        found[name] = hold_out(documents, tokenizer, WINDOW, options.val_tokens)
    return found


@torch.no_grad()
def score(
    model: Any, bundle: Bundle, held: EvalCorpus, points: dict[str, tuple[float, float]],
    shifts: dict[str, list[Tensor]], batch_tokens: int,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Divergence from the dense model, increase of perplexity and bytes of every point, on the same tokens."""
    predicted, means = Predicted(bundle, model.device, model), bundle.head_means(model.device)
    meter = _Meter(model, means)
    layers = range(bundle.shape.n_layers)
    documents = len(held.document_tokens)
    results = {
        name: {
            "bundle": bundle.at(mlp, heads),
            "sums": {(i, t): SelectionSums() for i in layers for t in ("mlp", "heads")},
            "candidates": dict.fromkeys(layers, 0), "kl": np.zeros(documents), "nats": np.zeros(documents),
        }
        for name, (mlp, heads) in points.items()
    }  # fmt: skip
    dense_nats = np.zeros(documents)
    for batch in eval_batches(held, batch_tokens, model.device):
        dense = _hidden(model, batch)
        for number, (name, result) in enumerate(results.items()):
            predicted.bundle = result["bundle"]

            def observe(
                layer: int, target: str, keep: Tensor | None, values: Tensor, result: Any = result,
                real: Tensor = batch.real,
            ) -> None:  # fmt: skip
                meter.add(result["sums"][layer, target], layer, target, keep, values, real)
                if target == "mlp" and layer in predicted.candidates:
                    result["candidates"][layer] += int(predicted.candidates[layer][real].sum())

            with masking(model, predicted, None, observe, means), shifted(model, shifts.get(name)):
                sparse = _hidden(model, batch)
            kl, nats, own = _compare(model, dense, sparse, batch)
            np.add.at(result["kl"], batch.document, kl)
            np.add.at(result["nats"], batch.document, nats)
            if number == 0:
                np.add.at(dense_nats, batch.document, own)
    for result in results.values():
        result["bytes"] = measured_mlp_share(result["bundle"], result["sums"], FLOAT16, result["candidates"])
        result["increase"], result["error"] = increase(result["nats"], dense_nats, held.document_tokens)
    return results


def _hidden(model: Any, batch: EvalBatch) -> Tensor:
    hidden: Tensor = model.model.decoder(input_ids=batch.ids, use_cache=False).last_hidden_state
    return hidden[batch.real]


def _compare(model: Any, dense: Tensor, sparse: Tensor, batch: EvalBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By window KL(dense || sparse), nats of the sparse and of the dense model, summed over its real tokens."""
    parts: list[list[Tensor]] = [[], [], []]
    targets = batch.targets[batch.real]
    for a, b, target in zip(dense.split(1024), sparse.split(1024), targets.split(1024), strict=True):
        p, q = (F.log_softmax(model.lm_head(states).float(), -1) for states in (a, b))
        parts[0].append((p.exp() * (p - q)).sum(-1))
        for place, values in ((1, q), (2, p)):
            parts[place].append(-values.gather(1, target[:, None])[:, 0])
    window = np.repeat(np.arange(len(batch.ids)), batch.real.sum(1).cpu().numpy())
    kl, nats, own = (np.bincount(window, torch.cat(values).double().cpu().numpy(), len(batch.ids)) for values in parts)
    return kl, nats, own


@contextlib.contextmanager
def shifted(model: Any, shifts: list[Tensor] | None) -> Iterator[None]:
    """Within the context fc2's biases are raised by ``shifts``."""
    biases = [block.fc2.bias for block in decoder_layers(model)]
    before = [bias.data for bias in biases]
    for bias, shift in zip(biases, shifts or [], strict=False):
        bias.data = bias.data + shift.to(bias)
    try:
        yield
    finally:
        for bias, value in zip(biases, before, strict=True):
            bias.data = value


@torch.no_grad()
def skipped_means(
    model: Any, bundle: Bundle, windows: Sequence[Sequence[int]], tokens: int, batch_tokens: int
) -> list[Tensor]:
    """By layer the mean (d,) of what the skipped neurons would have added, over the sparse model's own activations."""
    blocks = decoder_layers(model)
    totals = [torch.zeros(block.fc2.in_features, dtype=torch.float64, device=model.device) for block in blocks]
    chosen = windows_within(windows, tokens)
    held = EvalCorpus([list(w) for w in chosen], list(range(len(chosen))), [len(w) - 1 for w in chosen], 0)
    predicted = Predicted(bundle, model.device, model)

    for batch in eval_batches(held, batch_tokens, model.device):

        def observe(layer: int, target: str, keep: Tensor | None, values: Tensor, batch: EvalBatch = batch) -> None:
            if target == "mlp" and keep is not None:
                totals[layer] += (values.clamp_min(0) * ~keep)[batch.real].sum(0).double()

        with masking(model, predicted, None, observe, bundle.head_means(model.device)):
            _hidden(model, batch)
    return [block.fc2.weight.double() @ sums / held.tokens for block, sums in zip(blocks, totals, strict=True)]
