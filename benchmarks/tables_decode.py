"""Tables of benchmarks/NOTES.md from decode.csv: step times by prompt, batches beside how good the dense engine is."""

from pathlib import Path

from benchmarks.tables_format import Row, markdown, provenance, read_csv

DECODE = "benchmarks/results/decode.csv"


def _rows(root: Path) -> list[Row]:
    """Timed rows, oldest first, so that a dict of them keeps the newest of a kind."""
    return sorted((row for row in read_csv(root / DECODE) if row["p50_ms"]), key=lambda row: row["date"])


def _size(row: Row) -> float:
    return float(row["model"].rstrip("b"))


def _times(row: Row | None, dense: Row | None) -> list[str]:
    """ms, share of the floor at 4.5 TB/s, and how many times as fast as the dense engine."""
    if row is None or dense is None:
        return ["", "", ""]
    ms = float(row["p50_ms"])
    return [f"{ms:.3g}", f"{100 * float(row['share45']):.0f} %", f"{float(dense['p50_ms']) / ms:.2f}x"]


def prompts_table(root: Path) -> str:
    """Dense, sparse and look-ahead steps of one row, by model and prompt."""
    kinds = {("dense", ""): "dense", ("sparse", ""): "sparse", ("sparse", "site=1"): "ahead"}
    found = {
        (_size(row), int(row["prompt"]), kinds[row["engine"], row["options"]]): row
        for row in _rows(root)
        if row["batch"] == "1" and (row["engine"], row["options"]) in kinds
    }
    table = []
    for size, prompt in sorted({key[:2] for key in found}):
        dense, sparse, ahead = (found.get((size, prompt, kind)) for kind in ("dense", "sparse", "ahead"))
        table.append([f"{size:g}B, {prompt}", *_times(dense, dense)[:2], *_times(sparse, dense), *_times(ahead, dense)])
    headings = ["shapes, prompt", "dense, ms", "of its floor"]
    for kind in ("sparse", "ahead"):
        headings += [f"{kind}, ms", "of its floor", "against dense"]
    return f"{markdown(headings, table)}\nRows: decode.csv; {provenance(list(found.values()))}.\n"


def batches_table(root: Path) -> str:
    """Several rows: what they select together, and the share of its floor that the dense engine reaches."""
    rows = [row for row in _rows(root) if row["batch"] != "1" and "crossover" not in row["options"]]
    found = {(_size(row), int(row["batch"]), row["engine"]): row for row in rows}
    table = []
    for size, batch in sorted({key[:2] for key in found}):
        dense, sparse = found.get((size, batch, "dense")), found.get((size, batch, "sparse"))
        names = ("mlp_density", "row_density", "live_share")
        cells = [f"{100 * float(sparse[name]):.1f} %" if sparse else "" for name in names]
        table.append([f"{size:g}B, {batch}", *cells, *_times(dense, dense)[:2], *_times(sparse, dense)])
    headings = ["shapes, rows", "union", "one row", "live", "dense, ms", "of its floor", "sparse, ms", "of its floor"]
    return f"{markdown([*headings, 'against dense'], table)}\nRows: decode.csv; {provenance(rows)}.\n"
