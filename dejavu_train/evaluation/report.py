"""Reads scored rows and timings, writes results.json and the tables that say the same."""

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejavu_train.evaluation.perplexity import EvalCorpus, EvalResult, increase
from dejavu_train.evaluation.provenance import versions
from dejavu_train.evaluation.schema import SCHEMA
from dejavu_train.evaluation.texts import EvalText
from dejavu_train.evaluation.timing import Timing
from dejavu_train.families import TARGETS, Target
from dejavu_train.ground.files import read_json, replacing, write_json
from dejavu_train.ground.table import table
from dejavu_train.predictors.metrics import SelectionSums, total

Scored = Sequence[tuple[EvalText, Sequence[EvalResult]]]


def results(
    model: str, bundle: str, scored: Scored, timings: Sequence[Timing], read_gb_s: float | None = None
) -> dict[str, Any]:
    """Everything that was measured, as results.json (schema 3) holds it.

    Args:
        model, bundle: folders or hub ids.
        scored: every text with its rows, in the order of the tables.
        timings: of decoding. read_gb_s: how fast this machine reads memory, where a CPU was timed.
    """
    return {
        **{"schema": SCHEMA, "model": model, "bundle": bundle, "versions": versions()},
        "texts": [_text_row(text) for text, _ in scored],
        "quality": [row for text, qualities in scored for row in _quality_rows(text, qualities)],
        "layers": [{"text": text.name} | row for text, qualities in scored for row in layer_rows(qualities)],
        "timing": [{k: v for k, v in dataclasses.asdict(each).items() if k != "tokens"} for each in timings],
        "read_gb_s": None if read_gb_s is None else round(read_gb_s, 1),
    }


def lossless_line(accepted: Mapping[str, float]) -> str:
    """Counts of drafted and accepted tokens in one line. ``accepted`` as `Acceptance.report` gives it."""
    speed = f"lossless: {accepted['tokens_per_second']:.1f} tokens a second"
    if not accepted["drafted"]:
        return f"{speed}, nothing was drafted"
    return (
        f"{speed}, {accepted['acceptance']:.0%} of {accepted['drafted']} drafted tokens accepted,"
        f" {accepted['mean_length']:.1f} of each draft, {accepted['saved']:.0%} of the dense passes saved"
    )


def guard_line(watched: Mapping[str, Any]) -> str:
    """Measurements of a guard while text was generated, in one line. ``watched`` as `GuardState.report` gives it."""
    guard, tokens = watched["guard"], watched["tokens"]
    if not tokens:
        return f"guard: no token was measured; every {guard['every']}-th is, and fewer were generated"
    moved = "thresholds moved" if guard["control"] else "thresholds left alone"
    parts = [f"{name} {watched[name]['retained_mass']:.4f}" for name in TARGETS if name in watched]
    mlp_layers = [layer for layer in watched["layers"] if layer["target"] == Target.MLP]
    promised = sum(layer["promised"] for layer in mlp_layers) / max(len(mlp_layers), 1)
    promise = f", MLPs promised {promised:.4f}" if mlp_layers else ""
    return f"guard: {tokens} tokens measured, {moved}; retained mass: {', '.join(parts)}{promise}"


def _text_row(text: EvalText) -> dict[str, Any]:
    return {
        "name": text.name, "source": text.source, "sha256": text.sha256, "set": text.set_name, "whole": text.whole,
        "domain": text.domain, "documents": len(text.held.document_tokens), "tokens": text.held.tokens,
        "bytes": text.held.bytes, "window": text.window, "pretrained_paragraphs": text.pretrained_paragraphs,
    }  # fmt: skip


def _quality_rows(text: EvalText, qualities: Sequence[EvalResult]) -> list[dict[str, Any]]:
    dense = next((quality for quality in qualities if quality.row.selection == "dense"), None)
    return [{"text": text.name} | _quality_row(quality, dense, text.held) for quality in qualities]


def _quality_row(quality: EvalResult, dense: EvalResult | None, held: EvalCorpus) -> dict[str, Any]:
    row, nats = quality.row, float(quality.nats.sum())
    asked_mlp, asked_heads = quality.asked
    change, error = (None, None)
    if dense is not None:
        change, error = increase(quality.nats, dense.nats, held.document_tokens)
    mlp, heads = _of_target(quality, Target.MLP), _of_target(quality, Target.HEADS)
    sparse = row.selection != "dense"
    sparse_heads = sparse and asked_heads < 1
    return {
        "selection": row.selection,
        "as_calibrated": row.as_calibrated,
        "asked_mlp_density": _rounded(asked_mlp),
        "asked_head_density": _rounded(asked_heads),
        "mlp_candidates": _rounded(_candidate_density(quality)) if row.selection == "predicted" else None,
        "mlp_selected": _rounded(mlp.density if sparse else 1.0),
        "head_selected": _rounded(heads.density if sparse_heads else 1.0),
        "sparse_from": row.sparse_from,
        "perplexity": _rounded(math.exp(nats / held.tokens)),
        "increase": _rounded(change),
        "increase_error": _rounded(error),
        "bits_per_byte": _rounded(nats / math.log(2) / held.bytes),
        "mlp_recall": _rounded(mlp.recall if sparse else 1.0),
        "mlp_retained_mass": _rounded(mlp.retained_mass if sparse else 1.0),
        "head_recall": _rounded(heads.recall) if sparse_heads else None,
        "head_retained_mass": _rounded(heads.retained_mass) if sparse_heads else None,
        "mlp_bytes": _rounded(quality.mlp_bytes if sparse else 1.0),
        "tokens": held.tokens,
    } | ({} if sparse or not int(mlp.units) else {"mlp_active": _rounded(mlp.active_density)})


def _candidate_density(quality: EvalResult) -> float:
    """Share of the neurons that passed the first stage. Without a cascade what was selected."""
    passed = units = 0
    for (layer, target), sums in quality.sums.items():
        if target == Target.MLP:
            passed += quality.candidates.get(layer, int(sums.tp + sums.fp))
            units += int(sums.units)
    return passed / units if units else math.nan


def layer_rows(scored: Sequence[EvalResult]) -> list[dict[str, Any]]:
    """Share selected, recall, precision, mass per layer, of the first predicted row in which each target is sparse."""
    rows: list[dict[str, Any]] = []
    for place, target in enumerate(TARGETS):
        chosen = next((q for q in scored if q.row.selection == "predicted" and q.asked[place] < 1), None)
        if chosen is None:
            continue
        for (layer, name), sums in chosen.sums.items():
            if name == target:
                metrics = {name: getattr(sums, name) for name in ("recall", "precision", "retained_mass")}
                metrics = {"selected": sums.density} | metrics
                rows.append({"layer": layer, "target": target} | {k: _rounded(v) for k, v in metrics.items()})
    return sorted(rows, key=lambda row: (row["target"] != Target.MLP, row["layer"]))


def _of_target(quality: EvalResult, target: Target) -> SelectionSums:
    return total(sums for (_, name), sums in quality.sums.items() if name == target)


def _rounded(value: float | None) -> float | None:
    """Six significant digits: more would be noise in a file that people read. Not a number becomes null."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


COLUMNS = {  # heading of a table -> what stands below it
    "candidates": "Share of the neurons that the predictors propose. A second stage may drop some of them.",
    "selected": "Share of the neurons that are read and computed.",
    "recall": "Share of the active neurons that were selected.",
    "precision": "Share of the selected neurons that were active.",
    "mass": "Retained mass: the share of all neurons' contribution that the selected ones carry.",
    "heads": "Share of the attention heads that are selected.",
    "head recall": "Share of the heads of the largest contribution that were selected, of equally many.",
    "head mass": "Retained mass of the heads.",
    "asked mlp": "Share of the neurons that thresholds were set for: candidates with a second stage, else selected.",
    "asked heads": "Share of the heads that thresholds were set for.",
    "mlp bytes": "What the MLPs read for a token, predictors included, over what dense MLPs read.",
    "predicted": "Increase of perplexity over the dense model with the units that the predictors select.",
    "+-": "Standard error of the increase, by a paired bootstrap over documents.",
    "oracle": "The increase with as many units, chosen by this token's own activations. Predictors cannot do better.",
    "noncontextual": "The increase with as many units, chosen by the token alone, without its context.",
    "static": "The increase with the same units for every token: those that are active most often.",
    "random": "The increase with as many units, drawn at random.",
    "densities": "Shares of neurons and of heads that were asked for, the mean over the layers.",
    "from": "Position from which on the model is sparse.",
    "bits/byte": "Bits that the model needs for a byte of the text. It does not depend on the tokenizer.",
    "first token, ms": "Milliseconds from a prompt to the first new token.",
    "MB/token": "Megabytes of weights, predictors, keys and values that a token reads.",
    "ms/token p20": "A fifth of the tokens took less.",
    "p50": "Half of the tokens took less.",
    "p80": "Four fifths of the tokens took less.",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Table of results: ``name`` of its content, column headings, cells as they are shown."""

    name: str
    headings: list[str]
    cells: list[list[str]]


def tables(found: dict[str, Any]) -> str:
    """The content of results.json for people: the texts, all texts by predicted row, then the first text in full."""
    parts = [f"{found['model']}, " + (f"bundle {found['bundle']}" if found["bundle"] else "no predictors")]
    if found["quality"]:
        first = found["texts"][0]["name"]
        made = [text_table(found), drift_table(found)]
        parts += [table(one.headings, one.cells) for one in made if one.cells]
        full = full_table(found, first)
        parts.append(f"{full.name}:\n{table(full.headings, full.cells)}")
        layers = layer_table(found, first)
        if layers.cells:
            shown = [[f"{target} {layer}", *rest] for target, layer, *rest in layers.cells]
            parts.append(table([f"{first}, layer", *layers.headings[2:]], shown))
    if found["timing"]:
        timing, read = timing_table(found), found.get("read_gb_s")
        note = f"\nthis machine reads memory at {read:.1f} GB/s" if read else ""
        whole = [row["backend"] for row in found["timing"] if row.get("second_stage") is False]
        note += f"\n{' and '.join(whole)} read candidates of the second stage whole" if whole else ""
        parts.append(table(timing.headings, timing.cells) + note)
    return "\n\n".join(parts)


def layer_table(found: dict[str, Any], text: str) -> Table:
    """Figures per layer and target on one text."""
    names = ("selected", "recall", "precision", "retained_mass")
    rows = [row for row in found["layers"] if row["text"] == text]
    cells = [[row["target"], str(row["layer"]), *(_number(row[name], 3) for name in names)] for row in rows]
    return Table(f"{text}, per layer", ["target", "layer", "selected", "recall", "precision", "mass"], cells)


def timing_table(found: dict[str, Any]) -> Table:
    """Milliseconds per decoded token, a row for each backend."""
    headings = ["backend", "asked mlp", "asked heads", "device", "batch", "prompt", "new"]
    headings += ["first token, ms", "ms/token p20", "p50", "p80", "MB/token"]
    cells = [
        [t["backend"], *(_number(t.get(name), 3) for name in ("asked_mlp_density", "asked_head_density")), t["device"]]
        + [str(t[name]) for name in ("batch", "prompt", "new_tokens")]
        + [_number(t.get("first_token_ms"), 1)]
        + [f"{t['ms_per_token'][name]:.3f}" for name in ("p20", "p50", "p80")]
        + [_number(t.get("megabytes_per_token"), 1)]
        for t in found["timing"]
    ]
    return Table("decoding", headings, cells)


def text_table(found: dict[str, Any]) -> Table:
    """Table of the scored text, with the dense model on it."""
    dense = {row["text"]: row for row in found["quality"] if row["selection"] == "dense"}
    cells = [
        [
            text["name"],
            text["domain"],
            "whole" if text["whole"] else f"set {text['set']}" if text["set"] else "a part",
            *(f"{text[name]:,}" for name in ("documents", "tokens", "bytes")),
            f"{dense[text['name']]['perplexity']:.5g}" if text["name"] in dense else "-",
            _number(dense[text["name"]]["bits_per_byte"], 4) if text["name"] in dense else "-",
        ]
        for text in found["texts"]
    ]
    headings = ["text", "domain", "scored", "documents", "tokens", "bytes", "dense perplexity", "bits/byte"]
    return Table("texts", headings, cells)


def drift_table(found: dict[str, Any]) -> Table:
    """Predicted rows of all texts, with the yardsticks at the same counts beside them."""
    headings = ["increase of perplexity on", "densities", "candidates", "selected", "recall", "mass", "heads"]
    headings += ["head mass", "mlp bytes", "predicted", "+-"]
    measured = ["mlp_candidates", "mlp_selected", "mlp_recall", "mlp_retained_mass", "head_selected"]
    measured += ["head_retained_mass", "mlp_bytes"]
    scored = {row["selection"] for row in found["quality"]}
    yardsticks = [name for name in ("oracle", "noncontextual", "static", "random") if name in scored]
    asked = ("text", "as_calibrated", "asked_mlp_density", "asked_head_density", "sparse_from")
    increases = {(*(row.get(k) for k in asked), row["selection"]): row["increase"] for row in found["quality"]}
    rows = [row for row in found["quality"] if row["selection"] == "predicted" and row["sparse_from"] == 0]
    # As calibrated first; then one density's texts side by side.
    rows.sort(key=lambda row: (not row.get("as_calibrated"), row["head_selected"] < 1, row["asked_mlp_density"]))
    cells = [
        [
            row["text"],
            densities_of(row),
            *(_number(row[name], 3) for name in measured),
            *(_percent(row[name]) for name in ("increase", "increase_error")),
            *(_percent(increases.get((*(row.get(k) for k in asked), name))) for name in yardsticks),
        ]
        for row in rows
    ]
    return Table("increase of perplexity", [*headings, *yardsticks], cells)


def densities_of(row: Mapping[str, Any]) -> str:
    """The densities of MLPs and heads that a quality row stands for.

    >>> densities_of({"as_calibrated": True, "asked_mlp_density": 0.2, "asked_head_density": 0.85})
    'as calibrated (20 %, 85 %)'
    """
    asked = f"{100 * row['asked_mlp_density']:.3g} %, {100 * row['asked_head_density']:.3g} %"
    return f"as calibrated ({asked})" if row.get("as_calibrated") else asked


def full_table(found: dict[str, Any], text: str) -> Table:
    """Every row of one text."""
    headings = ["selection", "densities", "selected", "heads", "from", "perplexity", "increase", "+-", "bits/byte"]
    headings += ["recall", "mass"]
    rows = [
        [
            row["selection"],
            "-" if row["selection"] == "dense" else densities_of(row),
            *(_number(row[name], 3) for name in ("mlp_selected", "head_selected")),
            str(row["sparse_from"]),
            f"{row['perplexity']:.5g}",
            *(_percent(row[name]) for name in ("increase", "increase_error")),
            _number(row["bits_per_byte"], 4),
            *(_number(row[name], 3) for name in ("mlp_recall", "mlp_retained_mass", "head_recall", "mlp_bytes")),
        ]
        for row in found["quality"]
        if row["text"] == text
    ]
    return Table(f"{text}, all rows", [*headings, "head recall", "mlp bytes"], rows)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 10:
        return f"x {1 + value:,.0f}"
    return f"{100 * value:z.2f}%"


def write_results(found: dict[str, Any], folder: str | Path) -> None:
    """Write results.json atomically. One of another run is renamed to results-ID.json, so no row is lost."""
    path = Path(folder) / "results.json"
    with replacing(path) as aside:
        write_json(aside, found)
        _keep_earlier(path, found)


def _keep_earlier(path: Path, found: dict[str, Any]) -> None:
    if path.is_file():
        before = read_json(path, "results.json of an earlier run")
        run = before.get("run") if isinstance(before, dict) else None
        if run is None or run != found.get("run"):
            earlier = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
            name = run["id"] if isinstance(run, dict) and "id" in run else f"{earlier:%Y%m%d-%H%M%S}"
            path.rename(path.with_name(f"results-{name}.json"))
