"""Timing: kernels in a graph with weights rotated past the L2, consecutive steps, and a GPU's best read."""

import time
from collections.abc import Callable
from functools import partial

import torch

from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.dense.dense_rows import dense_rows
from dejavu_train.kernels.formats.matrix import Rows
from dejavu_train.kernels.stages.rows import RowSettings

N, D = 49152, 12288
SETS, REPEATS = 12, 10  # a dozen steps share what a graph takes to start


def graph_of(step: Callable[[], None], times: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a step, so many times, whose kernels are compiled before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            step()
    return graph


def measure(step: Callable[[], None]) -> float:
    """Median microseconds of a step, SETS of them in one graph that is replayed."""
    times = sorted(step_times(graph_of(step, SETS).replay, REPEATS, warm=3))
    return times[REPEATS // 2] * 1000 / SETS


def best_read(device: str = "cuda") -> float:
    """TB/s of the best row kernel on 49152 x 12288 in fp16: the denominator of every byte floor.

    The same memory is read as rows of 12288, 4096 and 8192: whatever reads fastest.
    """
    weight = torch.empty(N, D, dtype=torch.float16, device=device).normal_(0, 0.02)
    x12, norm = torch.randn(1, D, device=device), torch.ones(2, D, dtype=torch.float16, device=device)
    times = []
    for width, settings in ((12288, (4, 1, 8)), (12288, (2, 1, 16)), (4096, (8, 2, 8)), (8192, (4, 1, 8))):
        view, x = weight.view(-1, width), x12[:, :width].contiguous()
        ln = LayerNormWeights(*norm[:, :width].contiguous())
        out = torch.empty(1, len(view), device=device)
        with RowSettings(*settings).in_use():
            times.append(measure(partial(dense_rows, x, ln, Rows(view), None, "none", out)))
    return weight.nbytes / min(times) / 1e6


def step_times(run: Callable[[], None], n: int, warm: int = 4) -> list[float]:
    """Milliseconds between the ends of consecutive calls, n of them, without a synchronisation in between."""
    for _ in range(warm):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def cpu_times(run: Callable[[], object], n: int, warm: int = 4) -> list[float]:
    """Milliseconds of n calls on a CPU, behind those that warm up."""
    times = []
    for _ in range(warm + n):
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return times[warm:]
