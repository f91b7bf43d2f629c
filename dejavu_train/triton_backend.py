"""The backend ``triton``: the step of ``gather`` by kernels, over the same SparseCache, for Hugging Face's own loops.

Serves ``generate()`` with everything that transformers does there (beams, left padding, assisted decoding); the decode
engine is the fast form. Dense columns of a prompt run as in ``gather``. q, k and v exist a second time, grouped by head
(a quarter of the model's weights), and so does fc1 of a cascade, as planes; a model that barely fits the GPU wants the
engine.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import OPTForCausalLM

from dejavu_train.bundle import Bundle
from dejavu_train.decode_weights import TargetPredictor, load_predictors
from dejavu_train.errors import UserError
from dejavu_train.gather import GatherDecoder
from dejavu_train.opt_model import OPTShape
from dejavu_train.sparse_cache import SparseCache, SparseLayer
from kernels import cascade, flash_decode, gather_gemv, head_select, layer_norm, qkv, scatter_gemv, select
from kernels.attention_common import HEAD_DIMS, INTERPRET
from kernels.launch import MAX_BATCH


class TritonDecoder(GatherDecoder):
    """Runs the blocks of an OPT with a SparseCache, sparse columns through the Triton kernels.

    Args:
        model: on one GPU (or anywhere under TRITON_INTERPRET=1); its fc2 and output projection are re-laid in place.
        bundle: predictors and thresholds.
        kv_policy: as in `GatherDecoder`.
    Raises:
        UserError: no GPU, a model spread over several devices, a head dim without kernels, an uncalibrated bundle.
    """

    def __init__(self, model: OPTForCausalLM, bundle: Bundle, kv_policy: str = "backfill") -> None:
        shape = OPTShape.from_config(model.config)
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise UserError("the triton backend runs on one device; leave device_map out, or use backend='gather'")
        (device,) = devices
        if device.type != "cuda" and not INTERPRET:
            raise UserError("the triton backend needs a GPU; use backend='gather' here")
        if shape.head_dim not in HEAD_DIMS:
            dims = ", ".join(map(str, HEAD_DIMS))
            raise UserError(f"head dim {shape.head_dim} has no kernels (there are {dims}); use backend='gather'")
        super().__init__(model, bundle, kv_policy)
        self.shape = shape
        self._predictors = load_predictors(bundle, shape, model.dtype, device)
        self._by_site: dict[tuple[int, str], list[TargetPredictor]] = {}
        for predictor in self._predictors.values():
            self._by_site.setdefault((predictor.site_layer, predictor.site), []).append(predictor)
        self._qkv = [_grouped(block.self_attn, shape) for block in self.blocks]
        self._planes = {
            layer: cascade.CascadeWeights(**vars(test.planes), bias=test.bias, bar=test.bar)
            for layer, test in self.tests.items()
        }
        self._norms = [
            tuple(
                layer_norm.LayerNormWeights(norm.weight.detach(), norm.bias.detach(), norm.eps)
                for norm in (block.self_attn_layer_norm, block.final_layer_norm)
            )
            for block in self.blocks
        ]

    def _step(self, hidden: Tensor, cache: SparseCache, visible: Tensor, alive: Tensor, dense_rows: Tensor) -> Tensor:
        """One column: hidden (B, d), visible (B, S + 1), alive and dense_rows (B,) bool."""
        batch = hidden.shape[0]
        if batch > MAX_BATCH:
            raise UserError(f"the triton backend takes at most {MAX_BATCH} rows (beams included), got {batch}")
        row_state = torch.where(alive, torch.where(dense_rows, 2, 1), 0).to(torch.int32)
        column = visible.shape[1] - 1
        x = hidden.float().contiguous()
        selections: dict[tuple[int, str], select.Selection] = {}
        for number, (block, layer) in enumerate(zip(self.blocks, cache.layers, strict=True)):
            norm1, norm2 = self._norms[number]
            self._predict(number, "attn_in", x, norm1, row_state, selections)
            layer.extend(torch.zeros_like(hidden)[:, None], self.shape.n_heads)
            heads = self._selected(number, "heads", alive, selections)
            attended = self._attend(number, layer, x, norm1, heads, visible, row_state)
            middle, after = torch.empty_like(x), torch.empty_like(x)
            attention = block.self_attn
            scatter_gemv.scatter_gemv(
                attended, attention.out_proj.weight.t(), self.out_biases[number], x, heads, middle, self.shape.head_dim
            )
            self._predict(number, "mlp_in", middle, norm2, row_state, selections)
            chosen = selections.get((number, "mlp"))
            made: Any = (
                torch.empty(batch, self.shape.d_ffn, device=x.device)
                if chosen is None
                else gather_gemv.LiveRows.empty(self.shape.d_ffn, batch, x.device)
            )
            if chosen is not None and number in self._planes:
                made = self._tested(number, middle, norm2, chosen, row_state)
            else:
                gather_gemv.gather_gemv(middle, block.fc1.weight, block.fc1.bias, chosen, "relu", made, norm2)
            scatter_gemv.scatter_gemv(made, block.fc2.weight.t(), block.fc2.bias, middle, None, after)
            if self.on_select is not None:
                self.on_select(number, "heads", column, heads.to_mask(batch))
                keep = alive[:, None].expand(batch, self.shape.d_ffn) if chosen is None else chosen.to_mask(batch)
                self.on_select(number, "mlp", column, keep)
            x = after
        return x.to(hidden.dtype)

    def _tested(
        self,
        number: int,
        x: Tensor,
        norm: layer_norm.LayerNormWeights,
        chosen: select.Selection,
        row_state: Tensor,
    ) -> gather_gemv.LiveRows:
        """fc1 of a cascade; ``chosen`` becomes what passes the second test."""
        normalised = torch.empty(x.shape, dtype=self.blocks[number].fc1.weight.dtype, device=x.device)
        layer_norm.layer_norm(x, norm, normalised)
        made = cascade.cascade_rows(self.shape.d_ffn, self.shape.d_model, len(x), chosen.block, x.device)
        cascade.cascade(normalised, self._planes[number], chosen, made, row_state)
        return made

    def _predict(
        self,
        number: int,
        site: str,
        x: Tensor,
        norm: layer_norm.LayerNormWeights,
        row_state: Tensor,
        selections: dict[tuple[int, str], select.Selection],
    ) -> None:
        """Run every predictor that reads this site."""
        for predictor in self._by_site.get((number, site), []):
            made = select.Selection.empty(self.shape.units(predictor.target), x.device)
            select.predict_select(
                x, predictor.weights, predictor.threshold, made, norm, row_state, predictor.top_k
            )  # fmt: skip
            selections[predictor.layer, predictor.target] = made

    def _selected(
        self, number: int, target: str, alive: Tensor, selections: dict[tuple[int, str], select.Selection]
    ) -> select.Selection:
        """A dense layer selects everything for the rows that go on: the watermarks stay right if the bundle changes."""
        if (number, target) in selections:
            return selections[number, target]
        made = head_select.head_selection(self.shape.n_heads, alive.device)
        made.set_mask(alive[:, None].expand(len(alive), self.shape.n_heads))
        return made

    def _attend(
        self,
        number: int,
        layer: SparseLayer,
        x: Tensor,
        norm: layer_norm.LayerNormWeights,
        heads: select.Selection,
        visible: Tensor,
        row_state: Tensor,
    ) -> Tensor:
        """Attention of the last column over the selected heads: (B, d) fp32."""
        assert layer.keys is not None and layer.values is not None and layer.attn_in is not None
        assert layer.watermark is not None and layer.valid is not None
        batch, room, column = x.shape[0], layer.keys.shape[2], layer.length - 1
        n_heads, head_dim = self.shape.n_heads, self.shape.head_dim
        position = torch.full((batch,), column, dtype=torch.int32, device=x.device)
        head_select.head_select(x, norm, None, None, None, position, row_state, layer.attn_in, heads)
        query = torch.empty(batch, n_heads, head_dim, device=x.device)
        watermark = layer.watermark.to(torch.int32)
        stale = layer.valid.view(torch.uint8) if self.kv_policy == "stale" else None
        weight, bias = self._qkv[number]
        qkv.qkv(
            layer.attn_in, weight, bias, heads, position, watermark, stale, query, layer.keys, layer.values,
            self.kv_policy,
        )  # fmt: skip
        seen = None
        if stale is not None or not bool(visible.all()):
            seen = torch.zeros(batch, n_heads, room, dtype=torch.uint8, device=x.device)
            seen[:, :, : visible.shape[1]] = visible[:, None]
            seen = seen if stale is None else seen & stale
        out = torch.empty(batch, n_heads * head_dim, device=x.device)
        scratch = flash_decode.AttentionScratch.empty(batch, n_heads, head_dim, room, x.device)
        mean = self.head_means[number]
        flash_decode.flash_decode(
            query, layer.keys, layer.values, heads, position, watermark, seen, out, scratch,
            mean=None if mean is None else mean.float().contiguous(),
        )  # fmt: skip
        layer.watermark.copy_(watermark)
        if self.kv_policy == "always":
            layer.watermark.fill_(layer.length)
        # Padding is never looked at, so nothing is missing where a row has only had padding.
        skipped = ~visible[:, column, None] & (layer.watermark == column)
        layer.watermark[skipped] = layer.length
        return out


def _grouped(attention: Any, shape: OPTShape) -> tuple[Tensor, Tensor]:
    """q, k, v of one layer grouped by head: weight (h, 3, head_dim, d), bias (h, 3, head_dim)."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    weight = torch.stack([part.weight.detach().view(shape.n_heads, shape.head_dim, -1) for part in parts], dim=1)
    biases = [torch.zeros_like(part.weight[:, 0]) if part.bias is None else part.bias.detach() for part in parts]
    return weight, torch.stack([bias.view(shape.n_heads, shape.head_dim) for bias in biases], dim=1)
