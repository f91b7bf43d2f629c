"""Dense rows and q/k/v of all heads with 4-bit weights."""

import pytest
import torch
from int4_helpers import assert_rounded_products, random_rows, with_outliers
from mlp_helpers import norm

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.layer_norm import layer_norm_reference
from dejavu_train.kernels.dense.dense_rows import dense_rows, dense_rows_reference, qkv_dense, qkv_dense_reference
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.stages.rows import Int4RowSettings

NAN = float("nan")


def rounding(x, ln, weight):
    """Sums of |products| (1, n) in fp64."""
    n = layer_norm_reference(x.double(), ln, torch.float16).double()
    return n.abs() @ weight.dense(torch.float64).abs().T


@pytest.mark.parametrize(
    ("n", "d", "group", "warps", "ahead"),
    [(20, 1280, 128, 1, 2), (70, 128, 32, 2, 1), (5, 40, 40, 1, 2), (16, 512, 128, 2, 8), (9, 192, 64, 1, 3),
     (48, 640, 128, 2, 2), (33, 896, 128, 1, 3), (16, 1152, 128, 4, 5), (64, 288, 32, 4, 2), (50, 320, 64, 2, 2)],
)  # fmt: skip
def test_dense_rows(device, n, d, group, warps, ahead):
    x, ln = with_outliers(torch.randn(1, d, device=device) * 2 + 1), norm(d, device)
    weight = random_rows(device, n, d, group=group)
    activation, bias = ("relu", torch.randn(n, device=device)) if n % 2 else ("none", None)
    out, want = torch.full((1, n), NAN, device=device), torch.empty(1, n, device=device).double()
    with Int4RowSettings(1, warps, ahead).in_use():
        dense_rows(x, ln, weight, bias, activation, out)
    dense_rows_reference(x.double(), ln, weight, bias, activation, want)
    # x itself may round to the neighbouring fp16 number, where the kernel's LayerNorm differs in its last digit
    assert_rounded_products(out, want, rounding(x, ln, weight), 2**-11)


def test_lines_of_dense_rows_in_assembly(device, queues_in_assembly):
    test_dense_rows(device, 20, 1280, 128, 2, 2)


def test_a_nan_is_passed_on(device):
    x = torch.randn(1, 64, device=device)
    x[0, 7] = NAN
    out = torch.zeros(1, 5, device=device)
    dense_rows(x, norm(64, device), random_rows(device, 5, 64, group=32), None, "relu", out)
    assert out.isnan().all()


def test_errors_name_the_matrix(device):
    x, ln, out = torch.randn(1, 96, device=device), norm(96, device), torch.empty(1, 4, device=device)
    good = random_rows(device, 4, 96, group=32)
    for rows, message in (
        (Int4Rows(good.words, good.scales[:, :2].contiguous()), "groups of 48 columns; expected a multiple of 32"),
        (Int4Rows(good.words, torch.ones(4, 5, device=device).half()), "5 groups do not divide 96"),
        (Int4Rows(good.words.long(), good.scales), r"weight\.words: expected int32"),
        (Int4Rows(good.words, good.scales.float()), r"weight\.scales: expected float16"),
        (Int4Rows(good.words[:3].contiguous(), good.scales), r"weight\.scales: expected shape \(3, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            dense_rows(x, ln, rows, None, "none", out)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [256, 384, 640, 2048, 2560, 4096, 5120, 7168, 9216, 12288])
def test_dense_rows_at_true_shapes(d):
    n = 3001
    x, ln = with_outliers(torch.randn(1, d, device="cuda"), 8), norm(d, "cuda")
    weight, bias = random_rows("cuda", n, d, size=d**-0.5), torch.randn(n, device="cuda").half()
    want, made = torch.empty(1, n, device="cuda").double(), []
    dense_rows_reference(x.double(), ln, weight, bias.double(), "none", want)
    for pdl in (False, True, True):
        made.append(torch.full((1, n), NAN, device="cuda"))
        dense_rows(x, ln, weight, bias, "none", made[-1], pdl=pdl)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    assert_rounded_products(made[0], want, rounding(x, ln, weight), 2**-10)


@pytest.mark.gpu
@pytest.mark.parametrize(("n_heads", "head_dim"), [(32, 128), (32, 80), (32, 64), (12, 32), (4, 64), (8, 80), (3, 128)])
def test_qkv_at_true_shapes(n_heads, head_dim):
    d = n_heads * head_dim
    x, ln = with_outliers(torch.randn(1, d, device="cuda"), 8), norm(d, "cuda")
    weight = random_rows("cuda", n_heads, 3, head_dim, d, group=128, size=d**-0.5)
    bias, position = torch.randn(n_heads, 3, head_dim, device="cuda").half(), torch.tensor([3], device="cuda").int()
    made = []
    for run in (qkv_dense, qkv_dense_reference):
        q = torch.full((1, n_heads, head_dim), NAN, device="cuda")
        caches = [torch.zeros(1, n_heads, 8, head_dim, device="cuda").half() for _ in range(2)]
        run(x, ln, Linear(weight, bias), HeadStep(q, KvCache(*caches, x[:, :0]), position))
        made.append([q, *caches])
    for got, want in zip(*made, strict=True):
        torch.testing.assert_close(got.float(), want.float(), atol=5e-2, rtol=5e-3)
