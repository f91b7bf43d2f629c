"""Gathered and dense products against the float64 reference, with poisoned outputs."""

import pytest
import torch

from kernels.gather_gemv import LiveRows, gather_gemv, gather_gemv_reference
from kernels.launch import INTERPRET
from kernels.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.select import Selection, quantize_rows

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def make(n, d, batch, dtype, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, d, generator=g).to(dtype).to(device)
    weight = (torch.randn(n, d, generator=g) / d**0.5).to(dtype).to(device)
    return x, weight, torch.randn(n, generator=g).to(dtype).to(device)


def masks(n, batch, device):
    sparse = torch.rand(batch, n, generator=torch.Generator().manual_seed(1)) < 0.15
    one = torch.zeros(batch, n, dtype=torch.bool)
    one[-1, n - 1] = True
    cases = {"empty": torch.zeros_like(one), "one": one, "some": sparse, "all": torch.ones_like(one)}
    return {name: mask.to(device) for name, mask in cases.items()}


def poisoned(n, batch, device, programs=7):
    live = LiveRows.empty(n, batch, device, programs)
    live.values.fill_(float("nan"))
    live.ids.fill_(-77)
    live.counts.fill_(-77)
    return live


@pytest.mark.parametrize("n,d", [(200, 64), (64, 33), (1, 100), (131, 160)])
@pytest.mark.parametrize("batch", [1, 2, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_live_rows_of_every_kind_of_selection(n, d, batch, dtype, device):
    x, weight, bias = make(n, d, batch, dtype, device)
    for name, mask in masks(n, batch, device).items():
        out = poisoned(n, batch, device)
        gather_gemv(x, weight, bias, Selection.from_mask(mask), "relu", out)
        want = gather_gemv_reference(x.double(), weight, bias, mask, "relu")
        torch.testing.assert_close(out.to_dense().double(), want, atol=TOLERANCE[dtype], rtol=1e-3, msg=name)
        slots = torch.arange(out.slots, device=device)[None, :] < out.counts[:, None]
        assert (out.values[slots.flatten()] != 0).any(1).all()  # no row without a value is listed
        ids = out.ids[slots.flatten()]
        assert ids.unique().numel() == ids.numel()


@pytest.mark.parametrize("share", [1, 2, 4])
@pytest.mark.parametrize("n", [256, 200])
def test_programs_that_belong_to_a_block(share, n, device):
    x, weight, bias = make(n, 48, 1, torch.float32, device)
    for name, mask in masks(n, 1, device).items():
        out = poisoned(n, 1, device, 4 * share)
        gather_gemv(x, weight, bias, Selection.from_mask(mask), "relu", out)
        want = gather_gemv_reference(x.double(), weight, bias, mask, "relu")
        torch.testing.assert_close(out.to_dense().double(), want, atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("n,d", [(100, 48), (257, 130)])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_dense_with_layer_norm(n, d, batch, out_dtype, device):
    x, weight, bias = make(n, d, batch, torch.float32, device)
    ln = LayerNormWeights(torch.rand(d).to(device) + 0.5, torch.randn(d).to(device))
    out = torch.full((batch, n), float("nan"), dtype=out_dtype, device=device)
    normalised = torch.full((batch, d), float("nan"), device=device)
    gather_gemv(x, weight, bias, None, "none", out, ln, normalised_out=normalised)
    want = gather_gemv_reference(x.double(), weight, bias, None, "none", ln)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[out_dtype], rtol=1e-3)
    torch.testing.assert_close(normalised.double(), layer_norm_reference(x.double(), ln), atol=1e-5, rtol=1e-5,
                               check_dtype=False)  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("block", [1, 64])
@pytest.mark.parametrize("head_rows", [5, 16])
def test_groups_of_rows_stand_for_one_id(batch, block, head_rows, device):
    heads, d = 12, 40
    x, weight, bias = make(heads * head_rows, d, batch, torch.float32, device)
    mask = torch.rand(batch, heads).to(device) < 0.4
    wide = mask.repeat_interleave(head_rows, 1)
    out = torch.full((batch, heads * head_rows), 7.0, device=device)
    gather_gemv(x, weight, bias, Selection.from_mask(mask, block), "none", out, rows_per_id=head_rows)
    want = gather_gemv_reference(x.double(), weight, bias, wide)
    untouched = ~wide.any(0)
    assert (out[:, untouched] == 7.0).all()
    torch.testing.assert_close(out[:, ~untouched].double(), want[:, ~untouched], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_rows(batch, dtype, device):
    x, weight, _ = make(90, 64, batch, torch.float16, device)
    stored, scale = quantize_rows(weight, dtype)
    out = torch.full((batch, 90), float("nan"), device=device)
    gather_gemv(x, stored, None, None, "none", out, scale=scale)
    want = gather_gemv_reference(x.double(), stored, None, None, "none", None, scale)
    torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=1e-3)


@pytest.mark.skipif(INTERPRET, reason="the interpreter gets bfloat16 products wrong")
@pytest.mark.parametrize("batch", [1, 2, 9])
def test_bfloat16(batch, device):
    x, weight, bias = make(300, 128, batch, torch.bfloat16, device)
    out = torch.empty(batch, 300, dtype=torch.float32, device=device)
    gather_gemv(x, weight, bias, None, "relu", out)
    torch.testing.assert_close(out.double(), gather_gemv_reference(x.double(), weight, bias, None, "relu"),
                               atol=2e-2, rtol=1e-2)  # fmt: skip


def test_nan_activations_stay_visible(device):
    x, weight, _ = make(40, 16, 1, torch.float32, device)
    weight[7, 3] = float("nan")
    out = poisoned(40, 1, device)
    gather_gemv(x, weight, None, Selection.from_mask(torch.ones(1, 40, dtype=torch.bool, device=device)), "relu", out)
    assert out.to_dense()[0, 7].isnan() and not out.to_dense()[0, :7].isnan().any()


def test_errors_name_the_number(device):
    x, weight, bias = make(40, 16, 1, torch.float32, device)
    out = torch.empty(1, 40, device=device)
    with pytest.raises(ValueError, match=r"weight must have shape \(40, 15\), got \(40, 16\)"):
        gather_gemv(x[:, :15].contiguous(), weight, bias, None, "none", out)
    with pytest.raises(ValueError, match="activation must be 'none' or 'relu', got 'gelu'"):
        gather_gemv(x, weight, bias, None, "gelu", out)
    with pytest.raises(ValueError, match="39 ids of 1 rows does not fit a weight of 40 rows"):
        gather_gemv(x, weight, bias, Selection.empty(39, device), "none", out)
    with pytest.raises(ValueError, match="live rows are made for batch 2, got 1"):
        gather_gemv(x, weight, bias, Selection.empty(40, device), "relu", LiveRows.empty(40, 2, device))
    with pytest.raises(ValueError, match="needs a scale"):
        gather_gemv(x, weight.to(torch.int8), bias, None, "none", out)
    with pytest.raises(ValueError, match="float32, float16 or bfloat16, got float64"):
        gather_gemv(x.double(), weight, bias, None, "none", out)


@pytest.mark.skipif(INTERPRET, reason="the interpreter takes CPU tensors")
def test_a_cpu_tensor_is_one_line():
    with pytest.raises(ValueError, match="x is on cpu: the Triton kernels need a CUDA device"):
        gather_gemv(torch.randn(1, 8), torch.randn(4, 8), None, None, "none", torch.empty(1, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("n,d", [(8192, 2048), (10240, 2560), (16384, 4096), (20480, 5120), (28672, 7168),
                                 (36864, 9216), (49152, 12288)])  # fmt: skip
@pytest.mark.parametrize("batch", [1, 2, 8, 32])
def test_real_shapes(n, d, batch):
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(batch, d, generator=g, device="cuda").half()
    weight = torch.randn(n, d, generator=g, device="cuda").half() / d**0.5
    bias = torch.randn(n, generator=g, device="cuda").half()
    mask = torch.rand(batch, n, generator=g, device="cuda") < 0.1
    want = gather_gemv_reference(x, weight, bias, mask, "relu")
    first = None
    for pdl in (False, True, True):
        out = poisoned(n, batch, "cuda", 528)
        gather_gemv(x, weight, bias, Selection.from_mask(mask), "relu", out, pdl=pdl)
        got = out.to_dense()
        torch.testing.assert_close(got, want, atol=5e-3, rtol=5e-3)
        assert first is None or torch.equal(got, first)  # bitwise: PDL or not, run to run
        first = got
    residual = torch.randn(batch, d, generator=g, device="cuda")
    ln = LayerNormWeights(torch.rand(d, generator=g, device="cuda").half() + 0.5,
                          torch.randn(d, generator=g, device="cuda").half())  # fmt: skip
    dense = torch.full((batch, n), float("nan"), dtype=torch.float16, device="cuda")
    gather_gemv(residual, weight, bias, None, "none", dense, ln, pdl=True)
    want = gather_gemv_reference(layer_norm_reference(residual, ln, torch.float16), weight, bias)
    torch.testing.assert_close(dense.float(), want, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
def test_a_matrix_beyond_two_to_the_31():
    n, d = 180000, 12288
    weight = torch.zeros(n, d, dtype=torch.float16, device="cuda")
    rows = torch.tensor([0, 174762, 174763, n - 1], device="cuda")
    weight[rows] = torch.randn(4, d, device="cuda").half()
    x = torch.randn(1, d, device="cuda").half()
    mask = torch.zeros(1, n, dtype=torch.bool, device="cuda")
    mask[0, rows] = True
    out = torch.zeros(1, n, device="cuda")
    gather_gemv(x, weight, None, Selection.from_mask(mask, block=256), "none", out)
    torch.testing.assert_close(out[0, rows], (weight[rows].float() @ x[0].float()), atol=0.1, rtol=1e-3)
