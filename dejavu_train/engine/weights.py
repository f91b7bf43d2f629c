"""Reads an OPT model, writes the tensors as the decode engine reads them: one layout for dense and sparse.

- up: as stored (ffn, d).
- down: transposed to (ffn, d) where the MLP is sparse, so that a neuron is a row of both. Where it is dense it is as
  stored (d, ffn), so that every output row has one owner.
- q, k, v: grouped by head (h, 3, head_dim, d), so that a head is one contiguous range.
- output projection: as stored (d, h * head_dim). A head's columns of a row are contiguous. Every output
  row has one owner.

Matrices of 4 bits are `Int4Rows`, code for code those of the model. q, k and v have the same order, down is transposed
always, the output projection lies head by head (h, d, head_dim).

A set of weights is never changed: every engine arranges a list of layers for itself, and what has the right layout
already is shared.
"""

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

from dejavu_train.engine import runs
from dejavu_train.engine.planned import Formats
from dejavu_train.families import ModelDims, Target, UnitKey, blocks_of
from dejavu_train.families.opt import DOWN, OUT, POSITIONS_OFFSET, QKV, UP
from dejavu_train.families.plain import plain_block, plain_linear, plain_table
from dejavu_train.families.read import check_read
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Hidden, Linear, Matrix, MlpWeights, Rows
from dejavu_train.models.grouped import GroupedProjection
from dejavu_train.models.int4 import CodedLinear
from dejavu_train.models.int4_sizes import COLUMNS_PER_WORD, head_sizes, row_sizes

CODE_SIZE = 4.64  # root mean square of the codes -8..7


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. See the module's docstring for the shapes."""

    norm1: LayerNormWeights
    qkv: Linear
    out: Linear
    norm2: LayerNormWeights
    up: Linear
    down: Linear
    down_transposed: bool = False
    gate: Linear | None = None
    hidden: Hidden = Hidden()

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
    """embedding (V, d), positions (P + 2, d), lm_head (V, d), which may be the embedding itself, or rows of 4 bits.

    drafts: weights of lossless drafts beside these, by name. All engines with these weights share them.
    """

    shape: ModelDims
    embedding: Tensor
    positions: Tensor
    layers: list[LayerWeights]
    final_norm: LayerNormWeights
    lm_head: Matrix
    drafts: "dict[str, DecodeWeights]" = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_model(
        cls,
        model: Any,
        dtype: torch.dtype,
        device: torch.device | str,
        share: bool = False,
        transposed: Collection[int] = (),
    ) -> "DecodeWeights":
        """The weights of a Hugging Face model. Matrices of 4 bits keep their codes and scales.

        Args:
            model: of a registered family.
            share: use the model's own tensors instead of copies, so that nothing exists twice. The model stays as it is
                for whoever calls it. Its q, k and v projections become `GroupedProjection`s, and down of the
                `transposed` layers a transposed view. Needs the model's own dtype and device.
            transposed: layers whose down is laid out as rows of neurons from the start.
        Raises:
            UserError: not a pre-norm ReLU OPT. Unsupported: an LM head in 8 bits.
        """
        shape = check_read(model, runs.GPU)
        decoder = model.model.decoder
        h, hd, d = shape.n_heads, shape.head_dim, shape.d_model

        def own(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device=device, dtype=dtype, copy=not share).contiguous()

        def matrix(linear: Any, turned: bool = False) -> Rows:
            """The weight, or its transpose. Shared with the module where that is asked for."""
            stored = linear.weight.detach()
            tensor = own(stored.T if turned else stored)
            if share:
                linear.weight.data = tensor.T if turned else tensor
            return Rows(tensor)

        def rows(linear: CodedLinear, *leading: int) -> Int4Rows:
            assert linear.layout.sizes.bits == 4
            words, scales = (
                tensor.to(device, copy=not share).view(*leading, -1)
                for tensor in (linear.rows.words, linear.rows.scales)
            )
            return Int4Rows(words, scales)

        def norm(module: Any) -> LayerNormWeights:
            # Without learned parameters (layer_norm_elementwise_affine false) they are one and zero.
            one, zero = (torch.full((d,), value, dtype=dtype, device=device) for value in (1.0, 0.0))
            weight, shift = (one if module.weight is None else own(module.weight), module.bias)
            return LayerNormWeights(weight, zero if shift is None else own(shift), module.eps)

        def bias(module: Any) -> Tensor:
            return (
                torch.zeros(module.out_features, dtype=dtype, device=device)
                if module.bias is None
                else own(module.bias)
            )

        layers = []
        for number, whole in enumerate(blocks_of(model)):
            attention, block = whole.attention, plain_block(whole)
            parts = (block.q, block.k, block.v)
            matrices: dict[str, Matrix]
            packed = isinstance(block.up, CodedLinear)
            if packed:
                each = [rows(part, h, hd) for part in parts]
                qkv = Int4Rows(*(torch.stack([getattr(r, name) for r in each], 1) for name in ("words", "scales")))
                if share:
                    for i, part in enumerate(parts):
                        part.hold(qkv.words[:, i], qkv.scales[:, i])
                matrices = {
                    "qkv": qkv,
                    "out": rows(block.out, h, d),
                    "up": rows(block.up, shape.d_ffn),
                    "down": rows(block.down, shape.d_ffn),
                }
                del each
            else:
                numbers = torch.stack([own(part.weight).view(h, hd, d) for part in parts], dim=1)
                if share:
                    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
                        # What an adapter or a parametrisation makes is the engine's alone: the module stays.
                        if getattr(attention, name) is parts[i] and not is_parametrized(parts[i]):
                            setattr(attention, name, GroupedProjection(numbers[:, i], parts[i].bias))
                matrices = {
                    "qkv": Rows(numbers),
                    "out": matrix(block.out),
                    "up": matrix(block.up),
                    "down": matrix(block.down, turned=number in transposed),
                }
            layers.append(
                LayerWeights(
                    norm1=norm(block.norm_attn),
                    qkv=Linear(matrices["qkv"], torch.stack([bias(part).view(h, hd) for part in parts], dim=1)),
                    out=Linear(matrices["out"], bias(block.out)),
                    norm2=norm(block.norm_mlp),
                    up=Linear(matrices["up"], bias(block.up)),
                    down=Linear(matrices["down"], bias(block.down)),
                    down_transposed=packed or number in transposed,
                )
            )
            del parts, block
        table = plain_table("embed_tokens", decoder.embed_tokens)
        embedding = own(table)
        head = plain_linear("lm_head", model.lm_head)
        lm_head: Matrix = Rows(embedding)
        if isinstance(head, CodedLinear):
            lm_head = rows(head, shape.vocab_size)
        elif head.weight.data_ptr() != table.data_ptr():
            lm_head = Rows(own(head.weight))
        return cls(
            shape=shape,
            embedding=embedding,
            positions=own(plain_table("embed_positions", decoder.embed_positions, OPTLearnedPositionalEmbedding)),
            layers=layers,
            final_norm=norm(decoder.final_layer_norm),
            lm_head=lm_head,
        )

    def arranged(self, predictors: Collection[UnitKey], release: bool = False) -> "DecodeWeights":
        """The weights as an engine with predictors of these reads them. This object keeps its own layers.

        release: this object gives its layers up, so that a model that fills the GPU never exists twice. Engines made
            from it before go on with their own.
        """
        given: list[LayerWeights | None] = list(self.layers)
        if release:
            self.layers.clear()
        layers = []
        for number, layer in enumerate(given):
            assert layer is not None
            layers.append(layer.arranged(UnitKey(number, Target.MLP) in predictors))
            given[number] = layer = None
        return dataclasses.replace(self, layers=layers)

    @classmethod
    def random(
        cls,
        shape: ModelDims,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int = 0,
        std: float = 0.02,
        packed: bool = False,
        packed_head: bool = False,
    ) -> "DecodeWeights":
        """Random weights of a true shape, made on the device: for benchmarks. Layers share nothing.

        packed: matrices of random words, with scales of either sign, that stand nowhere as numbers. packed_head: the LM
            head as well, which is the embedding otherwise.
        """
        generator = torch.Generator(device).manual_seed(seed)
        d, ffn, h, hd = shape.d_model, shape.d_ffn, shape.n_heads, shape.head_dim

        def normal(*sizes: int) -> Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device).normal_(0, std, generator=generator)

        def matrix(part: str, *sizes: int) -> Matrix:
            return words_of(row_sizes(shape)[part].group, *sizes) if packed else Rows(normal(*sizes))

        def words_of(group: int, *sizes: int) -> Int4Rows:
            *leading, columns = sizes
            groups = columns // group
            words = torch.empty(*leading, columns // COLUMNS_PER_WORD, dtype=torch.int32, device=device)
            words.random_(-(2**31), 2**31, generator=generator)
            signs = torch.empty(*leading, groups, dtype=torch.float16, device=device).random_(2, generator=generator)
            return Int4Rows(words, signs.mul_(2).sub_(1).mul_(std / CODE_SIZE))

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        def norm() -> LayerNormWeights:
            return LayerNormWeights(torch.ones(d, dtype=dtype, device=device), zeros(d))

        layers = [
            LayerWeights(
                norm1=norm(),
                qkv=Linear(matrix(QKV[0], h, 3, hd, d), zeros(h, 3, hd)),
                out=Linear(matrix(OUT, h, d, hd) if packed else Rows(normal(d, h * hd)), zeros(d)),
                norm2=norm(),
                up=Linear(matrix(UP, ffn, d), zeros(ffn)),
                down=Linear(matrix(DOWN, ffn, d) if packed else Rows(normal(d, ffn)), zeros(d)),
                down_transposed=packed,
            )
            for _ in range(shape.n_layers)
        ]
        embedding = normal(shape.vocab_size, d)
        positions = normal(shape.max_positions + POSITIONS_OFFSET, d)
        head = head_sizes(shape, "int4") if packed_head else None
        lm_head: Matrix = Rows(embedding) if head is None else words_of(head.group, shape.vocab_size, d)
        return cls(shape, embedding, positions, layers, norm(), lm_head)

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

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that a dense step reads, each once (the embedding as the LM head)."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.out, layer.up, layer.down):
                yield from linear.weight.parts()
        yield from self.lm_head.parts()


def engine_dtype(model: Any, ops: str) -> torch.dtype:
    """Of an engine's weights and caches: the model's. Of 4-bit matrices float16, which their kernels multiply with."""
    packed = any(isinstance(module, CodedLinear) for module in model.modules())
    return torch.float16 if packed and ops == "triton" else model.dtype


def formats_of(model: Any, dtype: torch.dtype) -> Formats:
    """How the weights of a Hugging Face model lie in an engine of this dtype."""
    coded = [m for m in model.modules() if isinstance(m, CodedLinear) and m is not model.lm_head]
    bits = model.lm_head.layout.sizes.bits if isinstance(model.lm_head, CodedLinear) else 0
    group = coded[-1].layout.sizes.group if coded else 0  # the last matrix of a layer is down
    return Formats(
        "int4" if coded else dtype_name(dtype), f"int{bits}" if bits else dtype_name(dtype), dtype_name(dtype), group
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
