"""How fast 4-bit words can be read at all: loads of 16 bytes a lane in three patterns, nothing computed but an XOR.

    python benchmarks/int4_reads.py --csv benchmarks/results/int4_reads.csv         a minute of one GPU

Tiles of 16 rows, warps side by side along them, `ahead` loads of a warp on their way. "64": what `int4_mma` reads, a
load is 64 bytes of eight rows; "128": 128 bytes of four rows; "tile": as if 16 rows by 128 columns lay together.
A step is a launch of its own in a graph, without dependent launches; sets of weights exceed the L2.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script, also run where nothing is installed

import torch
import triton
import triton.language as tl

from benchmarks.harness import measure
from benchmarks.rows import append_row, commit, five_digits

PATTERNS = {"64": 0, "128": 1, "tile": 2}
SHAPES = ((36864, 9216), (9216, 9216), (16384, 4096))  # rows, columns
SETTINGS = ((2, 4, 16), (1, 8, 16), (3, 4, 16), (4, 4, 12), (2, 8, 16), (8, 4, 8))  # programs, warps, ahead
COLUMNS = ("n", "d", "pattern", "programs", "warps", "ahead", "p50_us", "tb_s", "gpu", "torch", "triton", "commit",
           "date")  # fmt: skip


@triton.jit
def _place(tile, load, thread, W: tl.constexpr, PATTERN: tl.constexpr):
    """Where a thread's 16 bytes of its load number `load` of a tile lie; two loads are a kilobyte of a warp."""
    WARPS: tl.constexpr = thread.shape[0] // 32
    lane = thread % 32
    unit = load // 2
    half = load % 2
    if PATTERN == 0:
        row = lane // 4 + 8 * half
        place = (tile * 16 + row) * W + (unit * WARPS + thread // 32) * 16 + lane % 4 * 4
    elif PATTERN == 1:
        row = lane // 8 + 4 * half + unit % 2 * 8
        place = (tile * 16 + row) * W + (unit // 2 * WARPS + thread // 32) * 32 + lane % 8 * 4
    else:
        place = tile * 16 * W + (unit * WARPS + thread // 32) * 256 + half * 128 + lane * 4
    return place


@triton.jit
def _read_kernel(words, out, n_tiles, W: tl.constexpr, PATTERN: tl.constexpr, L: tl.constexpr, AHEAD: tl.constexpr):
    LOADS: tl.constexpr = W // 16 // (L // 32) * 2
    thread = tl.arange(0, L)
    four = tl.arange(0, 4)[None, :]
    found = tl.zeros((L,), tl.int32)
    w = ()
    for load in tl.static_range(AHEAD):
        at = words + _place(tl.program_id(0), load, thread, W, PATTERN)
        w = w + (tl.load(at[:, None] + four, eviction_policy="evict_first"),)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        after = tl.minimum(tile + tl.num_programs(0), n_tiles - 1)
        for load in tl.static_range(LOADS):
            found ^= tl.xor_sum(w[0], 1)
            if load + AHEAD < LOADS:
                at = words + _place(tile, load + AHEAD, thread, W, PATTERN)
            else:
                at = words + _place(after, load + AHEAD - LOADS, thread, W, PATTERN)
            w = w[1:] + (tl.load(at[:, None] + four, eviction_policy="evict_first"),)
    if tl.xor_sum(found, 0) == 123456789:  # so that nothing is left out
        tl.store(out, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/int4_reads.csv"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    same = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
            "commit": commit(), "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    for n, d in SHAPES:
        width, size = d // 8, n * d // 2
        sets = max(2, -(-400_000_000 // size))
        words = [torch.randint(-(2**31), 2**31 - 1, (n, width), dtype=torch.int32, device="cuda") for _ in range(sets)]
        for name, pattern in PATTERNS.items():
            for programs, warps, ahead in SETTINGS:
                if width // 16 % warps or (pattern == 1 and width // 32 % warps):
                    continue
                ahead, grid = min(ahead, width // 16 // warps * 2), min(sms * programs, n // 16)

                def step(i, pattern=pattern, warps=warps, ahead=ahead, grid=grid, words=words, n=n, width=width):
                    _read_kernel[(grid,)](
                        words[i], out, n // 16, W=width, PATTERN=pattern, L=32 * warps, AHEAD=ahead, num_warps=warps
                    )

                p50 = measure(step, sets, 7, rounds=-(-24 // sets))[1]
                row = {"n": n, "d": d, "pattern": name, "programs": programs, "warps": warps, "ahead": ahead}
                row |= {"p50_us": p50, "tb_s": size / p50 / 1e6}
                append_row(args.csv, five_digits(row | same), COLUMNS)
                print(*row.values(), flush=True)
        del words
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
