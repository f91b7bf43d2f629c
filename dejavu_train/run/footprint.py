"""Bytes that a run by layers holds and writes, for ``--check`` and ``--plan``. A test measures them.

What a stage works with is counted in tensors of a batch that are there at once. Wide ones have a row's neurons, others
its states. The logits of the vocabulary are made in blocks of positions, but for one row of log-probabilities.
"""

import dataclasses

from dejavu_train.calibration.curves import CASCADE_PROBES, HEAD_PROBES, MLP_PROBES
from dejavu_train.calibration.sensitivity import block_positions
from dejavu_train.data.config import MEAN_TOKENS
from dejavu_train.data.untrained import TOKENS
from dejavu_train.families import ModelDims, Target
from dejavu_train.families.dims import SMOOTH
from dejavu_train.training.config import RunConfig

TUNED_COPIES = 7  # of a predictor that is tuned: itself, its gradient, two moments, and three in a state that is saved
SORTED_BYTES = 32  # of one neuron while a smooth activation's are sorted


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes.

    Attributes:
        weights: of a layer and what stands around the layers, on the device. work: of a stage's tensors there at most.
        host: of two layers as stored in 16 bits, one of which is read ahead, and of what tuning has at home there. For
            a GPU each has a block whose size is a power of two.
        states: on the disk beside shards.
    """

    weights: int
    work: int
    host: int
    states: int


def footprint(config: RunConfig, shape: ModelDims, tokens: int) -> Footprint:
    """Memory of a run by layers that records so many ``tokens``.

    Args:
        config: settled.
    """
    weights = (shape.layer_weights + shape.outer_weights) * _itemsize(config)
    calibrating = calibrating_work(config, shape) if config.calibrate.sensitivity_tokens else 0
    tuning = (tuning_work(config, shape), tuning_host(config, shape)) if config.tune.steps else (0, 0)
    work, layer = max(collecting_work(config, shape), calibrating, tuning[0]), 2 * shape.layer_weights
    if config.collect.device != "cpu":
        layer = 1 << (layer - 1).bit_length()  # what torch takes for a block of pinned memory
    return Footprint(weights, work, 2 * layer + tuning[1], _states(config, shape, tokens))


def collecting_work(config: RunConfig, shape: ModelDims) -> int:
    """Bytes of a batch that is recorded, or of the logits by which the model is judged."""
    size, rows = _itemsize(config), config.collect.batch_size * config.collect.window
    neuron = 5 * size + (SORTED_BYTES if shape.activation in SMOOTH else 0)
    logits = min(config.collect.window, TOKENS) * shape.vocab_size * (8 + size)
    return max(rows * max(12 * size * shape.d_model, neuron * shape.d_ffn), logits)


def calibrating_work(config: RunConfig, shape: ModelDims) -> int:
    """Bytes of a window at all thresholds of a probe, of its logits, or of a second stage that is made."""
    size, window, cascade = _itemsize(config), config.collect.window, config.calibrate.cascade is not None
    rows = max(len(HEAD_PROBES) if config.heads.enabled else 0, len(CASCADE_PROBES if cascade else MLP_PROBES))
    maps = 4 if shape.gated else 2
    row = size * max(8 * shape.d_model, maps * shape.d_ffn + 3 * shape.d_model) + shape.d_ffn
    block = min(block_positions(shape.vocab_size), window)
    logits = 4 * shape.vocab_size * max(2 * window, window + 4 * block)
    planes = 8 * shape.d_model * shape.d_ffn if cascade else 0  # in fp32, twice
    return max(window * (rows * row + 4 * shape.d_ffn), logits, planes)


def tuning_work(config: RunConfig, shape: ModelDims) -> int:
    """Bytes of a pass through one layer with its graph or of its logits, beside states and gradients of all passes."""
    size, rows, tokens = _itemsize(config), *_tokens_of_step(config)
    neurons = (10 if shape.gated else 7) * size + 32
    layer = rows * (neurons * shape.d_ffn + 12 * size * shape.d_model)
    logits = rows * shape.vocab_size * (2 * size + 28)
    largest = max(config.mlp.rank_of(number) for number in shape.layers_of(Target.MLP))
    planes = 8 * shape.d_model * shape.d_ffn if config.calibrate.cascade is not None else 0
    predictor = 20 * largest * (shape.d_model + shape.d_ffn)
    return max(layer + planes, logits) + predictor + 4 * tokens * size * shape.d_model


def tuning_host(config: RunConfig, shape: ModelDims) -> int:
    """Bytes that sparse passes of a step read in every layer, and of predictors with their moments and gradients."""
    _, tokens = _tokens_of_step(config)
    per_layer = 2 if max(config.mlp.lookahead, config.heads.lookahead) else 1  # and what later layers read of it
    inputs = tokens * per_layer * _itemsize(config) * shape.d_model * shape.n_layers
    ranks = sum(config.mlp.rank_of(number) for number in shape.layers_of(Target.MLP))
    return inputs + 4 * TUNED_COPIES * ranks * (shape.d_model + shape.d_ffn)


def _tokens_of_step(config: RunConfig) -> tuple[int, int]:
    """Tokens of one pass, and of all passes of a step."""
    passes, windows = config.tune.passes(config.collect.window)
    return windows * config.collect.window, passes * windows * config.collect.window


def probed_rows(config: RunConfig, shape: ModelDims) -> int:
    """How many densities of all layers are tried for sensitivities."""
    neurons = MLP_PROBES if config.calibrate.cascade is None else CASCADE_PROBES
    tried = {Target.MLP: len(neurons), Target.HEADS: len(HEAD_PROBES)}
    return sum(tried[job.target] for job in config.all_jobs(shape))


def _states(config: RunConfig, shape: ModelDims, tokens: int) -> int:
    """Bytes of collecting, or of calibrating where it is more."""
    calibrate, row = config.calibrate, shape.d_model * _itemsize(config)
    probed = probed_rows(config, shape) * calibrate.sensitivity_tokens
    learnt = calibrate.head_loss_tokens * shape.n_layers if config.heads.enabled else 0
    return row * max(2 * (tokens + MEAN_TOKENS), probed + learnt)


def _itemsize(config: RunConfig) -> int:
    return 4 if config.collect.dtype == "float32" else 2


def gigabytes(n_bytes: float) -> str:
    """In words."""
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 or not n_bytes else f"{n_bytes / 1e6:,.0f} MB"


def memory_line(config: RunConfig, shape: ModelDims, tokens: int) -> str:
    """A line of ``--check`` and ``--plan``."""
    held = footprint(config, shape, tokens)
    return (
        f"by layers: {gigabytes(held.weights)} of weights and up to {gigabytes(held.work)} of work on the device,"
        f" {gigabytes(held.host)} in host memory, and beside the shards {gigabytes(held.states)} of states on the disk"
    )
