# mypy: disable-error-code="assignment"
"""fc1 over a packed list, one token: values[k] = relu(sum_j w[ids[k], j] x[j] + bias[ids[k]]).

x (1, d) normalised; w (n, d). Program p takes entries p, p + P, p + 2 P, ... of the list: even shares whatever the
activity of neighbouring neurons, and addresses that depend on no count. The next row is on its way before the present
one is summed. A value may be zero: fc2 skips its row.
fc1 alone, for benchmarks: a decoding step runs fc1 and fc2 in one grid (`sparse_mlp`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.checks import INTERPRET, check_device, check_shape
from kernels.common.launch import column_block, load_vector, use_pdl, wait_for_predecessor
from kernels.mlp.sparse_fc2 import PackedSelection, gathered_tiles


@dataclass(frozen=True)
class Fc1Settings:
    """programs: grid size, about what fits on the GPU at once; block: columns a piece of a row."""

    programs: int
    block: int
    warps: int


def fc1_settings(d: int) -> Fc1Settings:
    """Launch settings by width."""
    if INTERPRET:
        return Fc1Settings(5, min(128, column_block(d)), 4)
    if d <= 2048:
        return Fc1Settings(1056, column_block(d, 8), 8)
    if d <= 4096:
        return Fc1Settings(792, 2048, 8)
    if d < 12288:
        return Fc1Settings(792 if d <= 5120 else 528 if d <= 7168 else 396, 1024, 4)
    return Fc1Settings(264, 2048, 8)


def sparse_fc1_reference(x, weight, bias, selection, out) -> None:
    """Plain torch; `out` is the dense (B, n) tensor of the references."""
    y = (torch.nn.functional.linear(x.float(), weight.float()) + bias.float()).relu()
    out.copy_(torch.where(selection.to_mask(len(x)), y, 0.0))


@triton.jit(do_not_specialize=["last"])
def _sparse_fc1_kernel(
    x,
    weight,
    bias,
    ids,
    count,
    values,
    last,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    STEPS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    if EARLY:
        n = load_vector(x, columns, D, BLOCK, ".cg")
    wait_for_predecessor(PDL)
    # An id may be one beyond the count: then it is an old one, in range, and its row is not read.
    number = tl.load(count)
    row = tl.load(ids + tl.minimum(pid, last))
    next_row = tl.load(ids + tl.minimum(pid + step, last))
    w = gathered_tiles(weight, (row,), (number - pid > 0,), columns, D, BLOCK, 1)
    if not EARLY:
        n = load_vector(x, columns, D, BLOCK)
    for item in range(pid, number, step):
        coming = gathered_tiles(weight, (next_row,), (number - item - step > 0,), columns, D, BLOCK, 1)
        far_row = tl.load(ids + tl.minimum(item + 2 * step, last))
        offset = tl.load(bias + row).to(tl.float32)
        products = w[0].to(tl.float32) * n[0].to(tl.float32)
        for j in tl.static_range(1, STEPS):
            products += w[j].to(tl.float32) * n[j].to(tl.float32)
        value = tl.sum(products, 0) + offset
        tl.store(values + item, tl.where(value <= 0, 0.0, value))  # keeps a NaN
        row = next_row
        next_row = far_row
        w = coming


def sparse_fc1(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    rows: PackedSelection,
    early: bool = False,
    pdl: bool = False,
    settings: Fc1Settings | None = None,
) -> None:
    """One batch row; reads rows.ids and rows.count, writes rows.values. See the module's docstring.

    early: x was written before the launch before this one, and is read before the wait. Errors: shapes, a CPU tensor.
    """
    check_device("x", x)
    n, d = weight.shape
    check_shape("x", x, 1, d)
    check_shape("bias", bias, n)
    check_shape("rows.ids", rows.ids, n)
    settings = settings or fc1_settings(d)
    block = min(settings.block, max(16, triton.next_power_of_2(d)))
    pdl = use_pdl(pdl, x.device)
    _sparse_fc1_kernel[(min(settings.programs, n),)](
        x,
        weight,
        bias,
        rows.ids,
        rows.count,
        rows.values,
        n - 1,
        D=d,
        BLOCK=block,
        EARLY=early,
        PDL=pdl,
        num_warps=min(settings.warps, max(1, block // 32)),  # no more threads than columns
        launch_pdl=pdl,
    )
