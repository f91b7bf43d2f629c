"""A random OPT with kernel-sized heads, random predictors, and the masked forward pass that decoding must equal."""

from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers import OPTConfig, OPTForCausalLM

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Sampling
from dejavu_train.engine.options import EngineOptions
from dejavu_train.families import LayerInput, ModelDims, Site, dims_of, family_of
from dejavu_train.families.block import forward_block, positions_like
from dejavu_train.predictors.bit_planes import choose_grid
from dejavu_train.predictors.low_rank import LowRankPredictor
from dejavu_train.predictors.quantization import int4_rows, quantise_rows

KINDS = {
    "greedy": Sampling(),
    "sampled": Sampling(1.0, seed=3),
    "top_p": Sampling(0.7, 0.9, seed=4),
    "top_k": Sampling(1.3, 0.95, top_k=20, seed=5),
}


class Spec(SimpleNamespace):
    """What a bundle's spec says of a predictor, as far as engines ask."""

    @property
    def reads(self):
        return Site(self.site_layer, LayerInput(self.site))

    @property
    def dense(self):
        return self.threshold is None and self.top_k is None


def random_opt(
    d_model=64, n_heads=2, d_ffn=160, n_layers=2, vocab=300, positions=128, seed=0, before=True
) -> OPTForCausalLM:  # fmt: skip
    """before: norms stand in front of halves of layers, not behind them."""
    torch.manual_seed(seed)
    config = OPTConfig(
        vocab_size=vocab,
        hidden_size=d_model,
        word_embed_proj_dim=d_model,
        ffn_dim=d_ffn,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        max_position_embeddings=positions,
        do_layer_norm_before=before,
        dropout=0.0,
        init_std=0.15,
    )
    model = OPTForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(std=0.1)
            if "layer_norm.weight" in name:
                parameter.normal_(mean=1.0, std=0.1)
    return model


@dataclass
class RandomBundle:
    """What the engine reads of a bundle, with random predictors. Thresholds near the logits' quantiles."""

    shape: ModelDims
    specs: dict = field(default_factory=dict)
    predictors: dict = field(default_factory=dict)
    means: dict = field(default_factory=dict)
    grids: dict = field(default_factory=dict)  # of cascades, by layer
    stored: dict = field(default_factory=dict)  # (layer, target, part): int8 codes and scales

    def codes(self, layer, target, part):
        return self.stored[layer, target, part]

    def cascades(self):
        return self.grids

    def frequency(self, layer, target):
        return torch.linspace(0.01, 1.0, self.shape.units(target))

    def head_means(self, device="cpu"):
        return {layer: mean.to(device) for layer, mean in self.means.items()}

    def predictor(self, layer, target):
        return self.predictors[layer, target]


def random_bundle(
    model, rank=8, seed=0, threshold=0.3, relu=False, top_k=None, lookahead=0, targets=("mlp", "heads"),
    dense_layers=(),
    means=False, int8=False, int4=False, cascade=False,
):  # fmt: skip
    """lookahead: halves between a predictor's site and its target, cut off at the first site.

    int8, int4: predictors are codes with a scale a row.
    """
    shape = dims_of(model.config)
    bundle = RandomBundle(shape)
    torch.manual_seed(seed)
    for layer in range(shape.n_layers):
        for target in targets:
            n_out = shape.units(target)
            made = LowRankPredictor(shape.d_model, rank, n_out, "relu" if relu else "none")
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.normal_(std=0.3)
                for part in ("down", "up") if int8 or int4 else ():
                    weight = getattr(made, part)
                    codes, scale = int4_rows(weight) if int4 else quantise_rows(weight)
                    scale = scale.float()
                    bundle.stored[layer, target, part] = codes, scale
                    getattr(made, part).copy_(codes * scale[:, None])
            half = max(0, 2 * layer + (target == "mlp") - lookahead)
            bundle.predictors[layer, target] = made.requires_grad_(False)
            dense = layer in dense_layers
            k = None if top_k is None else max(1, int(top_k * n_out))
            bundle.specs[layer, target] = Spec(
                kind="low_rank",
                rank=rank,
                d_in=shape.d_model,
                threshold=None if dense or k else threshold,
                top_k=None if dense else k,
                nonlinearity="relu" if relu else "none",
                keep_dense=dense,
                curve={},
                site=("attn_in", "mlp_in")[half % 2],
                site_layer=half // 2,
                density=0.5,
                dtype="int8" if int8 else "int4" if int4 else "float32",
            )
        if cascade:
            weight = model.model.decoder.layers[layer].fc1.weight.detach()
            bundle.grids[layer] = (*choose_grid(weight), torch.linspace(-1.0, 1.0, shape.d_ffn))
        if means and "heads" in targets:
            bundle.means[layer] = torch.randn(shape.n_heads, shape.head_dim)
    return bundle


@torch.no_grad()
def mlp_ahead(bundle):
    """A bundle of `lookahead=1` whose heads read their own site again, so that every layer can be fused."""
    for (layer, target), spec in bundle.specs.items():
        if target == "heads":
            spec.site, spec.site_layer = "attn_in", layer
    return bundle


def rows_of(*lengths, seed=3, vocab=300) -> list[list[int]]:
    """Token ids of rows of these lengths, each with </s> first."""
    generator = torch.Generator().manual_seed(seed)
    return [[2, *torch.randint(3, vocab, (n - 1,), generator=generator).tolist()] for n in lengths]


def tokens(n, vocab=300, seed=0) -> list[int]:
    """Token ids of a row."""
    return rows_of(n, seed=seed, vocab=vocab)[0]


def reference_engine(model, bundle=None, **options) -> DecodeEngine:
    """The engine in plain torch."""
    return DecodeEngine(model, bundle, EngineOptions(ops="reference", **options))


def masked_logits(model, bundle, tokens, sparse_from=0, margins=None):
    """tokens (T) -> (logits (T, V), {(layer, target): mask (T, n)}): dense compute, skipped units set to zero.

    K/V are computed for every head: what back-fill must reproduce.
    Candidates of a second stage are what is selected, as the engine reads them.
    margins: a list that receives, for each predictor with a threshold, the distance (T,) of its nearest logit to it.
    """
    family, shape = family_of(model), dims_of(model.config)
    steps, h, hd = len(tokens), shape.n_heads, shape.head_dim
    ids = torch.tensor([tokens])
    x = family.embed(model, ids, positions_like(ids))[0]
    masks = {}

    def select(site, layer, n):
        for key, spec in bundle.specs.items() if bundle is not None else ():
            if (spec.site, spec.site_layer) != (site, layer) or (spec.threshold is None and spec.top_k is None):
                continue
            logits = bundle.predictor(*key)(n)
            if spec.top_k is not None:
                mask = torch.zeros_like(logits).scatter_(1, logits.topk(spec.top_k, dim=1).indices, 1.0) > 0
            else:
                mask = logits > spec.threshold
                if margins is not None:
                    margins.append((logits - spec.threshold).abs().amin(1))
            masks[key] = mask | (torch.arange(steps) < sparse_from)[:, None]

    def attend(i, n, q, k, v):
        select("attn_in", i, n)
        heads = masks.get((i, "heads"), torch.ones(steps, h, dtype=torch.bool)).T
        allowed = torch.ones(steps, steps, dtype=torch.bool).tril()[None].expand(h, steps, steps)
        attended = (q @ k.transpose(1, 2)).masked_fill(~allowed, float("-inf")).softmax(-1) @ v
        instead = bundle.means.get(i, torch.zeros(h, hd)) if bundle is not None else torch.zeros(h, hd)
        return torch.where(heads[..., None], attended, instead[:, None])

    def up(i, fc1, n):
        select("mlp_in", i, n)
        return fc1(n)

    def activate(i, y):
        return F.relu(y) * masks.get((i, "mlp"), torch.ones_like(y))

    for i, block in enumerate(family.blocks(model)):
        masked = replace(block, up=partial(up, i, block.up), activate=partial(activate, i))
        x, _ = forward_block(masked, x, partial(attend, i))
    return model.lm_head(family.final_norm(model)(x)), masks


def masked_nll(model, bundle, tokens, sparse_from=0, margins=None):
    """-log p of tokens[1:], (T - 1,)."""
    logits, _ = masked_logits(model, bundle, tokens, sparse_from, margins)
    return F.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")
