"""The MLP whose programs own neurons: what is selected is `select`'s, outputs are those of a list."""

from dataclasses import replace

import pytest
import torch
from int4_helpers import random_rows
from mlp_helpers import poisoned
from predictor_helpers import predictor_of
from test_mlp import check
from test_nibbles import make_predictor

from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind, layer_norm_reference
from dejavu_train.kernels.common.limits import Products, owned_block
from dejavu_train.kernels.common.partial_sums import partial_sums
from dejavu_train.kernels.common.selection import PackedSelection, Selection
from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights
from dejavu_train.kernels.mlp.pack import pack
from dejavu_train.kernels.stages.mlp import mlp
from dejavu_train.kernels.stages.mlp_owned import OwnedMlpSettings, mlp_owned, mlp_owned_reference
from dejavu_train.kernels.stages.select import select

NAN, RELU = float("nan"), Hidden("relu")


def problem(device, n, d, rank, group, hidden=RELU, gated=False, density=0.5, block=64):
    """(x, weights, predictor with hidden values, of which about a share selects)."""

    def linear(n_biases):
        return Linear(random_rows(device, n, d, group=group, size=0.3 * d**-0.5), torch.randn(n_biases, device=device))

    weights = MlpWeights(linear(n), linear(d), linear(n) if gated else None, hidden)
    own = replace(make_predictor(device, d, rank, n), sums=None)
    predictor = predictor_of(own, 0.0, Selection.empty(n, device, block))
    predictor.hidden.copy_(torch.randn(1, rank, device=device).relu())
    logits = torch.empty(1, n, device=device)
    select(predictor, None, logits)
    predictor.threshold.fill_(float(logits.quantile(1 - density)))
    return torch.randn(1, d, device=device).half(), weights, predictor


def run(device, problem, state=1, pdl=False, ln=None):
    """Outputs of both ways, the list's and the owners'. Rows that are not selected are not read. ln: of x, or None."""
    x, weights, predictor = problem
    n, d = weights.up.weight.shape
    row_state = torch.tensor([state], dtype=torch.int32, device=device)
    select(predictor, row_state)
    rows, bits = PackedSelection.empty(n, device), predictor.selection.row_bits.clone()
    pack(predictor.selection, rows)
    residual = torch.randn(1, d, device=device)
    listed, owned = (torch.full((1, d), NAN, device=device) for _ in range(2))
    given = poisoned(weights, bits == 0)
    source = x if ln is None else x.float()
    mlp(source, ln, given, residual, rows, listed, partial_sums(d, device).fill_(NAN))
    predictor.selection.row_bits.fill_(-77)
    mlp_owned(source, ln, given, predictor, residual, owned, row_state, partial_sums(d, device).fill_(NAN), pdl)
    assert torch.equal(predictor.selection.row_bits, bits)
    for out in (listed, owned):
        check(out, x if ln is None else layer_norm_reference(x, ln, x.dtype), weights, residual, bits != 0, "int4")
    reference = torch.empty(1, d, dtype=torch.float64, device=device)
    wide = replace(predictor, weights=replace(predictor.weights, bias=predictor.weights.bias.double()))
    mlp_owned_reference(x.double(), ln, weights, wide, residual, reference, row_state)
    return listed, owned, reference


@pytest.mark.parametrize("state", [0, 1, 2])
@pytest.mark.parametrize(("n", "d", "rank", "group", "warps"), [(70, 64, 16, 32, 1), (150, 320, 40, 64, 2)])
def test_what_a_list_selects_and_makes(device, state, n, d, rank, group, warps):
    with OwnedMlpSettings(1, warps, 2, 255).in_use():
        run(device, problem(device, n, d, rank, group), state)


def test_neurons_that_one_wave_has_no_room_for(device):
    with OwnedMlpSettings(1, 1, 2, 255).in_use():
        assert owned_block(250, 16, 0, 3, 1) == 0 and owned_block(250, 16, 0, 6, 1) == 64
        run(device, problem(device, 250, 64, 16, 32))


@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.int8], ids=str)
def test_predictors_of_numbers(device, kind):
    x, weights, found = problem(device, 150, 64, 20, 32)
    up = 0.3 * torch.randn(150, 20, device=device)
    own = replace(found.weights, up=up.to(kind), up_scale=None)
    if kind is torch.int8:
        own = replace(own, up=(100 * up).clamp(-127, 127).to(kind), up_scale=torch.full((150,), 0.01, device=device))
    run(device, (x, weights, replace(found, weights=own, products=Products.REGISTERS)))


@pytest.mark.parametrize("kind", list(NormKind))
def test_a_norm_of_its_own(device, kind):
    shift = None if kind is NormKind.RMS_NORM else torch.randn(320, device=device)
    run(
        device, problem(device, 90, 320, 16, 32), ln=LayerNormWeights(torch.randn(320, device=device), shift, kind=kind)
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("hidden", [Hidden("relu2"), Hidden("silu"), Hidden("relu", both=True)], ids=str)
def test_activations_and_a_gate(device, gated, hidden):
    run(device, problem(device, 45, 64, 16, 32, hidden, gated))


@pytest.mark.parametrize("gated", [False, True])
def test_the_queues_in_assembly(device, queues_in_assembly, gated):
    with OwnedMlpSettings(1, 2, 2, 255).in_use():
        run(device, problem(device, 90, 320, 16, 32, gated=gated))


def test_what_no_kernel_takes(device):
    x, weights, predictor = problem(device, 70, 64, 16, 32)
    out = torch.empty(1, 64, device=device)
    with pytest.raises(ValueError, match="do not take 70 neurons of a predictor of rank 16 by rows in regi"):
        mlp_owned(x, None, weights, replace(predictor, products=Products.ROW_TILES), out, out)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [2048, 2560, 4096, 5120])
def test_real_shapes(d):
    for density in (0.0, 0.1, 1.0):
        run("cuda", problem("cuda", 4 * d, d, d // 16, 128, density=density), pdl=True)
