"""The tables of docs/results/serving.md: speed, load, and what clients see who ask wrongly."""

import json
from pathlib import Path

from benchmarks.tables_format import Row, age, commits, markdown, read_csv

SPEED = "benchmarks/results/serve_speed.csv"
LOAD = "benchmarks/results/serve.jsonl"
MALFORMED = "benchmarks/results/malformed.csv"
CONTESTANTS = ("server", "engine", "engine, steps", "transformers serve")


def speed_table(root: Path) -> str:
    """Tokens a second, the newest row of each device and contestant."""
    newest = {(row["device"], row["model"], row["contestant"]): row for row in read_csv(root / SPEED)}
    table = []
    for device, model in sorted({key[:2] for key in newest}):
        found = [newest.get((device, model, name)) for name in CONTESTANTS]
        rates = [f"{float(r['tokens_per_second']):.4g} ({_range(r)})" if r else "" for r in found]
        ratios = [f"{float(r['ratio']):.3g}" if r else "" for r in (found[0], found[-1])]
        table.append([f"{device}, {model}", next(r["rows"] for r in found if r), *rates, *ratios])
    headings = ["device, model", "rows", *CONTESTANTS, "server over engine", "transformers serve over engine"]
    shown = list(newest.values())
    versions = " and ".join(sorted({row["versions"] for row in shown}))
    return f"{markdown(headings, table)}\nRows: [serve_speed.csv]({SPEED}). {versions}{age(shown)}. {commits(shown)}.\n"


def _range(row: Row) -> str:
    return f"{float(row['p20']):.4g} to {float(row['p80']):.4g}"


def load_table(root: Path) -> str:
    """What became of the requests of a load, and how long they took: the newest row of each device."""
    rows = [json.loads(line) for line in (root / LOAD).read_text().splitlines()]
    newest = {(row["device"], row["model"]): row for row in rows if "clients" in row}
    ends = ["text", "left", "given up", "queue full", "refused 400"]
    table = []
    for (device, model), row in newest.items():
        table.append([f"{device}, {Path(model).name}", str(row["clients"]), f"{row['seconds']:g}"])
        others = sum(v for k, v in row.items() if k.startswith(("lost", "strange", "refused 5")))
        table[-1] += [str(row.get(end, 0)) for end in ends] + [str(others)]
        table[-1] += [f"{row[name]:.3g}" for name in ("first_p50", "first_p99", "whole_p50", "whole_p99")]
    headings = ["device, model", "clients", "seconds", *ends, "anything else"]
    headings += ["first token, p50, s", "p99", "whole text, p50, s", "p99"]
    shown = list(newest.values())
    return f"{markdown(headings, table)}\nRows: [serve.jsonl]({LOAD}){age(shown)}. {commits(shown)}.\n"


def malformed_table(root: Path) -> str:
    """Every answer once, with how many requests had it and one of them."""
    rows = read_csv(root / MALFORMED)
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        said = row["message"].partition(": ")[0] if "must be JSON" in row["message"] else row["message"]
        kinds.setdefault((row["status"], row["raised"], said), []).append(row)
    table = [
        [f"`{each[0]['asked']}`" if each[0]["asked"] else "nothing", str(len(each)), status, raised, said]
        for (status, raised, said), each in kinds.items()
    ]
    headings = ["one of the bodies", "requests", "status", "the client raises", "and its message says"]
    about = f"Rows: [malformed.csv]({MALFORMED}), {len(rows)} of them. {commits(rows[:1])}{age(rows[:1])}."
    return f"{markdown(headings, table)}\n{about}\n"


SERVE_TABLES = {"serve-speed": speed_table, "serve-load": load_table, "serve-malformed": malformed_table}
