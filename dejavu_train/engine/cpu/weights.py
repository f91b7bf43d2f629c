"""Reads an OPT model, writes the arrays of the CPU engine: every unit's weights as rows of one array, fp32 or int8.

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
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

from dejavu_train.engine import runs
from dejavu_train.engine.cpu.arrays import MLP_DOWN, MLP_UP, OUT, QKV, Model, padded
from dejavu_train.engine.cpu.row_kernels import WIDEST_GROUP
from dejavu_train.engine.cpu_limits import CHUNK
from dejavu_train.engine.plan import cpu_format
from dejavu_train.engine.planned import Formats
from dejavu_train.errors import Unsupported, UserError
from dejavu_train.families import BlockParts, ModelDims, blocks_of, dims_of, family_of
from dejavu_train.families.opt import POSITIONS_OFFSET
from dejavu_train.families.plain import NotPlain, plain_block, plain_linear, plain_table
from dejavu_train.families.read import check_read
from dejavu_train.machine import free_memory
from dejavu_train.models.int4 import CodedLinear, Int4Rows, Int8Rows

STORED = {"float32": np.float32, "int8": np.int8, "codes": np.int8}
ROWS_AT_ONCE = 4096
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
            model: pre-norm OPT, of any floating dtype.
            stored: ``float32``. ``int8``: weights rounded to 8 bits. ``codes`` of a 4-bit model, exact but for
                embeddings and LM head, unless the head is codes too. LayerNorms, biases and positions are fp32. None =
                codes where the model has them in groups of whole chunks, else fp32.
            group: columns that share a scale, a multiple of CHUNK up to WIDEST_GROUP. For codes it divides the model's
            group, whose scales then stand there more than once. None = CHUNK. Not of fp32.
            release: give up the model's own tensors layer by layer, so that a large model never exists twice.
        Raises:
            UserError: not a pre-norm ReLU OPT, or a format that does not exist, or not for this model. Weights that are
                not finite, by layer.
        """
        shape = check_read(model, runs.CPU)
        family, blocks = family_of(model), blocks_of(model)
        tokens, learned = family.embeddings(model)
        stored, note = how_stored(model, stored)
        head, embedding = plain_linear("lm_head", model.get_output_embeddings()), plain_table("embed_tokens", tokens)
        positions = plain_table("embed_positions", learned, OPTLearnedPositionalEmbedding)
        coded_head = isinstance(head, CodedLinear)
        tied = not coded_head and head.weight.data_ptr() == embedding.data_ptr()
        own = blocks[0].up.layout.sizes.group if stored == "codes" else 0
        if group is not None and own % group:
            raise UserError(f"group must divide the model's groups of {own} columns, got {group}; or leave group out")
        norms = [norm for block in blocks for norm in (block.norm_attn, block.norm_mlp)] + [family.final_norm(model)]
        eps = norms[0].eps
        if any(norm.eps != eps for norm in norms):
            raise NotPlain("the model", "has LayerNorms of several eps, and the CPU engine one for all")
        weights = replace(_empty(shape, stored, group, tied, eps), note=note)
        for i, norm in enumerate(norms):  # without learned parameters they are one and zero
            weights.model.norms[i, 0] = 1.0 if norm.weight is None else _array(norm.weight)
            weights.model.norms[i, 1] = 0.0 if norm.bias is None else _array(norm.bias)
        weights.check_finite(weights.model.lm_head, weights.model.norms[-1])
        weights.model.positions[:] = _array(positions)
        weights.put(weights.model.embedding, embedding)
        if coded_head and stored == "codes":
            weights.put_codes(weights.model.lm_head, head.rows)
        elif not tied:
            weights.put(weights.model.lm_head, head.weight)
        weights.screen()
        h = shape.n_heads
        for i, whole in enumerate(blocks):
            block, first = plain_block(whole), weights.model.first[i]
            parts = (block.q, block.k, block.v)
            if stored == "codes":
                weights.put_coded_layer(i, block)
            else:
                weights.put(first[QKV], _by_head([part.weight for part in parts], h))
                weights.put(first[OUT], block.out.weight.T)
                weights.put(first[MLP_UP], block.up.weight)
                weights.put(first[MLP_DOWN], block.down.weight.T)
            biases = [_bias(part).reshape(h, -1) for part in parts]
            weights.model.qkv_bias[i] = np.stack(biases, axis=1).ravel()
            weights.out_bias[i] = _bias(block.out)
            weights.model.up_bias[i], weights.model.down_bias[i] = _bias(block.up), _bias(block.down)
            small = (weights.model.qkv_bias, weights.out_bias, weights.model.up_bias, weights.model.down_bias)
            weights.check_finite(int(first[QKV]), *(each[i] for each in small), weights.model.norms[2 * i : 2 * i + 2])
            if release:
                for tensor in (*whole.whole.parameters(), *whole.whole.buffers()):
                    tensor.data = torch.empty(0, dtype=tensor.dtype)
        return weights

    @staticmethod
    def needed(model: Any) -> int:
        """Bytes, to within a tenth, that `from_model` takes if asked for no format."""
        shape, head = dims_of(model.config), model.get_output_embeddings()
        tied = not isinstance(head, CodedLinear) and bool(model.config.tie_word_embeddings)
        rows = shape.n_layers * (4 * shape.d_model + 2 * shape.d_ffn) + shape.vocab_size * (1 if tied else 2)
        if how_stored(model, None)[0] == "codes":
            return rows * padded(shape.d_model)
        return (4 * rows + shape.vocab_size) * padded(shape.d_model)

    @classmethod
    def random(
        cls, shape: ModelDims, stored: str = "float32", group: int | None = None, seed: int = 0, std: float = 0.02
    ) -> "CpuWeights":
        """Random weights of a true shape, for benchmarks: normal, biases 0, layers share nothing. Codes have 8 bits."""
        weights = _empty(shape, stored, group, True, 1e-5)
        generator = torch.Generator().manual_seed(seed)
        weights.model.norms[:, 0] = 1
        for start in range(0, len(weights.model.rows), ROWS_AT_ONCE):
            n = min(ROWS_AT_ONCE, len(weights.model.rows) - start)
            weights.put(start, torch.empty(n, shape.d_model).normal_(0, std, generator=generator))
        weights.screen()
        weights.model.positions[:] = (
            torch.empty(weights.model.positions.shape).normal_(0, std, generator=generator).numpy()
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
        copy = _empty(self.shape, "int8", None, tied, self.model.eps)
        for name in ("norms", "qkv_bias", "up_bias", "down_bias", "positions"):
            getattr(copy.model, name)[:] = getattr(self.model, name)
        copy.out_bias[:] = self.out_bias
        for start in range(0, len(copy.model.rows), ROWS_AT_ONCE):
            copy.put(start, self.rows(start, min(ROWS_AT_ONCE, len(copy.model.rows) - start)))
        return copy

    @property
    def operand(self) -> type:
        """What rows are multiplied with: fp32, or int16 levels."""
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
        h, d, e = self.shape.n_heads, self.shape.d_model, self.shape.head_dim
        first, parts = self.model.first[number], [part.rows for part in (block.q, block.k, block.v)]
        words, scales = (_by_head([getattr(part, name) for part in parts], h) for name in ("words", "scales"))
        self.put_codes(first[QKV], Int4Rows(words, scales))
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


def _by_head(parts: list[Tensor], h: int) -> Tensor:
    """q, k and v, (h e, .) each, as (3 h e, .): a head's rows of all three stand together."""
    return torch.stack([part.view(h, -1, part.shape[1]) for part in parts], 1).flatten(0, 2)


def _empty(shape: ModelDims, stored: str, group: int | None, tied: bool, eps: float) -> CpuWeights:
    if stored not in STORED:
        raise UserError(f"the CPU engine stores weights as {' or '.join(STORED)}, got {stored}")
    if group is not None and (stored == "float32" or not 0 < group <= WIDEST_GROUP or group % CHUNK):
        raise UserError(
            f"group must be a multiple of {CHUNK} up to {WIDEST_GROUP}, of weights stored in int8; got {group} of"
            f" {stored}"
        )
    d, f, n_layers, vocab = shape.d_model, shape.d_ffn, shape.n_layers, shape.vocab_size
    columns = padded(d)
    group = columns if stored == "float32" else min(group or CHUNK, columns)
    per_layer = 4 * d + 2 * f
    first = np.array([0, 3 * d, 4 * d, 4 * d + f]) + per_layer * np.arange(n_layers)[:, None]
    assert (QKV, OUT, MLP_UP, MLP_DOWN) == (0, 1, 2, 3)
    embedding = per_layer * n_layers
    n_rows = embedding + vocab * (1 if tied else 2)
    model = Model(
        rows=np.empty((n_rows, columns), STORED[stored]),
        scales=np.ones((n_rows, math.ceil(columns / group)), np.float32),
        out_scale=np.ones((n_layers if stored == "codes" else 0, shape.n_heads, columns), np.float32),
        group=group,
        first=first.astype(np.int64),
        embedding=embedding,
        lm_head=embedding if tied else embedding + vocab,
        screen=np.zeros((vocab if stored == "float32" else 1, columns), np.int8),
        screen_scale=np.ones((vocab if stored == "float32" else 1, math.ceil(columns / WIDEST_GROUP)), np.float32),
        screen_error=np.zeros((vocab if stored == "float32" else 1, 2), np.float32),
        vocab=vocab,
        n_heads=shape.n_heads,
        norms=np.zeros((2 * n_layers + 1, 2, d), np.float32),
        eps=eps,
        qkv_bias=np.zeros((n_layers, 3 * d), np.float32),
        up_bias=np.zeros((n_layers, f), np.float32),
        down_bias=np.zeros((n_layers, d), np.float32),
        positions=np.zeros((shape.max_positions + POSITIONS_OFFSET, d), np.float32),
    )
    return CpuWeights(shape, model, np.zeros((n_layers, d), np.float32))


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float32).numpy()


def _bias(linear: Any) -> np.ndarray:
    return np.zeros(linear.weight.shape[0], np.float32) if linear.bias is None else _array(linear.bias)
