"""How well the bundle's predictors predict the dense model (section 5.2 of the paper), layer by layer.

A predictor reads the dense model's hidden states, and its selection is held against the dense model's units. In the
sparse model the inputs differ a little. The second stage of a cascade is left out: these are the predictors' own.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import OPTForCausalLM

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.evaluation.baselines import keep_top, ranks
from dejavu_train.evaluation.perplexity import EvalCorpus, eval_batches
from dejavu_train.families import LayerInput, Site, Target, UnitKey
from dejavu_train.models.finite import check_logits
from dejavu_train.models.hooks import decoder_layers, head_contribution, neuron_contribution, record
from dejavu_train.predictors.metrics import SelectionSums


@dataclasses.dataclass(frozen=True)
class PredictorRow:
    """One predictor on held-out documents.

    A neuron is positive when it is active. Of the heads as many as were selected are, those that contribute most.
    ``density``: selected / all. ``active``: positive / all. ``accuracy``: (true positives + true negatives) / all.
    ``recall``, ``precision``. ``retained_mass``: share of the summed contribution that is selected.
    """

    layer: int
    target: str
    density: float
    active: float
    accuracy: float
    recall: float
    precision: float
    retained_mass: float
    tokens: int


@torch.no_grad()
def predictor_rows(
    model: OPTForCausalLM,
    bundle: Bundle,
    held: EvalCorpus,
    batch_tokens: int,
    progress: Callable[[int], object] = lambda tokens: None,
) -> list[PredictorRow]:
    """One dense pass over ``held``. A row for each predictor that is not dense."""
    predicted = PredictorSelector(bundle, model.device)
    means = bundle.head_means(model.device)
    blocks = decoder_layers(model)
    keys = [key for key, spec in bundle.specs.items() if not spec.dense]
    sums: dict[UnitKey, SelectionSums] = {key: SelectionSums() for key in keys}
    sites: dict[Site, Tensor] = {}
    real = torch.empty(0, dtype=torch.bool)

    def add(layer: int, got: dict[str, Tensor]) -> None:
        sites.update({Site(layer, name): got[name] for name in LayerInput})
        projection = blocks[layer].self_attn.out_proj.weight
        contribution = {
            Target.MLP: neuron_contribution(got["activation"], blocks[layer].fc2.weight),
            Target.HEADS: head_contribution(got["head_out"], projection, mean=means.get(layer)),
        }
        for target, values in contribution.items():
            keep = predicted(layer, target, sites)
            if keep is not None:
                own, kept = values[real], keep[real]
                positive = own > 0 if target == Target.MLP else keep_top(ranks(own), kept.sum(-1))
                sums[UnitKey(layer, target)].update(kept, positive, own)

    for batch in eval_batches(held, batch_tokens, model.device):
        real = batch.real
        with record(model, {"attn_in", "mlp_in", "activation", "head_out"}, on_layer=add):
            hidden = model.model.decoder(input_ids=batch.ids, use_cache=False).last_hidden_state
        check_logits(hidden[real.to(hidden.device)], model, batch.ids)
        sites.clear()
        progress(int(real.sum()))
    return [_row(*key, sums[key], bundle.shape.units(key[1])) for key in sorted(keys, key=lambda key: key[::-1])]


def _row(layer: int, target: Target, sums: SelectionSums, n_units: int) -> PredictorRow:
    accuracy = 1 - float(sums.fp + sums.fn) / float(sums.units)
    ratios = (sums.density, sums.active_density, accuracy, sums.recall, sums.precision, sums.retained_mass)
    return PredictorRow(layer, target, *ratios, int(sums.units) // n_units)
