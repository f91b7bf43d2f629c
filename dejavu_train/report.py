"""Reads scored rows and timings, writes results.json, the tables that say the same, and curve.png."""

import dataclasses
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from dejavu_train.evaluate import Held, Quality, Row, increase
from dejavu_train.files import replacing, write_json
from dejavu_train.metrics import SelectionSums
from dejavu_train.timing import Timing

SCHEMA = 1
CURVES = {  # selection -> colour and label in the picture
    "predicted": ("#0b6e99", "predicted"),
    "oracle": ("#2a9d4a", "oracle (knows this token's activations)"),
    "noncontextual": ("#8f6bb3", "non-contextual (embedding only)"),
    "static": ("#c9820a", "static (most often active)"),
    "random": ("#b03a48", "random"),
}


def results(
    model: str,
    bundle: str,
    text_name: str,
    window: int,
    held: Held,
    scored: Sequence[Quality],
    timings: Sequence[Timing],
    layers_at: float | None = None,
    read: Mapping[Row, float] | None = None,
) -> dict[str, Any]:
    """Everything that was measured, as results.json (schema 1) holds it; its table per layer at ``layers_at``.

    ``read``: for predicted rows the bytes of the MLPs and their predictors, over the dense MLPs' (see ``costs``).
    """
    dense = next((quality for quality in scored if quality.row.selection == "dense"), None)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return {
        "schema": SCHEMA,
        "model": model,
        "bundle": bundle,
        "versions": versions,
        "text": {"name": text_name, "tokens": held.tokens, "bytes": held.bytes, "window": window},
        "quality": [_quality_row(quality, dense, held, (read or {}).get(quality.row)) for quality in scored],
        "layers": layer_rows(scored, layers_at),
        "timing": [dataclasses.asdict(timing) for timing in timings],
    }


def _quality_row(quality: Quality, dense: Quality | None, held: Held, read: float | None) -> dict[str, Any]:
    row, nats = quality.row, float(quality.nats.sum())
    change, error = (None, None)
    if dense is not None:
        change, error = increase(quality.nats, dense.nats, held.document_tokens)
    mlp, heads = _of_target(quality, "mlp"), _of_target(quality, "heads")
    sparse_heads = row.selection != "dense" and row.head_density < 1
    return {
        "selection": row.selection,
        "mlp_density": _rounded(mlp.density if row.selection != "dense" else 1.0),
        "head_density": _rounded(heads.density if sparse_heads else 1.0),
        "sparse_from": row.sparse_from,
        "perplexity": _rounded(math.exp(nats / held.tokens)),
        "increase": _rounded(change),
        "increase_error": _rounded(error),
        "bits_per_byte": _rounded(nats / math.log(2) / held.bytes),
        "mlp_recall": _rounded(mlp.recall if row.selection != "dense" else 1.0),
        "mlp_retained_mass": _rounded(mlp.retained_mass if row.selection != "dense" else 1.0),
        "head_recall": _rounded(heads.recall) if sparse_heads else None,
        "mlp_bytes": _rounded(1.0 if row.selection == "dense" else read),
        "tokens": held.tokens,
    }


def layer_rows(scored: Sequence[Quality], mlp_density: float | None = None) -> list[dict[str, Any]]:
    """Density, recall, precision and mass per layer, of each target's first predicted row (at ``mlp_density``)."""
    rows: list[dict[str, Any]] = []
    for target in ("mlp", "heads"):
        chosen = next((q for q in scored if q.row.selection == "predicted" and _told(q.row, target, mlp_density)), None)
        if chosen is None:
            continue
        for (layer, name), sums in chosen.sums.items():
            if name == target:
                figures = {
                    "density": sums.density,
                    "recall": sums.recall,
                    "precision": sums.precision,
                    "retained_mass": sums.retained_mass,
                }
                rows.append({"layer": layer, "target": target} | {k: _rounded(v) for k, v in figures.items()})
    return sorted(rows, key=lambda row: (row["target"] != "mlp", row["layer"]))


def _told(row: Row, target: str, mlp_density: float | None) -> bool:
    """Whether the table per layer is about this row: sparse in the target, and at the density that is asked for."""
    density = row.mlp_density if target == "mlp" else row.head_density
    return density < 1 and (mlp_density is None or row.mlp_density == mlp_density)


def _of_target(quality: Quality, target: str) -> SelectionSums:
    """Sums over all layers: layers are equally wide, so this density is the mean of theirs."""
    total = SelectionSums()
    for (_, name), sums in quality.sums.items():
        if name == target:
            for field in dataclasses.fields(SelectionSums):
                setattr(total, field.name, getattr(total, field.name) + getattr(sums, field.name))
    return total


def _rounded(value: float | None) -> float | None:
    """Six significant digits: more would be noise in a file that people read. Not a number becomes null."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, the first left-aligned.

    >>> print(table(["a", "b"], [["x", "10"], ["yy", "5"]]))
    a    b
    x   10
    yy   5
    """
    widths = [max(len(line[i]) for line in [headings, *rows]) for i in range(len(headings))]
    lines = []
    for line in [headings, *rows]:
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]))
    return "\n".join(line.rstrip() for line in lines)


def tables(found: dict[str, Any]) -> str:
    """The content of results.json for people."""
    text = found["text"]
    parts = [
        f"{found['model']}, bundle {found['bundle']}, text {text['name']}: {text['tokens']} tokens,"
        f" {text['bytes']} bytes, windows of {text['window']}"
    ]
    if found["quality"]:
        headings = ["selection", "mlp", "heads", "from", "perplexity", "increase", "+-", "bits/byte", "recall", "mass"]
        rows = [
            [
                row["selection"],
                _number(row["mlp_density"], 3),
                _number(row["head_density"], 3),
                str(row["sparse_from"]),
                f"{row['perplexity']:.5g}",
                _percent(row["increase"]),
                _percent(row["increase_error"]),
                _number(row["bits_per_byte"], 4),
                _number(row["mlp_recall"], 3),
                _number(row["mlp_retained_mass"], 3),
            ]
            for row in found["quality"]
        ]
        parts.append(
            table(
                [*headings, "head recall", "mlp bytes"],
                [
                    [*cells, _number(row["head_recall"], 3), _number(row["mlp_bytes"], 3)]
                    for cells, row in zip(rows, found["quality"], strict=True)
                ],
            )
        )
    if found["layers"]:
        names = ("density", "recall", "precision", "retained_mass")
        cells = [[f"{r['target']} {r['layer']}", *(_number(r[name], 3) for name in names)] for r in found["layers"]]
        parts.append(table(["layer", "density", "recall", "precision", "mass"], cells))
    if found["timing"]:
        headings = ["backend", "device", "batch", "prompt", "new", "ms/token p20", "p50", "p80"]
        cells = [
            [t["backend"], t["device"], *(str(t[name]) for name in ("batch", "prompt", "new_tokens"))]
            + [f"{t['ms_per_token'][name]:.3f}" for name in ("p20", "p50", "p80")]
            for t in found["timing"]
        ]
        parts.append(table(headings, cells))
    return "\n\n".join(parts)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:z.2f}%" if abs(value) < 10 else f"{100 * value:.3g}%"


def write_results(found: dict[str, Any], folder: str | Path) -> None:
    """Write results.json atomically."""
    write_json(Path(folder) / "results.json", found)


def plot_curve(found: dict[str, Any], path: str | Path) -> bool:
    """Draw perplexity against MLP density (all heads, sparse everywhere); False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    rows = [row for row in found["quality"] if row["head_density"] == 1 and row["sparse_from"] == 0]
    figure, (whole, near) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for name, (colour, label) in CURVES.items():
        points = sorted(
            (row["mlp_density"], row["perplexity"], row["increase"], row["increase_error"] or 0.0)
            for row in rows
            if row["selection"] == name and row["increase"] is not None
        )
        if points:
            x, perplexity, change, error = np.array(points).T
            style: dict[str, Any] = {"color": colour, "label": label, "marker": "o", "markersize": 4}
            whole.plot(x, perplexity, **style)
            if name in ("predicted", "oracle"):  # the others lie beyond any scale on which these two differ
                near.errorbar(x, 100 * change, 100 * error, capsize=2, **style)
    dense = next((row["perplexity"] for row in rows if row["selection"] == "dense"), None)
    if dense is not None:
        whole.axhline(dense, color="0.4", linestyle="--", linewidth=1, label=f"dense ({dense:.4g})")
    shown = sorted({round(row["mlp_density"], 2) for row in rows if row["selection"] == "predicted"})
    for axes in (whole, near):
        axes.set_xscale("log")
        axes.set_xticks(shown, [f"{x:g}" for x in shown])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("share of MLP neurons used per token")
        axes.grid(alpha=0.25)
    whole.set_yscale("log")
    whole.set_ylabel("perplexity")
    figure.legend(*whole.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    near.axhline(0, color="0.4", linestyle="--", linewidth=1)
    near.set_ylabel("perplexity increase over dense, %")
    text = found["text"]
    figure.suptitle(f"{Path(found['model']).name} on {text['name']}, {text['tokens']:,} held-out tokens")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    plt.close(figure)
    return True
