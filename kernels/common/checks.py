"""Checks of what a kernel is given: one line names the tensor, and the number, dtype or device that does not fit."""

import os

import torch
from torch import Tensor

# As Triton reads it; whoever loads 4-bit weights imports this module, and needs no Triton for that.
INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
HEAD_DIMS = (16, 32, 64, 80, 128)
MAX_BATCH = 32  # one bit a batch row in an int32
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTIZED_TYPES = (torch.int8, torch.float8_e4m3fn)


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


def check_projection(
    x: Tensor,
    d: int,
    bias: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: Tensor,
) -> tuple[int, int, int]:
    """The tensors of a q/k/v projection of d columns fit each other; returns (B, h, head_dim). Not the weight's."""
    check_device("q", q)
    batch, n_heads, head_dim = q.shape
    check_head_dim(head_dim)
    check_shape("bias", bias, n_heads, 3, head_dim)
    capacity = k_cache.shape[2]
    check_shape("k_cache", k_cache, batch, n_heads, capacity, head_dim)
    check_shape("v_cache", v_cache, batch, n_heads, capacity, head_dim)
    check_shape("position", position, batch)
    if x.shape[-1] != d:
        raise ValueError(f"the input has {x.shape[-1]} columns, the weight {d}")
    return batch, n_heads, head_dim
