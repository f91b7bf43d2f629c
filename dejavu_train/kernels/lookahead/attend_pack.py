"""Look-ahead, stage 3: attention and the packing of the neurons' list, in one grid.

Attention as in `flash_decode`, and programs that close the gaps of the list as `pack` does. One batch row.
"""

import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_shape
from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.launch import as_dependent
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.mlp.pack import PackedSelection, pack_launch, pack_ranges
from dejavu_train.kernels.stages.attend import AttentionScratch, attend, attention_launch

PACKED_ENTRIES = 512  # of the list, for a program that packs: attention's programs have few warps


@triton.jit(do_not_specialize=["n_ranges"])
def _attend_pack_kernel(
    q, kept, mean, out, scratch, capacity, scale, slopes, ids, counts, packed_ids, packed_count, n_ranges, n_packs,
    P: tl.constexpr, S: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < n_packs:
        pack_ranges(pid, ids, counts, packed_ids, packed_count, n_ranges, P, True, PDL)
    else:
        place = pid - n_packs
        split = place % S.SPLITS
        attend(place // S.SPLITS, split, q, kept, mean, out, scratch, capacity, scale, slopes, S, BIAS, PDL)


def attend_pack(
    step: HeadStep,
    out: Tensor,
    scratch: AttentionScratch,
    neurons: tuple[Selection, PackedSelection],
    pdl: bool = False,
    mean: Tensor | None = None,
) -> None:
    """Stage 3: `flash_decode`, and `pack` of `neurons`, the MLP's selection and its list. One batch row.

    Errors: shapes, head dims.
    """
    check_shape("q", step.q, 1, *step.q.shape[1:])
    arguments, sizes, constants, warps = attention_launch(step, out, scratch, mean)
    n_packs, pack_arguments, pack_sizes = pack_launch(*neurons, PACKED_ENTRIES)
    _attend_pack_kernel[(n_packs + sizes.GROUPS * sizes.UNITS * sizes.SPLITS,)](
        *arguments, *pack_arguments, n_packs, P=pack_sizes, num_warps=warps, **constants,
        **as_dependent(pdl, out.device),
    )  # fmt: skip
