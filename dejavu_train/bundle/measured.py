"""The part of a card that ``infer.py`` measured: perplexities of the bundle as calibrated, and times."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dejavu_train.bundle.folder import METADATA
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_json
from dejavu_train.models.hub import looks_local

_SCHEMA = 3  # of results.json


def measured_rows(folder: str | Path, weight_hash: str, specs: Iterable[PredictorSpec]) -> dict[str, list[list[str]]]:
    """By title the rows of ``results.json``, headings first, of a bundle with these predictors.

    Args:
        folder: in which ``infer.py`` left its results.
        weight_hash: of the model.
        specs: of the bundle.
    Raises:
        UserError: no results, of another schema, of other weights or of another bundle, or no row as calibrated.
    """
    found = read_json(Path(folder) / "results.json", "results.json (python infer.py writes it)")
    if not isinstance(found, dict) or found.get("schema") != _SCHEMA:
        raise UserError(f"{folder}/results.json is not of schema {_SCHEMA}; make it anew with infer.py")
    if not weight_hash.startswith("full:") and found["hashes"]["model"] != weight_hash:
        raise UserError(f"{folder}/results.json was measured with other weights; run infer.py with this bundle")
    metadata = Path(str(found["bundle"])) / METADATA
    if metadata.is_file():
        ours = json.loads(json.dumps([dataclasses.asdict(spec) for spec in specs]))
        if read_json(metadata, "the bundle").get("predictors") != ours:
            raise UserError(f"{folder}/results.json was measured with another bundle; run infer.py with this one")
    elif looks_local(str(found["bundle"])):
        raise UserError(f"{folder}/results.json names a bundle that is gone, {found['bundle']}; run infer.py anew")
    quality = list(_quality(found["quality"], {text["name"]: text for text in found["texts"]}))
    if not quality:
        raise UserError(f"{folder}/results.json has no row of the bundle as calibrated; run infer.py with --text")
    headings = ["text", "tokens", "dense perplexity", "sparse perplexity", "increase", "+-", "neurons selected"]
    tables = {"Quality": [headings, *quality]}
    if found["timing"]:
        times = [
            [row["backend"], row["device"], str(row["batch"]), f"{row['ms_per_token']['p50']:.3g}"]
            for row in found["timing"]
        ]
        tables["Time"] = [["backend", "device", "rows", "ms a token"], *times]
    return tables


def _quality(rows: Sequence[Mapping[str, Any]], texts: Mapping[str, Any]) -> Iterable[list[str]]:
    """Rows of a table: each text as calibrated, sparse from the first position on, beside the dense one."""
    dense = {row["text"]: row["perplexity"] for row in rows if row["selection"] == "dense"}
    for row in rows:
        if row["selection"] == "predicted" and row["as_calibrated"] and not row["sparse_from"]:
            name, shares = row["text"], (row["increase"], row["increase_error"], row["mlp_selected"])
            numbers = [f"{dense[name]:.5g}" if name in dense else "", f"{row['perplexity']:.5g}"]
            percents = ["" if share is None else f"{100 * share:.3g} %" for share in shares]
            yield [name, str(texts[name]["tokens"]), *numbers, *percents]
