"""The decoding step of every family through the kernels (interpreter on the CPU) against the reference operations."""

import pytest
import torch
from decode_helpers import random_bundle, rows_of
from family_models import CASES, random_family

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.options import EngineOptions

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "head_dim": 16, "ffn_dim": 72,
    "intermediate_size": 72, "word_embed_proj_dim": 64, "vocab_size": 60, "seq_length": 32,
    "max_position_embeddings": 32,
}  # fmt: skip
RUN = [name for name in CASES if name != "350m"]


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


@pytest.mark.parametrize(
    ("options", "engine_options"),
    [({}, {}), ({"lookahead": 1, "means": True}, {}), (None, {}), ({}, {"batch": 2})],
    ids=str,
)
@pytest.mark.parametrize("name", RUN)
def test_kernels_score_as_the_reference_does(name, options, engine_options, device):
    model = random_family(name, **SIZES)
    bundle = None if options is None else random_bundle(model, rank=5, **options)
    rows = rows_of(7, 3, vocab=60)[: engine_options.get("batch", 1)]
    _, found = scored(model, bundle, rows, device=device, **engine_options)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
