"""Counts which neurons rows of real text keep live together, and times the steps of these rows.

    python -m benchmarks.real_rows --stored float16 int4                    opt-mini on a CPU
    python -m benchmarks.real_rows --device cuda --model M --bundle B --texts general.jsonl code.jsonl

Rows are beginnings of documents, of all texts in turn. A dense pass says which neurons are live behind the prompt.
Engines run the same tokens in turns. dense reads all rows of weights, exact leaves silent neurons out, and sparse asks
the predictors. live: of the rows together. independent: were each neuron live by its own frequency, whatever the others
do. modelled: by the frequencies of `active_sets`. overlap: of two rows, and where there is one row of two steps.
Rows go to benchmarks/results/real_rows.csv.
"""

import gc
from pathlib import Path
from typing import Any

import torch

from benchmarks.active_sets import overlap_of, union_of
from benchmarks.cpu_decode import cpu_name
from benchmarks.decode import summary
from benchmarks.harness import cpu_times, step_times
from benchmarks.lossless import TEXTS, read_prompts
from benchmarks.rows import CPU_STEP, ROOT, STEP, append_row, command_line, five_digits, gpu_versions, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.cpu.engine import usable_cores
from dejavu_train.engine.inputs import Row
from dejavu_train.evaluation.timing import ON_CPU, ON_GPU, build_engine
from dejavu_train.models.config_values import INT4, quant_method, read_values
from dejavu_train.models.hooks import record
from dejavu_train.models.load import load_model

ENGINES = ("dense", "exact", "sparse")
GROUPS = 4  # of rows, each of other documents
COUNTED = ("one", "live", "independent", "overlap")
COLUMNS = (
    "date commit gpu cpu threads torch triton model weights engine batch prompt documents one live independent "
    "modelled overlap skips mlp_density head_density steps p20_ms p50_ms p80_ms tokens_per_s sources"
).split()


@torch.no_grad()
def shares(model: Any, ids: torch.Tensor, prompt: int, batches: list[int]) -> dict[int, dict[str, float]]:
    """By rows of a batch what `COUNTED` names, means over the layers, of ids (documents, positions)."""
    found: dict[int, list[list[float]]] = {batch: [] for batch in batches}

    def count(_: int, tensors: dict[str, torch.Tensor]) -> None:
        active = tensors["activation"][:, prompt:] != 0  # (documents, steps, neurons)
        frequency = active.double().mean((0, 1))
        for batch in batches:
            rows = active[: len(active) // batch * batch].unflatten(0, (-1, batch))
            live, independent = rows.any(1).double().mean(), (1 - (1 - frequency) ** batch).mean()
            overlap = overlap_of(rows.movedim(1 if batch > 1 else 2, 0).flatten(1))
            found[batch].append([float(frequency.mean()), float(live), float(independent), overlap])

    with record(model, ["activation"], on_layer=count):
        model(ids.to(model.device), logits_to_keep=1)
    return {
        batch: dict(zip(COUNTED, torch.tensor(layers).mean(0).tolist(), strict=True)) for batch, layers in found.items()
    }


def timed(engines: dict[str, Any], rows: list[list[int]], batch: int, prompt: int, on_gpu: bool) -> dict[str, Any]:
    """By engine milliseconds of its steps. Every engine runs a group of rows before any runs the next."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for group in range(GROUPS):
        given = [Row(row, len(row), sparse_from=prompt, prefilled=prompt) for row in rows[group * batch :][:batch]]
        for name, engine in engines.items():
            engine.begin(given)
            n = len(rows[0]) - prompt - 5  # behind four that warm up. The last token is not run
            times[name] += (step_times if on_gpu else cpu_times)(engine.step, n)
    return {name: summary(each, batch) for name, each in times.items()}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", default=str(ROOT / "checkpoints/opt-mini"))
    parser.add_argument("--bundle", default=str(ROOT / "checkpoints/opt-mini/bundle"))
    parser.add_argument("--texts", nargs="+", default=TEXTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stored", nargs="+", default=[None], help="formats of the weights on a CPU")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60, help="of each group of rows")
    parser.add_argument("--mlp-density", type=float, help="as calibrated by default")
    parser.add_argument("--head-density", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/real_rows.csv"))
    args = parser.parse_args()
    on_gpu, length = args.device == "cuda", args.prompt + args.steps + 5
    rows = [ids for _, ids in read_prompts(args.model, length, GROUPS * max(args.rows), args.texts)]
    if len(rows) < GROUPS * max(args.rows):
        parser.error(f"the texts have {len(rows)} documents of {length} tokens, not {GROUPS * max(args.rows)}")
    model = load_model(args.model, "float16" if on_gpu else "float32", args.device)
    bundle = Bundle.from_pretrained(args.bundle).at(args.mlp_density, args.head_density)
    about: dict[str, Any] = made_now(*(STEP if on_gpu else CPU_STEP)) | {"torch": torch.__version__}
    about |= gpu_versions() if on_gpu else {"cpu": cpu_name(), "threads": usable_cores()}
    about |= {"model": Path(args.model).name, "prompt": args.prompt, "documents": len(rows)}
    found = shares(model, torch.tensor(rows), args.prompt, args.rows)
    for stored in args.stored:
        kept = "int4" if quant_method(read_values(args.model)) == INT4 else str(model.dtype).removeprefix("torch.")
        for batch in args.rows:
            engines = {
                name: build_engine(kind, model, bundle if name == "sparse" else None, batch, length, stored)
                for name, kind in zip(ENGINES, ON_GPU if on_gpu else ON_CPU, strict=True)
            }
            for name, times in timed(engines, rows, batch, args.prompt, on_gpu).items():
                row = about | {"weights": stored or kept, "engine": name, "batch": batch} | found[batch] | times
                row |= {"modelled": union_of(found[batch]["one"], batch), "head_density": args.head_density}
                row |= {"skips": sum(half.skips for half in engines[name].plan.halves) if on_gpu else ""}
                row |= {"mlp_density": bundle.mean_density("mlp") if name == "sparse" else 1.0}
                append_row(args.out, five_digits(row), COLUMNS)
                print(
                    five_digits({key: row[key] for key in ("weights", "engine", *COLUMNS[10:20], "p50_ms")}), flush=True
                )
            del engines
            gc.collect()
            torch.cuda.empty_cache() if on_gpu else None
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
