"""Memory of a decode engine on its device, in bytes, counted before anything is allocated."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dejavu_train.families import ModelDims, dims_of
from dejavu_train.ground.errors import UserError
from dejavu_train.kernels.common.limits import MOST_TOKENS, TILE_ROWS, TILED_FROM
from dejavu_train.models.int4 import CodedLinear

if TYPE_CHECKING:  # they load Triton, sizes do not
    from dejavu_train.engine.predictors import TargetPredictor
    from dejavu_train.engine.weights import DecodeWeights

SLACK = 2**28  # kernels, graphs, and what the allocator rounds up


class DoesNotFit(UserError):
    """The device lacks the memory for an engine."""


def cache_bytes(shape: ModelDims, batch: int, context: int, size: int, sparse_layers: int) -> dict[str, int]:
    """K/V of all layers, and the inputs that layers of selected heads keep, of numbers of `size` bytes."""
    row = batch * context * size
    kept = shape.n_kv_heads * shape.head_dim
    return {"K/V": 2 * shape.n_layers * kept * row, "kept inputs": sparse_layers * shape.d_model * row}


def scratch_bytes(shape: ModelDims, batch: int, packed: bool, packed_head: bool = False) -> int:
    """The residual stream at every half, logits, and one matrix of 4 bits written out in fp16.

    A matrix is written out where a prompt or more than eight rows meet it. The prompt's way there takes fp32 and int32
    as well. No prompt meets the LM head.
    """
    steps = 4 * batch * ((2 * shape.n_layers + 1) * shape.d_model + shape.vocab_size)
    rows = max(14 * shape.d_ffn if packed else 0, 2 * shape.vocab_size if packed_head and batch > MOST_TOKENS else 0)
    return steps + rows * shape.d_model


def late_bytes(shape: ModelDims, context: int, ranks: Iterable[int]) -> int:
    """Bytes of layers whose norm comes late (`kernels/lookahead/mlp_ahead.py`), by the ranks of the MLPs' predictors.

    Each holds sums of q/k/v's rows and factors of every position. Where the first half of the MLP's predictor is laid
    out as tiles it stands there once more, without its scales.
    """
    total, rows = 0, shape.n_kv_heads * (shape.kv_group + 2) * shape.head_dim
    for rank in ranks:
        tiles = -(-rank // TILE_ROWS) * TILE_ROWS * shape.d_model // 2 if shape.d_model >= TILED_FROM else 0
        total += 2 * 4 * rows + 2 * 4 * context + tiles
    return total


def weight_bytes(model: Any, dtype: torch.dtype) -> int:
    """Bytes of a Hugging Face model's weights in an engine of this dtype. 4-bit rows keep their own dtypes.

    Tables that maps between two widths are multiplied into count beside those they are made of.
    """
    coded = [module for module in model.modules() if isinstance(module, CodedLinear)]
    packed = {id(tensor) for module in coded for tensor in module.buffers()}
    floats: Iterable[Tensor] = model.parameters()
    dims = dims_of(model.config)
    made = 2 * dims.vocab_size * dims.d_model if dims.embedding_dim != dims.d_model else 0
    numbers = made + sum(p.numel() for p in floats)
    return sum(b.nbytes for b in model.buffers() if id(b) in packed) + dtype.itemsize * numbers


def held_bytes(weights: "DecodeWeights", predictors: Mapping[Any, "TargetPredictor"]) -> dict[str, int]:
    """Weights, LM head and embeddings included, each once, and predictors."""
    each = [tensor for p in predictors.values() for tensor in _matrices(p)]
    tables = list(weights.tables())

    def within(tensor: Tensor) -> bool:
        """Tell whether a tensor is a rank's rows of the embedding."""
        first = tensor.data_ptr()
        return any(t.data_ptr() <= first and first + tensor.nbytes <= t.data_ptr() + t.nbytes for t in tables)

    held = {t.data_ptr(): t.nbytes for t in (*tables, *(t for t in weights.tensors() if not within(t)))}
    return {"weights": sum(held.values()), "predictors": sum(tensor.nbytes for tensor in each)}


def _matrices(predictor: "TargetPredictor") -> tuple[Tensor, ...]:
    folded = () if predictor.folded is None else (predictor.folded,)  # beside its two matrices
    return (*folded, predictor.weights.down, predictor.weights.up)


def describe_memory(parts: Mapping[str, int]) -> str:
    """A line.

    >>> describe_memory({"weights": 90_000_000_000, "K/V": 9_700_000_000, "kept inputs": 0})
    'memory: weights 90 GB, K/V 9.7 GB; 99.7 GB in all'
    """
    listed = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in parts.items() if size)
    return f"memory: {listed}; {sum(parts.values()) / 1e9:.3g} GB in all"


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process could take."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def fits(sizes: Iterable[int], device: torch.device) -> bool:
    """Whether so many bytes and SLACK are free. Elsewhere than on a GPU nobody looks."""
    return device.type != "cuda" or sum(sizes) + SLACK <= free_bytes(device)


def check_room(parts: Mapping[str, int], device: torch.device) -> None:
    """Raise DoesNotFit where these parts, still to be allocated, are more than a GPU has free."""
    if not fits(parts.values(), device):
        free = free_bytes(device)
        raise DoesNotFit(
            f"the decode engine does not fit: {describe_memory(parts)} and {SLACK / 1e9:.2g} GB of slack, with"
            f" {free / 1e9:.3g} GB free on {device}; take a smaller context or batch, or weights of 4 bits"
        )
