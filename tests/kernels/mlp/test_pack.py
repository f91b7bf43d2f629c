"""The packed list of one token: closing gaps."""

import pytest
import torch

from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.mlp.pack import PackedSelection, pack


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("n", "block"), [(1, 64), (70, 16), (2100, 64), (300, 48)])
def test_pack_of_a_selection(device, n, block, density):
    """Ids and a count of an earlier list are there, ids in range."""
    selection = Selection.from_mask(torch.rand(1, n, device=device) < density, block)
    rows = PackedSelection.empty(n, device)
    rows.ids.fill_(n - 1)
    rows.count.fill_(n)
    pack(selection, rows)
    assert torch.equal(rows.ids[: int(rows.count)].long(), selection.indices())
