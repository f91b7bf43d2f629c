"""Times decoding steps of several GPUs together, and checks that they write what one writes. Nothing lies on disk.

Each rank makes random weights of its own units. Rows go to benchmarks/results/tensor_parallel.csv as they come. A row
holds the bytes that the slowest rank must read, and its floor by the read measured in the run. Some have a goal. On
another card than an H200 a goal is what it leaves beside its bytes there, and the bytes here.

    torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel --check
    torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel --models 66b 175b --cells goals
    torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel --models 175b --cells goals --layers 2 6
    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --models 66b --cells "engine=sparse batch=8" --sums nccl
    torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel --models 66b --cycles
    torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel --models afm-4.5b --callback
    torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel --models 66b --rivals --layers 2 6
    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --models afm-4.5b --cells "engine=dense" --rivals
    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --kill
    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --read /tmp/30b --models 30b
    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --rehearse --cells goals --check
    python -m benchmarks.tensor_parallel --sharing checkpoints/demo/bundle

--layers: a model of so few layers, and of so many. The whole one's time follows from both. --rivals: transformers on
the same GPUs behind the cells, see `benchmarks.rivals`. --read: writes a random
model to that folder where there is none, each rank reads its rows, and both generate. --rehearse: tiny shapes on CPUs.
"""

import dataclasses
import functools
import gc
import importlib.metadata
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.decode import EXTRA, summary
from benchmarks.decode_cells import Cell, read_cells
from benchmarks.decode_problem import (
    ACTIVE,
    RANKS,
    SHAPES,
    measured,
    random_predictors,
    random_weights,
    set_thresholds,
    start,
)
from benchmarks.harness import best_read, measure, step_times
from benchmarks.ranks_check import SUMS, check, check_lossless, kill, random_rows, ranks_for, say
from benchmarks.rivals import layers_of, rivals_of, times_apart
from benchmarks.rows import append_row, command_line, five_digits, gpu_versions, made_now
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.draft import Draft
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.memory import DoesNotFit, describe_memory
from dejavu_train.engine.model_weights import placed_by, weights_of_model
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.ranks.group import Group, group_of_launcher
from dejavu_train.engine.ranks.ranks import Ranks
from dejavu_train.engine.ranks.reading import load_shard
from dejavu_train.engine.ranks.shard import Shard
from dejavu_train.engine.ranks.sharing import rates_of, shards_of
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.families import ModelDims, UnitKey
from dejavu_train.kernels.common.positions import Alibi

COLUMNS = (
    "date gpu gpus torch triton commit model layers engine batch prompt weights mlp_union head_union active_share rank "
    "options sums sum_us steps p20_ms p50_ms p80_ms slowest_ms tokens_per_s gb_per_rank best_tb_s floor_ms "
    "share_of_floor goal_ms goal_here_ms note sources"
).split()
CELLS = [
    "engine=dense,sparse prompt=128,1024",
    "engine=sparse head_density=0.85",
    "engine=sparse mlp_density=0.25 head_density=0.25",
    "engine=dense,sparse weights=int4 lm_head=int4 head_density=0.85 predictors=int4 site=1",
    "engine=dense,sparse batch=8 mlp_density=0.29",
]
H200_TB_S = 4.5
CYCLES, LENGTHS = 9, (0, 1, 3, 5, 7)
# (model, GPUs, engine, weights, share of the heads): ms a token at batch 1 and prompt 128 on H200.
GOALS = {
    ("175b", 4, "dense", "float16", 1.0): 23.5,
    ("175b", 4, "sparse", "float16", 0.5): 9.2,
    ("175b", 4, "sparse", "float16", 0.85): 11.8,
    ("175b", 4, "dense", "int4", 1.0): 9.0,
    ("175b", 4, "sparse", "int4", 0.85): 6.0,
    ("66b", 2, "dense", "float16", 1.0): 17.0,
    ("66b", 2, "sparse", "float16", 0.5): 6.3,
    ("66b", 4, "dense", "float16", 1.0): 9.9,
    ("66b", 4, "sparse", "float16", 0.5): 4.4,
}


def own_weights(ranks: Ranks, cell: Cell, active_share: float, device: torch.device) -> DecodeWeights:
    """Random units of this rank, with the embeddings of the first."""
    packed, packed_head = cell.weights == "int4", cell.lm_head == "int4"
    torch.manual_seed(ranks.shard.rank)
    weights = random_weights(ranks.shard.dims, active_share, packed, packed_head, str(device))
    for table in (weights.embedding, weights.positions):
        if table is not None:
            dist.broadcast(table, 0)
    if isinstance(weights.placed, Alibi):  # slopes are those of all heads, of which a rank takes its own
        weights = dataclasses.replace(weights, placed=placed_by(ranks.shard.whole, None, device))
    return ranks.shard.with_head(weights)


def run_cell(
    cell: Cell, name: str, dims: ModelDims, group: Group, kind: str, steps: int, active_share: float
) -> dict[str, Any]:
    """Values of one row, on every rank."""
    device, gpu = group.device, group.device.type == "cuda"
    ranks, rank = ranks_for(group, dims, kind), cell.rank or RANKS[name]
    predictors = None
    if cell.engine == "sparse":
        mlp, heads = (1 - (1 - union) ** (1 / cell.batch) for union in (cell.mlp_density, cell.head_density))
        narrow = ranks.shard.dims
        predictors = random_predictors(
            narrow, rank, mlp, heads, cell.site, cell.predictors, cell.heads_site, str(device)
        )
    context = min(dims.max_positions, cell.prompt + steps + EXTRA)
    options = EngineOptions(
        batch=cell.batch, context=context, pdl=cell.pdl, look_ahead=cell.look_ahead,
        crossover=cell.crossover, release=True, ops="triton" if gpu else "reference",
    )  # fmt: skip
    engine = DecodeEngine(own_weights(ranks, cell, active_share, device), predictors, options, ranks)
    with torch.no_grad(), group.waiting():
        start(engine, cell.prompt, steps + EXTRA)
        if engine.predictors:
            set_thresholds(engine, cell.mlp_density, cell.head_density)
        row: dict[str, Any] = measured(engine)
        times = step_times(engine.step, steps) if gpu else cpu_times(engine.step, steps)
        row |= summary(times, cell.batch) | {"sums": ranks.sums.name, "sum_us": time_of_sum(ranks, dims, cell.batch)}
    row["slowest_ms"] = max(group.gather(round(1e6 * row["p50_ms"]))) / 1e6
    row["gb_per_rank"] = max(group.gather(round(1e9 * row.pop("gb_per_step")))) / 1e9
    return row | {"rank": rank if engine.predictors else 0, "note": describe_memory(engine.memory)}


def cpu_times(run: Callable[[], object], n: int) -> list[float]:
    times = []
    for _ in range(n):
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def time_of_sum(ranks: Ranks, dims: ModelDims, batch: int) -> float:
    """Microseconds of one sum of the residual stream, in a graph on GPUs."""
    part = ranks.sums.buffer(batch, dims.d_model)
    out = torch.zeros_like(part)
    if part.device.type == "cuda":
        return measure(lambda: ranks.sums.add(part, out, pdl=True))
    return 1e3 * statistics.median(cpu_times(lambda: ranks.sums.add(part, out, pdl=True), 20))


def with_floor(row: dict[str, Any], cell: Cell, name: str, world: int, best: float) -> dict[str, Any]:
    """The row with its floor, and its goal where there is one."""
    row["floor_ms"] = row["gb_per_rank"] / best
    row["share_of_floor"] = row["floor_ms"] / row["slowest_ms"]
    heads = 1.0 if cell.engine == "dense" else cell.head_density
    goal = GOALS.get((name, world, cell.engine, cell.weights, heads))
    if goal is not None and cell.batch == 1 and cell.prompt == 128 and cell.mlp_density == 0.1:
        row["goal_ms"] = goal
        row["goal_here_ms"] = goal - row["gb_per_rank"] / H200_TB_S + row["floor_ms"]
    return row


def whole_of(few: dict[str, Any], many: dict[str, Any], counts: list[int], layers: int) -> dict[str, Any]:
    """A whole model's row, of rows of fewer layers: times and bytes grow evenly with the layers."""
    row = dict(many)
    for key in {"p20_ms", "p50_ms", "p80_ms", "slowest_ms", "gb_per_rank"} & set(many):
        slope = (many[key] - few[key]) / (counts[1] - counts[0])
        row[key] = few[key] + (layers - counts[0]) * slope
    row["tokens_per_s"] = 1e3 * row["tokens_per_s"] * many["p50_ms"] / 1e3 / row["p50_ms"]
    row["note"] = f"reckoned from {counts[0]} and {counts[1]} layers, slowest {few['slowest_ms']:.4g} and"
    row["note"] += f" {many['slowest_ms']:.4g} ms"
    return row


def about_run(group: Group, *parts: str) -> dict[str, Any]:
    """What stands in every row of a run that measures these sources."""
    gpu = group.device.type == "cuda"
    versions = gpu_versions() if gpu else {"gpu": "cpu", "torch": torch.__version__}
    return made_now(*parts) | {"gpus": group.world} | versions


def write_row(args: Any, group: Group, row: dict[str, Any]) -> None:
    if group.rank == 0:
        append_row(args.out, five_digits(row), COLUMNS)
    shown = "model engine weights options batch prompt slowest_ms floor_ms goal_here_ms sum_us note".split()
    say(group, " | ".join(f"{row[key]:.4g}" if isinstance(row.get(key), float) else str(row.get(key, ""))
                          for key in shown))  # fmt: skip


def time_cells(args: Any, group: Group) -> None:
    gpu = group.device.type == "cuda"
    best = min(group.gather(round(1e6 * (best_read() if gpu else 0.01)))) / 1e6
    about = about_run(group, "kernels", "dejavu_train/engine") | {"best_tb_s": best}
    for name in args.models:
        for cell in [cell for text in args.cells for cell in read_cells(text)]:
            if out_of_time(args, group, f"{name} {cell}"):
                return
            row = about | {"model": name, "options": cell.options} | dataclasses.asdict(cell) | {"rank": ""}
            write_row(args, group, row | timed_row(args, group, name, cell, best))


def out_of_time(args: Any, group: Group, what: str) -> bool:
    late = any(group.gather(int(time.monotonic() - args.began > args.time_limit)))
    if late:
        say(group, f"time limit: left out from here: {what}")
    return late


def time_rivals(args: Any, group: Group) -> None:
    """Rows of transformers on the GPUs of all ranks, which wait for it."""
    about = about_run(group, "benchmarks/rivals.py") | {"batch": 1, "prompt": args.prompt, "weights": "float16"}
    gc.collect()
    if group.device.type == "cuda":
        torch.cuda.empty_cache()
    for name, rival in [(model, each) for model in args.models for each in rivals_of(model)]:
        if out_of_time(args, group, f"{name} {rival}"):
            return
        row = about | {"model": name, "engine": rival}
        if group.rank == 0:
            row |= rival_row(args, name, rival, group.world)
        write_row(args, group, row)
        group.gather(0)


def time_cycles(args: Any, group: Group) -> None:
    """Rows of lossless cycles: a pass over eight slots behind drafts of so many tokens, whatever is accepted."""
    about = about_run(group, "kernels", "dejavu_train/engine") | {
        "batch": 1,
        "prompt": args.prompt,
        "engine": "lossless",
    }
    device, gpu = group.device, group.device.type == "cuda"
    for name in args.models:
        dims = SHAPES[name]
        ranks, context = ranks_for(group, dims, args.sums), min(dims.max_positions, args.prompt + 8 * (CYCLES + 2))
        engine = DecodeEngine(
            own_weights(ranks, Cell(), args.active_share, device),
            random_predictors(ranks.shard.dims, RANKS[name], 0.1, 1.0, 1, "int4", device=str(device)),
            EngineOptions(context=context, ops="triton" if gpu else "reference", release=True),
            ranks,
        )
        own, coded = engine.weights, own_weights(ranks, Cell(weights="int4"), args.active_share, device)
        beside = {"embedding": own.embedding, "positions": own.positions, "lm_head": own.lm_head}
        own.drafts["int4"] = dataclasses.replace(coded, **beside)
        for way, length in itertools.product((None, "int4"), LENGTHS):
            if out_of_time(args, group, f"{name} {way} {length}"):
                return
            pair = engine.pair(Draft(length, way))
            if length == 0:
                start(engine, args.prompt, CYCLES)
                seen: Any = SimpleNamespace(core=pair.step, predictors=engine.predictors, weights=pair.step.weights)
                with torch.no_grad(), group.waiting():
                    set_thresholds(seen, 0.1, 1.0)
            pair.begin(Row.of_prompt(random_rows(dims, 1, args.prompt)[0], context), ())
            times = cpu_times(lambda p=pair, g=length: p.cycle(g, "greedy"), CYCLES + 2)[2:]  # type: ignore[misc]
            row = about | {"model": name, "layers": dims.n_layers, "weights": "float16", "sums": ranks.sums.name}
            row |= summary(times, 1) | {"options": f"draft_length={length} draft_weights={way}"}
            row["slowest_ms"] = max(group.gather(round(1e6 * row["p50_ms"]))) / 1e6
            write_row(args, group, row | {"tokens_per_s": "", "note": "ms are of a cycle"})


def time_callback(args: Any, group: Group) -> None:
    """Rows of a token of generate(), without a callback and with one that does nothing: hosts agree on each token."""
    gpu, cell = group.device.type == "cuda", Cell("sparse", head_density=1.0, site=1)
    about = about_run(group, "kernels", "dejavu_train/engine") | {"batch": 1, "prompt": args.prompt}
    for name in args.models:
        dims = SHAPES[name]
        ranks = ranks_for(group, dims, args.sums)
        tokens = min(16 * args.steps, dims.max_positions - args.prompt - EXTRA)
        engine = DecodeEngine(
            own_weights(ranks, cell, args.active_share, group.device),
            random_predictors(ranks.shard.dims, RANKS[name], 0.1, 1.0, 1, "float16", device=str(group.device)),
            EngineOptions(context=args.prompt + tokens, ops="triton" if gpu else "reference", release=True),
            ranks,
        )
        gathers = cpu_times(lambda: group.gather(0), 200)
        prompt = random_rows(dims, 1, args.prompt)
        ways: dict[str, Any] = {"callback=none": None, "callback=idle": lambda row, token: None}
        for way, callback in ways.items():
            run = functools.partial(engine.generate, prompt, tokens, stop_tokens=(), callback=callback)
            run()
            times = [each / tokens for each in cpu_times(run, 5)]
            row = about | {"model": name, "layers": dims.n_layers, "weights": "float16", "sums": ranks.sums.name}
            row |= summary(times, 1) | {"engine": "generate", "options": way}
            row["slowest_ms"] = max(group.gather(round(1e6 * row["p50_ms"]))) / 1e6
            note = f"ms a token of {tokens}, prefill included; hosts agree in {1e3 * statistics.median(gathers):.0f} us"
            write_row(args, group, row | {"note": note})


def rival_row(args: Any, name: str, rival: str, world: int) -> dict[str, Any]:
    """Of the faster way of generate(), with both in the note."""
    layers = SHAPES[name].n_layers
    counts = layers_of(rival, world, args.layers or [layers])
    found = [
        times_apart(rival, name, count, world, args.prompt, args.steps, args.rival_seconds, args.rehearse)
        for count in counts
    ]
    made, notes, told = [], [], f"transformers {importlib.metadata.version('transformers')}"
    for way in found[0]:
        failed = [each[way] for each in found if isinstance(each[way], str)]
        if failed:
            notes.append(f"{way}: {failed[0][:200]}")
            continue
        rows = [summary(each[way], 1) for each in found]
        rows = [row | {"slowest_ms": row["p50_ms"]} for row in rows]
        row = rows[0] if len(rows) == 1 else whole_of(rows[0], rows[1], counts, layers)
        notes.append(f"{way} {row['p50_ms']:.4g} ms" + (f", {row['note']}" if "note" in row else ""))
        made.append(row)
    fastest: dict[str, Any] = min(made, key=lambda row: float(row["p50_ms"]), default={})
    return fastest | {"layers": max(counts), "note": f"{told}, static cache, generate() {'; '.join(notes)}"}


def timed_row(args: Any, group: Group, name: str, cell: Cell, best: float) -> dict[str, Any]:
    """A cell that does not fit on some rank is a row that says so: no rank waits for the others then."""
    whole = SHAPES[name]
    if whole.max_positions < cell.prompt + args.steps + EXTRA:
        cell = dataclasses.replace(cell, prompt=whole.max_positions // 4)
    counts = args.layers or [whole.n_layers]
    room = torch.cuda.mem_get_info(group.device)[1] if group.device.type == "cuda" else 2**40
    size = 0.53 if cell.weights == "int4" else 2.0
    needed = max(counts) * whole.layer_weights * size / group.world + 2 * whole.vocab_size * whole.d_model
    if needed > 0.93 * room:
        return {"layers": max(counts), "note": f"does not fit: {needed / 1e9:.1f} GB a rank, of {room / 1e9:.1f}"}
    rows = []
    for count in counts:
        dims = dataclasses.replace(whole, n_layers=count)
        try:
            rows.append(run_cell(cell, name, dims, group, args.sums, args.steps, args.active_share))
        except (torch.cuda.OutOfMemoryError, DoesNotFit) as error:
            group.fail(error)  # the others wait in a sum
            raise
        if group.device.type == "cuda":
            torch.cuda.empty_cache()
    row = rows[0] if len(rows) == 1 else whole_of(rows[0], rows[1], counts, whole.n_layers)
    return with_floor(row | {"layers": max(counts)}, cell, name, group.world, best)


def read(args: Any, group: Group) -> None:
    """Each rank reads its rows of a model on disk, and generates."""
    from benchmarks.by_layers import make

    (name,) = args.models
    dims, folder = SHAPES[name], args.read
    if group.rank == 0:
        make(dims, folder, group.device)
    group.gather(0)
    shard, began = shards_of(dims, group.world)[group.rank], time.monotonic()
    model, nbytes = load_shard(str(folder), shard, "float16", group.device)
    weights = shard.with_head(weights_of_model(model, torch.float16, group.device, True, held=shard.dims))
    seconds = max(group.gather(round(time.monotonic() - began)))
    every = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    say(group, f"{name}: ranks read {[round(n / 1e6) / 1e3 for n in group.gather(nbytes)]} of {every / 1e9:.1f} GB"
        f" in {seconds} s")  # fmt: skip
    gpu = group.device.type == "cuda"
    options = EngineOptions(context=min(256, dims.max_positions), ops="triton" if gpu else "reference", release=True)
    engine = DecodeEngine(weights, None, options, Ranks(shard, group.sums, group))
    tokens = engine.generate([[2, 17, 30, 99]], 32, stop_tokens=())[0]
    say(group, f"{name} on {group.world}: {tokens}")


def show_sharing(folder: Path) -> None:
    """The table of docs/notes/tensor-parallel.md."""
    from dejavu_train.bundle.artifact import Bundle

    bundle = Bundle.from_pretrained(folder)
    rates = rates_of(bundle)
    print("| GPUs | an even cut | by frequency |\n| --- | --- | --- |")
    for world in (2, 4):
        cells = []
        for shards in (shards_of(bundle.shape, world), shards_of(bundle.shape, world, rates)):
            waited, even = waited_bytes(shards, rates)
            cells.append(f"{waited / even:.3f}")
        print(f"| {world} | {' | '.join(cells)} |")


def waited_bytes(shards: Sequence[Shard], rates: Mapping[UnitKey, Tensor]) -> tuple[float, float]:
    """Bytes of the layers' matrices in fp16 that a token waits for: expected ones of the slowest rank, half by half.

    Returns:
        these, and what they would be if every rank read the same.
    """
    waited = even = 0.0
    for key in shards[0].units:
        row = shards[0].whole.rows_of(key.target) * shards[0].whole.d_model * 2
        ids = [shard.units[key] for shard in shards]
        read = [row * (rates[key][mine].sum().item() if key in rates else len(mine)) for mine in ids]
        waited += max(read)
        even += sum(read) / len(read)
    return waited, even


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=["66b"], choices=list(SHAPES))
    parser.add_argument("--cells", nargs="+", metavar="CELLS", help="as of benchmarks.decode, or goals")
    parser.add_argument("--sums", choices=list(SUMS), default="fastest")
    parser.add_argument("--layers", nargs=2, type=int, help="two smaller numbers of layers")
    parser.add_argument("--rivals", action="store_true", help="time transformers on the same GPUs")
    parser.add_argument("--cycles", action="store_true", help="time lossless cycles")
    parser.add_argument("--callback", action="store_true", help="time generate() with a callback and without")
    parser.add_argument("--rival-seconds", type=float, default=240, help="for each of its processes")
    parser.add_argument("--prompt", type=int, default=128, help="of rivals")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--active-share", type=float, default=ACTIVE)
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds after which no new cell starts")
    parser.add_argument("--check", action="store_true", help="compare tokens with those of one GPU first")
    parser.add_argument("--kill", action="store_true", help="end the last rank in a step: all must end with one line")
    parser.add_argument("--read", type=Path, help="a folder for a random model on disk")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on CPUs")
    parser.add_argument("--sharing", type=Path, help="a bundle: what sharing out by frequency gains")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tensor_parallel.csv"))
    args = parser.parse_args()
    if args.sharing is not None:
        show_sharing(args.sharing)
        return 0
    if args.rehearse:
        args.models, args.steps = ["tiny", *["afm-tiny"] * args.rivals], 4
    args.began = time.monotonic()
    args.cells = CELLS if args.cells == ["goals"] else args.cells
    group = group_of_launcher("cpu" if args.rehearse else None)
    group.watch.stuck_seconds = 900  # a cell of a large model, its kernels compiled
    try:
        if args.check and not all([check(group, args.sums), check_lossless(group, args.sums)]):
            return 1
        if args.kill:
            kill(group, args.sums)
        elif args.read is not None:
            read(args, group)
        else:
            if args.cells:
                time_cells(args, group)
            if args.cycles:
                time_cycles(args, group)
            if args.callback:
                time_callback(args, group)
            if args.rivals:
                time_rivals(args, group)
    except Exception as error:
        group.fail(error)
        raise
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
