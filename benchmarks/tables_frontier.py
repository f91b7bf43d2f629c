"""The tables of docs/frontier.md: rivals and heads from docs/frontier/rivals.csv, and those of the former study."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables_format import Row, markdown, mean, percent, provenance, read_csv, several, share_range

RIVALS = "docs/frontier/rivals.csv"
TEXTS = ("docs", "readmes", "licences", "general", "books", "wikitext", "lambada", "code")
ONE_PERCENT, THIRD_OF_A_PERCENT = ("0.08", 0.01), ("0.1", 0.003)  # asked bytes, largest increase
HEADS_GOAL = 1.5  # times the oracle's increase
JUDGED_FROM = 0.003  # an oracle's increase below which a ratio says nothing
STUDY_COMMIT = "3dc6d60"  # the last with the study's code


def _rows(root: Path) -> list[Row]:
    return read_csv(root / RIVALS)


def _cells(rows: Sequence[Row]) -> list[str]:
    """One increase for each text: of several seeds the mean and the range."""
    found = []
    for text in TEXTS:
        of = [row for row in rows if row["text"] == text]
        errors = [float(row["error"]) if row["error"] else None for row in of]
        found.append(several([float(row["increase"]) for row in of], errors))
    return found


def _seeds(rows: Sequence[Row]) -> str:
    seeds = sorted({row["seed"] for row in rows})
    return f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"


def rivals_table(root: Path) -> str:
    """Increase at equal bytes; of the ranks of one method the one that calibration text prefers."""
    rows = [row for row in _rows(root) if row["asked_bytes"]]
    parts = []
    for asked in sorted({row["asked_bytes"] for row in rows}, key=float):
        at = [row for row in rows if row["asked_bytes"] == asked]
        best: dict[str, str] = {}  # family -> the variant of least divergence on calibration text
        for row in sorted(at, key=lambda row: float(row["calibration_nats"] or 0)):
            best.setdefault(row["method"].split(",")[0], row["method"])
        table = []
        for method in best.values():
            own = [row for row in at if row["method"] == method]
            name = f"predictors of train.py ({_seeds(own)})" if method == "predictors" else method
            table.append([name, share_range([float(row["mlp_bytes"]) for row in own]), *_cells(own)])
        table.sort(key=lambda line: (line[0] != "oracle", not line[0].startswith("predictors"), line[0]))
        parts.append(f"**{100 * float(asked):g} % asked**\n\n" + markdown(["", "bytes, %", *TEXTS], table))
    return "\n".join(parts) + f"\nRows: {RIVALS}; {provenance(rows, 'device')}.\n"


def bytes_goals_table(root: Path) -> str:
    """The predictors of train.py against the goals on increase at bytes, every seed on every text."""
    rows = [row for row in _rows(root) if row["method"] == "predictors" and row["asked_bytes"]]
    table = []
    for text in TEXTS:
        cells = [text]
        for asked, limit in (ONE_PERCENT, THIRD_OF_A_PERCENT):
            found = [float(row["increase"]) for row in rows if (row["text"], row["asked_bytes"]) == (text, asked)]
            missed = sum(value > limit for value in found)
            verdict = f"**missed** by {missed} of {len(found)} seeds" if missed else "met"
            cells.append(f"{several(found, [None])}: {verdict}")
        table.append(cells)
    headings = [
        f"{100 * float(asked):g} % of the bytes: at most {percent(limit)} %"
        for asked, limit in (ONE_PERCENT, THIRD_OF_A_PERCENT)
    ]
    return markdown(["text", *headings], table)


def heads_table(root: Path) -> str:
    """All rows of all seeds, side by side: which heads, how many, what it costs on every text."""
    rows = [row for row in _rows(root) if row["asked_mlp"] and not row["asked_bytes"]]
    parts = []
    for asked in sorted({row["asked_heads"] for row in rows}, key=float):
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in rows:
            if row["asked_heads"] == asked:
                groups.setdefault((row["asked_mlp"], row["method"], row["seed"]), []).append(row)
        table = []
        for (mlp, method, seed), own in sorted(groups.items(), key=lambda item: (-float(item[0][0]), *item[0][1:])):
            neurons = "all neurons" if float(mlp) == 1 else f"{100 * float(mlp):g} % of candidates"
            kept = share_range([float(row["head_density"]) for row in own])
            table.append([f"{method}, {neurons}", seed, kept, *_cells(own)])
        parts.append(
            f"**{100 * float(asked):g} % of the heads**\n\n" + markdown(["", "seed", "heads kept, %", *TEXTS], table)
        )
    return "\n".join(parts) + f"\nRows: {RIVALS}; {provenance(rows, 'device')}.\n"


def head_ratios_table(root: Path) -> str:
    """Times the oracle's increase of the same seed, all neurons kept; nothing where the oracle loses too little."""
    rows = [row for row in _rows(root) if row["asked_mlp"] == "1"]
    increases = {(r["asked_heads"], r["text"], r["seed"], r["method"]): float(r["increase"]) for r in rows}
    table = []
    for asked in sorted({row["asked_heads"] for row in rows} - {"1"}, key=float, reverse=True):
        cells = [f"{100 * float(asked):g} %"]
        for text in TEXTS:
            ratios = []
            for seed in sorted({row["seed"] for row in rows}):
                oracle = increases.get((asked, text, seed, "oracle, shared out"), 0.0)
                if oracle >= JUDGED_FROM:
                    ratios.append(increases[asked, text, seed, "predictors"] / oracle)
            verdict = "met" if ratios and max(ratios) <= HEADS_GOAL else "**missed**"
            span = f"{mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
            cells.append(f"{span}: {verdict}" if ratios else "not judged")
        table.append(cells)
    return markdown(["heads", *TEXTS], table)


Line = tuple[str, str, str]  # label, method, sharing

MINI_MLP: tuple[Line, ...] = (
    ("random", "random", "measured"),
    ("static", "static", "measured"),
    ("non-contextual", "non-contextual", "measured"),
    ("one predictor for all layers (ShadowLLM), r64 int8", "one predictor for all layers", "measured"),
    ("original recipe, the same share everywhere", "original recipe", "uniform"),
    ("original recipe, shared out", "original recipe", "measured"),
    ("SVD of fc1 (SVDP), r64 int8", "SVD r64 int8", "measured"),
    ("data-aware SVD, r32 int8", "data-aware SVD r32 int8", "measured"),
    ("layer by layer, r64 int8", "layer by layer r64 int8", "measured"),
    ("layer by layer, r64 int4", "layer by layer r64 int4", "measured"),
    ("layer by layer, r96 int4", "layer by layer r96 int4", "measured"),
    ("tuned in the model at 8 %, r64 int4", "tuned at 8.0% r64 int4", "measured"),
    ("tuned at 11 %, r96 int4", "tuned at 11.0% r96 int4", "measured"),
    ("cascade with tables, r64 int4 (study only)", "cascade r64 int4, 99.90% of the mass, 6 tables", "measured"),
    (
        "cascade with tables, tuned at 7.8 %, r64 int4 (study only)",
        "cascade r64 int4, 99.90% of the mass, 6 tables, tuned at 7.8%",
        "measured",
    ),
)
LARGE_MLP: tuple[Line, ...] = (
    ("original recipe, the same share everywhere", "original recipe", "uniform"),
    ("original recipe, shared out", "original recipe", "measured"),
    ("SVD of fc1 (SVDP), r128 int8", "SVD r128 int8", "measured"),
    ("data-aware SVD, r128 int8", "data-aware SVD r128 int8", "measured"),
    ("data-aware SVD, r128 int4", "data-aware SVD r128 int4", "measured"),
    ("cascade with tables, r128 int4 (study only)", "cascade r128 int4, 99.90% of the mass, 12 tables", "measured"),
    (
        "the same, tuned at 7.7 % (study only)",
        "cascade r128 int4, 99.90% of the mass, 12 tables, tuned at 7.7%",
        "measured",
    ),
)
HEADS: tuple[Line, ...] = (
    ("true norm after the projection, the same k, dropped", "oracle norm_after, dropped", "top-k"),
    ("the same, mean in their place", "oracle norm_after, mean", "top-k"),
    ("entropy of attention, shared out, mean", "oracle entropy, mean", "measured"),
    ("distance from the mean, the same k", "oracle from_mean, mean", "top-k"),
    ("distance from the mean, shared out", "oracle from_mean, mean", "measured"),
    ("curvature-weighted distance, shared out", "oracle fisher, mean", "measured"),
    ("the same, shares refined jointly (study only)", "oracle fisher, mean", "joint"),
    ("predicted, rank 48 int8, labels: distance from the mean", "predicted r48, from_mean labels", "measured"),
    ("predicted, rank 48 int8, labels: curvature-weighted (study only)", "predicted r48", "measured"),
    ("the same, shares refined jointly (study only)", "predicted r48", "joint"),
    ("predicted, rank 48 int8, tuned in the model (study only)", "predicted r48, tuned", "measured"),
    (
        "predicted, rank 96 int8 and token tables, tuned four times as long (study only)",
        "predicted r96, token tables, steps x 4, tuned",
        "measured",
    ),
)
AHEAD: tuple[Line, ...] = tuple(
    (f"distance {n}, layer by layer", f"layer by layer, distance {n}", "measured") for n in (0, 1, 2, 4)
)
LOSSES: tuple[Line, ...] = (
    ("a miss costs its contribution (default)", "contribution", "measured"),
    ("the paper's", "paper", "measured"),
    ("`pos_weight`", "pos_weight", "measured"),
    ("listwise: order within a token (`listwise`)", "listwise", "measured"),
    ("contribution squared", "squared", "measured"),
    ("root of the contribution", "root", "measured"),
    ("and the layer's output error under soft gates (study only)", "contribution + layer output", "measured"),
    ("contribution, token tables in all layers (study only)", "token tables", "measured"),
)
STARTS: tuple[Line, ...] = (
    ("data-aware SVD initialisation, 6e-3, 400 steps of 512 rows", "contribution", "measured"),
    ("SVD of fc1", "svd start", "measured"),
    ("random start", "random start", "measured"),
    ("learning rate 2e-3", "lr 2e-3", "measured"),
    ("learning rate 1.5e-2", "lr 1.5e-2", "measured"),
    ("a third of the steps", "steps / 3", "measured"),
    ("three times the steps", "steps x 3", "measured"),
)
BITS: tuple[Line, ...] = tuple(
    (f"trained in fp16, stored in {kind}", f"r64 trained in fp16, stored in {kind}", "measured")
    for kind in ("fp16", "int8", "fp8", "int4")
) + (("trained in int4", "r64 trained in int4", "measured"),)
ALLOCATION: tuple[Line, ...] = (
    *((f"rank {n} in all layers", f"rank {n} in all layers", "measured") for n in (16, 32, 64, 96)),
    ("ranks and densities by loss saved per byte (study only)", "ranks shared out", "measured"),
)


def study_table(root: Path, model: str, on: str, asked: Sequence[str], lines: Sequence[Line]) -> str:
    """Rows of the former study: a line per method, a column per budget; on ``val`` divergences, else increases.

    Where a method was scored twice the later row counts. Heads have their share behind the increase.
    """
    rows = [row for row in read_csv(root / f"docs/frontier/{model}.csv") if row["set"] == on]
    section = {"0.85": "heads"}.get(asked[0], "")
    found = {
        (row["method"], row["sharing"], row["asked"]): row
        for row in rows
        if (row["section"] == "heads") == (section == "heads")
    }
    table = []
    for label, method, sharing in lines:
        cells = [label]
        for budget in asked:
            row = found.get((method, sharing, budget))
            if row is None:
                cells.append("")
            elif on == "val":
                cells.append(f"{float(row['kl']):.3g}")
            else:
                share = f" (at {100 * float(row['head_density']):.1f} %)" if section else ""
                cells.append(several([float(row["increase"])], [float(row["error"])]) + share)
        table.append(cells)
    unit = "KL, nats" if on == "val" else "heads" if section else "% of the MLP's bytes asked"
    headings = [unit, *(f"{100 * float(budget):g}" for budget in asked)]
    source = f"docs/frontier/{model}.csv, of the study whose code is in history at {STUDY_COMMIT}"
    return markdown(headings, table) + f"\nRows: {source}; one training each.\n"


WIDE = ("0.06", "0.08", "0.1", "0.11", "0.13", "0.15", "0.2", "0.25")
THREE = ("0.08", "0.11", "0.15")
FRONTIER_TABLES = {
    "rivals": rivals_table,
    "bytes-goals": bytes_goals_table,
    "heads": heads_table,
    "head-ratios": head_ratios_table,
    "study-mlp": lambda root: study_table(root, "opt-mini", "test", WIDE, MINI_MLP),
    "study-heads": lambda root: study_table(root, "opt-mini", "test", ("0.85", "0.75"), HEADS),
    "study-losses": lambda root: study_table(root, "opt-mini", "val", THREE, LOSSES),
    "study-starts": lambda root: study_table(root, "opt-mini-cpu", "val", THREE, STARTS),
    "study-bits": lambda root: study_table(root, "opt-mini-cpu", "val", THREE, BITS),
    "study-allocation": lambda root: study_table(
        root, "opt-mini-cpu", "test", ("0.06", "0.08", "0.1", "0.13"), ALLOCATION
    ),
    "study-look-ahead": lambda root: study_table(
        root, "opt-mini", "test", ("0.08", "0.1", "0.13", "0.15", "0.2"), AHEAD
    ),
    "study-100m": lambda root: study_table(root, "opt-100m", "test", WIDE[:-1], LARGE_MLP),
}
