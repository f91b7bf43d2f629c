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
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from dejavu_train.engine.cpu.engine import CpuEngine
from dejavu_train.engine.cpu.prefill import QUIET_SECONDS, logits_of
from dejavu_train.engine.cpu.weights import CpuWeights, matrices
from dejavu_train.engine.cpu_limits import HALF
from dejavu_train.families import blocks_of, dims_of
from dejavu_train.families.plain import plain_block
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.machine import free_memory
from dejavu_train.models.hooks import decoder_layers
from dejavu_train.models.int4 import CodedLinear
from dejavu_train.models.layer_exchange import LayerExchange, first, own_forward, placed
from dejavu_train.models.load import load_tokenizer
from dejavu_train.quantize.rounding import QUICK_RANGES, round_nearest

MOST = 0.05  # nats of KL that rounding may cost
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the matrices that have 8 bits, tried in turn
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
    dense, errors = _read_once(model, ids)
    order = np.argsort(-errors, axis=None)
    weights: Any = None
    for share in SHARES:
        wide = np.zeros(errors.shape, bool)
        wide.flat[order[: round(share * int((errors > 0).sum()))]] = True
        weights = None  # never two at a time
        weights = CpuWeights.from_model(model, stored if share < 1 else "int8", wide=wide if share < 1 else None)
        lost, agreement = _lost(weights, ids, dense)
        if lost <= MOST:
            break
        free = free_memory()
        if free is not None and weights.nbytes + free < CpuWeights.needed(model, "int8"):
            logger.warning("more matrices of 8 bits do not fit into the memory that is free")
            break
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


@torch.no_grad()
def _read_once(model: Any, ids: Tensor) -> tuple[Tensor, np.ndarray]:
    """Log-probabilities (T, V) of the dense model, and (L, 5) the relative squared error of 4 bits of each matrix.

    Layers run one after the other in fp32, whatever the model has: half-precision weights may lie mapped in files that
    are larger than the memory. An error is of a sample of rows, and 0 of a part that is not there.
    """
    exchange, shape = LayerExchange(model, layers := decoder_layers(model)), dims_of(model.config)
    errors = np.zeros((shape.n_layers, 5))
    progress = tqdm(total=len(layers), desc="measuring", unit="layer", leave=False, delay=QUIET_SECONDS, disable=None)

    def run(own: Any, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, _in_fp32, (args, kwargs))
        with placed(own, torch.device("cpu"), torch.float32, {}):
            return own_forward(own, given.float(), *args, **kwargs)

    def act(number: int, own: Any, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for part, weight in matrices(plain_block(blocks_of(model)[number]), shape.n_kv_heads).items():
            errors[number, part] = _error(weight[:: max(1, len(weight) // SAMPLED_ROWS)].float())
        progress.update()
        made = first(run(own, given, *args, **kwargs))
        return made.to(model.dtype) if own is layers[-1] else made

    forward = (getattr(model, "dense_class", None) or type(model)).forward  # a sparse model's own would come back here
    exchange.ask_first(ids[None, :2], run)
    with progress, exchange.exchanged(act):
        return forward(model, ids[None]).logits[0].float().log_softmax(-1), errors


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _error(rows: Tensor) -> float:
    """The relative squared error that 4 bits have of rows (n, d) fp32."""
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % HALF))
    codes, scales = round_nearest(rows, HALF, QUICK_RANGES)
    off = codes * scales.float().repeat_interleave(HALF, dim=1) - rows
    return float(off.square().sum() / rows.square().sum().clamp_min(1e-30))


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
