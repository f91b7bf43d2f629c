"""What the compiler makes of the kernels, without a GPU: registers, spills, shared memory, instructions of the loops.

    python -m benchmarks.compiled                          a line for each kernel and shape, for compute capability 9.0
    python -m benchmarks.compiled --capability 80 86 89    for others, which have no dependent launches
    python -m benchmarks.compiled --save before.json       the PTX of each, with what names source lines taken out
    python -m benchmarks.compiled --compare before.json    the same kernels again: what changed; exit code 1 if any did

The public functions run on CPU tensors, and each launch is replaced by a compilation. So settings, specialisation and
constants are those of a real call. Weights are never read: they are allocated and left alone.
"""

import dataclasses
import hashlib
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.compiled_attend import attend_cases
from benchmarks.compiled_steps import step_cases
from benchmarks.rows import command_line
from dejavu_train.kernels.attention import out_projection
from dejavu_train.kernels.common import checks, launch, settings
from dejavu_train.kernels.common.int4_numbers import written_out
from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.late_norm import LateNorm
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind
from dejavu_train.kernels.common.limits import Products, selection_block
from dejavu_train.kernels.common.partial_sums import partial_sums
from dejavu_train.kernels.common.positions import Alibi, Rotary
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.dense import dense_rows, dense_wide, int4_batch, screened_head
from dejavu_train.kernels.dense.dense_batch import dense_add, qkv_batch
from dejavu_train.kernels.dense.screened_head import ScreenedHead
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights, Rows
from dejavu_train.kernels.lookahead import attend_pack, mlp_ahead, qkv_select
from dejavu_train.kernels.mlp import int4_fc2, pack
from dejavu_train.kernels.sample import sampling
from dejavu_train.kernels.sample.sampling import TokenState
from dejavu_train.kernels.stages import attend, hidden, mlp, mlp_batch, predict, predict_rows, qkv, rank_sum, select
from dejavu_train.kernels.stages.norm import HeadNorms, layer_norm, norm_heads
from dejavu_train.kernels.stages.predictor import HeadPredictor, HeadSite, Predictor, PredictorWeights
from dejavu_train.kernels.stages.rows import launch_tokens
from dejavu_train.kernels.stages.sink import QkvSink
from dejavu_train.kernels.verify import attend_slots, screened_slots, slot_products
from dejavu_train.kernels.verify.slot_walk import ProductScratch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FILES = settings.committed_files()
GPUS = {  # by compute capability: file of settings, multiprocessors, bytes of shared memory of a program
    90: ("h200.json", FILES["h200.json"].multiprocessors, 227 * 1024),
    89: ("other.json", 128, 99 * 1024),
    86: ("other.json", 82, 99 * 1024),
    80: ("other.json", 108, 163 * 1024),
}
Case = tuple[str, Callable[[], Any]]  # name and call
WIDTHS = (2048, 4096, 5120, 7168, 9216, 12288)


class _Device:
    """A driver that knows what to compile for and nothing else."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # what kernels are kept by

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


def compiled_launches(call: Callable[[], Any]) -> list[tuple[str, Any]]:
    """(name, compiled kernel) of every launch that `call` makes."""
    found: list[tuple[str, Any]] = []

    def compile_only(self: JITFunction, grid: Any) -> Callable[..., Any]:
        def launch_of(*args: Any, **kwargs: Any) -> Any:
            kernel = self.warmup(*args, grid=grid, **kwargs)
            found.append((self.fn.__name__, kernel))
            return kernel

        return launch_of

    kept = JITFunction.__getitem__
    JITFunction.__getitem__ = compile_only
    try:
        call()
    finally:
        JITFunction.__getitem__ = kept
    return found


def pretend_a_gpu(capability: int = 90) -> None:
    """CPU tensors pass for those of a GPU of `GPUS`. From 9.0 on it has dependent launches."""
    assert not checks.INTERPRET, "run without TRITON_INTERPRET"
    triton.runtime.driver.set_active(_Device(capability))
    name, multiprocessors, _ = GPUS[capability]
    dependents = capability >= 90
    for module in launch.loaded_kernels():
        for attribute, stand_in in (
            ("check_device", lambda *_: None),
            ("n_sms", lambda _: multiprocessors),
            ("use_pdl", lambda pdl, _: pdl and dependents),
            ("fetches_rows", lambda _: dependents),
            ("programmatic", lambda _, pdl: (dependents, pdl and dependents)),
        ):
            if hasattr(module, attribute):
                setattr(module, attribute, stand_in)
    launch._knows_pdl = lambda _: dependents  # type: ignore[assignment]
    settings.settings_file = lambda _: FILES[name]  # type: ignore[assignment]
    settings.forget_settings()


def plain_ptx(kernel: Any) -> str:
    """PTX without debug sections, line numbers and the labels that only these name."""
    text = kernel.asm["ptx"].split("\t.section\t.debug")[0].split(".file\t")[0]
    lines = (re.sub(r"//.*", "", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not re.match(r"\s*\.loc|\$L__(tmp|func)\w*:", line))


def report(kernel: Any) -> SimpleNamespace:
    """Of a compiled kernel: registers, bytes spilled, shared memory (with 1 KB of the driver's), and its machine code's
    instructions by name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([TOOLS / "cuobjdump", "-res-usage", file.name], text=True)
        sass = subprocess.check_output([TOOLS / "cuobjdump", "-sass", file.name], text=True)
    numbers = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage))
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", sass)
    return SimpleNamespace(
        registers=int(numbers["REG"]),
        stack=int(numbers["STACK"]),
        shared=int(numbers["SHARED"]) + kernel.metadata.shared,
        code=[(int(at, 16), name, rest) for at, name, rest in lines],
    )


def refused_copies(code: list[tuple[int, str, str]]) -> int:
    """Copies to shared memory at a uniform register plus another one. The assembler of CUDA 12.8 makes of them what an
    H200 refuses as an illegal instruction."""
    return sum(name.startswith("LDGSTS") and "+UR" in rest.partition("]")[0] for _, name, rest in code)


def loops(code: list[tuple[int, str, str]]) -> list[list[tuple[str, str]]]:
    """Instructions of each innermost loop, (name, operands): what lies between a backward branch and its target."""
    found = []
    for at, name, rest in code:
        target = re.search(r"(0x[0-9a-f]+)", rest)
        if name.startswith("BRA") and target and int(target.group(1), 16) < at:
            found.append((int(target.group(1), 16), at))
    inner = [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return [[(name, rest) for at, name, rest in code if low <= at <= high] for low, high in inner]


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
    best, codes = screened_head.Chosen.empty(2 * n_sms, "cpu"), torch.empty(n, d // 4, dtype=torch.int32)
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
    for batch in (2, 8):
        yield from select_cases(own, nibbles, batch)
    for kind, predictor in predictors.items():
        step = HeadStep(own.q, own.every, own.ones, own.heads)
        given = (own.qkv, step, own.predictor(predictor), own.ones)
        yield f"qkv_select {d} {kind} always", partial(qkv_select.qkv_select, *given, policy="always", pdl=True)
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
        yield f"late qkv_select {d} {policy}{rms}", partial(qkv_select.qkv_select, *given, policy, True, late)
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
            yield f"int4_linear {d} {tokens}", partial(int4_batch.int4_linear, rows, w, bias, "relu", True)
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
    yield f"pack {d}", partial(pack.pack, own.bits, own.listed, True)
    given = (own.hidden, half_rows(d, n), own.out_bias, x, own.y)
    yield f"dense_wide {d}", partial(dense_wide.dense_wide, *given, True)
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
    yield f"written_out {d}", partial(written_out, int4_rows(n, d), True)


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
            screened_head.Chosen.empty(2, "cpu"), found,
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


def described(kernel: Any, most: int) -> str:
    """A line about a compiled kernel, on a GPU whose programs have at most so many bytes of shared memory."""
    found = report(kernel)
    inner = loops(found.code)
    sizes = ", ".join(str(len(loop)) for loop in inner)
    spills = sum(name.startswith(("LDL", "STL")) for loop in inner for name, _ in loop)
    refused = refused_copies(found.code)
    return (
        f"{found.registers} registers, {found.stack} B stack ({spills} in loops), "
        f"{found.shared} B shared, {'dependent' if 'griddepcontrol' in kernel.asm['ptx'] else 'plain'}, "
        f"loops of {sizes or 'none'} instructions"
        + (f"; {refused} COPIES THAT A GPU REFUSES" if refused else "")
        + ("; MORE SHARED MEMORY THAN IT HAS" if found.shared > most + 1024 else "")
    )


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--save", metavar="JSON")
    parser.add_argument("--compare", metavar="JSON")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--capability", type=int, nargs="+", choices=sorted(GPUS), default=[90], help="90 = 9.0")
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS, metavar="D")
    parser.add_argument("--steps", action="store_true", help="whole steps of other families' shapes as well: minutes")
    args = parser.parse_args()
    texts: dict[str, str] = {}
    for capability in args.capability:
        pretend_a_gpu(capability)
        every = itertools.chain(cases(args.widths), attend_cases(), step_cases() if args.steps else ())
        for name, call in every:  # one after the other: a case holds the tensors of its width
            for function, kernel in compiled_launches(call) if args.only in name else ():
                key = f"{name} {function}" if capability == 90 else f"{name} {function} for {capability}"
                texts[key] = hashlib.sha256(plain_ptx(kernel).encode()).hexdigest()
                if not args.save and not args.compare:
                    print(f"{key}: {described(kernel, GPUS[capability][2])}", flush=True)
    if args.save:
        Path(args.save).write_text(json.dumps(texts, indent=1))
    if args.compare:
        before = json.loads(Path(args.compare).read_text())
        changed = [key for key, value in texts.items() if before.get(key) not in (None, value)]
        new = [key for key in texts if key not in before]
        print(f"{len(texts)} kernels: {len(changed)} changed, {len(new)} new", *changed, sep="\n  ")
        return int(bool(changed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
