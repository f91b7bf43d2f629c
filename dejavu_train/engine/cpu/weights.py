"""Reads a model, writes the arrays of the CPU engine: every unit's weights as rows, in fp32, 8 bits or 4 bits.

Codes have a scale for each group of columns of a row. A row of down or of the output projection is a neuron's or a
head's output, not an output dimension. So what is selected has scales of its own.

A 4-bit model (``models.int4``) keeps its codes with their own scales: nothing of a layer is rounded again. With codes
of 4 bits, the embedding and the LM head have 8.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu_train.engine.cpu.arrays import MLP_DOWN, MLP_IN, MLP_UP, OUT, QKV, Model
from dejavu_train.engine.cpu.layout import DTYPES, SMALL, new_model, part_rows
from dejavu_train.engine.cpu.row_kernels import WIDEST_GROUP
from dejavu_train.engine.cpu_limits import CHUNK, HALF, WHOLE
from dejavu_train.engine.cpu_plan import check_stored, cpu_format, weight_bytes
from dejavu_train.engine.planned import Formats
from dejavu_train.engine.runs import RUNS
from dejavu_train.families import BlockParts, ModelDims, blocks_of, dims_of
from dejavu_train.families.block import alibi_slopes
from dejavu_train.families.dims import Positions
from dejavu_train.families.plain import NotPlain, plain_block
from dejavu_train.families.read import Ends, ReadNorm, check_read, read_ends, read_norm, read_turns
from dejavu_train.ground.errors import Unsupported, UserError
from dejavu_train.ground.machine import free_memory
from dejavu_train.models.int4 import CodedLinear, Int4Rows, Int8Rows, coded_rows
from dejavu_train.quantize.rounding import QUICK_RANGES, round_nearest

ROWS_AT_ONCE = 4096
NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
ROTARY_BASE = 10_000.0  # of random weights
SUMMED = 3e-5  # of the norms of x and a row: more than two orders of summing up a product in fp32 differ by


@dataclass(frozen=True)
class CpuWeights:
    """The weights of one model, never written again: several engines may share them.

    Attributes:
        shape: sizes of the model.
        model: the arrays, see ``arrays.Model``.
        out_bias: (L, d) fp32, biases of the output projections.
        note: what else is to be known about how they are stored, or nothing.
        copies: of `rounded`, by format.
    """

    shape: ModelDims
    model: Model
    out_bias: np.ndarray
    note: str = ""
    copies: dict[str, "CpuWeights"] = field(default_factory=dict, repr=False)

    @classmethod
    def from_model(
        cls,
        model: Any,
        stored: str | None = None,
        group: int | None = None,
        release: bool = False,
        wide: np.ndarray | None = None,
    ) -> "CpuWeights":
        """Copy the weights of a Hugging Face model on the CPU.

        Args:
            model: of any family, of any floating dtype.
            stored: one of `cpu_limits.STORED`: weights are rounded, unless they have this type. Those of a 4-bit model
                are its own codes, exact but for embeddings and LM head, unless the head is codes too. Norms, biases
                and positions are fp32. None = int4 for a 4-bit model, else the model's dtype.
            group: columns that share a scale, a multiple of CHUNK, of int4 HALF, up to WIDEST_GROUP. None = that
                multiple, or the model's own. Of codes alone.
            wide: (L, 5) bool, parts of layers that int4 keeps in 8 bits. None = none.
            release: give up the model's own tensors layer by layer, so that a large model never exists twice.
        Raises:
            UserError: a format that does not exist, or not for this model. Weights that are not finite, by layer.
        """
        shape = check_read(model, RUNS)
        blocks, ends = blocks_of(model), read_ends(model)
        stored, note = how_stored(model, stored)
        coded = stored == "int4" and isinstance(blocks[0].up, CodedLinear)
        own = blocks[0].up.layout.sizes.group if coded else group
        if group and own != group:
            raise UserError(f"the model's codes have groups of {own} columns, got group {group}; leave group out")
        norms = [_norm(norm, shape) for each in blocks for norm in (each.norm_attn, each.norm_mlp)]
        norms += [each or ReadNorm(None, None, norms[0].eps) for each in (ends.final_norm, ends.embedding_norm)]
        head_norms = [_norm(norm, shape) for each in blocks for norm in (each.norm_q, each.norm_k) if norm is not None]
        empty = new_model(
            shape, stored, own, tied=_tied(ends), eps=_one_eps(norms), head_eps=_one_eps(head_norms),
            final_norm=ends.final_norm is not None, coded=coded, wide=wide,
        )  # fmt: skip
        weights = cls(shape, empty, np.zeros((shape.n_layers, shape.d_model), np.float32), note)
        for place, norm in zip(empty.norms, norms, strict=True):
            _put_norm(place, norm)
        for place, norm in zip(empty.head_norms.reshape(-1, 2, shape.head_dim), head_norms, strict=False):
            _put_norm(place, norm)
        empty.head_norms[:, 0] *= shape.head_dim**-0.5
        if (turns := read_turns(blocks[0], shape, shape.max_positions)) is not None:
            empty.turns[:] = _array(turns)
        if blocks[0].slopes is not None:
            empty.slopes[:] = _array(blocks[0].slopes)
        weights.put_ends(ends)
        for i, whole in enumerate(blocks):
            weights.put_layer(i, plain_block(whole))
            if release:
                for tensor in (*whole.whole.parameters(), *whole.whole.buffers()):
                    tensor.data = torch.empty(0, dtype=tensor.dtype)
        return weights

    def put_ends(self, ends: Ends) -> None:
        """Store the tables. Maps between two widths are multiplied into them."""
        model = self.model
        self.check_finite(None, model.norms[-2:])
        if ends.positions is not None:
            model.positions[:] = _array(ends.positions)
        into, out = ends.project_in, ends.project_out
        self.put(model.embedding, ends.tokens if into is None else (ends.tokens.float() @ into.weight.float().T))
        if isinstance(ends.head, CodedLinear) and len(model.out_scale) and out is None:
            self.put_codes(model.lm_head, ends.head.rows)
        elif model.lm_head != model.embedding:
            head = ends.head.weight
            self.put(model.lm_head, head if out is None else head.float() @ out.weight.float())
        self.screen()

    def put_layer(self, number: int, block: BlockParts) -> None:
        """Store a decoder layer."""
        model, g = self.model, self.shape.n_kv_heads
        parts = (block.q, block.k, block.v)
        if len(model.out_scale):
            self.put_coded_layer(number, block)
        else:
            for part, weight in matrices(block, g).items():
                self.put(model.first[number, part], weight, number, bool(model.packed[number, part]))
        model.qkv_bias[number] = _by_unit([torch.from_numpy(_bias(part))[:, None] for part in parts], g)[:, 0]
        self.out_bias[number] = _bias(block.out)
        model.up_bias[number], model.down_bias[number] = _bias(block.up), _bias(block.down)
        if block.gate is not None:
            model.in_bias[number] = _bias(block.gate)
        biases = (model.qkv_bias, self.out_bias, model.up_bias, model.in_bias, model.down_bias)
        norms = model.norms[2 * number : 2 * number + 2], model.head_norms[number]
        self.check_finite(number, *(each[number] for each in biases), *norms)

    @staticmethod
    def needed(model: Any, stored: str | None = None) -> int:
        """Bytes, to within a tenth, that `from_model` takes in this format, None = the one it takes by itself."""
        tied = not isinstance(model.get_output_embeddings(), CodedLinear) and bool(model.config.tie_word_embeddings)
        return weight_bytes(dims_of(model.config), how_stored(model, stored)[0], tied)

    @classmethod
    def random(
        cls, shape: ModelDims, stored: str = "float32", group: int | None = None, seed: int = 0, std: float = 0.02
    ) -> "CpuWeights":
        """Random weights of a true shape, for benchmarks: normal, biases 0, layers share nothing."""
        empty = new_model(shape, stored, group, tied=True, eps=1e-5, head_eps=1e-5, final_norm=not shape.post_norm)
        weights = cls(shape, empty, np.zeros((shape.n_layers, shape.d_model), np.float32))
        generator = torch.Generator().manual_seed(seed)
        weights.model.norms[:, 0], weights.model.head_norms[..., 0, :] = 1, 1
        half = weights.model.turns.shape[2]
        angles = np.outer(np.arange(len(weights.model.turns)), ROTARY_BASE ** -(np.arange(half) / max(1, half)))
        weights.model.turns[:] = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        if shape.positions is Positions.ALIBI:
            weights.model.slopes[:] = alibi_slopes(shape.n_heads).numpy()
        for packed, rows in enumerate((weights.model.rows, weights.model.pairs)):
            for start in range(0, len(rows), ROWS_AT_ONCE):
                part = torch.empty(min(ROWS_AT_ONCE, len(rows) - start), shape.d_model, dtype=torch.float32)
                weights.put(start, part.normal_(0, std, generator=generator), None, bool(packed))
        weights.screen()
        weights.model.positions[:] = (
            torch.empty(weights.model.positions.shape, dtype=torch.float32).normal_(0, std, generator=generator).numpy()
        )
        return weights

    def rounded(self, stored: str) -> "CpuWeights":
        """These weights in int8 or int4, for drafts, made once. What is no matrix is shared.

        Raises:
            UserError: weights that are codes.
        """
        if stored in self.copies:
            return self.copies[stored]
        if self.model.rows.dtype == np.int8:
            raise UserError(
                f"draft_weights={stored} is for weights that are no codes, and these are {self.describe()} already;"
                " leave it out"
            )
        tied = self.model.lm_head == self.model.embedding
        check_memory(weight_bytes(self.shape, stored, tied), f"weights of the draft in {stored}")
        numbers = {name: getattr(self.model, name) for name in ("eps", "head_eps", "final_norm")}
        copy = replace(self, model=new_model(self.shape, stored, None, tied=tied, **numbers), note="", copies={})
        for name in SMALL:
            getattr(copy.model, name)[:] = getattr(self.model, name)
        for layer in range(self.shape.n_layers):
            for part in np.flatnonzero(part_rows(self.shape)).tolist():
                packed = bool(copy.model.packed[layer, part])
                copy.put(copy.model.first[layer, part], self.part(layer, part), layer, packed)
        for own, start in ((self.model.embedding, copy.model.embedding), (self.model.lm_head, copy.model.lm_head)):
            copy.put(start, self.rows(own, self.shape.vocab_size))
        self.copies[stored] = copy
        return copy

    @property
    def operand(self) -> type:
        """Type that rows are multiplied with: fp32, or int16 levels."""
        return np.int16 if self.model.rows.dtype == np.int8 else np.float32

    @property
    def cached(self) -> type:
        """Type of K and V: fp16 as uint16 beside rows of codes, else fp32."""
        return np.uint16 if self.model.rows.dtype == np.int8 else np.float32

    @property
    def half(self) -> torch.dtype | None:
        """The dtype of rows of 16 bits, None of other ones."""
        return {np.dtype(np.uint16): torch.float16, np.dtype(np.uint32): torch.bfloat16}.get(self.model.rows.dtype)

    def put(self, first: int, weight: Tensor, layer: int | None = None, packed: bool = False) -> None:
        """Store weight (n, d) as the rows from number ``first`` on. layer: that they belong to, for messages."""
        for start in range(0, len(weight), ROWS_AT_ONCE):
            part = weight[start : start + ROWS_AT_ONCE].detach().to("cpu", torch.float32)
            self.check_finite(layer, part)
            rows, d = slice(int(first) + start, int(first) + start + len(part)), self.shape.d_model
            if packed:
                whole = torch.nn.functional.pad(part, (0, -d % self.model.pair_group))
                codes, scales = round_nearest(whole, self.model.pair_group, QUICK_RANGES)
                self._put_pairs(rows, codes[:, :d], scales)
                continue
            stored = self.model.rows if self.half is None else self.model.rows.view(np.int16)
            stored[rows, d:] = 0
            if self.half is not None:
                self.check_finite(layer, halves := part.to(self.half))
                stored[rows, :d] = halves.view(torch.int16).numpy()
            elif self.model.rows.dtype == np.float32:
                stored[rows, :d] = part.numpy()
            else:
                codes, scales = quantise_groups(part, self.model.group)
                stored[rows, :d], self.model.scales[rows] = codes.numpy(), scales.numpy()

    def put_codes(self, first: int, rows: Int4Rows | Int8Rows, layer: int | None = None) -> None:
        """Store codes and scales of rows (n, d) as they are, from number ``first`` on, those of a layer packed."""
        codes = rows.codes
        place, d = slice(int(first), int(first) + len(codes)), self.shape.d_model
        self.check_finite(layer, rows.scales)
        if layer is not None:
            self._put_pairs(place, codes, rows.scales)
            return
        scales = rows.scales.float().repeat_interleave(self.model.scales.shape[1] // rows.scales.shape[1], dim=1)
        self.model.rows[place, d:] = 0
        self.model.rows[place, :d], self.model.scales[place] = codes.numpy(), scales.numpy()

    def _put_pairs(self, place: slice, codes: Tensor, scales: Tensor) -> None:
        """Store codes (n, d) in -8..7 and their fp16 scales as packed rows."""
        self.model.pairs[place] = pack_pairs(codes).numpy()
        held = scales.to(torch.float16).view(torch.int16).numpy().view(np.uint16)
        self.model.pair_scales[place] = 0
        self.model.pair_scales[place, : held.shape[1]] = held
        self.model.pair_most[place] = np.abs(self.model.pair_scales[place].view(np.float16)).max(axis=1)

    def put_coded_layer(self, number: int, block: BlockParts) -> None:
        """Store a decoder layer of `CodedLinear`. The output projection is turned: a row is a column of a head."""
        h, g, d, e = self.shape.n_heads, self.shape.n_kv_heads, self.shape.d_model, self.shape.head_dim
        first, parts = self.model.first[number], [coded_rows(part) for part in (block.q, block.k, block.v)]
        words, scales = (_by_unit([getattr(part, name) for part in parts], g) for name in ("words", "scales"))
        self.put_codes(first[QKV], Int4Rows(words, scales), number)
        if block.gate is not None:
            self.put_codes(first[MLP_IN], block.gate.rows, number)
        self.put_codes(first[MLP_UP], block.up.rows, number)
        self.put_codes(first[MLP_DOWN], block.down.rows, number)
        out = block.out.rows
        self.check_finite(number, out.scales)
        turned = out.codes.view(h, d, e).transpose(1, 2).reshape(h * e, d)
        one = torch.ones(h * e, self.model.pair_scales.shape[1], dtype=torch.float16)
        self._put_pairs(slice(int(first[OUT]), int(first[OUT]) + h * e), turned, one)
        self.model.out_scale[number, :, :d] = out.scales.float().view(h, d).numpy()

    def check_finite(self, layer: int | None, *parts: Tensor | np.ndarray) -> None:
        """Raise :class:`UserError` where weights of a layer, or of none, are not finite.

        Positions are not looked at: a table may hold anything where no text reaches.
        """
        for part in parts:
            least, most = torch.as_tensor(part).aminmax()  # both NaN where anything is
            if not math.isfinite(float(least)) or not math.isfinite(float(most)):
                where = "the embedding, the final LayerNorm or the LM head" if layer is None else f"layer {layer}"
                raise UserError(f"{where} has weights that are not finite; load the model again, or from another copy")

    def screen(self) -> None:
        """Round the LM head to int8 beside rows that are no codes, with bounds of what a logit of it is off by."""
        model, d = self.model, self.shape.d_model
        for start in range(0, len(model.screen) if self.formats.layers in WHOLE else 0, ROWS_AT_ONCE):
            part = self.rows(model.lm_head + start, min(ROWS_AT_ONCE, model.vocab - start))
            codes, scales = quantise_groups(part, WIDEST_GROUP)
            rows = slice(start, start + len(part))
            rounded = codes * scales.repeat_interleave(WIDEST_GROUP, dim=1)[:, :d]
            model.screen[rows, :d], model.screen_scale[rows] = codes.numpy(), scales.numpy()
            off = (part - rounded).norm(dim=1) + SUMMED * part.norm(dim=1)
            model.screen_error[rows] = torch.stack([off, rounded.abs().sum(dim=1) / 2], dim=1).numpy()

    def part(self, layer: int, part: int) -> Tensor:
        """All rows of a part of a layer as fp32 (n, d)."""
        shape = self.shape
        n = int(part_rows(shape)[part]) or shape.d_ffn
        first = int(self.model.first[layer, part])
        if not self.model.packed[layer, part]:
            return self.rows(first, n)
        codes = unpack_pairs(torch.from_numpy(self.model.pairs[first : first + n]))[:, : shape.d_model]
        scales = torch.from_numpy(self.model.pair_scales[first : first + n].view(np.float16)).float()
        return codes.float().mul_(scales.repeat_interleave(self.model.pair_group, dim=1)[:, : shape.d_model])

    def rows(self, first: int, n: int) -> Tensor:
        """n rows that are not packed, from number ``first`` on, as fp32 (n, d): a view of fp32, a copy of others."""
        if self.half is not None:
            rows = self.model.rows.view(np.int16)[first : first + n, : self.shape.d_model]
            return torch.from_numpy(rows).view(self.half).float()
        part = torch.from_numpy(self.model.rows[first : first + n, : self.shape.d_model])
        if part.dtype == torch.float32:
            return part
        scales = torch.from_numpy(self.model.scales[first : first + n])
        return part.float().mul_(scales.repeat_interleave(self.model.group, dim=1)[:, : part.shape[1]])

    def out_projection(self, layer: int) -> Tensor:
        """The output projection of a layer, (h e, d) fp32, in the heads' columns."""
        e = self.shape.head_dim
        rows = self.part(layer, OUT)
        if not len(self.model.out_scale):
            return rows
        scale = torch.from_numpy(self.model.out_scale[layer, :, : self.shape.d_model])
        return rows * scale.repeat_interleave(e, dim=0)

    def describe(self) -> str:
        """How weights are stored, in words."""
        model, kept = self.model, self.formats.layers
        group = model.pair_group if kept == "int4" else model.group
        scales = "each row" if group >= self.shape.d_model else f"each {group} columns"
        stored = NAMES.get(kept) or f"{kept} with a scale for {scales}"
        if kept == "int4" and (wide := int((model.packed == 0).sum())):
            stored += f", {wide} of {model.packed.size} matrices in int8"
        return f"{stored} ({self.note})" if self.note else stored

    @property
    def formats(self) -> Formats:
        """As a plan names them: of the layers, of the LM head, and of what is no matrix."""
        rows = self.model.rows.dtype
        stored = next(name for name, dtype in DTYPES.items() if dtype == rows)
        stored = "int4" if len(self.model.pairs) else stored
        return Formats(stored, stored if stored in WHOLE else "int8", "float32")

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, scales included."""
        model = self.model
        pairs = model.pairs.nbytes + model.pair_scales.nbytes + model.pair_most.nbytes if len(model.pairs) else 0
        scales = model.scales.nbytes + model.out_scale.nbytes if model.rows.dtype == np.int8 else 0
        return model.rows.nbytes + scales + pairs


def how_stored(model: Any, asked: str | None) -> tuple[str, str]:
    """The format of a model's weights if asked for one or for none, and what to say about it.

    None: int4 of a 4-bit model, else the model's dtype.

    Raises:
        UserError: an unknown format.
    """
    check_stored(asked)
    coded = isinstance(blocks_of(model)[0].up, CodedLinear)
    stored = cpu_format("int4" if coded else str(model.dtype).removeprefix("torch."), asked)
    if not coded or stored != "int4":
        return stored, ""
    head = "embeddings" if isinstance(model.get_output_embeddings(), CodedLinear) else "embeddings and LM head"
    return stored, f"the model's 4-bit codes, exact; {head} rounded to 8 bits"


def quantise_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """weight (n, d) fp32 -> codes (n, d) int8 and scales (n, ceil(d / group)) fp32, the largest weight at 127.

    >>> quantise_groups(torch.tensor([[1.0, -0.5, 2.0]]), 2)
    (tensor([[127, -64, 127]], dtype=torch.int8), tensor([[0.0079, 0.0157]]))
    """
    n, d = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -d % group)).view(n, -1, group)
    largest = padded.abs().amax(dim=2, keepdim=True)
    scales = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    codes = (padded / scales).round_().to(torch.int8)
    return codes.flatten(1)[:, :d].contiguous(), scales[..., 0].contiguous()


def pack_pairs(codes: Tensor) -> Tensor:
    """Codes (n, d) in -8..7 -> (n, D / 2) uint8, D = d in whole chunks: see `level_products.packed_codes`."""
    bits = torch.nn.functional.pad(codes, (0, -codes.shape[1] % CHUNK)).view(torch.uint8)
    low, high = bits.view(len(codes), -1, 2, HALF).unbind(2)
    return (low & 15 | high << 4).flatten(1)


def unpack_pairs(pairs: Tensor) -> Tensor:
    """(n, D / 2) uint8 -> codes (n, D) int8."""
    halves = pairs.view(len(pairs), -1, HALF)
    return (torch.stack([halves & 15, halves >> 4], 2).flatten(1) ^ 8).to(torch.int8) - 8


def matrices(block: BlockParts, g: int) -> dict[int, Tensor]:
    """The matrices of a layer with g heads of K and V by part, as rows (n, d)."""
    found = {
        QKV: _by_unit([part.weight for part in (block.q, block.k, block.v)], g),
        OUT: block.out.weight.T,
        MLP_UP: block.up.weight,
        MLP_DOWN: block.down.weight.T,
    }
    return found if block.gate is None else {**found, MLP_IN: block.gate.weight}


def check_memory(needed: int, what: str) -> None:
    """Raise :class:`Unsupported` where so many bytes are not free."""
    free = free_memory()
    if free is not None and free < needed:
        raise Unsupported(
            f"the CPU engine keeps {what}, {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB of memory are free"
        )


def _by_unit(parts: list[Tensor], g: int) -> Tensor:
    """q (h e, .), k and v (g e, .) as ((h + 2 g) e, .): the rows of all three of a unit stand together."""
    return torch.cat([part.unflatten(0, (g, -1)) for part in parts], 1).flatten(0, 1)


def _tied(ends: Ends) -> bool:
    """Whether the LM head is the embedding, as the layers read and write them."""
    if isinstance(ends.head, CodedLinear) or ends.project_in is not None or ends.project_out is not None:
        return False
    tied: bool = ends.head.weight.data_ptr() == ends.tokens.data_ptr()
    return tied


def _norm(norm: Any, shape: ModelDims) -> ReadNorm:
    return read_norm("a norm", norm, shape.norm)


def _put_norm(place: np.ndarray, norm: ReadNorm) -> None:
    """Weight and bias into place (2, n). Without learned parameters they are one and zero."""
    place[0] = 1.0 if norm.weight is None else _array(norm.weight)
    place[1] = 0.0 if norm.bias is None else _array(norm.bias)


def _one_eps(norms: list[ReadNorm]) -> float:
    """The eps of all these norms. Raises NotPlain where they have several."""
    found = {norm.eps for norm in norms} or {0.0}
    if len(found) > 1:
        raise NotPlain("the model", "has norms of several eps, and the CPU engine one for all")
    return found.pop()


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float32).numpy()


def _bias(linear: Any) -> np.ndarray:
    return np.zeros(linear.weight.shape[0], np.float32) if linear.bias is None else _array(linear.bias)
