"""Writes the model card of a bundle: what it is, of which model, how it was made, how good it was, how to load it.

The card follows from the bundle alone, without a date, so the same bundle has the same card. Names and paths are the
user's text. They stand in code spans or in JSON, where Markdown has no markup, and never in the front matter.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dejavu_train.bundle.allocation import read_curve
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.families import TARGETS, ModelDims, UnitKey
from dejavu_train.families.dims import SIZES
from dejavu_train.version import package_version

OPT_SIZES = {*SIZES, "embedding_dim", "post_norm", "tied"}  # in which one OPT differs from another

_FRONT_MATTER = """---
library_name: dejavu_train
tags:
{tags}
---
"""
_INTRODUCTION = """# Predictors for contextual sparsity

A small network, the predictor, reads the input of a block. It says which MLP neurons and attention heads matter for
this token. Only their weights are read. `predictors.safetensors` holds one predictor for every layer and target,
`bundle.json` their thresholds and calibration curves. The model itself is not here.
"""
_FIGURES = """## Calibration

**In domain**: measured on documents set aside for calibration, of the same source as those that trained the
predictors. On other text the selection may be worse. `infer.py --text` measures it.

- Candidates are the share of all units that the first stage of a cascade proposes.
- Selected is the share of all units that are read: in a cascade those that pass its second stage.
- Recall is the share of the active neurons that are selected. For heads: of equally many heads of the largest
  contribution.
- Retained mass is the share of all units' contribution that the selected ones carry.
- A cascade's recall and retained mass are those of both stages.
"""
_TOGETHER = """# A model with predictors of its contextual sparsity

The model lies here as its own class left it, and in the folder `predictors` a bundle: for every layer a small network,
the predictor, that reads the input of a block. It says which MLP neurons and attention heads matter for this token.
Only their weights are read.
"""
_MEASURED = """## Measured

By `infer.py` on held-out documents, with every token sparse. The increase of perplexity is over the dense model, with
the standard error of a paired bootstrap over documents.
"""
_LOADING_TOGETHER = """## Loading

```python
import dejavu_train  # so that transformers knows this class
from transformers import AutoModelForCausalLM, pipeline

model = AutoModelForCausalLM.from_pretrained("MODEL"{classes})
write = pipeline("text-generation", model="MODEL")
```

MODEL is this folder or its id on the hub. Without `dejavu_train` the dense class of transformers reads it as the dense
model.
"""
_LOADING = """## Loading

MODEL is the model above, on disk or on the hub, and BUNDLE this folder or its id on the hub. Other weights than those
of the hash are refused.

```python
from dejavu_train import Bundle, SparseOPTForCausalLM

bundle = Bundle.from_pretrained("BUNDLE"{classes})
model = SparseOPTForCausalLM.from_pretrained("MODEL", bundle)  # or bundle.at(mlp_density=0.2)
```

```
python infer.py --model MODEL --bundle BUNDLE --output results --text heldout.txt --generate "Once"{flag}
```
"""


def card(
    model: str,
    weight_hash: str,
    shape: ModelDims,
    specs: Mapping[UnitKey, PredictorSpec],
    metadata: Mapping[str, Any],
    measured: Mapping[str, Sequence[Sequence[str]]] | None = None,
    together: bool = False,
) -> str:
    """The README.md of a bundle with these parts, as :class:`Bundle` has them.

    Args:
        measured: rows by title, headings first, as :func:`dejavu_train.bundle.measured.measured_rows` gives them.
        together: of a folder that holds the model, and the bundle in its folder ``predictors``.
    """
    classes = sorted({spec.class_path for spec in specs.values() if spec.class_path is not None})
    facts = {
        "model": code(model),
        "weight hash": code(weight_hash),
        "sizes": f"`{shape.n_layers} layers, d_model {shape.d_model}, d_ffn {shape.d_ffn}, {shape.n_heads} heads`",
        "trained on": _text(metadata.get("text")),
        "written by": f"dejavu_train {package_version()}",
    }
    if classes:
        facts["classes of your own, to be passed when loading"] = ", ".join(map(code, classes))
    stage = metadata.get("stage")
    settings = stage.get("keys", {}) if isinstance(stage, dict) else {}
    parts = [
        _FRONT_MATTER.format(tags="\n".join(f"- {tag}" for tag in _tags(shape, metadata)))
        + (_TOGETHER if together else _INTRODUCTION),
        "\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n",
        *([_MEASURED, *(markdown(rows) for rows in measured.values())] if measured else []),
        _FIGURES,
        _table(specs),
        *([f"## Settings of the calibration\n\n```json\n{json.dumps(settings, indent=1)}\n```\n"] if settings else []),
        (_LOADING_TOGETHER if together else _LOADING).format(
            classes=", predictor_class=CLASS" if classes else "",
            flag=" --predictor.class_path PACKAGE.CLASS" if classes else "",
        ),
    ]
    return "\n".join(parts)


def _tags(shape: ModelDims, metadata: Mapping[str, Any]) -> list[str]:
    """The model's family, where it is known, and what this is. A bundle of an OPT, or an older one, names no family."""
    family = metadata.get("family") or ("opt" if shape.stored().keys() <= OPT_SIZES else None)
    named = isinstance(family, str) and re.fullmatch(r"[a-z0-9_]+", family)
    return [*([str(family)] if named else []), "contextual-sparsity"]


def tagged(text: str, tags: Sequence[str]) -> str:
    r"""A card with more tags in its front matter.

    >>> tagged("tags:\n- contextual-sparsity\n---", ["mine"]).splitlines()[1:]
    ['- contextual-sparsity', '- "mine"', '---']
    """
    lines = "".join(f"- {json.dumps(tag)}\n" for tag in tags)
    return text.replace("- contextual-sparsity\n", f"- contextual-sparsity\n{lines}", 1)


def code(text: str) -> str:
    """``text`` on one line as a Markdown code span that it cannot end.

    >>> code("a"), code("a`b"), code("``"), code("")
    ('`a`', '`` a`b ``', '``` `` ```', '`  `')
    """
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence}{line}{fence}" if len(fence) == 1 and line.strip() else f"{fence} {line} {fence}"


def _text(text: Any) -> str:
    """Sentence on the text in the manifest of the activations. Bundles made without one may say anything."""
    if not isinstance(text, dict):
        return "not recorded" if text is None else code(str(text))
    source = text.get("source")
    said = "text that the model sampled itself"
    if source != "self":
        said = code(source if isinstance(source, str) else json.dumps(source))
    documents = text.get("documents")
    if isinstance(documents, dict):
        said += " (documents: " + ", ".join(f"{code(str(name))} {code(str(n))}" for name, n in documents.items()) + ")"
    return f"{said}, SHA-256 {code(str(text.get('sha256')))}"


def _table(specs: Mapping[UnitKey, PredictorSpec]) -> str:
    columns = ("layer", "target", "kind", "rank", "dtype", "reads", "candidates", "selected", "recall", "retained mass")
    rows = [columns]
    for layer, target in sorted(specs, key=lambda key: (TARGETS.index(key[1]), key[0])):
        spec = specs[UnitKey(layer, target)]
        cascade = spec.kind == "cascade" and not spec.dense
        selected = f"{spec.density:.3f}"
        candidates = ""
        if cascade:
            candidates = selected
            selected = f"{read_curve(spec.curve, spec.density)['selected']:.3f}" if spec.curve else ""
        quality = ("", "dense", "", "") if spec.dense else (
            candidates, selected, f"{spec.recall:.3f}", f"{spec.retained_mass:.3f}"
        )  # fmt: skip
        rank = "" if spec.kind == "custom" else str(spec.rank)
        rows.append((str(layer), target, spec.kind, rank, spec.dtype, f"{spec.site} {spec.site_layer}", *quality))
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table, headings first. Cells stay on one line, in one cell."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"
