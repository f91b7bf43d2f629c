"""Several ranks that decode together, each a thread here, against one engine with everything."""

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from decode_helpers import random_bundle, random_opt, reference_engine, rows_of
from family_models import random_family
from four_bit_models import four_bits

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row, Sampling
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.ranks.ranks import Ranks
from dejavu_train.engine.ranks.sharing import rates_of, shards_of
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.families import dims_of
from dejavu_train.ground.errors import UserError


@dataclass
class Meeting:
    """Where threads meet that are the ranks of one engine: their sums, and what their hosts tell each other."""

    world: int
    held: dict = field(default_factory=dict)
    sums: int = 0

    def __post_init__(self):
        self.barrier, self.turn = threading.Barrier(self.world, timeout=60), threading.Lock()

    def wait(self):
        self.turn.release()  # one thread computes at a time: Triton's interpreter is not made for more
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def exchange(self, rank, value):
        self.held[rank] = value
        self.wait()
        found = [self.held[each] for each in range(self.world)]
        self.wait()
        return found


@dataclass
class ThreadSums:
    """See `Sums` and `Hosts`."""

    meeting: Meeting
    rank: int
    name: str = "threads"

    def buffer(self, *sizes):
        return torch.zeros(*sizes)

    def add(self, part, out, pdl=False):
        assert part.is_contiguous() and part.shape == out.shape
        out.copy_(sum(self.meeting.exchange(self.rank, part.clone())))
        self.meeting.sums += self.rank == 0

    def total(self, x):
        return sum(self.meeting.exchange(self.rank, x.clone()))

    def by_rank(self):
        return self

    def gather(self, number):
        return self.meeting.exchange(self.rank, number)

    def waiting(self):
        return nullcontext()


def on_ranks(world, run):
    """What `run(sums)` gives on each of so many threads. The first error of one is raised."""
    meeting, found, errors = Meeting(world), [None] * world, []

    def work(rank):
        with meeting.turn:
            try:
                found[rank] = run(ThreadSums(meeting, rank))
            except BaseException as error:  # what pytest.raises misses is no Exception
                errors.append(error)
                meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return found


def engine_of(model, bundle, sums, dtype=torch.float32, ops="reference", **options):
    """One rank's engine. Units lie where calibrated frequencies put them."""
    shape = model.shape if isinstance(model, DecodeWeights) else dims_of(model.config)
    shards = shards_of(shape, sums.meeting.world, None if bundle is None else rates_of(bundle))
    ranks = Ranks(shards[sums.rank], sums, sums)
    return DecodeEngine(model, bundle, EngineOptions(ops=ops, device="cpu", dtype=dtype, **options), ranks)


@pytest.fixture(scope="module")
def model():
    return random_opt(n_heads=4, d_ffn=192)


BUNDLES = [
    None,
    {},
    {"lookahead": 1, "targets": ("mlp",), "relu": True},
    {"lookahead": 2, "int8": True},
    {"means": True},
    {"dense_layers": (1,)},
]


@pytest.mark.parametrize(
    ("batch", "world", "options"),
    [*((1, 2, options) for options in BUNDLES), (2, 2, None), (2, 4, {}), (2, 2, {"lookahead": 2, "int8": True})],
    ids=str,
)
def test_ranks_write_what_one_engine_writes(model, batch, world, options):
    bundle, prompts = None if options is None else random_bundle(model, **options), rows_of(6, 11)[:batch]
    alone = reference_engine(model, bundle, batch=batch)
    expected, scores = alone.generate(prompts, 10, stop_tokens=()), alone.score(prompts)

    def run(sums):
        engine = engine_of(model, bundle, sums, batch=batch)
        return engine.generate(prompts, 10, stop_tokens=()), engine.score(prompts)

    for tokens, nll in on_ranks(world, run):
        assert tokens == expected
        for got, wanted in zip(nll, scores, strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)


def test_ranks_select_what_one_engine_selects(model):
    bundle, (row,) = random_bundle(model), rows_of(9)
    alone = reference_engine(model, bundle)
    alone.logits([row])
    wanted = {key: each.to_mask(1) for key, each in alone.core.selections.items()}

    def run(sums):
        engine = engine_of(model, bundle, sums)
        engine.logits([row])
        shard = engine.ranks.shard
        return {key: (shard.ids(*key), each.to_mask(1)) for key, each in engine.core.selections.items()}

    found = on_ranks(2, run)
    for key, mask in wanted.items():
        together = torch.zeros_like(mask)
        for ids, mine in (each[key] for each in found):
            together[:, ids] = mine
        assert torch.equal(together, mask) and 0 < mask.float().mean() < 1


def test_samples_are_the_same_on_all_ranks(model):
    bundle, prompts = random_bundle(model), rows_of(6, 11)
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=7)

    def run(sums):
        return engine_of(model, bundle, sums, batch=2).generate(prompts, 12, sampling=sampling, stop_tokens=())

    one, other = on_ranks(2, run)
    assert one == other != reference_engine(model, bundle, batch=2).generate(prompts, 12, stop_tokens=())


def test_four_bits_on_ranks():
    model = four_bits(random_opt(d_model=64, n_heads=4, d_ffn=192), head=True)
    bundle, prompts = random_bundle(model), rows_of(6)
    expected = reference_engine(model, bundle).generate(prompts, 8, stop_tokens=())
    for tokens in on_ranks(2, lambda sums: engine_of(model, bundle, sums).generate(prompts, 8, stop_tokens=())):
        assert tokens == expected


@pytest.mark.parametrize("family", ["llama", "arcee", "nemotron", "jais2", "persimmon", "nanochat", "bloom", "350m"])
def test_families_on_ranks(family):
    model = random_family(family)
    world = 3 if dims_of(model.config).n_kv_heads % 2 else 2
    bundle, prompts = random_bundle(model), rows_of(6)
    expected = reference_engine(model, bundle).generate(prompts, 8, stop_tokens=())
    for tokens in on_ranks(world, lambda sums: engine_of(model, bundle, sums).generate(prompts, 8, stop_tokens=())):
        assert tokens == expected


def by_plain_torch_and_kernels(packed, n_layers, call):
    """On each of two ranks what `call` lists of an engine by plain torch, then of one by kernels."""
    model = random_opt(d_model=64, n_heads=2, d_ffn=128, n_layers=n_layers, vocab=80, positions=32)
    model = four_bits(model) if packed else model
    bundle, (row,), dtype = random_bundle(model), rows_of(4, vocab=80), torch.float16 if packed else torch.float32

    def run(sums):
        options = {"context": 16, "graph": False}
        engines = [engine_of(model, bundle, sums, dtype, ops, **options) for ops in ("reference", "triton")]
        return [found for engine in engines for found in call(engine, row)]

    return on_ranks(2, run)


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_run_a_shard(packed):
    """The kernels in Triton's interpreter, over the units of a rank: what they give is what plain torch gives."""
    for plain, kernels in by_plain_torch_and_kernels(packed, 2, lambda engine, row: engine.score([row])):
        torch.testing.assert_close(kernels, plain, atol=2e-2 if packed else 2e-5, rtol=1e-3)


@pytest.mark.parametrize("rows", [1, 3])
def test_ranks_that_leave_silent_neurons_out_write_what_one_engine_writes(rows):
    model = random_opt(d_model=64, n_heads=2, d_ffn=128, n_layers=1, vocab=80, positions=32)
    prompts = rows_of(4, 5, 3, vocab=80)[:rows]
    expected = reference_engine(model, None, batch=rows).generate(prompts, 3, stop_tokens=())

    def run(sums):
        engines = [engine_of(model, None, sums, ops="triton", batch=rows, context=16, graph=False, zeros=zeros)
                   for zeros in ("skip", "read")]  # fmt: skip
        assert [engine.plan.half(0, "mlp").skips for engine in engines] == [True, False]
        return [engine.generate(prompts, 3, stop_tokens=()) for engine in engines]

    assert on_ranks(2, run) == [[expected] * 2] * 2


def test_a_layer_has_two_sums_and_a_step_one_of_logits(model):
    counted = []

    def run(sums):
        engine = engine_of(model, random_bundle(model), sums)
        engine.begin([Row(rows_of(3)[0], 20)])
        before = sums.meeting.sums
        sums.meeting.wait()
        engine.step()
        if sums.rank == 0:
            counted.append(sums.meeting.sums - before)
        assert "one of 2 GPUs" in engine.describe()

    on_ranks(2, run)
    assert counted == [2 * 2 + 1]


def test_who_listens_on_one_rank_is_heard_on_all(model):
    heard = []

    def run(sums):
        engine = engine_of(model, None, sums)
        listener = (lambda row, token: heard.append(token)) if sums.rank == 1 else None
        first = engine.generate(rows_of(5), 40, stop_tokens=(), callback=listener)[0]
        return first, engine.generate(rows_of(5), 40, stop_tokens=(first[3],), callback=listener)[0]

    (one, stopped), other = on_ranks(2, run)
    assert (one, stopped) == other and heard == one + stopped and len(stopped) <= 4


def test_a_row_that_one_rank_ends_ends_on_all(model):
    prompts = rows_of(5, 9)

    def run(sums):
        engine = engine_of(model, None, sums, batch=2)
        whole = engine.generate(prompts, 12, stop_tokens=())

        def generate(callback):
            return engine.generate(prompts, 12, stop_tokens=(), callback=callback)

        def end_own(row, token):
            return row == sums.rank and token == whole[row][5]

        one = generate((lambda row, token: row == 0 and token == whole[0][3]) if sums.rank == 1 else None)
        return whole, one, generate(end_own)

    for whole, one, each in on_ranks(2, run):
        ends = [[row[: row.index(row[at]) + 1] for row in whole] for at in (3, 5)]
        assert one == [ends[0][0], whole[1]] and each == ends[1]


@pytest.mark.parametrize("other", ["prompt", "lossless", "score", "threshold"])
def test_ranks_that_make_other_calls_say_so(model, other):
    def run(sums):
        later = sums.rank == 1
        bundle = random_bundle(model, threshold=0.5 if later and other == "threshold" else 0.3)
        engine = engine_of(model, bundle, sums)
        with pytest.raises(UserError, match="rank 1 was asked for something else"):
            if later and other == "score":
                engine.score(rows_of(5))
            else:
                prompt = rows_of(6 if later and other == "prompt" else 5)
                engine.generate(prompt, 4, stop_tokens=(), lossless=later and other == "lossless")
        if other in ("lossless", "score"):  # they are still in step
            assert len(engine.generate(rows_of(5), 4, stop_tokens=())[0]) == 4

    on_ranks(2, run)


def test_refusals_in_one_line(model):
    def refused(bundle=None, words="", call=None, **options):
        def run(sums):
            with pytest.raises(UserError, match=words):
                engine = engine_of(model, bundle, sums, **options)
                if call is not None:
                    call(engine)

        on_ranks(2, run)

    refused(random_bundle(model, top_k=0.4), "takes the k largest logits of all units")
    row = Row([1, 2], 5, Sampling(), 0, 2)
    refused(words="rows that join others", call=lambda engine: engine.place(0, row))
    with pytest.raises(UserError, match="4 groups of heads are not shared out evenly over 3 GPUs"):
        shards_of(dims_of(model.config), 3)
