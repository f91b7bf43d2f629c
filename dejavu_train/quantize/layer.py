"""Quantises one decoder layer on the outputs of the layers before it, matrix after matrix.

The hidden states of the calibration text stand before the layer, batch by batch, on the disk. Second moments are taken
of what a matrix really reads: the quantised layers', and within the layer the quantised matrices', outputs. So later
matrices make up for some of what earlier ones lost. Afterwards the hidden states stand behind the layer.

Letters: B windows, T positions, d model width, n outputs, m inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu_train.data.stream import Stream
from dejavu_train.families import BlockParts
from dejavu_train.families.block import before_half, behind_half, causal, mix_heads, positions_like
from dejavu_train.models.int4 import Int4Rows, RowLayout
from dejavu_train.models.layer_exchange import first
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.gptq import InputGroups, OutputGroups, quantise_columns
from dejavu_train.quantize.rounding import round_nearest


@dataclass(frozen=True)
class StreamBatch:
    """Calibration windows, whose states are rows of a stream from ``start`` on.

    Attributes:
        real: (B, T) bool, on the device, false for padding, which stands on the right.
    """

    stream: Stream
    start: int
    real: Tensor

    @property
    def hidden(self) -> Tensor:
        """(B, T, d) fp32, before the layer."""
        return self._on_device(self.stream.read(self.start, self.real.numel()))

    @property
    def made(self) -> Tensor:
        """(B, T, d) fp32, what ``put`` had last."""
        return self._on_device(self.stream.written(self.start, self.real.numel()))

    def put(self, states: Tensor) -> None:
        """Keep (B, T, d) fp32 on the way through the layer, at last what stands behind it."""
        self.stream.write(self.start, states.flatten(0, 1).cpu())

    def _on_device(self, rows: Tensor) -> Tensor:
        return rows.to(self.real.device).view(*self.real.shape, -1)


@dataclass(frozen=True)
class MatrixErrors:
    """Losses of a matrix: ``weight_error`` is relative to the weights' norm, ``output_error`` to that of the outputs on
    calibration text, both as ratios of squares. None where there was no text. ``exact``: the codes were given."""

    weight_error: float
    output_error: float | None
    exact: bool = False

    @classmethod
    def of(cls, lost: Tensor, weight: Tensor, products: Tensor | None, exact: bool = False) -> "MatrixErrors":
        """Measure a weight (n, m) that lost (n, m), with the ``products`` (m, m) of its inputs where there was text."""
        error = float(lost.square().sum() / weight.square().sum().clamp_min(1e-30))
        output = None if products is None else squared(lost, products) / max(squared(weight, products), 1e-30)
        return cls(error, output, exact)


@dataclass(frozen=True)
class MatrixResult:
    """A matrix in 4 bits."""

    rows: Int4Rows
    errors: MatrixErrors


class LayerQuantizer:
    """Works on one decoder layer in fp32, whose weights it exchanges for what their codes say.

    Args:
        parts: of the layer.
        matrices: of its family, by the names of ``BlockParts`` those within the layer.
        layouts: of its matrices, by their names within the layer.
        config: how they are rounded.
        given: matrices that are in 4 bits already, in the same groups, and stay as they are.
    """

    def __init__(
        self,
        parts: BlockParts,
        matrices: Mapping[str, str],
        layouts: Mapping[str, RowLayout],
        config: QuantizeConfig,
        given: Mapping[str, Int4Rows],
    ) -> None:
        self.parts, self.block, self.layouts, self.config, self.given = parts, parts.whole, layouts, config, given
        self._out, self._down = [matrices["out"]], [matrices["down"]]
        self._qkv = list(dict.fromkeys(matrices[part] for part in "qkv"))
        self._up = [matrices[part] for part in ("gate", "up") if part in matrices]
        self.results: dict[str, MatrixResult] = {}

    @torch.no_grad()
    def run(self, batches: list[StreamBatch]) -> dict[str, MatrixResult]:
        """The matrices by name. Without ``batches`` all are rounded to the nearest codes."""
        parts = self.parts
        if not batches:
            for part in self.layouts:
                self._quantise([part], None)
            return self.results
        if not self.layouts:
            for batch in batches:
                batch.put(first(self.block(batch.hidden)))
            return self.results
        if parts.out is not None:
            self._attention(batches)
        if parts.down is not None:
            self._mlp(batches)
        return self.results

    def _attention(self, batches: list[StreamBatch]) -> None:
        parts, moments = self.parts, Moments()
        for batch in batches:
            moments.add(before_half(parts, parts.norm_attn, batch.hidden), batch.real)
        self._quantise(self._qkv, moments)

        moments = Moments()
        for batch in batches:
            moments.add(self._mixed(batch), batch.real)
        self._quantise(self._out, moments)
        for batch in batches:
            batch.put(behind_half(parts, parts.norm_attn, batch.hidden + parts.out(self._mixed(batch))))

    def _mlp(self, batches: list[StreamBatch]) -> None:
        parts, moments = self.parts, Moments()
        for batch in batches:
            moments.add(self._mlp_in(batch), batch.real)
        self._quantise(self._up, moments)

        moments = Moments()
        for batch in batches:
            moments.add(self._neurons(batch), batch.real)
        self._quantise(self._down, moments)
        for batch in batches:
            added = parts.down(self._neurons(batch))
            batch.put(behind_half(parts, parts.norm_mlp, self._before_mlp(batch) + added))

    def _mixed(self, batch: StreamBatch) -> Tensor:
        """(B, T, h * e), of what stands before the layer. It is made twice: it may be wider than the stream."""
        attn_in = before_half(self.parts, self.parts.norm_attn, batch.hidden)
        return mix_heads(self.parts, attn_in, causal(self.parts), positions_like(batch.real))

    def _neurons(self, batch: StreamBatch) -> Tensor:
        """(B, T, n), of what stands before the MLP."""
        return self.parts.neurons(self._mlp_in(batch))

    def _mlp_in(self, batch: StreamBatch) -> Tensor:
        return before_half(self.parts, self.parts.norm_mlp, self._before_mlp(batch))

    def _before_mlp(self, batch: StreamBatch) -> Tensor:
        return batch.hidden if self.parts.out is None else batch.made

    def _quantise(self, parts: list[str], moments: "Moments | None") -> None:
        """Round matrices that read the same inputs, and put what their codes say in their places."""
        corrects = self._corrects(self.block.get_submodule(parts[0]))
        spread = None if moments is None else moments.centred() if corrects else moments.products()
        open_parts = [part for part in parts if part not in self.given]
        solved = self._solve(open_parts, spread) if open_parts else {}
        for part in parts:
            linear = self.block.get_submodule(part)
            rows = self.given.get(part) or solved[part]
            made = self.layouts[part].from_rows(rows.dense())
            lost = made - linear.weight
            errors = MatrixErrors.of(lost, linear.weight, spread, part in self.given)
            if moments is not None and corrects and part not in self.given:
                linear.bias -= lost @ moments.mean
            linear.weight.data = made
            self.results[part] = MatrixResult(rows, errors)

    def _corrects(self, linear: Any) -> bool:
        """Whether the bias takes over what rounding does to the mean output."""
        return self.config.gptq and linear.bias is not None

    def _solve(self, parts: list[str], hessian: Tensor | None) -> dict[str, Int4Rows]:
        weights = [self.block.get_submodule(part).weight for part in parts]
        layouts = [self.layouts[part] for part in parts]
        if hessian is None or not self.config.gptq:
            return {
                part: Int4Rows.of(*round_nearest(layout.to_rows(weight).contiguous(), layout.sizes.group))
                for part, layout, weight in zip(parts, layouts, weights, strict=True)
            }
        codes, scales = self._gptq(parts[0], torch.cat(weights), hessian)
        if parts == self._down:  # its scales lie by neuron already
            return {parts[0]: Int4Rows.of(codes.T.contiguous(), scales)}
        if parts == self._out:  # (d, h) -> a row for each head and output
            return {parts[0]: Int4Rows.of(layouts[0].to_rows(codes), scales.T.reshape(-1, 1))}
        n = [len(weight) for weight in weights]
        pairs = zip(codes.split(n), scales.split(n), strict=True)
        return {part: Int4Rows.of(*pair) for part, pair in zip(parts, pairs, strict=True)}

    def _gptq(self, part: str, weight: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (n, m) int8 of weight (n, m), and the scales of their grid."""
        (n, m), group, device = weight.shape, self.layouts[part].sizes.group, weight.device
        grid: InputGroups | OutputGroups
        if part in self._down:  # its scales are each neuron's own, so that inputs of large second moments come first
            order, grid = hessian.diagonal().argsort(descending=True, stable=True), OutputGroups(n, m, group, device)
        else:
            order, grid = torch.arange(m, device=device), InputGroups(n, m, group, device)
        codes = quantise_columns(weight[:, order], hessian[order][:, order], grid, self.config)
        back = order.argsort()
        return codes[:, back], grid.scales[back] if part in self._down else grid.scales


class Moments:
    """Sums over inputs (tokens, m), in their dtype: of themselves, (m,), and of their products with each other, (m, m).

    Both are of the inputs less the mean of the first ones. Means of inputs are far larger than their deviations.
    Without the shift a difference of large sums would be left, and of many tokens more rounding than difference.
    """

    def __init__(self) -> None:
        self.origin, self.sums, self.products_from_origin, self.tokens = (
            *(torch.empty(0, dtype=torch.float32) for _ in range(3)),
            0,
        )

    def add(self, inputs: Tensor, real: Tensor) -> None:
        """inputs (B, T, m), of which those at ``real`` (B, T) positions count."""
        rows = inputs[real]
        if not self.tokens:
            self.origin, self.sums = rows.mean(0), rows.new_zeros(rows.shape[1])
            self.products_from_origin = rows.new_zeros(rows.shape[1], rows.shape[1])
        rows = rows - self.origin
        self.products_from_origin.addmm_(rows.T, rows)
        self.sums += rows.sum(0)
        self.tokens += len(rows)

    @property
    def mean(self) -> Tensor:
        """(m,)"""
        return self.origin + self.sums / self.tokens

    def products(self) -> Tensor:
        """(m, m): of the inputs as they are."""
        both = self.sums + self.tokens * self.origin
        return self.products_from_origin.addr(self.origin, self.sums).addr_(both, self.origin)

    def centred(self) -> Tensor:
        """(m, m): of the inputs less their means. What never was anything but zero has zeros."""
        made = self.products_from_origin.addr(self.sums, self.sums / self.tokens, alpha=-1.0)
        # An input that hardly varies leaves a difference of rounding errors on the diagonal, of either sign.
        floor = (made.diagonal() + self.tokens * self.mean.square()) * 1e-6
        made.diagonal().copy_(torch.maximum(made.diagonal(), floor))
        return made


def squared(weight: Tensor, products: Tensor) -> float:
    """The sum of squares of all outputs X W' of weight (n, m), for products X' X (m, m) of their inputs."""
    return float(((weight @ products) * weight).sum())
