"""Times the operations of a decoding step one by one: each alone in a CUDA graph, over all layers, in step order.

Each graph starts from the state before the step, so that the K/V that selected heads lack is computed as in the step.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.decode_problem import Watched
from benchmarks.harness import step_times
from dejavu_train.decode import DecodeEngine


def breakdown(engine: DecodeEngine, n: int = 10) -> dict[str, float]:
    """Microseconds a layer of each operation: a graph of that operation alone, over all layers, in step order."""
    calls: dict[str, list[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]]] = {}

    def watch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not name.endswith(":before"):
            label = name
            if name == "scatter_gemv":
                label = "fc2"
            elif name == "listed_gemv":
                label = "fc1"
            elif name in ("dense_wide", "packed_rows"):
                label = "fc2"
            elif name == "project_heads":
                label = "out_projection"
            elif name == "gather_gemv":
                label = "down" if args[3] is None else "fc1"
            elif name == "dense_rows":
                label = "fc1" if args[4] == "relu" else "lm_head"
            calls.setdefault(label, []).append((getattr(watched.plain, name), args, kwargs))

    watched = Watched(engine, watch)
    state = [(tensor, tensor.clone()) for tensor in (engine.core.watermark, engine.state.position)]
    with watched:
        engine.core.eager("greedy", False)
    result = {}
    for label, todo in calls.items():
        for tensor, before in state:
            tensor.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for function, args, kwargs in todo:
                function(*args, **kwargs)
        result[label] = 1e3 * statistics.median(step_times(graph.replay, n)) / len(todo)
    return result
