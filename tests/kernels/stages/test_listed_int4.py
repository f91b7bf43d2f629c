"""fc1 and fc2 over a packed list in one grid, with 4-bit weights."""

import pytest
import torch
from int4_helpers import assert_rounded_products, random_rows, with_outliers
from mlp_helpers import mlp_reference

from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.partial_sums import partial_sums
from dejavu_train.kernels.common.selection import PackedSelection, Selection
from dejavu_train.kernels.formats.matrix import Linear, MlpWeights
from dejavu_train.kernels.mlp.pack import pack
from dejavu_train.kernels.stages import listed_int4 as module
from dejavu_train.kernels.stages.listed_int4 import Int4MlpSettings
from dejavu_train.kernels.stages.mlp import mlp

NAN = float("nan")


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch):
    """Settings count programs of one multiprocessor."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(module, "n_sms", lambda device: 1)


def make_problem(device, n, d, density, group=32, block=16, size=0.05):
    selection = Selection.from_mask(torch.rand(1, n, device=device) < density, block)
    rows = PackedSelection.empty(n, device)
    pack(selection, rows)
    w1, w2 = (random_rows(device, n, d, group=group, size=size) for _ in range(2))
    x = with_outliers(torch.randn(1, d, device=device)).half()
    b1, b2 = torch.randn(n, device=device), torch.randn(d, device=device)
    return selection, rows, (x, w1, b1, w2, b2, torch.randn(1, d, device=device))


def check(out, selection, n, w1, b1, w2, b2, residual):
    """Against fp64, with the error that rounded products may add up to. n (1, d): what fc1 reads."""
    want = torch.empty(1, w1.shape[1], dtype=torch.float64, device=out.device)
    weights = MlpWeights(Linear(w1, b1.double()), Linear(w2, b2.double()))
    mlp_reference(n.double(), None, weights, residual, selection.to_mask(1), want)
    one, two = w1.dense(torch.float64), w2.dense(torch.float64)
    h = (n.double() @ one.T + b1.double()).relu()
    mask = selection.to_mask(1)
    # fc1's own rounding, through fc2; of each of fc2's products, its factor's, its own, and that of a program's sum
    wrong = torch.where(mask, n.double().abs() @ one.abs().T, 0.0) @ two.abs() * 2**-10
    sums = torch.where(mask, h, 0.0) @ two.abs()
    assert_rounded_products(out, want, sums + wrong * 2**10, 3 * 2**-11)


def run(x, ln, w1, b1, w2, b2, *others, **options):
    mlp(x, ln, MlpWeights(Linear(w1, b1), Linear(w2, b2)), *others, **options)


@pytest.mark.parametrize(
    ("n", "d", "group", "warps", "density"),
    [
        (50, 64, 32, 1, 0.9),  # two steps of a program, one scale a lane group
        (45, 128, 128, 1, 0.6),
        (37, 40, 40, 1, 0.6),  # rows of five words, one scale each
        (70, 1152, 128, 1, 0.8),  # five stripes in two passes
        (40, 192, 64, 2, 0.6),  # a stripe beyond the row's end
        (8, 128, 128, 1, 0.0),
    ],
)
def test_equals_both_products(device, n, d, group, warps, density):
    selection, rows, tensors = make_problem(device, n, d, density, group)
    w1, w2 = tensors[1], tensors[3]
    unread = torch.ones(n, dtype=torch.bool, device=device)
    unread[selection.indices()] = False
    out, partials = torch.full((1, d), NAN, device=device), partial_sums(d, device).fill_(NAN)
    kept = [each.scales.clone() for each in (w1, w2)]
    for each in (w1, w2):
        each.scales[unread] = NAN  # skipped rows are not read
    with Int4MlpSettings(2, warps, 2, 255).in_use():
        run(tensors[0], None, *tensors[1:], rows, out, partials)
    for each, scales in zip((w1, w2), kept, strict=True):
        each.scales.copy_(scales)
    check(out, selection, *tensors)


def test_a_program_has_room_for_all_its_rows(device):
    selection, rows, tensors = make_problem(device, 50, 64, 1.0)
    tensors[2].add_(40)  # all live
    out = torch.full((1, 64), NAN, device=device)
    with Int4MlpSettings(2, 1, 2, 255).in_use():
        run(tensors[0], None, *tensors[1:], rows, out)
    check(out, selection, *tensors)


@pytest.mark.parametrize(
    ("n", "d", "group", "warps", "density"),
    [(40, 640, 128, 1, 0.9), (20, 192, 64, 2, 0.7), (37, 40, 40, 1, 0.6), (40, 320, 32, 1, 0.8)],
)
def test_the_queues_in_assembly(device, queues_in_assembly, n, d, group, warps, density):
    test_equals_both_products(device, n, d, group, warps, density)
    assert queues_in_assembly is None or queues_in_assembly.shared.size > 0


def test_errors_name_what_does_not_fit(device):
    _, rows, (x, w1, b1, w2, b2, residual) = make_problem(device, 8, 64, 0.5)
    out = torch.empty(1, 64, device=device)
    with pytest.raises(ValueError, match="groups of one size"):
        run(x, None, w1, b1, random_rows(device, 8, 64, group=64), b2, residual, rows, out)
    with pytest.raises(ValueError, match="x: expected float16, got float32"):
        run(x.float(), None, w1, b1, w2, b2, residual, rows, out)
    ln = LayerNormWeights(torch.ones(64, device=device), torch.zeros(64, device=device))
    with pytest.raises(ValueError, match="x: expected float32, got float16"):
        run(x, ln, w1, b1, w2, b2, residual, rows, out)


def test_more_neurons_take_more_programs(device):
    """One program's list would not hold them. More than all programs' lists do are refused."""
    n = 2 * module.MOST_ROWS + 1
    selection, rows, tensors = make_problem(device, n, 32, 0.02)
    out, partials = torch.full((1, 32), NAN, device=device), partial_sums(32, device).fill_(NAN)
    with Int4MlpSettings(1, 1, 2, 255).in_use():
        run(tensors[0], None, *tensors[1:], rows, out, partials)
    check(out, selection, *tensors)
    n = module.MOST_ROWS * module.most_splits(torch.device(device)) + 1
    w = random_rows(device, n, 32, group=32)
    rows = PackedSelection.empty(n, device)
    with pytest.raises(ValueError, match=f"{n} neurons: at most {n - 1}"):
        run(tensors[0], None, w, torch.zeros(n, device=device), w, tensors[4], tensors[5], rows, out)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [256, 384, 640, 2048, 2560, 4096, 5120, 7168, 9216, 12288])
def test_real_shapes(d):
    for density in (0.0, 0.1, 1.0):
        selection, rows, tensors = make_problem("cuda", 4 * d, d, density, 128, 64, d**-0.5 / 5)
        made, partials = [], partial_sums(d, "cuda")
        for pdl in (False, True, True):
            partials.fill_(NAN)
            made.append(torch.full((1, d), NAN, device="cuda"))
            run(tensors[0], None, *tensors[1:], rows, made[-1], partials, pdl=pdl)
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
    run(x, ln, *tensors, rows, out, early=early, pdl=True)
    check(out, selection, layer_norm_reference(x.double(), ln, torch.float16), *tensors)
