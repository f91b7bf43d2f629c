"""A matrix of rows in 4 bits, and which rows of a model's matrices are what is read for a unit.

    weight[r, j] = code[r, j] * scale[r, j // group],   code in -8..7, scale fp16 of either sign, exact in fp32

Rows are units or parts of one, so that what is skipped takes its codes and its scales with it:

    matrix            stored by torch   rows here             a group is
    q, k, v           (d, d)            as stored             128 inputs; one map of all three alike
    up                (ffn, d)          as stored             128 inputs
    output projection (d, h * e)        (h * d, e)            a head's e inputs: row k d + i is output i of head k
    down              (d, ffn)          transposed, (ffn, d)  128 outputs of one neuron
    gate              (ffn, d)          as stored             128 inputs
    LM head           (V, d)            as stored             128 inputs

Eight codes are a word of 32 bits. Column 8 w + 2 i + s of a row lies in word w at bit 4 i + 16 s, as code + 8. Rows are
the type that kernels read, from the one module of theirs that needs no triton. An LM head may be `Int8Rows` instead,
codes from -127 to 127, one a byte.

Letters: n rows, d columns of a row, h heads, e head width, V tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dejavu_train.families import ModelDims
from dejavu_train.families.base import family_named
from dejavu_train.families.fused import FusedPart
from dejavu_train.families.plain import RowLinear
from dejavu_train.kernels.formats.int4 import Int4Rows as Int4Rows  # also for those who may import nothing of kernels
from dejavu_train.models.int4_sizes import RowSizes, row_sizes


@dataclass(frozen=True)
class RowLayout:
    """How a matrix (out, in) of torch lies as rows."""

    sizes: RowSizes
    to_rows: Callable[[Tensor], Tensor]
    from_rows: Callable[[Tensor], Tensor]


def row_layouts(kind: str, shape: ModelDims, name: str = "this model") -> dict[str, RowLayout]:
    """The layouts of a layer's matrices, by their names in the layer. Arguments and errors are of :func:`row_sizes`."""
    matrices = family_named(kind, name).matrices
    heads = partial(_by_head, shape.n_heads), partial(_from_heads, shape.n_heads)
    turned: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]
    turned = {matrices["out"]: heads, matrices["down"]: (_transposed, _transposed)}
    sizes = row_sizes(kind, shape, name)
    return {module: RowLayout(size, *turned.get(module, (_same, _same))) for module, size in sizes.items()}


def head_layout(sizes: RowSizes) -> RowLayout:
    """The layout of an LM head."""
    return RowLayout(sizes, _same, _same)


@dataclass(frozen=True)
class Int8Rows:
    """A matrix (n, d) in 8 bits: codes int8 and scales (n, groups) fp16. Multiplied as numbers: no kernel reads it."""

    words: Tensor
    scales: Tensor

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor) -> "Int8Rows":
        """Take codes (n, d) int8 and scales (n, groups), which must be fp16 numbers."""
        return cls(codes, scales.half())

    @property
    def codes(self) -> Tensor:
        return self.words

    def dense(self) -> Tensor:
        """(n, d) fp32, exactly code * scale."""
        groups = self.words.unflatten(1, (self.scales.shape[1], -1))
        return (groups * self.scales.float()[..., None]).flatten(1)


class CodedLinear(RowLinear):
    """An ``nn.Linear`` whose weight is held as rows of codes. Products are in fp32, whatever the input's dtype.

    ``weight`` is made of the rows at each use. On a CPU, where no kernel multiplies with 4 bits, it is kept from its
    first use on, until words or scales are changed. It is made anew where somebody writes into it, as transformers'
    first values of NanoChat do. A copy or pickle leaves it out. ``words`` and ``scales`` keep their dtypes through
    ``to``, ``half`` and the like.

    Args:
        layout: of the matrix, see :func:`row_layouts` and :func:`head_layout`.
        in_features, out_features: as of ``nn.Linear``.
        bias: whether there is one, (out_features,).
    """

    words: Tensor
    scales: Tensor

    def __init__(self, layout: RowLayout, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.layout, self.in_features, self.out_features = layout, in_features, out_features
        stored = layout.sizes.stored
        words = torch.int32 if layout.sizes.bits == 4 else torch.int8
        self.register_buffer("words", torch.zeros(stored["weight"], dtype=words))
        self.register_buffer("scales", torch.zeros(stored["scales"], dtype=torch.float16))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=torch.float32), requires_grad=False) if bias else None
        self._kept: tuple[Any, Tensor] | None = None  # states of words, scales and weight; the weight

    @property
    def rows(self) -> Int4Rows | Int8Rows:
        kind = Int4Rows if self.layout.sizes.bits == 4 else Int8Rows
        return kind(self.words.flatten(0, -2), self.scales.flatten(0, -2))

    def hold(self, words: Tensor, scales: Tensor) -> None:
        """Keep the same rows where they lie elsewhere, (h, e, d / 8) of a tensor that holds more than these."""
        self.words, self.scales = words, scales

    @property
    def weight(self) -> Tensor:
        """(out_features, in_features) fp32, exactly code * scale."""
        if self._kept is not None and self._kept[0] == _states(self.words, self.scales, self._kept[1]):
            return self._kept[1]
        made = self.layout.from_rows(self.rows.dense())
        if self.words.device.type == "cpu":
            self._kept = _states(self.words, self.scales, made), made
        return made

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features), in the dtype of x."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight, bias).to(x.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}

    def _apply(self, fn: Any, recurse: bool = True) -> "CodedLinear":
        scales, self._kept = self.scales, None
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("words", "scales"):
            destination[prefix + name] = destination[prefix + name].flatten(0, -2)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """As it is saved: rows that lie head by head in a GPU's engine take those that lie one behind the other."""
        for name, own in (("words", self.words), ("scales", self.scales)):
            given = state_dict.get(prefix + name)
            if given is not None and given.shape == own.flatten(0, -2).shape:
                state_dict[prefix + name] = given.view_as(own)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {self.layout.sizes.bits} bits, group={self.layout.sizes.group}"


def _states(*tensors: Tensor) -> list[tuple[int, int | None]]:
    """Versions that change where tensors are written into or others take their places."""
    return [(each.data_ptr(), None if each.is_inference() else each._version) for each in tensors]


def coded_rows(linear: Any) -> Int4Rows | Int8Rows:
    """The rows of a `CodedLinear`, or of one of q, k and v of one map. Those of one map are a copy."""
    if not isinstance(linear, FusedPart):
        rows: Int4Rows | Int8Rows = linear.rows
        return rows
    rows = linear.fused.rows
    return type(rows)(*(linear.part_of(each).flatten(0, 1) for each in (rows.words, rows.scales)))


def _by_head(heads: int, weight: Tensor) -> Tensor:
    """(d, h e) -> (h d, e)."""
    return weight.unflatten(1, (heads, -1)).transpose(0, 1).flatten(0, 1)


def _from_heads(heads: int, rows: Tensor) -> Tensor:
    # (h e, d) contiguous, whose transpose is the matrix: a head's part is then one range of memory.
    return rows.unflatten(0, (heads, -1)).transpose(1, 2).reshape(heads * rows.shape[1], -1).T


def _same(matrix: Tensor) -> Tensor:
    return matrix


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.T
