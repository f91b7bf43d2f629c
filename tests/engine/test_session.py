"""What a session asks of an engine, by an engine that counts: a row's next token is one more than its last."""

from types import SimpleNamespace

import pytest
import torch

from dejavu_train.engine.session import Session
from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import UserError


class Counting(Session):
    """Steps in twos. At ``fault`` the numbers of a row are no longer finite."""

    shape = ModelDims(8, 16, 2, 2, 50, 40)
    batch, context, plan = 2, 40, SimpleNamespace(selecting={})

    def __init__(self, fault=-1):
        super().__init__()
        self.fault, self.log = fault, []

    def begin(self, rows, stops=(), *, score=False):
        self.held = [row.prefilled for row in rows]
        self.log.append(("begin", list(self.held), score))
        self.state = SimpleNamespace(tokens=torch.zeros(2, 40, dtype=torch.int32), nll=torch.arange(80.0).view(2, 40))
        self.total, self.least = [row.total for row in rows], [row.least for row in rows]
        self.rows, self.stops = [row.tokens for row in rows], stops
        for b, row in enumerate(self.rows):
            self.state.tokens[b, : len(row)] = torch.tensor(row)
        self._next()

    def _next(self):
        for b, row in enumerate(self.rows):
            at = self.held[b]
            if self._over(b):
                continue
            if at >= len(row):
                self.state.tokens[b, at] = self.state.tokens[b, at - 1] + 1
            self.held[b] += 1

    def _over(self, b):
        at = self.held[b]
        last = int(self.state.tokens[b, at - 1])
        ended = at > len(self.rows[b]) and last in self.stops and at > self.least[b]
        return at >= self.total[b] or ended

    def steps(self, n, mode, score=False):
        n = min(n, 2)
        self.log.append((n, mode, score))
        for _ in range(n):
            self._next()
        return n

    def read(self, n):
        faults = {0: UserError("not finite")} if 0 <= self.fault < max(self.held) else {}
        return self.held[:n], [self._over(b) for b in range(n)], faults

    def end(self, b):
        self.total[b] = self.held[b]


def test_rows_end_at_their_own_stop_token_or_limit():
    engine = Counting()
    assert engine.generate([[3, 4], [20]], 6, stop_tokens=(7,)) == [[5, 6, 7], [21, 22, 23, 24, 25, 26]]
    assert engine.log == [("begin", [2, 1], False), (2, "greedy", False), (2, "greedy", False), (1, "greedy", False)]
    assert engine.generate([[5]], 4, stop_tokens=(7,), min_new_tokens=3) == [[6, 7, 8, 9]]
    assert engine.generate([[5]], 30, stop_tokens=(7,)) == [[6, 7]] and engine.log[-1][0] == 2, "looked in between"


def test_more_tokens_at_least_than_at_most_are_refused_before_anything_begins():
    engine = Counting()
    with pytest.raises(UserError, match="min_new_tokens must be at most max_new_tokens, which is 4, got 5; raise"):
        engine.generate([[5]], 4, min_new_tokens=5)
    assert not engine.log


def test_a_listener_hears_every_token_once_and_none_that_follows_from_a_fault():
    heard = []
    engine = Counting()
    new = engine.generate([[3, 4], [20]], 3, callback=lambda row, token: heard.append((row, token)))
    assert [[token for row, token in heard if row == b] for b in range(2)] == new
    assert [row for row, _ in heard] == [0, 1] * 3 and {step[0] for step in engine.log[1:]} == {1}
    heard.clear()
    with pytest.raises(UserError, match="not finite"):
        Counting(fault=4).generate([[3, 4]], 9, callback=lambda row, token: heard.append(token))
    assert heard == [5, 6]


def test_prompts_by_steps_are_not_given_back():
    heard = []
    engine = Counting()
    assert engine.generate([[3, 4, 5]], 2, prompt_phase="steps", callback=lambda *new: heard.append(new)) == [[6, 7]]
    assert heard == [(0, 6), (0, 7)] and engine.log[0] == ("begin", [0], False) and len(engine.log) == 5


def test_scores_are_taken_a_batch_at_a_time():
    engine = Counting()
    got = engine.score([[2, 3, 4], [2, 3], [2, 3]])
    assert [nll.tolist() for nll in got] == [[1.0, 2.0], [41.0], [1.0]]
    assert engine.log == [("begin", [0, 0], True), (2, "greedy", True), ("begin", [0], True), (1, "greedy", True)]
    assert engine.perplexity([[2, 3]]) == {"perplexity": pytest.approx(2.71828, abs=1e-4), "nats": 1.0, "tokens": 1.0}


@pytest.mark.parametrize(
    "call", [lambda e: e.generate([[2]], 1), lambda e: e.score([[2, 3]])], ids=["generate", "score"]
)
def test_a_callback_cannot_call_its_engine(call):
    engine = Counting()
    with pytest.raises(UserError, match="build another engine"):
        engine.generate([[5]], 2, callback=lambda *_: call(engine))
    assert engine.generate([[5]], 2) == [[6, 7]], "the turn was given back"


def test_a_callback_ends_its_row_and_an_engine_without_joining_says_so():
    engine, heard = Counting(), []

    def hear(row, token):
        heard.append((row, token))
        return row == 0 and token == 6

    assert engine.generate([[4], [20, 21]], 4, stop_tokens=(), callback=hear) == [[5, 6], [22, 23, 24, 25]]
    assert [token for row, token in heard if row == 0] == [5, 6]
    with pytest.raises(UserError, match="rows of this engine begin together"):
        engine.open(())
