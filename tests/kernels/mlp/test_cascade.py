"""The cascade's fc1 against its reference: what passes, values, dense rows, batches, and the planes it reads."""

import dataclasses

import pytest
import torch

from dejavu_train.predictors.bit_planes import BitPlanes, choose_grid
from kernels.mlp.cascade import CascadeWeights, cascade, cascade_reference, second_stage
from kernels.mlp.cascade_batch import InputLevels, cascade_test
from kernels.mlp.selection import Selection
from kernels.mlp.sparse_fc2 import PackedSelection, pack


def problem(n, d, batch, device, seed=0, density=0.5):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, d, generator=generator) / d**0.5
    planes = BitPlanes.of(weight, *choose_grid(weight))
    bias, stage2_threshold = (torch.randn(n, generator=generator) * 0.3 for _ in range(2))
    weights = CascadeWeights(planes.upper, planes.rest, planes.step, planes.scale, bias, stage2_threshold)
    weights = CascadeWeights(*(tensor.to(device) for tensor in vars(weights).values()))
    x = torch.randn(batch, d, generator=generator).to(device)
    candidates = (torch.rand(batch, n, generator=generator) < density).to(device)
    return x, weights, candidates, planes


def listed(candidates, block=32):
    """A selection of these candidates (1, n) and their packed list, whose values are yet to come."""
    selection, packed = (
        Selection.from_mask(candidates, block),
        PackedSelection.empty(candidates.shape[1], candidates.device),
    )
    pack(selection, packed)
    packed.values.fill_(float("nan"))
    return selection, packed


def check(x, weights, candidates, row_state=None, block=32, **settings):
    """One row against the reference: values, and what passed."""
    selection, packed = listed(candidates, block)
    cascade(x, weights, selection, packed, row_state, **settings)
    expected, passed = cascade_reference(x.double(), weights, candidates, row_state)
    torch.testing.assert_close(packed.to_dense().double(), expected, rtol=2e-4, atol=2e-4)
    assert torch.equal(selection.to_mask(1), passed) and int(packed.count) == int(candidates.sum())
    return passed


def check_rows(x, weights, candidates, row_state, block=16):
    """Several rows: what passed, and the list without the others."""
    batch, d = x.shape
    upper_only = dataclasses.replace(weights, rest=weights.rest[:0])
    selection, scratch = Selection.from_mask(candidates, block), InputLevels.empty(batch, d, x.device)
    scratch.units.fill_(float("nan"))
    cascade_test(x, upper_only, selection, row_state, scratch)
    passed = second_stage(x, weights, candidates, row_state)
    assert torch.equal(selection.to_mask(batch), passed)
    assert torch.equal(selection.indices(), passed.any(0).nonzero().flatten())
    return passed


@pytest.mark.parametrize(("n", "d", "block"), [(64, 64, 64), (100, 48, 32), (70, 40, 16), (33, 8, 64), (90, 16, 90)])
def test_one_row_equals_the_reference(n, d, block, device):
    x, weights, candidates, _ = problem(n, d, 1, device)
    passed = check(x, weights, candidates, block=block)
    assert 0.1 < passed.float().mean() / candidates.float().mean() < 0.9


@pytest.mark.parametrize("programs", [1, 3, 200])
def test_a_packed_list_is_shared_evenly_and_keeps_its_entries(programs, device):
    x, weights, candidates, _ = problem(70, 48, 1, device)
    check(x, weights, candidates, programs=programs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_in_sixteen_bits(dtype, device):
    x, weights, candidates, _ = problem(40, 32, 1, device)
    check(x.to(dtype), weights, candidates)


@pytest.mark.parametrize("state", [0, 1, 2])
def test_a_dense_row_is_not_tested(state, device):
    x, weights, candidates, _ = problem(40, 32, 1, device)
    row_state = torch.tensor([state], dtype=torch.int32, device=device)
    passed = check(x, weights, candidates, row_state)
    assert bool((passed == candidates).all()) == (state == 2)


@pytest.mark.parametrize(("batch", "n", "d", "block"), [(2, 50, 48, 16), (5, 70, 64, 32), (17, 33, 8, 16)])
def test_rows_of_a_batch_have_their_own_sets(batch, n, d, block, device):
    x, weights, candidates, _ = problem(n, d, batch, device, density=0.3)
    row_state = torch.tensor([2, 1, 0, 1, 1, *[1] * 12][:batch], dtype=torch.int32, device=device)
    candidates[row_state == 0] = False
    candidates[0] = True
    passed = check_rows(x, weights, candidates, row_state, block)
    assert passed[0].all() and 0 < passed[1].sum() < candidates[1].sum()
    alone = check(x[1:2].contiguous(), weights, candidates[1:2])
    assert torch.equal(passed[1:2], alone), "one row and several must find the same set"


def test_no_candidates_and_all_of_them(device):
    x, weights, candidates, _ = problem(40, 32, 3, device)
    row_state = torch.ones(3, dtype=torch.int32, device=device)
    for wanted in (torch.zeros_like(candidates), torch.ones_like(candidates)):
        assert check_rows(x, weights, wanted, row_state).any() == wanted.any()
        check(x[:1].contiguous(), weights, wanted[:1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_several_rows_in_sixteen_bits(dtype, device):
    x, weights, candidates, _ = problem(40, 32, 3, device)
    check_rows(x.to(dtype), weights, candidates, torch.ones(3, dtype=torch.int32, device=device))


def test_the_planes_are_those_of_the_library(device):
    _, weights, _, planes = problem(40, 64, 1, device)
    upper, lower = weights.parts()
    torch.testing.assert_close(upper.cpu(), planes.coarse(), rtol=0, atol=0)
    torch.testing.assert_close((upper + lower).cpu(), planes.weight(), rtol=1e-6, atol=1e-6)


def test_nan_never_passes_and_mistakes_are_named(device):
    x, weights, candidates, _ = problem(40, 32, 1, device)
    selection, packed = listed(candidates)
    cascade(torch.full_like(x, float("nan")), weights, selection, packed)
    assert not selection.to_mask(1).any() and not packed.values[: int(packed.count)].any()
    rows, state = x.repeat(2, 1), torch.ones(2, dtype=torch.int32, device=device)
    both, scratch = Selection.from_mask(candidates.repeat(2, 1), 16), InputLevels.empty(2, 32, device)
    cascade_test(torch.full_like(rows, float("nan")), weights, both, state, scratch)
    assert not both.to_mask(2).any() and not both.counts.any()
    with pytest.raises(ValueError, match=r"weights.upper: expected shape \(40, 3\)"):
        cascade(x[:, :24].contiguous(), weights, selection, packed)
    with pytest.raises(ValueError, match="for one batch row"):
        cascade(rows, weights, selection, packed)
    with pytest.raises(ValueError, match="a kernel of its own"):
        cascade_test(x, weights, selection, state[:1], scratch)
    with pytest.raises(ValueError, match="no power of two"):
        cascade_test(rows, weights, Selection.empty(40, device, 40), state, scratch)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d", "batch"), [(16384, 4096, 8), (36864, 9216, 16), (2000, 12288, 32), (3072, 768, 2)])
def test_real_widths_select_exactly_what_the_reference_does(n, d, batch):
    x, weights, candidates, _ = problem(n, d, batch, "cuda", density=0.1)
    state = torch.ones(batch, dtype=torch.int32, device="cuda")
    passed = check_rows(x, weights, candidates, state, block=64)
    assert torch.equal(check(x[:1].contiguous(), weights, candidates[:1], block=64), passed[:1])
