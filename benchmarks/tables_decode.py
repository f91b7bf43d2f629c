"""Tables of decode.csv: steps by prompt, of batches, and with 4-bit weights beside goals."""

from pathlib import Path

from benchmarks.decode_problem import SHAPES
from benchmarks.tables_format import Row, card, markdown, provenance, read_csv, verdict

DECODE = "benchmarks/results/decode.csv"
FAMILY_STEPS = "benchmarks/results/decode_families.csv"
INT4_STEPS = "benchmarks/results/int4_steps.csv"
HEADS = ("fp16, fp16", "fp16, screened", "4 bits, 4 bits", "4 bits, fp16", "4 bits, screened")  # weights, LM head
INT4_GOALS = {  # issue 17: ms a token, dense and by the share of the heads; 10 % of the neurons, 60 % of them active
    "6.7b": {"dense": 1.4, "heads 100 %": 0.95, "heads 85 %": 0.95, "heads 50 %": 0.80},
    "30b": {"dense": 4.8, "heads 100 %": 2.5, "heads 85 %": 2.35, "heads 50 %": 1.9},
    "66b": {"dense": 9.6, "heads 100 %": 4.8, "heads 85 %": 4.45, "heads 50 %": 3.5},
    "175b": {"dense": 25, "heads 100 %": 11.5, "heads 85 %": 10.4, "heads 50 %": 8.2},
}
ROWS_GOALS = {"4": {"6.7b": 1.3, "30b": 1.2, "66b": 1.15}, "8": {"6.7b": 1.6, "30b": 1.4, "66b": 1.3}}  # steps of one
SELECTED = {"heads 100 %": "head_density=1.0", "heads 85 %": "head_density=0.85", "heads 50 %": ""}  # a word of options


def timed_rows(root: Path) -> list[Row]:
    """Timed rows, oldest first, so that a dict of them keeps the newest of a kind."""
    return sorted((row for row in read_csv(root / DECODE) if row["p50_ms"]), key=lambda row: row["date"])


def _keys(row: Row) -> set[str]:
    """What the options of a row set."""
    return {word.partition("=")[0] for word in row["options"].split()}


def _size(row: Row) -> float:
    return float(row["model"].rstrip("b"))


def _times(row: Row | None) -> list[str]:
    """ms, and share of the floor at 4.5 TB/s."""
    if row is None:
        return ["", ""]
    return [f"{float(row['p50_ms']):.3g}", f"{100 * float(row['share45']):.0f} %"]


def prompt_steps(root: Path) -> dict[tuple[float, int, str], Row]:
    """(size, prompt, dense, sparse or ahead) -> its newest row of one sequence."""
    kinds = {("dense", ""): "dense", ("sparse", ""): "sparse", ("sparse", "site=1"): "ahead"}
    return {
        (_size(row), int(row["prompt"]), kinds[row["engine"], row["options"]]): row
        for row in timed_rows(root)
        if row["batch"] == "1" and (row["engine"], row["options"]) in kinds
    }


def batch_steps(root: Path) -> dict[tuple[float, int, str], Row]:
    """(size, batch, engine) -> its newest row of several sequences in fp16."""
    rows = (row for row in timed_rows(root) if row["batch"] != "1" and not {"crossover", "weights"} & _keys(row))
    return {(_size(row), int(row["batch"]), row["engine"]): row for row in rows}


def prompts_table(root: Path) -> str:
    """Dense, sparse and look-ahead steps of one row, by model and prompt."""
    steps = prompt_steps(root)
    table = []
    for size, prompt in sorted({key[:2] for key in steps}):
        dense, sparse, ahead = (steps.get((size, prompt, kind)) for kind in ("dense", "sparse", "ahead"))
        table.append([f"{size:g}B, {prompt}", *_times(dense), *_times(sparse), *_times(ahead)])
    headings = ["shapes, prompt", "dense, ms", "of its floor"]
    for kind in ("sparse", "ahead"):
        headings += [f"{kind}, ms", "of its floor"]
    return f"{markdown(headings, table)}\nRows: decode.csv. {provenance(list(steps.values()))}.\n"


def batches_table(root: Path) -> str:
    """Several rows: what they select together, and the share of its floor that the dense engine reaches."""
    steps = batch_steps(root)
    table = []
    for size, batch in sorted({key[:2] for key in steps}):
        dense, sparse = steps.get((size, batch, "dense")), steps.get((size, batch, "sparse"))
        names = ("mlp_union", "mlp_selected", "active_share")
        cells = [f"{100 * float(sparse[name]):.1f} %" if sparse else "" for name in names]
        table.append([f"{size:g}B, {batch}", *cells, *_times(dense), *_times(sparse)])
    headings = ["shapes, rows", "union", "one row", "active", "dense, ms", "of its floor", "sparse, ms", "of its floor"]
    return f"{markdown(headings, table)}\nRows: decode.csv. {provenance(list(steps.values()))}.\n"


def _int4_kinds(what: str) -> dict[str, str]:
    """Kind of step -> options of its rows, for what is asked of the 4-bit engine: dense, or a share of the heads."""
    if what == "dense":
        dense = "weights=int4"
        return {"own site": dense, "screen": f"{dense} screen=True", "LM head": f"{dense} lm_head=int4", "fp16": ""}
    heads = SELECTED[what]
    own_site = f"{heads} predictors=int4 weights=int4"
    kinds = {
        "own site": own_site,
        "look-ahead": f"{own_site} site=1",
        "ahead": f"{own_site} site=1 heads_site=1",
        "screen": f"{own_site} screen=True site=1",
        "screen, ahead": f"{own_site} screen=True site=1 heads_site=1",
        "LM head": f"{own_site} lm_head=int4 site=1",
        "fp16": heads,
    }
    return {name: options.strip() for name, options in kinds.items()}


def _newest(root: Path, batch: str, prompt: str, commit: str = "") -> dict[tuple[str, str, str], Row]:
    """(model, engine, options) -> its newest row of so many sequences behind so many tokens, of one commit if given.

    Look-ahead predictors were int8 codes before they were nibbles: their rows stand in one place.
    """
    rows = (row for row in timed_rows(root) if (row["batch"], row["prompt"]) == (batch, prompt))
    rows = (row for row in rows if commit in ("", row["commit"]))
    newest = {}
    for row in rows:
        options = row["options"]
        if "site=1" in options and "weights=int4" in options:
            options = options.replace("predictors=int8", "predictors=int4")
        newest[row["model"], row["engine"], options] = row
    return newest


KINDS = {  # column of fp16 steps -> engine and options of its rows
    "transformers eager": ("hf", ""),
    "transformers compiled": ("hf-compile", ""),
    "dense": ("dense", ""),
    "sparse (heads 50 %)": ("sparse", ""),
    "look-ahead (heads 50 %)": ("sparse", "site=1"),
    "sparse (heads 85 %)": ("sparse", "head_density=0.85"),
    "sparse (heads 100 %)": ("sparse", "head_density=1.0"),
}


def decode_rows(root: Path) -> dict[tuple[str, str], list[Row]]:
    """(model, column) -> its rows of one sequence behind a prompt of 128 tokens, oldest first."""
    rows_of_kinds: dict[tuple[str, str], list[Row]] = {}
    for row in timed_rows(root):
        kind = next((name for name, key in KINDS.items() if key == (row["engine"], row["options"])), None)
        if kind and row["batch"] == "1" and row["prompt"] == "128":
            rows_of_kinds.setdefault((row["model"], kind), []).append(row)
    return rows_of_kinds


def int4_steps(root: Path) -> dict[tuple[str, str, str], Row]:
    """(model, what is asked, kind of step) -> its newest row of one sequence behind 128 tokens."""
    newest = _newest(root, "1", "128")
    steps = {}
    for model, goals in INT4_GOALS.items():
        for what in goals:
            for kind, options in _int4_kinds(what).items():
                if row := newest.get((model, "dense" if what == "dense" else "sparse", options)):
                    steps[model, what, kind] = row
    return steps


def int4_table(root: Path) -> str:
    """Steps with 4-bit weights: ms, times the goal, share of the floor. The same selection in fp16."""
    steps = int4_steps(root)
    table = []
    for model, goals in INT4_GOALS.items():
        for what, goal in goals.items():
            cells = [f"{model.upper()}, {what}", f"{goal:g}"]
            screened = [row for kind in ("screen", "screen, ahead") if (row := steps.get((model, what, kind)))]
            fastest = min(screened, key=lambda row: float(row["p50_ms"]), default=None)
            for kind in ("own site", "look-ahead", "ahead", "screen"):
                row = fastest if kind == "screen" else steps.get((model, what, kind))
                cells += [f"{float(row['p50_ms']):.3g}", f"{float(row['p50_ms']) / goal:.2f}x"] if row else ["", ""]
                cells.append(f"{100 * float(row['share45']):.0f} %" if row else "")
            beside = [steps.get((model, what, kind)) for kind in ("LM head", "fp16")]
            table.append(cells + [f"{float(row['p50_ms']):.3g}" if row else "" for row in beside])
    headings = ["shapes", "goal, ms"]
    for name in ("dense, or own site, ms", "look-ahead, ms", "heads look ahead too, ms", "LM head screened, ms"):
        headings += [name, "times the goal", "of its floor"]
    headings += ["LM head in 4 bits as well (sparse: look-ahead), ms", "fp16, same selection, ms"]
    return f"{markdown(headings, table)}\nRows: decode.csv. {provenance(list(steps.values()))}.\n"


def int4_prompts_table(root: Path) -> str:
    """Steps of one row with 4-bit weights and a screened LM head, by model and prompt. They are dense, or look ahead at
    85 or 50 % of the heads."""
    dense_kind = "dense", _int4_kinds("dense")["screen"]
    ahead = [("sparse", _int4_kinds(what)["screen"]) for what in ("heads 85 %", "heads 50 %")]
    table, shown = [], []
    commit = _newest(root, "1", "1024")["66b", *dense_kind]["commit"]  # prompts side by side: of one state
    for model in ("6.7b", "66b"):
        for prompt in ("128", "256", "512", "1024"):
            newest = _newest(root, "1", prompt, commit)
            dense, *sparse = (newest[model, *kind] for kind in [dense_kind, *ahead])
            cells = [cell for row in sparse for cell in _times(row)]
            table.append([f"{model.upper()}, {prompt}", *_times(dense), *cells])
            shown += [dense, *sparse]
    headings = ["shapes, prompt", "dense, ms", "of its floor"]
    for what in ("heads 85 %", "heads 50 %"):
        headings += [f"{what}, ms", "of its floor"]
    return f"{markdown(headings, table)}\nRows: decode.csv. {provenance(shown)}.\n"


def int4_batches_table(root: Path) -> str:
    """Several rows with 4-bit weights and predictors beside the same rows in fp16, dense and sparse."""
    table, shown = [], []
    for model, batch in (("6.7b", 2), ("6.7b", 8), ("66b", 2), ("66b", 4), ("66b", 8), ("175b", 2), ("175b", 8)):
        newest = {key[1:]: row for key, row in _newest(root, str(batch), "128").items() if key[0] == model}
        selected = next(key[1] for key in newest if "predictors=int4" in key[1] and "weights=int4" in key[1])
        cells = []
        for engine, options in (("dense", "weights=int4"), ("sparse", selected)):
            row = newest[engine, options]
            plain = [word for word in options.split() if word not in ("predictors=int4", "weights=int4")]
            fp16 = newest.get((engine, " ".join(plain)))  # 175B's does not fit
            cells += [*_times(row), f"{float(fp16['p50_ms']):.3g}" if fp16 else ""]
            shown += [each for each in (row, fp16) if each]
        table.append([f"{model.upper()}, {batch}", *cells, f"{100 * float(row['mlp_union']):.1f} %"])
    headings = ["shapes, rows"]
    for engine in ("dense", "sparse"):
        headings += [f"{engine}, ms", "of its floor", "fp16, ms"]
    return f"{markdown([*headings, 'union of the neurons'], table)}\nRows: decode.csv. {provenance(shown)}.\n"


def int4_steps_table(root: Path) -> str:
    """Dense steps of several rows with 4-bit weights, in steps of one row of the same run, beside goals."""
    rows = read_csv(root / INT4_STEPS)
    ms = {(row["model"], row["batch"]): float(row["p50_ms"]) for row in rows}
    table = []
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = [model.upper(), f"{ms[model, '1']:.3g}"]
        for batch, goals in ROWS_GOALS.items():
            steps = ms[model, batch] / ms[model, "1"]
            cells += [f"{ms[model, batch]:.3g}", f"{steps:.2f} ({goals[model]:g}: {verdict(steps / goals[model])})"]
        table.append(cells)
    headings = ["shapes", "one row, ms"]
    for batch in ROWS_GOALS:
        headings += [f"{batch} rows, ms", "steps of one row (goal)"]
    source = f"[int4_steps.csv]({INT4_STEPS})"
    return f"{markdown(headings, table)}\nRows: {source}. {provenance(rows)}.\n"


def families_table(root: Path) -> str:
    """Steps of shapes of other families and of an OPT beside them: dense, sparse, and what transformers takes.

    "Beyond" is a layer's share of what a step takes more than its bytes at the best rate of the run.
    """
    rows, steps = _family_steps(root)
    cells_of = {(row["model"], _kind(row), card(row)) for row in rows if row["engine"] in ("dense", "sparse")}
    models = list(dict.fromkeys(row["model"] for row in rows))
    table = []
    for model, kind, on in sorted(cells_of, key=lambda key: (models.index(key[0]), HEADS.index(key[1]), key[2])):
        dense, sparse = (steps.get((model, kind, on, engine)) for engine in ("dense", "sparse"))
        if dense is None or sparse is None:
            continue
        ms = [float(row["p50_ms"]) for row in (dense, sparse)]
        beyond = [f"{_beyond(row):.1f}" for row in (dense, sparse)]
        rival = steps.get((model, HEADS[0], on, "hf-compile"))
        theirs = "" if rival is None else f"{float(rival['p50_ms']):.3g} ({float(rival['p50_ms']) / ms[1]:.1f}x)"
        cells = [f"{ms[0]:.3g}", f"{ms[1]:.3g}", *beyond]
        table.append([f"OPT, {model.upper()}" if model[0].isdigit() else model, kind, on, *cells, theirs])
    headings = [
        "shapes", "weights, LM head", "card", "dense, ms", "sparse, ms", "beyond, dense, us",
        "sparse", "transformers, ms",
    ]  # fmt: skip
    source = f"[decode_families.csv]({FAMILY_STEPS})"
    return f"{markdown(headings, table)}\nRows: {source}. {provenance(rows)}.\n"


def _family_steps(root: Path) -> tuple[list[Row], dict[tuple[str, str, str, str], Row]]:
    """Timed rows, oldest first, and by model, kind, card and engine the newest."""
    rows = sorted((row for row in read_csv(root / FAMILY_STEPS) if row["p50_ms"]), key=lambda row: row["date"])
    return rows, {(row["model"], _kind(row), card(row), row["engine"]): row for row in rows}


def _beyond(row: Row) -> float:
    """us that a layer takes more than its bytes at the best rate of the run."""
    return 1e3 * (float(row["p50_ms"]) - float(row["floor_ms"])) / SHAPES[row["model"]].n_layers


def _kind(row: Row) -> str:
    """Of `HEADS`, by a row's options."""
    screened, coded = "screen=True" in row["options"], "lm_head=int4" in row["options"]
    if "weights=int4" in row["options"]:
        return HEADS[2] if coded else HEADS[4 if screened else 3]
    return HEADS[1] if screened else HEADS[0]
