"""Attention of slots: as the reference, and equal bit for bit whatever the other slots hold."""

import pytest
import torch

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.positions import Alibi
from dejavu_train.kernels.verify.attend_slots import SLOTS, SPLIT, attend_slots, attend_slots_reference, slot_scratch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def problem(h, head_dim, capacity, dtype, seed=0, share=1):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(SLOTS, h, head_dim, generator=generator)
    k, v = torch.randn(2, 1, h // share, capacity, head_dim, generator=generator)
    return [each.to(DEVICE, dtype) for each in (q, k, v)]


def kept(k, v, placed=None):
    return KvCache(k, v, k[:, 0, :0], positions=placed)


def run(q, k, v, position, placed=None):
    out = torch.full_like(q, float("nan"))
    scratch = slot_scratch(q.shape[1], q.shape[2], k.shape[2], DEVICE)
    for buffer in (scratch.partial, scratch.largest, scratch.total):
        buffer.fill_(float("nan"))
    at = torch.tensor(position, dtype=torch.int32, device=DEVICE)
    attend_slots(HeadStep(q, kept(k, v, placed), at), out, scratch)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("h", "head_dim", "capacity", "first"), [(2, 16, 300, 0), (1, 80, 2 * SPLIT, SPLIT - 4)])
def test_slots_attend_as_the_reference_does(dtype, h, head_dim, capacity, first):
    if dtype == "bfloat16" and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies no bfloat16 matrices")
    q, k, v = problem(h, head_dim, capacity, getattr(torch, dtype))
    position = list(range(first, first + SLOTS))
    expected = torch.empty_like(q)
    attend_slots_reference(HeadStep(q, kept(k, v), torch.tensor(position, device=DEVICE)), expected)
    torch.testing.assert_close(run(q, k, v, position).float(), expected.float(), atol=DTYPES[dtype], rtol=0)


@pytest.mark.parametrize(("share", "slopes"), [(3, False), (1, True), (2, True)])
def test_heads_that_share_and_slopes_are_as_the_reference_has_them(share, slopes):
    """Each slot alone, too: the same numbers beside NaN."""
    q, k, v = problem(6, 16, 2 * SPLIT, torch.float32, share=share)
    placed = Alibi.of(6, DEVICE) if slopes else None
    position = list(range(SPLIT - 4, SPLIT + 4))
    expected = torch.empty_like(q)
    attend_slots_reference(HeadStep(q, kept(k, v, placed), torch.tensor(position, device=DEVICE)), expected)
    found = run(q, k, v, position, placed)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    other = torch.full_like(q, float("nan"))
    other[2] = q[6]
    k[:, :, position[6] + 1 :] = v[:, :, position[6] + 1 :] = float("nan")
    places = [SPLIT + 40] * SLOTS
    places[2] = position[6]
    assert torch.equal(run(other, k, v, places, placed)[2], found[6])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("first", [3, SPLIT - 4, 2 * SPLIT])
def test_a_slot_depends_on_its_own_input_alone(dtype, first):
    """Other slots at any position, with noise or NaN in their queries and in K and V behind the slot's own."""
    q, k, v = problem(2, 16, 3 * SPLIT, getattr(torch, dtype))
    position = list(range(first, first + SLOTS))
    expected = run(q, k, v, position)
    for i in (0, 4, 7):
        for noise in (float("nan"), 100.0) if i else (float("nan"),):
            for slot, elsewhere in ((i, first + 40), ((i + 3) % SLOTS, 0)):
                q_other = torch.full_like(q, noise)
                q_other[slot] = q[i]
                k_other, v_other = k.clone(), v.clone()
                k_other[:, :, position[i] + 1 :], v_other[:, :, position[i] + 1 :] = noise, noise
                places = [elsewhere] * SLOTS
                places[slot] = position[i]
                assert torch.equal(run(q_other, k_other, v_other, places)[slot], expected[i])
