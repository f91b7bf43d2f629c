"""Says which units a token uses: by predictor, or by one of the yardsticks that a predictor is compared with.

A selection is a bool tensor (B, T, n), or None where the layer is dense. The yardsticks take as many units per token
as the predictor took, so that only the choice differs: ``oracle`` the largest contributions of this token in the dense
pass, ``random`` any, ``static`` those most often needed on the calibration documents, ``noncontextual`` the largest
contributions when the token's embedding is sent through each block alone (Deja Vu, section 5.2).

Letters: B batch, T positions, n units (neurons or heads).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import OPTForCausalLM

from dejavu_train.bundle import Bundle
from dejavu_train.entry import Entry, Key
from dejavu_train.sites import decoder_layers, head_contribution, neuron_contribution

SELECTIONS = ("dense", "predicted", "oracle", "random", "static", "noncontextual")
Sites = Mapping[tuple[str, int], Tensor]


def select(logits: Tensor, entry: Entry) -> Tensor:
    """The selection for ``logits`` (..., n): above the threshold (a tie is not), or the k largest. NaN never is.

    >>> select(torch.tensor([1.0, 2.0, 3.0]), Entry(0, "mlp", "mlp_in", 0, 1, 1, 3, threshold=2.0))
    tensor([False, False,  True])
    """
    if entry.threshold is not None:
        return logits > entry.threshold
    assert entry.top_k is not None, "a dense entry selects nothing"
    picked = logits.nan_to_num(nan=float("-inf")).topk(entry.top_k, dim=-1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, picked, True) & ~logits.isnan()


class Predicted:
    """The bundle's predictors, ready to run: weights rounded as deployed, inputs and sums in fp32.

    Args:
        bundle: thresholds may be exchanged later through ``bundle``, the weights may not.
        device: where the predictors live; with a model over several GPUs inputs are brought here.
        model: whose fc1 the second tests of cascades read. Without it a cascade's candidates are its selection.

    ``candidates``: by layer with a cascade, how many neurons of each position (B, T) passed the first stage when the
    layer was last called; for counting what a cascade reads.
    """

    def __init__(self, bundle: Bundle, device: torch.device | str = "cpu", model: OPTForCausalLM | None = None) -> None:
        self.bundle = bundle
        self.device = torch.device(device)
        self.predictors = {key: bundle.predictor(*key).to(self.device) for key in bundle.entries}
        self._tests = {} if model is None else bundle.second_tests(decoder_layers(model))
        self._fc1: dict[int, Tensor] = {}
        self.candidates: dict[int, Tensor] = {}

    @property
    def sites(self) -> set[tuple[str, int]]:
        """Which (site, layer) must be handed to ``__call__``."""
        tested = {("mlp_in", layer) for layer in self._tests if not self.bundle.entries[layer, "mlp"].dense}
        return {(e.site, e.site_layer) for e in self.bundle.entries.values() if not e.dense} | tested

    def fc1(self, layer: int) -> Tensor | None:
        """(n, d) what a layer with a cascade multiplies with, as its planes hold it; None: the model's own fc1."""
        if layer not in self._tests or self.bundle.entries[layer, "mlp"].dense:
            return None
        if layer not in self._fc1:
            self._fc1[layer] = self._tests[layer].planes.weight()
        return self._fc1[layer]

    def __call__(self, layer: int, target: str, sites: Sites) -> Tensor | None:
        """Select for one layer and target.

        Args:
            sites: the hidden states (..., d) recorded so far, by (site, layer).
        Returns: (..., n) bool on the device of its site, or None for a dense layer.
        """
        entry = self.bundle.entries.get((layer, target))
        if entry is None or entry.dense:
            return None
        inputs = sites[entry.site, entry.site_layer]
        keep = select(self.predictors[layer, target](inputs.to(self.device, torch.float32)), entry).to(inputs.device)
        if target == "mlp" and layer in self._tests:
            self.candidates[layer] = keep.sum(-1)
            keep = keep & self._tests[layer].passed(sites["mlp_in", layer]).to(keep.device)
        return keep


class Given:
    """Selections made beforehand, by (layer, target); missing keys are dense."""

    sites: frozenset[tuple[str, int]] = frozenset()

    def __init__(self, masks: Mapping[Key, Tensor]) -> None:
        self.masks = masks

    def __call__(self, layer: int, target: str, sites: Sites) -> Tensor | None:
        return self.masks.get((layer, target))

    def fc1(self, layer: int) -> None:
        return None


def ranks(scores: Tensor) -> Tensor:
    """Place of each unit when sorted by falling score: 0 for the largest. (..., n) -> (..., n) int16 or int32.

    >>> ranks(torch.tensor([0.1, 0.5, 0.3]))
    tensor([2, 0, 1], dtype=torch.int16)
    """
    order = scores.argsort(dim=-1, descending=True)
    dtype = torch.int16 if scores.shape[-1] < 1 << 15 else torch.int32  # a batch's ranks of all layers are held
    places = torch.arange(scores.shape[-1], dtype=dtype, device=scores.device).expand_as(order)
    return torch.empty_like(order, dtype=dtype).scatter_(-1, order, places)


def take(unit_ranks: Tensor, counts: Tensor) -> Tensor:
    """The ``counts`` (B, T) first units of ``unit_ranks`` (B, T, n) or (n,): bool (B, T, n)."""
    return unit_ranks < counts.to(unit_ranks.dtype).unsqueeze(-1)


def random_ranks(shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """Uniform random ranks (..., n), drawn on the CPU so that every device compares the same sets.

    Every row is one of up to 512 random orders: sorting numbers for every token took longer than the model.
    """
    *rows, n_units = shape
    n_rows = math.prod(rows)
    pool = ranks(torch.rand(min(n_rows, 512), n_units, generator=generator))
    picks = torch.randint(len(pool), (n_rows,), generator=generator)
    return pool.index_select(0, picks).view(shape).to(device)


@torch.no_grad()
def noncontextual_contributions(
    model: OPTForCausalLM, token_ids: Tensor, layer: int, head_mean: Tensor | None = None
) -> dict[str, Tensor]:
    """Contributions when the embeddings at the model's input go through one block alone, no token seeing another.

    With one token the attention of every head is its value vector, so nothing of the context enters.

    Args:
        token_ids: (B, T); the columns are the positions.
        head_mean: (n_heads, head_dim) that stands in for skipped heads, see ``sites.head_contribution``.
    Returns: ``heads`` (B, T, n_heads) and ``mlp`` (B, T, d_ffn), fp32.
    """
    decoder = model.model.decoder
    block = decoder_layers(model)[layer]
    embedded = decoder.embed_tokens(token_ids)
    positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
    embedded = embedded + decoder.embed_positions(torch.ones_like(token_ids), 0, position_ids=positions)
    embedded = embedded.to(block.fc1.weight.device)
    attention = block.self_attn
    values = attention.v_proj(block.self_attn_layer_norm(embedded))
    by_head = values.unflatten(-1, (attention.num_heads, -1))
    heads = head_contribution(by_head, attention.out_proj.weight, mean=head_mean)
    middle = embedded + attention.out_proj(values)
    activation = torch.relu(block.fc1(block.final_layer_norm(middle)))
    return {"heads": heads, "mlp": neuron_contribution(activation, block.fc2.weight)}
