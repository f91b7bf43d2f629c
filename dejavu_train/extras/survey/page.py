"""Writes a survey down: CSV rows, a picture, a page in Markdown that begins with the verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejavu_train.bundle.card import markdown
from dejavu_train.evaluation.figure import BLACK, BLUE, GREEN, ORANGE, pyplot, save
from dejavu_train.evaluation.perplexity import increase
from dejavu_train.evaluation.rows import write_csv
from dejavu_train.extras.survey.decoder import DecoderParts
from dejavu_train.extras.survey.measure import Selection, SurveyResult
from dejavu_train.extras.survey.speed import GPUS, Machine, step_bytes
from dejavu_train.families import Target
from dejavu_train.families.dims import CARRIED, listed
from dejavu_train.ground.files import write_text

LOSS = 0.03
"""The largest increase of perplexity, by the oracle, that a verdict calls little."""
FASTER = 1.3
"""The factor from which a model is worth predictors."""
SILENT = 0.3
"""The share of neurons that are exactly zero from which they count as silent."""
CHANCE = 0.9
"""Nats of a token over those of a guess among the vocabulary, from which a model says nothing."""


@dataclass(frozen=True)
class Found:
    """All that a survey found.

    Args:
        name: of the model. texts: their names. vocabulary: tokens.
    """

    name: str
    parts: DecoderParts
    surveyed: SurveyResult
    document_tokens: Sequence[int]
    texts: Sequence[str]
    vocabulary: int
    here: Machine

    @property
    def nonzero(self) -> float:
        layers = self.surveyed.layers.values()
        return sum(each.nonzero for each in layers) / len(layers)

    @property
    def needed(self) -> float:
        layers = self.surveyed.layers.values()
        return sum(each.needed for each in layers) / len(layers)

    @property
    def nats(self) -> float:
        """A token's, dense."""
        return float(self.surveyed.nats[0].sum() / sum(self.document_tokens))

    @property
    def machines(self) -> list[Machine]:
        return [self.here, *(each for each in GPUS if each.holds(self.parts))]

    def seconds(self, machine: Machine, selection: Selection) -> float:
        return machine.seconds(self.parts, selection, self.nonzero)

    def factor(self, machine: Machine, selection: Selection) -> float:
        """How many times as fast as without predictors, where silent neurons are left out already."""
        return self.seconds(machine, Selection()) / self.seconds(machine, selection)


def rows_of(found: Found) -> list[dict[str, Any]]:
    """One row a selection: what it keeps, loses, reads, and the ms of a step by machine."""
    rows = []
    nats, dense = found.surveyed.nats, step_bytes(found.parts, Selection(), 1.0, 2)
    for number, selection in enumerate(found.surveyed.selections):
        lost, error = increase(nats[number], nats[0], found.document_tokens)
        read = step_bytes(found.parts, selection, found.nonzero, 2)
        row = {
            "selection": "dense" if selection.target is None else selection.target.value,
            "asked": selection.share,
            "kept": 1.0 if selection.target is None else selection.kept(found.parts),
            "perplexity": math.exp(nats[number].sum() / sum(found.document_tokens)),
            "increase": lost,
            "increase_error": error,
            "mb_fp16": read / 1e6,
            "bytes_over_dense": read / dense,
        }
        row |= {f"ms {each.name}": 1e3 * found.seconds(each, selection) for each in found.machines}
        rows.append(row)
    return rows


def untrained(found: Found) -> bool:
    """Whether the dense model predicts hardly better than a draw: nothing else that is measured means anything."""
    return found.nats > CHANCE * math.log(found.vocabulary)


def verdict(found: Found, rows: Sequence[Mapping[str, Any]]) -> str:
    """Verdict of the survey, in a sentence or two."""
    if untrained(found):
        return (
            f"The model predicts little better than a draw among {found.vocabulary:,} tokens. Its weights are not"
            " trained, and this survey says nothing of weights that are."
        )
    neurons = [
        (selection, row) for selection, row in zip(found.surveyed.selections, rows, strict=True)
        if selection.target == Target.MLP
    ]  # fmt: skip
    allowed = [pair for pair in neurons if pair[1]["increase"] <= LOSS]
    selection, row = min(allowed or neurons[:1], key=lambda pair: pair[0].share)
    machine = max(found.machines, key=lambda each: found.factor(each, selection))
    factor = found.factor(machine, selection)
    told = f"about {factor:.2g}x at {100 * row['increase']:+.2g} % of perplexity"
    where = f"({100 * row['kept']:.0f} % of the neurons, {machine.name})"
    if allowed and factor >= FASTER:
        return (
            f"{told[0].upper()}{told[1:]} {where}: worth predictors. They lose more than the oracle, which knows"
            " what every token needs."
        )
    said = f"{told[0].upper()}{told[1:]} {where}: not worth it."
    if 1 - found.nonzero >= SILENT:
        return f"{said} Its neurons are silent, and its bytes are elsewhere."
    tenth = Selection(Target.MLP, 0.1)
    would = found.factor(machine, tenth)
    return f"{said} A version of this model with ReLU would be, if it needs a tenth of its neurons: about {would:.2g}x."


def layer_rows(found: Found) -> list[dict[str, Any]]:
    return [
        {"layer": number, "nonzero": each.nonzero, "needed": each.needed}
        | {f"mass_at_{share:g}": mass for share, mass in each.mass.items()}
        for number, each in found.surveyed.layers.items()
    ]


def write(found: Found, folder: Path) -> list[Path]:
    """Write everything. Returns the files that there are now."""
    rows = rows_of(found)
    tables = {"selections.csv": rows, "layers.csv": layer_rows(found), "experts.csv": found.surveyed.experts}
    written = {name: each for name, each in tables.items() if each}
    for name, each in written.items():
        write_csv(folder / name, each)
    drawn = _draw(found, rows, folder / "survey")
    write_text(folder / "survey.md", page(found, rows, drawn))
    return [folder / name for name in ("survey.md", *written, *["survey.png"] * drawn)]


def page(found: Found, rows: Sequence[Mapping[str, Any]], drawn: bool) -> str:
    """The page in Markdown."""
    parts, tokens = found.parts, sum(found.document_tokens)
    lines = [f"# What {found.name} would gain", "", f"**{verdict(found, rows)}**", ""]
    if drawn:
        lines += ["![perplexity and neurons](survey.png)", ""]
    mlp = "gate, up and down" if parts.gated else "up and down"
    layers = {target: parts.layers_of(target) for target in (Target.MLP, Target.HEADS)}
    own = f" Neurons are in layers {listed(layers[Target.MLP])}, heads in {listed(layers[Target.HEADS])}."
    own = "" if all(len(each) == parts.n_layers for each in layers.values()) else own
    lines += [
        f"- {parts.n_layers} layers of width {parts.d_model}: {parts.d_ffn:,} neurons ({mlp}), {parts.heads} heads in"
        f" {parts.groups} groups.{own}",
        f"- A token has {100 * found.nonzero:.3g} % of the neurons other than zero."
        f" {100 * found.needed:.3g} % carry {100 * CARRIED:.0f} % of what all contribute.",
        f"- {tokens:,} tokens of {', '.join(found.texts)} were scored. Nothing was trained.",
        "- The oracle keeps what contributes most to a token. A predictor loses more.", *_of_experts(found),
        "", "## What the oracle loses, and what a step reads", "",
    ]  # fmt: skip
    table = [["kept", "perplexity", "more than dense", "MB, fp16", "of the dense bytes"]]
    for row in rows:
        kept = "everything" if row["selection"] == "dense" else f"{100 * row['kept']:.3g} % of the {_units(row)}"
        error = "" if row["increase_error"] is None else f" ± {100 * row['increase_error']:.2g}"
        lost = "" if row["selection"] == "dense" else f"{100 * row['increase']:+.3g}{error} %"
        share = f"{100 * row['bytes_over_dense']:.0f} %"
        table.append([kept, f"{row['perplexity']:.4g}", lost, f"{row['mb_fp16']:,.0f}", share])
    lines += [markdown(table), "## Estimated ms of a step", ""]
    chosen = [each for each in found.surveyed.selections if each.target != Target.HEADS]
    shares = ("no predictors" if each.target is None else f"{100 * each.share:g} %" for each in chosen)
    table = [["where", "TB/s", *shares]]
    for each in found.machines:
        times = [f"{1e3 * found.seconds(each, one):.3g}" for one in chosen]
        factors = [f" ({found.factor(each, one):.2g}x)" for one in chosen[1:]]
        table.append(
            [each.name, f"{each.bandwidth / 1e12:.3g}", times[0], *map("".join, zip(times[1:], factors, strict=True))]
        )
    lines += [
        markdown(table), "Without predictors rows of silent neurons are not read either.",
        "Batch 1, all heads, predictors of rank 64 in 4 bits, fp16 on GPUs, 32 bits on a CPU. It is an estimate: bytes,"
        " at the bandwidth that our engines reach with OPT's shapes, and a fixed time a layer.", "",
        *(f"- {each.name}: {each.source}." for each in found.machines), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _of_experts(found: Found) -> list[str]:
    """A line about routed experts, where there are any."""
    rows = found.surveyed.experts
    fired, tokens = (sum(row["tokens"] * row.get(key, 1) for row in rows) for key in ("nonzero", ""))
    told = f"{100 * fired / max(tokens, 1):.3g} % of the neurons in the experts that it chose other than zero"
    return [f"- A token has {told}. This is measured alone: experts run whole."] if rows else []


def _units(row: Mapping[str, Any]) -> str:
    return "neurons" if row["selection"] == Target.MLP else "head groups"


def _draw(found: Found, rows: Sequence[Mapping[str, Any]], stem: Path) -> bool:
    """The oracle's loss by what is kept, and the neurons that a token needs by layer. False without matplotlib."""
    plt = pyplot()
    if plt is None:
        return False
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for target, colour, marker in ((Target.MLP, BLUE, "o"), (Target.HEADS, ORANGE, "s")):
        own = sorted((100 * row["kept"], 100 / (1 + row["increase"])) for row in rows if row["selection"] == target)
        if own:
            x, y = zip(*own, (100.0, 100.0), strict=True)
            label = "neurons" if target == Target.MLP else "head groups"
            left.plot(x, y, color=colour, marker=marker, linewidth=2, label=label, clip_on=False)
    left.axhline(100, color=BLACK, linewidth=1)
    left.set_xlabel("kept for a token, % of all")
    left.set_ylabel("how likely a token stays, dense model = 100 %")
    left.set_xlim(0, 100)
    left.set_ylim(0, None)
    left.legend(frameon=False)
    numbers, layers = list(found.surveyed.layers), found.surveyed.layers.values()
    right.plot(numbers, [100 * each.nonzero for each in layers], color=GREEN, label="other than zero")
    needed = [100 * each.needed for each in layers]
    right.plot(numbers, needed, color=BLUE, label=f"carry {100 * CARRIED:.0f} % of what all contribute")
    right.set_xlabel("layer")
    right.set_ylabel("neurons of a token, % of all")
    right.set_ylim(0, 105)
    right.legend(frameon=False)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    left.set_title(f"What the oracle loses: {found.name}", loc="left")
    right.set_title("How many neurons a token needs", loc="left")
    save(figure, stem, ("png",))
    return True
