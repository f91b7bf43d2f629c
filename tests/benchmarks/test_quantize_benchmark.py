"""Bytes of a block count what is read."""

import pytest

from benchmarks.quantize import block_bytes
from dejavu_train.families import ModelDims, Target, UnitKey
from dejavu_train.predictors.metrics import SelectionSums


def test_bytes_of_a_block():
    shape = ModelDims(d_model=128, d_ffn=256, n_layers=1, n_heads=4, vocab_size=9, max_positions=9)
    assert block_bytes(shape, None, {}, False) == (1.0, 1.0, 1.0)
    read, _, _ = block_bytes(shape, None, {}, True)
    rows, heads = 64 + 2, 4 * (16 + 2)  # bytes of 128 columns with one scale, and of four heads with theirs
    assert read == pytest.approx((3 * 128 * rows + 128 * heads + 2 * 256 * rows) / (2 * (4 * 128**2 + 2 * 128 * 256)))
    half = {UnitKey(0, Target.HEADS): SelectionSums(20, 0, 0, units=40)}
    half[UnitKey(0, Target.MLP)] = SelectionSums(640, 640, 0, units=2560)  # half is selected, half of that is active
    read, neurons, kept = block_bytes(shape, None, half, False)
    assert (neurons, kept) == (0.5, 0.5)
    assert read == pytest.approx((0.5 * 4 * 128**2 + (0.5 + 0.25) * 128 * 256) / (4 * 128**2 + 2 * 128 * 256))
