"""Prompts in chunks: the numbers of a token-by-token pass, the same bits in any chunks, beside others, and reused."""

import numpy as np
import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt

from dejavu_train import SparseOPTForCausalLM
from dejavu_train.engine.cpu import CpuEngine
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.prefill import Chunk, chunks_of
from dejavu_train.engine.rows import Rows
from dejavu_train.models.load import load_model

LONG = [2, *torch.randint(3, 300, (59,), generator=torch.Generator().manual_seed(1)).tolist()]
SHORT = [2, 9, 30]


KINDS = pytest.mark.parametrize("kind", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.gpu)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose heads are as wide as kernels take."""
    return save_tiny_opt(tmp_path_factory.mktemp("opt"), hidden_size=64, word_embed_proj_dim=64)


def made(kind, folder, batch=2):
    model, bundle = load_model(str(folder)), make_bundle(folder, means=True).at(0.3, 0.5)
    if kind == "cpu":
        engine = CpuEngine(model, bundle, batch=batch, context=128, threads=2)
    elif kind == "triton":
        engine = DecodeEngine(model.half().cuda(), bundle, EngineOptions(batch=batch, context=128))
    else:
        engine = DecodeEngine(model, bundle, EngineOptions(batch=batch, context=128, ops="reference"))
    engine.cut(16)  # so that a prompt has several
    return engine


def text(rows, b, n=100):
    """What row b has written when it is done."""
    found = []
    for _ in range(n):
        for news in rows.step(4):
            found += news.tokens if news.row == b else []
            if news.row == b and news.done:
                assert news.error is None
                return found
    raise AssertionError("the row is not done")


def test_chunks_follow_from_positions_alone():
    assert chunks_of(16, 256) == [Chunk(0, 16, 16)] and chunks_of(17, 256) == [Chunk(0, 17, 32)]
    whole = [Chunk(0, 256, 256), Chunk(256, 256, 256)]
    assert chunks_of(512, 256) == whole and chunks_of(513, 256) == [*whole, Chunk(512, 1, 16)]
    assert chunks_of(20, 256, slotted=32) == [Chunk(0, 8, 8), Chunk(8, 8, 8), Chunk(16, 4, 8)]
    assert chunks_of(300, 256, slotted=32)[1:] == [Chunk(256, 44, 64)]


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_a_prompt_on_a_cpu_leaves_the_bits_of_dense_steps(tiny_opt, stored):
    """K and V are compared: those of a whole prompt, and those of a step for each of its tokens."""
    engines = [CpuEngine(load_model(str(tiny_opt)), batch=1, context=80, stored=stored, threads=2) for _ in range(2)]
    engines[0].begin([Row.of_prompt(LONG, 70)])
    engines[1].begin([Row(LONG, 70, sparse_from=60)])
    for _ in range(len(LONG)):
        engines[1].step()
    n = len(LONG)
    assert np.array_equal(engines[0].state.keys[..., :n], engines[1].state.keys[..., :n])
    assert np.array_equal(engines[0].state.values[:, :, :, :n], engines[1].state.values[:, :, :, :n])


@KINDS
def test_kept_inputs_of_a_prompt_are_never_read(folder, kind):
    texts = []
    for noise in (0.0, float("nan")):
        engine = made(kind, folder, 1)
        rows = Rows(engine, [])
        if kind == "cpu":
            engine.state.attn_in[:] = noise
        else:
            for cache in engine.core.caches:
                cache.attn_in.fill_(noise)
        texts.append(text(rows, rows.join(Row.of_prompt(LONG, 90))))
    assert texts[0] == texts[1] and len(texts[0]) == 30


@KINDS
def test_a_row_is_the_same_alone_beside_others_and_after_reuse(folder, kind):
    engine = made(kind, folder)
    rows, row = Rows(engine, []), Row.of_prompt(LONG, 90)
    alone = text(rows, rows.join(row))
    assert text(rows, rows.join(row)) == alone and rows.reused == 59 // engine.grid * engine.grid > 0
    longer = Row.of_prompt([*LONG, 7, 8, 9], 90)  # as the second turn of a chat begins
    again = text(rows, rows.join(longer))
    assert rows.reused == 60 // engine.grid * engine.grid
    rows = Rows(engine, [])  # forgets what it holds
    other = rows.join(Row.of_prompt(SHORT, 100))
    rows.step(2)
    b = rows.join(longer)
    assert rows.reused == 0 and text(rows, b) == again
    rows.leave(other)


@KINDS
def test_others_write_between_two_chunks_of_a_prompt(folder, kind):
    engine = made(kind, folder)
    rows = Rows(engine, [])
    alone = text(rows, rows.join(Row.of_prompt(SHORT, 60)))
    rows = Rows(engine, [])
    first = rows.join(Row.of_prompt(SHORT, 60))
    found = [token for news in rows.step(4) for token in news.tokens]
    second = rows.join(Row.of_prompt(LONG, 90))
    assert rows.taken == 2 and rows.free == 0
    counts = []
    while second in rows._arriving:
        told = [news for news in rows.step(4) if news.row == first]
        found += [token for news in told for token in news.tokens]
        counts.append(sum(len(news.tokens) for news in told))
    assert len(counts) >= 3 and max(counts[1:]) == 1
    while first in rows._seats:
        found += [token for news in rows.step(4) if news.row == first for token in news.tokens]
    assert found == alone


@KINDS
def test_who_leaves_while_the_prompt_runs_frees_the_place_at_once(folder, kind):
    engine = made(kind, folder, 1)
    rows = Rows(engine, [])
    rows.leave(rows.join(Row.of_prompt(LONG, 90)))
    assert rows.free == 1 and rows.step(4) == []
    b = rows.join(Row.of_prompt(SHORT, 20))
    assert rows.reused == 0 and len(text(rows, b)) == 17


@KINDS
def test_warming_up_leaves_nothing_behind(folder, kind):
    engine = made(kind, folder)
    expected = text(rows := Rows(engine, []), rows.join(Row.of_prompt(LONG, 90)))
    engine.warm_up()
    assert not engine.prompted
    rows = Rows(engine, [])
    assert text(rows, rows.join(Row.of_prompt(LONG, 90))) == expected


def test_a_model_is_warmed_up_on_demand(folder):
    model = SparseOPTForCausalLM.from_model(load_model(str(folder)), make_bundle(folder).at(0.3, 1.0), "cpu")
    model.warm_up(rows=2, tokens=40)
    assert [(b, engine.context >= 40) for b, engine in model.engine_pool().engines.items()] == [(2, True)]
