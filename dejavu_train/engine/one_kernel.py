"""All layers of a step in one kernel: whether the GPU and its compiler can, and with which tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from dejavu_train.engine.planned import StepPlan
from dejavu_train.engine.predictors import TargetPredictor
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.families import Target, UnitKey
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.persistent.decoder_layers import DecoderLayers, StepLayer, layers_launcher
from dejavu_train.kernels.persistent.sizes import PROGRAMS, StepSizes
from dejavu_train.kernels.sample.sampling import TokenState

CAPABILITY = (9, 0)  # of Hopper alone


def with_one_kernel(plan: StepPlan, predictors: Mapping[UnitKey, TargetPredictor], device: torch.device) -> StepPlan:
    """The plan with the kernel compiled where this GPU and its compiler can, or with the reason why not."""
    if plan.one_kernel is None:
        return plan
    kinds = {each.weights.relu for each in predictors.values()}
    sizes = replace(plan.one_kernel, relu=True in kinds)
    why = ""
    if len(kinds) > 1:
        why = "its predictors have one nonlinearity"
    elif torch.cuda.get_device_capability(device) != CAPABILITY:
        why = f"it needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    elif torch.cuda.get_device_properties(device).multi_processor_count < PROGRAMS:
        why = f"it needs {PROGRAMS} multiprocessors"
    else:
        try:
            layers_launcher(sizes, device)
        except RuntimeError as error:  # no compiler, an error of its, or a driver that refuses the kernel
            why = str(error)
    if why:
        return replace(plan, one_kernel=None, one_kernel_why=why)
    size = len(predictors) * sizes.rank * (sizes.d + sizes.d_ffn) // 2
    return replace(plan, one_kernel=sizes, coming={**plan.coming, "predictors of one kernel": size})


def layers_in_one(
    sizes: StepSizes,
    weights: DecodeWeights,
    predictors: Mapping[UnitKey, TargetPredictor],
    caches: Sequence[KvCache],
    state: TokenState,
) -> DecoderLayers:
    """The kernel over an engine's tensors."""
    layers = []
    for i, (layer, cache) in enumerate(zip(weights.layers, caches, strict=True)):
        own = predictors.get(UnitKey(i, Target.MLP))
        parts = (layer.qkv, layer.out, layer.up, layer.down, layer.norm1, layer.norm2)
        step = StepLayer(*parts, cache, gate=layer.gate)
        layers.append(step if own is None else replace(step, predictor=own.weights, threshold=own.threshold))
    return DecoderLayers(sizes, layers, state.position, state.row_state)
