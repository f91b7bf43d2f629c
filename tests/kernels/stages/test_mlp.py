"""The MLP of one token: every activation with and without a gate, in every format, against float64."""

import pytest
import torch
from int4_helpers import random_rows
from mlp_helpers import mlp_reference, poisoned

from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind, layer_norm_reference
from dejavu_train.kernels.common.partial_sums import partial_sums
from dejavu_train.kernels.common.selection import PackedSelection, Selection
from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights, Rows
from dejavu_train.kernels.mlp.pack import pack
from dejavu_train.kernels.stages import listed_int4, listed_numbers
from dejavu_train.kernels.stages.listed_int4 import Int4MlpSettings
from dejavu_train.kernels.stages.listed_numbers import MlpSettings
from dejavu_train.kernels.stages.mlp import hidden_reference, mlp

NAN = float("nan")
FORMATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int4": None}
PLAIN = [Hidden("relu"), Hidden("relu", 0.5), Hidden("relu2"), Hidden("gelu"), Hidden("gelu_tanh"), Hidden("silu")]
GATED = [Hidden("relu", 0.3), Hidden("relu", both=True), Hidden("relu2"), Hidden("gelu"), Hidden("silu")]
OTHERS = [("fp32", Hidden("relu")), ("bf16", Hidden("silu"))]


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch):
    """Settings count programs of one multiprocessor."""
    if not torch.cuda.is_available():
        for each in (listed_int4, listed_numbers):
            monkeypatch.setattr(each, "n_sms", lambda device: 1)


def problem(device, kind, n, d, density, gated, hidden, size=1.0):
    """(listed neurons, weights whose skipped rows are NaN, the same without NaN, which are selected)."""
    torch.manual_seed(n + d)
    selection = Selection.from_mask(torch.rand(1, n, device=device) < density, 16)
    mask = selection.to_mask(1)[0]
    rows = PackedSelection.empty(n, device)
    pack(selection, rows)

    def linear(size, n_biases):
        bias, size = torch.randn(n_biases, device=device), size * d**-0.5
        if FORMATS[kind] is None:
            return Linear(random_rows(device, n, d, group=32 if d % 32 == 0 else d, size=0.3 * size), bias)
        numbers = torch.randn(n, d, device=device) * size
        return Linear(Rows(numbers.to(FORMATS[kind])), bias.to(FORMATS[kind]))

    gate = linear(1.0, n) if gated else None
    weights = MlpWeights(linear(size, n), linear(1 / size, d), gate, hidden)
    return rows, poisoned(weights, ~mask), weights, mask


def check(out, n, weights, residual, mask, kind):
    """Against float64, with what rounded factors and sums may add up to."""
    want = torch.empty(out.shape, dtype=torch.float64, device=out.device)
    mlp_reference(n.double(), None, exactly(weights), residual, mask[None], want)
    h = torch.where(mask, hidden_reference(n.double(), weights), 0.0)
    size = h.abs() @ weights.down.weight.dense(torch.float64).abs() + residual.abs() + 1
    share = 3 * 2**-10 if kind == "int4" else 1e-5
    assert ((out - want).abs() <= share * size).all(), ((out - want).abs() / size).max()


def exactly(weights):
    """With biases in float64, which `mlp_reference` rounds its input to where rows are codes."""
    wide = [None if one is None else Linear(Rows(one.weight.dense(torch.float64)), one.bias.double())
            for one in (weights.up, weights.down, weights.gate)]  # fmt: skip
    return MlpWeights(*wide, weights.hidden)


def run(device, kind, n, d, density, gated, hidden, size=1.0):
    rows, given, weights, mask = problem(device, kind, n, d, density, gated, hidden, size)
    x = torch.randn(1, d, device=device).to(FORMATS[kind] or torch.float16)
    residual, out = torch.randn(1, d, device=device), torch.full((1, d), NAN, device=device)
    partials = partial_sums(d, device).fill_(NAN)
    mlp(x, None, given, residual, rows, out, partials)
    check(out, x, weights, residual, mask, kind)


@pytest.mark.parametrize(("kind", "hidden"), [*((k, h) for k in ("fp16", "int4") for h in PLAIN), *OTHERS], ids=str)
def test_every_activation(device, kind, hidden):
    run(device, kind, 35, 64, 0.6, False, hidden)


@pytest.mark.parametrize("kind", ["fp16", "int4"])
@pytest.mark.parametrize("hidden", GATED, ids=str)
def test_every_activation_behind_a_gate(device, kind, hidden):
    run(device, kind, 35, 64, 0.6, True, hidden)


@pytest.mark.parametrize(
    ("kind", "n", "d"), [("fp32", 33, 65), ("fp32", 130, 257), ("bf16", 20, 130), ("int4", 19, 40)]
)
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("gated", [False, True])
def test_odd_sizes_nothing_and_everything(device, kind, n, d, density, gated):
    run(device, kind, n, d, density, gated, Hidden("silu" if gated else "gelu"))


@pytest.mark.parametrize("gated", [False, True])
def test_settings_change_nothing_but_the_order(device, gated):
    for settings in (MlpSettings(1, 32, 1, 1), MlpSettings(70, 64, 3, 2), MlpSettings(3, 128, 4, 2)):
        with settings.in_use():
            run(device, "fp32", 60, 96, 0.5, gated, Hidden("relu2"))
    for settings in (Int4MlpSettings(1, 2, 2, 255), Int4MlpSettings(4, 1, 1, 255)):
        with settings.in_use():
            run(device, "int4", 40, 96, 0.5, gated, Hidden("relu2"))


@pytest.mark.parametrize("kind", ["fp16", "int4"])
def test_squares_of_large_values(device, kind):
    """A squared ReLU of 256 or more is no fp16 number."""
    run(device, kind, 20, 64, 0.7, False, Hidden("relu2"), size=300.0)


@pytest.mark.parametrize("kind", ["fp32", "int4"])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_of_silent_neurons_are_not_read(device, kind, gated):
    rows, _, weights, mask = problem(device, kind, 40, 64, 1.0, gated, Hidden("relu"))
    x = torch.randn(1, 64, device=device).to(FORMATS[kind] or torch.float16)
    first = weights.gate if gated else weights.up
    gate = x.double() @ first.weight.dense(torch.float64).T + first.bias.double()
    dead = gate[0] < -0.01
    assert 5 < int(dead.sum()) < 35
    residual, out = torch.randn(1, 64, device=device), torch.full((1, 64), NAN, device=device)
    mlp(x, None, poisoned(weights, dead, ("up", "down") if gated else ("down",)), residual, rows, out)
    check(out, x, weights, residual, mask, kind)


@pytest.mark.parametrize("kind", ["fp32", "int4"])
@pytest.mark.parametrize("early", [None, "list"])
def test_behind_a_norm_with_a_gate(device, kind, early):
    rows, given, weights, mask = problem(device, kind, 40, 96, 0.5, True, Hidden("silu"))
    x = torch.randn(1, 96, device=device) * 3 + 2
    ln = LayerNormWeights(torch.rand(96, device=device) + 0.5, torch.randn(96, device=device))
    if early == "list":
        ln = LayerNormWeights(ln.weight, None, kind=NormKind.RMS_NORM)
    residual, out = torch.randn(1, 96, device=device), torch.full((1, 96), NAN, device=device)
    mlp(x, ln, given, residual, rows, out, early=early)
    n = layer_norm_reference(x.double(), ln, FORMATS[kind] or torch.float16)
    check(out, n, weights, residual, mask, kind)


@pytest.mark.parametrize("kind", ["fp32", "int4"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_nan_is_passed_on(device, kind, gated):
    rows, _, weights, _ = problem(device, kind, 16, 64, 1.0, gated, Hidden("relu"))
    x = torch.randn(1, 64, device=device).to(FORMATS[kind] or torch.float16)
    x[0, 3] = NAN
    out = torch.zeros(1, 64, device=device)
    mlp(x, None, weights, out.clone(), rows, out)
    assert out.isnan().all()


@pytest.mark.parametrize("gated", [False, True])
def test_the_queues_in_assembly(device, queues_in_assembly, gated):
    with Int4MlpSettings(2, 2, 2, 255).in_use():
        run(device, "int4", 70, 320, 0.8, gated, Hidden("relu"))
