"""Reads a Hugging Face model, writes the tensors of `engine.weights`, shared with the model or copied."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from dejavu_train.engine.planned import Formats, hidden_values
from dejavu_train.engine.runs import RUNS
from dejavu_train.engine.weights import DecodeWeights, LayerWeights, dtype_name
from dejavu_train.families import BlockParts, ModelDims, blocks_of, dims_of
from dejavu_train.families.dims import Positions, QkNorm
from dejavu_train.families.plain import plain_block
from dejavu_train.families.read import ReadNorm, check_read, read_ends, read_norm, read_turns
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind
from dejavu_train.kernels.common.positions import Alibi, Rotary, pair_order
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear, Matrix, Rows
from dejavu_train.kernels.stages.norm import HeadNorms
from dejavu_train.models.grouped import GroupedProjection
from dejavu_train.models.int4 import CodedLinear, coded_rows

KINDS = {False: NormKind.LAYER_NORM, True: NormKind.RMS_NORM}  # by whether the mean counts as zero


def weights_of_model(
    model: Any,
    dtype: torch.dtype,
    device: torch.device | str,
    share: bool = False,
    transposed: Collection[int] = (),
    held: ModelDims | None = None,
) -> DecodeWeights:
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
    layers, final_norm = norms_placed(layers, last)
    into, out = ends.project_in, ends.project_out
    embedding = reader.own(ends.tokens if into is None else ends.tokens.float() @ into.weight.float().T)
    lm_head: Matrix = Rows(embedding)
    if out is not None:
        lm_head = Rows(reader.own(ends.head.weight.float() @ out.weight.float()))
    elif isinstance(ends.head, CodedLinear):
        lm_head = reader.rows(ends.head, dims.vocab_size)
    elif ends.head.weight.data_ptr() != ends.tokens.data_ptr():
        lm_head = Rows(reader.own(ends.head.weight))
    return DecodeWeights(
        shape=dims,
        embedding=embedding,
        positions=None if ends.positions is None else reader.own(ends.positions),
        layers=layers,
        final_norm=final_norm,
        lm_head=lm_head,
        placed=placed,
        embedding_norm=None if ends.embedding_norm is None else reader.norm(ends.embedding_norm),
    )


def norms_placed(
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


class _Reader:
    """Writes what it reads of a model as the engine's tensors. See `weights_of_model` for `share`."""

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
        """Norm of the model's width, or of so many columns in this order. One and zero where it has none."""
        one, zero = (
            torch.full((columns or self.dims.d_model,), value, dtype=self.dtype, device=self.device)
            for value in (1.0, 0.0)
        )
        weight = one if norm.weight is None else self.own(norm.weight)
        shift = zero if norm.bias is None else self.own(norm.bias)
        if order is not None:
            weight, shift = weight[order], shift[order]
        return LayerNormWeights(weight, shift, norm.eps, KINDS[norm.rms])

    def bias(self, linear: Any) -> Tensor:
        if linear.bias is None:
            return torch.zeros(linear.out_features, dtype=self.dtype, device=self.device)
        return self.own(linear.bias)

    def positions(self, block: BlockParts) -> Rotary | Alibi | None:
        return placed_by(self.dims, read_turns(block, self.dims, self.dims.max_positions), self.device)

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
        if self.dims.qk_norm is QkNorm.BEHIND and (turns := read_turns(block, self.dims, 1)) is not None:
            both = [dataclasses.replace(norm, eps=norm.eps / turn_factor(turns) ** 2) for norm in both]
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


def placed_by(dims: ModelDims, turns: Tensor | None, device: torch.device | str) -> Rotary | Alibi | None:
    """Positions, as q/k/v and attention know them. turns: cosines and sines (T, 2, r / 2) of rotary ones."""
    if dims.positions is Positions.ALIBI:
        return Alibi.of(dims.n_heads, device)
    if turns is None:
        return None
    if dims.qk_norm is QkNorm.BEHIND:  # the engine's norms stand before, where nothing undoes the factor
        turns = turns / turn_factor(turns)
    cos, sin = torch.cat([turns, turns], -1).to(device).unbind(1)
    return Rotary.of(cos, sin, dims.head_dim, later=dims.qk_norm is not QkNorm.NONE)


def turn_factor(turns: Tensor) -> float:
    """How much longer YaRN makes what it turns. turns: (T, 2, r / 2), of position 0 first, whose cosines are 1."""
    return float(turns[0, 0, 0])


def engine_dtype(model: Any, ops: str) -> torch.dtype:
    """Dtype of an engine's weights and caches: the model's. For 4-bit matrices float16, which kernels multiply with."""
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
