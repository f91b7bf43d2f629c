"""The tables of docs/results/frontier.md: rivals and heads from docs/results/frontier/rivals.csv."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables_format import Row, markdown, mean, percent, provenance, read_csv, several, share_range

RIVALS = "docs/results/frontier/rivals.csv"
TEXTS = ("docs", "readmes", "licences", "general", "books", "wikitext", "lambada", "code")
ONE_PERCENT, THIRD_OF_A_PERCENT = ("0.08", 0.01), ("0.1", 0.003)  # asked bytes, largest increase
HEADS_GOAL = 1.5  # times the oracle's increase
JUDGED_FROM = 0.003  # an oracle's increase below which a ratio says nothing


def _rows(root: Path) -> list[Row]:
    return read_csv(root / RIVALS)


def _cells(rows: Sequence[Row]) -> list[str]:
    """One increase for each text: of several seeds the mean and the range."""
    cells = []
    for text in TEXTS:
        of = [row for row in rows if row["text"] == text]
        errors = [float(row["error"]) if row["error"] else None for row in of]
        cells.append(several([float(row["increase"]) for row in of], errors))
    return cells


def _seeds(rows: Sequence[Row]) -> str:
    seeds = sorted({row["seed"] for row in rows})
    return f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"


def rivals_table(root: Path) -> str:
    """Increase at equal bytes. Of the ranks of one method the one that calibration text prefers."""
    rows = [row for row in _rows(root) if row["asked_bytes"]]
    parts = []
    for asked in sorted({row["asked_bytes"] for row in rows}, key=float):
        at = [row for row in rows if row["asked_bytes"] == asked]
        best: dict[str, str] = {}  # family -> the variant of least divergence on calibration text
        for row in sorted(at, key=lambda row: float(row["calibration_nats"] or 0)):
            best.setdefault(row["method"].split(",")[0], row["method"])
        table = []
        for method in best.values():
            of_method = [row for row in at if row["method"] == method]
            name = f"predictors of train.py ({_seeds(of_method)})" if method == "predictors" else method
            table.append([name, share_range([float(row["mlp_bytes"]) for row in of_method]), *_cells(of_method)])
        table.sort(key=lambda line: (line[0] != "oracle", not line[0].startswith("predictors"), line[0]))
        parts.append(f"**{100 * float(asked):g} % asked**\n\n" + markdown(["", "bytes, %", *TEXTS], table))
    return "\n".join(parts) + f"\nRows: {RIVALS}. {provenance(rows, 'device')}.\n"


def bytes_goals_table(root: Path) -> str:
    """The predictors of train.py against the goals on increase at bytes, every seed on every text."""
    rows = [row for row in _rows(root) if row["method"] == "predictors" and row["asked_bytes"]]
    table = []
    for text in TEXTS:
        cells = [text]
        for asked, limit in (ONE_PERCENT, THIRD_OF_A_PERCENT):
            increases = [float(row["increase"]) for row in rows if (row["text"], row["asked_bytes"]) == (text, asked)]
            missed = sum(value > limit for value in increases)
            verdict = f"**missed** by {missed} of {len(increases)} seeds" if missed else "met"
            cells.append(f"{several(increases, [None])}: {verdict}")
        table.append(cells)
    headings = [
        f"{100 * float(asked):g} % of the bytes: at most {percent(limit)} %"
        for asked, limit in (ONE_PERCENT, THIRD_OF_A_PERCENT)
    ]
    return markdown(["text", *headings], table)


def heads_table(root: Path) -> str:
    """All rows of all seeds, side by side: which heads, how many, what it costs on every text."""
    rows = [row for row in _rows(root) if row["asked_mlp_density"] and not row["asked_bytes"]]
    parts = []
    for asked in sorted({row["asked_head_density"] for row in rows}, key=float):
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in rows:
            if row["asked_head_density"] == asked:
                groups.setdefault((row["asked_mlp_density"], row["method"], row["seed"]), []).append(row)
        table = []
        for (mlp, method, seed), own in sorted(groups.items(), key=lambda item: (-float(item[0][0]), *item[0][1:])):
            neurons = "all neurons" if float(mlp) == 1 else f"{100 * float(mlp):g} % of candidates"
            kept = share_range([float(row["head_selected"]) for row in own])
            table.append([f"{method}, {neurons}", seed, kept, *_cells(own)])
        parts.append(
            f"**{100 * float(asked):g} % of the heads**\n\n" + markdown(["", "seed", "heads kept, %", *TEXTS], table)
        )
    return "\n".join(parts) + f"\nRows: {RIVALS}. {provenance(rows, 'device')}.\n"


def head_ratios_table(root: Path) -> str:
    """Times the oracle's increase of the same seed, all neurons kept. Nothing where the oracle loses too little."""
    rows = [row for row in _rows(root) if row["asked_mlp_density"] == "1"]
    increases = {(r["asked_head_density"], r["text"], r["seed"], r["method"]): float(r["increase"]) for r in rows}
    table = []
    for asked in sorted({row["asked_head_density"] for row in rows} - {"1"}, key=float, reverse=True):
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


FRONTIER_TABLES = {
    "rivals": rivals_table,
    "bytes-goals": bytes_goals_table,
    "heads": heads_table,
    "head-ratios": head_ratios_table,
}
