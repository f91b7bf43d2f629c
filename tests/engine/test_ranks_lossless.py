"""Lossless decoding of several ranks: the text of the dense model on as many, whatever is drafted."""

import pytest
from decode_helpers import random_bundle, random_opt, reference_engine, rows_of
from family_models import random_family
from four_bit_models import four_bits
from test_ranks import by_plain_torch_and_kernels, engine_of, on_ranks

from dejavu_train.engine.draft import Draft
from dejavu_train.engine.inputs import Sampling
from dejavu_train.families import dims_of
from dejavu_train.ground.errors import UserError

N = 12
SAMPLED = Sampling(0.9, 0.95, seed=4)


@pytest.fixture(scope="module")
def model():
    return random_opt(n_heads=4, d_ffn=192)


def texts(engine, prompts, drafts, **options):
    """Of each draft the text, and how many of its drafted tokens were accepted."""
    found = []
    for draft in drafts:
        text = engine.generate(prompts, N, stop_tokens=(), lossless=draft, **options)[0]
        found.append((text, engine.acceptance.drafted, engine.acceptance.accepted))
    return found


@pytest.mark.parametrize(("world", "sampling"), [(2, None), (4, SAMPLED)], ids=["greedy", "sampled"])
def test_the_text_is_the_dense_models_on_as_many_ranks(model, world, sampling):
    bundle, prompts = random_bundle(model, means=True, lookahead=1), rows_of(9)
    fixed = [Draft(0), Draft(3), Draft(7, "int4")]
    alone = texts(reference_engine(model, bundle), prompts, fixed, sampling=sampling)
    assert any(0 < accepted < tried for _, tried, accepted in alone)

    def run(sums):
        plain = engine_of(model, None, sums).generate(prompts, N, stop_tokens=(), sampling=sampling)[0]
        engine = engine_of(model, bundle, sums)
        return plain, texts(engine, prompts, [*fixed, Draft(None, "int4")], sampling=sampling)

    found = on_ranks(world, run)
    assert all(each == found[0] for each in found), "ranks take the same decisions"
    plain, drafted = found[0]
    assert drafted[:3] == alone, "what one GPU drafts and accepts"
    assert [text for text, *_ in drafted] == [plain] * 4


@pytest.mark.parametrize("family", ["arcee", "bloom", "4 bits"])
def test_families_and_four_bits_on_ranks(model, family):
    if family == "4 bits":
        tested = four_bits(random_opt(d_model=64, n_heads=4, d_ffn=192), head=True)
    else:
        tested = random_family(family)
    world = 3 if dims_of(tested.config).n_kv_heads % 2 else 2
    bundle, prompts = random_bundle(tested), rows_of(6)
    drafts = [Draft(0), Draft(4)]
    for (plain, none, _), (text, tried, _) in on_ranks(
        world, lambda sums: texts(engine_of(tested, bundle, sums), prompts, drafts)
    ):
        assert text == plain and none == 0 < tried


def test_lengths_follow_the_first_ranks_clock(model):
    """Clocks of ranks differ, and lengths of drafts are chosen by times."""
    bundle, prompts, chosen = random_bundle(model), rows_of(9), {0: [], 1: []}

    def run(sums):
        engine = engine_of(model, bundle, sums)
        pair, ticks = engine.pair(Draft()), iter(range(10**6))
        pair.clock = lambda: next(ticks) ** (2 + sums.rank)  # a cycle takes ever longer, elsewhere even more so
        queue, pair.copied = pair.queue, None

        def logged(drafted, mode):
            chosen[sums.rank].append(drafted)
            return queue(drafted, mode)

        pair.queue = logged
        engine.generate(prompts, 50, stop_tokens=(), lossless=Draft())
        return pair.pace.seconds

    one, other = on_ranks(2, run)
    assert chosen[0] == chosen[1] and len(set(chosen[0])) > 3 and one == other


def test_what_ends_a_text_ends_it_on_all_ranks(model):
    bundle, prompts = random_bundle(model), rows_of(9)

    def run(sums):
        engine = engine_of(model, bundle, sums)
        (text,) = engine.generate(prompts, N, stop_tokens=(), lossless=Draft(0))
        heard = []
        (stopped,) = engine.generate(prompts, N, stop_tokens=(text[9],), lossless=Draft(5))
        listener = (lambda row, token: heard.append(token)) if sums.rank == 1 else None
        (again,) = engine.generate(prompts, N, stop_tokens=(), lossless=Draft(5), callback=listener)
        ended = engine.generate(prompts, N, lossless=Draft(3), callback=lambda row, token: token == text[5])[0]
        last = (lambda row, token: token == text[5]) if sums.rank == 1 else None
        assert engine.generate(prompts, N, stop_tokens=(), lossless=Draft(5), callback=last)[0] == ended
        return text, stopped, again, heard or text, ended

    for text, stopped, again, heard, ended in on_ranks(2, run):
        assert stopped == text[: text.index(text[9]) + 1] and again == heard == text
        assert ended == text[: text.index(text[5]) + 1]


def test_ranks_that_are_asked_for_different_drafts_say_so(model):
    def run(sums):
        engine = engine_of(model, None, sums)
        with pytest.raises(UserError, match="rank 1 was asked for something else"):
            engine.generate(rows_of(5), 4, lossless=Draft(3 + sums.rank))

    on_ranks(2, run)


@pytest.mark.parametrize("how", ["by place", "by neighbours"])
def test_sums_whose_order_depends_on_the_slot_are_refused(model, how):
    """A ring adds the parts of a buffer in different orders."""

    class Ring:
        def __init__(self, sums):
            self.sums, self.name, self.buffer, self.total = sums, "ring", sums.buffer, sums.total

        def by_rank(self):
            return self

        def add(self, part, out, pdl=False):
            parts = self.sums.meeting.exchange(self.sums.rank, part.clone())
            for place in range(len(out)):
                order = parts[place % 4 :] + parts[: place % 4] if how == "by place" else parts
                out[place] = sum(each[place] for each in order)
            if how == "by neighbours" and out[1].isnan().any():
                out[0] += 1e-6

    def run(sums):
        ring = Ring(sums)
        engine = engine_of(model, None, sums)
        object.__setattr__(engine.ranks, "sums", ring)
        with pytest.raises(UserError, match="a slot of a sum over GPUs depends on its neighbours"):
            engine.pair(Draft())

    on_ranks(4, run)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.long
def test_kernels_verify_a_shard(packed):
    """The kernels in Triton's interpreter give the text of plain torch."""

    def write(engine, row):
        return [engine.generate([row], 5, stop_tokens=(), lossless=Draft(length)) for length in (0, 2)]

    for plain, drafted, kernels, by_kernels in by_plain_torch_and_kernels(packed, 1, write):
        assert plain == drafted and kernels == by_kernels and (packed or plain == kernels)
