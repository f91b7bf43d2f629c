"""The weighted row sum against the float64 reference; tickets, determinism, and the whole sparse MLP."""

import pytest
import torch

from kernels.gather_gemv import LiveRows, gather_gemv, gather_gemv_reference
from kernels.launch import INTERPRET, ScatterSettings, sparse_pays
from kernels.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.scatter_gemv import ScatterScratch, scatter_gemv, scatter_gemv_reference
from kernels.select import PredictorWeights, Selection, predict_reference, predict_select

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2}


def make(n, d, batch, dtype, device, density=0.2, seed=0):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(batch, n, generator=g).relu() * (torch.rand(batch, n, generator=g) < density)
    if dtype != torch.float32 and batch > 1:
        h = h.to(dtype).float()  # the batched kernel rounds h to the weight's dtype
    weight = (torch.randn(n, d, generator=g) / max(1.0, (n * density) ** 0.5)).to(dtype)
    bias, residual = torch.randn(d, generator=g).to(dtype), torch.randn(batch, d, generator=g)
    return tuple(t.to(device) for t in (h, weight, bias, residual))


def poisoned(batch, d, device, n=None):
    scratch = ScatterScratch.empty(batch, d, device, n=n)
    scratch.partials.fill_(float("nan"))
    return scratch


@pytest.mark.parametrize("n,d", [(200, 64), (64, 33), (1, 100), (131, 200)])
@pytest.mark.parametrize("batch", [1, 2, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_live_rows(n, d, batch, dtype, device):
    for density in (0.0, 0.3, 1.0):
        h, weight, bias, residual = make(n, d, batch, dtype, device, density)
        live = LiveRows.empty(n, batch, device, 7)
        live.values.fill_(float("nan"))
        live.ids.fill_(-77)
        live.set_dense(h)
        scratch, out = poisoned(batch, d, device, n), torch.full((batch, d), float("nan"), device=device)
        scatter_gemv(live, weight, bias, residual, None, out, scratch=scratch)
        want = scatter_gemv_reference(h.double(), weight, bias, residual)
        torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=1e-3)
        assert not scratch.tickets.any()  # ready for the next call


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("n,d", [(200, 64), (50, 130)])
def test_all_rows_in_place_of_the_residual(n, d, batch, device):
    h, weight, bias, residual = make(n, d, batch, torch.float32, device)
    want = scatter_gemv_reference(h.double(), weight, bias, residual)
    scatter_gemv(h, weight, bias, residual, None, residual, scratch=poisoned(batch, d, device))
    torch.testing.assert_close(residual.double(), want, atol=1e-4, rtol=1e-4)
    plain = torch.full((batch, d), float("nan"), dtype=torch.float16, device=device)
    scatter_gemv(h, weight, None, None, None, plain)
    torch.testing.assert_close(plain.double(), scatter_gemv_reference(h.double(), weight), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("block", [1, 64])
@pytest.mark.parametrize("head_dim", [5, 16, 80])
def test_heads(batch, block, head_dim, device):
    heads, d = 12, 48
    h, weight, bias, residual = make(heads * head_dim, d, batch, torch.float32, device, 1.0)
    mask = torch.rand(batch, heads).to(device) < 0.4
    wide = mask.repeat_interleave(head_dim, 1)
    poison = torch.where(wide.any(0)[None, :], h, torch.full_like(h, float("nan")))  # nobody reads unselected heads
    poison = torch.where(wide | ~wide.any(0)[None, :], poison, torch.full_like(h, float("nan")))
    out = torch.full((batch, d), float("nan"), device=device)
    scatter_gemv(poison, weight, bias, residual, Selection.from_mask(mask, block), out, head_dim)
    want = scatter_gemv_reference(h.double(), weight, bias, residual, wide)
    torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-4)


def test_sparse_pays_below_the_measured_crossing():
    assert sparse_pays(4096, 0.1) and sparse_pays(12288, 0.5) and sparse_pays(20480, 0.5)
    assert not sparse_pays(4096, 0.9) and not sparse_pays(64, 0.2) and not sparse_pays(9216, 1.0)
    assert sparse_pays(9216, 0.263, 16) and not sparse_pays(9216, 0.9, 16) and not sparse_pays(2048, 0.1, 2)


def test_splits_beyond_the_list(device):
    h, weight, bias, residual = make(30, 64, 1, torch.float32, device)
    out = torch.empty(1, 64, device=device)
    for splits in (1, 2, 11):
        scatter_gemv(h, weight, bias, residual, None, out, settings=ScatterSettings(64, splits, 16, 4))
        want = scatter_gemv_reference(h.double(), weight, bias, residual)
        torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-4)


def test_errors_name_the_number(device):
    h, weight, bias, residual = make(30, 64, 1, torch.float32, device)
    out = torch.empty(1, 64, device=device)
    with pytest.raises(ValueError, match="h has 29 rows, the weight 30"):
        scatter_gemv(h[:, :29].contiguous(), weight, bias, residual, None, out)
    with pytest.raises(ValueError, match="take no selection"):
        scatter_gemv(LiveRows.empty(30, 1, device), weight, bias, residual, Selection.empty(30, device), out)
    with pytest.raises(ValueError, match="the scratch holds 64 partial sums"):
        small = ScatterScratch.empty(1, 64, device, max_splits=1)
        scatter_gemv(h, weight, bias, residual, None, out, scratch=small, settings=ScatterSettings(64, 4, 16, 4))
    with pytest.raises(ValueError, match=r"out must have shape \(1, 64\), got \(1, 63\)"):
        scatter_gemv(h, weight, bias, residual, None, out[:, :63].contiguous())


def sparse_mlp(x, ln, predictor, threshold, fc1, b1, fc2_t, b2, buffers, pdl):
    selection, live, normalised, scratch, out = buffers
    predict_select(x, predictor, threshold, selection, ln, normalised_out=normalised, pdl=pdl)
    gather_gemv(normalised, fc1, b1, selection, "relu", live, pdl=pdl)
    scatter_gemv(live, fc2_t, b2, x, None, out, scratch=scratch, pdl=pdl)


def mlp_case(n, d, rank, batch, dtype, device):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(batch, d, generator=g)
    fc1, b1 = torch.randn(n, d, generator=g).to(dtype) / d**0.5, torch.randn(n, generator=g).to(dtype) * 0.1
    fc2, b2 = torch.randn(n, d, generator=g).to(dtype) / n**0.5, torch.randn(d, generator=g).to(dtype)
    down, up = torch.randn(rank, d, generator=g).to(dtype) / d**0.5, torch.randn(n, rank, generator=g).to(dtype)
    predictor = PredictorWeights(down.to(device), (up / rank**0.5).to(device), torch.zeros(n, device=device))
    ln = LayerNormWeights(torch.ones(d, dtype=dtype, device=device), torch.zeros(d, dtype=dtype, device=device))
    buffers = (Selection.empty(n, device), LiveRows.empty(n, batch, device, 33),
               torch.empty(batch, d, dtype=dtype, device=device), ScatterScratch.empty(batch, d, device, n=n),
               torch.empty(batch, d, device=device))  # fmt: skip
    return x.to(device), ln, predictor, [t.to(device) for t in (fc1, b1, fc2, b2)], buffers


@pytest.mark.parametrize("batch", [1, 2])
def test_the_whole_sparse_mlp(batch, device):
    x, ln, predictor, weights, buffers = mlp_case(300, 64, 16, batch, torch.float32, device)
    sparse_mlp(x, ln, predictor, 0.5, *weights, buffers, False)
    fc1, b1, fc2_t, b2 = weights
    mask = predict_reference(x.double(), predictor, ln) > 0.5
    h = gather_gemv_reference(layer_norm_reference(x.double(), ln, torch.float64), fc1, b1, mask, "relu")
    want = scatter_gemv_reference(h, fc2_t, b2, x)
    torch.testing.assert_close(buffers[-1].double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("n,d", [(8192, 2048), (10240, 2560), (16384, 4096), (20480, 5120), (28672, 7168),
                                 (36864, 9216), (49152, 12288)])  # fmt: skip
@pytest.mark.parametrize("batch", [1, 2, 8, 32])
def test_real_shapes(n, d, batch):
    g = torch.Generator("cuda").manual_seed(0)
    h = torch.randn(batch, n, generator=g, device="cuda").relu()
    h = (h * (torch.rand(n, generator=g, device="cuda") < 0.1)).half().float()
    weight = torch.randn(n, d, generator=g, device="cuda").half() / (0.05 * n) ** 0.5
    bias, residual = torch.randn(d, device="cuda").half(), torch.randn(batch, d, device="cuda")
    mask = (h != 0).any(0, keepdim=True).expand(batch, n)
    scratch = poisoned(batch, d, "cuda")
    out = torch.full((batch, d), float("nan"), device="cuda")
    want = scatter_gemv_reference(h, weight, bias, residual)
    for _ in range(3):
        scatter_gemv(h, weight, bias, residual, Selection.from_mask(mask), out, scratch=scratch, pdl=True)
        torch.testing.assert_close(out, want, atol=5e-3, rtol=5e-3)
    scatter_gemv(h, weight, bias, residual, None, out, scratch=scratch, pdl=True)
    torch.testing.assert_close(out, want, atol=5e-3, rtol=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("n,d", [(8192, 2048), (16384, 4096), (36864, 9216), (49152, 12288)])
def test_live_rows_of_real_shapes(n, d):
    g = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(n, d, generator=g, device="cuda").half() / (0.05 * n) ** 0.5
    residual = torch.randn(1, d, generator=g, device="cuda")
    scratch = poisoned(1, d, "cuda")
    settings = ScatterSettings(128, 32, 32, 4, 4)
    for density in (0.0, 0.1, 0.7):
        h = torch.randn(1, n, generator=g, device="cuda").relu()
        h = h * (torch.rand(n, generator=g, device="cuda") < density)
        live = LiveRows.empty(n, 1, "cuda", n // 32)
        live.set_dense(h.cpu().to("cuda"))
        want = scatter_gemv_reference(h, weight, None, residual)
        first = None
        for pdl in (False, True, True):
            out = residual.clone()
            scatter_gemv(live, weight, None, out, None, out, scratch=scratch, pdl=pdl, settings=settings)
            torch.testing.assert_close(out, want, atol=2e-2, rtol=1e-2)
            assert first is None or torch.equal(out, first)
            first = out.clone()


@pytest.mark.gpu
@pytest.mark.parametrize("n,d,rank", [(16384, 4096, 256), (36864, 9216, 576), (49152, 12288, 768)])
@pytest.mark.parametrize("batch", [1, 8])
def test_whole_mlp_repeats_bitwise_in_a_graph(n, d, rank, batch):
    """200 replays of a PDL chain give the bits of the plain chain: no race shows, no ticket is left over."""
    x, ln, predictor, weights, buffers = mlp_case(n, d, rank, batch, torch.float16, "cuda")
    buffers = (buffers[0], LiveRows.empty(n, batch, "cuda", 528), *buffers[2:])
    sparse_mlp(x, ln, predictor, 1.28, *weights, buffers, False)
    plain = buffers[-1].clone()
    assert plain.isfinite().all() and 0 < int(buffers[0].counts.sum()) < n
    sparse_mlp(x, ln, predictor, 1.28, *weights, buffers, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            sparse_mlp(x, ln, predictor, 1.28, *weights, buffers, True)
    different = torch.zeros((), device="cuda")
    for _ in range(50):
        buffers[-1].fill_(float("nan"))
        graph.replay()
        different += (buffers[-1] != plain).any()
    assert different.item() == 0


@pytest.mark.skipif(INTERPRET, reason="the interpreter takes CPU tensors")
def test_a_cpu_tensor_is_one_line():
    with pytest.raises(ValueError, match="h is on cpu"):
        scatter_gemv(torch.randn(1, 8), torch.randn(8, 4), None, None, None, torch.empty(1, 4))
