"""Sentences about results: how much less likely a text became, and what a token takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from dejavu_train.bundle.cost_model import exact_bytes, selected_bytes
from dejavu_train.bundle.spec import GOOD_MASS
from dejavu_train.families import ModelDims
from dejavu_train.families.dims import SILENT
from dejavu_train.models.weight_format import WeightFormat

Found = dict[str, Any]
SELECTED_OF_ACTIVE = 1.7  # neurons selected for each active one: 10 % of the neurons where 6 % are active
ADVICE = (  # increase of perplexity up to which -> what it means
    (0.01, "The sparse model writes almost as the dense one."),
    (0.05, "The sparse model is close to the dense one."),
    (0.3, "The sparse model is clearly worse: a higher density loses less (--mlp_density)."),
    (float("inf"), "The predictors do not fit: raise the density, or train them on text like this (--text)."),
)

DENSE_ENGINES = {"cpu": "dense-cpu", "triton": "dense-engine"}  # backend -> the same engine without predictors
THEIRS = {"dense-engine-read": "the same engine where it reads all rows", "dense": "transformers' dense model"}
SLOW = " It is plain torch, and shows what is written rather than how fast an engine is."
ROUNDED = (
    "Scores are of the model's own weights, times and texts of weights kept as {}. The log says what a rounding costs."
)


def verdict(found: Found) -> list[str]:
    """Sentences about a results.json: quality as calibrated, or at the densities of most texts, and speed."""
    stored = found.get("config", {}).get("stored")
    rounded = [ROUNDED.format(stored)] if stored in ("int8", "int4") else []
    if "exact" in found:
        return [*_exact_speed(found, bool(rounded)), *_exact(found["exact"]), *rounded]
    return [*_quality(found), *_speed(found), *rounded]


def exact_report(rows: Sequence[Found], shape: ModelDims, weights: WeightFormat) -> Found:
    """Savings of a model without predictors, and those that predictors could add: shares, and bytes of a layer.

    rows: quality rows of all texts, of which each has a dense one. Empty where nothing was scored.
    """
    shares = [row["mlp_active"] for row in rows if row.get("mlp_active") is not None]
    found: Found = {"activation": str(shape.activation), "silent": shape.activation in SILENT}
    if not shares:
        return found
    active = sum(shares) / len(shares)
    density = min(1.0, SELECTED_OF_ACTIVE * active)
    layer = {
        "dense": exact_bytes(shape, weights, 1.0),
        "exact": exact_bytes(shape, weights, active),
        "predicted": selected_bytes(shape, weights, active, density),
    }
    return found | {"active": active, "density": density, "layer_bytes": layer}


def _exact(found: Found) -> list[str]:
    """Savings that predictors could add to a model without."""
    if not found["silent"]:
        return [f"The activation {found['activation']} makes no neuron silent: without predictors all rows are read."]
    if "active" not in found:
        return ["No text was scored, so the share of active neurons is not known (--tokens)."]
    layer = found["layer_bytes"]
    gain = layer["exact"] / layer["predicted"]
    lines = [
        f"{100 * found['active']:.2g} % of the neurons are active. Without predictors a layer reads"
        f" {100 * layer['exact'] / layer['dense']:.3g} % of its bytes, and its output is the same."
    ]
    if gain < 1.05:
        return [*lines, "Predictors could leave out hardly more."]
    return [
        *lines,
        f"Predictors that select {100 * found['density']:.2g} % could read {gain:.2g} times less, by bytes of a layer."
        " What they cost in quality is not known before they are trained (python train.py).",
    ]


def equal_tokens(written: Mapping[str, Sequence[int]]) -> Found:
    """Count of an exact engine's greedy tokens before the first that is not the yardstick's. Empty without both.

    written: tokens by backend.

    >>> equal_tokens({"dense": [4, 7, 9], "dense-cpu": [4, 7, 8]})
    {'equal_tokens': 2, 'tokens': 3, 'yardstick': 'dense'}
    """
    ours = next((written[name] for name in DENSE_ENGINES.values() if name in written), ())
    theirs = next((name for name in THEIRS if written.get(name)), None)
    if not ours or theirs is None:
        return {}
    pairs = list(zip(ours, written[theirs], strict=False))
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return {"equal_tokens": equal, "tokens": len(pairs), "yardstick": theirs}


def _exact_speed(found: Found, rounded: bool) -> list[str]:
    times = {row["backend"]: row["ms_per_token"]["p50"] for row in found["timing"]}
    ours = next((name for name in DENSE_ENGINES.values() if name in times), None)
    if ours is None:
        return []
    beside = {f"{ours}-read": "where it reads all rows", "dense": "in transformers"}
    others = [f"{times[name]:.3g} {words}" for name, words in beside.items() if name in times]
    line = f"A token takes {times[ours]:.3g} ms in our engine without predictors"
    lines = [", ".join([line, *others[:-1]]) + (f", and {others[-1]}." if others else ".")]
    if "yardstick" in (exact := found["exact"]):
        equal, tokens = exact["equal_tokens"], exact["tokens"]
        first = f"All {tokens} greedy tokens" if equal == tokens else f"The first {equal} of {tokens} greedy tokens"
        why = "Rounded weights choose otherwise." if rounded else "Near ties of two tokens can fall otherwise."
        rest = "" if equal == tokens else f" {why}"
        lines.append(f"{first} are those of {THEIRS[exact['yardstick']]}.{rest}")
    return lines


def _quality(found: Found) -> list[str]:
    predicted = [row for row in found["quality"] if row["selection"] == "predicted" and row["sparse_from"] == 0]
    if not predicted:
        return []
    asked = [row for row in predicted if row.get("as_calibrated")] or widest(predicted)
    lines = [f"With {selected(asked[0])}:"]
    for row in asked:
        unit = 1 if row["increase"] >= 1 else 100  # times, or per cent
        error = f" (± {unit * row['increase_error']:.2g})" if row["increase_error"] is not None else ""
        lines.append(f"  {row['text']}: a token is {likelihood(row['increase'])}{error} than to the dense model.")
    lines.append(next(text for most, text in ADVICE if max(row["increase"] for row in asked) <= most))
    mass = min((row["mlp_retained_mass"] for row in asked if row["mlp_retained_mass"] is not None), default=1.0)
    if mass < GOOD_MASS:
        needed = f"Below {100 * GOOD_MASS:.0f} % quality suffers."
        lines.append(f"The selected neurons carry {100 * mass:.0f} % of what all contribute. {needed}")
    return lines


def widest(rows: Sequence[Found]) -> list[Found]:
    """The rows of the densities that most texts were scored at, the largest of these."""
    by_densities: dict[tuple[float, float], list[Found]] = {}
    for row in rows:
        by_densities.setdefault((row["asked_mlp_density"], row["asked_head_density"]), []).append(row)
    return by_densities[max(by_densities, key=lambda densities: (len(by_densities[densities]), densities))]


def selected(row: Found) -> str:
    """The shares of neurons and heads that a quality row reads.

    >>> row = {"asked_mlp_density": 0.2, "mlp_candidates": 0.21, "mlp_selected": 0.08, "head_selected": 0.85}
    >>> selected(row)
    '20 % of the neurons as candidates, 8 % selected, and 85 % of the heads'
    """
    if row["mlp_selected"] is None or row["mlp_selected"] == 1:
        neurons = "all neurons"
    elif abs((row["mlp_candidates"] or row["mlp_selected"]) - row["mlp_selected"]) < 1e-3:
        neurons = f"{100 * row['mlp_selected']:.2g} % of the neurons"
    else:
        asked = 100 * row["asked_mlp_density"]
        neurons = f"{asked:.2g} % of the neurons as candidates, {100 * row['mlp_selected']:.2g} % selected,"
    heads = row["head_selected"]
    return neurons + (" and all heads" if heads is None or heads == 1 else f" and {100 * heads:.2g} % of the heads")


def likelihood(increase: float) -> str:
    """Words for what an increase of perplexity is to a token.

    >>> likelihood(0.0152), likelihood(-0.002), likelihood(12.0)
    ('1.5 % less likely', '0.2 % more likely', '13 times less likely')
    """
    if increase >= 1:
        return f"{1 + increase:,.0f} times less likely"
    change = 1 - 1 / (1 + increase)
    return f"{100 * abs(change):.2g} % {'less' if change >= 0 else 'more'} likely"


def _speed(found: Found) -> list[str]:
    times = {row["backend"]: row["ms_per_token"]["p50"] for row in found["timing"]}
    sparse = {name: ms for name, ms in times.items() if not name.startswith("dense")}
    if not sparse:
        return []
    name, ms = min(sparse.items(), key=lambda item: item[1])
    instead = f", instead of {times['dense']:.3g} in transformers' dense model" if "dense" in times else ""
    lines = [f"A token takes {ms:.3g} ms on the backend {name}{instead}." + (SLOW if name == "gather" else "")]
    engine = times.get(DENSE_ENGINES.get(name, ""))
    if engine is not None:
        ratio = engine / ms
        than = f"{ratio:.2g} times as fast as" if ratio >= 1.05 else "as fast as" if ratio > 0.95 else "slower than"
        why = "" if ratio >= 1.05 else ": the model is too small, the density too high, or this machine too busy"
        lines.append(f"That is {than} the same engine without predictors, which takes {engine:.3g} ms{why}.")
    return lines
