"""Every family through the CPU engine: what `mask` says over 256 tokens, texts, 8 bits."""

import numpy as np
import pytest
import torch
from bundles import make_bundle
from decode_helpers import tokens
from family_models import CASES, save_family, sparse

from dejavu_train.engine.cpu import CpuEngine, CpuWeights, Sampling
from dejavu_train.engine.draft import Draft
from dejavu_train.models.load import load_model


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    return save_family(request.param, tmp_path_factory.mktemp("families") / request.param)


@pytest.fixture(scope="module")
def bundle(folder):
    return make_bundle(folder, means=True).at(0.4, 0.6)


@pytest.fixture(scope="module")
def engine(folder, bundle):
    return CpuEngine(load_model(str(folder)), bundle, batch=3, threads=2)


def masked_nll(folder, bundle, row):
    with torch.no_grad():
        logits = sparse(folder, bundle, "mask", 0)(torch.tensor([row])).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(row[1:]), reduction="none")


def test_scores_equal_those_of_mask_over_256_tokens(folder, bundle, engine):
    """Of a row alone, and of one among others."""
    row = tokens(256)
    expected = masked_nll(folder, bundle, row)
    alone = CpuEngine(engine.weights, bundle, threads=2)
    torch.testing.assert_close(alone.score([row])[0], expected, atol=1e-4, rtol=1e-4)
    assert alone.state.watermark[:, 0].min() < 256  # some unit was skipped at the end, so others were filled in
    found = engine.score([tokens(40, seed=1), row, tokens(9, seed=2)])
    torch.testing.assert_close(found[1], expected, atol=1e-4, rtol=1e-4)


def test_a_prompt_at_once_is_a_prompt_step_by_step(engine):
    prompt, options = tokens(30, seed=3), {"stop_tokens": ()}
    expected = engine.generate([prompt], 30, prompt_phase="steps", **options)
    assert engine.generate([prompt], 30, **options) == expected


def test_lossless_texts_are_the_dense_models(folder, engine):
    """Greedily and sampled, by drafts of the same weights and of those in 8 bits."""
    prompt, dense = tokens(12, seed=4), CpuEngine(engine.weights, threads=2)
    sparsely = CpuEngine(engine.weights, engine.rules, threads=2)
    for sampling in (Sampling(), Sampling(0.8, 0.9, seed=3)):
        expected = dense.generate([prompt], 40, sampling=sampling, stop_tokens=())
        for drafting, weights in ((sparsely, None), (dense, "int8")):
            options = {"sampling": sampling, "stop_tokens": (), "lossless": Draft(4, weights)}
            assert drafting.generate([prompt], 40, **options) == expected
        assert dense.acceptance.accepted > 10  # predictors at random accept nothing


def test_eight_bits_are_the_rounded_rows(folder, bundle, monkeypatch):
    """In whole numbers against fp32 rows of the same values, with K and V in fp32 too."""
    monkeypatch.setattr(CpuWeights, "cached", np.float32)
    row = tokens(60, seed=5)
    coded = CpuWeights.from_model(load_model(str(folder)), "int8")
    exact = CpuWeights.from_model(load_model(str(folder)))
    for start in range(len(exact.model.rows)):
        exact.model.rows[start, : exact.shape.d_model] = coded.rows(start, 1)[0].numpy()
    found, expected = (CpuEngine(weights, bundle, threads=2).score([row])[0] for weights in (coded, exact))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


def test_a_model_of_random_rows_has_the_layout_of_one_that_is_read(folder, engine):
    """The rows of all parts, without a gap, and what they are multiplied with."""
    read, made = engine.weights.model, CpuWeights.random(engine.shape).model
    for name in ("first", "turns", "slopes", "norms", "positions", "in_bias"):
        assert getattr(read, name).shape == getattr(made, name).shape
    assert (read.first == made.first).all() and read.first.max() < read.embedding
