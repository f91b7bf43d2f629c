"""LayerNorm of one row in the planes of 4-bit rows: every warp's units, whole rows of them or not."""

import pytest
import torch
import triton
import triton.language as tl
from int4_helpers import with_outliers

from dejavu_train.kernels.common import int4_norm
from dejavu_train.kernels.common.int4_mma import unit_vector
from dejavu_train.kernels.common.int4_norm import norm_bytes, unit_norms
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference


@triton.jit
def _norm_kernel(x, norm, out, W: tl.constexpr, GROUP: tl.constexpr, L: tl.constexpr, PLANES: tl.constexpr):
    lane = tl.arange(0, L)
    norms = unit_norms(norm, lane, W, GROUP)
    planes, _, _ = int4_norm.normalised_units(x, norms, norm, lane, W, GROUP)
    for k in tl.static_range(PLANES):
        tl.store(out + k * L + lane, planes[k])


def check(device, words, group, warps):
    torch.manual_seed(words)
    d, vector, lanes = 8 * words, unit_vector(words, group), 32 * warps
    pairs = triton.cdiv(triton.cdiv(words, 8 * vector), warps)
    octets = triton.cdiv(pairs, 4)
    x = with_outliers(torch.randn(1, d, device=device) * 2 + 1)
    ln = LayerNormWeights(1 + 0.1 * torch.randn(d, device=device).half(), 0.1 * torch.randn(d, device=device).half())
    out = torch.zeros(octets, vector, 4, warps, 8, 4, dtype=torch.int32, device=device)  # warp, unit g, lane t
    _norm_kernel[(1,)](
        x, ln.args(), out, words, group, lanes, 4 * vector * octets, num_warps=warps
    )  # fmt: skip
    halves = out.cpu().contiguous().view(torch.float16).view(octets, vector, 4, warps, 8, 4, 2)
    got = halves.permute(0, 3, 4, 5, 1, 2, 6).reshape(octets, warps, 8, 32 * vector)
    want = layer_norm_reference(x.double(), ln, torch.float16)[0].cpu()
    seen = torch.zeros(d, dtype=torch.int64)
    for octet in range(octets):
        for warp in range(warps):
            for g in range(8):  # warps take pairs of neighbouring units in turn
                step = 8 * octet + g
                begin = ((step // 2 * warps + warp) * 2 + step % 2) * 32 * vector
                if step >= 2 * pairs or begin >= d:
                    continue
                own = slice(begin, min(d, begin + 32 * vector))
                torch.testing.assert_close(
                    got[octet, warp, g, : own.stop - begin], want[own], atol=2e-3, rtol=2e-3
                )  # a neighbour in fp16
                seen[own] += 1
    assert (seen == 1).all()


CASES = [(160, 128, 2), (144, 128, 1), (576, 128, 4), (100, 32, 2), (96, 64, 1), (132, 64, 4), (5, 40, 1), (64, 128, 4)]


@pytest.mark.parametrize(("words", "group", "warps"), CASES)
def test_every_unit_is_normalised(device, words, group, warps):
    check(device, words, group, warps)


@pytest.mark.parametrize(("words", "group", "warps"), CASES)
def test_handed_over_in_assembly(device, queues_in_assembly, words, group, warps):
    if queues_in_assembly is not None:  # a kernel's queue comes first
        queues_in_assembly.shared = torch.zeros(1 << 16, dtype=torch.uint8).numpy()
    check(device, words, group, warps)
    if queues_in_assembly is not None:
        assert queues_in_assembly.shared.size > 1 << 16


@pytest.mark.parametrize(("vector", "rounds"), [(1, 1), (2, 1), (4, 2)])
def test_lanes_wait_for_each_other_before_and_after_they_read(vector, rounds):
    """What the emulated assembly does not show: all threads of a program go in step there."""
    text = int4_norm._planes_text(vector, rounds)
    first, last = text.index("ld.shared"), text.rindex("ld.shared")
    assert "bar.warp.sync" in text[:first] and "bar.warp.sync" in text[last:]


def test_room():
    assert [norm_bytes(1152, 128, warps) for warps in (4, 8)] == [4096, 8192]
    assert norm_bytes(160, 32, 2) == 1024
