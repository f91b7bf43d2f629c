"""Weights that are rounded on demand: which matrices have 8 bits because 4 cost too much, and what the rest costs.

Rounding to nearest is a trap for small models. So it is measured on some text of Python's own manual: the
Kullback-Leibler divergence (KL) of the engine's next-token distribution from the dense model's. Matrices get 8 bits in
the order of their weights' relative error, a larger share in each try, until the KL is below a bound.
"""

import logging
from dataclasses import replace
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu_train.engine.cpu.engine import CpuEngine
from dejavu_train.engine.cpu.prefill import logits_of
from dejavu_train.engine.cpu.weights import CpuWeights, matrices
from dejavu_train.engine.cpu_limits import HALF
from dejavu_train.families import blocks_of, dims_of
from dejavu_train.families.plain import plain_block
from dejavu_train.ground.errors import UserError
from dejavu_train.models.int4 import CodedLinear
from dejavu_train.models.load import load_tokenizer
from dejavu_train.quantize.rounding import QUICK_RANGES, round_nearest

MOST = 0.05  # nats of KL that rounding may cost
SHARES = (0.0, 0.25, 0.5, 0.75)  # of the matrices that have 8 bits, tried in turn. Behind them all have
TOKENS, SAMPLED_ROWS = 256, 64
TOPICS = ("lambda", "for", "try", "import", "with")  # of the manual
logger = logging.getLogger(__name__)


def read_weights(model: Any, stored: str | None) -> CpuWeights:
    """The weights of a model as the engine keeps them in this format.

    Logs what rounding to 4 bits costs. Codes of a 4-bit model are its own, and nothing is chosen.
    """
    if stored != "int4" or isinstance(blocks_of(model)[0].up, CodedLinear):
        return CpuWeights.from_model(model, stored)
    ids = _tokens(model)
    forward = (getattr(model, "dense_class", None) or type(model)).forward  # a sparse model's own would come back here
    with torch.no_grad():
        dense = forward(model, ids[None]).logits[0].float().log_softmax(-1)
    errors = _errors(model)
    order = np.argsort(-errors, axis=None)
    for share in SHARES:
        wide = np.zeros(errors.shape, bool)
        wide.flat[order[: round(share * int((errors > 0).sum()))]] = True
        weights = CpuWeights.from_model(model, stored, wide=wide)
        lost, agreement = _lost(weights, ids, dense)
        if lost <= MOST:
            break
    else:
        weights = CpuWeights.from_model(model, "int8")
        lost, agreement = _lost(weights, ids, dense)
    note = f"costs {lost:.2g} nats of KL and agrees in {agreement:.1%} of {len(ids)} greedy tokens"
    logger.warning(
        "weights rounded to nearest, %s: %s; python -m dejavu_train.quantize rounds better", weights.describe(), note
    )
    return replace(weights, note=note)


def _tokens(model: Any) -> Tensor:
    """Ids of some text, where the model's tokenizer is there, else random ones."""
    most = min(TOKENS, dims_of(model.config).max_positions - 1)
    try:
        text = " ".join(" ".join(topics[name] for name in TOPICS).split())
        found = load_tokenizer(model.config.name_or_path)(text).input_ids[:most]
        if len(found) == most:
            return torch.tensor(found)
    except (UserError, OSError, ValueError):
        logger.warning("the cost of rounding is measured on random tokens, because the model has no tokenizer here")
    return torch.randint(model.config.vocab_size, (most,), generator=torch.Generator().manual_seed(0))


def _errors(model: Any) -> np.ndarray:
    """(L, 5): squared error of 4 bits over a sample of rows of each matrix, relative. 0 of a part that is not there."""
    shape = dims_of(model.config)
    found = np.zeros((shape.n_layers, 5))
    for layer, block in enumerate(blocks_of(model)):
        for part, weight in matrices(plain_block(block), shape.n_kv_heads).items():
            rows = weight[:: max(1, len(weight) // SAMPLED_ROWS)].detach().float()
            rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % HALF))
            codes, scales = round_nearest(rows, HALF, QUICK_RANGES)
            off = codes * scales.float().repeat_interleave(HALF, dim=1) - rows
            found[layer, part] = float(off.square().sum() / rows.square().sum().clamp_min(1e-30))
    return found


def _lost(weights: CpuWeights, ids: Tensor, dense: Tensor) -> tuple[float, float]:
    """KL in nats a token from log-probabilities (T, V), and the share of greedy tokens that agree."""
    engine = CpuEngine(weights, context=len(ids) + 1)
    try:
        behind = engine.prompt_states(ids.tolist())
        ours = logits_of(weights, behind, 0, 0).log_softmax(-1)
    finally:
        engine.close()
    lost = (dense.exp() * (dense - ours)).sum(-1).mean()
    return float(lost), float((ours.argmax(-1) == dense.argmax(-1)).float().mean())
