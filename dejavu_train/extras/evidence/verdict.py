"""The sentence that the page begins with, of rows alone."""

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
SPARSE, LITTLE, FASTER = "sparse", 0.05, 1.05
RIVALS = ("exact skip", "4 bits")


def verdict(rows: Rows) -> str:
    """Verdict on the sparse model: active neurons, its speed, and what it loses."""
    said = [each for each in (_active(rows), _speed(rows), _loss(rows), _answers(rows)) if each]
    return " ".join(said) or "Nothing was measured yet."


def _active(rows: Rows) -> str:
    own = rows.get("active", ())
    return (
        f"A token has {100 * sum(row['nonzero'] for row in own) / len(own):.2g} % of the neurons active." if own else ""
    )


def _speed(rows: Rows) -> str:
    first = min((row["prompt"] for row in rows.get("speed", ())), default=0)
    ms = {row["variant"]: row["ms"] for row in rows.get("speed", ()) if row["rows"] == 1 and row["prompt"] == first}
    name = SPARSE if SPARSE in ms else "exact skip"
    if name not in ms or "dense" not in ms:
        return ""
    factor = ms["dense"] / ms[name]
    words = f"{factor:.2g} times as fast as" if factor >= FASTER else "no faster than"
    words = f"{words} where all rows are read ({ms['dense']:.3g} ms)"
    rivals = [f"{each} {ms[each]:.3g} ms" for each in RIVALS if each in ms]
    beside = f" Beside it: {', '.join(rivals)}." if name == SPARSE and rivals else ""
    return f"A {name} step takes {ms[name]:.3g} ms, {words}.{beside}"


def _loss(rows: Rows) -> str:
    own = [row for row in rows.get("quality", ()) if row["variant"] == SPARSE]
    if not own:
        return ""
    worst = max(own, key=lambda row: row["increase"])
    top1 = min(row["top1"] for row in own)
    words = "little" if worst["increase"] <= LITTLE else "much"
    return (
        f"It loses {words}: at most {100 * worst['increase']:+.2g} % of perplexity (on {worst['text']}), and the most"
        f" likely token is the same at {100 * top1:.3g} % of the positions or more."
    )


def _answers(rows: Rows) -> str:
    by_set: dict[str, dict[str, Any]] = {}
    for row in rows.get("generation", ()):
        by_set.setdefault(row["set"], {})[row["variant"]] = row
    told = [
        f"{name} {100 * own[SPARSE]['accuracy']:.3g} % instead of {100 * own['dense']['accuracy']:.3g} %"
        for name, own in by_set.items()
        if {SPARSE, "dense"} <= set(own) and max(own[SPARSE]["accuracy"], own["dense"]["accuracy"]) > 0
    ]
    none = "No long answer is right." if by_set and not any(row["accuracy"] for row in rows["generation"]) else ""
    return f"Of long answers it has right: {', '.join(told)}." if told else none
