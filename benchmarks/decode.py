"""Times one decoding step of OPT shapes with random weights: Hugging Face eager and compiled, our dense and sparse one.

Writes rows to benchmarks/decode.csv as they come, so a run that is cut short loses nothing. Weights are random, of the
true shapes, no layer shares any; tokens are random and forced. The predictors really run; their thresholds are set on
the model's own activations to the stated densities, and fc1's bias is shifted so that the stated share of neurons is
live. Rank, densities and live share in a row are measured, not asked.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.harness import commit, measure
from dejavu_train.decode import DecodeEngine, Sampling
from dejavu_train.decode_weights import DecodeWeights, TargetPredictor
from dejavu_train.opt_model import OPTShape
from kernels.dense_gemv import RowSettings, dense_rows
from kernels.layer_norm import LayerNormWeights
from kernels.select import PredictorWeights, predict_reference

SHAPES = {
    "1.3b": OPTShape(2048, 8192, 24, 32, 50272, 2048),
    "2.7b": OPTShape(2560, 10240, 32, 32, 50272, 2048),
    "6.7b": OPTShape(4096, 16384, 32, 32, 50272, 2048),
    "13b": OPTShape(5120, 20480, 40, 40, 50272, 2048),
    "30b": OPTShape(7168, 28672, 48, 56, 50272, 2048),
    "66b": OPTShape(9216, 36864, 64, 72, 50272, 2048),
}
RANKS = {"1.3b": 128, "2.7b": 160, "6.7b": 256, "13b": 320, "30b": 448, "66b": 576}  # 4 % of the dense MLP's bytes
# Share of the neurons that a batch selects together for a recall of 0.99, means over the layers (Polar Sparsity).
UNION = {
    "6.7b": {2: 0.153, 4: 0.206, 8: 0.29, 16: 0.398, 32: 0.517},
    "30b": {2: 0.098, 4: 0.141, 8: 0.209, 16: 0.304, 32: 0.419},
    "66b": {2: 0.08, 4: 0.116, 8: 0.175, 16: 0.263, 32: 0.374},
}
COLUMNS = (
    "date gpu torch triton commit model engine batch prompt positions mlp_density head_density live_share rank options "
    "steps p20_ms p50_ms p80_ms tokens_per_s gb_per_step best_tb_s floor_ms share_of_floor floor45_ms share45 note"
).split()
STD = 0.02


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


def step_times(run: Callable[[], None], n: int, warm: int = 4) -> list[float]:
    """Milliseconds between the ends of consecutive calls, n of them, without a synchronisation in between."""
    for _ in range(warm):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


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


# ---------------------------------------------------------------- models and predictors


def random_weights(shape: OPTShape, live_share: float) -> DecodeWeights:
    """Random weights whose neurons are live with the given probability, whatever is selected."""
    weights = DecodeWeights.random(shape, torch.float16, "cuda", std=STD)
    # A LayerNorm's output has norm sqrt(d), so pre-activations are normal with deviation STD * sqrt(d).
    shift = STD * math.sqrt(shape.d_model) * statistics.NormalDist().inv_cdf(live_share)
    for layer in weights.layers:
        layer.fc1_bias.fill_(shift)
    return weights


def random_predictors(
    shape: OPTShape, rank: int, mlp: bool, heads: bool, lookahead: int = 0
) -> dict[tuple[int, str], TargetPredictor]:
    """Predictors of both targets; thresholds are set later. lookahead: half-blocks between the MLP's site and fc1."""
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.float16, device="cuda").normal_(0, STD, generator=generator)

    result = {}
    none = torch.empty(1, 1, dtype=torch.float16, device="cuda")
    for layer in range(shape.n_layers):
        for target, wanted in (("mlp", mlp), ("heads", heads)):
            if not wanted:
                continue
            n = shape.units(target)
            half = max(0, 2 * layer + 1 - lookahead) if target == "mlp" else 2 * layer
            folded = normal(n, shape.d_model) if target == "heads" else None
            pair = PredictorWeights(none, none) if folded is not None else PredictorWeights(
                normal(rank, shape.d_model), normal(n, rank), torch.zeros(n, device="cuda")
            )  # fmt: skip
            result[layer, target] = TargetPredictor(
                layer, target, ("attn_in", "mlp_in")[half % 2], half // 2, pair, torch.zeros(1, device="cuda"), None,
                folded, torch.zeros(n, device="cuda"), 0.0,
            )  # fmt: skip
    return result


class Watched:
    """Runs an engine's step eagerly and shows each operation: to set thresholds and to read counts."""

    def __init__(self, engine: DecodeEngine, watch: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> None:
        self.engine, self.watch, self.plain = engine, watch, engine.core.ops

    def __enter__(self) -> None:
        def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.watch(name + ":before", args, kwargs)
                result = function(*args, **kwargs)
                self.watch(name, args, kwargs)
                return result

            return call

        made = {name: function and wrapped(name, function) for name, function in vars(self.plain).items()}
        self.engine.core.ops = type(self.plain)(**made)

    def __exit__(self, *_: object) -> None:
        self.engine.core.ops = self.plain


def set_thresholds(engine: DecodeEngine, mlp_density: float, head_density: float, n_steps: int = 6) -> None:
    """Thresholds at the quantile of the logits on the model's own activations, layer after layer in one step each."""
    seen: dict[int, list[torch.Tensor]] = {}

    def put(threshold: torch.Tensor, logits: torch.Tensor, density: float) -> None:
        pool = seen.setdefault(threshold.data_ptr(), [])
        pool.append(logits.flatten())
        values = torch.cat(pool).sort(descending=True).values
        threshold.fill_(values[min(round(density * len(values)), len(values) - 1)])

    def watch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == "predict_select:before":
            x, predictor, threshold = args[:3]
            put(threshold, predict_reference(x, predictor, kwargs["ln"]), mlp_density)
        elif name == "select_gather:before":
            hidden, mlp, threshold = args[:3]
            put(threshold, hidden @ mlp.up.float().T + mlp.bias, mlp_density)
        elif name == "qkv_select:before":
            mlp, hidden, threshold = args[11:14]
            put(threshold, hidden @ mlp.up.float().T + mlp.bias, mlp_density)
        elif name in ("head_select:before", "site_predict:before") and args[2] is not None:
            x, norm, folded, bias, threshold = args[:5]
            put(threshold, predict_reference(x, PredictorWeights(folded, _eye(folded), bias), norm), head_density)

    with Watched(engine, watch):
        for _ in range(n_steps):
            engine.core.eager("greedy", False)


def _eye(folded: torch.Tensor) -> torch.Tensor:
    return torch.eye(len(folded), dtype=folded.dtype, device=folded.device)


def measured(engine: DecodeEngine, n_steps: int = 4) -> dict[str, float]:
    """Densities and live share over some eager steps, and the bytes that a step must read."""
    shape, size = engine.shape, 2
    d, hd = shape.d_model, shape.head_dim
    rows = {"heads": [0, 0], "mlp": [0, 0]}
    live = [0, 0]
    total = 0.0

    def watch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal total
        context = float((engine.state.position + 1).sum())
        if name == "qkv_dense":
            total += 3 * d * d * size + shape.n_heads * context * hd * 2 * size
        elif name in ("qkv", "qkv_select"):
            n = int(args[3].counts.sum())
            rows["heads"][0] += n
            rows["heads"][1] += shape.n_heads
            # A head of the union reads the K/V of the rows that select it: on average their share of the contexts.
            each = float(args[3].to_mask(engine.batch).sum()) / engine.batch
            total += 3 * n * hd * d * size + each * context * hd * 2 * size
            if name == "qkv_select":
                total += args[11].up.nbytes
        elif name in ("head_select", "site_predict") and args[2] is not None:
            total += args[2].nbytes + (args[9].down.nbytes if name == "site_predict" else 0)
        elif name == "predict_select":
            total += args[1].down.nbytes + args[1].up.nbytes
        elif name == "packed_rows":
            n = int(args[0].count)
            live[0] += n
            total += n * d * size
        elif name == "project_heads":
            selection = args[4] if engine.batch == 1 else None
            total += (d if selection is None else int(selection.counts.sum()) * hd) * d * size
        elif name == "scatter_gemv":
            h = args[0]
            if isinstance(h, torch.Tensor):
                total += h.shape[1] * d * size
            else:
                n = int(h.counts.sum())
                live[0] += n
                total += n * d * size
        elif name == "select_gather":
            chosen = args[0] @ args[1].up.float().T + args[1].bias > args[2]
            n = int(chosen.sum())
            total += n * d * size + args[1].up.nbytes
            rows["mlp"][0] += n
            rows["mlp"][1] += shape.d_ffn
            live[1] += n
        elif name in ("gather_gemv", "listed_gemv"):
            selection = args[3 if name == "gather_gemv" else 4]
            weight = args[1 if name == "gather_gemv" else 2]
            n = weight.shape[0] if selection is None else int(selection.counts.sum())
            total += n * d * size
            if selection is not None:
                rows["mlp"][0] += n
                rows["mlp"][1] += shape.d_ffn
                live[1] += n
        elif name in ("dense_rows", "dense_hidden"):
            total += args[2].nbytes
        elif name in ("dense_add", "dense_wide"):
            total += args[1].nbytes

    with Watched(engine, watch):
        for _ in range(n_steps):
            engine.core.eager("greedy", False)
    share = {target: got / of if of else 1.0 for target, (got, of) in rows.items()}
    return {
        "mlp_density": share["mlp"],
        "head_density": share["heads"],
        "live_share": live[0] / live[1] if live[1] else 1.0,
        "gb_per_step": total / n_steps / 1e9,
    }


def breakdown(engine: DecodeEngine, n: int = 10) -> dict[str, float]:
    """Microseconds a layer of each operation: a graph of that operation alone, over all layers, in step order."""
    calls: dict[str, list[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]]] = {}

    def watch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not name.endswith(":before"):
            label = name
            if name == "scatter_gemv":
                label = "fc2"
            elif name == "listed_gemv":
                label = "fc1"
            elif name in ("dense_wide", "packed_rows"):
                label = "fc2"
            elif name == "project_heads":
                label = "out_projection"
            elif name == "gather_gemv":
                label = "down" if args[3] is None else "fc1"
            elif name == "dense_rows":
                label = "fc1" if args[4] == "relu" else "lm_head"
            calls.setdefault(label, []).append((getattr(engine.core.ops_plain, name), args, kwargs))

    engine.core.ops_plain = engine.core.ops  # type: ignore[attr-defined]
    with Watched(engine, watch):
        engine.core.eager("greedy", False)
    result = {}
    for label, todo in calls.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for function, args, kwargs in todo:
                function(*args, **kwargs)
        result[label] = 1e3 * statistics.median(step_times(graph.replay, n)) / len(todo)
    return result


def start(engine: DecodeEngine, prompt: int, steps: int) -> None:
    """Rows of random known tokens; `prompt` of them run densely, the others are forced one by one."""
    generator = torch.Generator().manual_seed(0)
    total = min(prompt + steps, engine.context)
    rows = torch.randint(3, engine.shape.vocab_size, (engine.batch, total), generator=generator).tolist()
    engine.begin(rows, [total] * len(rows), [prompt] * len(rows), [prompt] * len(rows), Sampling())
    engine.core.tail("greedy", False)


# ---------------------------------------------------------------- Hugging Face


def hugging_face(shape: OPTShape, static: bool, prompt: int, batch: int, steps: int) -> list[float]:
    """Milliseconds between tokens of transformers' generate(): a growing cache, or a static one, which it compiles.

    The second call is timed, so that compiling and recording graphs are over; its first tokens are left out.
    """
    from transformers import OPTConfig, OPTForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    config = OPTConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.d_model, word_embed_proj_dim=shape.d_model,
        ffn_dim=shape.d_ffn, num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_heads,
        max_position_embeddings=shape.max_positions, do_layer_norm_before=True, dtype="float16",
    )  # fmt: skip
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cuda"):
            model = OPTForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.randint(3, shape.vocab_size, (batch, prompt), device="cuda")
    options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
    for _ in range(2):
        clock = Clock()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps + 10, min_new_tokens=steps + 10,
            do_sample=False, pad_token_id=1, streamer=clock if batch == 1 else None, **options,
        )  # fmt: skip
    times = [1e3 * (b - a) for a, b in zip(clock.times, clock.times[1:], strict=False)]
    return times[10:]


# ---------------------------------------------------------------- cells


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
    if args.union and batch > 1:  # the share that one row selects, so that independent rows make up the union
        density, head_density = 1 - (1 - UNION[name][batch]) ** (1 / batch), 1.0
    if kind == "sparse":
        predictors = random_predictors(shape, rank, density < 1, head_density < 1, args.lookahead)
    engine = DecodeEngine(
        weights, predictors, batch=batch, context=min(2048, prompt + args.steps + 32), kv_policy=args.kv_policy,
        pdl=not args.no_pdl, look_ahead=args.look_ahead, one_kernel=args.one_kernel, pack_rows=not args.stripes,
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
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["6.7b"], choices=list(SHAPES))
    kinds = ["dense", "sparse", "hf", "hf-compile"]
    parser.add_argument("--engines", nargs="+", default=["dense", "sparse"], choices=kinds)
    parser.add_argument("--prompts", nargs="+", type=int, default=[128])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--mlp-density", type=float, default=0.1)
    parser.add_argument("--union", action="store_true", help="batches: attention dense, MLP at the densities of UNION")
    parser.add_argument("--head-density", type=float, default=0.5)
    parser.add_argument("--live-share", type=float, default=0.6)
    parser.add_argument("--rank", type=int, default=None, help="default: 4 %% of the dense MLP's bytes")
    parser.add_argument("--kv-policy", default="backfill")
    parser.add_argument("--lookahead", type=int, default=0, help="half-blocks between the MLP predictor's site and fc1")
    parser.add_argument("--look-ahead", default="stream", choices=["fused", "inline", "stream"])
    parser.add_argument("--one-kernel", action="store_true", help="select and fc1 in one kernel")
    parser.add_argument("--stripes", action="store_true", help="fc2 by stripes with a ticket, not from a packed list")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--breakdown", action="store_true", help="time each operation in a graph of its own")
    parser.add_argument("--variants", nargs="+", default=[""], help="launch settings to try, see `override`")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which no new cell starts")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/decode.csv"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    began = time.monotonic()
    best = best_bandwidth()
    gc.collect()
    torch.cuda.empty_cache()
    facts = conditions() | {"best_tb_s": best}
    options = " ".join(
        ([] if not args.no_pdl else ["no-pdl"])
        + ([f"lookahead={args.lookahead}-{args.look_ahead}"] if args.lookahead else [])
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
                        caches = 2 * shape.n_layers * batch * (prompt + args.steps) * shape.d_model * 2
                        parameters = shape.n_layers * 12 * shape.d_model**2 + shape.vocab_size * shape.d_model
                        row["note"] = f"does not fit: needs about {(caches + 2 * parameters) / 1e9:.0f} GB"
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
