"""The engine with all layers in one kernel, against the same engine as a chain of kernels.

python -m pytest -m gpu tests/engine/test_one_kernel_gpu.py
"""

from dataclasses import replace

import pytest
import torch

from benchmarks.decode_problem import SHAPES, random_predictors, set_thresholds, start
from benchmarks.random_weights import weights_of_shape
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.options import EngineOptions
from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import UserError
from dejavu_train.kernels.persistent.sizes import Neurons

pytestmark = pytest.mark.gpu
SMALL = {"n_layers": 4, "vocab_size": 512, "max_positions": 256}
DIMS = ModelDims(2048, 8192, 4, 32, 512, 256)
FAMILIES = [pytest.param(DIMS, id="opt")]
FAMILIES += [pytest.param(replace(SHAPES[name], **SMALL), id=name) for name in ("prosparse-7b", "minitron-8b")]
ROWS = [[3 + (7 * i) % 500 for i in range(200)]]


def weights(dims=DIMS):
    """Random ones, whose layers add about as much as the embedding."""
    made = weights_of_shape(dims, torch.float16, "cuda", packed=True)
    made.embedding.mul_(50)
    return made


def engine(made, one_kernel, predictors=None, **options):
    return DecodeEngine(made, predictors, EngineOptions(context=256, one_kernel=one_kernel, **options))


@pytest.mark.parametrize("zeros", ["read", "skip"])
@pytest.mark.parametrize("dims", FAMILIES)
def test_likelihoods_are_those_of_the_chain(dims, zeros):
    made = weights(dims)
    one, chain = (engine(made, asked, zeros=zeros) for asked in (True, False))
    assert one.plan.one_kernel.neurons is (Neurons.LIVE if zeros == "skip" else Neurons.ALL), one.describe()
    assert chain.plan.one_kernel is None and "none was asked for" in chain.describe()
    found, expected = (each.score(ROWS)[0] for each in (one, chain))
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    # Single positions through the step, not a prompt's chunks.
    found, expected = (each.logits(ROWS, sparse_from=0)[0] for each in (one, chain))
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("dims", FAMILIES)
def test_predictors_select_what_they_select_in_the_chain(dims):
    made = weights(dims)
    predictors = random_predictors(dims, dims.d_model // 16, 0.3, 1.0, lookahead=1, dtype="int4")
    chain, one = (engine(made, asked, predictors) for asked in (False, True))
    assert one.plan.one_kernel.neurons is Neurons.SELECTED, one.describe()
    start(chain, 64, 60)
    set_thresholds(chain, 0.3, 1.0)
    found, expected = (each.logits(ROWS, sparse_from=20)[0] for each in (one, chain))
    off = (found - expected).abs().amax(-1) / expected.abs().max()
    assert off[:20].max() < 0.02 and off.median() < 0.02
    dense = engine(made, False).logits(ROWS)[0]
    assert ((expected - dense).abs().amax(-1) / expected.abs().max())[20:].median() > 0.05  # selecting shows


@pytest.mark.parametrize("dims", FAMILIES)
def test_greedy_tokens_are_the_same_each_time(dims):
    one = engine(weights(dims), True)
    texts = [one.generate([ROWS[0][:40]], 100, min_new_tokens=100)[0] for _ in range(3)]
    assert len(texts[0]) == 100 and texts[0] == texts[1] == texts[2]


def test_a_step_that_fails_ends_its_row_by_name_and_the_next_one_runs():
    made = weights()
    one = engine(made, True)
    right = one.generate([ROWS[0][:40]], 8, min_new_tokens=8)
    scales = one.weights.layers[2].out.weight.scales
    kept = scales.clone()

    def break_weights(_row, _token):
        scales.fill_(float("inf"))

    with pytest.raises(UserError, match="the kernel of all layers stopped .a sum left its range"):
        one.generate([ROWS[0][:40]], 8, min_new_tokens=8, callback=break_weights)
    scales.copy_(kept)
    assert one.generate([ROWS[0][:40]], 8, min_new_tokens=8) == right


def test_what_it_does_not_take_runs_as_a_chain_and_says_why():
    made = weights()
    assert engine(made, True, batch=2).plan.one_kernel is None
    narrow = replace(DIMS, d_model=1024, d_ffn=4096)
    assert "a width of 2048 or 4096, not 1024" in engine(weights(narrow), True).describe()
