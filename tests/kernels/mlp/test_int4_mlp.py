"""fc1 and fc2 over a packed list in one grid, with 4-bit weights."""

import pytest
import torch
from int4_helpers import assert_rounded_products, random_rows, with_outliers

from kernels.common import int4_norm
from kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.mlp.select import Selection
from kernels.mlp.sparse_fc2 import PackedSelection, pack, partial_sums
from kernels.mlp.sparse_mlp import MlpSettings, sparse_mlp, sparse_mlp_reference

NAN = float("nan")


def make_problem(device, n, d, density, group=32, block=16, size=0.05):
    selection = Selection.from_mask(torch.rand(1, n, device=device) < density, block)
    rows = PackedSelection.empty(n, device)
    pack(selection, rows)
    w1, w2 = (random_rows(device, n, d, group=group, size=size) for _ in range(2))
    x = with_outliers(torch.randn(1, d, device=device)).half()
    b1, b2 = torch.randn(n, device=device), torch.randn(d, device=device)
    return selection, rows, (x, w1, b1, w2, b2, torch.randn(1, d, device=device))


def check(out, selection, n, w1, b1, w2, b2, residual):
    """Against fp64, with the error that rounded products may add up to; n (1, d): what fc1 reads."""
    want = torch.empty(1, w1.shape[1], dtype=torch.float64, device=out.device)
    sparse_mlp_reference(n.double(), None, w1, b1.double(), w2, b2.double(), residual, selection, want)
    one, two = w1.dequantised(torch.float64), w2.dequantised(torch.float64)
    h = (n.double() @ one.T + b1.double()).relu()
    mask = selection.to_mask(1)
    # fc1's own rounding, through fc2; of each of fc2's products, its factor's, its own, and that of a program's sum
    wrong = torch.where(mask, n.double().abs() @ one.abs().T, 0.0) @ two.abs() * 2**-10
    sums = torch.where(mask, h, 0.0) @ two.abs()
    assert_rounded_products(out, want, sums + wrong * 2**10, 3 * 2**-11)


@pytest.mark.parametrize(("n", "d", "group"), [(8, 64, 32), (6, 128, 128), (5, 40, 40)])
@pytest.mark.parametrize("density", [0.0, 0.6])
def test_equals_both_products(device, n, d, group, density):
    selection, rows, tensors = make_problem(device, n, d, density, group)
    w1, w2 = tensors[1], tensors[3]
    unread = torch.ones(n, dtype=torch.bool, device=device)
    unread[selection.indices()] = False
    out, partials = torch.full((1, d), NAN, device=device), partial_sums(d, device).fill_(NAN)
    kept = [each.scales.clone() for each in (w1, w2)]
    for each in (w1, w2):
        each.scales[unread] = NAN  # unselected rows are not read
    sparse_mlp(tensors[0], None, *tensors[1:], rows, out, partials, settings=MlpSettings(3, 8, 2, 1))
    for each, scales in zip((w1, w2), kept, strict=True):
        each.scales.copy_(scales)
    check(out, selection, *tensors)


def test_rows_of_value_zero_are_not_read(device):
    selection, rows, tensors = make_problem(device, 8, 64, 1.0)
    x, w1, b1, w2, _, _ = tensors
    dead = (x.double() @ w1.dequantised(torch.float64).T + b1.double())[0] < -0.1
    assert dead.any() and not dead.all()
    out, again = (torch.full((1, 64), NAN, device=device) for _ in range(2))
    sparse_mlp(x, None, *tensors[1:], rows, out)
    w2.scales[dead] = NAN
    sparse_mlp(x, None, *tensors[1:], rows, again)
    assert torch.equal(out, again)


@pytest.mark.parametrize("early", [None, "list", "x"])
def test_settings_and_a_layer_norm(device, early):
    selection, rows, (x, *tensors) = make_problem(device, 8, 96, 0.7)
    ln = None
    n = x
    if early != "x":
        x = x.float() * 2 + 1
        ln = LayerNormWeights(torch.rand(96, device=device).half() + 0.5, torch.randn(96, device=device).half())
        n = layer_norm_reference(x.double(), ln, torch.float16)
    out = torch.full((1, 96), NAN, device=device)
    sparse_mlp(x, ln, *tensors, rows, out, early=early, settings=MlpSettings(4, 4, 4, 1))
    check(out, selection, n, *tensors)


def test_a_nan_is_passed_on(device):
    _, rows, tensors = make_problem(device, 8, 64, 1.0)
    tensors[0][0, 3] = NAN
    out = torch.zeros(1, 64, device=device)
    sparse_mlp(tensors[0], None, *tensors[1:], rows, out)
    assert out.isnan().all()


def test_errors_name_what_does_not_fit(device):
    _, rows, (x, w1, b1, w2, b2, residual) = make_problem(device, 8, 64, 0.5)
    out = torch.empty(1, 64, device=device)
    with pytest.raises(ValueError, match="of one format"):
        sparse_mlp(x, None, w1, b1, w2.dequantised().half(), b2, residual, rows, out)
    with pytest.raises(ValueError, match="groups of one size"):
        sparse_mlp(x, None, w1, b1, random_rows(device, 8, 64, group=64), b2, residual, rows, out)
    ln = LayerNormWeights(torch.ones(64, device=device), torch.zeros(64, device=device).half())
    with pytest.raises(ValueError, match="LayerNorm weight: expected float16, got float32"):
        sparse_mlp(x.float(), ln, w1, b1, w2, b2, residual, rows, out)
    with pytest.raises(ValueError, match="two at a time"):
        sparse_mlp(x, None, w1, b1, w2, b2, residual, rows, out, settings=MlpSettings(2, 8, 1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [256, 384, 640, 2048, 2560, 4096, 5120, 7168, 9216, 12288])
def test_real_shapes(d):
    for density in (0.0, 0.1, 1.0):
        selection, rows, tensors = make_problem("cuda", 4 * d, d, density, 128, 64, d**-0.5 / 5)
        made, partials = [], partial_sums(d, "cuda")
        for pdl in (False, True, True):
            partials.fill_(NAN)
            made.append(torch.full((1, d), NAN, device="cuda"))
            sparse_mlp(tensors[0], None, *tensors[1:], rows, made[-1], partials, pdl=pdl)
        assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
        check(made[0], selection, *tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [4096, 9216, 12288])
@pytest.mark.parametrize("early", [None, "list"])
def test_real_shapes_with_a_layer_norm(d, early):
    selection, rows, (_, *tensors) = make_problem("cuda", 4 * d, d, 0.1, 128, 64, d**-0.5 / 5)
    x = with_outliers(torch.randn(1, d, device="cuda"), 8)
    ln = LayerNormWeights(torch.rand(d, device="cuda").half() + 0.5, torch.randn(d, device="cuda").half())
    out = torch.full((1, d), NAN, device="cuda")
    sparse_mlp(x, ln, *tensors, rows, out, early=early, pdl=True)
    check(out, selection, layer_norm_reference(x.double(), ln, torch.float16), *tensors)


@pytest.mark.parametrize("queued", [3, 2, 1])
def test_norms_through_the_queue_in_assembly(device, queues_in_assembly, monkeypatch, queued):
    d = 576  # three words a lane, of which a queue with less room takes the first ones
    monkeypatch.setattr(int4_norm, "MOST_BYTES", 32 * 32 * queued)
    selection, rows, (x, *tensors) = make_problem(device, 6, d, 0.7)
    x = x.float() * 2 + 1
    ln = LayerNormWeights(torch.rand(d, device=device).half() + 0.5, torch.randn(d, device=device).half())
    out = torch.full((1, d), NAN, device=device)
    sparse_mlp(x, ln, *tensors, rows, out, settings=MlpSettings(2, 32, 2, 1))
    check(out, selection, layer_norm_reference(x.double(), ln, torch.float16), *tensors)
