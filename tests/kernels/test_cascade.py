"""The cascade's fc1 against its reference: what passes, values, dense rows, batches; and the planes it reads."""

import pytest
import torch

from dejavu_train.planes import Planes, choose_grid
from kernels.cascade import CascadeWeights, cascade, cascade_reference, cascade_rows
from kernels.packed_rows import PackedRows, pack
from kernels.select import Selection


def problem(n, d, batch, device, seed=0, density=0.5):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, d, generator=generator) / d**0.5
    planes = Planes.of(weight, *choose_grid(weight))
    bias, bar = (torch.randn(n, generator=generator) * 0.3 for _ in range(2))
    weights = CascadeWeights(planes.upper, planes.rest, planes.step, planes.scale, bias, bar)
    weights = CascadeWeights(*(tensor.to(device) for tensor in vars(weights).values()))
    x = torch.randn(batch, d, generator=generator).to(device)
    candidates = (torch.rand(batch, n, generator=generator) < density).to(device)
    return x, weights, candidates, planes


def check(x, weights, candidates, row_state=None, block=64, share=None):
    batch, d = x.shape
    n = candidates.shape[1]
    selection = Selection.from_mask(candidates, block)
    before = selection.indices()
    out = cascade_rows(n, d, batch, block, x.device, share)
    out.counts.fill_(-1)
    cascade(x, weights, selection, out, row_state)
    expected, passed = cascade_reference(x.double(), weights, candidates, row_state)
    torch.testing.assert_close(out.to_dense().double(), expected, rtol=2e-4, atol=2e-4)
    assert torch.equal(selection.to_mask(batch), passed)
    assert torch.equal(selection.indices(), before)
    return passed


@pytest.mark.parametrize(
    ("n", "d", "block", "share"),
    [(64, 64, 64, None), (100, 48, 32, 1), (70, 40, 16, 3), (33, 8, 64, 4), (90, 16, 90, None)],
)
def test_one_row_equals_the_reference(n, d, block, share, device):
    x, weights, candidates, _ = problem(n, d, 1, device)
    passed = check(x, weights, candidates, block=block, share=share)
    assert 0.1 < passed.float().mean() / candidates.float().mean() < 0.9


@pytest.mark.parametrize("programs", [1, 3, 200])
def test_a_packed_list_is_shared_evenly_and_keeps_its_entries(programs, device):
    x, weights, candidates, _ = problem(70, 48, 1, device)
    selection, packed = Selection.from_mask(candidates, 32), PackedRows.empty(70, device)
    pack(selection, packed)
    packed.values.fill_(float("nan"))
    cascade(x, weights, selection, packed, programs=programs)
    expected, passed = cascade_reference(x.double(), weights, candidates)
    torch.testing.assert_close(packed.to_dense().double(), expected, rtol=2e-4, atol=2e-4)
    assert torch.equal(selection.to_mask(1), passed) and int(packed.count) == int(candidates.sum())


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


@pytest.mark.parametrize("batch", [2, 5])
def test_rows_of_a_batch_have_their_own_sets(batch, device):
    x, weights, candidates, _ = problem(50, 48, batch, device, density=0.3)
    row_state = torch.tensor([2, 1, 0, 1, 1][:batch], dtype=torch.int32, device=device)
    candidates[row_state == 0] = False
    candidates[0] = True
    passed = check(x, weights, candidates, row_state, block=16)
    assert passed[0].all()
    alone = check(x[1:2].contiguous(), weights, candidates[1:2], block=16)
    assert torch.equal(passed[1:2], alone)


@pytest.mark.parametrize("batch", [1, 3])
def test_no_candidates_and_all_of_them(batch, device):
    x, weights, candidates, _ = problem(40, 32, batch, device)
    assert not check(x, weights, torch.zeros_like(candidates)).any()
    check(x, weights, torch.ones_like(candidates))


def test_the_planes_are_those_of_the_library(device):
    _, weights, _, planes = problem(40, 64, 1, device)
    upper, lower = weights.parts()
    torch.testing.assert_close(upper.cpu(), planes.coarse(), rtol=0, atol=0)
    torch.testing.assert_close((upper + lower).cpu(), planes.weight(), rtol=1e-6, atol=1e-6)


def test_nan_never_passes_and_mistakes_are_named(device):
    x, weights, candidates, _ = problem(40, 32, 1, device)
    selection = Selection.from_mask(candidates)
    out = cascade_rows(40, 32, 1, 64, device)
    cascade(torch.full_like(x, float("nan")), weights, selection, out)
    assert not selection.to_mask(1).any() and not out.counts.any()
    with pytest.raises(ValueError, match=r"weights.upper must have shape \(40, 3\)"):
        cascade(x[:, :24].contiguous(), weights, selection, out)
    with pytest.raises(ValueError, match="do not fit a selection"):
        cascade(x, weights, Selection.from_mask(candidates, 32), cascade_rows(40, 32, 1, 64, device, 3))
    with pytest.raises(ValueError, match="made for batch 2"):
        cascade(x, weights, selection, cascade_rows(40, 32, 2, 64, device))
