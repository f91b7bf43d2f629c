"""What every launch shares."""

import pytest
import torch

from kernels.launch import DRIVERS_CARVEOUT, SPARSE_CARVEOUT, padded_batch, share_carveout


def test_padded_batch():
    assert [padded_batch(batch) for batch in (1, 2, 16, 17, 32)] == [16, 16, 16, 32, 32]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are kernels to change")
def test_a_carveout_without_kernels_changes_nothing():
    assert share_carveout(SPARSE_CARVEOUT) == 0


@pytest.mark.gpu
def test_a_carveout_leaves_results_alone():
    from kernels.layer_norm import LayerNormWeights, layer_norm

    x, ln = torch.randn(1, 64, device="cuda"), LayerNormWeights(torch.ones(64).cuda(), torch.zeros(64).cuda())
    before, after = torch.empty_like(x), torch.empty_like(x)
    layer_norm(x, ln, before)
    for percent in (SPARSE_CARVEOUT, DRIVERS_CARVEOUT):
        assert share_carveout(percent) > 0
        layer_norm(x, ln, after.zero_())
        assert torch.equal(before, after)
