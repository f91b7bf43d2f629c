"""What the compiler makes of the kernels, without a GPU: registers, spills, shared memory, instructions of the loops,
and how many of the largest loop's streamed loads into registers are on their way at once: the assembler moves them.

    python -m benchmarks.compiled                          a line for each kernel and shape, for compute capability 9.0
    python -m benchmarks.compiled --save before.json       the PTX of each, with what names source lines taken out
    python -m benchmarks.compiled --compare before.json    the same kernels again: what changed; exit code 1 if any did

The public functions run on CPU tensors with a launch replaced by a compilation, so that settings, specialisation and
constants are those of a real call. Weights are never read: they are allocated and left alone.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels import sampling
from kernels.attention import flash_decode, out_projection, qkv
from kernels.common import checks, launch
from kernels.common.int4 import Int4Rows
from kernels.common.late_norm import LateNorm
from kernels.common.layer_norm import LayerNormWeights
from kernels.dense import dense_gemv, int4_batch, qkv_dense, screened_head
from kernels.dense.screened_head import ScreenedHead
from kernels.lookahead import attend_pack, mlp_ahead, qkv_select, site_predict
from kernels.mlp import int4_fc2, int4_mlp, predict, select, sparse_fc1, sparse_fc2, sparse_mlp
from kernels.mlp.select import PredictorWeights, Selection
from kernels.sampling import TokenState

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
WIDTHS = (2048, 4096, 5120, 7168, 9216, 12288)


class _Device:
    """A driver that knows what to compile for and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

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


def pretend_a_gpu() -> None:
    """CPU tensors pass for those of a GPU with dependent launches and 132 multiprocessors."""
    assert not checks.INTERPRET, "run without TRITON_INTERPRET"
    triton.runtime.driver.set_active(_Device())
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels."):
            for attribute, stand_in in (
                ("check_device", lambda *_: None),
                ("n_sms", lambda _: 132),
                ("use_pdl", lambda pdl, _: pdl),
                ("fetches_rows", lambda _: True),
                ("programmatic", lambda _, pdl: (True, pdl)),
            ):
                if hasattr(module, attribute):
                    setattr(module, attribute, stand_in)
    launch._knows_pdl = lambda _: True  # type: ignore[assignment]


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
    """Copies to shared memory at a uniform register plus another one: what the assembler of CUDA 12.8 makes of them
    ends a kernel with an illegal instruction on compute capability 9.0 (seen on an H200)."""
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


def on_their_way(loop: list[tuple[str, str]]) -> tuple[float, int, int]:
    """Of streamed loads (evict first) into registers: how many are between their instruction and the first that reads
    what they bring, in the mean of the loop's instructions and at the least; and how many there are."""
    count = [0] * len(loop)
    loads = 0
    for place, (name, operands) in enumerate(loop):
        found = re.match(r"\s*R(\d+),", operands)
        if not name.startswith("LDG") or ".EF" not in name or not found:
            continue
        width = {"128": 4, "64": 2}.get(name.rsplit(".", 1)[-1], 1)
        registers = {str(int(found.group(1)) + k) for k in range(width)}
        loads += 1
        for step in range(1, len(loop)):
            reader, read = loop[(place + step) % len(loop)]
            sources = read if reader.startswith(("ST", "BAR", "ATOM")) else read.partition(",")[2]
            if registers & set(re.findall(r"\bR(\d+)\b", sources)):
                break
            count[(place + step) % len(loop)] += 1
    return sum(count) / len(loop), min(count), loads


def halves(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float16)


def cases_of(d: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls with fp16 weights, and with int8 predictors, as the decode engine makes them, of one width."""
    row_state, limit, position = (torch.ones(1, dtype=kind) for kind in (torch.int32, torch.float32, torch.int32))
    n, rank, hd = 4 * d, d // 16, 64 if d <= 2048 else 128
    h = d // hd
    x, y = torch.empty(1, d), torch.empty(1, d)
    ln, w = LayerNormWeights(halves(d), halves(d)), halves(n, d)
    hidden, z = torch.empty(1, n), torch.empty(1, rank)
    yield f"dense_rows {d}", lambda: dense_gemv.dense_rows(x, ln, w, w[:, 0], "relu", hidden, True)
    yield f"lm_head {d}", lambda: dense_gemv.dense_rows(x, ln, w, None, "none", hidden, True)
    state = TokenState.empty(1, 64, "cpu")
    yield f"advance {d}", lambda: sampling.advance(torch.empty(1, 50272), state, pdl=True)
    head = ScreenedHead(
        w, ln, x, x, torch.empty(n, d // 4, dtype=torch.int32), torch.empty(n, 2), 0.1, 0.1, torch.empty(n),
        torch.empty(396), screened_head.Chosen.empty(264, "cpu"), screened_head.screen_settings(d),
    )  # fmt: skip
    yield (
        f"8 bits: screened_head {d}",
        lambda: screened_head.screened_head(x, head, state.position, state.least, state.stops, True),
    )
    yield f"advance chosen {d}", lambda: sampling.advance(hidden, state, pdl=True, chosen=head.best)
    q, cache, bias = torch.empty(1, h, hd), halves(1, h, 64, hd), halves(h, 3, hd)
    qkv_w = halves(h, 3, hd, d)
    yield f"qkv_dense {d}", lambda: qkv_dense.qkv_dense(x, ln, qkv_w, bias, position, q, cache, cache, True)
    heads = Selection(h, 1, torch.empty(h, dtype=torch.int32), torch.empty(h, dtype=torch.int32),
                      torch.empty(h, dtype=torch.int32))  # fmt: skip
    kept, marks = halves(1, 64, d), torch.empty(1, h, dtype=torch.int32)
    sparse = (qkv_w, bias, heads, position, marks, None, q, cache, cache)
    yield f"qkv {d}", lambda: qkv.qkv(kept, *sparse, pdl=True)
    yield f"out {d}", lambda: out_projection.project_heads(x, halves(d, d), halves(d), x, heads, y, True)
    yield f"out all {d}", lambda: out_projection.project_heads(x, halves(d, d), halves(d), x, None, y, True)
    rows, partials = sparse_fc2.PackedSelection.empty(n, "cpu"), sparse_fc2.partial_sums(d, "cpu")
    for norm, early in ((None, None), (None, "x"), (ln, "list"), (ln, None)):
        source = x if norm else halves(1, d)
        yield (
            f"sparse_mlp {d} {'norm' if norm else 'own'} {early}",
            lambda source=source, norm=norm, early=early: sparse_mlp.sparse_mlp(
                source, norm, w, w[:, 0].contiguous(), w, halves(d), x, rows, y, partials, early, True
            ),
        )
    yield f"sparse_fc1 {d}", lambda: sparse_fc1.sparse_fc1(halves(1, d), w, halves(n), rows, pdl=True)
    yield f"sparse_fc2 {d}", lambda: sparse_fc2.sparse_fc2(rows, w, halves(d), x, y, partials, True)
    for kind in (torch.float16, torch.int8):
        down, up = torch.empty(rank, d, dtype=kind), torch.empty(n, rank, dtype=kind)
        scales = (None, None) if kind == torch.float16 else (torch.empty(rank), torch.empty(n))
        sums = (torch.empty(rank), torch.empty(rank))
        bits = Selection.empty(n, "cpu", sparse_fc2.packed_block(d))
        predictor = PredictorWeights(down, up, torch.empty(n), *scales)
        yield (
            f"predict {d} {kind}",
            lambda down=down, scales=scales, sums=sums: predict.predict_down(
                x, ln, down, sums, z, scales[0], normalised_out=halves(1, d), pdl=True
            ),
        )
        yield (
            f"select {d} {kind}",
            lambda predictor=predictor, bits=bits: select.select_rows(z, predictor, limit, bits, row_state, pdl=True),
        )
        yield (
            f"qkv_select {d} {kind}",
            lambda predictor=predictor, bits=bits: qkv_select.qkv_select(
                kept, *sparse, predictor, z, limit, row_state, bits, pdl=True
            ),
        )
    sums = ((torch.empty(h),) * 2, (torch.empty(rank),) * 2)
    site = site_predict.SiteRows(halves(h, d), halves(rank, d), None, *sums, False)
    yield (
        f"site {d}",
        lambda site=site: site_predict.site_predict(
            x, ln, site, torch.empty(h), limit, position, row_state, kept, heads, z, True
        ),
    )


def int4_cases(d: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Those with 4-bit weights, predictors of int8 codes and of nibbles."""

    def rows(*shape: int) -> Int4Rows:
        *outer, width = shape
        return Int4Rows(torch.empty(*outer, width // 8, dtype=torch.int32), halves(*outer, width // min(128, width)))

    ones, limit = torch.ones(1, dtype=torch.int32), torch.ones(1)
    n, rank, hd = 4 * d, d // 16, 64 if d <= 2048 else 128
    h = d // hd
    x, y, hidden, z = (torch.empty(1, size) for size in (d, d, n, rank))
    ln, bias, w = LayerNormWeights(halves(d), halves(d)), halves(n), rows(n, d)
    q, cache, qkv_bias, qkv_w = torch.empty(1, h, hd), halves(1, h, 64, hd), halves(h, 3, hd), rows(h, 3, hd, d)
    heads = Selection(h, 1, *(torch.empty(h, dtype=torch.int32) for _ in range(3)))
    sparse = (
        halves(1, 64, d),
        qkv_w,
        qkv_bias,
        heads,
        ones,
        torch.empty(1, h, dtype=torch.int32),
        None,
        q,
        cache,
        cache,
    )
    listed, partials = sparse_fc2.PackedSelection.empty(n, "cpu"), sparse_fc2.partial_sums(d, "cpu")
    predictors = {
        name: PredictorWeights(
            torch.empty(rank, d // share, dtype=kind), torch.empty(n, rank // share, dtype=kind), torch.empty(n),
            torch.empty(rank), torch.empty(n),
        )
        for name, kind, share in (("int8", torch.int8, 1), ("nibbles", torch.uint8, 2))
    }  # fmt: skip
    for batch in (2, 8):
        tokens, states, several = halves(batch, d), torch.ones(batch, dtype=torch.int32), Selection.empty(n, "cpu")
        yield (
            f"4 bits: predict_select {d} nibbles rows {batch}",
            lambda tokens=tokens, states=states, several=several: select.predict_select(
                tokens, predictors["nibbles"], limit, several, row_state=states, pdl=True, listed=(listed.ids, ones)
            ),
        )
    bits = Selection.empty(n, "cpu", sparse_fc2.packed_block(d))
    by_head = rows(h, d, hd)
    scratch = flash_decode.AttentionScratch.empty(1, h, hd, cache.shape[2], "cpu")
    yield f"4 bits: dense_rows {d}", lambda: dense_gemv.dense_rows(x, ln, w, bias, "relu", hidden, True)
    yield f"4 bits: qkv_dense {d}", lambda: qkv_dense.qkv_dense(x, ln, qkv_w, qkv_bias, ones, q, cache, cache, True)
    yield f"4 bits: qkv {d}", lambda: qkv.qkv(*sparse, pdl=True)
    for kind, predictor in predictors.items():
        sums = ((torch.empty(h),) * 2, (torch.empty(rank),) * 2)
        site = site_predict.SiteRows(halves(h, d), predictor.down, predictor.down_scale, *sums, False)
        yield (
            f"4 bits: qkv_select {d} {kind}",
            lambda predictor=predictor: qkv_select.qkv_select(*sparse, predictor, z, limit, ones, bits, pdl=True),
        )
        yield (
            f"4 bits: qkv_select {d} {kind} always",
            lambda predictor=predictor: qkv_select.qkv_select(
                *sparse, predictor, z, limit, ones, bits, policy="always", pdl=True
            ),
        )
        yield (
            f"4 bits: site {d} {kind}",
            lambda site=site: site_predict.site_predict(
                x, ln, site, torch.empty(h), limit, ones, ones, halves(1, 64, d), heads, z, True
            ),
        )
    estimate, moments = torch.empty(2), torch.empty(2, dtype=torch.int64)
    norm = LateNorm(ln, estimate, moments, torch.empty(64, 2))
    sums = ((torch.empty(h),) * 2, (torch.empty(rank),) * 2)
    first_half = rows(rank, d) if d >= mlp_ahead.TILED_FROM else predictors["nibbles"].down
    ahead = mlp_ahead.HeadsAhead(halves(h, d), ln, sums[0], torch.empty(h), limit, ones, heads)
    for policy, selected in (("backfill", ahead), ("always", None)):
        late = mlp_ahead.LateSite(
            norm, sparse[0], ones, *(torch.empty(h, 3, hd) for _ in range(2)), selected, first_half,
            *(torch.empty(rank) for _ in range(3)), False, ones,
        )  # fmt: skip
        yield (
            f"4 bits: late qkv_select {d} {policy}",
            lambda late=late, policy=policy: qkv_select.qkv_select(
                sparse[0], qkv_w, late.shifts, *sparse[3:], predictors["nibbles"], z, limit, ones, bits, policy, True,
                late,
            ),
        )  # fmt: skip
        yield (
            f"4 bits: attend_pack {d} {policy}",
            lambda selected=selected: attend_pack.attend_pack(
                q, cache, cache, None if selected is None else heads, ones, None if selected is None else sparse[5],
                None, halves(1, d), scratch, bits, listed, True,
            ),
        )  # fmt: skip
        yield (
            f"4 bits: mlp_ahead {d} {policy}",
            lambda late=late: mlp_ahead.mlp_ahead(
                x, ln, w, bias, w, halves(d), listed, y, partials, "list", True, ahead=late
            ),
        )
    mixed = halves(1, d)
    yield f"4 bits: out {d}", lambda: out_projection.project_heads(mixed, by_head, halves(d), x, heads, y, True)
    yield f"4 bits: out all {d}", lambda: out_projection.project_heads(mixed, by_head, halves(d), x, None, y, True)
    yield (
        f"4 bits: int4_mlp {d}",
        lambda: int4_mlp.int4_mlp(x, ln, w, bias, w, halves(d), x, listed, y, partials, "list", True),
    )
    yield (
        f"4 bits: int4_mlp {d} own",
        lambda: int4_mlp.int4_mlp(mixed, None, w, bias, w, halves(d), x, listed, y, partials, "x", True),
    )
    for tokens in (1, 2, 4, 8):
        several, eight = hidden if tokens == 1 else halves(tokens, n), torch.empty(2, tokens, d)
        yield (
            f"4 bits: int4_fc2 {d} {tokens}",
            lambda several=several, eight=eight: int4_fc2.int4_fc2(
                several, w, halves(d), eight[0], eight[1], partials, True
            ),
        )
        if tokens > 1:
            given = halves(tokens, d)
            yield (
                f"4 bits: int4_linear {d} {tokens}",
                lambda given=given: int4_batch.int4_linear(given, w, bias, "relu", True),
            )
            yield (
                f"4 bits: int4_listed {d} {tokens}",
                lambda given=given: int4_batch.int4_listed(
                    given, w, bias, listed.ids, listed.count, bits.row_bits, True
                ),
            )
            yield (
                f"4 bits: int4_qkv {d} {tokens}",
                lambda given=given, tokens=tokens: int4_batch.int4_qkv(
                    given,
                    qkv_w,
                    qkv_bias,
                    torch.ones(tokens, dtype=torch.int32),
                    torch.empty(tokens, h, hd),
                    halves(tokens, h, 64, hd),
                    halves(tokens, h, 64, hd),
                    True,
                ),
            )
            yield (
                f"4 bits: int4_by_head {d} {tokens}",
                lambda given=given, eight=eight: int4_batch.int4_by_head(
                    given, by_head, halves(d), eight[0], eight[1], True
                ),
            )


def cases(widths: Sequence[int] = WIDTHS) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All of these widths."""
    for d in widths:
        yield from cases_of(d)
    for d in widths:
        yield from int4_cases(d)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="JSON")
    parser.add_argument("--compare", metavar="JSON")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, metavar="D")
    args = parser.parse_args()
    pretend_a_gpu()
    texts: dict[str, str] = {}
    for name, call in cases(args.widths):  # one after the other: a case holds the tensors of its width
        if args.only not in name:
            continue
        for function, kernel in compiled_launches(call):
            key = f"{name} {function}"
            text = plain_ptx(kernel)
            texts[key] = hashlib.sha256(text.encode()).hexdigest()
            if not args.save and not args.compare:
                found = report(kernel)
                inner = loops(found.code)
                sizes = ", ".join(str(len(loop)) for loop in inner)
                spills = sum(name.startswith(("LDL", "STL")) for loop in inner for name, _ in loop)
                mean, least, loads = on_their_way(max(inner, key=len)) if inner else (0.0, 0, 0)
                print(
                    f"{key}: {found.registers} registers, {found.stack} B stack ({spills} in loops), "
                    f"{found.shared} B shared, "
                    f"loops of {sizes or 'none'} instructions"
                    + (f"; of {loads} loads {mean:.1f} on their way, at least {least}" if loads else "")
                    + (f"; {refused} COPIES THAT A GPU REFUSES" if (refused := refused_copies(found.code)) else ""),
                    flush=True,
                )
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
