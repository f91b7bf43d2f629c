"""Numbers of fc1 and fc2 over a packed list in one grid: refusals and true shapes. Small ones: test_mlp.py."""

import pytest
import torch
from mlp_helpers import mlp_reference

from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.partial_sums import partial_sums
from dejavu_train.kernels.common.selection import PackedSelection, Selection
from dejavu_train.kernels.formats.matrix import Linear, MlpWeights
from dejavu_train.kernels.mlp.pack import pack
from dejavu_train.kernels.stages import listed_numbers
from dejavu_train.kernels.stages.mlp import mlp

NAN = float("nan")


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch):
    """Settings count programs of one multiprocessor."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(listed_numbers, "n_sms", lambda device: 1)


def make_problem(device, n, d, density, dtype=torch.float32, block=16):
    selection = Selection.from_mask(torch.rand(1, n, device=device) < density, block)
    rows = PackedSelection.empty(n, device)
    pack(selection, rows)
    x = torch.randn(1, d, device=device).to(dtype)
    w1, w2 = (torch.randn(n, d, device=device).mul_(d**-0.5).to(dtype) for _ in range(2))
    b1, b2 = torch.randn(n, device=device).to(dtype), torch.randn(d, device=device).to(dtype)
    return selection, rows, (x, w1, b1, w2, b2, torch.randn(1, d, device=device))


def reference(selection, x, w1, b1, w2, b2, residual):
    want = torch.empty(1, w1.shape[1], dtype=torch.float64, device=x.device)
    weights = weights_of(w1.double(), b1.double(), w2.double(), b2.double())
    mlp_reference(x.double(), None, weights, residual, selection.to_mask(1), want)
    return want


def weights_of(w1, b1, w2, b2):
    return MlpWeights(Linear.of(w1, b1), Linear.of(w2, b2))


def run(x, ln, w1, b1, w2, b2, *others, **options):
    mlp(x, ln, weights_of(w1, b1, w2, b2), *others, **options)


def test_errors_name_the_number(device):
    _, rows, tensors = make_problem(device, 40, 64, 0.5)
    x, w1, b1, w2, b2, residual = tensors
    out = torch.empty(1, 64, device=device)
    with pytest.raises(ValueError, match=r"down\.weight: expected shape"):
        run(x, None, w1, b1, w2[:39].contiguous(), b2, residual, rows, out)
    with pytest.raises(ValueError, match="x: expected shape"):
        run(x[:, :63].contiguous(), None, w1, b1, w2, b2, residual, rows, out)
    with pytest.raises(ValueError, match="early must be"):
        run(x, LayerNormWeights(b2, b2), w1, b1, w2, b2, residual, rows, out, early="x")
    with pytest.raises(ValueError, match="partials: expected shape"):
        run(tensors[0], None, *tensors[1:], rows, out, torch.empty(3, 64, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [2048, 4096, 5120, 7168, 9216, 12288])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_real_shapes(d, dtype):
    for density in (0.0, 0.1, 0.4, 1.0):
        selection, rows, tensors = make_problem("cuda", 4 * d, d, density, dtype, 64)
        want, made = reference(selection, *tensors), []
        partials = partial_sums(d, "cuda")
        for pdl in (False, True, True):
            partials.fill_(NAN)
            out = torch.full((1, d), NAN, device="cuda")
            run(tensors[0], None, *tensors[1:], rows, out, partials, pdl=pdl)
            made.append(out)
        assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
        torch.testing.assert_close(made[0].double(), want, atol=2e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [4096, 9216, 12288])
@pytest.mark.parametrize("early", [None, "list"])
def test_real_shapes_with_a_layer_norm(d, early):
    selection, rows, (_, *tensors) = make_problem("cuda", 4 * d, d, 0.1, torch.float16, 64)
    x = torch.randn(1, d, device="cuda") * 3 + 2
    ln = LayerNormWeights(torch.rand(d, device="cuda").half() + 0.5, torch.randn(d, device="cuda").half())
    want = reference(selection, layer_norm_reference(x, ln, torch.float16), *tensors)
    out = torch.full((1, d), NAN, device="cuda")
    run(x, ln, *tensors, rows, out, early=early, pdl=True)
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-3)  # n rounds otherwise here and there
