"""Random layers of shapes that the kernel of all layers takes, and thresholds that no rounding crosses."""

from dataclasses import replace

import torch

from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind, layer_norm_reference
from dejavu_train.kernels.common.positions import Rotary
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.persistent.decoder_layers import (
    StepLayer,
    attention_reference,
    decoder_layers_reference,
    first_reference,
    scores_reference,
)
from dejavu_train.kernels.persistent.sizes import Neurons, StepSizes
from dejavu_train.kernels.stages.predictor import PredictorWeights

# What differs from OPT.
PROSPARSE = {"rms": True, "rotary": True, "biases": False, "gated": True, "threshold": 0.1}
FORMS = {
    "opt": {},
    "prosparse": PROSPARSE,
    "minitron": {"rotary": True, "biases": False, "squared": True},
    "drelu": PROSPARSE | {"both": True, "biases": True, "threshold": 0.0},
}


def sizes_of(d, n_layers, neurons, relu=False, form="opt"):
    rank = d // 16 if neurons is Neurons.SELECTED else 0
    d_ffn = {2048: 39, 4096: 86}[d] * 128 if form != "opt" else 4 * d  # ProSparse-7B's of 4096
    heads, kv_heads, head_dim = (32, 32, d // 32)
    if form == "minitron":
        heads, kv_heads, head_dim = (48, 8, 128) if d == 4096 else (64, 16, 128)  # Minitron-8B's of 4096
    return StepSizes(d, heads, head_dim, d_ffn, n_layers, neurons, rank, relu, kv_heads, **FORMS[form])


def random_layers(sizes, capacity, device, seed=0):
    """Layers whose scales have either sign. In a step that skips silent neurons, most are silent."""
    generator = torch.Generator(device).manual_seed(seed)
    d, hd, n, h, kv = sizes.d, sizes.head_dim, sizes.d_ffn, sizes.heads, sizes.kv_heads
    unit = 0.02 * (4096 / d) ** 0.5 / 4.6

    def normal(*shape):
        return torch.randn(*shape, device=device, generator=generator)

    def rows(*shape, groups):
        words = torch.randint(-(2**31), 2**31 - 1, (*shape[:-1], shape[-1] // 8), device=device, generator=generator)
        scales = (torch.rand(*shape[:-1], groups, device=device, generator=generator) + 0.5) * unit
        return Int4Rows(words.int(), (scales * normal(*scales.shape).sign()).half())

    def linear(*shape, groups, bias, shift=None):
        numbers = 0.1 * normal(*bias) * (sizes.biases or shift is not None)
        return Linear(rows(*shape, groups=groups), (numbers + (shift or 0.0)).half())

    def norm():
        kind = NormKind.RMS_NORM if sizes.rms else NormKind.LAYER_NORM
        return LayerNormWeights((1 + 0.2 * normal(d)).half(), (0.1 * normal(d) * (not sizes.rms)).half(), kind=kind)

    def nibbles(rows, columns):
        return torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device, generator=generator)

    def scales(n):
        return (torch.rand(n, device=device, generator=generator) + 0.5) * 0.01

    half = hd // (4 if sizes.squared else 2)  # a part of a head's dimensions turns, or all
    angles = torch.arange(capacity, device=device)[:, None] * 100.0 ** (-torch.arange(half, device=device) / half)
    turns = Rotary.of(*(each.repeat(1, 2) for each in (angles.cos(), angles.sin())), hd) if sizes.rotary else None
    silent = -1.5 if sizes.neurons is Neurons.LIVE else 0.0
    for _ in range(sizes.layers):
        predictor = threshold = None
        if sizes.rank:
            first, second = nibbles(sizes.rank, d), nibbles(n, sizes.rank)
            predictor = PredictorWeights(
                first, second, 0.1 * normal(n), scales(sizes.rank), scales(n), relu=sizes.relu
            )  # fmt: skip
            threshold = torch.zeros(1, device=device)
        cache = KvCache(*(normal(1, kv, capacity, hd).half() for _ in range(2)), torch.zeros(0, device=device))
        cache = replace(cache, positions=turns)
        gate = linear(n, d, groups=d // 128, bias=(n,), shift=silent) if sizes.gated else None
        yield StepLayer(
            linear(kv, h // kv + 2, hd, d, groups=d // 128, bias=(kv, h // kv + 2, hd)),
            linear(h, d, hd, groups=1, bias=(d,)),
            linear(n, d, groups=d // 128, bias=(n,), shift=None if sizes.gated else silent),
            linear(n, d, groups=d // 128, bias=(d,)),
            norm(), norm(), cache, predictor, threshold, gate,
        )  # fmt: skip


def put_thresholds(sizes, layers, x, position, density=0.1, row_state=1):
    """Thresholds that select about `density` of the neurons, each in a wide gap between two scores.

    Products near an activation's threshold are moved away from it by the bias, for a row of this state.
    """
    x = x.double()
    for layer in layers:
        n = layer_norm_reference(x, layer.norm1, torch.float64)
        if layer.predictor is not None:
            top, at = scores_reference(layer, n)[0].sort(descending=True).values, int(density * sizes.d_ffn)
            near = slice(at - 40, at + 40)
            first = int((top[near] - top[at - 39 : at + 41]).argmax()) + at - 40
            layer.threshold.fill_(float((top[first] + top[first + 1]) / 2))
        if sizes.threshold:
            products = first_reference(layer, x + attention_reference(sizes, layer, n, position))[0]
            layer.gate.bias[(products - sizes.threshold).abs() < 0.002] += 0.01
        x = decoder_layers_reference(sizes, [layer], x, position, row_state)
