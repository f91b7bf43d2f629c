"""An engine's tensors in the kernel of all layers on a CPU, against the engine's own step in plain torch.

What both must agree on: the order of heads and pairs, angles, what a gate is, and where a norm's gain counts from.
"""

from types import SimpleNamespace

import pytest
import torch
from host import HostLauncher

from benchmarks.decode_problem import random_predictors, set_thresholds, start
from benchmarks.random_weights import weights_of_shape
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.one_kernel import layers_in_one
from dejavu_train.engine.one_kernel_plan import one_kernel_sizes
from dejavu_train.engine.options import EngineOptions
from dejavu_train.families import ModelDims
from dejavu_train.families.dims import Activation, Norm, Positions
from dejavu_train.kernels.persistent import decoder_layers
from dejavu_train.kernels.persistent.sizes import Neurons

LLAMA = {"positions": Positions.ROTARY, "biases": False}
PROSPARSE = ModelDims(
    2048, 5504, 1, 32, 512, 256, norm=Norm.RMS_NORM, activation=Activation.FATRELU, gated=True, threshold=0.01, **LLAMA
)
MINITRON = ModelDims(
    2048, 5504, 1, 64, 512, 256, 128, 16, Norm.LAYER_NORM_1P, activation=Activation.RELU2, rotary_share=0.5, **LLAMA
)
long = pytest.mark.long


@pytest.mark.parametrize(
    ("dims", "neurons"),
    [
        (PROSPARSE, Neurons.LIVE), (MINITRON, Neurons.LIVE), pytest.param(PROSPARSE, Neurons.ALL, marks=long),
        *(pytest.param(dims, Neurons.SELECTED, marks=long) for dims in (PROSPARSE, MINITRON)),
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_step_is_that_of_plain_torch(dims, neurons, monkeypatch):
    monkeypatch.setattr(decoder_layers, "layers_launcher", HostLauncher)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    weights, predictors = weights_of_shape(dims, torch.float16, "cpu", packed=True), {}
    options = EngineOptions(one_kernel=True)
    weights.embedding.mul_(50)
    if neurons is Neurons.SELECTED:
        predictors = random_predictors(dims, 128, 0.3, 1.0, lookahead=1, dtype="int4", device="cpu")
    engine = DecodeEngine(weights, predictors, EngineOptions(context=256, ops="reference", device="cpu"))
    start(engine, 40, 60)
    if predictors:
        set_thresholds(engine, 0.3, 1.0)
    core, state = engine.core, engine.state
    position = int(state.position)
    with core.undone():
        core.eager("greedy", False)
        x, expected, new = core.x[0].clone(), core.x[-1].clone(), core.caches[0].k[:, :, position].clone()
    facts = {key: each.facts(1) for key, each in predictors.items()}
    sizes, why = one_kernel_sizes(dims, facts, weights.formats, options, 1, neurons is Neurons.LIVE)
    assert not why and sizes.neurons is neurons
    kernel = layers_in_one(sizes, engine.weights, engine.predictors, core.caches, state)
    for cache in core.caches:
        cache.k[:, :, position:], cache.v[:, :, position:] = float("nan"), float("nan")
    out = torch.zeros_like(x)
    state.row_state.fill_(1)
    kernel(x, out)
    assert not kernel.fault()
    assert (out - expected).norm() < 2e-3 * (expected - x).norm()
    assert (core.caches[0].k[:, :, position] - new).norm() < 2e-3 * new.norm()
