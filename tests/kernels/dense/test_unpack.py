"""Rows of 4 bits as numbers: exactly code times scale, in either arrangement."""

import pytest
import torch

from dejavu_train.kernels.dense.unpack import unpack, unpack_reference
from dejavu_train.kernels.formats.int4 import Int4Rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("leading", "columns", "groups"), [((5,), 64, 2), ((3, 4), 296, 1), ((2, 3, 2), 32, 1)])
def test_rows_are_written_out(dtype, leading, columns, groups):
    generator = torch.Generator().manual_seed(0)
    n = torch.Size(leading).numel()
    codes = torch.randint(-8, 8, (n, columns), generator=generator, dtype=torch.int8)
    scales = torch.randn(n, groups, generator=generator).half()
    rows = Int4Rows.of(codes, scales).view(*leading, columns)
    rows = Int4Rows(rows.words.to(DEVICE), rows.scales.to(DEVICE))
    assert torch.equal(unpack(rows, dtype), unpack_reference(rows, dtype))
    if len(leading) == 2:
        assert torch.equal(unpack(rows, dtype, beside=True), unpack_reference(rows, dtype, beside=True))
