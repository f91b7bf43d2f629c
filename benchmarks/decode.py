"""Times one decoding step of OPT shapes with random weights: Hugging Face eager and compiled, our dense and sparse one.

Writes rows to benchmarks/results/decode.csv as they come, so a run that is cut short loses nothing. No layer shares
weights; tokens are random and forced. The predictors really run; their thresholds are set on the model's own
activations to the stated densities, and fc1's bias is shifted so that the stated share of neurons is live. Rank,
densities and live share in a row are measured, not asked.

    python -m benchmarks.decode --models 6.7b --engines dense sparse --prompts 128 512
"""

import argparse
import csv
import datetime
import gc
import itertools
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.decode_breakdown import breakdown
from benchmarks.decode_hf import hugging_face
from benchmarks.decode_problem import (
    RANKS,
    SHAPES,
    STD,
    UNION,
    measured,
    random_predictors,
    random_weights,
    set_thresholds,
    start,
)
from benchmarks.harness import commit, measure, step_times
from dejavu_train.decode import DecodeEngine
from dejavu_train.decode_weights import DecodeWeights
from dejavu_train.opt_model import OPTShape
from kernels.dense_gemv import RowSettings, dense_rows
from kernels.layer_norm import LayerNormWeights

COLUMNS = (
    "date gpu torch triton commit model engine batch prompt positions mlp_density row_density head_density live_share "
    "rank options steps p20_ms p50_ms p80_ms tokens_per_s gb_per_step best_tb_s floor_ms share_of_floor floor45_ms "
    "share45 note"
).split()


def conditions() -> dict[str, Any]:
    """What stands in every row beside the numbers."""
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
    }


def append(path: Path, row: dict[str, Any]) -> None:
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        if new:
            writer.writeheader()
        writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
    print({k: v for k, v in row.items() if k not in ("date", "gpu", "torch", "triton")}, flush=True)


def summary(times: list[float], batch: int) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=5, method="inclusive")
    p50 = statistics.median(times)
    return {"steps": len(times), "p20_ms": cuts[0], "p50_ms": p50, "p80_ms": cuts[3], "tokens_per_s": 1e3 * batch / p50}


def best_bandwidth() -> float:
    """TB/s of the best row kernel at density 1 on 49152 x 12288: the denominator of every byte floor."""
    weight = torch.empty(49152, 12288, dtype=torch.float16, device="cuda").normal_(0, STD)
    x12, norm = torch.randn(1, 12288, device="cuda"), torch.ones(2, 12288, dtype=torch.float16, device="cuda")
    # The same memory as rows of 12288, 4096 and 8192: whatever reads fastest.
    times = []
    for width, settings in ((12288, (4, 1, 8)), (12288, (2, 1, 16)), (4096, (8, 2, 8)), (8192, (4, 1, 8))):
        view, x = weight.view(-1, width), x12[:, :width].contiguous()
        ln = LayerNormWeights(*norm[:, :width].contiguous())
        out = torch.empty(1, len(view), device="cuda")
        step = lambda i, v=view, x=x, ln=ln, out=out, s=settings: dense_rows(  # noqa: E731
            x, ln, v, None, "none", out, False, RowSettings(*s)
        )
        times.append(measure(step, 3, 10)[1])
    return weight.nbytes / min(times) / 1e6


def override(variant: str) -> None:
    """Launch settings for one cell, as "listed=1,4 qkv=4,4,4 packed=32,256,8 wide=8,1024,8 out=8,8": for tuning."""
    from kernels import dense_wide, listed_gemv, out_projection, packed_rows, qkv

    for part in variant.split():
        name, numbers = part.split("=")
        v = tuple(int(number) for number in numbers.split(","))
        if name == "listed":
            listed_gemv.listed_share = lambda d, v=v: v[:2]
            listed_gemv.listed_block = lambda d, v=v: v[2]
        elif name == "qkv":
            qkv.qkv_settings = lambda d, v=v: RowSettings(*v)
        elif name == "packed":
            packed_rows.packed_settings = lambda d, v=v: v
        elif name == "wide":
            dense_wide.wide_settings = lambda d, v=v: v
        elif name == "out":
            out_projection.selected_settings = lambda d, v=v: RowSettings(0, *v)
        else:
            raise SystemExit(f"error: unknown setting {name}")


def run_engine(args: argparse.Namespace, name: str, weights: DecodeWeights, kind: str, batch: int, prompt: int) -> dict:
    """One cell of our engine: row values."""
    shape, rank = weights.shape, args.rank or RANKS[name]
    predictors = None
    density, head_density = args.mlp_density, args.head_density
    if args.union and batch > 1:
        density, head_density = UNION[name][batch], 1.0
    if kind == "sparse":
        single, single_heads = (1 - (1 - union) ** (1 / batch) for union in (density, head_density))
        dtype = torch.int8 if args.int8 else torch.float16
        predictors = random_predictors(shape, rank, single, single_heads, args.lookahead, dtype)
    engine = DecodeEngine(
        weights, predictors, batch=batch, context=min(2048, prompt + args.steps + 32), kv_policy=args.kv_policy,
        pdl=not args.no_pdl, look_ahead=args.look_ahead, one_kernel=args.one_kernel, pack_rows=not args.stripes,
        crossover=not args.no_crossover,
    )  # fmt: skip
    with torch.no_grad():
        start(engine, prompt, args.steps + 30)
        if predictors:
            set_thresholds(engine, density, head_density)
        row = measured(engine)
        times = step_times(engine.step, args.steps)
        row |= summary(times, batch)
        if args.breakdown:
            row["note"] = " ".join(f"{k}={v:.2f}us" for k, v in breakdown(engine).items())
    row["positions"] = f"{prompt}-{prompt + args.steps}"
    row["rank"] = rank if kind == "sparse" else 0
    dense = sorted({form.target for form in engine.forms.values() if not form.sparse})
    if dense:  # all layers of these shapes are alike
        row["note"] = f"{' and '.join(dense)} dense: sparse does not pay " + row.get("note", "")
    return row


def bytes_needed(shape: OPTShape, batch: int, positions: int) -> int:
    """fp16 weights, K/V and kept inputs: what a cell that does not fit would take, scratch not counted."""
    kept = 3 * shape.n_layers * batch * positions * shape.d_model
    layers = shape.n_layers * (4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ffn)
    return 2 * (kept + layers + (shape.vocab_size + shape.max_positions) * shape.d_model)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["6.7b"], choices=list(SHAPES))
    kinds = ["dense", "sparse", "hf", "hf-compile"]
    parser.add_argument("--engines", nargs="+", default=["dense", "sparse"], choices=kinds)
    parser.add_argument("--prompts", nargs="+", type=int, default=[128])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--mlp-density", type=float, default=0.1, help="of what the batch's rows select together")
    parser.add_argument("--head-density", type=float, default=0.5, help="the same for heads")
    parser.add_argument("--union", action="store_true", help="batches: attention dense, MLP at the densities of UNION")
    parser.add_argument("--int8", action="store_true", help="MLP predictors in int8 with a scale a row")
    parser.add_argument("--live-share", type=float, default=0.6)
    parser.add_argument("--rank", type=int, default=None, help="default: 4 %% of the dense MLP's bytes")
    parser.add_argument("--kv-policy", default="backfill")
    parser.add_argument("--lookahead", type=int, default=0, help="half-blocks between the MLP predictor's site and fc1")
    parser.add_argument("--look-ahead", default="stream", choices=["fused", "inline", "stream"])
    parser.add_argument("--one-kernel", action="store_true", help="select and fc1 in one kernel")
    parser.add_argument("--stripes", action="store_true", help="fc2 by stripes with a ticket, not from a packed list")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--no-crossover", action="store_true", help="sparse also where the dense form is faster")
    parser.add_argument("--breakdown", action="store_true", help="time each operation in a graph of its own")
    parser.add_argument("--variants", nargs="+", default=[""], help="launch settings to try, see `override`")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which no new cell starts")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode.csv"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    began = time.monotonic()
    best = best_bandwidth()
    gc.collect()
    torch.cuda.empty_cache()
    facts = conditions() | {"best_tb_s": best}
    options = " ".join(
        (["no-pdl"] if args.no_pdl else [])
        + (["no-crossover"] if args.no_crossover else [])
        + ([f"lookahead={args.lookahead}-{args.look_ahead}"] if args.lookahead else [])
        + (["int8"] if args.int8 else [])
        + (["stripes"] if args.stripes else [])
        + (["one-kernel"] if args.one_kernel else [])
        + ([f"kv={args.kv_policy}"] if args.kv_policy != "backfill" else [])
    )
    for name in args.models:
        shape = SHAPES[name]
        ours = [kind for kind in args.engines if not kind.startswith("hf")]
        weights = None
        for kind in [kind for kind in args.engines if kind.startswith("hf")] + ours:
            for batch in args.batches:
                for prompt, variant in itertools.product(args.prompts, args.variants if kind in ours else [""]):
                    if time.monotonic() - began > args.time_limit:
                        print("time limit: cells left out from here", name, kind, batch, prompt, flush=True)
                        return 0
                    row: dict[str, Any] = facts | {
                        "model": name, "engine": kind, "batch": batch, "prompt": prompt,
                        "options": f"{options} {variant}".strip(),
                    }  # fmt: skip
                    try:
                        override(variant)
                        if kind.startswith("hf"):
                            times = hugging_face(shape, kind == "hf-compile", prompt, batch, args.steps)
                            row |= summary(times, batch)
                        else:
                            if weights is None:
                                weights = random_weights(shape, args.live_share)
                            row |= run_engine(args, name, weights, kind, batch, prompt)
                            row["floor_ms"] = row["gb_per_step"] / best
                            row["share_of_floor"] = row["floor_ms"] / row["p50_ms"]
                            row["floor45_ms"] = row["gb_per_step"] / 4.5
                            row["share45"] = row["floor45_ms"] / row["p50_ms"]
                    except torch.cuda.OutOfMemoryError:
                        needed, room = bytes_needed(shape, batch, prompt + args.steps), torch.cuda.mem_get_info()[1]
                        row["note"] = f"does not fit: more than {needed / 1e9:.1f} GB and scratch, of {room / 1e9:.1f}"
                    except Exception as error:  # a cell that fails must not cost the others
                        row["note"] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
                    append(args.out, row)
                    gc.collect()
                    torch.cuda.empty_cache()
        del weights
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
