"""Lets a selection learn inside the model: forward it is the true one, backward a sigmoid stands in for it.

Letters: B windows, T positions, n units, e width of a unit.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dejavu_train.bundle.allocation import plane_bytes
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.selector import select
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.families import Site, Target, UnitKey, blocks_of
from dejavu_train.models.hooks import at_place, hooked
from dejavu_train.models.layer_exchange import placed
from dejavu_train.models.weight_format import WeightFormat
from dejavu_train.predictors.bit_planes import SecondStage
from dejavu_train.predictors.low_rank import LowRankPredictor
from dejavu_train.predictors.quantization import SCALED

Sites = dict[Site, Tensor]


class Gate(torch.autograd.Function):
    """values where logit > 0 and ``rest`` elsewhere, and the mean cost of what is kept. Backward as if by a sigmoid.

    ``logits`` (..., n) against ``values`` (..., n) or (..., n, e). ``cost`` (..., n) is what one kept unit costs.
    ``curvature`` (..., n), or 0, is the loss's second derivative along a unit's switch. Near the dense model the
    gradient of what is kept vanishes, although dropping it would cost half the curvature. So the gradient of a logit is
    f(1) - f(0) = f'(s) + (1/2 - s) f'', not f'(s).
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, logits: Tensor, cost: Tensor, rest: Tensor, curvature: Tensor, width: float
    ) -> Any:
        keep = logits > 0
        ctx.save_for_backward(values, logits, cost, rest, curvature)
        ctx.width = width
        wide = keep if values.dim() == logits.dim() else keep[..., None]
        return torch.where(wide, values, rest), (keep * cost).sum(-1).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        grad, grad_cost = gradients
        values, logits, cost, rest, curvature = ctx.saved_tensors
        keep = logits > 0
        wide = keep if values.dim() == logits.dim() else keep[..., None]
        soft = torch.sigmoid(logits / ctx.width)
        slope = soft * (1 - soft) / ctx.width
        gain = grad * (values - rest)
        if values.dim() > logits.dim():
            gain = gain.sum(-1)
        rows = logits.numel() // logits.shape[-1]
        gain = gain + (0.5 - keep.to(gain.dtype)) * curvature
        grad_logits = slope * (gain + grad_cost * cost / rows)
        grad_rest = None
        if ctx.needs_input_grad[3]:
            grad_rest = (grad * ~wide).sum(tuple(range(grad.dim() - rest.dim())))
        return grad * wide, grad_logits, None, grad_rest, None, None


class Gates:
    """The differentiable counterpart of ``mask``: hooks that gate every layer's neurons and select its heads.

    What selects is on the CPU first. :meth:`place` or :meth:`placed` take it to its layer.
    """

    def __init__(self, model: Any, bundle: Bundle, width: float, weights: WeightFormat) -> None:
        self.unit = weights.unit_bytes(bundle.shape)
        self.blocks = blocks_of(model)
        self.bundle, self.width = bundle, width
        self.means = bundle.head_means()
        self.second_stages: dict[int, SecondStage] = {}
        self.predictors: dict[UnitKey, nn.Module] = {}
        self.trained: dict[int, LowRankPredictor] = {}
        for (layer, target), spec in bundle.specs.items():
            if not spec.dense:
                self.predictors[UnitKey(layer, target)] = bundle.predictor(layer, target)
                if target == Target.MLP:
                    predictor = self.predictors[UnitKey(layer, target)]
                    assert isinstance(predictor, LowRankPredictor), "train.py tunes no other"
                    self.trained[layer] = predictor.requires_grad_(True).train()
                    predictor.rounded_to = spec.dtype if spec.dtype in SCALED else None
        self.spent: list[Tensor] = []

    def read_later(self, layer: int) -> set[Site]:
        """The sites of a layer that predictors of later layers read."""
        specs = (self.bundle.specs[key] for key in self.predictors if key.layer > layer)
        return {spec.reads for spec in specs if spec.reads.layer == layer}

    def read_ahead(self, layer: int) -> set[Site]:
        """The sites of earlier layers that a layer's predictors read."""
        specs = (self.bundle.specs[key] for key in self.predictors if key.layer == layer)
        return {spec.reads for spec in specs if spec.reads.layer < layer}

    def place(self, layer: int) -> None:
        """Put what selects in a layer where its weights are, for good."""
        for key, predictor in self.predictors.items():
            if key.layer == layer:
                predictor.to(self._device(key))
        if layer in self.means:
            self.means[layer] = self.means[layer].to(self.blocks[layer].out.weight.device)
        self._make_second_stage(layer)

    @contextmanager
    def placed(self, layer: int) -> Iterator[None]:
        """The same within the context. Gradients that come there are at home behind it, with the predictors."""
        with ExitStack() as stack:
            for key, predictor in self.predictors.items():
                if key.layer == layer:
                    stack.enter_context(_visiting(predictor, self._device(key)))
            self._make_second_stage(layer)
            stack.callback(self.second_stages.pop, layer, None)
            yield

    def _device(self, key: UnitKey) -> torch.device:
        block = self.blocks[key.layer]  # of a model over several devices each layer has its own
        device: torch.device = (block.up if key.target == Target.MLP else block.out).weight.device
        return device

    def _make_second_stage(self, layer: int) -> None:
        if layer in self.bundle.cascades():
            self.second_stages[layer] = self.bundle.second_stage(layer, self.blocks[layer].up)

    @contextmanager
    def on(self, shape: tuple[int, int], layers: Iterable[int], sites: Sites) -> Iterator[None]:
        """Within the context passes of (B, T) = ``shape`` through ``layers`` are gated.

        Args:
            sites: what predictors of these layers read of earlier ones. What they read of these is put there.

        ``spent`` collects bytes per token and layer.
        """
        self.spent.clear()

        def keep(site: Site, output: Tensor) -> None:
            sites[site] = output.reshape(*shape, -1)

        def gated(layer: int, target: Target, given: Tensor) -> Tensor:
            gate = self._neurons if target == Target.MLP else self._heads
            return gate(layer, given.reshape(*shape, -1), sites).reshape(given.shape)

        handles: list[Any] = []
        for layer in layers:
            block = self.blocks[layer]
            handles += [at_place(block, name, partial(keep, Site(layer, name))) for name in block.inputs]
            for target, place in ((Target.HEADS, "head_out"), (Target.MLP, "activation")):
                if UnitKey(layer, target) in self.predictors:
                    handles.append(at_place(block, place, partial(gated, layer, target)))
        with hooked(handles):
            yield

    def _neurons(self, layer: int, activation: Tensor, sites: Sites) -> Tensor:
        spec = self.bundle.specs[UnitKey(layer, Target.MLP)]
        logits = self.predictors[UnitKey(layer, Target.MLP)](sites[spec.reads].float().to(activation.device))
        assert spec.threshold is not None
        is_active = (activation != 0).to(activation.dtype)
        if layer in self.second_stages:
            with torch.no_grad():
                passed = self.second_stages[layer].passed(sites[spec.key.site]).to(activation)
            activation = activation * passed
            upper, rest = plane_bytes(self.bundle.shape.d_model)
            cost = upper + passed * (rest + self.unit.down * is_active)
        else:
            cost = self.unit.up + self.unit.down * is_active
        zero = activation.new_zeros(())
        out, spent = Gate.apply(activation, logits - spec.threshold, cost, zero, zero, self.width)
        self.spent.append(spent)
        return out

    def _heads(self, layer: int, values: Tensor, sites: Sites) -> Tensor:
        spec: PredictorSpec = self.bundle.specs[UnitKey(layer, Target.HEADS)]
        with torch.no_grad():
            site = sites[spec.reads].float().to(values.device)
            keep = select(self.predictors[UnitKey(layer, Target.HEADS)](site), spec)
        by_head = values.unflatten(-1, (keep.shape[-1], -1))
        instead = self.means[layer].to(values) if layer in self.means else values.new_zeros(())
        return torch.where(keep[..., None], by_head, instead).flatten(-2)


@contextmanager
def _visiting(predictor: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the context a predictor lies on the device. Gradients that it gets there come home with it."""
    parameters = list(predictor.parameters())
    with placed(predictor, device, None, {}):
        yield
        made = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None  # it is no gradient of what lies elsewhere
    for parameter, gradient in zip(parameters, made, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
