# mypy: disable-error-code="assignment"
"""fc1 of a packed list with 4-bit weights, one token:

    values[k] = relu(sum_j scale[i, j // group] code[i, j] n[j] + bias[i]),   i = ids[k]

n = LayerNorm(x), rounded to fp16, or x itself; x (1, d) fp32, fp16 without a LayerNorm; weight (n, d). As `dense_rows`,
but for the rows of a list: sixteen of its entries a tile, products on the tensor cores, words through a queue of each
lane. fc2 follows as `int4_fc2_list`. The engine takes one grid for both, `sparse_mlp`, wherever `pays` does not say
otherwise: no width has been timed, so no width is named.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.checks import check_device, check_dtype, check_shape
from kernels.common.int4 import Int4Rows
from kernels.common.int4_mma import first_rows, given_units, int4_rows_step, listed_rows, normalised_units
from kernels.common.launch import use_pdl, wait_for_predecessor
from kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.dense.dense_gemv import Int4RowSettings, row_launch
from kernels.mlp import int4_fc2
from kernels.mlp.sparse_fc2 import PackedSelection

PAYS_FROM: int | None = None  # a width of which whole steps have shown it


def pays(fc2: Int4Rows) -> bool:
    """Whether a sparse step is faster with fc1 and fc2 as two kernels than with `sparse_mlp`."""
    return PAYS_FROM is not None and int4_fc2.takes(fc2) and fc2.shape[-1] >= PAYS_FROM


def int4_fc1_list_reference(x, ln, weight, bias, rows, early=False, pdl=False) -> None:
    """Plain torch over a packed list, in fp64 where x is."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    n = x.half() if ln is None else layer_norm_reference(x, ln, torch.float16)
    h = (n.to(wide) @ weight.dequantised(wide).T + bias.to(wide)).relu()
    ids = rows.ids[: int(rows.count)].long()
    rows.values[: len(ids)] = h[0, ids]


@triton.jit
def _int4_fc1_kernel(
    x,
    norm_weight,
    norm_bias,
    weight,
    scales,
    bias,
    ids,
    count,
    values,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    c = tl.arange(0, BLOCK)
    first = tl.program_id(0) * 16
    step = tl.num_programs(0) * 16
    if not EARLY:
        wait_for_predecessor(PDL)
    number = tl.load(count, cache_modifier=".cg")
    tile = listed_rows(ids, first, number, c)
    w, s = first_rows(weight, scales, tile, c, D // 8, GROUP, ROWS, 0, ROOM)
    if EARLY:
        wait_for_predecessor(PDL)
    if NORM:
        n = normalised_units(x, norm_weight, norm_bias, c, D // 8, GROUP, EPS)
    else:
        n = given_units(x, c, D // 8, GROUP)
    for begin in range(first, number, step):
        coming = listed_rows(ids, begin + step, number, c)
        sums, w, s = int4_rows_step(w, s, n, weight, scales, tile, coming, c, D // 8, GROUP, ROWS)
        entry = begin + tl.arange(0, 16)
        row = tl.load(ids + entry, mask=entry < number, other=0, cache_modifier=".cg")
        sums += tl.load(bias + row).to(tl.float32)
        tl.store(values + entry, tl.where(sums <= 0, 0.0, sums), mask=entry < number)  # keeps a NaN
        tile = coming


def int4_fc1_list(
    x: Tensor,
    ln: LayerNormWeights | None,
    weight: Int4Rows,
    bias: Tensor,
    rows: PackedSelection,
    early: bool = False,
    pdl: bool = False,
    settings: Int4RowSettings | None = None,
) -> None:
    """Reads rows.ids and rows.count, writes rows.values below the count. See the module's docstring.

    early: the list was written before the launch before this one. Errors: shapes, dtypes, a CPU tensor.
    """
    check_device("x", x)
    n, d = weight.shape
    check_shape("x", x, 1, d)
    if ln is None:
        check_dtype("x", x, (torch.float16,))
    weight.check("weight", (n, d), x)
    check_shape("bias", bias, n)
    check_shape("rows.ids", rows.ids, n)
    check_shape("rows.values", rows.values, n)
    grid, words, scales, constants, warps = row_launch(weight, n, settings, x.device)
    del constants["FETCHED"]
    pdl = use_pdl(pdl, x.device)
    _int4_fc1_kernel[(grid,)](
        x,
        None if ln is None else ln.weight,
        None if ln is None else ln.bias,
        words,
        scales,
        bias,
        rows.ids,
        rows.count,
        rows.values,
        D=d,
        **constants,
        NORM=ln is not None,
        EARLY=early,
        EPS=1e-5 if ln is None else ln.eps,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
