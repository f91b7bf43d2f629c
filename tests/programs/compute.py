"""Calls of a program that compute something: forward passes, texts, losses, several callers at once. All are judged."""

import copy
import math
import random
import sys
import threading
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .judge import (
    NATS,
    NATS_ROUNDED,
    NATS_SPARSE,
    Finding,
    expect,
    judge_beams,
    judge_greedy,
    judge_logits,
    judge_loss,
    judge_processed,
)
from .oracle import near_of
from .world import World

FORWARDS = ("plain", "batch", "labels", "items", "chunks", "keep", "embeds", "tuple")
GENERATES = (
    "greedy", "greedy", "batch", "batch", "stops", "beams", "penalty", "least", "cache", "streamer", "dictionary",
    "one of one", "lookup", "several", "again",
)  # fmt: skip
SCORES = ("engine", "evaluate")


def draw_compute(rng: random.Random, profile: dict[str, Any], threads: bool = True) -> dict[str, Any]:
    """A computing call that makes sense for the backend."""
    kinds = ["generate"] * 5 + ["forward"] * 3 + ["score"] + ["thread"] * (2 if threads else 0)
    if profile["backend"] == "cpu":
        kinds = [kind for kind in kinds if kind != "forward"]
    call = rng.choice(kinds)
    made: dict[str, Any] = {"call": call, "seed": rng.randrange(1 << 20)}
    engine = profile["backend"] in ("cpu", "reference")
    if call == "forward":
        plain = ("plain", "batch", "labels", "items", "keep", "tuple")
        made["kind"] = rng.choice(plain if engine else FORWARDS)
    elif call == "generate":
        native = ("greedy", "batch", "stops", "streamer", "dictionary", "again")
        made["kind"] = rng.choice(native if engine and rng.random() < 0.9 else GENERATES)
        made["new"] = rng.randint(3, 12)
    elif call == "score":
        made["kind"] = rng.choice(SCORES)
    else:
        made |= {"callers": rng.randint(3, 5), "new": rng.randint(6, 14), "dense": rng.random() < 0.4}
    return made


@torch.no_grad()
def forward(world: World, call: dict[str, Any]) -> None:
    kind, generator = call["kind"], torch.Generator().manual_seed(call["seed"])
    rows = 1 if kind in ("plain", "chunks") else int(torch.randint(1, 4, (), generator=generator))
    left = kind != "labels"
    ids, mask = world.padded(generator, rows, 11, left)
    given: dict[str, Any] = {"attention_mask": mask} if rows > 1 else {}
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1:][mask[:, :-1] == 0] = -100  # logits at padding are nobody's
    # sparse_from="prompt" takes a scored text for the prompt and refuses labels.
    if kind in ("labels", "items") and isinstance(world.start, str):
        kind = "plain"
    items = 17 if kind == "items" else None
    lengths = None
    if kind == "chunks":
        cut = 4
        cache = world.model.new_cache() or DynamicCache(config=world.model.config)
        first = world.called(ids[:, :cut], past_key_values=cache, use_cache=True)
        got = world.called(ids[:, cut:], past_key_values=copy.deepcopy(first.past_key_values)).logits
        again = world.called(ids[:, cut:], past_key_values=first.past_key_values).logits
        expect(torch.allclose(got, again, atol=1e-4, equal_nan=True), "forward: a copied cache gives other logits")
        got, lengths = torch.cat([first.logits, got], dim=1), torch.tensor([cut])
    elif kind == "embeds":
        got = world.called(inputs_embeds=world.model.get_input_embeddings()(ids), **given).logits
    elif kind == "tuple":
        got = world.called(ids, return_dict=False, **given)[0]
    elif kind == "keep":
        got = world.called(ids, logits_to_keep=3, **given).logits
    else:
        if kind in ("labels", "items"):
            given["labels"] = labels
        out = world.called(ids, **given, **({} if items is None else {"num_items_in_batch": items}))
        got = out.logits
    oracle = world.oracle(lengths)
    want = oracle(ids, attention_mask=mask).logits
    near = near_of(oracle, ids) & (world.dtype == torch.float32)
    kept = slice(-3, None) if kind == "keep" else slice(None)
    compared = (mask.bool() & ~near)[:, kept]
    judge_logits(got, want[:, kept], compared, world.dtype, world.sparse, f"forward {kind}")
    if kind in ("labels", "items") and not (near & mask.bool()).any():
        judge_loss(out.loss, want, labels, items, world.dtype, world.sparse)


def _asked(kind: str, new: int) -> dict[str, Any]:
    asked: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    more: dict[str, dict[str, Any]] = {
        "beams": {"num_beams": 3, "num_return_sequences": 2},
        "penalty": {"repetition_penalty": 1.4},
        "least": {"min_new_tokens": new - 1},
        "dictionary": {"return_dict_in_generate": True},
        "one of one": {"do_sample": True, "top_k": 1},
        "lookup": {"prompt_lookup_num_tokens": 3},
        "several": {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    }
    return asked | more.get(kind, {})


class Collected:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


@torch.no_grad()
def generate(world: World, call: dict[str, Any]) -> None:
    kind, new = call["kind"], call["new"]
    generator = torch.Generator().manual_seed(call["seed"])
    rows = int(torch.randint(2, 5, (), generator=generator)) if kind in ("batch", "stops") else 1
    ids, mask = world.padded(generator, rows, int(torch.randint(3, 12, (), generator=generator)))
    oracle = world.oracle(mask.sum(dim=1))
    asked = _asked(kind, new)
    stops: tuple[int, ...] = ()
    if kind == "beams" and world.dtype != torch.float32:
        asked, kind = _asked("greedy", new), "greedy"
    if kind in ("stops", "least"):  # tokens that come
        likely = oracle.generate(ids, attention_mask=mask, use_cache=False, **_asked("greedy", new))[:, ids.shape[1] :]
        stops = tuple({int(likely[0, min(2, new - 1)]), int(likely[-1, min(4, new - 1)])})
        asked["eos_token_id"] = list(stops)
    streamer = Collected() if kind == "streamer" else None
    if streamer is not None:
        asked["streamer"] = streamer
    if kind == "cache":
        cut = ids.shape[1] - 1
        cache = world.model.new_cache() or DynamicCache(config=world.model.config)
        world.called(ids[:, :cut], past_key_values=cache, use_cache=True)
        if isinstance(world.start, str):
            return _after_a_prompt(world, ids, cache, new)
        asked["past_key_values"] = cache
    times = 2 if kind == "again" else 1
    for _ in range(times):
        torch.manual_seed(3)
        out = world.called.generate(input_ids=ids, attention_mask=mask, **asked)
    sequences = out.sequences if kind == "dictionary" else out
    if streamer is not None:
        expect(streamer.tokens == sequences[0].tolist(), f"streamer: {streamer.tokens}, not {sequences[0].tolist()}")
        expect(streamer.ended == 1, f"streamer: ended {streamer.ended} times")
    if kind == "beams":
        best = oracle.generate(ids, attention_mask=mask, use_cache=False, **asked)
        judge_beams(oracle, sequences, best, ids, mask, 2)
    elif kind in ("penalty", "least"):
        if world.dtype != torch.float32:
            return
        keep = {"return_dict_in_generate": True, "output_scores": True, "use_cache": False}
        best = oracle.generate(ids, attention_mask=mask, **asked, **keep)
        oracle(best.sequences, attention_mask=torch.ones_like(best.sequences))
        judge_processed(sequences, best, ids, near_of(oracle, best.sequences))
    else:
        if kind == "several":
            ids, mask = ids.repeat_interleave(2, dim=0), mask.repeat_interleave(2, dim=0)
        judge_greedy(oracle, sequences, ids, mask, world.dtype, new=new, stops=stops, rounded=world.rounds)


def _after_a_prompt(world: World, ids: Tensor, cache: Any, new: int) -> None:
    """With sparse_from="prompt" what a cache holds is dense, and so is the rest of the prompt of ``generate``."""
    asked = _asked("greedy", new) | {"past_key_values": cache}
    out = world.called.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **asked)
    oracle = world.oracle(torch.tensor([ids.shape[1]]))
    judge_greedy(oracle, out, ids, torch.ones_like(ids), world.dtype, new=new, rounded=world.rounds)


@torch.no_grad()
def score(world: World, call: dict[str, Any]) -> None:
    """Negative log-likelihoods by the CPU engine or by the evaluation that writes tables."""
    generator = torch.Generator().manual_seed(call["seed"])
    rows = [world.tokens(generator, 1, n)[0] for n in (9, 5, 12)]
    if world.dtype != torch.float32 or world.lora:
        return
    if call["kind"] == "engine":
        from dejavu_train.engine.cpu import CpuEngine

        got = CpuEngine(world.model, world.bundle, batch=2, context=32, threads=1).score([r.tolist() for r in rows])
        sums = [float(nats.double().sum()) for nats in got]
    else:
        if world.density[2] or world.given is None or world.coded:
            return
        from dejavu_train.evaluation.perplexity import EvalCorpus, EvalSetting, evaluate

        held = EvalCorpus([r.tolist() for r in rows], [0, 1, 2], [len(r) - 1 for r in rows], 1)
        mlp, heads = (1.0, 1.0) if world.exact else world.density[:2]
        result = evaluate(world.given, world.bundle, held, [EvalSetting("predicted", mlp, heads)])
        sums = [float(nats) for nats in result[0].nats]
        for row in result:
            expect(all(map(math.isfinite, row.nats)), "evaluate: not finite")
    start, world.start = world.start, 0
    try:
        oracle = world.oracle()
    finally:
        world.start = start
    for row, got_nats in zip(rows, sums, strict=True):
        logits = oracle(row[None], attention_mask=torch.ones(1, len(row), dtype=torch.long)).logits
        want = float(torch.nn.functional.cross_entropy(logits[0, :-1], row[1:], reduction="sum"))
        if near_of(oracle, row[None]).any():
            continue
        if not math.isfinite(want):
            raise Finding(f"score {call['kind']}: {got_nats} where the oracle is not finite")
        limit = (NATS_SPARSE if world.sparse else NATS_ROUNDED) if world.coded else NATS
        expect(abs(got_nats - want) <= limit * abs(want), f"score {call['kind']}: {got_nats:.6g}, not {want:.6g}")


def thread(world: World, call: dict[str, Any]) -> None:
    """Several callers of one model, mixed lengths. Perhaps the dense model that it was made around beside them."""
    generator = torch.Generator().manual_seed(call["seed"])
    lengths = torch.randint(2, 14, (call["callers"],), generator=generator).tolist()
    prompts = [world.tokens(generator, 1, n) for n in lengths]
    texts: dict[int, Any] = {}
    dense: list[Tensor] = []
    asked = _asked("greedy", call["new"])
    begin = threading.Barrier(len(prompts) + 1)

    def caller(number: int) -> None:
        begin.wait()
        try:
            ids = prompts[number]
            for _ in range(2):
                texts[number] = world.called.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **asked)
        except Exception as error:  # judged by the one who called us
            texts[number] = error

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    crowd = [threading.Thread(target=caller, args=(number,)) for number in range(len(prompts))]
    try:
        for one in crowd:
            one.start()
        begin.wait()
        beside = call["dense"] and world.given is not None
        with torch.no_grad():
            while any(one.is_alive() for one in crowd):
                if beside and len(dense) < 50:
                    dense.append(world.given(prompts[0]).logits)
                for one in crowd:
                    one.join(0.001)
    finally:
        sys.setswitchinterval(before)
    for result in texts.values():
        if isinstance(result, Exception):
            raise result
    oracle = world.oracle()
    for number, ids in enumerate(prompts):
        alone = world.called.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **asked)
        expect(torch.equal(texts[number], alone), f"thread: caller {number} has another text than alone")
        if isinstance(world.start, str) and world.sparse:
            oracle.start = torch.tensor([ids.shape[1]])
        try:
            rounded = {"new": call["new"], "rounded": world.rounds}
            judge_greedy(oracle, texts[number], ids, torch.ones_like(ids), world.dtype, **rounded)
        except Finding as found:
            raise Finding(f"thread: caller {number}: {found}") from None
    if dense:
        want = copy.deepcopy(world.truth).double()(prompts[0]).logits.detach()
        for got in dense:
            judge_logits(
                got, want, torch.ones_like(prompts[0], dtype=torch.bool), world.dtype, False, "thread: the dense model"
            )


COMPUTES = {"forward": forward, "generate": generate, "score": score, "thread": thread}


def run_compute(world: World, call: dict[str, Any]) -> None:
    COMPUTES[call["call"]](world, call)
