"""A sparse OPT for studies: through ``mask``, selected by predictors or by an oracle, and counting what it selects.

The oracle takes, at every token, the largest contributions of the dense pass, as many as the predictor takes there:
only the choice differs (``baselines``). It needs three passes.

Letters: B batch, T positions, n units.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import OPTForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.evaluation.baselines import FixedSelections, keep_top, ranks
from dejavu_train.families import ModelDims, Target, UnitKey
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hooks import decoder_layers, head_contribution, neuron_contribution, record
from dejavu_train.sparse.inputs import SparseFrom, positions_of, sparse_positions
from dejavu_train.sparse.masked import masking
from dejavu_train.sparse.model import SparseOPTForCausalLM

SELECTED_BY = ("predicted", "oracle")


class StudiedOPT(SparseOPTForCausalLM):
    """Made with :meth:`study`. ``kept`` and ``seen`` count units at sparse positions by target, until ``reset``."""

    selection = "predicted"

    @classmethod
    def study(
        cls, model: OPTForCausalLM, bundle: Bundle, selection: str = "predicted", sparse_from: SparseFrom = 0
    ) -> "StudiedOPT":
        """Wrap a dense model. The weights are shared.

        Raises:
            UserError: an unknown selection.
        """
        if selection not in SELECTED_BY:
            raise UserError(f"selection must be one of {', '.join(SELECTED_BY)}, got {selection}")
        studied = cls.from_model(model, bundle, "mask", sparse_from)
        assert isinstance(studied, StudiedOPT)
        studied.selection = selection
        studied.reset()
        return studied

    def reset(self) -> None:
        """Begin to count anew."""
        self.kept = {Target.MLP: 0, Target.HEADS: 0}
        self.seen = {Target.MLP: 0, Target.HEADS: 0}

    def density(self, target: Target) -> float:
        """Share of the units of ``target`` that were selected at sparse positions. 1.0 before any was seen."""
        return self.kept[target] / self.seen[target] if self.seen[target] else 1.0

    @torch.no_grad()
    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        position_ids: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V) of whole rows. The position of padding is -1, so that it is neither sparse nor counted."""
        positions = positions_of(input_ids.shape, attention_mask, position_ids, 0, self.device)
        sparse = sparse_positions(self.sparse_from, positions, 0)
        asked = {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": logits_to_keep}
        asked["position_ids"] = position_ids
        orders: dict[UnitKey, Tensor] = {}
        counts: dict[UnitKey, Tensor] = {}

        def dense_or_masked() -> CausalLMOutputWithPast:
            return OPTForCausalLM.forward(self, use_cache=False, **asked)

        def rank_contributions(layer: int, got: dict[str, Tensor]) -> None:
            block = decoder_layers(self)[layer]
            orders[UnitKey(layer, Target.MLP)] = ranks(neuron_contribution(got["activation"], block.fc2.weight))
            weight, mean = block.self_attn.out_proj.weight, runtime.means.get(layer)
            orders[UnitKey(layer, Target.HEADS)] = ranks(head_contribution(got["head_out"], weight, mean=mean))

        def count(layer: int, target: Target, keep: Tensor | None, values: Tensor) -> None:
            units = values.shape[2]
            kept = torch.full_like(positions, units) if keep is None else keep.sum(-1)
            counts[UnitKey(layer, target)] = kept
            self.kept[target] += int(kept[sparse].sum())
            self.seen[target] += units * int(sparse.sum())

        runtime = self._runtime
        if self.selection == "oracle":
            with record(self, {"activation", "head_out"}, on_layer=rank_contributions):
                dense_or_masked()
        with masking(self, runtime.selector, sparse, count, runtime.means):
            bundle_used = dense_or_masked()
        if self.selection == "predicted":
            return bundle_used
        best = FixedSelections({key: keep_top(orders[key], kept) for key, kept in counts.items()})
        with masking(self, best, sparse, means=runtime.means):
            return dense_or_masked()


def densities_for(sparsity: float, shape: ModelDims) -> tuple[float, float]:
    """Densities of MLPs and heads at which ``sparsity`` of all blocks' weights is not read, predictors excluded.

    MLPs are sparser than heads, in the ratio of the paper's `Table 4`, and at most 95 %. From there on heads take the
    rest.

    >>> shape = ModelDims(d_model=64, d_ffn=256, n_layers=2, n_heads=4, vocab_size=300, max_positions=64)
    >>> [round(density, 3) for density in densities_for(0.75, shape)]
    [0.131, 0.489]
    """
    share = attention_share(shape)
    mlp = min(0.95, sparsity * 0.85 / (0.85 * (1 - share) + 0.5 * share))
    return 1 - mlp, 1 - (sparsity - (1 - share) * mlp) / share


def total_sparsity(mlp_density: float, head_density: float, shape: ModelDims) -> float:
    """Share of all blocks' weights that is not read at these densities, predictors excluded."""
    share = attention_share(shape)
    return (1 - share) * (1 - mlp_density) + share * (1 - head_density)


def attention_share(shape: ModelDims) -> float:
    """What q, k, v and the output projection are of a block's weights: 4 d^2 of 4 d^2 + 2 d f."""
    return 4 * shape.d_model / (4 * shape.d_model + 2 * shape.d_ffn)
