"""Scores against a plain Hugging Face loop, counts against definitions, errors against what they promise."""

import math

import numpy as np
import pytest
import torch
from bundles import make_bundle
from conftest import make_text
from torch.nn import functional as F

from dejavu_train.bundle.cost_model import predictor_bytes
from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.data.text import Document
from dejavu_train.evaluation.baselines import FixedSelections, keep_top, ranks
from dejavu_train.evaluation.perplexity import EvalCorpus, EvalSetting, evaluate, hold_out, increase, passes
from dejavu_train.families import Site
from dejavu_train.models.hooks import head_contribution, neuron_contribution, record
from dejavu_train.models.load import load_tokenizer
from dejavu_train.models.weight_format import FLOAT16
from dejavu_train.sparse.masked import masking
from dejavu_train.sparse.model import SparseOPTForCausalLM


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    return make_bundle(tiny_opt)


@pytest.fixture(scope="module")
def documents():
    return [Document(f"document {i}", make_text(40 + 90 * i, seed=i)) for i in range(5)]


@pytest.fixture(scope="module")
def held(tiny_opt, documents):
    return hold_out(documents, load_tokenizer(str(tiny_opt)), 64, None)


def plain_nats(model, held, **options):
    """Summed nats per document, window by window."""
    nats = np.zeros(len(held.document_tokens))
    for window, document in zip(held.windows, held.document, strict=True):
        ids = torch.tensor([window])
        with torch.no_grad():
            logits = model(ids[:, :-1], **options).logits[0]
        nats[document] += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    return nats


def test_held_out_text_follows_the_protocol(tiny_opt, documents, held):
    tokenizer = load_tokenizer(str(tiny_opt))
    ids = [tokenizer(document.text, add_special_tokens=False)["input_ids"] for document in documents]
    assert held.tokens == sum(map(len, ids))
    assert held.bytes == sum(len(document.text.encode()) for document in documents)
    assert all(window[0] == 2 and 2 <= len(window) <= 64 for window in held.windows)
    for document, expected in enumerate(ids):
        parts = [w[1:] for w, d in zip(held.windows, held.document, strict=True) if d == document]
        assert [token for part in parts for token in part] == expected


def test_a_budget_of_tokens_takes_whole_windows(tiny_opt, documents):
    tokenizer = load_tokenizer(str(tiny_opt))
    some = hold_out(documents, tokenizer, 64, 300)
    assert 300 <= some.tokens < 300 + 2 * 63
    again = hold_out(list(reversed(documents)), tokenizer, 64, 300)
    assert sorted(map(tuple, again.windows)) == sorted(map(tuple, some.windows))
    total = sum(len(document.text.encode()) for document in documents)
    assert 0 < some.bytes < total
    assert some.bytes / some.tokens == pytest.approx(total / hold_out(documents, tokenizer, 64, None).tokens, rel=0.2)


def test_a_budget_of_tokens_is_spread_over_documents(tiny_opt):
    tokenizer = load_tokenizer(str(tiny_opt))
    documents = [Document(str(i), make_text(60 if i else 8000, seed=i)) for i in range(40)]
    longest = len(tokenizer(documents[0].text, add_special_tokens=False)["input_ids"])
    some = hold_out(documents, tokenizer, 32, 1000)
    assert len(some.document_tokens) >= 20 and max(some.document_tokens) <= 2 * 31 and some.truncated
    # Where documents are few and short, the long one gives the rest; a budget above all text takes all of it.
    most = hold_out(documents, tokenizer, 32, 3000 + 40 * 170)
    assert len(most.document_tokens) == 40 and most.truncated and most.tokens < 3000 + 40 * 170 + 31
    everything, no_budget = hold_out(documents, tokenizer, 32, 10 * longest), hold_out(documents, tokenizer, 32, None)
    assert everything.tokens == no_budget.tokens and everything.bytes == no_budget.bytes
    assert not everything.truncated and not no_budget.truncated


def test_dense_and_predicted_rows_equal_a_plain_loop(model, bundle, held):
    rows = [
        EvalSetting("dense"),
        EvalSetting("predicted", 0.2),
        EvalSetting("predicted", 0.2, 0.8),
        EvalSetting("predicted", 0.2, 1.0, 16),
    ]
    seen = []
    scored = evaluate(model, bundle, held, rows, batch_tokens=150, progress=seen.append)
    assert sum(seen) == passes(rows) * held.tokens
    np.testing.assert_allclose(scored[0].nats, plain_nats(model, held), rtol=1e-5)
    for quality in scored[1:]:
        row = quality.row
        moved = bundle.at(row.mlp_density, row.head_density)
        sparse = SparseOPTForCausalLM.from_model(model, moved, "mask", sparse_from=row.sparse_from)
        np.testing.assert_allclose(quality.nats, plain_nats(sparse, held), rtol=1e-5)


def sums_by_hand(model, selector, held, sparse_from=0):
    """tp, selected, active, units, kept, mass of every (layer, target), from the definitions."""
    sums = {}
    for window in held.windows:
        seen = {}
        with torch.no_grad(), masking(model, selector, observe=lambda *s, seen=seen: seen.__setitem__(s[:2], s[2:])):
            model(torch.tensor([window[:-1]]))
        for (layer, target), (keep, values) in seen.items():
            block = model.model.decoder.layers[layer]
            keep, values = keep[0, sparse_from:], values[0, sparse_from:]
            if target == "mlp":
                contribution = neuron_contribution(values, block.fc2.weight)
                active = values > 0
            else:
                contribution = head_contribution(values, block.self_attn.out_proj.weight)
                active = keep_top(ranks(contribution), keep.sum(-1))
            new = [keep & active, keep, active, torch.ones_like(keep), contribution * keep, contribution]
            old = sums.get((layer, target), [0.0] * 6)
            sums[layer, target] = [a + b.double().sum().item() for a, b in zip(old, new, strict=True)]
    return sums


def test_sums_equal_their_definitions(model, bundle, held):
    moved = bundle.at(0.3, 0.6)
    quality = evaluate(model, bundle, held, [EvalSetting("predicted", 0.3, 0.6)], batch_tokens=150)[0]
    for key, (hit, selected, active, units, kept, mass) in sums_by_hand(model, PredictorSelector(moved), held).items():
        got = quality.sums[key]
        assert (int(got.tp), int(got.tp + got.fp), int(got.tp + got.fn), int(got.units)) == (
            hit,
            selected,
            active,
            units,
        )
        assert float(got.kept) == pytest.approx(kept, rel=1e-4)
        assert float(got.mass) == pytest.approx(mass, rel=1e-4)


def test_bytes_are_counted_on_the_scored_tokens(model, tiny_opt, held):
    tested = make_bundle(tiny_opt, cascade=True)
    moved = tested.at(0.4)
    first_stage, selected, active = ({0: 0, 1: 0} for _ in range(3))
    selector, alone = (
        PredictorSelector(moved, model=model),
        PredictorSelector(moved),
    )  # without the model there is no second stage

    def observe(layer, target, keep, values):
        if target == "mlp":
            selected[layer] += int(keep[:, 16:].sum())
            active[layer] += int((keep & (values > 0))[:, 16:].sum())

    for window in held.windows:
        ids = torch.tensor([window[:-1]])
        sparse = (torch.arange(ids.shape[1]) >= 16)[None]
        with torch.no_grad(), masking(model, selector, sparse, observe), record(model, {"mlp_in"}) as seen:
            model(ids)
        for layer in (0, 1):
            keep = alone(layer, "mlp", {Site(layer, "mlp_in"): seen[layer]["mlp_in"].view(1, -1, 48)})
            first_stage[layer] += int(keep[:, 16:].sum())
    asked = [EvalSetting("predicted", 0.4, 1.0, 16)]
    quality = evaluate(model, tested, held, asked, batch_tokens=150)[0]
    assert quality.candidates == first_stage
    tokens = sum(max(0, len(window) - 1 - 16) for window in held.windows)

    def share(size):  # planes of fc1 have 16 bits whatever a weight has
        read = sum(
            predictor_bytes(moved.specs[i, "mlp"])
            + (first_stage[i] * (48 / 2 + 8) + selected[i] * (1.5 * 48 + 4) + active[i] * size * 48) / tokens
            for i in (0, 1)
        )
        return pytest.approx(read / (2 * 2 * size * 48 * 96))

    assert quality.mlp_bytes == share(4)
    assert evaluate(model, tested, held, asked, batch_tokens=150, weights=FLOAT16)[0].mlp_bytes == share(2)


def test_only_sparse_positions_are_measured(model, bundle, held):
    quality = evaluate(model, bundle, held, [EvalSetting("predicted", 0.3, 1.0, 20)], batch_tokens=150)[0]
    assert int(quality.sums[0, "mlp"].units) == 96 * sum(max(0, len(window) - 1 - 20) for window in held.windows)
    assert quality.sums[0, "mlp"].density < 0.5


def test_yardsticks_take_as_many_units_as_predicted(model, bundle, held):
    names = ("predicted", "oracle", "random", "static", "noncontextual")
    scored = evaluate(model, bundle, held, [EvalSetting(name, 0.2, 0.7) for name in names], batch_tokens=150)
    by_name = {quality.row.selection: quality for quality in scored}
    # Layer 0 sees the same inputs in every row; deeper ones differ, but the number of units is always predicted's.
    for quality in scored:
        for key, sums in quality.sums.items():
            want = by_name["predicted"].sums[key]
            assert int(sums.tp + sums.fp) == int(want.tp + want.fp)
    mass = {name: by_name[name].sums[0, "mlp"].retained_mass for name in names}
    assert mass["oracle"] > max(mass["noncontextual"], mass["random"], mass["static"], mass["predicted"])
    assert mass["random"] == pytest.approx(0.2 * 2 / 3, abs=0.1)  # layer 0 has a third of the neurons' density
    assert len({round(value, 6) for value in mass.values()}) == 5


def test_oracle_takes_the_largest_of_the_dense_pass(model, bundle, held):
    one = EvalCorpus(held.windows[:1], [0], [len(held.windows[0]) - 1], 100)
    got = evaluate(model, bundle, one, [EvalSetting("oracle", 0.2)])[0]
    ids = torch.tensor([one.windows[0][:-1]])
    with torch.no_grad(), record(model, {"activation"}) as dense:
        model(ids)
    counts, masks = {}, {}
    with (
        torch.no_grad(),
        masking(model, PredictorSelector(bundle.at(0.2)), observe=lambda la, t, k, v: counts.__setitem__((la, t), k)),
    ):
        model(ids)
    for layer in range(2):
        scores = neuron_contribution(dense[layer]["activation"], model.model.decoder.layers[layer].fc2.weight)
        masks[layer, "mlp"] = keep_top(ranks(scores), counts[layer, "mlp"].sum(-1))
    with torch.no_grad(), masking(model, FixedSelections(masks)):
        expected = plain_nats(model, one)
    np.testing.assert_allclose(got.nats, expected, rtol=1e-5)


def test_noncontextual_ignores_the_context_and_static_ignores_the_token(model, bundle):
    from dejavu_train.evaluation.baselines import noncontextual_contributions

    ids = torch.randint(4, 300, (2, 9))
    other = ids.clone()
    other[:, :8] = torch.randint(4, 300, (2, 8))
    for target, n_units in (("mlp", 96), ("heads", 4)):
        first = noncontextual_contributions(model, ids, 1)[target]
        assert first.shape == (2, 9, n_units)
        torch.testing.assert_close(first[:, 8], noncontextual_contributions(model, other, 1)[target][:, 8])


def test_random_rows_repeat_with_their_seed(model, bundle, held):
    rows = [EvalSetting("random", 0.2)]
    first, again, other = (evaluate(model, bundle, held, rows, seed=seed)[0].nats for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_paired_bootstrap():
    rng = np.random.default_rng(0)
    tokens = rng.integers(100, 400, size=60)
    dense = tokens * rng.normal(3.0, 0.8, size=60)
    noise = rng.normal(0.02, 0.01, size=60)
    value, error = increase(dense + tokens * noise, dense, tokens)
    assert value == pytest.approx(math.expm1(np.average(noise, weights=tokens)))
    assert error == pytest.approx(0.01 / math.sqrt(60), rel=0.35)  # of the difference, not of the documents' own spread
    assert increase(dense[:1], dense[:1], tokens[:1]) == (0.0, None)
