"""The decoding step of every family through the kernels (interpreter on the CPU) against the reference operations."""

import pytest
import torch
from decode_helpers import random_bundle, rows_of
from family_models import CASES, random_family
from four_bit_models import four_bits

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.options import EngineOptions

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "head_dim": 16, "ffn_dim": 40,
    "intermediate_size": 40, "word_embed_proj_dim": 64, "vocab_size": 40, "seq_length": 32,
    "max_position_embeddings": 32,
}  # fmt: skip


def scored(model, bundle, rows, **options):
    """Of the kernels and of the reference operations, with nothing but NaN in what a step must write first."""
    found = []
    for ops in ("triton", "reference"):
        engine = DecodeEngine(model, bundle, EngineOptions(context=12, crossover=False, ops=ops, **options))
        kept = [tensor for cache in engine.core.caches for tensor in (cache.k, cache.v, cache.attn_in)]
        for tensor in [*kept, engine.core.work.q, engine.core.work.heads_out, engine.core.x]:
            tensor.fill_(float("nan") if ops == "triton" else 0.0)
        found.append(engine.score(rows, 1))
    return engine, found


WAYS = {  # options of a bundle, if any, and of the engine
    "sparse": ({}, {}),
    "ahead": ({"lookahead": 1, "means": True}, {}),
    "dense": (None, {}),
    "rows": ({}, {"batch": 2}),
}
# Every family sparsely. In each other way: gated and not, each activation, norm and kind of positions.
SHARED = {"ahead": ("llama", "350m"), "dense": ("llama", "bloom"), "rows": ("persimmon", "galactica", "bloom")}
LONG = {
    "ahead": ("drelu", "nemotron", "nanochat", "bloom"),
    "dense": ("arcee", "nemotron", "persimmon", "350m"),
    "rows": ("fatrelu", "jais2", "nanochat", "350m"),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "sparse") for name in CASES),
        *((name, way) for way, names in SHARED.items() for name in names),
        *(pytest.param(name, way, marks=pytest.mark.long) for way, names in LONG.items() for name in names),
    ],
)
def test_kernels_score_as_the_reference_does(name, way, device):
    model = random_family(name, **SIZES)
    options, engine_options = WAYS[way]
    bundle = None if options is None else random_bundle(model, rank=5, **options)
    rows = rows_of(3, 2, vocab=40)[: engine_options.get("batch", 1)]
    _, found = scored(model, bundle, rows, device=device, **engine_options)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["350m", pytest.param("llama", marks=pytest.mark.long)])
def test_look_ahead_in_four_bits(name, device):
    """Of 350m with maps between two widths, which are multiplied into its LM head in 4 bits too. Of Llama with RMSNorms
    that come late."""
    model = four_bits(random_family(name, **SIZES | {"word_embed_proj_dim": 32}), head=True)
    bundle = random_bundle(model, rank=5, lookahead=1, int4=True)
    engine, found = scored(model, bundle, rows_of(4, vocab=40), device=device, dtype=torch.float16)
    assert [half.late for half in engine.plan.halves[::2]] == [False, name == "llama"]
    assert engine.plan.formats.head == ("int4" if name == "llama" else "float16")
    torch.testing.assert_close(*(each[0] for each in found), atol=2e-2, rtol=2e-2)
