"""Times the operations of a decoding step one by one: each alone in a CUDA graph, over all layers, in step order.

Each graph starts from the state before the step, so that the K/V that selected heads lack is computed as in the step.
"""

import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.harness import step_times
from dejavu_train.engine.decode import DecodeEngine

LABELS = {
    "cascade_test": "second_stage",
    "fc1_batch": "fc1",
    "dense_hidden": "fc1",
    "sparse_fc2": "fc2",
    "fc2_batch": "fc2",
    "dense_wide": "fc2",
    "dense_add": "fc2",
    "project_heads": "out_projection",
}


class Watched:
    """Within it an engine's step shows each operation after it ran."""

    def __init__(self, engine: DecodeEngine, watch: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> None:
        self.ops, self.watch, self.plain = engine.core.ops, watch, SimpleNamespace(**vars(engine.core.ops))

    def __enter__(self) -> None:
        def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = function(*args, **kwargs)
                self.watch(name, args, kwargs)
                return result

            return call

        # In place: the halves of a step hold the same operations.
        vars(self.ops).update({name: wrapped(name, function) for name, function in vars(self.plain).items()})

    def __exit__(self, *_: object) -> None:
        vars(self.ops).update(vars(self.plain))


def breakdown(engine: DecodeEngine, n: int = 10) -> dict[str, float]:
    """Microseconds a layer of each operation: a graph of that operation alone, over all layers, in step order."""
    calls: dict[str, list[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]]] = {}

    def watch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        label = LABELS.get(name, name)
        if name == "dense_rows":
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
