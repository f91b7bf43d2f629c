"""Reads a model, writes the arrays of the CPU engine: every unit's weights as rows of one array, fp32 or int8.

int8 weights have one fp32 scale for each row, or for each group of columns of a row. A row of down or of the output
projection is a neuron's or a head's output, not an output dimension. So what is selected has scales of its own.

A 4-bit model (``models.int4``) keeps its codes, a byte each, with their own scales: nothing of a layer is rounded
again. Embeddings and an LM head that are no codes are rounded as ``int8`` rounds everything.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu_train.engine.cpu.arrays import MLP_DOWN, MLP_IN, MLP_UP, OUT, QKV, Model, padded
from dejavu_train.engine.cpu.layout import SMALL, new_model
from dejavu_train.engine.cpu.row_kernels import WIDEST_GROUP
from dejavu_train.engine.cpu_limits import CHUNK
from dejavu_train.engine.cpu_plan import cpu_format
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

ROWS_AT_ONCE = 4096
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
    """

    shape: ModelDims
    model: Model
    out_bias: np.ndarray
    note: str = ""

    @classmethod
    def from_model(
        cls, model: Any, stored: str | None = None, group: int | None = None, release: bool = False
    ) -> "CpuWeights":
        """Copy the weights of a Hugging Face model on the CPU.

        Args:
            model: of any family, of any floating dtype.
            stored: ``float32``. ``int8``: weights rounded to 8 bits. ``codes`` of a 4-bit model, exact but for
                embeddings and LM head, unless the head is codes too. Norms, biases and positions are fp32. None =
                codes where the model has them in groups of whole chunks, else fp32.
            group: columns that share a scale, a multiple of CHUNK up to WIDEST_GROUP. For codes it divides the model's
            group, whose scales then stand there more than once. None = CHUNK. Not of fp32.
            release: give up the model's own tensors layer by layer, so that a large model never exists twice.
        Raises:
            UserError: a format that does not exist, or not for this model. Weights that are not finite, by layer.
        """
        shape = check_read(model, RUNS)
        blocks, ends = blocks_of(model), read_ends(model)
        stored, note = how_stored(model, stored)
        own = blocks[0].up.layout.sizes.group if stored == "codes" else 0
        if group and own % group:
            raise UserError(f"group must divide the model's groups of {own} columns, got {group}; or leave group out")
        norms = [_norm(norm, shape) for each in blocks for norm in (each.norm_attn, each.norm_mlp)]
        norms += [each or ReadNorm(None, None, norms[0].eps) for each in (ends.final_norm, ends.embedding_norm)]
        head_norms = [_norm(norm, shape) for each in blocks for norm in (each.norm_q, each.norm_k) if norm is not None]
        empty = new_model(
            shape, stored, group, tied=_tied(ends), eps=_one_eps(norms), head_eps=_one_eps(head_norms),
            final_norm=ends.final_norm is not None,
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
        weights.put_ends(ends, stored)
        for i, whole in enumerate(blocks):
            weights.put_layer(i, plain_block(whole), stored)
            if release:
                for tensor in (*whole.whole.parameters(), *whole.whole.buffers()):
                    tensor.data = torch.empty(0, dtype=tensor.dtype)
        return weights

    def put_ends(self, ends: Ends, stored: str) -> None:
        """Store the tables. Maps between two widths are multiplied into them."""
        model = self.model
        self.check_finite(model.lm_head, model.norms[-2:])
        if ends.positions is not None:
            model.positions[:] = _array(ends.positions)
        into, out = ends.project_in, ends.project_out
        self.put(model.embedding, ends.tokens if into is None else (ends.tokens.float() @ into.weight.float().T))
        if isinstance(ends.head, CodedLinear) and stored == "codes" and out is None:
            self.put_codes(model.lm_head, ends.head.rows)
        elif model.lm_head != model.embedding:
            head = ends.head.weight
            self.put(model.lm_head, head if out is None else head.float() @ out.weight.float())
        self.screen()

    def put_layer(self, number: int, block: BlockParts, stored: str) -> None:
        """Store a decoder layer."""
        model, g = self.model, self.shape.n_kv_heads
        first, parts = model.first[number], (block.q, block.k, block.v)
        if stored == "codes":
            self.put_coded_layer(number, block)
        else:
            self.put(first[QKV], _by_unit([part.weight for part in parts], g))
            self.put(first[OUT], block.out.weight.T)
            self.put(first[MLP_UP], block.up.weight)
            self.put(first[MLP_DOWN], block.down.weight.T)
            if block.gate is not None:
                self.put(first[MLP_IN], block.gate.weight)
        model.qkv_bias[number] = _by_unit([torch.from_numpy(_bias(part))[:, None] for part in parts], g)[:, 0]
        self.out_bias[number] = _bias(block.out)
        model.up_bias[number], model.down_bias[number] = _bias(block.up), _bias(block.down)
        if block.gate is not None:
            model.in_bias[number] = _bias(block.gate)
        biases = (model.qkv_bias, self.out_bias, model.up_bias, model.in_bias, model.down_bias)
        norms = model.norms[2 * number : 2 * number + 2], model.head_norms[number]
        self.check_finite(int(first[QKV]), *(each[number] for each in biases), *norms)

    @staticmethod
    def needed(model: Any) -> int:
        """Bytes, to within a tenth, that `from_model` takes if asked for no format."""
        shape, head = dims_of(model.config), model.get_output_embeddings()
        tied = not isinstance(head, CodedLinear) and bool(model.config.tie_word_embeddings)
        tied = tied and shape.embedding_dim == shape.d_model
        rows = shape.n_layers * shape.layer_weights // shape.d_model + shape.vocab_size * (1 if tied else 2)
        if how_stored(model, None)[0] == "codes":
            return rows * padded(shape.d_model)
        return (4 * rows + shape.vocab_size) * padded(shape.d_model)

    @classmethod
    def random(
        cls, shape: ModelDims, stored: str = "float32", group: int | None = None, seed: int = 0, std: float = 0.02
    ) -> "CpuWeights":
        """Random weights of a true shape, for benchmarks: normal, biases 0, layers share nothing. Codes have 8 bits."""
        empty = new_model(shape, stored, group, tied=True, eps=1e-5, head_eps=1e-5, final_norm=not shape.post_norm)
        weights = cls(shape, empty, np.zeros((shape.n_layers, shape.d_model), np.float32))
        generator = torch.Generator().manual_seed(seed)
        weights.model.norms[:, 0], weights.model.head_norms[..., 0, :] = 1, 1
        half = weights.model.turns.shape[2]
        angles = np.outer(np.arange(len(weights.model.turns)), ROTARY_BASE ** -(np.arange(half) / max(1, half)))
        weights.model.turns[:] = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        if shape.positions is Positions.ALIBI:
            weights.model.slopes[:] = alibi_slopes(shape.n_heads).numpy()
        for start in range(0, len(weights.model.rows), ROWS_AT_ONCE):
            n = min(ROWS_AT_ONCE, len(weights.model.rows) - start)
            weights.put(start, torch.empty(n, shape.d_model, dtype=torch.float32).normal_(0, std, generator=generator))
        weights.screen()
        weights.model.positions[:] = (
            torch.empty(weights.model.positions.shape, dtype=torch.float32).normal_(0, std, generator=generator).numpy()
        )
        return weights

    @functools.cached_property
    def rounded(self) -> "CpuWeights":
        """These weights in 8 bits, a quarter of fp32 ones, for drafts. What is no matrix is shared.

        Raises:
            UserError: weights that are not fp32.
        """
        if self.model.rows.dtype != np.float32:
            raise UserError("draft_weights=int8 is for fp32 weights, and these are in 8 bits already; leave it out")
        check_memory(self.model.rows.size, "weights of the draft in 8 bits")
        tied = self.model.lm_head == self.model.embedding
        numbers = {name: getattr(self.model, name) for name in ("eps", "head_eps", "final_norm")}
        copy = replace(self, model=new_model(self.shape, "int8", None, tied=tied, **numbers), note="")
        for name in SMALL:
            getattr(copy.model, name)[:] = getattr(self.model, name)
        for start in range(0, len(copy.model.rows), ROWS_AT_ONCE):
            copy.put(start, self.rows(start, min(ROWS_AT_ONCE, len(copy.model.rows) - start)))
        return copy

    @property
    def operand(self) -> type:
        """Type that rows are multiplied with: fp32, or int16 levels."""
        return np.float32 if self.model.rows.dtype == np.float32 else np.int16

    def put(self, first: int, weight: Tensor) -> None:
        """Store weight (n, d) as the rows from number ``first`` on."""
        for start in range(0, len(weight), ROWS_AT_ONCE):
            part = weight[start : start + ROWS_AT_ONCE].detach().to("cpu", torch.float32)
            self.check_finite(int(first) + start, part)
            rows, d = slice(int(first) + start, int(first) + start + len(part)), self.shape.d_model
            self.model.rows[rows, d:] = 0
            if self.model.rows.dtype == np.float32:
                self.model.rows[rows, :d] = part.numpy()
            else:
                codes, scales = quantise_groups(part, self.model.group)
                self.model.rows[rows, :d], self.model.scales[rows] = codes.numpy(), scales.numpy()

    def put_codes(self, first: int, rows: Int4Rows | Int8Rows) -> None:
        """Store codes and scales of rows (n, d) as they are, from number ``first`` on."""
        codes = rows.codes
        place, d = slice(int(first), int(first) + len(codes)), self.shape.d_model
        self.check_finite(int(first), rows.scales)
        scales = rows.scales.float().repeat_interleave(self.model.scales.shape[1] // rows.scales.shape[1], dim=1)
        self.model.rows[place, d:] = 0
        self.model.rows[place, :d], self.model.scales[place] = codes.numpy(), scales.numpy()

    def put_coded_layer(self, number: int, block: BlockParts) -> None:
        """Store a decoder layer of `CodedLinear`. The output projection is turned: a row is a column of a head."""
        h, g, d, e = self.shape.n_heads, self.shape.n_kv_heads, self.shape.d_model, self.shape.head_dim
        first, parts = self.model.first[number], [coded_rows(part) for part in (block.q, block.k, block.v)]
        words, scales = (_by_unit([getattr(part, name) for part in parts], g) for name in ("words", "scales"))
        self.put_codes(first[QKV], Int4Rows(words, scales))
        if block.gate is not None:
            self.put_codes(first[MLP_IN], block.gate.rows)
        self.put_codes(first[MLP_UP], block.up.rows)
        self.put_codes(first[MLP_DOWN], block.down.rows)
        out, columns = block.out.rows, slice(int(first[OUT]), int(first[OUT]) + h * e)
        self.check_finite(int(first[OUT]), out.scales)
        self.model.rows[columns, :d] = out.codes.view(h, d, e).transpose(1, 2).reshape(h * e, d).numpy()
        self.model.rows[columns, d:], self.model.scales[columns] = 0, 1
        self.model.out_scale[number, :, :d] = out.scales.float().view(h, d).numpy()

    def check_finite(self, row: int, *parts: Tensor | np.ndarray) -> None:
        """Raise :class:`UserError` where weights that belong to what ``row`` belongs to are not finite.

        Positions are not looked at: a table may hold anything where no text reaches.
        """
        for part in parts:
            least, most = torch.as_tensor(part).aminmax()  # both NaN where anything is
            if not math.isfinite(float(least)) or not math.isfinite(float(most)):
                where = "the embedding, the final LayerNorm or the LM head"
                if row < self.model.embedding:
                    where = f"layer {row // (self.model.embedding // self.shape.n_layers)}"
                raise UserError(f"{where} has weights that are not finite; load the model again, or from another copy")

    def screen(self) -> None:
        """Round the LM head to int8 beside its fp32 rows, with bounds of what a logit of it is off by."""
        model, d = self.model, self.shape.d_model
        for start in range(0, len(model.screen) if model.rows.dtype == np.float32 else 0, ROWS_AT_ONCE):
            part = self.rows(model.lm_head + start, min(ROWS_AT_ONCE, model.vocab - start))
            codes, scales = quantise_groups(part, WIDEST_GROUP)
            rows = slice(start, start + len(part))
            rounded = codes * scales.repeat_interleave(WIDEST_GROUP, dim=1)[:, :d]
            model.screen[rows, :d], model.screen_scale[rows] = codes.numpy(), scales.numpy()
            off = (part - rounded).norm(dim=1) + SUMMED * part.norm(dim=1)
            model.screen_error[rows] = torch.stack([off, rounded.abs().sum(dim=1) / 2], dim=1).numpy()

    def rows(self, first: int, n: int) -> Tensor:
        """n rows from number ``first`` on as fp32 (n, d): a view of fp32 weights, a copy of int8 ones."""
        part = torch.from_numpy(self.model.rows[first : first + n, : self.shape.d_model])
        if part.dtype == torch.float32:
            return part
        scales = torch.from_numpy(self.model.scales[first : first + n])
        return part.float().mul_(scales.repeat_interleave(self.model.group, dim=1)[:, : part.shape[1]])

    def out_projection(self, layer: int) -> Tensor:
        """The output projection of a layer, (h e, d) fp32, in the heads' columns."""
        h, e = self.shape.n_heads, self.shape.head_dim
        rows = self.rows(int(self.model.first[layer, OUT]), h * e)
        if not len(self.model.out_scale):
            return rows
        scale = torch.from_numpy(self.model.out_scale[layer, :, : self.shape.d_model])
        return rows * scale.repeat_interleave(e, dim=0)

    def describe(self) -> str:
        """How weights are stored, in words."""
        model = self.model
        scales = "each row" if model.group >= self.shape.d_model else f"each {model.group} columns"
        stored = "fp32" if model.rows.dtype == np.float32 else f"int8 with a scale for {scales}"
        return f"{stored} ({self.note})" if self.note else stored

    @property
    def formats(self) -> Formats:
        """As a plan names them: of the layers, of the LM head, and of what is no matrix."""
        stored = "codes" if len(self.model.out_scale) else "int8" if self.model.rows.dtype == np.int8 else "float32"
        return Formats(stored, "float32" if stored == "float32" else "int8", "float32")

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, scales included."""
        scales = self.model.scales.nbytes + self.model.out_scale.nbytes
        return self.model.rows.nbytes + (scales if self.model.rows.dtype == np.int8 else 0)


def how_stored(model: Any, asked: str | None) -> tuple[str, str]:
    """Which of ``STORED`` a model's weights are kept as if asked for one or for none, and what to say about it.

    Raises:
        UserError: codes of a model that has none, or whose groups are not whole chunks.
    """
    up = blocks_of(model)[0].up
    group = up.layout.sizes.group if isinstance(up, CodedLinear) else 0
    stored = cpu_format(group, asked)
    if stored == "codes":
        head = "embeddings" if isinstance(model.get_output_embeddings(), CodedLinear) else "embeddings and LM head"
        return stored, f"the model's 4-bit codes, exact; {head} rounded to 8 bits"
    odd = f"of 4-bit codes, whose groups of {group} columns do not fit: {CHUNK} or 128 do" if group else ""
    return stored, odd if asked is None else ""


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
