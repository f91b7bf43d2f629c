"""Attention of a chunk behind what its row holds: as the reference, whatever stands behind the chunk."""

import pytest
import torch

from dejavu_train.kernels.attention.attend_chunk import attend_chunk, attend_chunk_reference
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.positions import Alibi

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "chunk", "heads", "share", "head_dim", "slopes"),
    [
        (16, (1, 0, 16), 2, 1, 16, False), (16, (0, 70, 3), 2, 2, 80, False), (128, (1, 5, 100), 2, 1, 16, True),
        (64, (0, 64, 64), 3, 3, 32, True), (16, (1, 84, 16), 1, 1, 128, False),
    ],
)  # fmt: skip
def test_a_chunk_attends_as_the_reference_does(dtype, size, chunk, heads, share, head_dim, slopes):
    if dtype == "bfloat16" and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies no bfloat16 matrices")
    generator, capacity, kind = torch.Generator().manual_seed(0), 130, getattr(torch, dtype)
    rows = torch.randn(size, heads // share, share + 2, head_dim, generator=generator).to(DEVICE, kind)
    held = torch.randn(2, 2, heads // share, capacity, head_dim, generator=generator).to(DEVICE, kind)
    row, first, count = chunk
    held[:, row, :, first:] = float("nan")  # nothing there is read before it is written
    at, placed = torch.tensor(chunk, dtype=torch.int32, device=DEVICE), Alibi.of(heads, DEVICE) if slopes else None
    found = []
    for attend in (attend_chunk, attend_chunk_reference):
        keys, values = held.clone()
        out = torch.zeros(size, heads, head_dim, dtype=kind, device=DEVICE)
        attend(rows, KvCache(keys, values, keys[:, 0, :0], positions=placed), at, out)
        found.append((out[:count].float(), keys, values))
    torch.testing.assert_close(found[0][0], found[1][0], atol=DTYPES[dtype], rtol=0)
    for mine, theirs in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


def test_shapes_that_do_not_fit_are_refused():
    cache, at = KvCache(*torch.zeros(2, 1, 2, 8, 16, device=DEVICE), torch.zeros(1, 0, 4)), torch.zeros(3).int()
    with pytest.raises(ValueError, match=r"k_cache: expected shape \(1, 3, 8, 16\)"):
        attend_chunk(
            torch.zeros(4, 3, 3, 16, device=DEVICE), cache, at.to(DEVICE), torch.zeros(4, 3, 16, device=DEVICE)
        )
