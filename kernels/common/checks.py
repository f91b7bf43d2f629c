"""What the attention, LM head and sampling kernels share: tiles of a dimension, launch options, checks."""

import torch
import triton

INTERPRET: bool = bool(triton.knobs.runtime.interpret)
HEAD_DIMS = (16, 32, 64, 80, 128)


def two_tiles(d: int) -> tuple[int, int]:
    """Splits d, no power of two as `tl.arange` wants it, into the largest one and the one that covers the rest (or 0).

    >>> two_tiles(9216), two_tiles(7168), two_tiles(4096)
    ((8192, 1024), (4096, 4096), (4096, 0))
    """
    first = 1 << (d.bit_length() - 1)
    rest = d - first
    return first, triton.next_power_of_2(rest) if rest else 0


def n_sms(device: torch.device) -> int:
    """Multiprocessors of the device; under the interpreter a handful, for speed."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def use_pdl(pdl: bool, device: torch.device) -> bool:
    """Programmatic dependent launch needs compute capability 9.0; the interpreter has no such instruction."""
    return pdl and not INTERPRET and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Refuses a CPU tensor unless Triton's interpreter runs the kernels."""
    if tensor.device.type != "cuda" and not INTERPRET:
        raise ValueError(f"{name}: expected a CUDA tensor, got one on {tensor.device}; use the reference on the CPU")


def check_shape(name: str, tensor: torch.Tensor, *shape: int) -> None:
    """Refuses a tensor of another shape, or one that is not contiguous, and says which numbers do not fit."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def check_head_dim(head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head dim {head_dim} is not supported, expected one of {', '.join(map(str, HEAD_DIMS))}")


def check_projection(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: torch.Tensor,
) -> tuple[int, int, int, int]:
    """The tensors of a q/k/v projection fit each other; returns (B, h, head_dim, d)."""
    check_device("q", q)
    batch, n_heads, head_dim = q.shape
    check_head_dim(head_dim)
    d = weight.shape[-1]
    check_shape("weight", weight, n_heads, 3, head_dim, d)
    check_shape("bias", bias, n_heads, 3, head_dim)
    capacity = k_cache.shape[2]
    check_shape("k_cache", k_cache, batch, n_heads, capacity, head_dim)
    check_shape("v_cache", v_cache, batch, n_heads, capacity, head_dim)
    check_shape("position", position, batch)
    if x.shape[-1] != d:
        raise ValueError(f"the input has {x.shape[-1]} columns, the weight {d}")
    return batch, n_heads, head_dim, d
