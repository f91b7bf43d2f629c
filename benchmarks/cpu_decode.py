"""Times one decoding step on a CPU: transformers eager and compiled, our dense and sparse engine, in turns.

Every rival takes a few steps in each round, so that whatever else runs on the machine meets all of them. Medians over
all rounds. One of them reads half a gigabyte in sequence. Its median is the read bandwidth that the others are compared
with: on a shared host bandwidth changes twofold within seconds. Rows go to benchmarks/results/cpu_decode.csv with the
processor's name. The engine counts megabytes a token: weights, predictors, K, V and LM head. With random shapes
predictors really run, on thresholds at the quantiles of their logits. Biases of fc1 make the stated share of neurons
active, which are those whose gate is above zero where MLPs are gated.

With --cpu-time one thread's time on the processor is counted, on a machine that others use as well. Shapes of other
families have no rivals: transformers would need four bytes a weight.

    python -m benchmarks.cpu_decode --model checkpoints/opt-mini --bundle checkpoints/demo/bundle
    python -m benchmarks.cpu_decode --shape 1.3b --rivals eager
    python -m benchmarks.cpu_decode --shape afm-4.5b --stored int8 --head-densities 1
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import beside_llama
from benchmarks.decode_hf import random_model
from benchmarks.decode_problem import ACTIVE, SHAPES, STD, sets_of
from benchmarks.random_folder import random_bundle
from benchmarks.rows import CPU_STEP, append_row, command_line, five_digits, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.cpu import CpuEngine, CpuWeights
from dejavu_train.engine.cpu.arrays import SPARSE
from dejavu_train.engine.cpu.bandwidth import Reader
from dejavu_train.engine.cpu.engine import usable_cores
from dejavu_train.engine.cpu_limits import STORED
from dejavu_train.engine.inputs import Row
from dejavu_train.families import ModelDims
from dejavu_train.families.dims import Positions
from dejavu_train.models.load import load_model

WARM_UP = 2
COLUMNS = (
    "date commit cpu threads bandwidth_gb_s model engine stored batch prompt mlp_selected head_selected active_share "
    "steps p20_ms p50_ms p80_ms mb_per_token gb_s share_of_bandwidth note sources clock"
).split()


@dataclass
class Rival:
    """Somebody who decodes one token a call, or reads ``n_bytes`` of memory. Times in seconds.

    engine: ours, whose bytes are counted.
    """

    name: str
    step: Callable[[], Any]
    stored: str = "float32"
    engine: CpuEngine | None = None
    n_bytes: int = 0
    times: list[float] = field(default_factory=list)
    mlp: list[float] = field(default_factory=list)
    heads: list[float] = field(default_factory=list)


def random_weights(shape: ModelDims, stored: str, active_share: float) -> CpuWeights:
    """Random weights. A share of all neurons is active in a token, with the frequencies of `active_sets`."""
    weights = CpuWeights.random(shape, stored, None, std=STD)
    sets = sets_of(shape, active_share, "cpu")
    for layer in range(shape.n_layers):
        weights.model.in_bias[layer] = sets.biases(layer).numpy() + shape.threshold
    return weights


def our_rival(name: str, engine: CpuEngine, rows: list[list[int]], steps: int) -> Rival:
    """An engine behind its prompt."""
    engine.begin([Row.of_prompt(row, len(row) + steps) for row in rows])
    engine.bytes_read()
    return Rival(name, engine.step, engine.weights.formats.layers, engine)


@torch.no_grad()
def transformers_rival(model: Any, rows: list[list[int]], steps: int, compiled: bool) -> Rival:
    """transformers token by token: a growing cache, or a static one and torch.compile."""
    ids = torch.tensor(rows)
    forward, cache = model, None
    if compiled:
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + steps + 1)
        forward = torch.compile(model)
    out = model(ids, use_cache=True, logits_to_keep=1, past_key_values=cache)
    # Given, because working them out from a static cache would break the compiled graph.
    positions = torch.full((len(ids), 1), ids.shape[1])

    @torch.no_grad()
    def step() -> None:
        nonlocal out
        token = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        out = forward(token, use_cache=True, past_key_values=out.past_key_values, position_ids=positions)
        positions.add_(1)

    return Rival("transformers-compile" if compiled else "transformers-eager", step)


def run_in_turns(rivals: list[Rival], rounds: int, steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
    """``rounds`` times every rival takes ``steps`` steps, the first of each turn not counted: caches are another's."""
    for _ in range(rounds):
        for rival in rivals:
            for i in range(steps + 1):
                started = clock()
                rival.step()
                if i:
                    rival.times.append(clock() - started)
                if rival.engine is not None and (rival.engine.state.row_state == SPARSE).any():
                    note_densities(rival)


def note_densities(rival: Rival) -> None:
    """What the last step selected: neurons of the last layer, heads of all."""
    engine = rival.engine
    assert engine is not None
    if (engine.selectors.at[-1, 1] >= 0).any():
        rival.mlp.append(float(engine.scratch.counts[:, 0].sum()) / engine.shape.d_ffn)
    sparse = engine.selectors.kept >= 0
    if sparse.any():
        rival.heads.append(float((engine.state.watermark[sparse] == engine.state.position[:, None]).mean()))


def row_of(rival: Rival, batch: int, bandwidth: float, tokens: int) -> dict[str, Any]:
    """The measured columns of one rival. tokens: all steps that it took, those not counted included."""
    times = [1e3 * seconds for seconds in rival.times]
    cuts = statistics.quantiles(times, n=5, method="inclusive")
    row: dict[str, Any] = {"engine": rival.name, "stored": rival.stored, "steps": len(times)}
    row |= {"p20_ms": cuts[0], "p50_ms": statistics.median(times), "p80_ms": cuts[3]}
    row["mlp_selected"] = statistics.mean(rival.mlp) if rival.mlp else 1.0
    row["head_selected"] = statistics.mean(rival.heads) if rival.heads else 1.0
    if rival.n_bytes:
        row["gb_s"] = rival.n_bytes / statistics.median(rival.times) / 1e9
        row["note"] = f"fastest pass: {rival.n_bytes / min(rival.times) / 1e9:.1f} GB/s"
    if rival.engine is not None:
        parts = {name: count / tokens / 1e6 for name, count in rival.engine.bytes_read().items()}
        row["mb_per_token"] = sum(parts.values()) / batch
        row["gb_s"] = sum(parts.values()) / row["p50_ms"]
        row["share_of_bandwidth"] = row["gb_s"] / bandwidth
        row["note"] = " ".join(f"{name}={megabytes:.1f}MB" for name, megabytes in parts.items())
    return row


def cpu_name() -> str:
    """The processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def our_engines(args: argparse.Namespace, context: int) -> tuple[ModelDims, list[tuple[str, CpuEngine]], float | str]:
    """Our rivals, dense and sparse, in every asked format. Sparse and dense share the weights."""
    engines: list[tuple[str, CpuEngine]] = []
    options: dict[str, Any] = {"batch": args.batch, "context": context, "threads": args.threads}
    for stored in args.stored:
        if args.shape:
            shape = SHAPES[args.shape]
            weights = random_weights(shape, stored, args.active_share)
            engines.append((f"dense-{stored}", CpuEngine(weights, **options)))
            for heads in args.head_densities:
                used = random_bundle(shape, args.rank, (args.mlp_density, heads), "int8")
                engines.append((f"sparse-{stored}", CpuEngine(weights, used, **options)))
            continue
        model, bundle = load_model(args.model), Bundle.from_pretrained(args.bundle)
        for name, used in (("dense", None), ("sparse", bundle.at(args.mlp_density, args.head_densities[0]))):
            engine = CpuEngine(model, used, stored=stored, **options)
            engines.append((f"{name}-{stored}", engine))
    return engines[0][1].shape, engines, args.active_share if args.shape else ""


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/demo/bundle")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape instead of a model")
    parser.add_argument("--stored", nargs="+", default=["float32", "int8"], choices=STORED)
    parser.add_argument("--rivals", nargs="*", choices=["eager", "compile"], help="default: both of an OPT, else none")
    beside_llama.add_options(parser)
    parser.add_argument("--mlp-density", type=float, help="default: 0.2 of a bundle, 0.1 of a random shape")
    parser.add_argument("--head-densities", type=float, nargs="+", help="default: 0.85 of a bundle, 1 and 0.5")
    parser.add_argument("--active-share", type=float, default=ACTIVE, help="of a random shape's neurons")
    parser.add_argument("--rank", type=int, default=128, help="of a random shape's predictors")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, help="in each round; default: 5 of a random shape, 20 of a bundle")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--cpu-time", action="store_true", help="of one thread")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu_decode.csv"))
    args = parser.parse_args()
    if args.rivals is None:
        of_opt = not args.shape or SHAPES[args.shape].positions is Positions.LEARNED
        args.rivals = ["eager", "compile"] if of_opt else []
    clock = time.process_time if args.cpu_time else time.perf_counter
    args.threads = 1 if args.cpu_time else args.threads
    args.mlp_density = args.mlp_density or (0.1 if args.shape else 0.2)
    args.head_densities = args.head_densities or ([1.0, 0.5] if args.shape else [0.85])
    args.steps = args.steps or (5 if args.shape else 20)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokens = args.rounds * (args.steps + 1) + WARM_UP
    reader = Reader(args.threads)
    shape, engines, active_share = our_engines(args, args.prompt + tokens + 1)
    rows = torch.randint(3, shape.vocab_size, (args.batch, args.prompt)).tolist()
    rivals = [Rival("read", reader.read, n_bytes=reader.n_bytes)]
    theirs = None
    if {"eager", "compile"} & {*args.rivals}:
        theirs = random_model(args.shape, shape, "cpu", torch.float32) if args.shape else load_model(args.model)
    for name in args.rivals:
        try:
            rival = transformers_rival(theirs, rows, tokens, name == "compile")
            for _ in range(WARM_UP):
                rival.step()
            rivals.append(rival)
        except Exception as error:  # a rival that does not run here must not cost the others
            print(f"{name} does not run: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    for form in args.llama_formats if args.llama else ():
        theirs = beside_llama.Llama(args.llama, shape, form, args.threads, args.prompt + tokens + 1, args.folder)
        theirs.prompt(args.prompt)
        rivals.append(Rival(f"llama.cpp-{form}", theirs.step, form))
    for name, engine in engines:
        rivals.append(our_rival(name, engine, rows, tokens + 1))
        for _ in range(WARM_UP):
            engine.step()
    run_in_turns(rivals, args.rounds, args.steps, clock)
    bandwidth = reader.n_bytes / statistics.median(rivals[0].times) / 1e9
    conditions = {
        **made_now(*CPU_STEP), "cpu": cpu_name(), "threads": args.threads,
        "bandwidth_gb_s": bandwidth, "model": args.shape or Path(args.model).name, "batch": args.batch,
        "prompt": args.prompt, "active_share": active_share, "clock": "cpu" if args.cpu_time else "wall",
    }  # fmt: skip
    print(f"{conditions['cpu']}, {args.threads} threads, reads {bandwidth:.1f} GB/s")
    for rival in rivals:
        row = conditions | row_of(rival, args.batch, bandwidth, tokens)
        append_row(args.out, five_digits(row), COLUMNS)
        counted = "share_of_bandwidth" in row
        read = f"{row['mb_per_token']:8.1f} MB  {row['share_of_bandwidth']:.0%} of the bandwidth" if counted else ""
        kept = f"mlp {row['mlp_selected']:.3f} heads {row['head_selected']:.3f}"
        print(f"{row['engine']:22} {kept}  {row['p50_ms']:8.3f} ms (p20 {row['p20_ms']:.3f})  {read}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
