"""Reads an OPT model and a bundle, writes the tensors as the decode engine wants them: one layout for dense and sparse.

fc1 as stored (ffn, d); fc2 transposed to (ffn, d) where the MLP is sparse, so that a neuron is a row of both, and as
stored (d, ffn) where it is dense, so that every output row has one owner; q, k, v grouped by head
(h, 3, head_dim, d), so that a head is one contiguous range; the out-projection as stored (d, h * head_dim): a head's
columns of a row are contiguous, and every output row has one owner. Where an MLP runs as a cascade, fc1 exists as its
planes only.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu_train.errors import UserError
from dejavu_train.opt_model import DTYPES, OPTShape
from dejavu_train.planes import Planes
from kernels.cascade import CascadeWeights
from kernels.layer_norm import LayerNormWeights
from kernels.select import PredictorWeights

Grid = tuple[Tensor, Tensor, Tensor]
POSITION_ROWS = 2  # OPT's position table has two rows more than positions


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; see the module's docstring for the shapes."""

    norm1: LayerNormWeights
    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    out_bias: Tensor
    norm2: LayerNormWeights
    fc1: Tensor
    fc1_bias: Tensor
    fc2: Tensor
    fc2_bias: Tensor
    fc2_transposed: bool = False
    cascade: CascadeWeights | None = None

    def whole_fc1(self) -> Tensor:
        """fc1 (ffn, d) for dense products, out of its planes where it is stored so."""
        if self.cascade is None:
            return self.fc1
        upper, lower = self.cascade.parts()
        return upper.add_(lower).to(self.fc1.dtype)

    def with_planes(self, grid: Grid | None) -> "LayerWeights":
        """fc1 as planes of this grid with bars, or None: as it is. From planes it comes back as they hold it."""
        if (grid is None) == (self.cascade is None):
            return self
        if grid is None:
            return dataclasses.replace(self, fc1=self.whole_fc1(), cascade=None)
        planes = Planes.of(self.fc1, *grid[:2])
        cascade = CascadeWeights(
            planes.upper, planes.rest, planes.step, planes.scale, self.fc1_bias.float(), grid[2].to(self.fc1.device)
        )
        return dataclasses.replace(self, fc1=self.fc1.new_empty(0, self.fc1.shape[1]), cascade=cascade)

    def with_fc2(self, transposed: bool) -> "LayerWeights":
        """The same layer with fc2 this way round; the old layout is left to its owner."""
        if transposed == self.fc2_transposed:
            return self
        return dataclasses.replace(self, fc2=self.fc2.T.contiguous(), fc2_transposed=transposed)


@dataclass(frozen=True)
class DecodeWeights:
    """embedding (V, d), positions (P + 2, d), lm_head (V, d), which may be the embedding itself."""

    shape: OPTShape
    embedding: Tensor
    positions: Tensor
    layers: list[LayerWeights]
    final_norm: LayerNormWeights
    lm_head: Tensor

    @classmethod
    def from_model(
        cls, model: Any, dtype: torch.dtype, device: torch.device | str, release: bool = False
    ) -> "DecodeWeights":
        """Copy the weights of a Hugging Face OPTForCausalLM.

        Args:
            model: `OPTForCausalLM`, pre-norm.
            release: give up the model's own tensors layer by layer, so that a large model never exists twice.
        Raises:
            UserError: not a pre-norm ReLU OPT.
        """
        shape = OPTShape.from_config(model.config)
        decoder = model.model.decoder
        h, hd, d = shape.n_heads, shape.head_dim, shape.d_model

        def own(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device=device, dtype=dtype, copy=True).contiguous()

        def norm(module: Any) -> LayerNormWeights:
            return LayerNormWeights(own(module.weight), own(module.bias), module.eps)

        def bias(module: Any) -> Tensor:
            rows = module.weight.shape[0]
            return torch.zeros(rows, dtype=dtype, device=device) if module.bias is None else own(module.bias)

        layers = []
        for layer in decoder.layers:
            attention = layer.self_attn
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            qkv = torch.stack([own(part.weight).view(h, hd, d) for part in parts], dim=1)
            layers.append(
                LayerWeights(
                    norm1=norm(layer.self_attn_layer_norm),
                    qkv=qkv,
                    qkv_bias=torch.stack([bias(part).view(h, hd) for part in parts], dim=1),
                    out=own(attention.out_proj.weight),
                    out_bias=bias(attention.out_proj),
                    norm2=norm(layer.final_layer_norm),
                    fc1=own(layer.fc1.weight),
                    fc1_bias=bias(layer.fc1),
                    fc2=own(layer.fc2.weight),
                    fc2_bias=bias(layer.fc2),
                )
            )
            if release:
                for parameter in layer.parameters():
                    parameter.data = torch.empty(0, dtype=parameter.dtype)
        embedding = own(decoder.embed_tokens.weight)
        tied = model.lm_head.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()
        return cls(
            shape=shape,
            embedding=embedding,
            positions=own(decoder.embed_positions.weight),
            layers=layers,
            final_norm=norm(decoder.final_layer_norm),
            lm_head=embedding if tied else own(model.lm_head.weight),
        )

    @classmethod
    def random(
        cls, shape: OPTShape, dtype: torch.dtype, device: torch.device | str, seed: int = 0, std: float = 0.02
    ) -> "DecodeWeights":
        """Random weights of a true shape, made on the device: for benchmarks. Layers share nothing."""
        generator = torch.Generator(device).manual_seed(seed)
        d, ffn, h, hd = shape.d_model, shape.d_ffn, shape.n_heads, shape.head_dim

        def normal(*sizes: int) -> Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device).normal_(0, std, generator=generator)

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        def norm() -> LayerNormWeights:
            return LayerNormWeights(torch.ones(d, dtype=dtype, device=device), zeros(d))

        layers = [
            LayerWeights(
                norm1=norm(),
                qkv=normal(h, 3, hd, d),
                qkv_bias=zeros(h, 3, hd),
                out=normal(d, h * hd),
                out_bias=zeros(d),
                norm2=norm(),
                fc1=normal(ffn, d),
                fc1_bias=zeros(ffn),
                fc2=normal(d, ffn),
                fc2_bias=zeros(d),
            )
            for _ in range(shape.n_layers)
        ]
        embedding = normal(shape.vocab_size, d)
        positions = normal(shape.max_positions + POSITION_ROWS, d)
        return cls(shape, embedding, positions, layers, norm(), embedding)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that a dense step reads, each once (the embedding as the LM head)."""
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.fc1, layer.fc2)
            if layer.cascade is not None:
                yield from (layer.cascade.upper, layer.cascade.rest)
        yield self.lm_head


@dataclass(frozen=True)
class TargetPredictor:
    """The predictor of one (layer, target) on the device. threshold (1) fp32; folded (h, d) = up @ down and mean
    (h, head_dim) fp32, what stands in for a skipped head, heads only. density: what one row selects on average;
    frequency (n) fp32 on the CPU, how often each unit is needed, or None. grid: of a cascade, see `Bundle.cascades`."""

    layer: int
    target: str
    site: str
    site_layer: int
    weights: PredictorWeights
    threshold: Tensor
    top_k: int | None
    folded: Tensor | None
    bias: Tensor
    density: float
    mean: Tensor | None = None
    frequency: Tensor | None = None
    grid: Grid | None = None


def load_predictors(
    bundle: Any, shape: OPTShape, dtype: torch.dtype, device: torch.device | str, codes: bool = False
) -> dict[tuple[int, str], TargetPredictor]:
    """The predictors of a bundle by (layer, target); dense entries are left out.

    A head predictor without a nonlinearity is folded into one matrix of h rows: one stage instead of two, and fewer
    bytes wherever the rank exceeds h.

    Args:
        dtype: of the model; predictors are kept in it.
        codes: keep entries of int8 or int4 as codes with row scales (int4 a byte a code): what one row at a time
            wants. Several rows are a library's matrix product, which takes one dtype.
    Raises:
        UserError: thresholds that were never calibrated.
    """
    predictors = {}
    means = bundle.head_means(device)
    grids = bundle.cascades()
    for (layer, target), entry in bundle.entries.items():
        if entry.threshold is None and entry.top_k is None:
            calibrated = entry.keep_dense or bool(entry.curve)
            if not calibrated:
                raise UserError(
                    f"the {target} predictor of layer {layer} was never calibrated (no threshold and no curve);"
                    " run python -m dejavu_train.calibrate on this bundle"
                )
            continue
        module = bundle.predictor(layer, target)
        down, up = module.down.detach().float(), module.up.detach().float()
        bias = torch.zeros(len(up)) if module.bias is None else module.bias.detach().float()
        relu = module.nonlinearity == "relu"
        folded = None
        if target == "heads" and not relu and entry.top_k is None:
            if (entry.site, entry.site_layer) == ("attn_in", layer):
                folded = (up @ down).to(device=device, dtype=dtype)
        if entry.dtype in DTYPES or not codes:
            weights = PredictorWeights(
                down.to(device=device, dtype=dtype), up.to(device=device, dtype=dtype), bias.to(device), relu=relu
            )
        else:
            (down, down_scale), (up, up_scale) = (bundle.codes(layer, target, part) for part in ("down", "up"))
            weights = PredictorWeights(
                down.to(device), up.to(device), bias.to(device), down_scale.to(device), up_scale.to(device), relu
            )
        predictors[layer, target] = TargetPredictor(
            layer,
            target,
            entry.site,
            entry.site_layer,
            weights,
            torch.tensor([entry.threshold or 0.0], dtype=torch.float32, device=device),
            entry.top_k,
            folded,
            bias.to(device),
            entry.density,
            means.get(layer) if target == "heads" else None,
            bundle.frequency(layer, target),
            grids.get(layer) if target == "mlp" else None,
        )
    return predictors
