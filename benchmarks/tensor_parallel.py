"""Times decoding steps of several GPUs together. Nothing lies on disk: each rank makes random weights of its own units.

Rows go to benchmarks/results/tensor_parallel.csv as they come. A row holds the bytes that the slowest rank must read,
and its floor by the read measured in the run.

    torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel --models 66b 175b --cells goals
    torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel --models 175b --cells goals --layers 2 6
    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --models 66b --cells "engine=sparse batch=8" --sums nccl
    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --rehearse --cells goals

--layers: a model of so few layers, and of so many. The whole one's time follows from both. --rehearse: tiny shapes on
CPUs.
"""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
from benchmarks.harness import best_read, cpu_times, measure, step_times
from benchmarks.rows import STEP, append_row, command_line, five_digits, gpu_versions, made_now
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.memory import DoesNotFit, describe_memory
from dejavu_train.engine.model_weights import placed_by
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.ranks.group import Group, group_of_launcher
from dejavu_train.engine.ranks.pushed import PushedSums
from dejavu_train.engine.ranks.ranks import Ranks
from dejavu_train.engine.ranks.sharing import shards_of
from dejavu_train.engine.ranks.sums import GroupSums, Sums
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.families import ModelDims
from dejavu_train.kernels.common.positions import Alibi

COLUMNS = (
    "date gpu gpus torch triton commit model layers engine batch prompt weights mlp_union head_union active_share rank "
    "options sums sum_us steps p20_ms p50_ms p80_ms slowest_ms tokens_per_s gb_per_rank best_tb_s floor_ms "
    "share_of_floor note sources"
).split()
CELLS = [
    "engine=dense,exact,sparse prompt=128,1024",
    "engine=sparse head_density=0.85",
    "engine=sparse mlp_density=0.25 head_density=0.25",
    "engine=dense,exact,sparse weights=int4 lm_head=int4 head_density=0.85 predictors=int4 site=1",
    "engine=dense,exact,sparse batch=8 mlp_density=0.29",
]
SUMS = {"fastest": None, "nccl": GroupSums, "pushed": PushedSums}
TINY = ModelDims(64, 256, 4, 8, 400, 256)
SHAPES["tiny"], RANKS["tiny"] = TINY, 16


def ranks_for(group: Group, dims: ModelDims, kind: str) -> Ranks:
    """kind: of `SUMS`."""
    made = SUMS[kind]
    sums: Sums = group.sums if made is None else made(group.device)
    return Ranks(shards_of(dims, group.world)[group.rank], sums, group)


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
            narrow, rank, mlp, heads, cell.site, cell.predictors, cell.heads_site, str(device), active_share
        )
    context = min(dims.max_positions, cell.prompt + steps + EXTRA)
    options = EngineOptions(
        batch=cell.batch, context=context, release=True, ops="triton" if gpu else "reference", zeros=cell.zeros
    )
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


def time_of_sum(ranks: Ranks, dims: ModelDims, batch: int) -> float:
    """Microseconds of one sum of the residual stream, in a graph on GPUs."""
    part = ranks.sums.buffer(batch, dims.d_model)
    out = torch.zeros_like(part)
    if part.device.type == "cuda":
        return measure(lambda: ranks.sums.add(part, out, pdl=True))
    return 1e3 * statistics.median(cpu_times(lambda: ranks.sums.add(part, out, pdl=True), 20))


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


def say(group: Group, line: str) -> None:
    if group.rank == 0:
        print(line, flush=True)


def write_row(args: Any, group: Group, row: dict[str, Any]) -> None:
    if group.rank == 0:
        append_row(args.out, five_digits(row), COLUMNS)
    shown = "model engine weights options batch prompt slowest_ms floor_ms sum_us note".split()
    say(group, " | ".join(f"{row[key]:.4g}" if isinstance(row.get(key), float) else str(row.get(key, ""))
                          for key in shown))  # fmt: skip


def time_cells(args: Any, group: Group) -> None:
    gpu = group.device.type == "cuda"
    best = min(group.gather(round(1e6 * (best_read() if gpu else 0.01)))) / 1e6
    versions = gpu_versions() if gpu else {"gpu": "cpu", "torch": torch.__version__}
    about = made_now(*STEP) | {"gpus": group.world, "best_tb_s": best} | versions
    for name in args.models:
        for cell in [cell for text in args.cells for cell in read_cells(text)]:
            row = about | {"model": name, "options": cell.options} | dataclasses.asdict(cell) | {"rank": ""}
            write_row(args, group, row | timed_row(args, group, name, cell, best))


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
    row["floor_ms"] = row["gb_per_rank"] / best
    return row | {"layers": max(counts), "share_of_floor": row["floor_ms"] / row["slowest_ms"]}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=["66b"], choices=list(SHAPES))
    parser.add_argument("--cells", nargs="+", metavar="CELLS", required=True, help="as of benchmarks.decode, or goals")
    parser.add_argument("--sums", choices=list(SUMS), default="fastest")
    parser.add_argument("--layers", nargs=2, type=int, help="two smaller numbers of layers")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--active-share", type=float, default=ACTIVE)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on CPUs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tensor_parallel.csv"))
    args = parser.parse_args()
    if args.rehearse:
        args.models, args.steps = ["tiny"], 4
    args.cells = CELLS if args.cells == ["goals"] else args.cells
    group = group_of_launcher("cpu" if args.rehearse else None)
    group.watch.stuck_seconds = 900  # a cell of a large model, its kernels compiled
    try:
        time_cells(args, group)
    except Exception as error:
        group.fail(error)
        raise
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
