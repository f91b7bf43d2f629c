"""The tables of docs/results/families.md: small models of every family by one recipe, beside OPT's.

And the one of docs/guides/families.md, which says what runs each family.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.tables_format import Row, markdown, mean, percent, provenance, read_csv, share_range
from dejavu_train.engine import runs
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.plan import plan_step
from dejavu_train.engine.planned import Engine, Formats
from dejavu_train.families import ModelDims, dims_of
from dejavu_train.families.dims import engine_refusal
from dejavu_train.ground.errors import Unsupported

ROWS, MODELS = "docs/results/families/rows.csv", "docs/results/families/models.jsonl"
TEXTS = ("docs", "readmes", "licences", "general", "books", "wikitext", "lambada", "code")
NAMES = {
    "opt": "OPT, ReLU",
    "arcee": "Arcee, squared ReLU",
    "llama-relu": "Llama, ReLU gate",
    "llama-drelu": "Llama, dReLU",
    "bloom": "BLOOM, GELU",
}
BYTES = (0.07, 0.1, 0.15, 0.2, 0.3)  # of the dense MLPs'
TIMES_GOAL = 1.5  # an increase over OPT's at equal bytes
JUDGED_FROM = 0.003  # an increase of OPT's below which a ratio says nothing
PAPER, PAPER_GOAL = ("0.7", "0.5"), 0.01  # neurons and heads of Table 5; the largest increase
AHEAD = "lookahead"
READ_BY = {"self": "own input", AHEAD: "half a layer earlier"}  # training -> what predictors of neurons read
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
}
TRAINED = {  # kind -> the family of pretraining that made weights of it
    "OPT": "opt", "Llama, Mistral, ReLU gate": "llama-relu", "Llama, Mistral, dReLU": "llama-drelu", "Arcee": "arcee",
    "BLOOM": "bloom",
}  # fmt: skip


def _rows(root: Path) -> list[Row]:
    """Of the runs that scored every text. A run that the end of the study cut off stays in the file alone."""
    rows = [row for row in read_csv(root / ROWS) if row["selection"] == "predicted"]
    texts: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        texts.setdefault(_run(row), set()).add(row["text"])
    return [row for row in rows if len(texts[_run(row)]) == len(TEXTS)]


def _run(row: Row) -> tuple[str, ...]:
    return row["model"], row["training"], row["seed"]


def _split(model: str) -> tuple[str, str]:
    """Family and size of a model's name."""
    family, _, size = model.rpartition("-")
    return family, size


def _models(rows: Iterable[Row]) -> list[str]:
    """Smaller models first, families in the order of ``NAMES``."""
    order = list(NAMES)
    return sorted({row["model"] for row in rows}, key=lambda name: (len(_split(name)[1]), order.index(_split(name)[0])))


def _title(model: str, rows: Iterable[Row]) -> str:
    family, size = _split(model)
    seeds = len({row["seed"] for row in rows if row["model"] == model})
    return f"{NAMES[family]}, {size.upper()} ({seeds} seed{'s' * (seeds > 1)})"


def runs_table(root: Path) -> str:
    """What runs a model of each kind, and on which weights that was tried."""
    path = root / MODELS
    made = (
        [json.loads(line)["config"] for line in path.read_text().splitlines() if line.strip()] if path.exists() else []
    )
    table = []
    for kind, values in KINDS.items():
        dims = dims_of(values, kind)
        sizes = sorted({_split(c["output"])[1].upper() for c in made if c["family"] == TRAINED.get(kind)}, key=len)
        known = ["opt-mini"] * (kind == "OPT") + [f"{size} (briefly trained)" for size in sizes]
        gpu, cpu = (_is_run(dims, engine) for engine in (Engine.GPU, Engine.CPU))
        verified = gpu and engine_refusal(dims, runs.VERIFIED) is None
        answers = [True, gpu, _is_run(dims, Engine.GPU, packed=True), verified]
        answers += [cpu, _is_run(dims, Engine.CPU, packed=True), cpu]  # what it runs it also verifies
        table.append([kind, *("yes" if yes else "no" for yes in answers), ", ".join(known) or "tiny random ones"])
    engines = [f"{device}{how}" for device in ("GPU", "CPU") for how in ("", ", 4 bits", ", lossless")]
    return markdown(["kind", "`mask`, `gather`", *engines, "weights"], table)


def _is_run(dims: ModelDims, engine: Engine, packed: bool = False) -> bool:
    """Whether an engine plans a step of such a model, with matrices in 4 bits or as numbers."""
    dtype = "float16" if engine is Engine.GPU else "float32"
    formats = Formats("int4", "int4", dtype, group=128) if packed else Formats(dtype, dtype, dtype)
    try:
        plan_step(dims, {}, formats, EngineOptions(), engine)
    except Unsupported:
        return False
    return True


def models_table(root: Path) -> str:
    """What was pretrained, for how long, how good it is, and how much of it is active."""
    made = [json.loads(line) for line in (root / MODELS).read_text().splitlines() if line.strip()]
    table = []
    for row in made:
        config, heldout = row["config"], row["heldout"]
        active = mean(heldout["general.jsonl"]["density"])
        table.append([
            f"{NAMES[config['family']]}, {_split(config['output'])[1].upper()}",
            f"{config['n_layers']} x {config['d_model']}, {config['d_ffn']:,} neurons", f"{row['steps']:,}",
            f"{row['tokens'] / 1e6:.0f}", f"{config['l1']:g}",
            *(f"{heldout[f'{name}.jsonl']['bits_per_byte']:.3f}" for name in ("books", "general", "docs")),
            f"{100 * active:.1f}",
        ])  # fmt: skip
    headings = ["model", "layers x width", "steps", "M tokens", "L1", "books", "general", "docs", "active, %"]
    conditions = " and ".join(sorted({f"{row['device']}, torch {row['torch'].partition('+')[0]}" for row in made}))
    return f"{markdown(headings, table)}\nRows: {MODELS}. {conditions}.\n"


def _increase(rows: Sequence[Row]) -> tuple[float, float, float] | None:
    """Mean over texts, and the least and the largest mean of a seed. None without rows of every text."""
    by_seed = {seed: [row for row in rows if row["seed"] == seed] for seed in {row["seed"] for row in rows}}
    means = [mean([float(row["increase"]) for row in own]) for own in by_seed.values() if len(own) == len(TEXTS)]
    return (mean(means), min(means), max(means)) if means else None


def _cell(found: tuple[float, float, float] | None) -> str:
    if found is None:
        return ""
    middle, low, high = found
    return percent(middle) if low == high else f"{percent(middle)} ({percent(low)} to {percent(high)})"


def frontier_table(root: Path) -> str:
    """By share of candidates: increase over eight texts, bytes of MLPs and predictors."""
    rows = [row for row in _rows(root) if row["training"] == "self" and row["asked_head_density"] == "1.0"]
    asked = sorted({row["asked_mlp_density"] for row in rows}, key=float)
    asked = [each for each in asked if float(each) < 1]
    table = []
    for model in _models(rows):
        cells = [_title(model, rows)]
        for density in asked:
            own = [row for row in rows if (row["model"], row["asked_mlp_density"]) == (model, density)]
            read = share_range([float(row["mlp_bytes"]) for row in own]) if own else ""
            cells.append(f"{_cell(_increase(own))} at {read}" if own else "")
        table.append(cells)
    headings = ["increase at % of the bytes", *(f"{100 * float(density):g} % asked" for density in asked)]
    return f"{markdown(headings, table)}\nRows: {ROWS}. {provenance(rows, 'device')}.\n"


def at_bytes(points: Sequence[tuple[float, float]], share: float) -> float | None:
    """The increase at a share of bytes, on lines between (bytes, increase). None outside of what was measured.

    >>> at_bytes([(0.1, 0.04), (0.2, 0.02)], 0.15), at_bytes([(0.1, 0.04), (0.2, 0.02)], 0.05)
    (0.03, None)
    """
    ordered = sorted(points)
    for (low, first), (high, second) in zip(ordered, ordered[1:], strict=False):
        if low <= share <= high:
            return first + (second - first) * (share - low) / (high - low) if high > low else first
    return None


def _equal_bytes(rows: Sequence[Row], model: str, share: float) -> dict[tuple[str, str], float]:
    """(seed, text) -> the increase at a share of bytes."""
    found: dict[tuple[str, str], float] = {}
    for seed in {row["seed"] for row in rows if row["model"] == model}:
        for text in TEXTS:
            own = [row for row in rows if (row["model"], row["seed"], row["text"]) == (model, seed, text)]
            value = at_bytes([(float(row["mlp_bytes"]), float(row["increase"])) for row in own], share)
            if value is not None:
                found[seed, text] = value
    return found


def goals_table(root: Path) -> str:
    """At equal bytes: increase over the texts, and how many times that of OPT of the same size and predictors."""
    rows = [row for row in _rows(root) if row["asked_head_density"] == "1.0" and float(row["asked_mlp_density"]) < 1]
    table = []
    for training, reads in READ_BY.items():
        trained = [row for row in rows if row["training"] == training]
        for model in _models(trained):
            family, size = _split(model)
            cells = [_title(model, trained), reads]
            for share in BYTES:
                own, opt = (_equal_bytes(trained, name, share) for name in (model, f"opt-{size}"))
                both = sorted(set(own) & set(opt))
                if both:
                    here, there = mean([own[key] for key in both]), mean([opt[key] for key in both])
                    cells.append(percent(here) + _verdict(family, here, there))
                else:
                    cells.append(f"{percent(mean(list(own.values())))} (OPT: no rows)" if own else "")
            table.append(cells)
    headings = ["increase at equal bytes", "predictors read", *(f"{100 * share:g} % of the bytes" for share in BYTES)]
    return f"{markdown(headings, table)}\nRows: {ROWS}. {provenance(rows, 'device')}.\n"


def _verdict(family: str, here: float, opt: float) -> str:
    if family == "opt":
        return ""
    if opt < JUDGED_FROM:
        return f" (OPT {percent(opt)}: not judged)"
    goal = family in ("arcee", "llama-relu")
    word = (": met" if here <= TIMES_GOAL * opt else ": **missed**") if goal else ""
    return f" ({here / opt:.2f} x OPT's{word})"


def bloom_table(root: Path) -> str:
    """BLOOM at the paper's point, and each half of it alone, on every text."""
    rows, table = [row for row in _rows(root) if row["training"] == "self"], []
    points = {
        PAPER: "70 % of the neurons, 50 % of the heads",
        (PAPER[0], "1.0"): "70 % of the neurons, all heads",
        ("1.0", PAPER[1]): "all neurons, 50 % of the heads",
        ("1.0", "0.85"): "all neurons, 85 % of the heads",
    }
    for model in _models(rows):
        if _split(model)[0] not in ("bloom", "opt"):
            continue
        for (neurons, heads), name in points.items():
            asked = (model, neurons, heads)
            own = [r for r in rows if (r["model"], r["asked_mlp_density"], r["asked_head_density"]) == asked]
            cells = [_title(model, rows), name]
            for text in TEXTS:
                values = [float(row["increase"]) for row in own if row["text"] == text]
                cells.append(percent(mean(values)) if values else "")
            whole = _increase(own)
            judged = _split(model)[0] == "bloom" and (neurons, heads) == PAPER and whole is not None
            word = (": met" if whole and whole[0] <= PAPER_GOAL else ": **missed**") if judged else ""
            table.append([*cells, _cell(whole) + word])
    where = f"Rows: {ROWS}. {provenance(rows, 'device')}."
    return f"{markdown(['model', 'kept', *TEXTS, 'mean'], table)}\n{where}\n"


def ahead_table(root: Path) -> str:
    """Predictors of neurons that read half a layer earlier, beside those that read their own input."""
    rows = [row for row in _rows(root) if row["asked_head_density"] == "1.0"]
    ahead = [row for row in rows if row["training"] == AHEAD]
    asked = sorted({row["asked_mlp_density"] for row in ahead}, key=float)
    table = []
    for model in _models(ahead):
        for training, name in READ_BY.items():
            seed = min(
                (row["seed"] for row in rows if (row["model"], row["training"]) == (model, training)), default=""
            )
            if not seed:
                continue
            cells = [_title(model, ahead).partition(" (")[0], f"{name}, seed {seed}"]
            for density in asked:
                key = (model, training, seed, density)
                own = [row for row in rows if (*_run(row), row["asked_mlp_density"]) == key]
                cells.append(_cell(_increase(own)))
            table.append(cells)
    headings = ["model", "predictors read", *(f"{100 * float(density):g} % asked" for density in asked)]
    return f"{markdown(headings, table)}\nRows: {ROWS}. {provenance(ahead, 'device')}.\n"


FAMILY_TABLES: dict[str, Callable[[Path], str]] = {
    "families-runs": runs_table,
    "families-models": models_table,
    "families-frontier": frontier_table,
    "families-goals": goals_table,
    "families-bloom": bloom_table,
    "families-ahead": ahead_table,
}
