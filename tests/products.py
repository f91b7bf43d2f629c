"""Products of matrices that Triton's interpreter takes in tests, instead of what NumPy finds for the processor.

The sums of a BLAS depend on its kernels. Those of some processors add a row in another order by its place in the
matrix. Kernels promise that a row's result does not depend on its place, and a GPU keeps that promise. So a test in the
interpreter takes a product that does as well. On a GPU the same tests run with `tl.dot` itself.
"""

from typing import Any

import numpy as np

PLACES = 3
MATMUL = np.matmul


def ordered_product(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """a (..., m, k) times b (..., k, n), added up from the first column of `a` to the last: (..., m, n) of dtype.

    Each sum is one of rounded products and rounded sums, so its bits are the same on every processor.
    """
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    return np.add.reduce(a[..., None] * b[..., None, :, :], axis=-2, dtype=dtype)


def product_by_place(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
    """The double of `numpy.matmul` on a processor whose kernels add up a row, or a column, by its place.

    Rows and columns are of three kinds by their place. Each kind is added up from another column of `a` on.
    """
    total = MATMUL(a, b, dtype=dtype)
    for row, column in np.ndindex(PLACES, PLACES) if a.ndim > 1 and b.ndim > 1 else ():
        order = np.roll(np.arange(a.shape[-1]), row + PLACES * column)
        part = MATMUL(a[..., row::PLACES, order], b[..., order, column::PLACES], dtype=dtype)
        total[..., row::PLACES, column::PLACES] = part
    return total


def sum_by_place() -> None:
    """Makes `numpy.matmul`, which the interpreter calls, such a double until the process ends."""
    np.matmul = product_by_place  # type: ignore[misc]


def take_ordered_products() -> None:
    """Makes `tl.dot` in the interpreter take `ordered_product`."""
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = ordered_product(a.data, b.data, d.data.dtype)
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
