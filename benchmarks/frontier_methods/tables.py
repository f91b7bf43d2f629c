"""What the token alone says: a row of logits per token id, read like an embedding, which low ranks then correct.

A token reads one row of n values per layer, in int4 a two-thousandth of that layer's MLP. The row is the mean
pre-activation of the token on train documents, drawn towards what its embedding alone gives (rare tokens have little
else); the low rank is fitted to what remains. Storage is V x n x 4 bits per layer, more than the layer itself when the
vocabulary is large, so it may be worth it for the first layer only.

Letters: V vocabulary, N rows, n neurons, d model width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.frontier_methods.fit import Rows
from benchmarks.frontier_methods.plain_opt import PlainOPT, Sites
from benchmarks.frontier_methods.predictors import Predictors, quantised
from benchmarks.frontier_methods.sets import Batch
from dejavu_train.predictors.low_rank import LowRankPredictor, svd_init

PRIOR = 4.0  # tokens that the embedding alone is worth


@torch.no_grad()
def alone(model: PlainOPT, layer: int) -> Tensor:
    """(V, n) pre-activations of every token by itself: its embedding, a mean position, through this block alone."""
    weights = model.layers[layer]
    hidden = model.embed + model.positions[:512].mean(0)
    x = model.normed(hidden, weights.attn_norm)
    value = F.linear(x, weights.qkv_weight[2 * model.d :], weights.qkv_bias[2 * model.d :])
    hidden = hidden + F.linear(value, weights.out_weight, weights.out_bias)
    return F.linear(model.normed(hidden, weights.mlp_norm), weights.fc1_weight, weights.fc1_bias)


@torch.no_grad()
def token_means(model: PlainOPT, parts: Sequence[Batch], layers: Sequence[int], limit: int) -> dict[int, Tensor]:
    """Layer -> (V, n) mean pre-activation of each token over ``limit`` tokens of ``parts``."""
    size = model.embed.shape[0]
    sums = {layer: PRIOR * alone(model, layer) for layer in layers}
    counts = torch.full((size,), PRIOR, device=model.device)
    seen = 0
    for part in parts:
        if seen >= limit:
            break
        part = part.to(model.device)
        sites: Sites = {}
        model.blocks(model.start(part.ids), sites=sites)
        ids = part.ids[part.scored]
        counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))
        for layer, total in sums.items():
            weights = model.layers[layer]
            total.index_add_(
                0, ids, F.linear(sites["mlp_in", layer][part.scored], weights.fc1_weight, weights.fc1_bias)
            )
        seen += len(ids)
    return {layer: total / counts[:, None] for layer, total in sums.items()}


@torch.no_grad()
def add_tables(
    model: PlainOPT, predictors: Predictors, parts: Sequence[Batch], rows: Rows, layers: Sequence[int], limit: int
) -> Predictors:
    """Give ``predictors`` tables for ``layers``, stored in int4, and start its low rank at the best fit of the rest."""
    for layer, means in token_means(model, parts, layers, limit).items():
        weights = model.layers[layer]
        scale = weights.fc2_norm / weights.fc2_norm.mean()
        table = quantised(means * scale, "int4")
        predictors.tables[layer] = table
        name, site_layer = predictors.sites[layer]
        x = getattr(rows, name)[site_layer].float()
        mlp_in = rows.mlp_in[layer].float()
        rest = F.linear(mlp_in, weights.fc1_weight, weights.fc1_bias) * scale - table[rows.ids]
        centre, middle = x.mean(0), rest.mean(0)
        covariance = (x - centre).T @ (x - centre) / len(x)
        crossed = (rest - middle).T @ (x - centre) / len(x)  # (n, d)
        ridge = covariance + 1e-4 * covariance.diagonal().mean() * torch.eye(len(centre), device=x.device)
        slope = torch.linalg.solve(ridge, crossed.T).T
        one = LowRankPredictor(predictors.d, predictors.down.shape[1], predictors.n)
        svd_init(one, slope, torch.zeros(predictors.n), covariance.cpu())
        predictors.down[layer].copy_(one.down)
        predictors.up[layer].copy_(one.up)
        low = predictors.up[layer] @ (predictors.down[layer] @ centre)
        predictors.bias[layer].copy_(middle - low)
    return predictors
