"""Reads a model, writes the tensors as the decode engine reads them: one layout for dense and sparse.

- up, gate: as stored (ffn, d).
- down: transposed to (ffn, d) where the MLP is sparse, so that a neuron is a row of both. Where it is dense it is as
  stored (d, ffn), so that every output row has one owner.
- q, k, v: grouped by head of K and V, (g, r + 2, head_dim, d), so that a head is one contiguous range. r heads of q
  share it. Where positions are rotary, the rows of q and k lie in pairs that turn together (`common.positions`).
- output projection: as stored (d, h * head_dim). A head's columns of a row are contiguous. Every output
  row has one owner.

Matrices of 4 bits are `Int4Rows`, code for code those of the model. q, k and v have the same order, down is transposed
always, the output projection lies head by head (h, d, head_dim).

A set of weights is never changed: every engine arranges a list of layers for itself, and what has the right layout
already is shared.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from dejavu_train.engine.planned import Formats, hidden_values
from dejavu_train.engine.runs import RUNS
from dejavu_train.families import BlockParts, ModelDims, Target, UnitKey, blocks_of, dims_of
from dejavu_train.families.dims import Norm, Positions, QkNorm
from dejavu_train.families.opt import POSITIONS_OFFSET
from dejavu_train.families.plain import plain_block
from dejavu_train.families.read import ReadNorm, check_read, read_ends, read_norm, read_turns
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind
from dejavu_train.kernels.common.positions import Alibi, Rotary, pair_order
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Hidden, Linear, Matrix, MlpWeights, Rows
from dejavu_train.kernels.stages.norm import HeadNorms
from dejavu_train.models.grouped import GroupedProjection
from dejavu_train.models.int4 import CodedLinear, coded_rows
from dejavu_train.models.int4_sizes import COLUMNS_PER_WORD, head_sizes, part_sizes

CODE_SIZE = 4.64  # root mean square of the codes -8..7


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

    positions: (P + 2, d), learned ones, or None. placed: what q/k/v and attention know of positions, or None.
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

    @classmethod
    def from_model(
        cls,
        model: Any,
        dtype: torch.dtype,
        device: torch.device | str,
        share: bool = False,
        transposed: Collection[int] = (),
        held: ModelDims | None = None,
    ) -> "DecodeWeights":
        """The weights of a Hugging Face model. Matrices of 4 bits keep their codes and scales.

        Args:
            model: of a registered family.
            share: use the model's own tensors instead of copies, so that nothing exists twice. The model stays as it is
                for whoever calls it. Its q, k and v projections become `GroupedProjection`s, and down of the
                `transposed` layers a transposed view. Needs the model's own dtype and device.
            transposed: layers whose down is laid out as rows of neurons from the start.
            held: the sizes of a model whose modules are those of one of several ranks. None = of its configuration.
        Raises:
            NotPlain: what the engine does not run (`engine.runs`), or a module that must be called.
        """
        dims, ends = check_read(model, RUNS), read_ends(model)
        dims = held or dims
        reader, blocks = _Reader(dims, dtype, device, share), blocks_of(model)
        placed = reader.positions(blocks[0])
        layers = [reader.layer(whole, number in transposed) for number, whole in enumerate(blocks)]
        last = None if ends.final_norm is None else reader.norm(ends.final_norm)
        layers, final_norm = _norms_placed(layers, last)
        into, out = ends.project_in, ends.project_out
        embedding = reader.own(ends.tokens if into is None else ends.tokens.float() @ into.weight.float().T)
        lm_head: Matrix = Rows(embedding)
        if out is not None:
            lm_head = Rows(reader.own(ends.head.weight.float() @ out.weight.float()))
        elif isinstance(ends.head, CodedLinear):
            lm_head = reader.rows(ends.head, dims.vocab_size)
        elif ends.head.weight.data_ptr() != ends.tokens.data_ptr():
            lm_head = Rows(reader.own(ends.head.weight))
        return cls(
            shape=dims,
            embedding=embedding,
            positions=None if ends.positions is None else reader.own(ends.positions),
            layers=layers,
            final_norm=final_norm,
            lm_head=lm_head,
            placed=placed,
            embedding_norm=None if ends.embedding_norm is None else reader.norm(ends.embedding_norm),
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
        g, r = shape.n_kv_heads, shape.kv_group

        def normal(*sizes: int) -> Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device).normal_(0, std, generator=generator)

        def matrix(part: str, *sizes: int) -> Matrix:
            return words_of(part_sizes(shape)[part].group, *sizes) if packed else Rows(normal(*sizes))

        def words_of(group: int, *sizes: int) -> Int4Rows:
            *leading, columns = sizes
            groups = columns // group
            words = torch.empty(*leading, columns // COLUMNS_PER_WORD, dtype=torch.int32, device=device)
            words.random_(-(2**31), 2**31, generator=generator)
            signs = torch.empty(*leading, groups, dtype=torch.float16, device=device).random_(2, generator=generator)
            return Int4Rows(words, signs.mul_(2).sub_(1).mul_(std / CODE_SIZE))

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        def norm(columns: int = d) -> LayerNormWeights:
            rms = shape.norm in (Norm.RMS_NORM, Norm.RMS_NORM_PLAIN)
            one = torch.ones(columns, dtype=dtype, device=device)
            return LayerNormWeights(one, zeros(columns), kind=_KINDS[rms])

        layers = [
            LayerWeights(
                norm1=norm(),
                qkv=Linear(matrix("q", g, r + 2, hd, d), zeros(g, r + 2, hd)),
                out=Linear(matrix("out", h, d, hd) if packed else Rows(normal(d, h * hd)), zeros(d)),
                norm2=norm(),
                up=Linear(matrix("up", ffn, d), zeros(ffn)),
                down=Linear(matrix("down", ffn, d) if packed else Rows(normal(d, ffn)), zeros(d)),
                down_transposed=packed,
                gate=Linear(matrix("up", ffn, d), zeros(ffn)) if shape.gated else None,
                hidden=hidden_values(shape),
                head_norms=None if shape.qk_norm is QkNorm.NONE else HeadNorms(norm(hd), norm(hd)),
            )
            for _ in range(shape.n_layers)
        ]
        embedding = normal(shape.vocab_size, d)
        learned = shape.positions is Positions.LEARNED
        positions = normal(shape.max_positions + POSITIONS_OFFSET, d) if learned else None
        head = head_sizes(shape, "int4") if packed_head else None
        lm_head: Matrix = Rows(embedding) if head is None else words_of(head.group, shape.vocab_size, d)
        placed = _placed(shape, usual_turns(shape) if shape.positions is Positions.ROTARY else None, device)
        behind = norm() if shape.embedding_norm else None
        layers, final_norm = _norms_placed(layers, None if shape.post_norm else norm())
        return cls(shape, embedding, positions, layers, final_norm, lm_head, placed, behind)

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


def _norms_placed(
    layers: list[LayerWeights], final: LayerNormWeights | None
) -> tuple[list[LayerWeights], LayerNormWeights]:
    """Layers and the final norm. Without one their norms stand behind their halves, and the last is the final one."""
    if final is not None:
        return layers, final
    bias = layers[-1].out.bias
    same = LayerNormWeights.identity(len(bias), bias.device)
    behind = [(layer.norm1, None if layer is layers[-1] else layer.norm2) for layer in layers]
    pairs = zip(layers, behind, strict=True)
    moved = [dataclasses.replace(layer, norm1=same, norm2=same, behind=both) for layer, both in pairs]
    return moved, layers[-1].norm2


_KINDS = {False: NormKind.LAYER_NORM, True: NormKind.RMS_NORM}  # by whether the mean counts as zero


class _Reader:
    """Writes what it reads of a model as the engine's tensors. See `DecodeWeights.from_model` for `share`."""

    def __init__(self, dims: ModelDims, dtype: torch.dtype, device: torch.device | str, share: bool) -> None:
        self.dims, self.dtype, self.device, self.share = dims, dtype, device, share
        turned = 2 * (int(dims.head_dim * dims.rotary_share) // 2)
        turns = dims.positions is Positions.ROTARY
        self.order = pair_order(dims.head_dim, turned).to(device) if turns else None  # of the rows of q and k

    def own(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(device=self.device, dtype=self.dtype, copy=not self.share).contiguous()

    def matrix(self, linear: Any, turned: bool = False) -> Rows:
        """The weight, or its transpose. Shared with the module where that is asked for."""
        stored = linear.weight.detach()
        tensor = self.own(stored.T if turned else stored)
        if self.share:
            linear.weight.data = tensor.T if turned else tensor
        return Rows(tensor)

    def rows(self, linear: Any, *leading: int) -> Int4Rows:
        rows = coded_rows(linear)
        assert isinstance(rows, Int4Rows)
        words, scales = (
            tensor.to(self.device, copy=not self.share).view(*leading, -1) for tensor in (rows.words, rows.scales)
        )
        return Int4Rows(words, scales)

    def norm(self, norm: ReadNorm, columns: int = 0, order: Tensor | None = None) -> LayerNormWeights:
        """Of as many columns as the model's width, or of so many in this order. One and zero where it has none."""
        one, zero = (
            torch.full((columns or self.dims.d_model,), value, dtype=self.dtype, device=self.device)
            for value in (1.0, 0.0)
        )
        weight = one if norm.weight is None else self.own(norm.weight)
        shift = zero if norm.bias is None else self.own(norm.bias)
        if order is not None:
            weight, shift = weight[order], shift[order]
        return LayerNormWeights(weight, shift, norm.eps, _KINDS[norm.rms])

    def bias(self, linear: Any) -> Tensor:
        if linear.bias is None:
            return torch.zeros(linear.out_features, dtype=self.dtype, device=self.device)
        return self.own(linear.bias)

    def positions(self, block: BlockParts) -> Rotary | Alibi | None:
        return _placed(self.dims, read_turns(block, self.dims, self.dims.max_positions), self.device)

    def layer(self, whole: BlockParts, turned: bool) -> LayerWeights:
        """turned: down as rows of neurons, as 4-bit rows are always."""
        dims, block = self.dims, plain_block(whole)
        packed = isinstance(block.up, CodedLinear)
        matrices: dict[str, Matrix]
        if packed:
            matrices = {
                "qkv": self._coded_qkv(block),
                "out": self.rows(block.out, dims.n_heads, dims.d_model),
                "up": self.rows(block.up, dims.d_ffn),
                "down": self.rows(block.down, dims.d_ffn),
            }
        else:
            matrices = {
                "qkv": self._qkv(whole, block),
                "out": self.matrix(block.out),
                "up": self.matrix(block.up),
                "down": self.matrix(block.down, turned),
            }
        gate = None
        if block.gate is not None:
            rows: Matrix = self.rows(block.gate, dims.d_ffn) if packed else self.matrix(block.gate)
            gate = Linear(rows, self.bias(block.gate))
        biases = self._by_group([self.bias(part)[:, None] for part in (block.q, block.k, block.v)])
        return LayerWeights(
            norm1=self.norm(read_norm("norm_attn", block.norm_attn, dims.norm)),
            qkv=Linear(matrices["qkv"], biases[..., 0].contiguous()),
            out=Linear(matrices["out"], self.bias(block.out)),
            norm2=self.norm(read_norm("norm_mlp", block.norm_mlp, dims.norm)),
            up=Linear(matrices["up"], self.bias(block.up)),
            down=Linear(matrices["down"], self.bias(block.down)),
            down_transposed=packed or turned,
            gate=gate,
            hidden=hidden_values(dims),
            head_norms=self._head_norms(block),
        )

    def _head_norms(self, block: BlockParts) -> HeadNorms | None:
        if block.norm_q is None:
            return None
        both = [read_norm("a norm of heads", norm, self.dims.norm) for norm in (block.norm_q, block.norm_k)]
        return HeadNorms(*(self.norm(norm, self.dims.head_dim, self.order) for norm in both))

    def _by_group(self, parts: Sequence[Tensor]) -> Tensor:
        """q, k and v, (heads * head_dim, .) each, as (g, r + 2, head_dim, .), rows of q and k in the order of pairs."""
        dims = self.dims
        each = [part.view(dims.n_kv_heads, -1, dims.head_dim, part.shape[-1]) for part in parts]
        if self.order is not None:
            each[:2] = (part[:, :, self.order] for part in each[:2])
        return torch.cat(each, dim=1)

    def _qkv(self, whole: BlockParts, block: BlockParts) -> Rows:
        dims, parts = self.dims, (block.q, block.k, block.v)
        fused = getattr(block.q, "fused", None)
        if fused is not None and self.order is None:  # its rows lie so already
            return Rows(self.matrix(fused).numbers.view(dims.n_heads, 3, dims.head_dim, -1))
        numbers = self._by_group([self.own(part.weight) for part in parts])
        if self.share and fused is None:
            ends = (0, dims.kv_group, dims.kv_group + 1, dims.kv_group + 2)
            for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
                # What an adapter or a parametrisation makes is the engine's alone: the module stays.
                if getattr(whole.attention, name) is parts[i] and not is_parametrized(parts[i]):
                    view, order = numbers[:, ends[i] : ends[i + 1]], None if i == 2 else self.order
                    setattr(whole.attention, name, GroupedProjection(view, parts[i].bias, order))
        return Rows(numbers)

    def _coded_qkv(self, block: BlockParts) -> Int4Rows:
        dims, parts, fused = self.dims, (block.q, block.k, block.v), getattr(block.q, "fused", None)
        if fused is not None and self.order is None:  # its rows lie so already
            return self.rows(fused, dims.n_heads, 3, dims.head_dim)
        each = [self.rows(part, part.out_features) for part in parts]
        qkv = Int4Rows(*(self._by_group([getattr(rows, name) for rows in each]) for name in ("words", "scales")))
        if self.share and self.order is None and dims.kv_group == 1 and fused is None:
            for i, part in enumerate(parts):
                part.hold(qkv.words[:, i], qkv.scales[:, i])
        return qkv


def _placed(dims: ModelDims, turns: Tensor | None, device: torch.device | str) -> Rotary | Alibi | None:
    """What q/k/v and attention know of positions. turns: cosines and sines (T, 2, r / 2) of rotary ones."""
    if dims.positions is Positions.ALIBI:
        return Alibi.of(dims.n_heads, device)
    if turns is None:
        return None
    cos, sin = torch.cat([turns, turns], -1).to(device).unbind(1)
    return Rotary.of(cos, sin, dims.head_dim, later=dims.qk_norm is not QkNorm.NONE)


def usual_turns(dims: ModelDims) -> Tensor:
    """Cosines and sines (P, 2, r / 2) of a model with the base 10,000: for random weights."""
    half = int(dims.head_dim * dims.rotary_share) // 2
    angles = torch.arange(dims.max_positions)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def engine_dtype(model: Any, ops: str) -> torch.dtype:
    """Of an engine's weights and caches: the model's. Of 4-bit matrices float16, which their kernels multiply with."""
    packed = any(isinstance(module, CodedLinear) for module in model.modules())
    return torch.float16 if packed and ops == "triton" else model.dtype


def formats_of(model: Any, dtype: torch.dtype) -> Formats:
    """How the weights of a Hugging Face model lie in an engine of this dtype."""
    head, dims = model.get_output_embeddings(), dims_of(model.config)
    coded = [m for m in model.modules() if isinstance(m, CodedLinear) and m is not head]
    as_stored = dims.embedding_dim == dims.d_model  # else a map is multiplied into it
    bits = head.layout.sizes.bits if as_stored and isinstance(head, CodedLinear) else 0
    group = coded[-1].layout.sizes.group if coded else 0  # the last matrix of a layer is down
    return Formats(
        "int4" if coded else dtype_name(dtype), f"int{bits}" if bits else dtype_name(dtype), dtype_name(dtype), group
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
