"""Hidden values with any activation and gate, where up and down are kernels of their own.

They are those of all neurons, or of the neurons that several rows selected.

    y[b, i] = unit h[b, i], and zero where bit b of row_bits[i] is not set, if there are such bits

h is that of `stages.mlp`, unit that of `kept_unit`. Behind a gate these are two launches of one kernel (`stages.rows`).
The first stores the gate's values. The second multiplies them with up's products, in their place.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.activation import activation_of
from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_device, check_int4, check_rows, check_tensor
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.selection import PackedSelection
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import MlpWeights
from dejavu_train.kernels.stages.rows import launch_row, launch_tokens
from dejavu_train.kernels.stages.sink import LinearSink


def kept_unit(weights: MlpWeights, dtype: torch.dtype) -> float:
    """Factor of stored hidden values of this dtype. A square of 256 or more is no fp16 number, and down's products
    with 4-bit rows are of fp16."""
    narrow = dtype == torch.float16 or weights.down.weight.format is Format.INT4
    return 2.0**-6 if weights.hidden.activation == "relu2" and narrow else 1.0


def hidden_passes(weights: MlpWeights, y: Tensor, row_bits: Tensor | None = None) -> list[tuple[Any, LinearSink]]:
    """The matrices in their order, with what becomes of their products."""
    form, unit = weights.hidden, tl.constexpr(kept_unit(weights, y.dtype))
    threshold, function = tl.constexpr(form.threshold), activation_of(form.activation, form.threshold)
    made = []
    for linear in (weights.up,) if weights.gate is None else (weights.gate, weights.up):
        check_tensor("bias", linear.bias, (y.shape[1],), FLOAT_TYPES, y)
        second = bool(made)
        used = function if not second or form.both else activation_of("none")
        sink = LinearSink(y, linear.bias, None, used, threshold, row_bits, unit, tl.constexpr(second))
        made.append((linear.weight, sink))
    return made


def hidden_row(x: Tensor, ln: LayerNormWeights, weights: MlpWeights, out: Tensor, pdl: bool = False) -> None:
    """x (1, d) fp32 -> out (1, n) fp32 of all neurons. Errors: shapes, dtypes, groups, a CPU tensor."""
    check_device("x", x)
    n, d = weights.up.weight.shape
    check_tensor("x", x, (1, d), (torch.float32,), x)
    check_tensor("out", out, (1, n), (torch.float32,), x)
    for weight, sink in hidden_passes(weights, out):
        check_rows("weight", weight, (n, d), x)
        launch_row(x, ln, weight, sink, n, pdl)


def hidden_tokens(
    x: Tensor, weights: MlpWeights, listed: tuple[PackedSelection, Tensor] | None = None, pdl: bool = False
) -> Tensor:
    """x (B, d) fp16, B up to eight, 4-bit up and gate (n, d) -> (B, n) fp16.

    listed: the neurons with a bit set, in any order, and row_bits (n) int32. Ids may be old ones beyond the count.

    Errors: shapes, dtypes, a CPU tensor.
    """
    n = weights.up.weight.shape[0]
    ids = count = row_bits = None
    if listed is not None:
        ids, count, row_bits = listed[0].ids, listed[0].count, listed[1]
        for name, tensor, size in (("ids", ids, n), ("count", count, 1), ("row_bits", row_bits, n)):
            check_tensor(name, tensor, (size,), (torch.int32,), x)
    y = torch.empty(len(x), n, dtype=torch.float16, device=x.device)
    for weight, sink in hidden_passes(weights, y, row_bits):
        launch_tokens(x, check_int4("weight", weight, (n, x.shape[1]), x), sink, pdl, (ids, count))
    return y
