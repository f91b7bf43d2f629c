"""What every launch shares."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
import triton

from dejavu_train.kernels.common import launch
from dejavu_train.kernels.common.launch import loaded_kernels, padded_batch, share_carveout
from dejavu_train.kernels.common.limits import DRIVERS_CARVEOUT, SPARSE_CARVEOUT
from dejavu_train.kernels.stages import norm


def test_padded_batch():
    assert [padded_batch(batch) for batch in (1, 2, 16, 17, 32)] == [16, 16, 16, 32, 32]


@pytest.mark.parametrize(("capability", "dependents"), [((8, 0), False), ((8, 9), False), ((9, 0), True)])
def test_launches_are_dependent_from_compute_capability_9_on(monkeypatch, capability, dependents):
    """Ampere and Ada take plain launches, whatever is asked for."""
    monkeypatch.setattr(launch, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    launch._knows_pdl.cache_clear()
    try:
        device, x = torch.device("cuda", 0), SimpleNamespace(device=torch.device("cuda", 0))
        assert launch.use_pdl(True, device) == launch.fetches_rows(device) == dependents
        assert not launch.use_pdl(False, device)
        assert launch.programmatic(x, True) == (dependents, dependents)
    finally:
        launch._knows_pdl.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are kernels to change")
def test_a_carveout_without_kernels_changes_nothing():
    assert share_carveout(SPARSE_CARVEOUT) == 0


def test_a_carveout_is_asked_of_every_kernel_of_this_package(monkeypatch):
    """Modules are matched by their names. A compiled kernel and a driver that only remembers stand in."""
    asked = []

    class Compiled:
        device_caches = {0: [{"key": SimpleNamespace(function=7)}]}

    driver = SimpleNamespace(cuFuncSetAttribute=lambda function, *rest: asked.append((function.value, *rest)) or 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(triton, "JITFunction", Compiled)
    monkeypatch.setattr(norm, "_layer_norm_kernel", Compiled())
    assert norm in loaded_kernels()
    assert share_carveout(SPARSE_CARVEOUT) == len(asked) == 1 and asked[0][0] == 7 and asked[0][2] == SPARSE_CARVEOUT


@pytest.mark.gpu
def test_a_carveout_leaves_results_alone():
    from dejavu_train.kernels.common.layer_norm import LayerNormWeights

    x, ln = torch.randn(1, 64, device="cuda"), LayerNormWeights(torch.ones(64).cuda(), torch.zeros(64).cuda())
    before, after = torch.empty_like(x), torch.empty_like(x)
    norm.layer_norm(x, ln, before)
    for percent in (SPARSE_CARVEOUT, DRIVERS_CARVEOUT):
        assert share_carveout(percent) > 0
        norm.layer_norm(x, ln, after.zero_())
        assert torch.equal(before, after)


@pytest.mark.gpu
@pytest.mark.parametrize("early", ["x", "list"])
def test_early_reads_of_rewritten_buffers_go_past_the_l1(early):
    """What stands before the wait in the compiled kernels: every layer rewrites the list, x and the residual."""
    from int4_helpers import random_rows

    from dejavu_train.kernels.common import partial_sums
    from dejavu_train.kernels.common.selection import Selection
    from dejavu_train.kernels.formats.matrix import Linear, MlpWeights
    from dejavu_train.kernels.mlp import pack
    from dejavu_train.kernels.stages import mlp

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("without programmatic dependent launch nothing is read early")
    n, d = 512, 1024
    w1, w2 = (torch.randn(n, d, device="cuda").half() for _ in range(2))
    b1, b2 = torch.zeros(n, device="cuda").half(), torch.zeros(d, device="cuda").half()
    x, out = torch.randn(1, d, device="cuda"), torch.empty(1, d, device="cuda")
    rows = pack.PackedSelection.empty(n, "cuda")
    pack.pack(Selection.from_mask(torch.rand(1, n, device="cuda") < 0.1), rows)
    weights = MlpWeights(Linear.of(w1, b1), Linear.of(w2, b2))
    mlp.mlp(x.half(), None, weights, x, rows, out, early=early, pdl=True)
    four_bits = MlpWeights(Linear(random_rows("cuda", n, d), b1), Linear(random_rows("cuda", n, d), b2))
    mlp.mlp(x.half(), None, four_bits, x, rows, out, early=early, pdl=True)
    for function in (mlp._mlp_kernel, partial_sums._add_kernel):
        compiled = [kernel for cached in function.device_caches.values() for kernel in cached[0].values()]
        texts = [kernel.asm["ptx"] for kernel in compiled if "griddepcontrol.wait" in kernel.asm["ptx"]]
        assert texts and any("ld.global.cg" in text.split("griddepcontrol.wait")[0] for text in texts), function
