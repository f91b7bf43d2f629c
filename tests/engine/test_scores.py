"""Log-probabilities that rows keep: those of a forward pass, whoever else is served."""

import dataclasses

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from family_models import CASES, random_family

from dejavu_train.engine.cpu.engine import CpuEngine
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row, Sampling
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.rows import Rows
from dejavu_train.extras.serving.lossless_rows import LosslessRows
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.sparse.model import SparseOPTForCausalLM

PROMPT = [2, 30, 31, 200, 33, 170, 91]
OTHER = [2, 8, 15, 60]


def written(rows, b, steps=64):
    """Tokens and scores of row b until it is done."""
    tokens, scores = [], []
    for _ in range(steps):
        for news in rows.step(8):
            if news.row == b:
                tokens, scores = tokens + news.tokens, scores + news.scores
                assert news.error is None
                if news.done:
                    return tokens, scores
    raise AssertionError("the row is not done")


GPU = pytest.param("cuda", marks=pytest.mark.gpu)
INTERPRETED = pytest.param("triton", marks=pytest.mark.long)


@pytest.fixture(scope="module")
def wide_opt(tmp_path_factory):
    """Heads as wide as kernels take them."""
    folder = tmp_path_factory.mktemp("scores") / "model"
    return save_tiny_opt(folder, hidden_size=64, word_embed_proj_dim=64)


@pytest.fixture(params=["cpu", "reference", INTERPRETED, GPU])
def made(request, wide_opt):
    """A bundle, a model of plain torch, and an engine: the CPU's, or the GPU's by its references or its kernels."""
    bundle = make_bundle(wide_opt).at(0.3, 0.5)
    model = SparseOPTForCausalLM.from_model(load_model(str(wide_opt)), bundle, "gather")
    if request.param == "cpu":
        return bundle, model, CpuEngine(load_model(str(wide_opt)), bundle, batch=4, context=48)
    cuda = request.param == "cuda"
    dense = load_model(str(wide_opt)).to("cuda" if cuda else "cpu")
    engine = DecodeEngine(
        dense, bundle, EngineOptions(4, 48, ops="reference" if request.param == "reference" else "triton")
    )
    return bundle, model, engine


def wanted(model, tokens, start, top):
    """Of a forward pass: nats of each token but the first, and the likeliest ones."""
    model.sparse_from = start
    nats = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return [
        (nats[at - 1, token].item(), nats[at - 1].topk(top).values.tolist()) for at, token in enumerate(tokens) if at
    ]


def agree(scores, tokens, expected):
    assert [score.token for score in scores] == list(tokens)
    for score, (nats, best) in zip(scores, expected, strict=True):
        assert score.logprob == pytest.approx(nats, abs=2e-3)
        assert [value for _, value in score.top] == pytest.approx(best, abs=2e-3)


@pytest.mark.parametrize("start", [0, 4, len(PROMPT)])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, seed=5, presence_penalty=1.0)], ids=["greedy", "drawn"])
def test_scores_are_those_of_a_forward_pass(made, start, sampling):
    _, model, engine = made
    rows = Rows(engine, [])
    b = rows.join(Row(PROMPT, len(PROMPT) + 9, sampling, start, start, scored_from=1, top=3))
    tokens, scores = written(rows, b)
    text = PROMPT + tokens
    assert len(tokens) == 9
    agree(scores, text[1:], wanted(model, text, start, 3))


@pytest.mark.parametrize("length", [1, 2, len(PROMPT)])
@pytest.mark.parametrize("start", [0, len(PROMPT)])
def test_a_prompt_alone_is_scored(made, length, start):
    _, model, engine = made
    rows, prompt = Rows(engine, []), PROMPT[:length]
    prefilled = min(start, length - 1)
    tokens, scores = written(rows, rows.join(Row(prompt, length, Sampling(), start, prefilled, scored_from=1, top=2)))
    assert tokens == [] and rows.taken == 0
    agree(scores, prompt[1:], wanted(model, prompt, start, 2))


def test_others_keep_their_text_and_their_screen(made):
    """Beside a row that is scored. On a CPU the LM head of the others reads little more than its screen."""
    _, _, engine = made
    rows, counts = Rows(engine, []), getattr(engine, "bytes_read", lambda: {"lm_head": 0})
    alone = written(rows, rows.join(Row.of_prompt(OTHER, 40)))[0]
    counts()
    written(rows, rows.join(Row.of_prompt(OTHER, 40)))
    screened = counts()["lm_head"]
    a = rows.join(Row.of_prompt(OTHER, 40))
    b = rows.join(dataclasses.replace(Row.of_prompt(PROMPT, 20), scored_from=len(PROMPT)))
    texts = {a: [], b: []}
    while rows.taken:
        for news in rows.step(8):
            texts[news.row] += news.tokens
            assert news.row == b or not news.scores
    assert texts[a] == alone and len(texts[b]) == 13
    if screened:
        whole = 13 * engine.shape.vocab_size * 4 * engine.weights.model.rows.shape[1]
        assert counts()["lm_head"] == pytest.approx(screened + whole, rel=0.1)


def test_a_row_that_is_scored_joins_steps_ahead(made):
    """An engine whose steps run beside the caller owes news when it comes. Everybody has all tokens and scores."""
    _, _, engine = made
    rows = Rows(engine, [])
    alone = written(rows, rows.join(Row.of_prompt(OTHER, 30)))[0]
    a = rows.join(Row.of_prompt(OTHER, 30))
    texts, scores = {a: []}, []
    for news in rows.step(4):
        texts[news.row] += news.tokens
    b = rows.join(dataclasses.replace(Row.of_prompt(PROMPT, 15), scored_from=1))
    scored = texts[b] = []
    c = None
    while rows.taken:
        for news in rows.step(4):
            texts[news.row] += news.tokens
            scores += news.scores
            assert news.row == b or not news.scores
        if c is None and len(scored) == 8:
            c = rows.join(Row.of_prompt(OTHER, 20))
            texts[c] = []
    assert texts[a] == alone and texts[c] == alone[:16]
    assert [score.token for score in scores] == PROMPT[1:] + scored


def test_a_row_that_ends_at_once_is_scored_once(made):
    """Its first token ends it, and others take steps before anybody hears of it."""
    _, _, engine = made
    rows = Rows(engine, [])
    first = written(rows, rows.join(Row.of_prompt(PROMPT, len(PROMPT) + 1)))[0][0]
    rows = Rows(engine, [first])
    a = rows.join(Row.of_prompt(OTHER, 40, Sampling(), 40))
    b = rows.join(dataclasses.replace(Row.of_prompt(PROMPT, 20), scored_from=len(PROMPT)))
    tokens, scores = written(rows, b)
    assert tokens == [first] == [score.token for score in scores]
    rows.leave(a)


def test_a_lossless_server_says_that_it_has_none(wide_opt):
    engine = CpuEngine(load_model(str(wide_opt)), make_bundle(wide_opt).at(0.3, 0.5), batch=1, context=48)
    rows = LosslessRows(engine, [])
    with pytest.raises(UserError, match="gives no log-probabilities; leave logprobs and echo out"):
        rows.join(dataclasses.replace(Row.of_prompt(PROMPT, 20), scored_from=1))
    assert rows.taken == 0


@pytest.mark.parametrize("stored", ["float32", "int8", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_every_family_scores_a_prompt(name, stored):
    """At once and token by token: LM heads with caps, norms behind them, codes of 8 bits."""
    dense = random_family(name).eval()
    if stored == "reference":
        engine = DecodeEngine(dense, None, EngineOptions(2, 48, ops="reference"))
    else:
        engine = CpuEngine(dense, None, batch=2, context=48, stored=stored)
    rows, within = Rows(engine, []), 0.3 if stored == "int8" else 2e-3
    with torch.no_grad():
        nats = random_family(name).eval()(torch.tensor([PROMPT])).logits[0].double().log_softmax(-1)
    right = [float(nats[at - 1, token]) for at, token in enumerate(PROMPT) if at]
    for prefilled in (0, len(PROMPT) - 1):
        b = rows.join(Row(PROMPT, len(PROMPT), Sampling(), len(PROMPT), prefilled, scored_from=1))
        found = [score.logprob for score in written(rows, b)[1]]
        assert found == pytest.approx(right, abs=within), prefilled
        right, within = found, 0.01  # both ways have the same weights
