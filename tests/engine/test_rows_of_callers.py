"""Rows with their own sampling that join and leave between steps: each text is what it is alone."""

import dataclasses

import pytest
import torch
from bundles import make_bundle
from decode_helpers import tokens
from transformers.generation import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from dejavu_train.engine.cpu import CpuEngine, Sampling
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.rows import Rows
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model, load_tokenizer
from dejavu_train.sparse.model import SparseOPTForCausalLM

SAMPLINGS = (
    Sampling(),
    Sampling(1.3, seed=5),
    Sampling(0.9, 0.7, seed=6),
    Sampling(1.2, 0.9, top_k=40, seed=7),
    Sampling(1.0, min_p=0.05, seed=8),
    Sampling(0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, seed=9),
    Sampling(repetition_penalty=1.5),
    Sampling(1.3, seed=5),
)


def row(number, new=24):
    prompt = tokens((3, 40, 17, 5, 9, 30, 2, 11)[number], seed=number)
    return Row(prompt, len(prompt) + new, SAMPLINGS[number], len(prompt), len(prompt))


def written(rows, asked, late=0):
    """The texts of rows that join ``late`` steps one after another."""
    texts, numbers, waiting = {}, {}, list(enumerate(asked))
    while waiting or numbers:
        if waiting and rows.free:
            number, each = waiting.pop(0)
            numbers[rows.join(each)] = number
        for news in rows.step(late or 4):
            texts.setdefault(numbers[news.row], []).extend(news.tokens)
            assert news.error is None
            if news.done:
                del numbers[news.row]
    return [texts[number] for number in range(len(asked))]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_text_is_what_it_is_alone(tiny_opt, threads):
    """A plain bundle and one with a second stage, by one and by several threads, which share sums otherwise."""
    bundle = make_bundle(tiny_opt, means=True, cascade=threads == 3).at(0.3, 0.4)
    engine = CpuEngine(load_model(str(tiny_opt)), bundle, batch=8, context=80, threads=threads)
    rows, asked = Rows(engine, ()), [row(number) for number in range(8)]
    alone = [written(rows, [each])[0] for each in asked]
    assert all(len(text) == 24 for text in alone) and len({*map(tuple, alone)}) == 8
    assert written(rows, asked, late=1) == alone
    assert written(rows, asked[::-1], late=3) == alone[::-1]
    shorter = [dataclasses.replace(each, total=each.total - 5 * (i % 4)) for i, each in enumerate(asked + asked)]
    found = written(rows, shorter, late=2)
    assert found == [text[: len(text) - 5 * (i % 4)] for i, text in enumerate(alone + alone)], "16 rows in 8 places"


def test_sums_do_not_follow_from_other_rows(tiny_opt):
    """To the last bit, by three threads: K and V of a row alone, and beside rows that select other units."""
    bundle = make_bundle(tiny_opt, means=True).at(0.3, 0.5)
    engine = CpuEngine(load_model(str(tiny_opt)), bundle, batch=8, context=80, threads=3)

    def kept(asked):
        rows = Rows(engine, ())
        places = [rows.join(each) for each in asked]
        while rows.taken:
            rows.step(8)
        length = asked[-1].total - 1
        marks = engine.state.watermark[:, places[-1]]
        found = [
            engine.state.values[layer, places[-1], head, : min(int(mark), length)].copy()
            for layer, of_layer in enumerate(marks)
            for head, mark in enumerate(of_layer)
        ]
        assert sum(map(len, found)) > 4 * length
        return found

    last = row(2)
    together = kept([row(0), row(1), row(4), row(5), last])
    assert all((a == b).all() for a, b in zip(kept([last]), together, strict=True))


def test_a_row_that_leaves_makes_room_and_stops_end_rows(tiny_opt):
    bundle = make_bundle(tiny_opt).at(0.3, 0.4)
    engine = CpuEngine(load_model(str(tiny_opt)), bundle, batch=2, context=80, threads=1)
    (text,) = written(Rows(engine, ()), [row(2)])
    rows = Rows(engine, (text[10],))
    first, second = rows.join(row(2)), rows.join(row(1, new=40))
    assert not rows.free
    with pytest.raises(UserError, match="2 rows, all taken"):
        rows.join(row(0))
    rows.step(2)
    rows.leave(second)
    assert rows.free
    news = rows.step(20)
    end = text.index(text[10]) + 1
    assert [(each.row, each.done) for each in news] == [(first, True)] and news[0].tokens == text[3:end]
    with pytest.raises(UserError, match="do not fit"):
        rows.join(row(1, new=70))
    assert rows.step(1) == []


def test_a_row_that_is_not_finite_ends_alone(tiny_opt):
    model = load_model(str(tiny_opt))
    with torch.no_grad():
        model.model.decoder.embed_positions.weight[30 + 2] = float("inf")
    bundle = make_bundle(tiny_opt).at(0.3, 0.4)
    rows = Rows(CpuEngine(model, bundle, batch=2, context=80, threads=1), ())
    fine = rows.join(Row(tokens(4, seed=1), 29, Sampling(), 4, 4))
    rows.step(1)
    ill = rows.join(Row(tokens(28, seed=2), 40, Sampling(), 28, 28))
    news = {each.row: each for each in rows.step(4)}
    assert news[ill].done and "not finite" in str(news[ill].error) and "position 30" in str(news[ill].error)
    assert news[fine].error is None and len(news[fine].tokens) == 4
    with pytest.raises(UserError, match="not finite"):
        rows.join(Row(tokens(40, seed=2), 50, Sampling(), 40, 40))
    assert len(rows.step(3)[0].tokens) == 3, "the other row goes on"


def test_rows_join_the_engine_of_a_gpu(tiny_opt):
    bundle = make_bundle(tiny_opt, means=True).at(0.3, 0.4)
    options = EngineOptions(batch=4, context=64, device="cpu", ops="reference")
    rows, asked = Rows(DecodeEngine(load_model(str(tiny_opt)), bundle, options), ()), [row(n, 6) for n in (0, 2, 6, 5)]
    alone = [written(rows, [each])[0] for each in asked]
    assert written(rows, asked, late=2) == alone


def test_what_a_graph_runs_before_it_is_recorded_counts_no_token(tiny_opt):
    options = EngineOptions(batch=2, context=64, device="cpu", ops="reference")
    engine = DecodeEngine(load_model(str(tiny_opt)), None, options)
    engine.open(())
    engine.place(1, row(5, 6))
    before = {field.name: getattr(engine.state, field.name).clone() for field in dataclasses.fields(engine.state)}
    with engine.core.undone():
        engine.core.eager("mixed", False)
    for name in ("seen", "tokens", "position", "done"):
        assert torch.equal(getattr(engine.state, name), before[name]), name


def test_steps_run_ahead_of_their_news_and_none_too_many(tiny_opt):
    """A row that leaves or stops while steps are on their way is not heard of again, nor is it taken for the next."""
    bundle = make_bundle(tiny_opt, means=True).at(0.3, 0.4)
    options = EngineOptions(batch=2, context=64, device="cpu", ops="reference")
    engine, run = DecodeEngine(load_model(str(tiny_opt)), bundle, options), []
    step = engine.core.step
    engine.core.step = lambda *asked: (run.append(asked), step(*asked))
    texts = [written(Rows(engine, ()), [row(n, 12)])[0] for n in (0, 2, 3)]
    assert len(run) == 3 * 11 and all(len(text) == 12 for text in texts)
    rows = Rows(engine, (texts[1][2],))
    stop = texts[1].index(texts[1][2]) + 1
    first, second = rows.join(row(0, 12)), rows.join(row(2, 12))
    assert rows.step(4) == [], "these steps run while the caller does something else"
    rows.leave(first)
    assert rows.join(row(3, 12)) == first
    assert [(each.row, each.tokens, each.done) for each in rows.step(4)] == [(second, texts[1][:stop], True)]
    assert rows.join(row(0, 12)) == second, "while steps are on their way in which the row before was done"
    found = {first: [], second: []}
    while rows.taken:
        for each in rows.step(4):
            found[each.row] += each.tokens
    assert found == {first: texts[2], second: texts[0]}
    assert rows.step(4) == []


@pytest.mark.parametrize("n", [1, 31, 32, 40])
def test_a_prompt_that_joins_is_that_of_a_batch(tiny_opt, n):
    """K and V, and what the LM head reads, whatever its place and the size that it is filled up to."""
    options = EngineOptions(batch=4, context=60, device="cpu", ops="reference")
    engine = DecodeEngine(load_model(str(tiny_opt)), None, options)
    prompt, other = tokens(n, seed=n), tokens(17, seed=1)

    def left(b):
        caches = [part[b, :, :n].clone() for cache in engine.core.caches for part in (cache.k, cache.v)]
        return engine.core.x[-1, b].clone(), *caches

    engine.begin([Row(other, 50, Sampling(), 60, 17), Row(prompt, 50, Sampling(), 60, n)])
    expected = left(1)
    engine.open(())
    engine.place(2, Row(prompt, 50, Sampling(), 60, n))
    alone = left(2)
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)
    engine.place(1, Row(other, 50, Sampling(), 60, 17))
    engine.place(0, Row(prompt, 50, Sampling(), 60, n))
    for mine, same, still in zip(alone, left(0), left(2), strict=True):
        assert torch.equal(mine, same) and torch.equal(mine, still)


def test_penalties_and_stop_strings_equal_those_of_transformers(tiny_opt):
    bundle, tokenizer = make_bundle(tiny_opt).at(0.3, 0.75), load_tokenizer(str(tiny_opt))
    dense = load_model(str(tiny_opt))
    models = {
        name: SparseOPTForCausalLM.from_model(dense, bundle, backend, sparse_from="prompt", ops=ops)
        for name, backend, ops in (
            ("gather", "gather", "triton"),
            ("cpu", "cpu", "triton"),
            ("gpu", "triton", "reference"),
        )
    }
    ids = torch.tensor([tokens(9, seed=1), tokens(9, seed=2)])

    def texts(**asked):
        asked = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 1, "eos_token_id": 0} | asked
        mask = torch.ones_like(ids)
        return [model.generate(ids, attention_mask=mask, **asked).tolist() for model in models.values()]

    plain = texts()
    penalised = texts(repetition_penalty=1.7)
    assert penalised[0] == penalised[1] == penalised[2] and plain[0] != penalised[0]
    stop = tokenizer.decode(penalised[0][0][14:16])
    ended = texts(repetition_penalty=1.7, stop_strings=[stop], tokenizer=tokenizer)
    assert ended[0] == ended[1] == ended[2] and ended[0][0] != penalised[0][0]
    for model in models.values():
        with pytest.raises((UserError, ValueError), match="tokenizer"):
            model.generate(ids, stop_strings=[stop], max_new_tokens=4)


def test_filters_leave_the_sets_of_transformers(tiny_opt):
    """What a dense row draws after one prompt under many seeds, against the logits of transformers' processors."""
    model, prompt = load_model(str(tiny_opt)), tokens(12, seed=3)
    engine, ids = CpuEngine(model, batch=1, context=32, threads=1), torch.tensor([prompt])
    with torch.no_grad():
        logits = model(ids).logits[:, -1]
    scores = MinPLogitsWarper(0.4)(ids, RepetitionPenaltyLogitsProcessor(1.4)(ids, logits))
    allowed = set(scores[0].isfinite().nonzero()[:, 0].tolist())
    drawn = {
        engine.generate([prompt], 1, sampling=Sampling(1.0, min_p=0.4, repetition_penalty=1.4, seed=seed))[0][0]
        for seed in range(200)
    }
    assert drawn <= allowed < set(range(logits.shape[1])) and len(drawn) > len(allowed) // 2 > 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"min_p": 1.5}, "min_p must lie in 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a number from 1e-30 to"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be a number"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty must be a number"),
    ],
)
def test_values_outside_their_range_are_one_line(asked, said):
    with pytest.raises(UserError, match=said):
        Sampling(**asked)


def test_lossless_decoding_refuses_penalties_and_takes_min_p(tiny_opt):
    engine = CpuEngine(load_model(str(tiny_opt)), make_bundle(tiny_opt).at(0.3, 0.4), context=64, threads=1)
    with pytest.raises(UserError, match="lossless decoding has no penalties"):
        engine.generate([[2, 5]], 4, sampling=Sampling(presence_penalty=1), lossless=True)
    dense, asked = CpuEngine(engine.weights, context=64, threads=1), Sampling(1.5, min_p=0.1, seed=3)
    expected = dense.generate([tokens(9, seed=1)], 30, sampling=asked, stop_tokens=())
    assert engine.generate([tokens(9, seed=1)], 30, sampling=asked, stop_tokens=(), lossless=True) == expected
