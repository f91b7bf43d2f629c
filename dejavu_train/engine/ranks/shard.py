"""Share of a model on one of several GPUs: its units of every layer with their predictors, and rows of the LM head.

| held | of the whole model | of a rank |
| --- | --- | --- |
| q, k, v | (g, r + 2, head_dim, d) | its groups of heads |
| output projection | (d, h * head_dim), in 4 bits (h, d, head_dim) | the columns of its heads |
| up, gate, down | (ffn, d), or down (d, ffn) | its neurons |
| a predictor's second matrix, bias, means of heads | (n, ...) | rows of its units |
| a predictor's first matrix | (rank, d) | all |
| biases of the output projection and of down | (d) | all on the first rank, zeros on others |
| LM head | (V, d) | its rows |
| embedding, positions, norms | | all |

So a rank is a model of fewer heads and neurons, whose `dims` say so, and every kernel runs it as it is.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu_train.engine.predictors import TargetPredictor
from dejavu_train.engine.weights import DecodeWeights, LayerWeights
from dejavu_train.families import ModelDims, Target, UnitKey
from dejavu_train.kernels.common.positions import Alibi
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear, Matrix, Rows


@dataclass(frozen=True)
class Shard:
    """The units of one rank.

    Attributes:
        rank, world: its number among so many ranks. whole: the model's sizes.
        units: by layer and target the ids of its units, (n / world,) int64 on the CPU, ascending.
    """

    rank: int
    world: int
    whole: ModelDims
    units: Mapping[UnitKey, Tensor]

    @property
    def first(self) -> bool:
        """Whether this rank adds what counts once: the residual stream and biases."""
        return self.rank == 0

    @property
    def dims(self) -> ModelDims:
        """The sizes of what this rank holds. Vocabulary and positions are the whole model's."""
        whole, world = self.whole, self.world
        return dataclasses.replace(
            whole, n_heads=whole.n_heads // world, n_kv_heads=whole.n_kv_heads // world, d_ffn=whole.d_ffn // world,
            head_dim=whole.head_dim,
        )  # fmt: skip

    @property
    def head_rows(self) -> slice:
        """Rows of the LM head. Ranks may differ by one."""
        bounds = [self.whole.vocab_size * rank // self.world for rank in (self.rank, self.rank + 1)]
        return slice(*bounds)

    def ids(self, layer: int, target: Target) -> Tensor:
        return self.units[UnitKey(layer, target)]

    def rows_of_units(self, layer: int, target: Target, rows: int) -> Tensor:
        """Ids of the rows of a matrix in which a unit has `rows` rows, one behind the other."""
        ids = self.ids(layer, target)
        return (ids[:, None] * rows + torch.arange(rows)).flatten()

    def weights(self, whole: DecodeWeights) -> DecodeWeights:
        """This rank's part of a whole model's weights, copied. Embedding, positions and norms are shared."""
        layers = [self.layer(layer, number) for number, layer in enumerate(whole.layers)]
        return self.with_head(dataclasses.replace(whole, shape=self.dims, layers=layers, drafts={}))

    def with_head(self, weights: DecodeWeights) -> DecodeWeights:
        """Weights whose layers are this rank's already, with its rows of the LM head and its heads' slopes of ALiBi."""
        head, rows = weights.lm_head, self.head_rows
        lm_head: Matrix
        if head.format is Format.INT4:
            lm_head = Int4Rows(head.words[rows], head.scales[rows])
        else:
            lm_head = Rows(head.numbers[rows])
        placed = weights.placed
        if isinstance(placed, Alibi):
            heads = self.rows_of_units(0, Target.HEADS, self.whole.kv_group)
            placed = dataclasses.replace(placed, slopes=placed.slopes[heads.to(placed.slopes.device)])
        return dataclasses.replace(weights, lm_head=lm_head, placed=placed)

    def layer(self, whole: LayerWeights, number: int) -> LayerWeights:
        """This rank's part of a layer, copied."""
        groups, neurons = self.ids(number, Target.HEADS), self.ids(number, Target.MLP)
        heads = self.rows_of_units(number, Target.HEADS, self.whole.kv_group)
        if whole.out.weight.format is Format.INT4:
            out: Matrix = _rows(whole.out.weight, heads)
        else:
            columns = self.rows_of_units(number, Target.HEADS, self.whole.group_dim)
            out = Rows(_taken(whole.out.weight.numbers, columns, 1))
        if whole.packed or whole.down_transposed:
            down = _rows(whole.down.weight, neurons)
        else:
            (stored,) = whole.down.weight.parts()
            down = Rows(_taken(stored, neurons, 1))
        return dataclasses.replace(
            whole,
            qkv=_linear(whole.qkv, groups),
            out=Linear(out, self.once(whole.out.bias)),
            up=_linear(whole.up, neurons),
            gate=None if whole.gate is None else _linear(whole.gate, neurons),
            down=Linear(down, self.once(whole.down.bias)),
        )

    def once(self, bias: Tensor) -> Tensor:
        """A bias of a sum over all ranks: it counts on the first alone."""
        return bias if self.first else torch.zeros_like(bias)

    def predictor(self, whole: TargetPredictor) -> TargetPredictor:
        """This rank's units of a predictor. What it selects of them is what the whole one selects of them.

        One of its units alone stays as it is.
        """
        if len(whole.bias) == self.dims.units(whole.target):
            return whole
        ids, weights = self.ids(whole.layer, whole.target), whole.weights

        def own(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else _taken(tensor, ids)

        made = weights
        if len(weights.up) == len(whole.bias):  # one matrix may stand alone
            made = dataclasses.replace(
                weights, up=_taken(weights.up, ids), bias=own(weights.bias), up_scale=own(weights.up_scale)
            )
        return dataclasses.replace(
            whole, weights=made, folded=own(whole.folded), bias=_taken(whole.bias, ids), mean=own(whole.mean),
            frequency=None if whole.frequency is None else whole.frequency[ids],
        )  # fmt: skip


def _taken(tensor: Tensor, ids: Tensor, dim: int = 0) -> Tensor:
    return tensor.index_select(dim, ids.to(tensor.device))


def _rows(matrix: Matrix, ids: Tensor) -> Matrix:
    """Rows of a matrix."""
    parts = [_taken(part, ids) for part in matrix.parts()]
    return Int4Rows(*parts) if matrix.format is Format.INT4 else Rows(*parts)


def _linear(linear: Linear, ids: Tensor) -> Linear:
    return Linear(_rows(linear.weight, ids), _taken(linear.bias, ids))
