"""Times one decoding step of shapes with random weights: Hugging Face eager and compiled, our dense and sparse one.

Writes rows to benchmarks/results/decode.csv as they come, so a run that is cut short loses nothing. No layer shares
weights. Tokens are random and forced. The predictors really run. Their thresholds are set on the model's own
activations, to the stated densities. A share of all neurons is active (`active_sets`), the same for every engine.
Densities, what is active, and the predictors' recall are measured, not asked.

    python -m benchmarks.decode --models 6.7b
    python -m benchmarks.decode --models 6.7b --cells "engine=dense,sparse prompt=128,512" "batch=8 mlp_density=0.29"
"""

import dataclasses
import gc
import itertools
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_cells import Cell, read_cells, required_cells
from benchmarks.decode_hf import hugging_face
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
from benchmarks.harness import best_read, step_times
from benchmarks.rows import STEP, append_row, command_line, five_digits, gpu_versions, made_now, needs_gpu
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.memory import DoesNotFit, describe_memory
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.planned import Run
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.families import ModelDims
from dejavu_train.models.int4_sizes import part_sizes

EXTRA = 40  # steps besides the timed ones: thresholds, counts, warm-up
COLUMNS = (
    "date gpu torch triton commit model engine batch prompt positions mlp_union mlp_selected head_union active_share "
    "active live overlap recall "
    "rank options steps p20_ms p50_ms p80_ms tokens_per_s gb_per_step best_tb_s floor_ms share_of_floor floor45_ms "
    "share45 note sources"
).split()


def append(path: Path, row: dict[str, Any]) -> None:
    append_row(path, five_digits(row), COLUMNS)
    shown = "model engine batch prompt options mlp_union head_union active live overlap recall p50_ms share45 note"
    parts = [f"{row[k]:.4g}" if isinstance(row.get(k), float) else str(row.get(k, "")) for k in shown.split()]
    print(" | ".join(parts), flush=True)


def summary(times: list[float], batch: int) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=5, method="inclusive")
    p50 = statistics.median(times)
    return {"steps": len(times), "p20_ms": cuts[0], "p50_ms": p50, "p80_ms": cuts[3], "tokens_per_s": 1e3 * batch / p50}


def started_engine(cell: Cell, name: str, weights: DecodeWeights, steps: int, share: float) -> DecodeEngine:
    """A cell's engine behind its prompt, thresholds set, with room for so many steps and EXTRA. Takes the layers."""
    shape, rank = weights.shape, cell.rank or RANKS[name]
    predictors = None
    if cell.engine == "sparse":
        mlp, heads = (1 - (1 - union) ** (1 / cell.batch) for union in (cell.mlp_density, cell.head_density))
        kinds = (cell.site, cell.predictors, cell.heads_site)
        predictors = random_predictors(shape, rank, mlp, heads, *kinds, active_share=share)
    engine = DecodeEngine(
        weights,
        predictors,
        EngineOptions(
            batch=cell.batch, context=min(2048, cell.prompt + steps + EXTRA), release=True, screen=cell.screen,
            zeros=cell.zeros, one_kernel=cell.one_kernel,
        ),
    )  # fmt: skip
    weights.layers[:] = engine.weights.layers  # the next cell starts from this layout: a 66B model exists once
    with torch.no_grad():
        start(engine, cell.prompt, steps + EXTRA)
        if engine.predictors:
            set_thresholds(engine, cell.mlp_density, cell.head_density)
    return engine


def run_engine(cell: Cell, name: str, weights: DecodeWeights, steps: int, share: float) -> dict[str, Any]:
    """One cell of our engine: row values."""
    engine = started_engine(cell, name, weights, steps, share)
    with torch.no_grad():
        row = measured(engine)
        row |= summary(step_times(engine.step, steps), cell.batch)
        notes = [describe_memory(engine.memory)]
        masked = sorted({half.target for half in engine.plan.halves if half.run is Run.MASKED})
        if masked:  # all layers of these shapes are alike
            notes.append(f"{' and '.join(masked)} computed whole and masked")
        if engine.plan.one_kernel is not None:
            notes.append("all layers in one kernel")
    row["positions"] = f"{cell.prompt}-{cell.prompt + steps}"
    row["rank"] = (cell.rank or RANKS[name]) if engine.predictors else 0
    row["note"] = " ".join(notes)
    return row


def run_cell(
    cell: Cell, name: str, weights: DecodeWeights | None, steps: int, best: float, share: float = ACTIVE
) -> dict[str, Any]:
    """Row values of any cell. A cell that does not fit or fails is a row that says so."""
    shape = SHAPES[name]
    try:
        if weights is None:
            times = hugging_face(name, shape, cell.engine == "hf-compile", cell.prompt, cell.batch, steps)
            return summary(times, cell.batch) | {"note": "generate(), second call; a host's loop, see p20 and p80"}
        row = run_engine(cell, name, weights, steps, share)
    except (torch.cuda.OutOfMemoryError, DoesNotFit):
        needed = bytes_needed(shape, cell.batch, cell.prompt + steps + EXTRA, cell.weights != "float16")
        room = torch.cuda.mem_get_info()[1]
        return {"note": f"does not fit: more than {needed / 1e9:.1f} GB and scratch, of {room / 1e9:.1f}"}
    except Exception as error:  # a cell that fails must not cost the others
        return {"note": f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    row["floor_ms"], row["floor45_ms"] = row["gb_per_step"] / best, row["gb_per_step"] / 4.5
    row["share_of_floor"], row["share45"] = row["floor_ms"] / row["p50_ms"], row["floor45_ms"] / row["p50_ms"]
    return row


def bytes_needed(shape: ModelDims, batch: int, positions: int, packed: bool = False) -> int:
    """Weights, K/V and kept inputs: what a cell that does not fit would take, scratch not counted."""
    kept = shape.n_layers * batch * positions * (2 * shape.n_kv_heads * shape.head_dim + shape.d_model)
    layer = sum(size.nbytes for size in part_sizes(shape).values()) if packed else 2 * shape.layer_weights
    return shape.n_layers * layer + 2 * (kept + (shape.vocab_size + shape.max_positions) * shape.d_model)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=["6.7b"], choices=list(SHAPES))
    help_cells = "key=value[,value...] words, see benchmarks/decode_cells.py; default: those of the committed table"
    parser.add_argument("--cells", nargs="+", metavar="CELLS", help=help_cells)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--active-shares", type=float, nargs="+", default=[ACTIVE], help="of all neurons, of a token")
    parser.add_argument("--of-active", type=float, help="sparse cells select so many times the active share")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode.csv"))
    args = parser.parse_args()
    asked = [cell for text in args.cells or () for cell in read_cells(text)]
    needs_gpu(parser)
    best = best_read()
    metadata: dict[str, Any] = made_now(*STEP) | gpu_versions() | {"best_tb_s": best}
    for name, share in itertools.product(args.models, args.active_shares):
        weights, kind = None, ("", "")
        for cell in asked or required_cells(name):
            if args.of_active and cell.engine == "sparse":
                cell = dataclasses.replace(cell, mlp_density=args.of_active * share)
            wanted = cell.weights, cell.lm_head
            if cell.engine.startswith("hf") or wanted != kind or (weights is not None and not weights.layers):
                weights = None  # not needed, of another format, or lost with an engine that did not fit
            gc.collect()
            torch.cuda.empty_cache()
            if weights is None and not cell.engine.startswith("hf"):
                formats = (kept == "int4" for kept in wanted)
                weights, kind = random_weights(SHAPES[name], share, *formats), wanted
            row = metadata | {"model": name, "options": cell.options} | dataclasses.asdict(cell)
            row["rank"] = ""  # asked; what a row holds is measured
            append(args.out, row | run_cell(cell, name, weights, args.steps, best, share))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
