"""What a sparse model has to compute, in plain torch and without a cache: the oracle of the random programs.

It reads a bundle's tensors and specs as data and imports nothing that runs a sparse model. Whole sequences, float64,
every K and V: what the back-fill of ``gather`` and the engines reproduces. Modules are called, never read, so that
adapters and hooks on them count. fc1 of a cascade is the exception: its planes follow from the weight.

Letters: B rows, T positions, n units, d width, h heads, e head width.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import OPTForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

NEAR = 2e-5  # of a threshold: rounding may decide otherwise there


def plain_weight(module: nn.Module) -> Tensor:
    """The weight that a linear module, perhaps with LoRA adapters, multiplies with."""
    base = getattr(module, "base_layer", None)
    if base is None:
        return module.weight
    weight = base.weight
    if module.disable_adapters or module.merged:
        return weight
    for name in module.active_adapters:
        weight = weight + module.scaling[name] * (module.lora_B[name].weight @ module.lora_A[name].weight)
    return weight


def plain_bias(module: nn.Module) -> Tensor | None:
    return getattr(module, "base_layer", module).bias


class Planes:
    """fc1 of a cascade as whole numbers: upper (n, d), whole (n, d), and the unit of both (n, 1)."""

    def __init__(self, weight: Tensor, scale: Tensor, steps: Tensor) -> None:
        scale, steps = scale.double()[:, None], steps.double()[:, None]
        limit = 7 * steps + 2047
        whole = (weight.detach().float() / scale.float()).round().double().clamp(-limit, limit)
        self.upper = (whole / steps).round().clamp(-7, 7)
        self.whole = self.upper * steps + (whole - self.upper * steps).clamp(-2048, 2047)
        self.scale, self.step = scale, scale * steps
        # Gradients pass the rounding.
        self.weight = weight.double() + (self.whole * scale - weight.detach().double())

    def score(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pre-activations (..., n) by the upper plane and the rounded input, and whether a rounding was close."""
        peak = x.abs().amax(dim=-1, keepdim=True)
        peak = torch.where(peak > 0, peak, torch.ones_like(peak))
        levels = x * (127 / peak)
        close = ((levels - levels.floor() - 0.5).abs() < 2e-3).any(dim=-1, keepdim=True)
        return F.linear(levels.round(), self.upper) * self.step.T * (peak / 127), close


class Selection:
    """The predictors and thresholds of a bundle, read as data."""

    def __init__(self, bundle: Any) -> None:
        self.specs = {key: spec for key, spec in bundle.specs.items() if not spec.dense}
        self.tensors = bundle.tensors

    def part(self, layer: int, target: str, name: str) -> Tensor:
        return self.tensors[f"layers.{layer}.{target}.{name}"]

    def matrix(self, layer: int, target: str, name: str) -> Tensor:
        """A predictor's matrix as it multiplies: fp16 as stored, int8 times its scale."""
        stored = self.part(layer, target, name).double()
        if self.specs[layer, target].dtype == "int8":
            stored = stored * self.part(layer, target, name + "_scale").double()[:, None]
        return stored

    def __call__(self, layer: int, target: str, sites: dict[tuple[str, int], Tensor]) -> tuple[Tensor, Tensor] | None:
        """(keep (B, T, n), near (B, T): whether rounding may choose otherwise). None where the layer is dense."""
        spec = self.specs.get((layer, target))
        if spec is None:
            return None
        x = sites[spec.site, spec.site_layer].detach().double()
        logits = F.linear(F.linear(x, self.matrix(layer, target, "down")), self.matrix(layer, target, "up"))
        logits = logits + self.part(layer, target, "bias").double()
        if spec.threshold is not None:
            return logits > spec.threshold, (logits - spec.threshold).abs().amin(dim=-1) < NEAR
        order = logits.sort(dim=-1, descending=True)
        keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order.indices[..., : spec.top_k], True)
        edge = order.values[..., spec.top_k - 1 : spec.top_k + 1]
        return keep, (edge[..., 0] - edge[..., -1] < NEAR) & (spec.top_k < logits.shape[-1])

    def mean(self, layer: int) -> Tensor | None:
        """(h, e), what stands in for a skipped head."""
        spec = self.specs.get((layer, "heads"))
        return self.part(layer, "heads", "mean").double() if spec and spec.replacement == "mean" else None

    def planes(self, layer: int, fc1: nn.Module) -> Planes | None:
        spec = self.specs.get((layer, "mlp"))
        if spec is None or spec.kind != "cascade":
            return None
        return Planes(plain_weight(fc1), self.part(layer, "mlp", "fc1_scale"), self.part(layer, "mlp", "fc1_steps"))


class SparseOracle(OPTForCausalLM):
    """An OPT with a selection. ``generate`` of transformers works on it, without a cache.

    Attributes:
        selection: of a bundle.
        start: first sparse position, one for all rows or (B,).
        near: (B, T) bool of the last forward pass: whether rounding may have decided at or before a position.
    """

    selection: Selection
    start: int | Tensor
    near: Tensor

    def forward(
        self, input_ids=None, attention_mask=None, inputs_embeds=None, position_ids=None, logits_to_keep=0, **_
    ) -> Any:
        decoder = self.model.decoder
        hidden = decoder.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds.to(self.dtype)
        rows, columns = hidden.shape[:2]
        seen = torch.ones(rows, columns, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        positions = seen.long().cumsum(1) * seen - 1 if position_ids is None else position_ids.expand(rows, columns)
        hidden = hidden + F.embedding(positions + 2, decoder.embed_positions.weight)
        start = self.start
        if isinstance(start, Tensor):
            start = start.repeat_interleave(rows // len(start))[:, None]
        sparse = ((positions >= start) & seen)[..., None]
        index = torch.arange(columns)
        allowed = (seen[:, None, :] & (index <= index[:, None])) | (index == index[:, None])
        sites: dict[tuple[str, int], Tensor] = {}
        self.near = torch.zeros(rows, columns, dtype=torch.bool)

        def selected(layer: int, target: str) -> Tensor | None:
            chosen = self.selection(layer, target, sites)
            if chosen is None:
                return None
            self.near |= chosen[1] & sparse[..., 0]
            return chosen[0] | ~sparse

        for number, block in enumerate(decoder.layers):
            sites["attn_in", number] = x = block.self_attn_layer_norm(hidden)
            mixed = self._attend(block.self_attn, x, allowed)  # (B, T, h, e)
            keep = selected(number, "heads")
            if keep is not None:
                mean = self.selection.mean(number)
                mixed = torch.where(keep[..., None], mixed, (0.0 if mean is None else mean.to(mixed)))
            hidden = hidden + block.self_attn.out_proj(mixed.flatten(2))
            sites["mlp_in", number] = y = block.final_layer_norm(hidden)
            keep = selected(number, "mlp")
            planes = self.selection.planes(number, block.fc1)
            if planes is None:
                inner = block.fc1(y)
            else:
                bias = plain_bias(block.fc1)
                inner = F.linear(y, planes.weight.to(y), bias)
                assert keep is not None
                score, close = planes.score(y.detach().double())
                margin = (
                    score + bias.detach().double() - self.selection.part(number, "mlp", "stage2_threshold").double()
                )
                doubt = (margin.abs() < NEAR) | (close & (margin.abs() < 0.1))
                self.near |= (doubt & keep).any(dim=-1) & sparse[..., 0]
                keep = keep & ((margin > 0) | ~sparse)
            inner = torch.relu(inner)
            if keep is not None:
                inner = torch.where(keep, inner, 0.0)
            hidden = hidden + block.fc2(inner)
        self.near = self.near.long().cumsum(dim=1) > 0
        if decoder.final_layer_norm is not None:
            hidden = decoder.final_layer_norm(hidden)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, kept]))

    @staticmethod
    def _attend(attention: Any, x: Tensor, allowed: Tensor) -> Tensor:
        shape = (*x.shape[:2], attention.num_heads, attention.head_dim)
        query, key, value = (getattr(attention, f"{name}_proj")(x).view(shape).transpose(1, 2) for name in "qkv")
        scores = (query * attention.head_dim**-0.5) @ key.transpose(2, 3)
        weights = scores.masked_fill(~allowed[:, None], float("-inf")).softmax(dim=-1)
        return (weights @ value).transpose(1, 2)


def oracle_of(truth: OPTForCausalLM, bundle: Any, start: int | Tensor, double: bool = True) -> OPTForCausalLM:
    """The oracle for the weights of ``truth``: a copy of its own, or with ``double`` false the truth itself.

    Where the bundle selects everything it is transformers' own OPTForCausalLM.
    """
    made = copy.deepcopy(truth).double() if double else truth
    selection = Selection(bundle)
    if selection.specs:
        if not double:
            made = copy.copy(truth)  # another object around the same modules, so that gradients reach the truth
        made.__class__ = SparseOracle
        made.selection, made.start = selection, start
    return made.eval()


def near_of(oracle: OPTForCausalLM, ids: Tensor) -> Tensor:
    """(B, T) bool of the last forward pass: where rounding may have decided."""
    return oracle.near if isinstance(oracle, SparseOracle) else torch.zeros_like(ids, dtype=torch.bool)
