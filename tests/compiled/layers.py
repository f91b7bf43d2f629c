"""Calls of every kernel with the tensors of one layer, of any width, as the decode engine makes them.

`tests.compiled` compiles them. Tensors are allocated and left alone.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dejavu_train.kernels.attention import attend_chunk, out_projection
from dejavu_train.kernels.common import launch
from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.late_norm import LateNorm
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind
from dejavu_train.kernels.common.limits import OWNERS, OWNERS_WARPS, Products, owned_block, selection_block
from dejavu_train.kernels.common.partial_sums import partial_sums
from dejavu_train.kernels.common.positions import Alibi, Rotary
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.dense import chunk_product, dense_batch, dense_rows, screened_head, unpack
from dejavu_train.kernels.dense.chunk_product import Arrangement
from dejavu_train.kernels.dense.dense_batch import dense_add, qkv_batch
from dejavu_train.kernels.dense.screened_head import ScreenedHead
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights, Rows
from dejavu_train.kernels.lookahead import attend_pack, mlp_ahead, qkv_select
from dejavu_train.kernels.mlp import int4_fc2, live_down, pack
from dejavu_train.kernels.sample import sampling
from dejavu_train.kernels.sample.sampling import TokenState
from dejavu_train.kernels.stages import attend, hidden, mlp, mlp_batch, predict, predict_rows, qkv, rank_sum, select
from dejavu_train.kernels.stages.mlp_owned import mlp_owned
from dejavu_train.kernels.stages.norm import HeadNorms, layer_norm, norm_heads
from dejavu_train.kernels.stages.predictor import HeadPredictor, HeadSite, Predictor, PredictorWeights
from dejavu_train.kernels.stages.rows import launch_tokens
from dejavu_train.kernels.stages.sink import QkvSink
from dejavu_train.kernels.verify import attend_slots, screened_slots, slot_products
from dejavu_train.kernels.verify.slot_walk import ProductScratch

Case = tuple[str, Callable[[], Any]]  # name and call
WIDTHS = (2048, 4096, 5120, 7168, 9216, 12288)


class Placed(TorchFunctionMode):
    """Tensors that are made within lie on one device and hold zeros where they would hold anything."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones, torch.full, torch.arange):
            kwargs["device"] = self.device
        return (torch.zeros if func is torch.empty else func)(*args, **kwargs)


def half_rows(*shape: int) -> Rows:
    return Rows(halves(*shape))


def halves(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float16)


def int4_rows(*shape: int) -> Int4Rows:
    *outer, width = shape
    return Int4Rows(torch.empty(*outer, width // 8, dtype=torch.int32), halves(*outer, width // min(128, width)))


def pair(rank: int, d: int, n: int, kind: torch.dtype, share: int = 1) -> PredictorWeights:
    """A predictor's two matrices, `share` numbers in each entry. Scales unless they are fp16."""
    scales = (None, None) if kind == torch.float16 else (torch.empty(rank), torch.empty(n))
    down, up = torch.empty(rank, d // share, dtype=kind), torch.empty(n, rank // share, dtype=kind)
    return PredictorWeights(down, up, torch.empty(n), *scales, sums=(torch.empty(rank), torch.empty(rank)))


class Layer:
    """Tensors of one layer of width d, its matrices as `matrix` makes them: half_rows or int4_rows."""

    def __init__(self, d: int, matrix: Callable[..., Any]) -> None:
        self.d, self.n, self.rank, hd = d, 4 * d, d // 16, 64 if d <= 2048 else 128
        self.h = h = d // hd
        self.x, self.y, self.hidden, self.z = (torch.empty(1, size) for size in (d, d, self.n, self.rank))
        self.ln, self.w = LayerNormWeights(halves(d), halves(d)), matrix(self.n, d)
        self.rms = LayerNormWeights(halves(d), None, kind=NormKind.RMS_NORM)
        self.bias, self.out_bias = halves(self.n), halves(d)
        self.ones, self.limit = torch.ones(1, dtype=torch.int32), torch.ones(1)
        self.q, marks = torch.empty(1, h, hd), torch.empty(1, h, dtype=torch.int32)
        self.cache = KvCache(*(halves(1, h, 64, hd) for _ in range(2)), halves(1, 64, d), marks)
        self.every = dataclasses.replace(self.cache, watermark=None)  # of layers that have all heads
        self.qkv = Linear(matrix(h, 3, hd, d), halves(h, 3, hd))
        self.mlp = MlpWeights(Linear(self.w, self.bias), Linear(self.w, self.out_bias))
        self.gated = dataclasses.replace(self.mlp, gate=self.mlp.up, hidden=Hidden("silu"))
        self.heads = Selection(h, 1, *(torch.empty(h, dtype=torch.int32) for _ in range(3)))
        self.listed, self.partials = pack.PackedSelection.empty(self.n, "cpu"), partial_sums(d, self.x.device)
        self.bits = Selection.empty(self.n, "cpu", selection_block(d, 1))

    def predictor(self, weights: PredictorWeights, alone: bool = False) -> Predictor:
        """In use by one row, in kernels of its own or in the grid of q/k/v."""
        codes = weights.up.dtype == torch.uint8
        products = Products.ROW_WORDS if codes else Products.REGISTERS if alone else Products.ROW_TILES
        return Predictor(weights, self.limit, self.bits, self.z, products)

    def head_predictor(self) -> HeadPredictor:
        rows, sums = halves(self.h, self.d), (torch.empty(self.h), torch.empty(self.h))
        return HeadPredictor(rows, torch.empty(self.h), self.limit, self.heads, sums)

    def shared_cases(self, mixed: Any, out: Any, predictors: dict[str, PredictorWeights]) -> Iterator[Case]:
        """What fp16 and 4 bits have in common. mixed: what the output projection `out` reads."""
        x, ln, d = self.x, self.ln, self.d
        yield f"dense_rows {d}", lambda: dense_rows.dense_rows(x, ln, self.w, self.bias, "relu", self.hidden, True)
        yield f"hidden_row {d}", lambda: hidden.hidden_row(x, ln, self.mlp, self.hidden, True)
        every = HeadStep(self.q, self.every, self.ones)
        yield f"qkv_dense {d}", lambda: dense_rows.qkv_dense(x, ln, self.qkv, every, True)
        sparse = (self.qkv, HeadStep(self.q, self.cache, self.ones, self.heads))
        yield f"qkv {d}", lambda: qkv.qkv(*sparse, pdl=True)
        for name, heads in (("out", self.heads), ("out all", None)):
            project = partial(out_projection.project_heads, mixed, out, self.out_bias, x, heads, self.y, True)
            yield f"{name} {d}", project
        for kind, predictor in predictors.items():
            given = (*sparse, self.predictor(predictor), self.ones)
            yield f"qkv_select {d} {kind}", partial(qkv_select.qkv_select, *given, pdl=True)

    def site(self, mlp: PredictorWeights | None) -> Any:
        """The call of a site that such a predictor of the MLP reads."""
        given = (HeadSite(self.head_predictor(), self.ln, self.ones), self.ones, self.cache.attn_in)
        own = None if mlp is None else self.predictor(mlp)
        return partial(predict.site_predict, self.x, *given, own, True)


def cases_of(d: int) -> Iterator[Case]:
    """Calls with fp16 weights, and with int8 predictors, as the decode engine makes them, of one width."""
    own = Layer(d, half_rows)
    x, ln, w, n, rank = own.x, own.ln, own.w, own.n, own.rank
    predictors = {str(kind): pair(rank, d, n, kind) for kind in (torch.float16, torch.int8)}
    yield from own.shared_cases(x, half_rows(d, d), predictors)
    yield f"lm_head {d}", lambda: dense_rows.dense_rows(x, ln, w, None, "none", own.hidden, True)
    state = TokenState.empty(1, 64, "cpu")
    yield f"advance {d}", partial(sampling.advance, torch.empty(1, 50272), state, pdl=True)
    n_sms = launch.n_sms(x.device)
    best, codes = screened_head.TokenCandidates.empty(2 * n_sms, "cpu"), torch.empty(n, d // 4, dtype=torch.int32)
    screen, stops = (torch.empty(n, 2), 0.1, 0.1, torch.empty(n)), (state.position, state.least, state.stops)

    def screened() -> None:  # settings of a head are looked up when it is made
        found = screened_head.ScreenSettings.find("float", x.device, d=d)
        lows = torch.empty(found.programs * n_sms, device=x.device)
        head = ScreenedHead(w.numbers, ln, x, x, codes, *screen, lows, best, found)
        screened_head.screened_head(x, head, *stops, True)

    yield f"8 bits: screened_head {d}", screened
    yield f"advance chosen {d}", partial(sampling.advance, own.hidden, state, pdl=True, chosen=best)
    for norm, early in ((None, None), (None, "x"), (ln, "list"), (ln, None)):
        given = (x if norm else halves(1, d), norm, own.mlp, x, own.listed, own.y, own.partials)
        name = f"mlp {d} {'norm' if norm else 'own'} {early}"
        yield name, partial(mlp.mlp, *given, early, True)
    for norm, early in ((ln, None), (own.rms, "list")):
        given = (x, norm, own.gated, x, own.listed, own.y, own.partials)
        yield f"gated_mlp {d} {early}", partial(mlp.mlp, *given, early, True)
    for kind, predictor in predictors.items():
        alone = own.predictor(predictor, alone=True)
        yield f"predict {d} {kind}", partial(predict.predict, x, ln, alone, halves(1, d), True)
        yield f"select {d} {kind}", partial(select.select, alone, own.ones, pdl=True)
    for batch in (2, 8, 32):
        yield from select_cases(own, predictors["torch.float16"], batch)
    yield f"site {d}", own.site(predictors["torch.float16"])
    yield f"heads {d}", own.site(None)


def select_cases(own: Layer, weights: PredictorWeights, batch: int) -> Iterator[Case]:
    """A predictor in use by several rows, of numbers or of nibbles."""
    codes = weights.up.dtype == torch.uint8
    listed = (own.listed.ids, own.ones) if codes else None
    bits = Selection.empty(own.n, "cpu", selection_block(own.d, batch))
    several = Predictor.of(
        weights, own.limit, bits, Products.WORDS if codes else Products.TILES, batch, listed=listed
    )  # fmt: skip
    name = f"{own.d} {'nibbles' if codes else 'float16'} rows {batch}"
    yield f"predict_rows {name}", partial(predict_rows.predict_rows, halves(batch, own.d), several, True)
    states = torch.ones(batch, dtype=torch.int32)
    yield f"select {name}", partial(select.select, several, states, pdl=True)


def int4_cases(d: int) -> Iterator[Case]:
    """Those with 4-bit weights, predictors of int8 codes and of nibbles."""
    own = Layer(d, int4_rows)
    x, ln, w, n, rank, h, bias = own.x, own.ln, own.w, own.n, own.rank, own.h, own.bias
    mixed, by_head = halves(1, d), int4_rows(h, d, d // h)
    predictors = {"int8": pair(rank, d, n, torch.int8), "nibbles": pair(rank, d, n, torch.uint8, 2)}
    yield from own.shared_cases(mixed, by_head, predictors)
    nibbles = predictors["nibbles"]
    alone = own.predictor(nibbles, alone=True)
    yield f"predict {d} nibbles", partial(predict.predict, x, ln, alone, halves(1, d), True)
    yield f"select {d} nibbles", partial(select.select, alone, own.ones, pdl=True)
    owned = ("", mixed, None, own.mlp), ("gated_", mixed, None, own.gated), ("norm_", x, ln, own.mlp)
    for kind, weights, size in (("nibbles", nibbles, 0), ("float16", pair(rank, d, n, torch.float16), 2)):
        for name, *source in owned:
            given = (*source, own.predictor(weights, alone=True), x, own.y, own.ones, own.partials)
            if owned_block(n, rank, size, OWNERS, OWNERS_WARPS):
                yield f"{name}mlp_owned {d} {kind}", partial(mlp_owned, *given, True)
    for batch in (2, 8):
        yield from select_cases(own, nibbles, batch)
    for kind, predictor in predictors.items():
        step = HeadStep(own.q, own.every, own.ones, own.heads)
        given = (own.qkv, step, own.predictor(predictor), own.ones)
        yield f"qkv_select {d} {kind} always", partial(qkv_select.qkv_select, *given, pdl=True)
        yield f"site {d} {kind}", own.site(predictor)
    norms = [
        LateNorm(each, torch.empty(2), torch.empty(2, dtype=torch.int64), torch.empty(64, 2)) for each in (ln, own.rms)
    ]
    first_half = int4_rows(rank, d).parts() if d >= mlp_ahead.TILED_FROM else (nibbles.down, None)
    ahead = HeadSite(own.head_predictor(), ln, own.ones)
    scratch = attend.AttentionScratch.empty(1, h, d // h, own.cache.capacity, "cpu")
    for policy, selected, cache, norm in (
        ("backfill", ahead, own.cache, norms[0]), ("always", None, own.every, norms[0]),
        ("always", None, own.every, norms[1]),
    ):  # fmt: skip
        rms = "" if norm.centred else " rms"
        late = mlp_ahead.LateSite(
            norm, cache.attn_in, own.ones, *(torch.empty(h, 3, d // h) for _ in range(2)), selected, *first_half,
            *(torch.empty(rank) for _ in range(3)), False, own.ones,
        )  # fmt: skip
        step = HeadStep(own.q, cache, own.ones, own.heads)
        given = (own.qkv, step, own.predictor(nibbles), own.ones)
        yield f"late qkv_select {d} {policy}{rms}", partial(qkv_select.qkv_select, *given, True, late)
        step = HeadStep(own.q, cache, own.ones, None if selected is None else own.heads)
        given = (step, halves(1, d), scratch, (own.bits, own.listed))
        if not rms:
            yield f"attend_pack {d} {policy}", partial(attend_pack.attend_pack, *given, True)
        given = (x, norm.ln, own.mlp, own.listed, own.y, late, own.partials)
        yield f"mlp_ahead {d} {policy}{rms}", partial(mlp_ahead.mlp_ahead, *given, "list", True)
    for name, inputs, early in (("mlp {}", (x, ln), "list"), ("mlp {} own", (mixed, None), "x")):
        given = (*inputs, own.mlp, x, own.listed, own.y, own.partials)
        yield name.format(d), partial(mlp.mlp, *given, early, True)
    for norm, early in ((ln, None), (own.rms, "list")):
        given = (x, norm, own.gated, x, own.listed, own.y, own.partials)
        yield f"gated_mlp {d} {early}", partial(mlp.mlp, *given, early, True)
    for tokens in (1, 2, 4, 8):
        several, (residual, out) = own.hidden if tokens == 1 else halves(tokens, n), torch.empty(2, tokens, d)
        given = (several, w, own.out_bias, residual, out, own.partials)
        yield f"int4_fc2 {d} {tokens}", partial(int4_fc2.int4_fc2, *given, True)
        if tokens > 1:
            rows, kv = (
                halves(tokens, d),
                KvCache(*(halves(tokens, h, 64, d // h) for _ in range(2)), halves(tokens, 0, d)),
            )
            yield f"int4_linear {d} {tokens}", partial(dense_batch.int4_linear, rows, w, bias, "relu", True)
            given = (rows, own.mlp, (own.listed, own.bits.row_bits))
            yield f"hidden_tokens {d} {tokens}", partial(hidden.hidden_tokens, *given, True)
            positions, q = torch.ones(tokens, dtype=torch.int32), torch.empty(tokens, h, d // h)
            given = (rows, own.qkv.weight, QkvSink.of(HeadStep(q, kv, positions), own.qkv.bias))
            yield f"int4_qkv {d} {tokens}", partial(launch_tokens, *given, True)
            given = (rows, by_head, own.out_bias, residual, None, out)
            if tokens > 1:
                yield f"int4_by_head {d} {tokens}", partial(out_projection.project_heads, *given, True)
    yield from slot_cases(own, by_head, w)


def further_cases(d: int) -> Iterator[Case]:
    """What other plans of one row launch, and steps of two rows, with fp16 weights."""
    own = Layer(d, half_rows)
    x, ln, n, h = own.x, own.ln, own.n, own.h
    two, pair_of_rows = halves(2, d), torch.empty(2, 2, d)
    yield f"embed {d}", partial(sampling.embed, TokenState.empty(1, 64, "cpu"), halves(64, d), halves(66, d), x, True)
    yield f"layer_norm {d}", partial(layer_norm, x, ln, halves(1, d), True)
    for tokens in (16, 64):
        rows, out = halves(tokens, h, 3, d // h), halves(tokens, h, d // h)
        chunk = torch.ones(3, dtype=torch.int32)
        yield f"attend_chunk {d} {tokens}", partial(attend_chunk.attend_chunk, rows, own.every, chunk, out)
    for tokens, kind in itertools.product((16, 128), Arrangement):
        given = {
            Arrangement.COLUMNS: (halves(tokens, d), int4_rows(n, d), halves(n), halves(tokens, n)),
            Arrangement.BESIDE: (halves(tokens, d), int4_rows(h, d, d // h), halves(d), torch.empty(tokens, d)),
            Arrangement.ROWS: (halves(tokens, n), int4_rows(n, d), halves(d), torch.empty(tokens, d)),
        }[kind]
        yield f"chunk_product {d} {tokens} {kind}", partial(chunk_product.chunk_product, *given, kind)
    for by_head, beside in ((int4_rows(n, d), False), (int4_rows(h, d, d // h), True)):
        yield f"unpack {d} {beside}", partial(unpack.unpack, by_head, torch.float16, beside, True)
    scratch = attend.AttentionScratch.empty(1, h, d // h, own.cache.capacity, "cpu")
    for name, heads in (("flash_decode", own.heads), ("flash_decode all", None)):
        given = (HeadStep(own.q, own.cache, own.ones, heads), torch.empty(1, d), scratch)
        yield f"{name} {d}", partial(attend.flash_decode, *given, True)
    slots, ones = halves(attend_slots.SLOTS, h, d // h), torch.ones(attend_slots.SLOTS, dtype=torch.int32)
    room = attend_slots.slot_scratch(h, d // h, own.cache.capacity, "cpu")
    for name, groups, placed in (("attend_slots", h, None), ("attend_slots shared", h // 4, Alibi.of(h, "cpu"))):
        one = halves(1, groups, own.cache.capacity, d // h)
        step = HeadStep(slots, KvCache(one, one, halves(1, 0, d), positions=placed), ones)
        given = (step, torch.empty_like(slots), room)
        yield f"{name} {d}", partial(attend_slots.attend_slots, *given, pdl=True)
    yield from slot_cases(own, half_rows(d, d), own.w)
    yield screened_slot_case(own)
    stored = (halves(8, n), half_rows(d, n), own.out_bias, *torch.empty(2, 8, d))
    products = ProductScratch.empty(d, "cpu")
    yield f"slot_down {d}", partial(slot_products.slot_linear, *stored, products, pdl=True)
    for tokens in (1, 2, 4, 8):
        several, (residual, out) = own.hidden if tokens == 1 else halves(tokens, n), torch.empty(2, tokens, d)
        given = (several, half_rows(n, d), own.out_bias, residual, out, own.partials)
        yield f"live_down {d} {tokens}", partial(live_down.live_down, *given, True)
    yield f"pack {d}", partial(pack.pack, own.bits, own.listed, True)
    given = (own.hidden, half_rows(d, n), own.out_bias, x, own.y)
    yield f"dense_wide {d}", partial(dense_rows.dense_wide, *given, True)
    yield f"dense_add {d}", partial(dense_add, two, half_rows(d, d), own.out_bias, *pair_of_rows, pdl=True)
    kv = KvCache(*(halves(2, h, 64, d // h) for _ in range(2)), halves(2, 0, d))
    step = HeadStep(torch.empty(2, h, d // h), kv, torch.ones(2, dtype=torch.int32))
    given = (pair_of_rows[0], ln, own.qkv, step)
    yield f"qkv_batch {d}", partial(qkv_batch, *given, True)
    active = mlp_batch.BatchActivations.empty(n, 2, d, torch.float16, "cpu")
    for name, weights in (("", own.mlp), ("gated_", own.gated)):
        yield f"{name}up_batch {d}", partial(mlp_batch.up_batch, two, weights, own.bits, active, True)
    yield f"down_batch {d}", partial(mlp_batch.down_batch, active, own.mlp, *pair_of_rows, True)
    inbox = rank_sum.Inbox.of(1, torch.zeros(4, dtype=torch.int64), torch.zeros(2, 4, d, dtype=torch.int64))
    yield f"rank_sum {d}", partial(rank_sum.rank_sum, x, x, inbox, True)


def slot_cases(own: Layer, out: Any, down: Any) -> Iterator[Case]:
    """Products of eight slots. out, down: rows of the output projection, and of down as rows of neurons."""
    d, n, h = own.d, own.n, own.h
    x, y, positions = halves(8, d), halves(8, n), torch.ones(8, dtype=torch.int32)
    numbers, room = torch.empty(2, 8, d), ProductScratch.empty(d, "cpu")
    given = (x, own.qkv, HeadStep(halves(8, h, d // h), own.every, positions), room)
    yield f"slot_qkv {d}", partial(slot_products.slot_qkv, *given, True)
    yield f"slot_out {d}", partial(slot_products.slot_linear, x, out, own.out_bias, *numbers, room, pdl=True)
    yield f"slot_hidden {d}", partial(slot_products.slot_hidden, x, own.mlp, y, room, True)
    turned = (y, down, own.out_bias, *numbers, room, True)
    yield f"slot_turned {d}", partial(slot_products.slot_linear, *turned, pdl=True)


def screened_slot_case(own: Layer) -> Case:
    """The head of eight slots behind a screen."""
    d, n = own.d, own.n
    rows, codes = halves(n, d), torch.empty(n, d // 4, dtype=torch.int32)
    given = (torch.empty(8, d), halves(8, d))
    stops, logits = torch.empty(8, dtype=torch.int32), torch.empty(8, n)

    def call() -> None:  # settings of a head are looked up when it is made
        found = screened_head.ScreenSettings.find("float", own.x.device, d=d)
        empty = torch.empty(n)
        head = ScreenedHead(
            rows, own.ln, own.x, own.x, codes, torch.empty(n, 2), 0.1, 0.1, empty, empty,
            screened_head.TokenCandidates.empty(2, "cpu"), found,
        )  # fmt: skip
        screened_slots.screened_slots(
            *given, head, stops, logits, screened_slots.ScreenScratch.empty(n, d, "cpu"), True
        )

    return f"screened_slots {d}", call


def position_cases(d: int) -> Iterator[Case]:
    """Groups of four heads that share K and V, turned by their positions or with slopes. Of one row."""
    hd = 64 if d <= 2048 else 128
    h, ones, table = d // hd, torch.ones(1, dtype=torch.int32), torch.empty(64, hd // 2, 2)
    groups = max(1, h // 4)
    q, x, ln = torch.empty(1, 4 * groups, hd), torch.empty(1, d), LayerNormWeights(halves(d), halves(d))
    heads = Selection(groups, 1, *(torch.empty(groups, dtype=torch.int32) for _ in range(3)))
    marks = torch.empty(1, groups, dtype=torch.int32)
    kept = KvCache(*(halves(1, groups, 64, hd) for _ in range(2)), halves(1, 64, d), marks)
    turned = dataclasses.replace(kept, positions=Rotary(table))
    for name, matrix in (("", half_rows), ("4 bits: ", int4_rows)):
        rows = Linear(matrix(groups, 6, hd, d), halves(groups, 6, hd))
        yield f"{name}turned qkv {d}", partial(qkv.qkv, rows, HeadStep(q, turned, ones, heads), pdl=True)
        given = (x, ln, rows, HeadStep(q, dataclasses.replace(turned, watermark=None), ones))
        yield f"{name}turned qkv_dense {d}", partial(dense_rows.qkv_dense, *given, True)
    scratch = attend.AttentionScratch.empty(1, 4 * groups, hd, 64, "cpu")
    for name, cache in (
        ("grouped", kept),
        ("sloped", dataclasses.replace(kept, positions=Alibi.of(4 * groups, "cpu"))),
    ):
        given = (HeadStep(q, cache, ones, heads), halves(1, 4 * groups * hd), scratch)
        yield f"{name} flash_decode {d}", partial(attend.flash_decode, *given, True)
    norm = LayerNormWeights(halves(hd), halves(hd))
    later = dataclasses.replace(kept, positions=Rotary(table, later=True))
    given = (HeadStep(q, later, ones, heads), HeadNorms(norm, norm))
    yield f"head_norm {d}", partial(norm_heads, *given, pdl=True)


def cases(widths: Sequence[int] = WIDTHS) -> Iterator[Case]:
    """All of these widths."""
    for d in widths:
        yield from cases_of(d)
        yield from further_cases(d)
        yield from position_cases(d)
    for d in widths:
        yield from ((f"4 bits: {name}", call) for name, call in int4_cases(d))
