"""Products in Triton's interpreter: their sums do not depend on a row's place. Those of the double do."""

import numpy as np
import pytest
from products import ordered_product, product_by_place


def operands(rows=16, inner=128, columns=16, dtype=np.float32):
    draw = np.random.default_rng(0)
    return [draw.standard_normal(shape).astype(dtype) for shape in ((rows, inner), (inner, columns))]


@pytest.mark.parametrize("columns", [1, 16])
@pytest.mark.parametrize("shift", range(1, 8))
def test_a_row_keeps_its_bits_at_any_place(shift, columns):
    a, b = operands(columns=columns)
    moved = ordered_product(np.roll(a, shift, 0), b, np.float32)
    assert np.array_equal(np.roll(moved, -shift, 0), ordered_product(a, b, np.float32))


@pytest.mark.parametrize("shift", [1, 2])
def test_a_row_of_the_double_has_other_bits_at_another_place(shift):
    a, b = operands()
    expected, moved = product_by_place(a, b), np.roll(product_by_place(np.roll(a, shift, 0), b), -shift, 0)
    np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(moved, expected)


@pytest.mark.parametrize("product", [ordered_product, product_by_place])
@pytest.mark.parametrize("kind", [np.float16, np.int8])
def test_products_are_those_of_wide_numbers(product, kind):
    a, b = operands(dtype=np.float16)
    wide = np.int32 if kind is np.int8 else np.float32
    a, b = (np.stack([10 * each, each]).astype(kind) for each in (a, b))
    made = product(a, b, wide)
    assert made.dtype == wide
    np.testing.assert_allclose(made, a.astype(wide) @ b.astype(wide), rtol=1e-4, atol=1e-3)
