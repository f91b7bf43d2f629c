"""The MLP of one token over a list of neurons, both products in one grid, whatever the format and the activation:

    out[j] = residual[j] + bias[j] + sum_k h[k] down[ids[k], j]
    h[k] = act(up[k])                     without a gate
           act(gate[k]) up[k]             with one, or act(gate[k]) act(up[k]) (`Hidden.both`)
    up[k] = sum_j up[ids[k], j] n[j] + up_bias[ids[k]], and gate[k] alike

n = norm(x), rounded, or x itself. up, gate and down (n, d): a neuron is a row of each, of down columns are outputs.
A program takes entries of the list in steps. It multiplies their rows of the first matrix (the gate, or up) and
activates the products. Of the entries whose value is not zero it then takes the rows of the other matrices.
So nothing waits between the products, where several kernels end, start and fill the memory's queues again. What it
costs is a sum of all d columns for each program, which `add_partials` adds up in a fixed order. Hence few programs, one
or two a multiprocessor.

A format is a set of functions (`NumberNeurons`, `Int4Neurons`), which the kernel is handed with its sizes:

    share        (first entry, end, step) of the program's part of a list
    read_input   x as it is multiplied. read_norm: a norm's gains and shifts, which depend on nothing
    normalise    (norm of x as it is multiplied, mean, 1 / deviation)
    first_rows   what is asked for first: rows of the first matrix of the first entries
    begin        the state in front of the first step
    products     (first products of a step's entries, which of them are there, the state): tuples
    add          the state with what these values are multiplied with
    finish       stores the program's sums

What is known before the wait for the stage before is read there. EARLY_X: x, which a launch before that one made, where
a predictor normalised it. EARLY_LIST: the list and its first rows, of a look-ahead predictor.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.activation import activation_of, activation_reference
from dejavu_train.kernels.common.checks import check_device, check_shape, require
from dejavu_train.kernels.common.late_norm import LateNorm
from dejavu_train.kernels.common.launch import use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.partial_sums import add_partials, most_splits, partial_sums
from dejavu_train.kernels.common.selection import PackedSelection
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights
from dejavu_train.kernels.stages import listed_int4, listed_numbers
from dejavu_train.kernels.stages.listed import constants, keyed

LAUNCHES: dict[str, Any] = {
    Format.FP32: listed_numbers.launch,
    Format.FP16: listed_numbers.launch,
    Format.BF16: listed_numbers.launch,
    Format.INT4: listed_int4.launch,
}
"""How each format is launched: (x, weights, norm, every) -> `ListedLaunch`. A new format adds itself."""


def hidden_reference(n: Tensor, weights: MlpWeights) -> Tensor:
    """(B, n) of all neurons in plain torch, in the dtype of n (B, d): act(up), or act(gate) up."""

    def products(linear: Linear) -> Tensor:
        return n @ linear.weight.dense(n.dtype).T + linear.bias.to(n.dtype)

    form = weights.hidden
    if weights.gate is None:
        return activation_reference(products(weights.up), form.activation, form.threshold)
    h, up = activation_reference(products(weights.gate), form.activation, form.threshold), products(weights.up)
    if form.both:
        up = activation_reference(up, form.activation, form.threshold)
    return torch.where(h == 0, 0.0, h * up)


@triton.jit(do_not_specialize=["last"])
def _mlp_kernel(
    x, norm, gate, up, down, ids, count, partials, estimate, moments, last, how: tl.constexpr, act: tl.constexpr,
    NORM: tl.constexpr, EARLY_X: tl.constexpr, EARLY_LIST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, how.lanes)
    first = gate
    if gate is None:
        first = up
    if EARLY_X:
        n = how.read_input(how, x, lane, ".cg")
    if not EARLY_LIST:
        if NORM:
            norms = how.read_norm(how, norm, lane)
        wait_for_predecessor(PDL)
    # An id may be one beyond the count: then it is an old one, in range, and its row is not read.
    number = tl.load(count, cache_modifier=".cg")
    begin, end, step = how.share(how, number)
    coming = how.first_rows(how, first, ids, begin, end, last, lane)
    if EARLY_LIST:
        if NORM:
            norms = how.read_norm(how, norm, lane)
        wait_for_predecessor(PDL)
    if NORM:
        n, mean, rstd = how.normalise(how, x, norms, norm, lane)
        if estimate is not None:
            if tl.program_id(0) == 0:
                tl.store(estimate, mean)
                tl.store(estimate + 1, rstd)
                tl.store(moments, 0)
                tl.store(moments + 1, 0)
    elif not EARLY_X:
        n = how.read_input(how, x, lane)
    state = how.begin(how, coming, gate, up, down, lane)
    for entry in range(begin, end, step):
        products, there, state = how.products(how, state, gate, up, n, ids, entry, end, last, lane)
        values = ()
        for r in tl.static_range(len(products)):
            value = act.function(products[r], act.threshold)
            values = values + (tl.where(there[r], value, 0.0),)
        state = how.add(how, state, values, gate, up, down, act, lane)
    how.finish(how, state, gate, up, down, n, partials, act, lane)


class NeuronRows(NamedTuple):
    """A matrix as kernels take it, with a bias or None."""

    parts: tuple[Tensor, ...]
    bias: Tensor | None


@keyed
class ActivationFunction(NamedTuple):
    function: Any
    threshold: float
    both: bool

    @classmethod
    def of(cls, hidden: Hidden) -> "ActivationFunction":
        """Errors: what `activation_of` refuses."""
        return cls(activation_of(hidden.activation, hidden.threshold), hidden.threshold, hidden.both)


def mlp_sums(
    x: Tensor,
    ln: LayerNormWeights | None,
    weights: MlpWeights,
    rows: PackedSelection,
    partials: Tensor | None = None,
    early: str | None = None,
    pdl: bool = False,
    late: LateNorm | None = None,
) -> tuple[Tensor, int]:
    """(sums of programs, how many of them) whose sum with residual and down's bias is `mlp`. pdl as `use_pdl` gives it.

    late: of what the sum will be. Its estimate is made here, which is that of x, with a norm, and its moments are
    set to zero.
    """
    n, d = weights.up.weight.shape
    check_device("x", x)
    check_shape("x", x, 1, d)
    check_shape("rows.ids", rows.ids, n)
    if early not in (None, "x", "list") or (early == "x" and ln is not None):
        raise ValueError(f'early must be "list", None, or "x" without a LayerNorm, got {early!r}')
    require(late is None or ln is not None, "there is nothing to estimate where x is normalised already")
    for name, linear in weights.named():
        check_shape(f"{name}.bias", linear.bias, d if name == "down" else n)
    launch = LAUNCHES[weights.up.weight.format](x, weights, ln is not None, rows.every)
    matrices = {name: NeuronRows(linear.weight.parts(), linear.bias) for name, linear in weights.named()}
    if partials is None:
        partials = partial_sums(d, x.device)
    check_shape("partials", partials, most_splits(x.device), d)
    partials = partials.view(launch.sums)
    _mlp_kernel[(launch.programs,)](
        x.view(torch.int32) if launch.pairs and ln is None else x, None if ln is None else ln.args(),
        matrices.get("gate"), matrices["up"], matrices["down"]._replace(bias=None), rows.ids, rows.count, partials,
        None if late is None else late.estimate, None if late is None else late.moments, n - 1, constants(launch.how),
        ActivationFunction.of(weights.hidden), NORM=ln is not None, EARLY_X=early == "x",
        EARLY_LIST=early == "list", PDL=pdl, num_warps=launch.warps, maxnreg=launch.registers, launch_pdl=pdl,
    )  # fmt: skip
    return partials, launch.programs


def mlp(
    x: Tensor,
    ln: LayerNormWeights | None,
    weights: MlpWeights,
    residual: Tensor,
    rows: PackedSelection,
    out: Tensor,
    partials: Tensor | None = None,
    early: str | None = None,
    pdl: bool = False,
) -> None:
    """Reads rows.ids and rows.count. residual and out (1, d) fp32. Bitwise deterministic. See the module's docstring.

    x: (1, d) fp32, or without a LayerNorm as the weights' dtype is, of 4-bit weights fp16.
    early: what was written before the launch before this one: "x" (without a LayerNorm here), "list", or None.
    Errors: shapes, dtypes, groups, a CPU tensor.
    """
    pdl = use_pdl(pdl, out.device)
    d = weights.up.weight.shape[1]
    for name, tensor in (("x", x), ("residual", residual), ("out", out)):
        check_shape(name, tensor, 1, d)
    sums = mlp_sums(x, ln, weights, rows, partials, early, pdl)
    add_partials(*sums, weights.down.bias, residual, out, pdl)
