"""The schema of results.json, and how a file of the schema before reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_json

SCHEMA = 3
_RENAMED = {  # part -> name in schema 2, name now: the same name stood for candidates in one part, selected in another
    "quality": {
        "mlp_candidate_density": "mlp_candidates",
        "mlp_density": "mlp_selected",
        "head_density": "head_selected",
    },
    "layers": {"density": "selected"},
    "timing": {"mlp_density": "asked_mlp_density", "head_density": "asked_head_density"},
}


def current(found: Mapping[str, Any]) -> dict[str, Any]:
    """A results.json of schema 2 with the names of schema 3. Others stay as they are.

    >>> current({"schema": 2, "layers": [{"density": 0.1, "recall": 0.9}]})
    {'schema': 3, 'layers': [{'selected': 0.1, 'recall': 0.9}]}
    """
    if found.get("schema") != 2:
        return dict(found)
    renamed = {
        part: [{names.get(name, name): value for name, value in row.items()} for row in found[part]]
        for part, names in _RENAMED.items()
        if part in found
    }
    return {**found, "schema": SCHEMA, **renamed}


def read_current(folder: Path) -> dict[str, Any]:
    """The results.json of a folder, with the names of the present schema.

    Raises:
        UserError: no such file, or one of another schema.
    """
    stored = read_json(folder / "results.json", "results.json (python infer.py writes it)")
    if not isinstance(stored, dict) or stored.get("schema") not in (2, SCHEMA):
        raise UserError(f"{folder / 'results.json'} is not of schema 2 or {SCHEMA}; make it anew with infer.py")
    return current(stored)
