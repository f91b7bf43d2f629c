"""Selects the units that a token uses, by the predictors of a bundle.

A selection is a bool tensor (B, T, n), or None where the layer is dense. What predictors are compared with stands in
``evaluation/baselines.py``.

Letters: B batch, T positions, n units (neurons or heads).
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.families import Site, Target, UnitKey, blocks_of
from dejavu_train.families.plain import plain_up
from dejavu_train.predictors.bit_planes import SecondStage

Sites = Mapping[Site, Tensor]


def select(logits: Tensor, spec: PredictorSpec, threshold: Tensor | None = None) -> Tensor:
    """The selection for ``logits`` (..., n): above the threshold (a tie is not), or the k largest. NaN never is.

    threshold: (1,), in place of the spec's.

    >>> select(torch.tensor([1.0, 2.0, 3.0]), PredictorSpec(0, "mlp", "mlp_in", 0, 1, 1, 3, threshold=2.0))
    tensor([False, False,  True])
    """
    if spec.threshold is not None:
        return logits > (spec.threshold if threshold is None else threshold)
    assert spec.top_k is not None, "a dense spec selects nothing"
    picked = logits.nan_to_num(nan=float("-inf")).topk(spec.top_k, dim=-1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, picked, True) & ~logits.isnan()


class PredictorSelector:
    """The bundle's predictors, ready to run: weights rounded as deployed, inputs and sums in fp32.

    Args:
        bundle: thresholds may be exchanged later through ``bundle``, the weights may not.
        device: where the predictors live, with a model over several GPUs inputs are brought here.
        model: whose ``up`` the second stages of cascades read. Without it a cascade's candidates are its selection.

    Raises:
        UserError: a map into neurons that a second stage tests and that must be called.

    ``candidates``: by layer with a cascade, how many neurons of each position (B, T) passed the first stage when the
    layer was last called. For counting what a cascade reads. ``thresholds``: (1,) each, in place of the bundle's.
    """

    def __init__(
        self, bundle: Bundle, device: torch.device | str = "cpu", model: PreTrainedModel | None = None
    ) -> None:
        self.bundle = bundle
        self.device = torch.device(device)
        self.predictors = {key: bundle.predictor(*key).to(self.device) for key in bundle.specs}
        self._blocks = {} if model is None else {layer: blocks_of(model)[layer] for layer in bundle.cascades()}
        self._second_stages: dict[int, SecondStage] = {}
        for layer in self._blocks:
            self._second_stage(layer)
        self._fc1: dict[int, Tensor] = {}
        self.candidates: dict[int, Tensor] = {}
        self.thresholds: dict[UnitKey, Tensor] = {}

    def _second_stage(self, layer: int) -> SecondStage | None:
        """Second stage of a cascade that is not dense. Made when first needed."""
        if layer not in self._blocks or self.bundle.specs[UnitKey(layer, Target.MLP)].dense:
            return None
        if layer not in self._second_stages:
            self._second_stages[layer] = self.bundle.second_stage(layer, plain_up(self._blocks[layer]))
        return self._second_stages[layer]

    @property
    def sites(self) -> set[Site]:
        """Which must be handed to ``__call__``."""
        staged = {UnitKey(layer, Target.MLP).site for layer in self._blocks if self._second_stage(layer) is not None}
        return {e.reads for e in self.bundle.specs.values() if not e.dense} | staged

    def up(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """(n, d) and (n), what a layer with a cascade multiplies with, by its planes. None is the model's own map."""
        stage = self._second_stage(layer)
        if stage is None:
            return None
        if layer not in self._fc1:
            self._fc1[layer] = stage.planes.weight()
        return self._fc1[layer], stage.bias

    def __call__(self, layer: int, target: Target, sites: Sites) -> Tensor | None:
        """Select for one layer and target.

        Args:
            sites: the hidden states (..., d) recorded so far.
        Returns: (..., n) bool on the device of its site, or None for a dense layer.
        """
        spec = self.bundle.specs.get(UnitKey(layer, target))
        if spec is None or spec.dense:
            return None
        inputs = sites[spec.reads]
        logits = self.predictors[UnitKey(layer, target)](inputs.to(self.device, torch.float32))
        keep = select(logits, spec, self.thresholds.get(UnitKey(layer, target))).to(inputs.device)
        stage = self._second_stage(layer) if target == Target.MLP else None
        if stage is not None:
            self.candidates[layer] = keep.sum(-1)
            keep = keep & stage.passed(sites[spec.key.site]).to(keep.device)
        return keep
