"""Every format by every activation, norm and position, in the stages that take them, against float64. For test-long.

Other tests have each function in each stage that takes it, and these all of them with each other. Sizes are odd, and
what is selected is nothing, a part and everything in turn.
"""

import itertools

import pytest
import test_mlp
import torch
from int4_helpers import random_rows
from mlp_helpers import poisoned
from test_positions import KINDS, case, filled_from

from dejavu_train.kernels.common.activation import ACTIVATIONS, activation_reference
from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind, layer_norm_reference
from dejavu_train.kernels.common.selection import PackedSelection, Selection
from dejavu_train.kernels.dense.dense_rows import dense_rows, qkv_dense
from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights, Rows
from dejavu_train.kernels.mlp.pack import pack
from dejavu_train.kernels.stages.hidden import hidden_tokens, kept_unit
from dejavu_train.kernels.stages.mlp import hidden_reference, mlp
from dejavu_train.kernels.stages.mlp_batch import BatchActivations, down_batch, up_batch
from dejavu_train.kernels.stages.qkv import qkv

pytestmark = pytest.mark.long
NAN = float("nan")
FORMATS = test_mlp.FORMATS
SHARES = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1.6e-2, "int4": 5e-3}  # of the size of what is summed
NORMS = [(kind, weight, bias) for kind in NormKind for weight, bias in ((True, True), (True, False), (False, False))]
HIDDEN = [
    *((False, Hidden(name)) for name in ACTIVATIONS if name != "none"),
    *((True, Hidden(name)) for name in ACTIVATIONS if name != "none"),
    (False, Hidden("relu", 0.5)), (True, Hidden("relu", 0.3)), (True, Hidden("relu", both=True)),
]  # fmt: skip
DENSITIES = (0.5, 0.0, 1.0)
by_format = pytest.mark.parametrize("kind", FORMATS)
by_norm = pytest.mark.parametrize("form", NORMS, ids=lambda form: f"{form[0]} {form[1]:d}{form[2]:d}")


def norm(form, d, device):
    kind, weight, bias = form
    given = (torch.rand(d, device=device) + 0.5 if weight else None, torch.randn(d, device=device) if bias else None)
    return LayerNormWeights(*given, kind=kind)


def needs_tensor_cores(device, kind):
    if kind == "bf16" and device == "cpu":
        pytest.skip("Triton's interpreter multiplies no matrices of bfloat16")


def check(out, want, size, kind, what):
    off = ((out.double() - want).abs() / size).max()
    assert off <= SHARES[kind], (what, float(off))  # a NaN is larger than nothing, and fails too


def matrix(device, kind, n, d, size=1.0):
    if kind == "int4":
        return random_rows(device, n, d, group=d, size=0.3 * size * d**-0.5)
    return Rows((torch.randn(n, d, device=device) * size * d**-0.5).to(FORMATS[kind]))


@by_norm
@by_format
def test_the_mlp_of_one_row(device, kind, form):
    n, d = 21, 40
    for (gated, hidden), density in zip(HIDDEN, itertools.cycle(DENSITIES)):
        rows, given, weights, mask = test_mlp.problem(device, kind, n, d, density, gated, hidden)
        ln, x = norm(form, d, device), torch.randn(1, d, device=device) + 1
        residual, out = torch.randn(1, d, device=device), torch.full((1, d), NAN, device=device)
        mlp(x, ln, given, residual, rows, out)
        read = layer_norm_reference(x.double(), ln, FORMATS[kind] or torch.float16).double()
        h = torch.where(mask, hidden_reference(read, weights), 0.0)
        down = weights.down.weight.dense(torch.float64)
        want = h @ down + weights.down.bias.double() + residual
        check(out, want, h.abs() @ down.abs() + residual.abs() + 2, kind, (gated, hidden, density))


@by_format
def test_the_mlp_of_several_rows(device, kind):
    """Numbers: up and down over the union. 4 bits: hidden values of listed rows."""
    needs_tensor_cores(device, kind)
    n, d, batch = 37, 40, 3
    for (gated, hidden), density in itertools.product(HIDDEN, DENSITIES):
        torch.manual_seed(n)
        dtype = FORMATS[kind] or torch.float16
        up, gate, down = (
            Linear(matrix(device, kind, n, d), torch.randn(size, device=device).to(dtype)) for size in (n, n, d)
        )
        weights = MlpWeights(up, down, gate if gated else None, hidden)
        x, mask = torch.randn(batch, d, device=device).to(dtype), torch.rand(batch, n, device=device) < density
        h = torch.where(mask, hidden_reference(x.double(), weights), 0.0)
        given = poisoned(weights, ~mask.any(0), ("up", "gate"))
        if kind == "int4":
            selection, rows = Selection.from_mask(mask), PackedSelection.empty(n, device)
            pack(selection, rows)
            made = hidden_tokens(x, given, (rows, selection.row_bits)) / kept_unit(weights, torch.float16)
            check(made, h, h.abs() + 4, kind, (gated, hidden, density))
            continue
        residual, out = torch.randn(batch, d, device=device), torch.full((batch, d), NAN, device=device)
        active = BatchActivations.empty(n, batch, d, dtype, device)
        up_batch(x, given, Selection.from_mask(mask, 32), active)
        down_batch(active, weights, residual, out)
        numbers = down.weight.dense(torch.float64)
        check(out, h @ numbers + down.bias.double() + residual, h.abs() @ numbers.abs() + 4, kind, (gated, hidden))


@by_norm
@by_format
def test_products_of_rows(device, kind, form):
    n, d = 19, 40
    for name, batch in itertools.product(ACTIVATIONS, (1, 2)):
        if batch > 1 and (form != NORMS[0] or (kind == "bf16" and device == "cpu")):
            continue  # several rows are normed by a kernel of its own
        weight, bias = matrix(device, kind, n, d), torch.randn(n, device=device).to(FORMATS[kind] or torch.float16)
        ln, x = norm(form, d, device), torch.randn(batch, d, device=device) + 1
        out = torch.full((batch, n), NAN, device=device)
        dense_rows(x, ln, weight, bias, name, out)
        read = layer_norm_reference(x.double(), ln, FORMATS[kind] or torch.float16).double()
        dense = weight.dense(torch.float64)
        values = read @ dense.T + bias.double()
        size = read.abs() @ dense.abs().T + 1
        check(
            out, activation_reference(values, name), size * size if name == "relu2" else 2 * size, kind, (name, batch)
        )


@by_norm
@pytest.mark.parametrize("turns", [None, *KINDS])
@by_format
def test_qkv_of_all_heads(device, kind, turns, form):
    dtype, d = FORMATS[kind] or torch.float32, 64
    made = case(device, turns, 1, 3, 2, 16, d, 7, 1.0, kind == "int4", dtype)
    made.cache.watermark.zero_()
    ln, x = norm(form, d, device), torch.randn(1, d, device=device) + 1
    qkv_dense(x, ln, made.weights, HeadStep(made.q, made.cache, made.position))
    inputs = torch.full((1, 7, d), NAN, dtype=torch.float64, device=device)
    inputs[0, int(made.position[0])] = layer_norm_reference(x, ln, made.cache.attn_in.dtype).double()[0]
    made.check(inputs, made.position[:, None].expand(1, 3), 10 * SHARES[kind])


@pytest.mark.parametrize("turns", [None, *KINDS])
@by_format
def test_qkv_of_selected_heads(device, kind, turns):
    needs_tensor_cores(device, kind)
    for density, batch in itertools.product(DENSITIES, (1, 2)):
        dtype = FORMATS[kind] or torch.float32
        made = case(device, turns, batch, 3, 2, 16, 96, 11, density, kind == "int4", dtype)
        qkv(made.weights, HeadStep(made.q, made.cache, made.position, made.selection))
        made.check(made.cache.attn_in, filled_from(made), 10 * SHARES[kind])
