"""The decode engine on a GPU: kernels against the masked forward pass, replay against eager, with and without PDL.

python -m pytest -m gpu tests/engine/test_decode_gpu.py
"""

import threading

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from decode_helpers import masked_nll, mlp_ahead, random_bundle, random_opt, rows_of

from dejavu_train import Guard
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row, Sampling
from dejavu_train.engine.model_weights import weights_of_model
from dejavu_train.engine.options import EngineOptions
from dejavu_train.models.load import load_model
from dejavu_train.sparse.model import SparseOPTForCausalLM

pytestmark = pytest.mark.gpu
NEAR = 5e-5  # a logit this close to its threshold may fall on either side: sums in another order
# Rows, halves ahead, how.
REPLAYS = ((1, 0, "stream"), (1, 1, "stream"), (1, 1, "fused"), (1, 1, "inline"), (4, 0, "stream"))
SIZES = {16: (64, 4), 32: (128, 4), 64: (256, 4), 80: (400, 5), 128: (384, 3)}


def poison(engine):
    """Caches, scratch and partial sums full of NaN: nothing may be read that was not written."""
    core = engine.core
    kept = [tensor for cache in core.caches for tensor in (cache.k, cache.v, cache.attn_in)]
    for tensor in [*kept, core.work.carried.inputs, core.work.q, core.work.heads_out, core.x, core.logits]:
        tensor.fill_(float("nan"))
    for tensor in (core.work.attention.partial, core.work.attention.largest, core.work.attention.total):
        tensor.fill_(float("nan"))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("head_dim", list(SIZES))
def test_kernels_equal_the_masked_forward_pass(head_dim, batch):
    d_model, n_heads = SIZES[head_dim]
    model = random_opt(d_model=d_model, n_heads=n_heads, d_ffn=3 * d_model + 7, positions=256)
    cases = ({}, {"lookahead": 1}, {"relu": True}, {"int8": True, "means": True}, {"dense_layers": (0,)}, None)
    fused = ({"lookahead": 1, "means": True}, {"lookahead": 1, "int4": True}, {"lookahead": 1, "targets": ("mlp",)})
    for options, how in (*((options, "stream") for options in cases), *((options, "fused") for options in fused)):
        bundle = None if options is None else random_bundle(model, rank=16, **options)
        bundle = mlp_ahead(bundle) if how == "fused" else bundle
        rows = rows_of(150, 40, 77)[:batch]
        engine = DecodeEngine(model, bundle, EngineOptions(batch=batch, device="cuda", crossover=False, look_ahead=how))
        poison(engine)
        for row, nll in zip(rows, engine.score(rows), strict=True):
            margins: list[torch.Tensor] = []
            expected = masked_nll(model, bundle, row, margins=margins)
            far = (nll - expected).abs() > 2e-3 + 1e-3 * expected.abs()
            # Only where a near-tie stands at the position or before it (one unit more or less changes later K/V), and
            # rarely.
            ties = torch.stack(margins).amin(0)[:-1] < NEAR if margins else torch.zeros_like(far)
            excused = ties.cumsum(0) > 0
            where = (
                f"{options} {how}: {int(far.sum())} of {len(far)} differ, at most by {(nll - expected).abs().max():.2g}"
            )
            assert not (far & ~excused).any(), where
            assert far.float().mean() <= 0.02, where
            if far.any():
                print(f"near-ties at head dim {head_dim}, batch {batch}, {where}")


@pytest.mark.parametrize("batch", [2, 8, 32])
@pytest.mark.parametrize("options", [{}, {"means": True, "relu": True}, {"cascade": True}], ids=str)
def test_layers_that_compute_all_select_the_same(batch, options):
    """At this width several rows compute all units and mask them. What is selected stays the bundle's."""
    model = random_opt(d_model=256, n_heads=4, d_ffn=776, positions=256)
    bundle, rows = random_bundle(model, rank=16, **options), rows_of(*range(20, 20 + batch))
    engine = DecodeEngine(model, bundle, EngineOptions(batch=batch, device="cuda"))
    poison(engine)
    assert "computed whole and masked" in engine.describe()
    for row, nll in zip(rows, engine.score(rows), strict=True):
        margins: list[torch.Tensor] = []
        expected = masked_nll(model, bundle, row, margins=margins)
        far = (nll - expected).abs() > 2e-3 + 1e-3 * expected.abs()
        assert not (far & ((torch.stack(margins).amin(0)[:-1] < NEAR).cumsum(0) == 0)).any(), row


def test_a_captured_engine_survives_others_on_the_same_weights():
    """The first one's graph reads tensors that the second one must neither free nor rewrite."""
    weights = weights_of_model(random_opt(d_model=256, n_heads=4, positions=256), torch.float16, "cuda")
    bundle, rows = random_bundle(random_opt(d_model=256, n_heads=4, positions=256), rank=16), rows_of(100)
    first = DecodeEngine(weights, bundle, EngineOptions(crossover=False))
    expected = first.score(rows)[0]
    for other in (None, random_bundle(random_opt(d_model=256, n_heads=4, positions=256), cascade=True)):
        DecodeEngine(weights, other).score(rows)
        torch.empty(2**28, dtype=torch.uint8, device="cuda").fill_(255)  # what was freed is now full of NaN
        assert torch.equal(first.score(rows)[0], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", [None, {}], ids=["dense", "sparse"])
def test_another_device_than_the_current_one(options):
    model = random_opt(d_model=256, n_heads=4, positions=256)
    bundle = None if options is None else random_bundle(model, rank=16)
    made = []
    for device in ("cuda:0", "cuda:1"):
        assert torch.cuda.current_device() == 0
        engine = DecodeEngine(model, bundle, EngineOptions(batch=2, device=device))
        made.append(engine.generate(rows_of(9, 30), 40, stop_tokens=()))
    assert made[0] == made[1]


def test_capture_is_not_broken_by_another_thread():
    """Another thread asks CUDA for memory while steps are captured."""
    model = random_opt(d_model=256, n_heads=4, n_layers=8, positions=256)
    ended, failed = threading.Event(), []

    def work():
        try:
            while not ended.is_set():
                torch.empty(2**22 + 2**20 * (torch.randint(64, ()).item()), dtype=torch.uint8, device="cuda")
                torch.cuda.empty_cache()
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for mode in (Sampling(), Sampling(0.8), Sampling(0.8, 0.5), Sampling(0.8, 0.5, top_k=5)):
            engine = DecodeEngine(model, random_bundle(model, rank=16), EngineOptions(device="cuda"))
            made = engine.generate(rows_of(9), 20, sampling=mode, stop_tokens=())
            assert len(made[0]) == 20
    finally:
        ended.set()
        thread.join()
    assert not failed


@pytest.mark.parametrize("options", [{}, {"cascade": True}, {"lookahead": True, "means": True}], ids=str)
def test_the_class_generates_and_scores_through_the_engine(tmp_path, options):
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "num_attention_heads": 4, "ffn_dim": 128}
    folder = str(save_tiny_opt(tmp_path, **sizes))
    bundle = make_bundle(folder, **options).at(0.4, 0.5)
    prompts = rows_of(9, 5, 12)
    ids = torch.tensor([[1] * (12 - len(row)) + row for row in prompts], device="cuda")
    mask, made = (ids != 1).long(), {}
    for backend, read in (("gather", bundle.one_stage()), ("auto", bundle)):
        model = SparseOPTForCausalLM.from_model(load_model(folder, device="cuda"), read, backend, "prompt")
        made[backend] = model.generate(
            ids, attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
        )  # fmt: skip
    assert model.backend == "triton" and model._runtime.gatherer is None
    assert torch.equal(made["gather"], made["auto"])
    model.sparse_from = 0
    whole = made["auto"][2:].repeat(8, 1)
    with torch.no_grad():
        reference = SparseOPTForCausalLM.from_model(load_model(folder, device="cuda"), bundle.one_stage(), "mask")
        expected = reference(whole, labels=whole)
        for rows in (1, 8):
            got = model(whole[:rows], labels=whole[:rows])
            torch.testing.assert_close(got.logits, expected.logits[:rows], atol=2e-3, rtol=2e-3)
            torch.testing.assert_close(got.loss, expected.loss, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("batch", "lookahead", "how"), REPLAYS)
def test_replay_equals_eager_bitwise(batch, lookahead, how):
    model = random_opt(d_model=256, n_heads=4, n_layers=3, positions=640)
    bundle = random_bundle(model, rank=16, lookahead=lookahead)
    bundle = mlp_ahead(bundle) if how == "fused" else bundle
    engines = [
        DecodeEngine(
            model,
            bundle,
            EngineOptions(
                batch=batch, device="cuda", dtype=torch.float16, graph=graph, pdl=pdl, look_ahead=how, crossover=False
            ),
        )  # fmt: skip
        for graph, pdl in ((True, True), (False, True), (True, False))
    ]
    for prompts in (rows_of(20, 30, 5, 9)[:batch], rows_of(9, 5, 30, 20)[:batch], rows_of(64, 3, 3, 3)[:batch]):
        made = [engine.generate(prompts, 512, stop_tokens=()) for engine in engines]
        assert made[0] == made[1] == made[2]
        last = [engine.core.x[-1].clone() for engine in engines]
        assert torch.equal(last[0], last[1]) and torch.equal(last[0], last[2])
    together = engines[0].generate(rows_of(20, 30, 5, 9)[:batch], 100, stop_tokens=())
    again = engines[0].generate(rows_of(20, 30, 5, 9)[:batch][::-1], 100, stop_tokens=())[::-1]
    assert together == again, "the order of rows must not matter"


@pytest.mark.parametrize(("batch", "options"), [(1, {}), (1, {"cascade": True}), (1, {"lookahead": True}), (4, {}),
                                                (4, {"cascade": True, "means": True})], ids=str)  # fmt: skip
def test_a_guard_replays_what_it_does_eagerly_and_asks_nothing(tmp_path, batch, options):
    """The measured step is a graph of its own. Tokens, thresholds and sums are those of an eager run, bit by bit, and
    those of plain torch to rounding."""
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "num_attention_heads": 4, "ffn_dim": 256}
    folder = str(save_tiny_opt(tmp_path, **sizes))
    bundle = make_bundle(folder, **options).at(0.4, 0.5)
    rows, made, guards = rows_of(*[90] * batch), [], []
    for ops, graph in (("triton", True), ("triton", False), ("reference", False)):
        engine = DecodeEngine(
            load_model(folder, device="cuda"),
            bundle,
            EngineOptions(batch=batch, ops=ops, graph=graph, guard=Guard(every=4, memory=32)),
        )
        made.append(engine.score(rows))
        guards.append([tensor.clone() for tensor in engine.guard.tensors()])
        if graph:
            engine.begin([Row(row, 90, number=b) for b, row in enumerate(rows)], score=True)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(8):
                    engine.step("greedy", score=True)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            steps = {key for key in engine.core._graphs if key[0] == "greedy"}  # others write rows and begin them
            assert steps == {("greedy", True, measured) for measured in (False, True)}
            first = engine.guard.first
    assert all(torch.equal(a, b) for a, b in zip(made[0], made[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(guards[0], guards[1], strict=True))
    assert int(guards[0][-1]) == batch * (89 // 4)
    assert not torch.equal(guards[0][0][:, 0], first), "no threshold moved"
    torch.testing.assert_close(guards[0][0], guards[2][0], atol=0.02, rtol=0)  # near-ties fall on either side
    shares = [sums[:, 4].sum() / sums[:, 5].sum() for sums in (guards[0][2], guards[2][2])]
    torch.testing.assert_close(*shares, atol=0.01, rtol=0)


def test_dense_engine_follows_hugging_face():
    model = random_opt(d_model=256, n_heads=2, n_layers=3, positions=300).cuda()
    engine = DecodeEngine(model, options=EngineOptions(batch=1))
    for prompt in rows_of(12, 100):
        ids = torch.tensor([prompt], device="cuda")
        expected = model.generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=None)[0, len(prompt) :].tolist()
        assert engine.generate([prompt], 60, stop_tokens=())[0] == expected
