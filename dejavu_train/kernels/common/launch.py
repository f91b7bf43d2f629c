"""Helpers of every launch: device functions for programmatic dependent launch (PDL), and launch settings.

`gdc_wait` returns when the predecessor has ended and its writes are visible, so buffers may be reused as in a plain
stream. `gdc_launch_dependents` is the trigger: when every program has called it, or ended, the next kernel may start.
Five rules keep that right:

1. Every program waits before any store, before any early return, and before it loads what a running kernel may write.
2. It triggers right behind its wait. A dependent then starts when all that is older than its predecessor has ended, so
   it may read that before it waits. Kernels whose successors have weights to load trigger before they wait instead:
   attention, first halves of predictors, packing, and sums of fc2.
3. Each kernel that triggers before it waits takes one more kernel out of what its dependent may read early.
4. Early reads of a buffer that every layer rewrites go past the L1 (`.cg`).
5. Embed triggers behind its wait: layer 0's selection reads row_state early, which the kernel before embed wrote.

tests/kernels/common/test_dependents.py holds each rule.
"""

import ctypes
import functools
import sys
from types import ModuleType
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dejavu_train.kernels.common.assembly import assembly
from dejavu_train.kernels.common.checks import INTERPRET

Sizes = TypeVar("Sizes", bound=tuple[Any, ...])
PREFERRED_CARVEOUT = 9  # of CUfunction_attribute
REGISTERS = 65536  # of a multiprocessor


def padded_batch(batch: int) -> int:
    """Batch rows as the tensor cores' kernels take them."""
    return max(16, triton.next_power_of_2(batch))


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Type that the tensor cores multiply for weights of this dtype. Stored codes are taken to fp16, which is exact."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}.get(dtype, tl.float16)


def n_sms(device: torch.device) -> int:
    """Multiprocessors of the device. Under the interpreter a handful, for speed."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def registers_for(programs: int, warps: int) -> int:
    """Registers of a thread, at most, so that so many programs of so many warps fit on a multiprocessor.

    >>> registers_for(3, 4), registers_for(1, 4)
    (168, 255)
    """
    return min(255, REGISTERS // (32 * warps * programs) // 8 * 8)


@functools.cache
def _knows_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch needs compute capability 9.0. The interpreter has no such instruction."""
    return not INTERPRET and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def fetches_rows(device: torch.device) -> bool:
    """Whether kernels may ask the L2 for whole rows (`lane_queue.fetch_ahead`): on chips that know dependents."""
    return _knows_pdl(device)


def use_pdl(pdl: bool, device: torch.device) -> bool:
    """Whether a kernel is launched as a dependent, and then waits and triggers."""
    return pdl and _knows_pdl(device)


def as_dependent(pdl: bool, device: torch.device) -> dict[str, bool]:
    """Options of a launch that waits and triggers where it is one of a dependent."""
    dependent = use_pdl(pdl, device)
    return {"PDL": dependent, "launch_pdl": dependent}


def programmatic(x: Tensor, pdl: bool) -> tuple[bool, bool]:
    """(the kernel waits and triggers, it is launched as a dependent) for kernels on x's device.

    A kernel launched plainly still triggers: its successor may be a dependent that starts early.
    """
    return _knows_pdl(x.device), use_pdl(pdl, x.device)


def constant_fields(sizes: Sizes) -> Sizes:
    """A named tuple of numbers as a kernel's constant. Triton 3.6 computes with constants in it alone, the interpreter
    with plain numbers."""
    return sizes if INTERPRET else type(sizes)(*(tl.constexpr(size) for size in sizes))


def row_or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A kernel's pointer argument may not be None. What stands in is never read."""
    return stand_in if tensor is None else tensor


def loaded_kernels() -> list[ModuleType]:
    """Every module of this package that has been imported."""
    package = __name__.removesuffix("common.launch")
    return [module for name, module in list(sys.modules.items()) if name.startswith(package)]


def share_carveout(percent: int) -> int:
    """Asks for one split of shared memory and L1 for every kernel of this package compiled so far. Returns how many.

    percent: of shared memory. `limits.DRIVERS_CARVEOUT` leaves it to the driver (again).
    By default the driver splits for each kernel by what it needs, and a multiprocessor must run empty before its split
    can change. So where kernels of different needs follow each other, a dependent launch cannot start beside its
    predecessor. One split for all is a compromise: a step gains, the MLP's kernels alone lose. Call it after every
    kernel has run once and before a graph is captured. Without a CUDA driver, or with a triton that keeps its kernels
    elsewhere, nothing happens.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    changed = 0
    for module in loaded_kernels():
        for function in [f for f in vars(module).values() if isinstance(f, triton.JITFunction)]:
            for cached in getattr(function, "device_caches", {}).values():
                for kernel in cached[0].values():
                    handle = getattr(kernel, "function", None)
                    if isinstance(handle, int):
                        changed += driver.cuFuncSetAttribute(ctypes.c_void_p(handle), PREFERRED_CARVEOUT, percent) == 0
    return changed


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def start_dependents(PDL: tl.constexpr):
    """The first half of `start_dependents_and_wait`, for programs that read only what is older before they wait."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_started(PDL: tl.constexpr):
    """Its second half."""
    if PDL:
        gdc_wait()


@triton.jit
def start_dependents_and_wait(PDL: tl.constexpr):
    """The other way round: the next kernel may start before what this one waits for is written."""
    start_dependents(PDL)
    wait_for_started(PDL)


@triton.jit
def wait_for_count(counter, count):
    """Until `count` programs of this grid have counted themselves. What they stored may then be read, past the L1.

    They are numbered below this one and wait for nothing but the kernel before. That a grid's programs begin in their
    order is what GPUs do, not what CUDA promises.
    """
    while tl.load(counter, volatile=True) < count:
        assembly("nanosleep.u32 40; mov.u32 $0, $1;", "=r,r", (count,))
    tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def count_program(counter):
    """Counts this program for `wait_for_count`, with all that it has stored."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def list_slots_wide(items, running, block_slots, N: tl.constexpr):
    """Slots of the items (R,) of a list in blocks of block_slots. running (N,): inclusive sums of the counts.

    Many blocks are searched in two levels, so that R x N values never exist at once.
    """
    if N <= 32:
        before = running[None, :] <= items[:, None]
        block = tl.sum(before.to(tl.int32), 1)
        start = tl.max(tl.where(before, running[None, :], 0), 1)
    else:  # not an early return: what follows one is still compiled
        FINE: tl.constexpr = 32
        COARSE: tl.constexpr = N // FINE
        ends = tl.max(tl.reshape(running, (COARSE, FINE)), 1)  # running never falls: the largest is the last
        group = tl.sum((ends[None, :] <= items[:, None]).to(tl.int32), 1)
        inside = tl.minimum(group, COARSE - 1)[:, None] * FINE + tl.arange(0, FINE)[None, :]
        R: tl.constexpr = items.shape[0]
        near = tl.reshape(tl.gather(running, tl.reshape(inside, (R * FINE,)), 0), (R, FINE))
        before = near <= items[:, None]
        block = group * FINE + tl.sum(before.to(tl.int32), 1)
        passed = tl.max(tl.where(ends[None, :] <= items[:, None], ends[None, :], 0), 1)
        start = tl.maximum(passed, tl.max(tl.where(before, near, 0), 1))
    return block * block_slots + items - start


THROUGH_L1 = tl.constexpr("")  # a plain string as a default fails to compile in triton 3.6


@triton.jit
def load_vector(x_ptr, columns, D: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr = THROUGH_L1):
    """x (D,) as a tuple of tiles (BLOCK,), zero beyond D.

    CACHE: ".cg" reads past the L1, for a buffer that every layer rewrites and that is read before the wait.
    """
    xs = ()
    for j in tl.static_range((D + BLOCK - 1) // BLOCK):
        at = x_ptr + j * BLOCK + columns
        if (j + 1) * BLOCK > D:
            xs = xs + (tl.load(at, mask=j * BLOCK + columns < D, other=0.0, cache_modifier=CACHE),)
        else:
            xs = xs + (tl.load(at, cache_modifier=CACHE),)
    return xs


@triton.jit
def joined(tiles, LEVELS: tl.constexpr):
    """2 ** LEVELS tiles (BLOCK,) as one (BLOCK, 2, .., 2). Neighbours are told apart by the first axis behind BLOCK."""
    for level in tl.static_range(LEVELS):
        pairs = ()
        for k in tl.static_range(0, 1 << (LEVELS - level), 2):
            pairs = pairs + (tl.join(tiles[k], tiles[k + 1]),)
        tiles = pairs
    return tiles[0]


@triton.jit
def sums_together(tiles, N: tl.constexpr):
    """The sums of N <= 16 tiles (BLOCK,) as scalars, by one reduction: joined in pairs, summed, split again."""
    LEVELS: tl.constexpr = 1 if N <= 2 else 2 if N <= 4 else 3 if N <= 8 else 4
    for _ in tl.static_range(N, 1 << LEVELS):
        tiles = tiles + (tl.zeros_like(tiles[0]),)
    sums = (tl.sum(joined(tiles, LEVELS), 0),)
    for level in tl.static_range(LEVELS):
        halves = ()
        for k in tl.static_range(1 << level):
            first, second = tl.split(sums[k])
            halves = halves + (first, second)
        sums = halves
    return sums
