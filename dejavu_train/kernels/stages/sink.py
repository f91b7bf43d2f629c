"""Sinks of products: kernels of rows are handed one of these, the functions with the tensors that they need.

`LinearSink`: y[b, i] = unit act(v[b, i] + bias[i] + residual[b, i]), each of which may be missing, and what else
`stages.hidden` wants. `QkvSink`: v + bias of head-major rows, as in `qkv`, goes to q, and to the caches at each row's
position.

A kernel calls `ahead` before the products, for what is loaded, and `put` behind them. lines: numbers of rows, b: of
batch rows, which broadcast to the values' shape. inside: a line is one of n_rows. stored: and b is there as well.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.activation import ACTIVATIONS
from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.positions import angles, turned, turned_reference


@triton.jit
def _linear_ahead(sink, lines, b, inside, stored, n_rows):
    found = ()
    if sink.bias is not None:
        found = found + (tl.load(sink.bias + lines, mask=inside, other=0.0),)
    if sink.residual is not None:
        found = found + (tl.load(sink.residual + b * n_rows + lines, mask=stored, other=0.0, cache_modifier=".cg"),)
    if sink.row_bits is not None:
        found = found + (tl.load(sink.row_bits + lines, mask=inside, other=0, cache_modifier=".cg"),)
    if sink.gated:
        found = found + (tl.load(sink.y + b * n_rows + lines, mask=stored, other=0.0),)
    return found


@triton.jit
def _put_linear(sink, values, ahead, lines, b, stored, n_rows):
    if sink.bias is not None:
        values += ahead[0].to(tl.float32)
        ahead = ahead[1:]
    if sink.residual is not None:
        values += ahead[0]
        ahead = ahead[1:]
    values = sink.activation(values, sink.threshold)
    if sink.gated:
        gate = ahead[len(ahead) - 1].to(tl.float32)
        values = tl.where(gate == 0, 0.0, gate * values)
    else:
        values *= sink.unit
    if sink.row_bits is not None:
        values = tl.where(((ahead[0] >> b) & 1) != 0, values, 0.0)
    tl.store(sink.y + b * n_rows + lines, values.to(sink.y.dtype.element_ty), mask=stored)


@triton.jit
def _qkv_ahead(sink, lines, b, inside, stored, n_rows):
    last = tl.load(sink.position + b)
    found = (tl.load(sink.bias + lines, mask=inside, other=0.0), last)
    if sink.table is not None:
        HEAD_DIM: tl.constexpr = sink.head_dim
        row = lines % ((sink.share + 2) * HEAD_DIM)
        turns = inside & (row < (sink.share + 1) * HEAD_DIM)  # not those of v
        found = found + angles(sink.table, row % HEAD_DIM, last, turns, HEAD_DIM)
    return found


@triton.jit
def _put_qkv(sink, values, ahead, lines, b, stored, n_rows):
    HEAD_DIM: tl.constexpr = sink.head_dim
    OF_Q: tl.constexpr = sink.share * sink.head_dim
    OF_HEAD: tl.constexpr = OF_Q + 2 * HEAD_DIM
    values += ahead[0].to(tl.float32)
    if sink.table is not None:
        values = turned(values, ahead[2:])
    row = lines % OF_HEAD
    head = b * (n_rows // OF_HEAD) + lines // OF_HEAD
    own = head
    if sink.one:
        own = lines // OF_HEAD
    slot = (own * sink.capacity + ahead[1]).to(tl.int64) * HEAD_DIM + row % HEAD_DIM
    tl.store(sink.q + head * OF_Q + row, values, mask=stored & (row < OF_Q))
    cache = tl.where(row < OF_Q + HEAD_DIM, sink.k_cache + slot, sink.v_cache + slot)
    tl.store(cache, values.to(sink.k_cache.dtype.element_ty), mask=stored & (row >= OF_Q))


class LinearSink(NamedTuple):
    """y, residual: (B, n). bias: (n). activation: of `ACTIVATIONS`, a ReLU with this threshold.

    row_bits (n): without its bit a batch row gets zero. gated: y holds the gate's values, which are times unit, and
    gets their products with these.
    """

    y: Tensor
    bias: Tensor | None
    residual: Tensor | None = None
    activation: Any = ACTIVATIONS["none"]
    threshold: Any = tl.constexpr(0.0)
    row_bits: Tensor | None = None
    unit: Any = tl.constexpr(1.0)
    gated: Any = tl.constexpr(False)
    together: Any = tl.constexpr(1)
    ahead: Any = _linear_ahead
    put: Any = _put_linear


class QkvSink(NamedTuple):
    """q: (B, h * share, head_dim). k_cache, v_cache: (B, h, capacity, head_dim). position: (B). table: of a rotation,
    or None. together: rows that are put at once, the two of a pair where there is a table. one: the caches are those of
    one sequence, and batch rows are positions of it."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    bias: Tensor
    position: Tensor
    capacity: int
    table: Tensor | None
    head_dim: Any
    share: Any
    together: Any
    one: Any
    ahead: Any = _qkv_ahead
    put: Any = _put_qkv

    @classmethod
    def of(cls, step: HeadStep, bias: Tensor) -> "QkvSink":
        q, cache = step.q, step.cache
        table = None if cache.turning is None else cache.turning.fitting(cache.k)
        one = len(cache.k) < len(q)
        constants = (q.shape[-1], q.shape[1] // cache.k.shape[1], 1 if table is None else 2, one)
        return cls(q, cache.k, cache.v, bias, step.position, cache.capacity, table, *map(tl.constexpr, constants))

    @property
    def n_rows(self) -> int:
        """Rows of the weight."""
        return self.bias.numel()


Sink = LinearSink | QkvSink


def qkv_sink_reference(products: Tensor, bias: Tensor, step: HeadStep) -> None:
    """Do what a `QkvSink` does with products (B, n), in plain torch. No host synchronisation."""
    q, cache, position = step.q, step.cache, step.position
    rows = (products.float() + bias.float().flatten()).view(len(q), *bias.shape)
    turns, at = rows[:, :, :-1], position.long()
    if cache.turning is not None:
        turns = turned_reference(turns, cache.turning, position[:, None, None].expand(turns.shape[:-1]))
    q.copy_(turns[:, :, :-1].reshape(q.shape))
    sequence = torch.arange(len(q), device=q.device) % len(cache.k)
    cache.k[sequence, :, at] = turns[:, :, -1].to(cache.k.dtype)
    cache.v[sequence, :, at] = rows[:, :, -1].to(cache.v.dtype)
