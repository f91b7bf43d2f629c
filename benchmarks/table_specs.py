"""The tables of README.md, the model card and docs/: which rows each shows, and how."""

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table_maker import (
    Column,
    Row,
    Table,
    increase,
    markdown,
    mean,
    numbers,
    percent,
    read_rows,
    shares,
    with_error,
)
from dejavu_train.engine import runs
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.plan import plan_step
from dejavu_train.engine.planned import Engine, Formats
from dejavu_train.evaluation.schema import SCHEMA, current
from dejavu_train.families import ModelDims, dims_of
from dejavu_train.families.dims import engine_refusal
from dejavu_train.ground.errors import Unsupported

RESULTS, PAGES = "benchmarks/results", "docs/results"
DEMO, EXACT, ONE_MODEL = f"{RESULTS}/demo.json", f"{RESULTS}/exact.csv", f"{RESULTS}/one_model.json"
CARD, LOSSLESS = "checkpoints/opt-mini/pretraining.json", f"{RESULTS}/lossless.csv"
MINI, HUNDRED = f"{PAGES}/texts/opt-mini.csv", f"{PAGES}/texts/opt-100m.csv"
FAMILY_ROWS, FAMILY_MODELS = f"{PAGES}/families/rows.csv", f"{PAGES}/families/models.jsonl"
CPU_STEPS = f"{RESULTS}/cpu_decode.csv"
TEXTS = ("docs", "readmes", "licences", "general", "books", "wikitext", "lambada", "code")


def options_of(row: Row) -> dict[str, str]:
    """What the options of a row set, by name."""
    return dict(word.split("=") for word in str(row["options"]).split())


def weights_of(row: Row) -> str:
    return "4 bits" if "weights=int4" in row["options"] else "fp16"


def named(row: Row) -> str:
    """A shape as a page names it: OPT's by size."""
    return f"OPT-{row['model'].upper()}" if row["model"][0].isdigit() else row["model"]


def by_size(name: str) -> tuple[bool, float]:
    """OPT's shapes first, each kind by size."""
    size = "".join(letter for letter in name.rpartition("-")[2] if letter.isdigit() or letter == ".")
    return not name.startswith("OPT"), float(size or 0)


def card(row: Row) -> str:
    """A row's GPU without its maker."""
    return str(row["gpu"]).removeprefix("NVIDIA ").partition(" ")[0]


def ms(heading: str, **where: Any) -> Column:
    """Milliseconds of the newest row of an engine. Of sparse steps the fastest."""
    least = "p50_ms" if where.get("engine") == "sparse" else ""
    return Column(f"{heading}, ms", "p50_ms", where, least=least)


def times(heading: str, fast: Column, slow: Column) -> Column:
    """How many times as fast a column is as another."""
    return Column(heading, fast.field, fast.where, ".2f", unit="x", least=fast.least, over=slow)


def part(heading: str, name: str, form: str = ".1f", **where: Any) -> Column:
    """A share in per cent."""
    return Column(heading, name, where, form, 100, " %")


# Steps on a GPU

IN_ONE, CHAIN = "all layers in one kernel", "one_kernel=False"  # in the note, or option, of a step that could be one
USUAL, NEAR = 0.06, 0.004  # share of all neurons that is active, and what a measured share may differ
READ, SKIP, SPARSE = (ms(name, engine=engine) for name, engine in (
    ("all rows", "dense"), ("exact", "exact"), ("sparse", "sparse")
))  # fmt: skip
GAINS = times("exact over all rows", SKIP, READ), times("sparse over exact", SPARSE, SKIP)
LIVE_SHARES = (0.02, 0.06, 0.3, 1.0)
SELECTED = {"dense": "dense", "1": "all heads", "1.0": "all heads", "0.85": "85 %", "0.5": "50 %", "0.25": "25 %"}


def exact_at(share: float, **where: Any) -> Table:
    """Steps with so many active neurons and all heads."""
    return Table(
        EXACT,
        {"shapes": "shapes", "weights": "weights"},
        (READ, SKIP, SPARSE, *GAINS,
         Column("active neurons found", "recall", {"engine": "sparse"}, ".0f", 100, " %", "p50_ms")),
        "`python -m benchmarks.decode --out benchmarks/results/exact.csv` on a GPU",
        {"near": True, "p50_ms": bool, **where},
        {"shapes": named, "weights": weights_of,
         "near": lambda row: abs(float(row["active"] or -1) - share) <= NEAR and float(row["head_union"]) >= 1
         and row["prompt"] == "128" and CHAIN not in row["options"]},
        order=lambda name: (name[1] != "fp16", *by_size(name[0])),
        needs=("exact, ms", "sparse, ms"),
    )  # fmt: skip


EXACT_BATCHES = exact_at(USUAL, model="6.7b", weights="fp16").with_columns(
    part("live together", "live", engine="exact"),
    Column("overlap of two tokens", "overlap", {"engine": "exact"}, ".2f"),
    READ, SKIP, SPARSE, *GAINS, line={"rows": "batch"}, order=lambda name: int(name[0]),
)  # fmt: skip

ONE_KERNEL = Table(
    EXACT,
    {"shapes": "shapes", "prompt": "prompt", "neurons": "neurons"},
    (
        CHAINED := ms("chain of kernels", engine=("dense", "exact", "sparse"), chain=True),
        TOGETHER := ms("one kernel", engine=("dense", "exact", "sparse"), chain=False),
        times("one over chain", TOGETHER, CHAINED),
        Column("of the bytes at 4.5 TB/s", "share45", {"chain": False}, ".0f", 100, " %"),
    ),
    "`python -m benchmarks.decode --out benchmarks/results/exact.csv` on a GPU, with `one_kernel=True,False`",
    {"there": True, "p50_ms": bool},
    {"shapes": named, "chain": lambda row: CHAIN in row["options"],
     "neurons": lambda row: {"dense": "all", "exact": "not zero", "sparse": "10 % selected"}[row["engine"]],
     "there": lambda row: (CHAIN in row["options"] or IN_ONE in row["note"])
     and (row["prompt"] == "128" or row["model"] == "6.7b")},
    order=lambda name: (*by_size(name[0]), int(name[1]), ("all", "not zero", "10 % selected").index(name[2])),
    needs=("chain of kernels, ms", "one kernel, ms"),
)  # fmt: skip

ZEROS = Table(
    f"{RESULTS}/zeros.csv",
    {"shapes": "shapes", "rows": "what"},
    (
        Column("all read, us", "us", {"way": "read", "live": "0.02"}, ".1f"),
        *(Column(f"{100 * share:g} % live", "us", {"way": ("grid", "apart", "skip"), "share": share}, ".1f", least="us")
          for share in LIVE_SHARES),
    ),
    "`python -m benchmarks.zeros` on a GPU",
    {"model": ("1.3b", "6.7b", "30b"), "what": ("1", "8", "eight slots")},
    {"shapes": named, "what": lambda row: "eight slots" if row["slots"] == "1" else row["rows"],
     "share": lambda row: float(row["live"])},
    order=lambda name: (*by_size(name[0]), name[1]),
)  # fmt: skip

REAL_ROWS = Table(
    f"{RESULTS}/real_rows.csv",
    {"model": "model", "weights": "kind", "rows": "batch"},
    (
        *(Column(f"{words}, %", name, form=".1f", times=100) for words, name in (
            ("live together", "live"), ("if independent", "independent"), ("as modelled", "modelled"))),
        Column("overlap", "overlap", form=".2f"), READ, SKIP, SPARSE, *GAINS,
    ),
    "`python -m benchmarks.real_rows`",
    derived={"kind": lambda row: {"int4": "4 bits", "float16": "fp16"}.get(row["weights"], row["weights"])},
    order=lambda name: (*by_size(name[0]), name[1] == "4 bits", int(name[2])),
)  # fmt: skip

EXACT_TOKENS = Table(
    f"{RESULTS}/exact_tokens.csv",
    {"model": "model"},
    (
        Column("tokens", "tokens", form=",.0f"), Column("another than transformers'", "different", form=",.0f"),
        Column("widest gap of logits", "widest_gap", form=".2g"),
        Column("another than float32's", "different_wide", form=",.0f"),
        Column("transformers' other than float32's", "different_rival", form=",.0f"),
        Column("texts unlike those of all rows", "rows_unlike_read", form=",.0f"),
        Column("of texts", "rows", form=",.0f"),
    ),
    "`python -m benchmarks.exact_tokens --prompt 100 --new 140 --dtypes float32 float16 bfloat16` on a GPU",
    {"dtype": "float16"},
)  # fmt: skip


VLLM_STEP = Column("dense, us", "us", {"way": "dense"}, ".0f")
VLLM = Table(
    f"{RESULTS}/vllm_ops.csv",
    {"shapes": "shapes", "tokens": "tokens"},
    (
        part("live together", "live", ".0f", way="dense"),
        part("chosen together", "chosen", ".0f", way="dense"),
        VLLM_STEP,
        *(times(way, Column(way, "us", {"way": way}), VLLM_STEP) for way in ("zeroskip", "dejavu")),
    ),
    "`python -m benchmarks.vllm_ops` on a GPU",
    derived={"shapes": named},
    order=lambda name: (*by_size(name[0]), int(name[1])),
)  # fmt: skip


FIRST_TOKEN = Table(
    f"{RESULTS}/first_token.csv",
    {"shapes": "shapes", "prompt, tokens": "length"},
    (
        Column("transformers, fp16, ms", "ms", {"what": "transformers"}),
        Column("compiled, ms", "ms", {"what": "transformers, compiled"}),
        Column("ours, fp16, ms", "ms", {"what": "ours", "format": "fp16"}),
        Column("a step, ms", "step_ms", {"what": "ours", "format": "fp16"}),
        Column("ours, 4 bits, ms", "ms", {"what": "ours", "format": "int4"}),
        Column("a step in 4 bits, ms", "step_ms", {"what": "ours", "format": "int4"}),
    ),
    "`python -m benchmarks.first_token --formats fp16 int4 --rivals` on a GPU",
    {"device": "NVIDIA H200"},
    {"shapes": named, "length": lambda row: int(row["tokens"])},
    order=lambda name: (*by_size(name[0]), name[1]),
)


DECODE = Table(
    f"{RESULTS}/decode.csv",
    {"shapes": "shapes"},
    (
        ms("transformers", engine="hf"), COMPILED := ms("compiled", engine="hf-compile"),
        DENSE := ms("our dense", engine="dense"), SPARSE, times("dense over compiled", DENSE, COMPILED),
        times("sparse over compiled", SPARSE, COMPILED),
    ),
    "`python -m benchmarks.decode` on a GPU",
    {"batch": "1", "prompt": "128", "p50_ms": bool, "options": ("", "site=1")},
    {"shapes": named},
    order=lambda name: by_size(name[0]),
    needs=("our dense, ms", "sparse, ms"),
)  # fmt: skip


def head_kind(row: Row) -> str:
    """Weights and LM head of a row."""
    head = "screened" if "screen=True" in row["options"] else "4 bits" if "lm_head=int4" in row["options"] else "fp16"
    return f"{weights_of(row)}, {head}"


FAMILY_STEPS = Table(
    f"{RESULTS}/decode_families.csv",
    {"shapes": "shapes", "weights, LM head": "kind"},
    (DENSE, SPARSE, times("sparse over dense", SPARSE, DENSE), COMPILED,
     times("sparse over compiled", SPARSE, COMPILED)),
    "`python -m benchmarks.decode --models afm-4.5b prosparse-7b minitron-8b nemotron-4-15b` on a GPU",
    {"p50_ms": bool, "kind": ("fp16, fp16", "4 bits, 4 bits"), "card": "H200"},
    {"shapes": named, "kind": head_kind, "card": card},
    order=lambda name: (*by_size(name[0]), name[0], name[1] != "fp16, fp16"),
    needs=("our dense, ms", "sparse, ms"),
)  # fmt: skip


def place_of(row: Row) -> str:
    """Shapes and GPUs of a step of several. Reckoned: from models of fewer layers."""
    reckoned = ", reckoned" if row["note"].startswith("reckoned") else ""
    return f"{named(row)}, {row['gpus']} {card(row)}{reckoned}"


def unit_shares(row: Row) -> str:
    """The shares of neurons and heads that a step of several GPUs selects."""
    found = options_of(row)
    if row["engine"] != "sparse":
        return str(row["engine"])
    return f"{found.get('mlp_density', '0.1')}, {SELECTED[found.get('head_density', '0.5')]}"


def slowest(heading: str, *selected: str) -> Column:
    return Column(heading, "slowest_ms", {"selected": selected})


SEVERAL = Table(
    f"{RESULTS}/tensor_parallel.csv",
    {"shapes, GPUs": "place", "weights": "kind"},
    (ALL := slowest("dense, ms", "dense"), slowest("exact, ms", "exact"),
     slowest("sparse, all heads, ms", "0.1, all heads"), slowest("85 % of the heads", "0.1, 85 %"),
     HALF := slowest("50 % of the heads", "0.1, 50 %"),
     times("half of the heads over dense", HALF, ALL),
     times("a quarter of all units over dense", slowest("", "0.25, 25 %"), ALL),
     Column("a sum, us", "sum_us", {"selected": "dense"}, ".2g")),
    "`torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel --models 175b --cells goals`, and others",
    {"engine": ("dense", "exact", "sparse"), "batch": "1", "prompt": "128", "slowest_ms": bool},
    {"place": place_of, "kind": lambda row: "4 bits" if row["weights"] == "int4" else "fp16", "selected": unit_shares},
    chosen=lambda rows: [row for row in rows if row["sums"].startswith("pushed")],
    order=lambda name: (*by_size(name[0].partition(",")[0]), name[0], name[1] != "fp16"),
)  # fmt: skip


# Steps on a CPU, and a server


def cpu_runs(rows: list[Row]) -> list[Row]:
    """For each model the rows of the newest run that has transformers beside our engine, a line a format."""
    found: list[Row] = []
    for model, words in (("1.3b", "OPT-1.3B"), ("opt-mini", "opt-mini")):
        own = [row for row in rows if row["model"] == model]
        commit = [row["commit"] for row in own if row["engine"] == "transformers-eager"][-1:]
        run = [row for row in own if row["commit"] in commit]
        for stored, bits in (("float32", 32), ("float16", 16), ("int8", 8), ("int4", 4)):
            ours = [{**row, "engine": row["engine"].partition("-")[0]} for row in run if row["engine"].endswith(stored)]
            rivals = [row for row in run if row["engine"].startswith("transformers") and ours]
            found += [{**row, "line": f"{words}, {bits} bits"} for row in ours + rivals]
    return found


FEWER = {"engine": "sparse", "head_selected": lambda share: share != "1"}
CPU = Table(
    CPU_STEPS,
    {"ms per token": "line"},
    (
        Column("transformers", "p50_ms", {"engine": "transformers-eager"}),
        Column("compiled", "p50_ms", {"engine": "transformers-compile"}),
        Column("exact", "p50_ms", {"engine": "dense"}),
        Column("sparse, all heads", "p50_ms", {"engine": "sparse", "head_selected": "1"}),
        Column("sparse, fewer heads", "p50_ms", FEWER),
        Column("MB read, exact", "mb_per_token", {"engine": "dense"}, ",.0f"),
        Column("MB read, fewer heads", "mb_per_token", FEWER, ",.0f"),
    ),
    "`python -m benchmarks.cpu_decode --stored float32 float16 int8 int4` on quiet cores, also with `--shape 1.3b`",
    chosen=cpu_runs,
)  # fmt: skip


def llama_runs(rows: list[Row]) -> list[Row]:
    """For each model the newest run that has llama.cpp in 4 bits beside our engine in 4 bits."""
    found: list[Row] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        ran = [row["commit"] for row in rows if row["model"] == model and row["engine"] == "llama.cpp-q4_0"]
        found += [row for row in rows if ran and row["model"] == model and row["commit"] == ran[-1]]
    return found


LLAMA = Table(
    CPU_STEPS,
    {"ms per token": "shapes"},
    (
        *(Column(f"llama.cpp {name.upper()}", "p50_ms", {"engine": f"llama.cpp-{name}"})
          for name in ("q8_0", "q4_k_m", "q4_0")),
        *(Column(f"ours, {bits} bits, {words}", "p50_ms", {"engine": f"{engine}-int{bits}", "head_selected": "1"})
          for bits in (8, 4) for engine, words in (("dense", "exact"), ("sparse", "sparse"))),
        Column("MB read, 4 bits, exact", "mb_per_token", {"engine": "dense-int4"}, ",.0f"),
        Column("sparse", "mb_per_token", {"engine": "sparse-int4"}, ",.0f"),
    ),
    "`python -m benchmarks.cpu_decode --shape SHAPE --stored int8 int4 --llama PYTHON` on quiet cores",
    derived={"shapes": named},
    chosen=llama_runs,
)  # fmt: skip

PROMPTS_CPU = Table(
    f"{RESULTS}/first_token.csv",
    {"shapes": "shapes", "prompt, tokens": "length"},
    (
        *(Column(f"{words}, ms", "ms", {"what": what, "format": kind}, ",.0f")
          for what, kind, words in (("llama.cpp", "q8_0", "llama.cpp Q8_0"), ("ours", "int8", "ours, 8 bits"),
                                    ("llama.cpp", "q4_0", "llama.cpp Q4_0"), ("ours", "int4", "ours, 4 bits"))),
    ),
    "`python -m benchmarks.first_token --formats int8 int4 --llama PYTHON` on quiet cores",
    {"device": "CPU"},
    {"shapes": named, "length": lambda row: int(row["tokens"])},
    order=lambda name: (*by_size(name[0]), name[1]),
)  # fmt: skip

SERVE_SPEED = Table(
    f"{RESULTS}/serve_speed.csv",
    {"device": "device", "model": "model"},
    (
        *(Column(f"{name}, tokens/s", "tokens_per_second", {"contestant": name}, ",.0f")
          for name in ("server", "engine", "transformers serve")),
        *(Column(f"{name} over engine", "ratio", {"contestant": name}) for name in ("server", "transformers serve")),
    ),
    "`python -m benchmarks.serve speed` on quiet cores, also with `--device cuda`",
    order=lambda name: name,
)  # fmt: skip

SERVE_LOAD = Table(
    f"{RESULTS}/serve.jsonl",
    {"device": "device", "clients": "clients"},
    (
        *(Column(name, name, form="g") for name in ("seconds", "text", "left", "given up", "refused 400")),
        Column("anything else", "others", form="g"), Column("first token, p50, s", "first_p50"),
        Column("p99", "first_p99"), Column("whole text, p50, s", "whole_p50"), Column("p99", "whole_p99"),
    ),
    "`python -m benchmarks.serve load`",
    derived={"others": lambda row: sum(v for k, v in row.items() if k.startswith(("lost", "strange", "refused 5")))},
)  # fmt: skip
SERVE_PROMPTS = Table(
    f"{RESULTS}/serve_prompts.jsonl",
    {"device": "device", "model": "model"},
    (
        Column("ready after weights, first start, s", "warm", form=lambda rows, name: f"{max(numbers(rows, name)):g}"),
        Column("later starts, s", "warm", form=lambda rows, name: f"{min(numbers(rows, name)):g}"),
        Column("between tokens, p50, ms", "between_p50_ms", {"prefill_chunk": None}),
        Column("p99", "between_p99_ms", {"prefill_chunk": None}),
        Column("p99 in chunks of 256", "between_p99_ms", {"prefill_chunk": 256}),
        Column("first token of a chat, ms", "first_turn", {"prefill_chunk": None}),
        Column("of its later turns", "later_turns", {"prefill_chunk": None}),
    ),
    "`python -m benchmarks.serve_prompts --device cuda --new 600 --chat 1000`",
    derived={
        "warm": lambda row: re.findall(r"warmed up in ([\d.]+)", row["told"])[0],
        "first_turn": lambda row: row["chat_first_ms"][0] if "chat_first_ms" in row else "",
        "later_turns": lambda row: mean(row["chat_first_ms"][1:]) if "chat_first_ms" in row else "",
    },
)  # fmt: skip


# The demo and the card


def demo_of(root: Path) -> dict[str, Any]:
    """Raises ValueError for a results.json of another schema."""
    results = current(json.loads((root / DEMO).read_text("utf-8")))
    if results["schema"] != SCHEMA:
        raise ValueError(f"{DEMO} has schema {results['schema']}, expected {SCHEMA}")
    return results


def asked_of(row: Row) -> str:
    heads = row["asked_head_density"]
    skipped = f", {100 * heads:g} % of the heads" if heads < 1 else ""
    return f"{100 * row['asked_mlp_density']:g} % of candidates{skipped}"


def demo_rows(root: Path) -> list[Row]:
    """Sparse and dense quality of each text from its first token on, with what stands about the text."""
    results = demo_of(root)
    texts = {text["name"]: text for text in results["texts"]}
    found = []
    for row in results["quality"]:
        if row["sparse_from"] == 0 and not row.get("as_calibrated"):
            text = texts[row["text"]]
            about = {"first": row["text"] == results["texts"][0]["name"], "sources": results.get("sources", "")}
            about |= {"seen": "yes" if text["domain"] == "in domain" else "no", "asked": asked_of(row)}
            found.append(row | about | {"error": row["increase_error"]})
    return found


def noted_increase(rows: Sequence[Row], name: str) -> str:
    """An increase with its error and its unit."""
    text = with_error(float(rows[-1][name]), rows[-1]["error"])
    return text if text.endswith("fold") else f"{text} %"


def predicted(asked: str) -> tuple[Column, Column]:
    where = {"selection": "predicted", "asked": asked}
    return Column(f"{asked}: increase", "increase", where, noted_increase), part("bytes", "mlp_bytes", **where)


MAKE_DEMO = "`make demo`, then `python -m benchmarks.tables --demo checkpoints/demo/results.json`"
DEMO_TEXTS = Table(
    demo_rows,
    {"text": "text", "seen in training": "seen"},
    (
        Column("dense perplexity", "perplexity", {"selection": "dense"}, ".4g"),
        *predicted("10 % of candidates"), *predicted("20 % of candidates"),
        *predicted("20 % of candidates, 85 % of the heads"),
    ),
    MAKE_DEMO,
    links=(DEMO,),
)  # fmt: skip
DEMO_YARDSTICKS = DEMO_TEXTS.with_columns(
    part("neurons read", "mlp_selected", selection="predicted"),
    *(Column(name, "increase", {"selection": selection}, noted_increase) for name, selection in (
        ("predicted", "predicted"), ("oracle", "oracle"), ("non-contextual", "noncontextual"), ("static", "static"),
    )),
    line={"first text": "asked"}, where={"first": True, "selection": lambda kind: kind != "dense"},
    order=lambda name: ("heads" in name[0], float(name[0].split()[0])),
)  # fmt: skip


def demo_table(root: Path) -> str:
    """Every text with its predicted rows, and the first text's yardsticks."""
    made = DEMO_TEXTS.make(root).partition("\nRows:")[0]
    return f"{made}\n{DEMO_YARDSTICKS.make(root)}"


SKIPPED = "fc1 all, fc2 active"  # by an engine without predictors


def opening_rows(root: Path) -> list[Row]:
    """What was timed, with the quality of the two texts."""
    results, quality, found = demo_of(root), demo_rows(root), []
    runs_of = {"dense": "transformers, dense", "dense-cpu-read": "our engine, reading all rows"}
    runs_of |= {"dense-cpu": "our engine, exact", "cpu": "our engine, sparse"}
    for timed in results["timing"]:
        kind = "predicted" if timed["backend"] == "cpu" else "dense"
        shown = {
            row["text"]: row for row in quality
            if row["selection"] == kind and asked_of(row) == asked_of(timed)
        }  # fmt: skip
        row = {name: each["perplexity"] for name, each in shown.items()} | {"sources": results.get("sources", "")}
        row |= {"ms": timed["ms_per_token"]["p50"], "mb": timed["megabytes_per_token"]}
        row["first"] = timed.get("first_token_ms")
        row["what"] = runs_of[timed["backend"]]
        read = next(iter(shown.values())).get("mlp_selected", 1.0)
        whole = SKIPPED if timed["backend"] == "dense-cpu" else "all"
        found.append(row | {"read": f"{100 * read:.1f} %" if kind == "predicted" else whole})
    return found


OPENING = Table(
    opening_rows,
    {"on a CPU": "what", "neurons read": "read"},
    (
        *(Column(f"perplexity of {name}", name, form=".4g") for name in ("installed-docs", "installed-code")),
        Column("first token, ms", "first"), Column("ms per token", "ms"), Column("MB read per token", "mb"),
    ),
    "`make demo`",
    links=(DEMO,),
    brief=True,
)  # fmt: skip

HELDOUT = {  # file of pretraining.json -> its name in the card
    "books_heldout.jsonl": "books, held out",
    "general_heldout.jsonl": "general prose, held out",
    "wikitext2_valid.raw.txt": "WikiText-2 validation, raw",
    "installed-docs.jsonl.xz": "`installed-docs`, `test`",
    "lambada.jsonl": "LAMBADA test passages",
}


def card_table(root: Path) -> str:
    """What the embedded model came to on held-out text, by the end of its pretraining."""
    told = json.loads((root / CARD).read_text("utf-8"))
    table = []
    for file, name in HELDOUT.items():
        row = told["heldout"][file]
        active = [100 * share for share in row["density"]]
        words = f"{', '.join(f'{share:.1f}' for share in active)} (mean {mean(active):.1f})"
        table.append([name, f"{row['bits_per_byte']:.3f}", f"{row['perplexity']:.1f}", f"{row['tokens']:,}", words])
    headings = ["text", "bits per byte", "perplexity", "tokens", "share of active neurons, layers 0 to 5 (%)"]
    where = f"{told['device']}, torch {told['torch'].partition('+')[0]}, seed {told['config']['seed']}"
    by = "`python -m dejavu_train.extras.pretrain` with the settings there"
    return f"{markdown(headings, table)}\nRows: pretraining.json, by {by}. {where}.\n"


# Quality on texts


def text_rows(root: Path) -> list[Row]:
    """Both models. Recipes other than the default are asked for bytes: their larger share stands beside a fifth."""
    rows = read_rows(root / MINI) + read_rows(root / HUNDRED)
    for row in rows:
        same = [float(each["asked_mlp_density"]) for each in rows if each["selection"] == row["selection"] and all(
            each[name] == row[name] for name in ("model", "recipe", "training", "seed"))]  # fmt: skip
        fifth = float(row["asked_mlp_density"]) == max(same)
        heads = "" if row["asked_head_density"] == "1.0" else ", 85 % of the heads"
        row["budget"] = ("20 %" if fifth else "10 %") + heads
        trained = row["training"] if row["recipe"] == "default" else f"{row['recipe']}, {row['training']}"
        row["what"] = trained if row["selection"] == "predicted" else row["selection"]
    return rows


TRAINED = ("self", "docs", "self-50k", "self-tuned", "original, self", "whitened-svd, self",
           "oracle", "static")  # fmt: skip


def is_shown(row: Row) -> bool:
    """The default at every budget, other training of opt-mini at a fifth."""
    other = row["what"] in TRAINED and row["model"] == "opt-mini" and row["budget"] == "20 %"
    return row["what"] == "self" or other


TEXT_MATRIX = Table(
    text_rows,
    {"model": "model", "trained on": "what", "asked": "budget"},
    (Column("bytes, %", "mlp_bytes", form=shares),
     *(Column(text, "increase", {"text": text}, increase) for text in TEXTS)),
    "`bash benchmarks/texts.sh mini OUT.csv` and `100m` on a GPU",
    {"shown": True},
    {"shown": is_shown},
    order=lambda name: (name[0] != "opt-mini", TRAINED.index(name[1]), name[2] != "20 %", name[2]),
    links=(MINI, HUNDRED),
)  # fmt: skip


# Families

FAMILY_NAMES = ("opt", "arcee", "nemotron-h", "llama-relu", "llama-drelu", "bloom")
READ_BY = {"self": "own input", "lookahead": "half a layer earlier"}  # training -> what predictors of neurons read
BY_FAMILIES = "`bash benchmarks/families.sh OUTPUT_FOLDER SIZE`"


def family_order(model: str) -> tuple[int, int]:
    """Smaller models first, families as they are named."""
    family, _, size = model.rpartition("-")
    return int(size[:-1]), FAMILY_NAMES.index(family)


def whole_runs(rows: list[Row]) -> list[Row]:
    """Of the runs that scored every text. A run that the end of the study cut off stays in the file alone."""
    texts: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        texts.setdefault((row["model"], row["training"], row["seed"]), set()).add(row["text"])
    return [row for row in rows if len(texts[row["model"], row["training"], row["seed"]]) == len(TEXTS)]


def mean_and_error(rows: Sequence[Row], name: str) -> str:
    """The mean of increases over texts and seeds, and its error by documents, which are the same for all seeds."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row["text"], []).append(float(row["error"] or 0))
    return with_error(mean(numbers(rows, name)), math.hypot(*map(mean, errors.values())) / len(errors))


FAMILIES = Table(
    FAMILY_ROWS,
    {"model": "model", "predictors read": "reads"},
    (
        Column("seeds", "seed", form=lambda rows, name: str(len({row[name] for row in rows}))),
        Column("bytes at 10 %, %", "mlp_bytes", {"asked_mlp_density": "0.1"}, shares),
        *(Column(f"{100 * float(share):g} % asked", "increase", {"asked_mlp_density": share}, mean_and_error)
          for share in ("0.05", "0.1", "0.2", "0.5", "0.7")),
    ),
    BY_FAMILIES,
    {"selection": "predicted", "asked_head_density": "1.0"},
    {"reads": lambda row: READ_BY[row["training"]]},
    whole_runs,
    lambda name: (name[1] != "own input", family_order(name[0])),
)  # fmt: skip


def active_rows(root: Path) -> list[Row]:
    """A row for each seed, held-out text and MLP of the models whose activation has zeros."""
    return [
        {**model, "model": model["config"]["output"], "seed": model["config"]["seed"], "mlp": mlp, "active": share,
         "bits": text["bits_per_byte"]}
        for model in read_rows(root / FAMILY_MODELS) if model["config"]["family"] != "bloom"
        for text in model["heldout"].values()
        for mlp, share in enumerate(text["density"])
    ]  # fmt: skip


def active_by_layer(rows: Sequence[Row], name: str) -> str:
    """Active neurons of each MLP in per cent, means over texts and seeds."""
    layers = range(max(row["mlp"] for row in rows) + 1)
    return " ".join(f"{100 * mean([row[name] for row in rows if row['mlp'] == mlp]):.1f}" for mlp in layers)


ACTIVE = Table(
    active_rows,
    {"model": "model"},
    (
        FAMILIES.columns[0],
        Column("tokens, millions", "tokens", form=".0f", times=1e-6),
        Column("bits per byte", "bits", form=lambda rows, name: f"{mean(numbers(rows, name)):.3f}"),
        Column("active neurons of each MLP, %", "active", form=active_by_layer),
    ),
    BY_FAMILIES,
    order=lambda name: family_order(name[0]),
    links=(FAMILY_MODELS,),
)  # fmt: skip


_SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320,
    "max_position_embeddings": 256,
}  # fmt: skip
_OPT = {"model_type": "opt", "ffn_dim": 512, **_SIZES}
KINDS: dict[str, dict[str, object]] = {  # kind -> what its config.json says, as small as can be
    "OPT": _OPT,
    "OPT 350m": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 64},
    "Galactica": {**_OPT, "activation_function": "gelu", "enable_bias": False},
    "Llama, Mistral, ReLU gate": {"model_type": "llama", "hidden_act": "relu", "num_key_value_heads": 2, **_SIZES},
    "Llama, Mistral, FATReLU": {"model_type": "llama", "hidden_act": "fatrelu", "num_key_value_heads": 2, **_SIZES},
    "Llama, Mistral, dReLU": {"model_type": "mistral", "hidden_act": "drelu", "num_key_value_heads": 2, **_SIZES},
    "Arcee": {"model_type": "arcee", "num_key_value_heads": 2, **_SIZES},
    "Nemotron": {"model_type": "nemotron", "hidden_act": "relu2", "num_key_value_heads": 2, **_SIZES},
    "Jais 2": {"model_type": "jais2", "hidden_act": "relu2", **_SIZES},
    "Persimmon": {"model_type": "persimmon", "hidden_act": "relu2", **_SIZES},
    "NanoChat": {"model_type": "nanochat", "num_key_value_heads": 2, **_SIZES},
    "BLOOM": {"model_type": "bloom", "hidden_size": 128, "n_layer": 2, "n_head": 4, "vocab_size": 320},
    "Cosmos 3 Edge, text": {"model_type": "cosmos3_edge_text", "head_dim": 128, "num_key_value_heads": 2, **_SIZES},
    "Nemotron-H": {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-", "num_key_value_heads": 2, **_SIZES},
}
PRETRAINED = (
    "OPT",
    "Llama, Mistral, ReLU gate",
    "Llama, Mistral, dReLU",
    "Arcee",
    "BLOOM",
)  # weights were made of these


def runs_table(_: Path) -> str:
    """What runs a model of each kind, and on which weights that was tried."""
    table = []
    for kind, values in KINDS.items():
        dims = dims_of(values, kind)
        known = ["opt-mini"] * (kind == "OPT") + ["14M and 100M (briefly trained)"] * (kind in PRETRAINED)
        known += ["50M (briefly trained)"] * (kind == "Nemotron-H")
        gpu, cpu = (is_run(dims, engine) for engine in (Engine.GPU, Engine.CPU))
        verified = gpu and engine_refusal(dims, runs.VERIFIED) is None
        answers = [True, gpu, is_run(dims, Engine.GPU, packed=True), verified]
        answers += [cpu, is_run(dims, Engine.CPU, packed=True), cpu]  # what it runs it also verifies
        table.append([kind, *("yes" if yes else "no" for yes in answers), ", ".join(known) or "tiny random ones"])
    engines = [f"{device}{how}" for device in ("GPU", "CPU") for how in ("", ", 4 bits", ", lossless")]
    made = markdown(["kind", "`mask`, `gather`", *engines, "weights"], table)
    return f"{made}\nMade by `make tables` from what the engines plan and refuse.\n"


def is_run(dims: ModelDims, engine: Engine, packed: bool = False) -> bool:
    """Whether an engine plans a step of such a model, with matrices in 4 bits or as numbers."""
    dtype = "float16" if engine is Engine.GPU else "float32"
    formats = Formats("int4", "int4", dtype, group=128) if packed else Formats(dtype, dtype, dtype)
    try:
        plan_step(dims, {}, formats, EngineOptions(), engine)
    except Unsupported:
        return False
    return True


# Lossless decoding, one model, sweeps

DRAFTS = {  # way of the rows of opt-mini on a CPU -> what a guide calls it; their drafts read 40 % of the candidates
    "sparse": "the sparse model",
    "dense, 8 bits": "the dense model with weights in 8 bits",
    "sparse, 8 bits": "the sparse model with weights in 8 bits",
    "prompt lookup": "copies of earlier text alone",
    "sparse, 8 bits, and copies": "copies, and the sparse model with weights in 8 bits",
}
LOSSLESS_OPENING = Table(
    LOSSLESS,
    {"what drafts": "draft"},
    (Column("lossless speed, our dense engine is 1", "ratio"), part("accepted", "acceptance", ".0f")),
    "`python -m benchmarks.lossless speed`",
    {"what": "speed", "text": "all", "model": "opt-mini", "decoding": "greedy", "draft": bool},
    {"draft": lambda row: DRAFTS.get(row["way"], "")},
    order=lambda name: list(DRAFTS.values()).index(name[0]),
)  # fmt: skip
LOSSLESS_FORCED = Table(
    f"{RESULTS}/lossless_gpu.csv",
    {"shapes": "shapes", "weights": "kind", "card": "card", "draft": "way"},
    (
        *(Column(f"a cycle of {length}, dense steps", "ratio", {"what": "cycle", "length": length})
          for length in ("0", "4")),
        *(Column(f"speed at {share}", "ratio", {"what": "forced", "forced": share})
          for share in ("0.84", "0.9", "0.95")),
    ),
    "`python -m benchmarks.lossless forced --device cuda` with each shape",
    {"what": ("cycle", "forced"), "way": ("sparse", "sparse, 4 bits", "dense, 4 bits", "prompt lookup")},
    {"shapes": named, "kind": lambda row: "4 bits" if row["weights"] == "int4" else "fp16", "card": card},
    order=lambda name: (*by_size(name[0]), name[1] != "fp16", name[2]),
    needs=("speed at 0.9",),
)  # fmt: skip


def one_model_rows(root: Path) -> list[Row]:
    """A row for each way to run the model: quality, bytes, ms of one row, answers to tasks."""
    found = json.loads((root / ONE_MODEL).read_text("utf-8"))
    parts, versions = found["evidence"]["rows"], found["evidence"]["versions"]
    about = {
        "sources": found["sources"],
        "torch": versions["torch"],
        "device": found["evidence"]["machine"]["name"].removeprefix("this machine, "),
    }
    first = min(row["prompt"] for row in parts["speed"])
    ms = {row["variant"]: row["ms"] for row in parts["speed"] if row["rows"] == 1 and row["prompt"] == first}
    variants = dict.fromkeys(row["variant"] for row in (*parts["speed"], *parts["quality"]))
    rows: list[Row] = []
    for name in variants:
        scored = [row for row in parts["quality"] if row["variant"] == name]
        row: Row = {"variant": name, "ms": ms.get(name, ""), **about}
        if scored:
            row["perplexity"] = math.exp(mean([math.log(each["perplexity"]) for each in scored]))
            row["rise"] = percent(math.expm1(mean([math.log1p(each["increase"]) for each in scored])))
            row["worst"] = percent(max(each["increase"] for each in scored))
            row |= {key: mean([each[key] for each in scored]) for key in ("kl_mean", "top1", "megabytes")}
        if (side := {"dense": "dense", "sparse": "value"}.get(name)) is not None:
            tasks = [each for each in parts.get("tasks", ()) if each["metric"] == "acc" and each["task"] != "mean"]
            row["accuracy"] = mean([float(each[side]) for each in tasks]) if tasks else ""
        rows.append(row)
    return rows


ONE_MODEL_TABLE = Table(
    one_model_rows,
    {"way": "variant"},
    (
        Column("perplexity of the texts", "perplexity", form=".4g"), Column("rise, %", "rise", form=""),
        Column("largest of a text", "worst", form=""), Column("KL, nats", "kl_mean", form=".2g"),
        Column("same likeliest token, %", "top1", form=".1f", times=100),
        Column("accuracy of the tasks, %", "accuracy", form=".1f", times=100),
        Column("MB read a step", "megabytes", form=",.0f"), Column("ms a token", "ms"),
    ),
    "`python -m benchmarks.one_model`",
    links=(ONE_MODEL,),
)  # fmt: skip
ONE_MODEL_OPENING = ONE_MODEL_TABLE.with_columns(
    Column("perplexity of eight texts", "perplexity", form=".4g"), Column("largest rise, %", "worst", form=""),
    Column("MB read per token", "megabytes", form=",.0f"),
    Column("ms per token", "ms"),
    line={"1.3B": "variant"}, where={"ms": bool, "perplexity": bool}, brief=True,
)  # fmt: skip

COMPARED = Table(
    f"{PAGES}/sweep/compare.csv",
    {"run": "run"},
    (
        *(Column(f"{name}, %", key, form=".3g", times=100) for name, key in (
            ("neurons selected", "mlp_selected"), ("MLP bytes", "mlp_bytes"), ("recall", "mlp_recall"))),
        Column("increase, %", "increase", form=increase), Column("ms a token", "ms_per_token"),
    ),
    "`sh examples/sweep.sh`",
    {"run": ("rank-8-at-0.2", "rank-64-at-0.2", "rank-64-at-0.4")},
    {"error": lambda row: row["increase_error"]},
)  # fmt: skip


# Sentences


def span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def gains_at(root: Path, share: float, column: Column, weights: str) -> list[float]:
    """How many times as fast a column is, of every shape of one row."""
    lines = exact_at(share, batch="1").lines(root)
    texts = [column.text(rows) for name, rows in lines if name[1] == weights]
    return [float(text.rstrip("x")) for text in texts if text]


def speed_verdict(root: Path) -> str:
    """Gains of exact skip, and of predictors over it."""
    exact, over = ([span(gains_at(root, USUAL, column, kind)) for kind in ("fp16", "4 bits")] for column in GAINS)
    return (
        "**Verdict.** Leaving silent neurons out needs no training. In fp32 it changes no text, in fp16 and bf16 near"
        " ties of two tokens may fall otherwise. It makes a token"
        f" {exact[0]} times as fast in fp16, and {exact[1]} times in 4 bits, where"
        f" {100 * USUAL:.0f} % of the neurons are active.\n"
        f"On top of that, predictors that select a tenth of the neurons gain {over[0]} times in fp16, and"
        f" {over[1]} times in 4 bits. They cost training, and some quality.\n"
    )


def break_even(root: Path) -> str:
    """How what predictors gain over exact skip falls with the active share, between the ends that were timed."""
    parts = [span(gains_at(root, share, GAINS[1], kind)) for kind in ("fp16", "4 bits") for share in (0.02, 0.3)]
    return (
        f"In fp16 predictors gain {parts[0]} times over exact skip with 2 % of the neurons active, and {parts[1]} times"
        f" with 30 %. In 4 bits it is {parts[2]} and {parts[3]} times.\n"
    )


def demo_verdict(root: Path) -> str:
    """Quality and speed of the bundle as calibrated, of the first text."""
    results = demo_of(root)
    timed = {row["backend"]: row for row in results["timing"]}
    sparse, name = timed["cpu"], results["texts"][0]["name"]
    # A row as calibrated has other thresholds for each layer, and stands in where there is no other.
    rows = {row["selection"]: row for row in sorted(results["quality"], key=lambda row: not row.get("as_calibrated"))
            if row["text"] == name and row["sparse_from"] == 0 and asked_of(row) == asked_of(sparse)}  # fmt: skip
    found, fixed = rows["predicted"], 1 + rows["static"]["increase"]
    spent = {backend: f"{row['ms_per_token']['p50']:.3g}" for backend, row in timed.items()}
    asked = asked_of(sparse).replace("of candidates,", "of the neurons as candidates and")
    return (
        f"**Verdict.** With {asked}, perplexity of {name} rises by {percent(found['increase']).lstrip('+')} %, and"
        f" {100 * found['mlp_selected']:.1f} % of the neurons are read. A token takes {spent['cpu']} ms instead of"
        f" {spent['dense-cpu']} in the same engine, and {spent['dense']} in transformers.\n"
        f"As many neurons, but the same ones for every token (static), make perplexity {fixed:.0f} times as high. So"
        " looking at each token is what pays.\n"
    )


def one_model_verdict(root: Path) -> str:
    """The fastest way to run the model, and what predictors gain over the strongest ways without them."""
    ms = {row["variant"]: row["ms"] for row in one_model_rows(root) if row["ms"]}
    best = min(ms, key=lambda name: ms[name])
    over = [ms[simple] / ms[sparse] for sparse, simple in (("sparse", "exact skip"), ("sparse, 4 bits", "4 bits"))]
    return (
        f"The fastest row is {best}. Exact skip and 4 bits need no training. In fp16 a sparse step is {over[0]:.2f}"
        f" times as fast as exact skip. In 4 bits it is {over[1]:.2f} times as fast as one without predictors.\n"
    )


def llama_verdict(root: Path) -> str:
    """How long steps in 4 bits take over those of llama.cpp, over all shapes that stand beside it."""
    rows = llama_runs(read_rows(root / CPU_STEPS))
    over: dict[str, list[float]] = {"dense-int4": [], "sparse-int4": []}
    for model in dict.fromkeys(row["model"] for row in rows):
        ms = {
            row["engine"]: float(row["p50_ms"])
            for row in rows
            if row["model"] == model and float(row["head_selected"]) == 1
        }
        for engine, found in over.items():
            found.append(ms[engine] / ms["llama.cpp-q4_0"])
    exact, sparse = (f"{min(found):.2f} to {max(found):.2f}" for found in over.values())
    (threads,), (active,) = ({row[name] for row in rows} for name in ("threads", "active_share"))
    return (
        f"On a CPU of {threads} threads, an exact step in 4 bits takes {exact} of the time that llama.cpp takes in"
        f" Q4_0.\nA sparse one takes {sparse} of it. Shapes of 1.3B to 7B have random weights, and"
        f" {100 * float(active):g} % of their neurons are active.\n"
    )


VERDICTS: dict[str, Callable[[Path], str]] = {
    "demo-verdict": demo_verdict,
    "speed-verdict": speed_verdict,
    "break-even": break_even,
    "one-model-verdict": one_model_verdict,
    "llama-verdict": llama_verdict,
}
TABLES: dict[str, Table | Callable[[Path], str]] = {
    "opening": OPENING,
    "demo": demo_table,
    "card": card_table,
    "exact": exact_at(USUAL, batch="1"),
    "one-kernel": ONE_KERNEL,
    "exact-batches": EXACT_BATCHES,
    "zeros": ZEROS,
    "real-rows": REAL_ROWS,
    "exact-tokens": EXACT_TOKENS,
    "first-token": FIRST_TOKEN,
    "vllm": VLLM,
    "decode-rivals": DECODE,
    "decode-families": FAMILY_STEPS,
    "several-gpus": SEVERAL,
    "cpu": CPU,
    "llama": LLAMA,
    "prompts-cpu": PROMPTS_CPU,
    "serve-speed": SERVE_SPEED,
    "serve-load": SERVE_LOAD,
    "serve-prompts": SERVE_PROMPTS,
    "texts": TEXT_MATRIX,
    "families-runs": runs_table,
    "families": FAMILIES,
    "families-active": ACTIVE,
    "lossless-opening": LOSSLESS_OPENING,
    "lossless-forced": LOSSLESS_FORCED,
    "one-model": ONE_MODEL_TABLE,
    "one-model-opening": ONE_MODEL_OPENING,
    "compared": COMPARED,
    **VERDICTS,
}
