"""The backend ``gather``: reads the selected rows of the weights and no others, one token at a time.

The reference for the semantics of sparse decoding, in plain torch, for any device. Weights are laid out so that a unit
is a row. The maps into the neurons are as stored. The one out of them and the output projection are transposed once.
The model's own parameters become views of the transposed memory, and nothing is kept twice. q, k and v are as stored,
where a head's rows lie together. The union of the batch's selections decides what is read. Each row is masked by its
own selection. Heads that share K and V are selected together. Of the map out of the neurons, rows are read whose neuron
is not zero in some batch row.

Letters: B batch rows, T columns, S columns in the cache, d model width. There are h heads, g of K and V, each e wide,
and u units in the union.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.guard import GuardState
from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.families import BlockParts, Site, Target, UnitKey, family_of
from dejavu_train.families.block import alibi, before_half, behind_half, forward_block, repeat_groups, split_heads
from dejavu_train.families.fused import FusedPart
from dejavu_train.families.plain import check_calls, plain_blocks
from dejavu_train.models.finite import check_finite, finite_positions
from dejavu_train.models.hooks import head_contribution, neuron_contribution
from dejavu_train.models.layer_exchange import first
from dejavu_train.predictors.bit_planes import SecondStage
from dejavu_train.sparse.cache import SparseCache, SparseLayer

OnSelect = Callable[[int, Target, int, Tensor], None]


@dataclass
class _Column:
    """One column on its way through the layers.

    Attributes:
        positions: (B, 1). visible: (B, S + 1) bool.
        alive, dense_rows, judged: (B,) bool: rows that go on, that select everything, that a guard measures.
        guard: where it measures this column. sites: what predictors read.
    """

    positions: Tensor
    visible: Tensor
    alive: Tensor
    dense_rows: Tensor
    judged: Tensor
    guard: GuardState | None = None
    sites: dict[Site, Tensor] = field(default_factory=dict)


class GatherDecoder:
    """Runs the blocks of a model with a SparseCache.

    Args:
        model: its maps out of neurons and heads are re-laid in place (same values, other strides). Adapters are
            merged into copies.
        bundle: predictors and thresholds.
        guard: every N-th sparse column is dense and moves thresholds, see ``bundle/guard.py``.
    Raises:
        NotPlain: a module that must be called, and whose rows are read instead.
    """

    def __init__(self, model: PreTrainedModel, bundle: Bundle, guard: GuardState | None = None) -> None:
        family = family_of(model)
        self.blocks = plain_blocks(model)
        self.final_norm = family.final_norm(model)
        called: list[Any] = [part for block in self.blocks for part in (block.norm_attn, block.norm_mlp, block.beside)]
        called += [block.whole for block in self.blocks if not block.targets]
        called += [*family.embeddings(model), model.get_output_embeddings()]
        called = [part for part in (*called, self.final_norm) if part is not None]
        check_calls(model, called, itself=True)
        self.devices = [block.device for block in self.blocks]
        self.selector = PredictorSelector(bundle, self.devices[0])  # of a cascade: the candidates
        self.second_stages = {
            layer: second_stage
            for layer, second_stage in bundle.second_stages([block.up for block in self.blocks]).items()
            if not bundle.specs[UnitKey(layer, Target.MLP)].dense
        }
        self.on_select: OnSelect | None = None
        """Called as ``on_select(layer, target, column, keep)`` with ``keep`` (B, n) bool at every sparse step."""
        for block in self.blocks:
            for linear in filter(None, (block.down, block.out)):
                if not linear.weight.t().is_contiguous():
                    with torch.inference_mode(linear.weight.is_inference()):  # tensors of that mode take no others
                        linear.weight.data = linear.weight.data.t().contiguous().t()
        self.guard = guard
        if guard is not None:
            self.selector.thresholds = {key: guard.threshold(key) for key in guard.rows}
        # A mean that stands in for skipped heads is read with the bias: W (keep ? o - mean : 0) + (b + W mean).
        means = bundle.head_means()
        outs = {number: block.out for number, block in enumerate(self.blocks) if block.out is not None}
        self.head_means = {number: means[number].to(out.weight) for number, out in outs.items() if number in means}
        self.out_biases = {number: _folded_bias(out, self.head_means.get(number)) for number, out in outs.items()}

    @torch.no_grad()
    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        cache: SparseCache,
        sparse: Tensor,
        visible: Tensor,
        live: Tensor | None = None,
    ) -> Tensor:
        """Append T columns to the cache.

        Args:
            hidden: (B, T, d), what the first layer reads. positions: (B, T) int64.
            sparse: (B, T) bool. False where a row is dense (before ``sparse_from``).
            visible: (B, S + T) bool. False for padding.
            live: (B,) bool. Rows that ``generate`` has ended are false, they select nothing.
        Returns: (B, T, d), after the last norm.
        """
        past = cache.get_seq_length()
        real = visible[:, past:]
        sparse = sparse & real
        sparse_columns = sparse.any(dim=0).nonzero()
        begin = int(sparse_columns[0]) if len(sparse_columns) else hidden.shape[1]
        parts = []
        if begin:
            parts.append(self._chunk(hidden[:, :begin], positions[:, :begin], cache, visible[:, : past + begin]))
        for column in range(begin, hidden.shape[1]):
            alive = real[:, column] if live is None else real[:, column] & live
            dense_rows = alive & ~sparse[:, column]
            at, seen = positions[:, column, None], visible[:, : past + column + 1]
            now = _Column(at, seen, alive, dense_rows, alive & ~dense_rows)
            parts.append(self._step(hidden[:, column], now, cache)[:, None])
        last = torch.cat(parts, dim=1)
        out = last if self.final_norm is None else self.final_norm(last)
        shown = real if live is None else real & live[:, None]
        inputs = [*cache.inputs(past), last]

        def finite() -> list[Tensor | None]:
            return [None if each is None else finite_positions(each) for each in inputs]

        check_finite(out, shown, finite, len(self.blocks))
        return out

    def _chunk(self, hidden: Tensor, positions: Tensor, cache: SparseCache, visible: Tensor) -> Tensor:
        """Dense columns, all at once: hidden (B, T, d), positions (B, T), visible (B, S + T)."""
        for number, layer in enumerate(cache.layers):
            block, device = self._whole(number), self.devices[number]
            if not block.targets:
                block = replace(block, whole=partial(self._call, number, cache, visible))
            at = positions.to(device)
            hidden, _ = forward_block(
                block, hidden.to(device), partial(self._attend_at_once, block, layer, at, visible), at
            )
        return hidden

    def _call(self, number: int, cache: SparseCache, visible: Tensor, hidden: Tensor) -> Tensor:
        """(B, T, d) behind a layer without a target, as transformers runs it. ``cache`` holds its state.

        Args:
            visible: (B, S + T) bool. hidden: (B, T, d).
        """
        real = visible[:, -hidden.shape[1] :].to(hidden.device)
        return first(self.blocks[number].whole(hidden, past_key_values=cache, attention_mask=real))

    def _attend_at_once(
        self,
        block: BlockParts,
        layer: SparseLayer,
        positions: Tensor,
        visible: Tensor,
        attn_in: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Attention of new columns over all. K and V of earlier columns that a head lacks are computed as well."""
        start = layer.extend(attn_in, positions, k.shape[1], block.head_dim)
        assert layer.positions is not None
        assert layer.keys is not None and layer.values is not None and layer.attn_in is not None
        assert layer.watermark is not None
        low = int(layer.watermark.min())
        if low < start:
            missing = layer.attn_in[:, low:start]
            keys = split_heads(block.k(missing), block.head_dim)
            layer.keys[:, :, low:start] = block.keys(keys, layer.positions[:, low:start])
            layer.values[:, :, low:start] = split_heads(block.v(missing), block.head_dim)
        layer.keys[:, :, start : layer.length], layer.values[:, :, start : layer.length] = k, v
        layer.watermark.fill_(layer.length)
        allowed = visible.to(q.device)[:, None, None, :].expand(-1, 1, q.shape[2], -1)
        columns = torch.arange(layer.length, device=q.device)
        own = columns[start:, None]
        # A padded query may see itself only: a softmax over nothing would be NaN and spread through the cache.
        allowed = (allowed & (columns <= own)) | (columns == own)
        keys, values = repeat_groups(q, layer.keys[:, :, : layer.length], layer.values[:, :, : layer.length])
        if block.slopes is not None:
            gained = alibi(block.slopes, positions, layer.positions[:, : layer.length])
            allowed = gained.masked_fill(~allowed, -torch.inf).to(q.dtype)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed, scale=1.0)

    def _whole(self, number: int) -> BlockParts:
        """A layer to be called. Where it has a cascade, ``up`` multiplies by the planes."""
        block = self.blocks[number]
        if number not in self.second_stages:
            return block
        planes = self.second_stages[number].planes
        return replace(block, up=lambda mlp_in: F.linear(mlp_in, planes.weight().to(mlp_in), block.up.bias))

    def _step(self, hidden: Tensor, column: "_Column", cache: SparseCache) -> Tensor:
        """One column: hidden (B, d)."""
        if self.guard is not None and self.guard.due():
            column.guard, column.dense_rows = self.guard, column.alive
        for number, (block, layer) in enumerate(zip(self.blocks, cache.layers, strict=True)):
            hidden = hidden.to(self.devices[number])
            for target in block.targets:
                half = self._heads_half if target == Target.HEADS else self._neurons_half
                hidden = half(number, layer, hidden, column)
            if not block.targets:
                hidden = self._call(number, cache, column.visible, hidden[:, None])[:, 0]
        if column.guard is not None:
            column.guard.move(column.judged)
        return hidden

    def _select(self, key: UnitKey, n_units: int, column: "_Column", device: torch.device) -> tuple[Any, Tensor]:
        """Choice (B, n) of the predictor, None where there is none, and what is computed."""
        chosen = self.selector(*key, column.sites)
        rows = column.alive.to(device)[:, None]
        keep = rows.expand(-1, n_units) if chosen is None else chosen.to(device) & rows
        return chosen, keep | (column.dense_rows & column.alive).to(device)[:, None]

    def _report(self, key: UnitKey, column: "_Column", keep: Tensor) -> None:
        if self.on_select is not None:
            self.on_select(*key, column.visible.shape[1] - 1, keep)

    def _heads_half(self, number: int, layer: SparseLayer, hidden: Tensor, column: "_Column") -> Tensor:
        block, key = self.blocks[number], UnitKey(number, Target.HEADS)
        column.sites[key.site] = attn_in = before_half(block, block.norm_attn, hidden)
        layer.extend(attn_in[:, None], column.positions.to(hidden.device), block.n_groups, block.head_dim)
        chosen, keep = self._select(key, block.n_groups, column, hidden.device)
        self._report(key, column, keep)

        def measure(mixed: Tensor) -> None:
            if column.guard is not None and chosen is not None:
                contribution = head_contribution(mixed, block.out.weight)
                column.guard.measure(key, column.judged, chosen, chosen, contribution)

        out = self._attention(number, layer, attn_in, keep, column.visible.to(hidden.device), measure)
        return behind_half(block, block.norm_attn, hidden + out)

    def _neurons_half(self, number: int, _layer: Any, hidden: Tensor, column: "_Column") -> Tensor:
        block, key, stage = self.blocks[number], UnitKey(number, Target.MLP), self.second_stages.get(number)
        column.sites[key.site] = mlp_in = before_half(block, block.norm_mlp, hidden)
        chosen, keep = self._select(key, block.up.out_features, column, hidden.device)
        if column.guard is not None and chosen is not None:
            passed = chosen if stage is None else chosen & stage.passed(mlp_in).to(chosen.device)
            contribution = neuron_contribution(self._whole(number).neurons(mlp_in), block.down.weight)
            column.guard.measure(key, column.judged, chosen, passed, contribution)
        if stage is None:
            out = _mlp(block, mlp_in, keep)
        else:
            out, keep = _cascade(block, stage, mlp_in, keep, column.dense_rows.to(hidden.device))
        self._report(key, column, keep)
        return behind_half(block, block.norm_mlp, hidden + block.with_beside(mlp_in, out))

    def _attention(
        self,
        number: int,
        layer: SparseLayer,
        attn_in: Tensor,
        keep: Tensor,
        visible: Tensor,
        see: Callable[[Tensor], None],
    ) -> Tensor:
        """Attention of the last column over the selected heads, projected: (B, d).

        see: is shown the outputs of these groups (B, u, h / g * e), less the means that stand in for skipped ones.
        """
        assert layer.keys is not None and layer.values is not None and layer.positions is not None
        block, mean, bias = self.blocks[number], self.head_means.get(number), self.out_biases[number]
        self._compute_kv(block, layer, keep, visible)
        groups = keep.any(dim=0).nonzero().flatten()
        if len(groups) == 0:
            return torch.zeros_like(attn_in) if bias is None else bias.expand_as(attn_in)
        width = block.n_heads // block.n_groups * block.head_dim
        query = _project(block.q, groups, width, attn_in).unflatten(-1, (-1, 1, block.head_dim)).flatten(1, 2)
        query = block.queries(query, layer.positions[:, layer.length - 1, None]) * block.scaling
        query = query.view(len(query), len(groups), -1, block.head_dim)  # (B, u, h / g, e)
        read = partial(_units, units=groups, dim=1)
        keys, values = read(layer.keys)[:, :, : layer.length], read(layer.values)[:, :, : layer.length]
        # In fp32: a score of an OPT can be ten times what fp16 holds.
        scores = query.float() @ keys.float().transpose(-1, -2)
        if block.slopes is not None:
            seen = layer.positions[:, : layer.length]
            gained = alibi(block.slopes, seen[:, -1:], seen).unflatten(1, (block.n_groups, -1)).squeeze(3)
            scores = scores + read(gained)
        weights = torch.softmax(scores.masked_fill(~visible[:, None, None, :], torch.finfo(torch.float32).min), dim=-1)
        mixed = (weights @ values.float()).flatten(2).to(query.dtype)
        if mean is not None:
            mixed = mixed - _units(mean, groups)
        see(mixed)
        mixed = torch.where(keep[:, groups, None], mixed, 0.0)  # a row is masked by its own selection
        rows = _units(block.out.weight.t().unflatten(0, (block.n_groups, -1)), groups)  # (u, h / g * e, d)
        out = mixed.flatten(1) @ rows.flatten(0, 1)
        return out if bias is None else out + bias

    def _compute_kv(self, block: BlockParts, layer: SparseLayer, keep: Tensor, visible: Tensor) -> None:
        """K and V of the heads ``keep`` (B, g), of the last column and of earlier ones that these heads lack."""
        assert layer.watermark is not None
        column = layer.length - 1
        lowest = torch.where(keep, layer.watermark, column).amin(dim=0)
        union = keep.any(dim=0)
        fresh = (union & (lowest == column)).nonzero().flatten()
        if len(fresh):
            self._write_kv(block, layer, fresh, column, keep)
        for head in (union & (lowest < column)).nonzero().flatten():
            self._write_kv(block, layer, head[None], int(lowest[head]), keep)
        layer.watermark[keep] = layer.length
        # Padding is never looked at, so nothing is missing where a row has only had padding.
        skipped = ~visible[:, column, None] & (layer.watermark == column)
        layer.watermark[skipped] = layer.length

    def _write_kv(self, block: BlockParts, layer: SparseLayer, heads: Tensor, low: int, keep: Tensor) -> None:
        """Compute K and V of ``heads`` (u of g) from column ``low`` on, for the rows that keep and lack them."""
        assert layer.keys is not None and layer.values is not None and layer.attn_in is not None
        assert layer.watermark is not None and layer.positions is not None
        source = layer.attn_in[:, low : layer.length]  # (B, L, d)
        columns = torch.arange(low, layer.length, device=source.device)
        write = keep[:, heads, None] & (columns >= layer.watermark[:, heads, None])  # (B, u, L)
        for linear, stored in ((block.k, layer.keys), (block.v, layer.values)):
            projected = _project(linear, heads, block.head_dim, source).transpose(1, 2)  # (B, u, L, e)
            if linear is block.k:
                projected = block.keys(projected, layer.positions[:, low : layer.length])
            old = stored[:, heads, low : layer.length]
            stored[:, heads, low : layer.length] = torch.where(write[..., None], projected, old)


def _folded_bias(projection: Any, mean: Tensor | None) -> Tensor | None:
    """The output projection's bias (d,), with the projected means of all heads (h, e) added."""
    if mean is None:
        return projection.bias
    folded = projection.weight.float() @ mean.float().flatten()
    return (
        (folded if projection.bias is None else folded + projection.bias.float()).to(projection.weight.dtype).detach()
    )


def _cascade(
    block: BlockParts, second_stage: SecondStage, mlp_in: Tensor, keep: Tensor, dense_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """`_mlp` over the candidates ``keep`` (B, n) that pass the second stage, and which those are: (B, d), (B, n) bool.

    Reads the upper plane of the candidates and both planes of what passes. Rows of ``dense_rows`` (B,) skip the test.
    """
    units = keep.any(dim=0).nonzero().flatten()
    passed = keep.clone()
    passed[:, units] &= second_stage.passed(mlp_in, units) | dense_rows[:, None]
    units = passed.any(dim=0).nonzero().flatten()
    return _mlp(block, mlp_in, passed, second_stage.planes.weight(units).to(mlp_in)), passed


def _mlp(block: BlockParts, mlp_in: Tensor, keep: Tensor, rows: Tensor | None = None) -> Tensor:
    """The MLP (B, d) over the selected neurons, for mlp_in (B, d) and keep (B, n). rows: those of ``up``, if read."""
    units = keep.any(dim=0).nonzero().flatten()

    def selected(linear: Any, rows: Tensor | None) -> Callable[[Tensor], Tensor]:
        return partial(
            F.linear, weight=_units(linear.weight, units) if rows is None else rows, bias=_bias(linear, units)
        )

    gate = None if block.gate is None else selected(block.gate, None)
    neurons = replace(block, up=selected(block.up, rows), gate=gate).neurons(mlp_in)
    hidden = torch.where(keep[:, units], neurons, 0.0)
    live = (hidden != 0).any(dim=0).nonzero().flatten()  # NaN is not zero: it is never left out
    hidden, units = _units(hidden, live, dim=1), _units(units, live)
    out = (hidden @ _units(block.down.weight.t(), units).to(hidden.dtype)).to(mlp_in.dtype)
    return out if block.down.bias is None else out + block.down.bias


def _units(tensor: Tensor, units: Tensor, dim: int = 0) -> Tensor:
    """The rows ``units`` of ``tensor``. All of them are not copied."""
    return tensor if len(units) == tensor.shape[dim] else tensor.index_select(dim, units)


def _bias(linear: Any, units: Tensor) -> Tensor | None:
    return None if linear.bias is None else _units(linear.bias, units)


def _project(linear: Any, groups: Tensor, width: int, x: Tensor) -> Tensor:
    """x (..., d) through the rows of ``groups`` (u) of a q, k or v projection, ``width`` each: (..., u, width)."""
    parts = linear.rows if isinstance(linear, FusedPart) else linear.weight.unflatten(0, (-1, width))
    rows = _units(parts, groups).flatten(0, 1)
    bias = None if linear.bias is None else _units(linear.bias.unflatten(0, (-1, width)), groups).flatten()
    return F.linear(x, rows, bias).unflatten(-1, (-1, width))
