"""Whole decoding steps of models of other families as calls for `tests.compiled`: what their cells launch.

Sizes are those of `benchmarks.decode`, but for two layers and a small vocabulary. Dense and sparse, numbers and 4 bits.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.decode_cells import FAMILIES
from benchmarks.decode_problem import RANKS, SHAPES, random_predictors, random_weights
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.plan import plan_step, with_screen
from dejavu_train.engine.planned import Engine
from dejavu_train.engine.step import DecodeStep

VOCABULARY, CONTEXT = 1024, 256


def step_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, call) of every kind of step of each shape."""
    for name, packed, heads in itertools.product((*FAMILIES, "350m"), (False, True), (1.0, 0.6)):
        bits = "4 bits: " * packed
        yield f"{bits}step {name} sparse {heads}", lambda n=name, p=packed, h=heads: _step(n, p, 0.1, h)
        if heads == 1:
            yield f"{bits}step {name} dense", lambda n=name, p=packed: _step(n, p, 1.0, 1.0)


def _step(name: str, packed: bool, mlp: float, heads: float) -> None:
    shape = dataclasses.replace(SHAPES[name], n_layers=2, vocab_size=VOCABULARY, max_positions=CONTEXT)
    weights = random_weights(shape, 0.6, packed, packed, device="cpu")
    kind = "int4" if packed else "float16"
    predictors = random_predictors(shape, RANKS[name], mlp, heads, 1, kind, device="cpu")
    options = EngineOptions(context=CONTEXT, graph=False)
    facts = {key: each.facts(1) for key, each in predictors.items()}
    plan = plan_step(shape, facts, weights.formats, options, Engine.INTERPRETER)  # as on a GPU, but for its streams
    plan = with_screen(plan, not packed, None)
    DecodeStep(weights.arranged(predictors), predictors, plan, options, torch.device("cpu")).eager("greedy", False)
