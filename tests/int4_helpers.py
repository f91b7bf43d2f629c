"""Random 4-bit rows and inputs with outliers, for tests of every kernel that reads them."""

import torch

from dejavu_train.kernels.formats.int4 import Int4Rows


def random_rows(device, *shape: int, group: int = 128, size: float = 0.05) -> Int4Rows:
    """All codes alike, scales of either sign, a fifth of them ten times as large."""
    *rows, d = shape
    words = torch.randint(-(2**31), 2**31, (*rows, d // 8), device=device).to(torch.int32)
    scales = torch.randn(*rows, d // group, device=device) * size
    return Int4Rows(words, (scales * torch.where(torch.rand_like(scales) < 0.2, 10.0, 1.0)).half())


def with_outliers(x: torch.Tensor, columns: int = 3) -> torch.Tensor:
    """A few columns 50 times the rest, as OPT has them."""
    x[..., torch.randperm(x.shape[-1])[:columns]] *= 50
    return x


def assert_rounded_products(got: torch.Tensor, want: torch.Tensor, sums: torch.Tensor, rtol: float = 2**-11) -> None:
    """got is want (fp64) but for each product's rounding to fp16. sums: of the products' absolute values, fp64.

    A product is off by at most 2^-11 of itself (x and factors once more for fc2), and fp32 sums by far less.
    """
    assert got.isfinite().all()
    excess = (got.double() - want).abs() - rtol * sums - 1e-5
    assert (excess <= 0).all(), (
        f"{int((excess > 0).sum())} of {excess.numel()} differ by more, {excess.max():.2e} at most"
    )
