"""The second half of a predictor and the MLP of one token in one grid, whose programs own neurons:

    out[j] = residual[j] + bias[j] + sum_k h[k] down[k, j]    over the neurons k that the predictor selects

Selection is that of `select`, h that of `mlp`. A program multiplies the predictor's rows of its own neurons, and lists
those that it selects in shared memory. These it multiplies as a program of `mlp` does its part of a list. So there is
no list of all programs, and no launch that makes one. What it costs is that programs have unlike numbers of rows.
A program's neurons are neighbours: lying far apart they took longer.

A format gives the functions of `stages.mlp` and one more, `run`: both products of what is chosen of a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, check_shape, require
from dejavu_train.kernels.common.launch import n_sms, use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.limits import Products, owned_block
from dejavu_train.kernels.common.partial_sums import add_partials, most_splits, partial_sums
from dejavu_train.kernels.common.row_state import by_state
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import MlpWeights
from dejavu_train.kernels.stages.listed import ListedLaunch, constants
from dejavu_train.kernels.stages.listed_int4 import Int4MlpSettings, int4_launch
from dejavu_train.kernels.stages.mlp import ActivationFunction, NeuronRows, hidden_reference
from dejavu_train.kernels.stages.predictor import Predictor
from dejavu_train.kernels.stages.select import (
    begin_block,
    block_logits,
    check_selects,
    registers_launch,
    row_words_launch,
    select_arguments,
    select_reference,
)
from dejavu_train.kernels.stages.up_rows import block_rows

WIDEST = 64  # columns of a piece of a predictor's rows: wider pieces' sums take the registers of x


@dataclass(frozen=True)
class OwnedMlpSettings(Int4MlpSettings, stage="owned_int4"):
    """Settings of programs that own neurons, which hold several times the rows of a step."""


def mlp_owned_reference(
    x: Tensor,
    ln: LayerNormWeights | None,
    weights: MlpWeights,
    predictor: Predictor,
    residual: Tensor,
    out: Tensor,
    row_state: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    """Plain torch, in place, in fp32. fp64 when x is fp64."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    select_reference(predictor, row_state)
    n = x.to(wide) if ln is None else layer_norm_reference(x, ln, wide)
    h = torch.where(predictor.selection.to_mask(1), hidden_reference(n, weights), 0.0)
    out.copy_(h @ weights.down.weight.dense(wide) + weights.down.bias.to(wide) + residual)


@triton.jit(do_not_specialize=["n"])
def _mlp_owned_kernel(
    hidden, rows_of, row_bits, x, norm, gate, up, down, partials, n, how: tl.constexpr, act: tl.constexpr,
    READ: tl.constexpr, MULTIPLY: tl.constexpr, S: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, how.lanes)
    each = (n + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.program_id(0) * each
    place = (begin, tl.minimum(n, begin + each))
    block = begin_block(rows_of, place, 1, READ, S)
    if NORM:
        norms = how.read_norm(how, norm, lane)
    wait_for_predecessor(PDL)
    if NORM:
        given, _, _ = how.normalise(how, x, norms, norm, lane)
    else:
        given = how.read_input(how, x, lane)
    logits = block_logits(block, hidden, rows_of, place, 1, MULTIPLY, S, False)
    rows, inside = block_rows(place, S)
    chosen = by_state((logits > block[3]) & inside, block[4], inside)
    tl.store(row_bits + rows, chosen.to(tl.int32), mask=inside)
    how.run(how, chosen, rows, gate, up, down, given, partials, act, lane)


def mlp_owned(
    x: Tensor,
    ln: LayerNormWeights | None,
    weights: MlpWeights,
    predictor: Predictor,
    residual: Tensor,
    out: Tensor,
    row_state: Tensor | None = None,
    partials: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Reads predictor.hidden. Of the selection row_bits alone are written. Bitwise deterministic.

    x (1, d) fp32, or fp16 without a LayerNorm. Weights of 4 bits, a predictor with a threshold, of numbers or nibbles.
    residual and out (1, d) fp32. row_state: (1) int32 as `select` takes it. pdl: as `select` takes it.

    Errors: shapes, dtypes, groups, more neurons than programs' registers hold, a CPU tensor.
    """
    n, d = weights.up.weight.shape
    check_device("x", x)
    for name, tensor in (("x", x), ("residual", residual), ("out", out)):
        check_shape(name, tensor, 1, d)
    for name, linear in weights.named():
        check_shape(f"{name}.bias", linear.bias, d if name == "down" else n)
    check_selects(predictor, row_state)
    require(weights.up.weight.format is Format.INT4, "programs own neurons of 4-bit weights")
    launch, selects = owned_launch(x, weights, predictor, ln is not None)
    partials = partial_sums(d, x.device) if partials is None else partials
    check_shape("partials", partials, most_splits(x.device), d)
    partials, pdl = partials.view(launch.sums), use_pdl(pdl, x.device)
    matrices = {name: NeuronRows(linear.weight.parts(), linear.bias) for name, linear in weights.named()}
    hidden, rows_of, lists, _, _ = select_arguments(predictor, row_state)
    _mlp_owned_kernel[(launch.programs,)](
        hidden, rows_of, lists.row_bits, x.view(torch.int32) if ln is None else x, None if ln is None else ln.args(),
        matrices.get("gate"), matrices["up"], matrices["down"]._replace(bias=None), partials, n, constants(launch.how),
        ActivationFunction.of(weights.hidden), **selects, NORM=ln is not None, PDL=pdl, num_warps=launch.warps,
        maxnreg=launch.registers, launch_pdl=pdl,
    )  # fmt: skip
    add_partials(partials, launch.programs, weights.down.bias, residual, out, pdl)


def owned_launch(
    x: Tensor, weights: MlpWeights, predictor: Predictor, norm: bool
) -> tuple[ListedLaunch, dict[str, Any]]:
    """(launch, constants of `block_logits`). Neurons that one wave of programs has no room for take several."""
    n, d = weights.up.weight.shape
    rank, device = predictor.hidden.shape[1], x.device
    found = OwnedMlpSettings.find("int4", device, d=d, gated=weights.gate is not None)
    wave = found.programs * n_sms(device)
    words, up = predictor.products is Products.ROW_WORDS, predictor.weights.up
    size = 0 if words else up.element_size()
    fits = (p for p in range(wave, most_splits(device) + 1, wave) if owned_block(n, rank, size, p, found.warps))
    programs = next(fits, 0) if words or predictor.products is Products.REGISTERS else 0
    require(
        programs > 0,
        f"programs of {found.warps} warps do not take {n} neurons of a predictor of rank {rank} by"
        f" {predictor.products}",
    )
    block = owned_block(n, rank, size, programs, found.warps)
    selects = row_words_launch(block, rank, found.warps) if words else registers_launch(up, block, rank, WIDEST)
    return int4_launch(x, weights, norm, found, programs, block), selects.constants
