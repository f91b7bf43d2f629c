"""The tensors of a model as the decode engine reads them: one layout for dense and sparse.

- up, gate: as stored (ffn, d).
- down: transposed to (ffn, d) where neurons are left out, so that a neuron is a row of both. Where all are read it is
  as stored (d, ffn), so that every output row has one owner.
- q, k, v: grouped by head of K and V, (g, r + 2, head_dim, d), so that a head is one contiguous range. r heads of q
  share it. Where positions are rotary, the rows of q and k lie in pairs that turn together (`common.positions`).
- output projection: as stored (d, h * head_dim). A head's columns of a row are contiguous. Every output row has one
  owner.

Matrices of 4 bits are `Int4Rows`, code for code those of the model.  Down is transposed always, the output projection
lies head by head (h, d, head_dim).

A set of weights is never changed: every engine arranges a list of layers for itself, and what has the right layout
already is shared.
"""

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu_train.engine.planned import Formats
from dejavu_train.families import ModelDims
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.positions import Alibi, Rotary
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import Hidden, Linear, Matrix, MlpWeights, Rows
from dejavu_train.kernels.stages.norm import HeadNorms


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. See the module's docstring for the shapes.

    norm1, norm2: in front of attention and MLP. behind: norms of the residual stream behind each, or None.
    """

    norm1: LayerNormWeights
    qkv: Linear
    out: Linear
    norm2: LayerNormWeights
    up: Linear
    down: Linear
    down_transposed: bool = False
    gate: Linear | None = None
    hidden: Hidden = Hidden()
    head_norms: HeadNorms | None = None
    behind: tuple[LayerNormWeights | None, LayerNormWeights | None] = (None, None)

    @property
    def packed(self) -> bool:
        """Whether the matrices lie in 4 bits."""
        return self.up.weight.format is Format.INT4

    @property
    def mlp(self) -> MlpWeights:
        """up and down for kernels that run both, down as rows of neurons."""
        return MlpWeights(self.up, self.down, self.gate, self.hidden)

    def whole_out(self, dtype: torch.dtype) -> Tensor:
        """The output projection (d, h * head_dim) as numbers."""
        whole = self.out.weight.dense(dtype)
        return whole.transpose(0, 1).flatten(1) if self.packed else whole

    def arranged(self, transposed: bool) -> "LayerWeights":
        """This layer with down as rows of neurons, or as stored. Tensors that need no other layout are shared."""
        if self.packed or transposed == self.down_transposed:
            return self
        (stored,) = self.down.weight.parts()
        turned = Linear.of(stored.T.contiguous(), self.down.bias)
        return dataclasses.replace(self, down=turned, down_transposed=transposed)


@dataclass(frozen=True)
class DecodeWeights:
    """embedding (V, d), lm_head (V, d), which may be the embedding itself, or rows of 4 bits. Maps between the
    embedding's width and d are multiplied into both.

    positions: (P, d), learned ones, or None. placed: what q/k/v and attention know of positions, or None.
    embedding_norm: behind the embedding, or None.
    drafts: weights of lossless drafts beside these, by name. All engines with these weights share them.
    """

    shape: ModelDims
    embedding: Tensor
    positions: Tensor | None
    layers: list[LayerWeights]
    final_norm: LayerNormWeights
    lm_head: Matrix
    placed: Rotary | Alibi | None = None
    embedding_norm: LayerNormWeights | None = None
    drafts: "dict[str, DecodeWeights]" = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def arranged(self, turned: Collection[int], release: bool = False) -> "DecodeWeights":
        """The weights as an engine reads them. This object keeps its own layers.

        turned: layers whose down lies as rows of neurons (`StepPlan.turned`).
        release: this object gives its layers up, so that a model that fills the GPU never exists twice. Engines made
            from it before go on with their own.
        """
        given: list[LayerWeights | None] = list(self.layers)
        if release:
            self.layers.clear()
        layers = []
        for number, layer in enumerate(given):
            assert layer is not None
            layers.append(layer.arranged(number in turned))
            given[number] = layer = None
        return dataclasses.replace(self, layers=layers)

    @property
    def packed(self) -> bool:
        """Whether the layers' matrices lie in 4 bits."""
        return any(layer.packed for layer in self.layers)

    @property
    def formats(self) -> Formats:
        own = Rows(self.embedding)
        down = self.layers[0].down.weight if self.layers else own
        group = down.group if down.format is Format.INT4 else 0
        return Formats(down.format, self.lm_head.format, own.format, group)

    def tables(self) -> Iterator[Tensor]:
        """Tables of which a step reads a row: of tokens and of positions."""
        yield self.embedding
        if self.positions is not None:
            yield self.positions
        if isinstance(self.placed, Rotary):
            yield self.placed.table

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that a dense step reads, each once (the embedding as the LM head)."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.out, layer.gate, layer.up, layer.down):
                if linear is not None:
                    yield from linear.weight.parts()
        yield from self.lm_head.parts()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
