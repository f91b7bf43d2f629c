"""Tensors that one half of a layer leaves for a later one, in one place for all layers."""

import torch
from torch import Tensor

from dejavu_train.engine.planned import StepPlan
from dejavu_train.engine.predictors import TargetPredictor
from dejavu_train.engine.weights import LayerWeights
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.late_norm import LateNorm
from dejavu_train.kernels.common.limits import MOST_TOKENS
from dejavu_train.kernels.lookahead.mlp_ahead import LateSite
from dejavu_train.kernels.mlp.pack import PackedSelection
from dejavu_train.kernels.stages.predictor import HeadSite


class CarriedBuffers:
    """Buffers that carry one half of a layer over to another. All but `factors` are written and read within a step.

    | buffer | shape | written by | read by | begun anew by |
    | --- | --- | --- | --- | --- |
    | inputs | (1, T, d) | site_predict, or the sums of mlp_ahead | qkv_select | each layer |
    | estimate | (2) | products of mlp_ahead | its sums, qkv_select | each layer |
    | moments | (2) | sums of mlp_ahead | qkv_select | products of mlp_ahead |
    | factors, one a layer | (T, 2) | qkv_select | qkv_select, later steps too | no one |
    | hidden, one a layer | (1, rank) | site_predict, or qkv_select itself | qkv_select | each step |
    | arrived | (1) | qkv_select | qkv_select | sums of mlp_ahead |
    | normalised | (B, d) | the MLP's predictor, or layer_norm | the MLP | each layer |
    | packed | (n) | pack, attend_pack, or the predictor | an MLP over a list | each layer |

    inputs and factors are written at the present position. estimate and moments are of a norm that comes late.
    arrived counts programs that have made hidden. packed is the list of neurons without gaps.
    """

    def __init__(self, plan: StepPlan, dtype: torch.dtype, device: torch.device) -> None:
        dims, batch = plan.dims, plan.batch
        self.inputs = torch.zeros(
            batch, plan.context if plan.shares_inputs else 0, dims.d_model, dtype=dtype, device=device
        )
        self.estimate = torch.zeros(2, device=device, dtype=torch.float32)
        self.moments = torch.zeros(2, dtype=torch.int64, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self.normalised = torch.zeros(batch, dims.d_model, dtype=dtype, device=device)
        listed = batch == 1 or (plan.formats.packed and batch <= MOST_TOKENS)
        self.packed = PackedSelection.empty(dims.d_ffn if listed else 0, device)

    def late_site(
        self,
        weights: LayerWeights,
        cache: KvCache,
        position: Tensor,
        mlp: TargetPredictor,
        heads: HeadSite | None,
    ) -> LateSite:
        """Site that the MLP before a layer writes and the layer's q/k/v read. Its factors are the layer's own."""
        norm = LateNorm.empty(weights.norm1, cache.capacity, self.estimate, self.moments)
        return LateSite.of(norm, cache.attn_in, position, weights.qkv, mlp.weights, self.arrived, heads)

    def reset(self) -> None:
        """Counts and sums are zero between steps, unless one was cut short."""
        self.arrived.zero_()
        self.moments.zero_()
