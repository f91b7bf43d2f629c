"""Writes the tables of README.md, the model card and docs/ from committed rows: make tables

    python -m benchmarks.tables             writes them
    python -m benchmarks.tables --check     writes nothing, exits with 1 where a file would change
    python -m benchmarks.tables --demo checkpoints/demo/results.json    takes the demo's rows, draws, writes

A table stands between the lines ``<!-- table: NAME -->`` and ``<!-- end -->``. What stands there is replaced. A table
whose rows do not exist is left empty, and one line says so. Sentences of a verdict are such a table. No number of a
table is typed by hand. It is a field of a row, or a mean, a range, a ratio or a difference of such fields.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables_decode
from benchmarks.rows import ROOT, command_line, measured_sources
from benchmarks.tables_cpu import cpu_table, pipeline_table
from benchmarks.tables_exact import EXACT_TABLES
from benchmarks.tables_families import FAMILY_TABLES
from benchmarks.tables_format import (
    OLDER,
    NoRows,
    age,
    markdown,
    mean,
    percent,
    provenance,
    read_csv,
    several,
)
from benchmarks.tables_frontier import FRONTIER_TABLES
from benchmarks.tables_lossless import LOSSLESS_TABLES
from benchmarks.tables_one_model import ONE_MODEL_TABLES
from benchmarks.tables_plan import by_layers_table
from benchmarks.tables_ranks import RANKS_TABLES
from benchmarks.tables_serve import SERVE_TABLES
from benchmarks.tables_sweep import SWEEP_TABLES
from benchmarks.tables_texts import goals_100m_table, goals_table, guard_table, matrix_table
from benchmarks.tables_verdicts import DEMO, VERDICTS
from dejavu_train.evaluation.picture import plot_curves
from dejavu_train.evaluation.schema import SCHEMA, current

FILES = (
    "README.md",
    "docs/guides/families.md",
    "docs/guides/lossless.md",
    "docs/guides/sweeps.md",
    "docs/results/demo.md",
    "docs/results/families.md",
    "docs/results/frontier.md",
    "docs/results/serving.md",
    "docs/results/speed.md",
    "docs/results/texts.md",
    "docs/notes/lossless.md",
    "docs/notes/one-model.md",
    "docs/notes/by-layers.md",
    "docs/notes/tensor-parallel.md",
    "checkpoints/opt-mini/README.md",
)
CURVE = "docs/results/curve.png"
GENERATE = "benchmarks/results/generate.jsonl"
SAMPLES = "benchmarks/results/samples.csv"
PEAK = "peak_without_caches_and_predictors_over_weights"
CARD = "checkpoints/opt-mini/pretraining.json"
HELDOUT = {  # file of pretraining.json -> its name in the card
    "books_heldout.jsonl": "books, held out",
    "general_heldout.jsonl": "general prose, held out",
    "wikitext2_valid.raw.txt": "WikiText-2 validation, raw",
    "installed-docs.jsonl.xz": "`installed-docs`, `test`",
    "lambada.jsonl": "LAMBADA test passages",
}
YARDSTICKS = {"oracle": "oracle", "noncontextual": "non-contextual", "static": "static", "random": "random"}
LINKED = re.compile(r"\]\(([^):]+)\)")
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _demo(root: Path) -> dict[str, Any]:
    """Raises ValueError for a results.json of another schema."""
    results = current(json.loads((root / DEMO).read_text()))
    if results["schema"] != SCHEMA:
        raise ValueError(f"{DEMO} has schema {results['schema']}, expected {SCHEMA}")
    return results


def demo_table(root: Path) -> str:
    """Every text with its predicted rows, and the first text's yardsticks, from a results.json."""
    results = _demo(root)
    quality = [row for row in results["quality"] if row["sparse_from"] == 0 and not row.get("as_calibrated")]
    predicted = [row for row in quality if row["selection"] == "predicted"]
    first = results["texts"][0]["name"]
    names = [text["name"] for text in results["texts"]]
    asked = {(row["asked_mlp_density"], row["asked_head_density"]) for row in predicted}
    shared = sorted(
        (a for a in asked if all(_of(predicted, name, *a) for name in names)), key=lambda a: (-a[1], a[0])
    )  # what every text has: all heads first
    headings = ["text", "seen in training", "tokens of documents", "dense perplexity"]
    headings += [f"{_asked(*a)}: increase, bytes" for a in shared]
    rows = []
    for text in results["texts"]:
        dense = next(row for row in quality if row["text"] == text["name"] and row["selection"] == "dense")
        cells = [text["name"], "yes" if text["domain"] == "in domain" else "no"]
        cells += [f"{text['tokens']:,} of {text['documents']:,}", f"{dense['perplexity']:.4g}"]
        for a in shared:
            row = _of(predicted, text["name"], *a)
            increase = _unit(several([row["increase"]], [row["increase_error"]]))
            cells.append(f"{increase}, {100 * row['mlp_bytes']:.1f} %")
        rows.append(cells)
    table = markdown(headings, rows)
    headings = [first, "bytes", "selected", "predicted", *YARDSTICKS.values()]
    rows = []
    for a in sorted({a for a in asked if _of(predicted, first, *a)}, key=lambda a: (-a[1], a[0])):
        row = _of(predicted, first, *a)
        cells = [_asked(*a), f"{100 * row['mlp_bytes']:.1f} %", f"{100 * row['mlp_selected']:.1f} %"]
        cells.append(_unit(several([row["increase"]], [row["increase_error"]])))
        for selection in YARDSTICKS:
            other = _of([row for row in quality if row["selection"] == selection], first, *a)
            cells.append(_unit(percent(other["increase"])) if other else "")
        rows.append(cells)
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"{table}\n{markdown(headings, rows)}{_rows_line(DEMO, versions + age([results]))}"


RUNS = {"dense": "transformers, dense", "dense-cpu": "our engine, exact", "cpu": "our engine, sparse"}


def opening_table(root: Path) -> str:
    """One model, quality and speed side by side: transformers, and the engine of a CPU dense and as calibrated."""
    results = _demo(root)
    quality = [row for row in results["quality"] if row["sparse_from"] == 0 and not row.get("as_calibrated")]
    names = ["installed-docs", "installed-code"]
    headings = ["on a CPU", "neurons read", *(f"perplexity of {name}" for name in names)]
    table = []
    for timed in results["timing"]:
        sparse = timed["backend"] == "cpu"
        rows = [row for row in quality if row["selection"] == ("predicted" if sparse else "dense")]
        shown = [_of(rows, name, timed["asked_mlp_density"], timed["asked_head_density"]) for name in names]
        cells = [RUNS[timed["backend"]], f"{100 * shown[0].get('mlp_selected', 1.0):.1f} %" if sparse else "all"]
        cells += [f"{row['perplexity']:.4g}" for row in shown]
        read = timed["megabytes_per_token"]
        cells += [f"{timed['ms_per_token']['p50']:.3g}", f"{read:.3g}" if read else ""]
        table.append(cells)
    return markdown([*headings, "ms per token", "MB read per token"], table)


def _of(rows: Sequence[dict[str, Any]], text: str, mlp: float, heads: float) -> dict[str, Any]:
    same = (row for row in rows if row["text"] == text)
    asked = {"asked_mlp_density": mlp, "asked_head_density": heads}  # of a bundle it is a mean over layers
    return next((row for row in same if all(math.isclose(row[key], asked[key]) for key in asked)), {})


def _asked(mlp: float, heads: float) -> str:
    return f"{100 * mlp:g} % of candidates" + (f", {100 * heads:g} % of the heads" if heads < 1 else "")


def _rows_line(path: str, conditions: str) -> str:
    return f"\nRows: [{Path(path).name}]({path}). {conditions}.\n"


def _unit(text: str) -> str:
    return text if text.endswith("fold") else f"{text} %"


def _models(found: Sequence[tuple[str, str]]) -> list[str]:
    return sorted({model for model, _ in found}, key=lambda name: float(name.rstrip("b")))


def generate_table(root: Path) -> str:
    """generate() of the public class against the engine's own rate."""
    rows = [json.loads(line) for line in (root / GENERATE).read_text().splitlines() if line.strip()]
    newest = {(row["shape"], row["batch"]): row for row in rows}
    columns = {  # heading -> field, how it is written, times what
        "generate(), ms per token": ("generate_ms", ".3f", 1),
        "the engine alone, ms": ("engine_ms", ".3f", 1),
        "share of its rate": ("share_of_engine_rate", ".1f", 100),
        "first call, s": ("first_call_s", ".1f", 1),
        "memory over the weights, without caches and predictors": (
            "peak_without_caches_and_predictors_over_weights",
            ".3f",
            1,
        ),
        "transformers' dense generate(), ms": ("transformers_dense_ms", ".1f", 1),
    }
    table = [
        [f"{row['shape'].upper()}, {row['batch']}"]
        + [f"{times * row[field]:{kind}}" + " %" * (times == 100) for field, kind, times in columns.values()]
        for row in newest.values()
    ]
    headings = ["shapes, rows", *columns]
    return markdown(headings, table) + f"\nRows: {provenance(list(newest.values()))}.\n"


def samples_table(root: Path) -> str:
    """How fast a model writes its own text."""
    newest = {(row["shape"], row["rows"], row["length"]): row for row in read_csv(root / SAMPLES)}
    headings = ["shapes", "rows at once", "tokens of a row", "tokens per second", "minutes per million", "memory, GB"]
    names = ("rows", "length", "tokens_per_s", "minutes_per_million", "memory_gb")
    table = [[row["shape"].upper(), *(row[name] for name in names)] for row in newest.values()]
    return markdown(headings, table) + f"\nRows: {provenance(list(newest.values()))}.\n"


def card_table(root: Path) -> str:
    """What the embedded model came to on held-out text, by the end of its pretraining."""
    pretraining = json.loads((root / CARD).read_text())
    table = []
    for file, name in HELDOUT.items():
        row = pretraining["heldout"][file]
        shares = [100 * share for share in row["density"]]
        active = f"{', '.join(f'{share:.1f}' for share in shares)} (mean {mean(shares):.1f})"
        table.append([name, f"{row['bits_per_byte']:.3f}", f"{row['perplexity']:.1f}", f"{row['tokens']:,}", active])
    headings = ["text", "bits per byte", "perplexity", "tokens", "share of active neurons, layers 0 to 5 (%)"]
    conditions = (
        f"{pretraining['device']}, torch {pretraining['torch'].partition('+')[0]}, seed {pretraining['config']['seed']}"
    )
    return f"{markdown(headings, table)}\nRows: pretraining.json. {conditions}.\n"


TABLES: dict[str, Callable[[Path], str]] = {
    "opening": opening_table,
    "demo": demo_table,
    "cpu": cpu_table,
    "decode-prompts": tables_decode.prompts_table,
    "decode-batches": tables_decode.batches_table,
    "decode-int4-prompts": tables_decode.int4_prompts_table,
    "decode-int4-batches": tables_decode.int4_batches_table,
    "decode-families": tables_decode.families_table,
    "generate": generate_table,
    "pipeline": pipeline_table,
    "samples": samples_table,
    "goals": goals_table,
    "goals-100m": goals_100m_table,
    "guard": guard_table,
    "matrix-mini": lambda root: matrix_table(root, "opt-mini"),
    "matrix-100m": lambda root: matrix_table(root, "opt-100m"),
    **FRONTIER_TABLES,
    **FAMILY_TABLES,
    **SERVE_TABLES,
    **SWEEP_TABLES,
    **LOSSLESS_TABLES,
    **ONE_MODEL_TABLES,
    **RANKS_TABLES,
    "by-layers": by_layers_table,
    "card": card_table,
    **VERDICTS,
    **EXACT_TABLES,
}

_EXACT = "`python -m benchmarks.decode --out benchmarks/results/exact.csv` on a GPU"
_DECODE, _INT4 = "`python -m benchmarks.decode` on a GPU", "`bash benchmarks/int4_decode.sh OUT` on a GPU"
_TEXTS = "`bash benchmarks/texts.sh {0} OUT.csv` on a GPU"
_BY_LAYERS = "`python -m benchmarks.by_layers`"
_STUDY = "scripts of a study that has ended, see [past scripts](docs/notes/past-scripts.md)"
MADE_BY = {  # table -> what makes its rows
    "opening": "`make demo`",
    "demo": "`make demo`, then `python -m benchmarks.tables --demo checkpoints/demo/results.json`",
    "exact": _EXACT,
    "exact-batches": _EXACT,
    "zeros": "`python -m benchmarks.zeros` on a GPU",
    "cpu": "`python -m benchmarks.cpu_decode` on quiet cores, also with `--shape 1.3b`",
    "decode-prompts": _DECODE,
    "decode-batches": _DECODE,
    "decode-int4-prompts": _INT4,
    "decode-int4-batches": _INT4,
    "decode-families": _DECODE,
    "generate": "`python -m benchmarks.generate` on a GPU",
    "pipeline": "`python -m benchmarks.cpu_extra pipeline` on quiet cores, and `generate` on a GPU",
    "samples": "`python -m benchmarks.samples` on a GPU",
    "goals": _TEXTS.format("mini"),
    "goals-100m": _TEXTS.format("100m"),
    "guard": _STUDY,
    "matrix-mini": _TEXTS.format("mini"),
    "matrix-100m": _TEXTS.format("100m"),
    **dict.fromkeys(FRONTIER_TABLES, _STUDY),
    "serve-speed": "`python -m benchmarks.serve_speed` on quiet cores, also with `--device cuda`",
    "serve-load": "`python -m benchmarks.serve --out benchmarks/results/serve.jsonl`",
    "serve-malformed": "`python -m benchmarks.malformed`",
    **dict.fromkeys(SWEEP_TABLES, "`sh examples/sweep.sh`"),
    **dict.fromkeys(FAMILY_TABLES, "`bash benchmarks/families.sh OUTPUT_FOLDER 14m` and `100m` on four GPUs"),
    "families-runs": "`make tables` from what the engines plan and refuse",
    "lossless-forced": "`python -m benchmarks.lossless_gpu forced` with each shape",
    "lossless-opening": "`python -m benchmarks.lossless speed`",
    **dict.fromkeys(ONE_MODEL_TABLES, "`python -m benchmarks.one_model run`"),
    **dict.fromkeys(
        RANKS_TABLES,
        "`torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel` with `--models 175b --cells goals`, and others",
    ),
    "several-gpus-rivals": "`bash benchmarks/ranks_gpu.sh OUTPUT_FOLDER rivals` on four GPUs",
    "several-gpus-callback": "`torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel --models afm-4.5b --callback`",
    "by-layers": f"{_BY_LAYERS} on a GPU, with `--shape 30b --layers 8 --tokens 65536`, with `--shape 66b --layers 3"
    " --tokens 400000 --stages collect tune`, and with `--shape 30b --stages tune quantise`, and by"
    " `bash benchmarks/ranks_gpu.sh OUTPUT_FOLDER layers`",
    "card": "`python -m dejavu_train.extras.pretrain` with the settings in `pretraining.json`",
}


def fill(text: str, root: Path, page: str = "README.md") -> str:
    """``text`` with every table made anew. One whose rows are missing becomes empty, so that no withdrawn row is shown.

    page: where the text stands below ``root``. Tables link files from the root, and a page from its own folder.

    Raises:
        KeyError: a marker names no table.
    """

    folder = Path(page).parent

    def from_page(match: re.Match[str]) -> str:
        return f"]({os.path.relpath(match[1], folder)})"

    def table(match: re.Match[str]) -> str:
        try:
            by = "" if match[2] in VERDICTS else f"\nMade by {MADE_BY[match[2]]}.\n"
            made = TABLES[match[2]](root) + by
            return f"{match[1]}\n{LINKED.sub(from_page, made)}\n{match[4]}"
        except (FileNotFoundError, NoRows) as error:
            why = error if isinstance(error, NoRows) else f"no {error.filename}"
            print(f"table {match[2]}: {why}, left empty", file=sys.stderr)
            return f"{match[1]}{match[4]}"

    return MARKED.sub(table, text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where text and rows disagree")
    parser.add_argument("--demo", type=Path, metavar="FILE", help="results.json that `make demo` wrote just now")
    options = parser.parse_args(argv)
    if options.demo:
        results = json.loads(options.demo.read_text()) | {"sources": measured_sources("dejavu_train")}
        (ROOT / DEMO).write_text(json.dumps(results, indent=1) + "\n")
        plot_curves(current(results), ROOT / CURVE)
    changed = []
    for name in FILES:
        path = ROOT / name
        before = path.read_text()
        after = fill(before, ROOT, name)
        if (OLDER.sub("", after) != OLDER.sub("", before)) if options.check else after != before:
            changed.append(name)
            if not options.check:
                path.write_text(after)
    print(f"{'differ from their rows' if options.check else 'written'}: {', '.join(changed) or 'none'}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
