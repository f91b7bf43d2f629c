"""Checks of what a kernel is given: one line names the tensor, and the number, dtype or device that does not fit."""

import os

import torch
from torch import Tensor

from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.limits import HEAD_DIMS
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import COLUMNS_PER_WORD, Int4Rows
from dejavu_train.kernels.formats.matrix import Linear, Matrix

# As Triton reads it; whoever loads 4-bit weights imports this module, and needs no Triton for that.
INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
MAX_BATCH = 32  # one bit a batch row in an int32
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def runs_on(device: torch.device) -> bool:
    """Whether kernels run on a device: a GPU, or any under Triton's interpreter."""
    return device.type == "cuda" or INTERPRET


def check_device(name: str, tensor: Tensor) -> None:
    """Refuses a tensor where no kernel runs."""
    if not runs_on(tensor.device):
        raise ValueError(f"{name}: expected a CUDA tensor, got one on {tensor.device}; use the reference on the CPU")


def check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    """Refuses a tensor of another shape, or one that is not contiguous."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: expected {allowed}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor
) -> None:
    """Refuses another shape or dtype, another device than that of `like`, and a tensor that is not contiguous."""
    check_shape(name, tensor, *shape)
    check_dtype(name, tensor, dtypes)
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, the input on {like.device}")


def check_int4(name: str, rows: Matrix, shape: tuple[int, ...], like: Tensor) -> Int4Rows:
    """The matrix, if it has 4 bits. Refuses another format, shape, dtype or device, and groups that do not divide d."""
    if rows.format is not Format.INT4:
        raise ValueError(f"{name}: expected a matrix of int4, got {rows.format}")
    *leading, d = shape
    require(d % COLUMNS_PER_WORD == 0, f"{name}: {d} columns are no multiple of {COLUMNS_PER_WORD}, a word's")
    check_tensor(f"{name}.words", rows.words, (*leading, d // COLUMNS_PER_WORD), (torch.int32,), like)
    groups = rows.scales.shape[-1]
    require(groups > 0 and d % groups == 0, f"{name}: {groups} groups do not divide {d} columns")
    check_tensor(f"{name}.scales", rows.scales, (*leading, groups), (torch.float16,), like)
    whole = 4 * COLUMNS_PER_WORD  # what a thread reads at once, and shares a scale
    require(
        rows.group % whole == 0 or groups == 1,
        f"{name}: groups of {rows.group} columns; expected a multiple of {whole}, or one group a row",
    )
    return rows


def check_numbers(name: str, weight: Matrix, *shape: int) -> Tensor:
    """The numbers of a matrix. Refuses another shape, and a matrix of codes."""
    if weight.format is Format.INT4:
        raise ValueError(f"{name}: expected a matrix of numbers, got {weight.format}")
    check_shape(name, weight.numbers, *shape)
    return weight.numbers


def check_rows(name: str, weight: Matrix, shape: tuple[int, ...], like: Tensor) -> None:
    """Rows of any format have this shape."""
    if weight.format is Format.INT4:
        check_int4(name, weight, shape, like)
    else:
        check_shape(name, weight.numbers, *shape)


def check_input(name: str, x: Tensor) -> tuple[int, int]:
    """x must be (B, d), contiguous, B <= 32, on a GPU (or anywhere under TRITON_INTERPRET=1). Returns (B, d)."""
    if x.dim() != 2:
        raise ValueError(f"{name} must have 2 dimensions (batch, width), got shape {tuple(x.shape)}")
    check_device(name, x)
    check_dtype(name, x, FLOAT_TYPES)
    batch, width = x.shape
    check_shape(name, x, batch, width)
    if not 1 <= batch <= MAX_BATCH:
        raise ValueError(f"{name} has a batch of {batch}, the kernels take 1 to {MAX_BATCH}")
    return batch, width


def check_head_dim(head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head dim {head_dim} is not supported, expected one of {', '.join(map(str, HEAD_DIMS))}")


def check_attention(step: HeadStep, slots: bool = False) -> tuple[int, int, int]:
    """(heads of K and V, heads of q that share each, head_dim) of q (B, heads, head_dim) and the caches of B rows.

    Watermarks are looked at where there are some. slots: caches of one row will do.
    """
    q, cache = step.q, step.cache
    check_device("q", q)
    rows, n_q, head_dim = q.shape
    check_head_dim(head_dim)
    sequences, n_heads = len(cache.k) if slots else rows, cache.k.shape[1]
    require(sequences in (1, rows), f"caches of {sequences} sequences, expected 1 or {rows}")
    require(n_q % n_heads == 0, f"{n_heads} heads of K and V do not divide {n_q} heads")
    check_shape("q", q, rows, n_q, head_dim)
    for name, tensor in (("k_cache", cache.k), ("v_cache", cache.v)):
        check_shape(name, tensor, sequences, n_heads, cache.capacity, head_dim)
    if cache.watermark is not None:
        check_shape("watermark", cache.watermark, sequences, n_heads)
    check_shape("position", step.position, rows)
    return n_heads, n_q // n_heads, head_dim


def check_projection(x: Tensor, weights: Linear, step: HeadStep, slots: bool = False) -> tuple[int, int, int]:
    """`check_attention` of a q/k/v projection, whose input and weight must fit as well.

    Each head of K and V has the rows of the heads of q that share it, and its own of k and v.
    """
    n_heads, share, head_dim = check_attention(step, slots)
    d = weights.weight.shape[-1]
    check_shape("bias", weights.bias, n_heads, share + 2, head_dim)
    require(x.shape[-1] == d, f"the input has {x.shape[-1]} columns, the weight {d}")
    check_rows("weight", weights.weight, (n_heads, share + 2, head_dim, d), step.q)
    return n_heads, share, head_dim
