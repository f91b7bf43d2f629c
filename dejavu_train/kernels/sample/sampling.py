"""Embedding of token and position, and the choice of the next token from the logits: the ends of a decoding step.

    x[b]           = embed[tokens[b, t]] + positions[t + 2]        t = position[b], learned positions or none
    greedy         the largest logit, ties to the lowest id
    temperature    argmax(logits / temperature + Gumbel noise), noise from (seed[b], t, id)
    top_p          the same over the smallest set of most likely tokens whose probability reaches top_p
    top_k          the same over the top_k most likely tokens (ties stay), and among these as top_p
    mixed          each row by its own numbers: temperature 0 is greedy, top_k 0 and top_p 1 are off
    tokens[b, t+1] = known there (a prompt, or teacher forcing) or chosen, then position[b] = t + 1

Logits are fp32, (B, V): B rows, V tokens. Capacity T. State: `TokenState`.
"""

from collections import namedtuple
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, check_shape, require
from dejavu_train.kernels.common.launch import as_dependent, wait_for_predecessor
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.dense.screened_head import TokenCandidates

MODES = ("greedy", "temperature", "top_p", "top_k", "mixed")
SEARCH_STEPS = 32
PARTS = 128  # programs of a greedy row, at most
LEAST_PART = 256  # tokens of one


@dataclass(frozen=True)
class AdvanceSettings(Settings, stage="advance"):
    """By the power of two that holds a row's logits, or its candidates behind a screen.

    warps: of a program. parts: programs of a row, at most. The sampling modes need all logits in one.
    """

    warps: int
    parts: int = 1


@dataclass(frozen=True)
class TokenState:
    """State of B rows, all on the device. So one captured graph serves any prompt, length and seed.

    Attributes:
        tokens: (B, T) int32. nll: (B, T) fp32, -log p of known tokens where they are scored.
        position, known, least, limit: (B) int32, where a row is, tokens given, tokens at least and at most.
        done, sparse_from, row_state: (B) int32.
        stops: (K) int32, -1 = none. Not chosen before position ``least``.
        temperature, top_p, min_p, repetition, presence, frequency: (B) fp32. top_k, seed: (B) int32.
        fault: (B) int32, the first token whose logits held a NaN, 0 = none. The row ends there.
        seen: (B, V) int32, twice as often as a token was generated, and 1 more where the prompt holds it.
        best, best_ids: (B, PARTS) fp32 and int32, of each part of a greedy row. tickets: (B), zero between steps.
    """

    tokens: Tensor
    nll: Tensor
    position: Tensor
    known: Tensor
    least: Tensor
    limit: Tensor
    done: Tensor
    sparse_from: Tensor
    row_state: Tensor
    stops: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor
    fault: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seen: Tensor
    best: Tensor
    best_ids: Tensor
    tickets: Tensor

    @classmethod
    def empty(
        cls, batch: int, capacity: int, device: torch.device | str, n_stops: int = 8, vocab: int = 0
    ) -> "TokenState":
        """All rows done at position 0. vocab: 0 = nothing is seen, and no step is mixed."""

        def ints(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        def floats(value: float, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.float32, device=device)

        zeros = ("position", "known", "least", "sparse_from", "row_state", "seed", "fault", "tickets")
        off = {"temperature": 1, "top_p": 1, "min_p": 0, "repetition": 1, "presence": 0, "frequency": 0}
        return cls(
            tokens=ints(batch, capacity),
            nll=floats(0, batch, capacity),
            limit=ints(batch, value=capacity),
            done=ints(batch, value=1),
            stops=ints(n_stops, value=-1),
            top_k=ints(batch, value=1),
            seen=ints(batch, vocab),
            best=floats(0, batch, PARTS),
            best_ids=ints(batch, PARTS),
            **{name: ints(batch) for name in zeros},
            **{name: floats(value, batch) for name, value in off.items()},
        )


# What a kernel is handed of a `TokenState`, and what a mixed step is handed besides.
RowTensors = namedtuple(
    "RowTensors",
    "tokens nll position known least limit done sparse_from row_state stops temperature top_p top_k seed fault",
)
Mixed = namedtuple("Mixed", "min_p repetition presence frequency seen")
Shared = namedtuple("Shared", "best best_ids tickets")  # and one whose rows are shared out


def embed_reference(state: TokenState, embedding, positions, x) -> None:
    """Plain torch: x (B, d) fp32."""
    at = state.position.long()
    token = state.tokens.gather(1, at[:, None])[:, 0].long()
    x.copy_(embedding[token].float())
    if positions is not None:
        x.add_(positions[at].float())


@triton.jit
def _embed_kernel(
    tokens, position, embedding, positions, x, capacity, D: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    b = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < D
    at = tl.load(position + b)
    token = tl.load(tokens + b * capacity + at).to(tl.int64)
    e = tl.load(embedding + token * D + c, mask=mask, other=0.0).to(tl.float32)
    if positions is not None:
        p = tl.load(positions + at.to(tl.int64) * D + c, mask=mask, other=0.0).to(tl.float32)
        e = e + p
    tl.store(x + b * D + c, e, mask=mask)


def embed(state: TokenState, embedding: Tensor, positions: Tensor | None, x: Tensor, pdl: bool = False) -> None:
    """embedding (V, d), positions (>= T, d) or None -> x (B, d) fp32."""
    check_device("x", x)
    batch, d = x.shape
    check_shape("x", x, batch, d)
    check_shape("embedding", embedding, embedding.shape[0], d)
    _embed_kernel[(batch, triton.cdiv(d, 1024))](
        state.tokens, state.position, embedding, positions, x, state.tokens.shape[1], D=d,
        BLOCK=1024, num_warps=4, **as_dependent(pdl, x.device),
    )  # fmt: skip


def penalised_reference(row: Tensor, state: TokenState, b: int) -> Tensor:
    """Logits (V,) of row b: of seen tokens divided by repetition if positive, else multiplied.

    From those that were generated presence is taken, and frequency as often as they were.
    """
    seen, scale = state.seen[b], state.repetition[b]
    row = torch.where(seen > 0, torch.where(row < 0, row * scale, row / scale), row)
    return row - torch.where(seen > 1, state.presence[b] + state.frequency[b] * (seen >> 1), 0.0)


def _number_of(mode: str) -> int:
    """The mode as the kernel takes it. Raises ValueError where there is none of this name."""
    if mode not in MODES:
        raise ValueError(f"unknown sampling mode {mode!r}, expected one of {', '.join(MODES)}")
    return MODES.index(mode)


def advance_reference(logits, state: TokenState, mode="greedy", score=False, chosen=None) -> None:
    """Plain torch. Noise comes from torch's generator seeded by (seed, position): same distribution, other numbers."""
    _number_of(mode)
    batch, capacity = state.tokens.shape
    if chosen is not None:  # as logits of a row in which nothing else can win
        best = chosen.values.isnan() if bool(chosen.values.isnan().any()) else chosen.values == chosen.values.max()
        token = int(chosen.ids[best].min())
        logits = torch.full_like(logits, float("-inf"))
        logits[0, min(token, logits.shape[1] - 1)] = chosen.values[best][0]
    for b in range(batch):
        if int(state.done[b]):
            state.row_state[b] = 0
            continue
        at = int(state.position[b]) + 1
        given = row = logits[b].float()
        bad = at > 0 and bool(row.isnan().any())
        if mode == "mixed":
            row = penalised_reference(row, state, b)
        if at < int(state.least[b]):
            row = row.clone()
            row[state.stops[state.stops >= 0].long()] = float("-inf")
        if at == 0 or bad:
            choice = 0
        elif mode == "greedy" or (mode == "mixed" and float(state.temperature[b]) == 0):
            choice = int((row == row.max()).nonzero()[0])
        else:
            row = row / state.temperature[b]
            if mode == "top_k" or (mode == "mixed" and int(state.top_k[b]) > 0):
                last = min(int(state.top_k[b]), len(row)) - 1
                row = row.masked_fill(row < row.sort(descending=True).values[last], float("-inf"))
            if mode in ("top_p", "top_k") or (mode == "mixed" and float(state.top_p[b]) < 1):
                order = torch.sort(row, descending=True, stable=True)
                mass = order.values.softmax(-1).cumsum(-1)
                last = int((mass < state.top_p[b]).sum().clamp(max=len(row) - 1))
                row = row.masked_fill(row < order.values[last], float("-inf"))
            if mode == "mixed" and float(state.min_p[b]) > 0:
                row = row.masked_fill(row < row.max() + state.min_p[b].log(), float("-inf"))
            generator = torch.Generator(row.device).manual_seed(int(state.seed[b]) * capacity + at)
            noise = -torch.log(
                -torch.log(torch.rand(len(row), generator=generator, device=row.device, dtype=torch.float32))
            )
            choice = int((row + noise).argmax())
        known = at < int(state.known[b])
        token = int(state.tokens[b, at]) if known else choice
        if known and score:
            state.nll[b, at] = given.logsumexp(-1) - given[token]
        state.tokens[b, at] = token
        if mode == "mixed":
            state.seen[b, token] = state.seen[b, token] | 1 if known else state.seen[b, token] + 2
        stop = not known and bool((state.stops == token).any())
        if bad:
            state.fault[b] = at
        done = stop or bad or at + 1 >= int(state.limit[b])
        state.position[b] = at
        state.done[b] = int(done)
        state.row_state[b] = 0 if done else (2 if at < int(state.sparse_from[b]) else 1)


@triton.jit
def _larger(a, b):
    """The larger number, or a NaN where either is one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _above_cutoff(scaled, weight, wanted, STEPS: tl.constexpr):
    """Logits from the largest cut-off on above which the weights still reach `wanted`, by bisection. -inf below it."""
    low = -88.0
    high = 1e-6
    for _ in range(STEPS):
        middle = (low + high) * 0.5
        enough = tl.sum(tl.where(scaled >= middle, weight, 0), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return tl.where(scaled >= low, scaled, float("-inf"))


@triton.jit
def _noisy(
    scaled, top, ids, inside, b, at, state, mixed, n_vocab, V_TILE: tl.constexpr, MODE: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Logits of a tile, of row b, of which top is the largest, filtered and with the noise of (seed, at, id)."""
    scaled = (scaled - top) / tl.load(state.temperature + b)
    if MODE >= 3:
        number = tl.load(state.top_k + b)
        if MODE == 4:
            number = tl.where(number > 0, number, n_vocab)
        scaled = _above_cutoff(scaled, 1, number, STEPS)
    if MODE >= 2:
        weight = tl.where(inside, tl.exp(scaled), 0.0)
        mass = tl.load(state.top_p + b) * tl.sum(weight)
        if MODE == 4:  # without top-k and top-p as the mode temperature, which sums nothing up
            mass = tl.where((tl.load(state.top_p + b) < 1.0) | (tl.load(state.top_k + b) > 0), mass, float("inf"))
        scaled = _above_cutoff(scaled, weight, mass, STEPS)
    if MODE == 4:  # tokens of at least min_p times the largest probability stay
        scaled = tl.where(scaled >= tl.log(tl.load(mixed.min_p + b)), scaled, float("-inf"))
    uniform = tl.rand(tl.load(state.seed + b), at * V_TILE + ids)
    noise = -tl.log(-tl.log(tl.maximum(uniform, 1e-10)))
    return tl.where(inside, scaled + noise, float("-inf"))


@triton.jit
def _move_on(
    row, ids, inside, b, at, given, kept, first_stop, last_place, dense_before, state, mixed, capacity, n_vocab,
    V_TILE: tl.constexpr, N_STOPS: tl.constexpr, MODE: tl.constexpr, SCORE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Chooses among the logits of row b, of tokens `ids`, and writes the state of the next step."""
    best = tl.reduce(row, 0, _larger)
    bad = (best != best) & (at > 0)  # nothing stands before position 0, whose logits are never looked at
    scaled = row
    top = best
    if MODE == 4:  # penalties first, see `penalised_reference`
        times = tl.load(mixed.seen + b.to(tl.int64) * n_vocab + ids, mask=inside, other=0)
        scale = tl.load(mixed.repetition + b)
        scaled = tl.where(times > 0, tl.where(row < 0, row * scale, row / scale), row)
        taken = tl.load(mixed.presence + b) + tl.load(mixed.frequency + b) * (times >> 1).to(tl.float32)
        scaled = tl.where(times > 1, scaled - taken, scaled)
        top = tl.max(scaled, 0)
    if at < first_stop:
        for i in tl.static_range(N_STOPS):
            scaled = tl.where(ids == tl.load(state.stops + i), float("-inf"), scaled)
        top = tl.max(scaled, 0)
    if MODE == 4:
        if tl.load(state.temperature + b) > 0:
            scaled = _noisy(scaled, top, ids, inside, b, at, state, mixed, n_vocab, V_TILE, MODE, STEPS)
            top = tl.max(scaled, 0)
    elif MODE > 0:
        scaled = _noisy(scaled, top, ids, inside, b, at, state, mixed, n_vocab, V_TILE, MODE, STEPS)
        top = tl.max(scaled, 0)
    choice = tl.min(tl.where(scaled == top, ids, n_vocab), 0)
    choice = tl.minimum(choice, n_vocab - 1)
    token = tl.where(given, kept, choice)
    if SCORE:
        if given:
            target = tl.sum(tl.where(ids == token, row, 0.0))
            tl.store(state.nll + b * capacity + at, best + tl.log(tl.sum(tl.exp(row - best))) - target)
    tl.store(state.tokens + b * capacity + at, token)
    if MODE == 4:
        counted = mixed.seen + b.to(tl.int64) * n_vocab + token
        before = tl.load(counted)
        tl.store(counted, tl.where(given, before | 1, before + 2))
    stop = 0
    for i in tl.static_range(N_STOPS):
        stop |= (tl.load(state.stops + i) == token).to(tl.int32)
    stop = tl.where(given, 0, stop)
    if bad:
        tl.store(state.fault + b, at)
    finished = (stop != 0) | bad | (at + 1 >= last_place)
    tl.store(state.position + b, at)
    tl.store(state.done + b, finished.to(tl.int32))
    tl.store(state.row_state + b, tl.where(finished, 0, tl.where(at < dense_before, 2, 1)))


@triton.jit
def _leave_best(row, ids, inside, b, part, barred, state, shared, n_vocab, N_STOPS: tl.constexpr, PARTS: tl.constexpr):
    """Leaves the largest of a part's logits, NaN where one is, and its lowest id. How many parts had left theirs."""
    worst = tl.reduce(row, 0, _larger)
    if barred:
        for i in tl.static_range(N_STOPS):
            row = tl.where(ids == tl.load(state.stops + i), float("-inf"), row)
    top = tl.max(row, 0)
    own = tl.min(tl.where(inside & (row == top), ids, n_vocab), 0)
    tl.store(shared.best + b * PARTS + part, tl.where(worst != worst, worst, top))
    tl.store(shared.best_ids + b * PARTS + part, own)
    tl.debug_barrier()
    return tl.atomic_add(shared.tickets + b, 1, sem="acq_rel")


@triton.jit
def _advance_kernel(
    logits, state, chosen, mixed, shared, capacity, n_row, n_vocab, V_TILE: tl.constexpr, N_STOPS: tl.constexpr,
    MODE: tl.constexpr, SCORE: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program a row holds all logits in registers: no sort, no softmax in memory. Greedy rows without scores are
    # `shared`: each program holds a part, and the last to finish chooses among what all of them left.
    # What the step before left is older than the LM head's launch, so it is read before the wait. It is read past the
    # L1, which may hold values of an earlier step.
    b = tl.program_id(0)
    finished_before = tl.load(state.done + b, cache_modifier=".cg")
    at = tl.load(state.position + b, cache_modifier=".cg") + 1
    given = at < tl.load(state.known + b, cache_modifier=".cg")
    kept = tl.load(state.tokens + b * capacity + at, mask=finished_before == 0, other=0, cache_modifier=".cg")
    first_stop = tl.load(state.least + b, cache_modifier=".cg")
    last_place = tl.load(state.limit + b, cache_modifier=".cg")
    dense_before = tl.load(state.sparse_from + b, cache_modifier=".cg")
    wait_for_predecessor(PDL)
    if finished_before != 0:
        tl.store(state.row_state + b, 0)
    else:
        ids = tl.arange(0, V_TILE)
        if shared is not None:
            ids += tl.program_id(1) * V_TILE
        inside = ids < n_row
        row = tl.load(logits + b.to(tl.int64) * n_row + ids, mask=inside, other=float("-inf"))
        if shared is not None:
            arrived = _leave_best(
                row, ids, inside, b, tl.program_id(1), at < first_stop, state, shared, n_vocab, N_STOPS, PARTS
            )
            if arrived == tl.num_programs(1) - 1:
                tl.debug_barrier()
                parts = tl.arange(0, PARTS)
                there = parts < tl.num_programs(1)
                slot = b * PARTS + parts
                best = tl.load(shared.best + slot, mask=there, other=float("-inf"), cache_modifier=".cg")
                best_ids = tl.load(shared.best_ids + slot, mask=there, other=n_vocab, cache_modifier=".cg")
                tl.store(shared.tickets + b, 0)
                _move_on(
                    best, best_ids, there, b, at, given, kept, first_stop, last_place, dense_before, state, mixed,
                    capacity, n_vocab, V_TILE, N_STOPS, MODE, SCORE, STEPS,
                )  # fmt: skip
        else:
            if chosen is not None:
                ids = tl.load(chosen + ids, mask=inside, other=n_vocab)
            _move_on(
                row, ids, inside, b, at, given, kept, first_stop, last_place, dense_before, state, mixed,
                capacity, n_vocab, V_TILE, N_STOPS, MODE, SCORE, STEPS,
            )  # fmt: skip


def advance(
    logits: Tensor,
    state: TokenState,
    mode: str = "greedy",
    score: bool = False,
    pdl: bool = False,
    chosen: TokenCandidates | None = None,
) -> None:
    """Choose the next token of every row that is not done and move it on.

    Args:
        mode: greedy, temperature, top_p, top_k or mixed.
        chosen: of a greedy row, which then needs no logits. Its LM head (`kernels/dense/screened_head.py`) leaves
            tokens with a logit each, NaN where any of its logits was one.
    """
    check_device("logits", logits)
    batch, n_vocab = logits.shape
    check_shape("logits", logits, batch, n_vocab)
    if chosen is not None:
        require(batch == 1 and mode == "greedy" and not score, "candidates are for one row, greedy, without scores")
        check_shape("chosen.ids", chosen.ids, chosen.values.numel())
    number = _number_of(mode)
    if mode == "mixed":
        check_shape("seen", state.seen, batch, n_vocab)
    n_row = n_vocab if chosen is None else chosen.values.numel()
    tile, alone = triton.next_power_of_2(n_row), mode != "greedy" or score or chosen is not None
    settings = AdvanceSettings.find(
        "float", state.tokens.device, tile=tile, screened=chosen is not None, shared=not alone
    )
    require(settings.parts <= PARTS, f"a row has at most {PARTS} parts, not {settings.parts}")
    if not alone and settings.parts > 1:
        tile = min(tile, triton.next_power_of_2(max(LEAST_PART, triton.cdiv(n_row, settings.parts))))
    parts = triton.cdiv(n_row, tile)
    shared = Shared(*(getattr(state, name) for name in Shared._fields)) if parts > 1 else None
    held = RowTensors(*(getattr(state, name) for name in RowTensors._fields))
    mixed = Mixed(*(getattr(state, name) for name in Mixed._fields)) if mode == "mixed" else None
    _advance_kernel[(batch, parts)](
        logits if chosen is None else chosen.values, held, None if chosen is None else chosen.ids, mixed, shared,
        state.tokens.shape[1], n_row, n_vocab, V_TILE=tile, N_STOPS=state.stops.shape[0], MODE=number,
        SCORE=score, STEPS=SEARCH_STEPS, PARTS=PARTS, num_warps=settings.warps,
        **as_dependent(pdl, logits.device),
    )  # fmt: skip
