"""Writes a model and its bundle into a folder: aside first, then file by file in place of what an earlier save left.

The folder may be the one that the model came from. Until everything is written nothing in it changes. Afterwards the
loader finds the old weights, the new ones or none at any moment, never some of both.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dejavu_train.bundle.artifact import CARD, Bundle
from dejavu_train.bundle.card import tagged
from dejavu_train.bundle.folder import METADATA, PREDICTORS_FOLDER
from dejavu_train.families import dims_of
from dejavu_train.families.base import SAVED_TOGETHER, dense_type
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_json, share, write_json, write_text
from dejavu_train.ground.signals import deferred
from dejavu_train.models.hub import check_repository, push
from dejavu_train.models.load import weight_hash
from dejavu_train.models.stored import INDEX, SINGLE, check_weights, shards

UPLOADS = ("private", "token", "revision", "create_pr", "commit_message", "commit_description")  # of push_to_hub
_SHARD = re.compile(r"model-\d{5}(-of-\d{5})?\.safetensors")


def save_together(dense: PreTrainedModel, bundle: Bundle, folder: Path, architecture: str, **options: Any) -> None:
    """Save ``dense`` and, in its folder ``predictors``, ``bundle``.

    Args:
        architecture: the class that config.json names.
        options: of ``save_pretrained`` of the dense class.
    Raises:
        UserError: a file in the folder's place, a model that its folder cannot hold, or one whose weights lie in
            the folder while it runs. The folder is as it was.
    """
    for name in ("variant", "distributed_checkpoint"):
        if options.pop(name, None):
            raise UserError(
                f"{architecture}.save_pretrained takes no {name}: it would not be loaded again; leave it out"
            )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"the output {folder} is a file; choose a folder")
    if "disk" in getattr(dense, "hf_device_map", {}).values() and weight_names(folder):
        raise UserError(f"parts of this model lie on disk, maybe in {folder}; save it into a folder without weights")
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder))
    try:
        _write(dense, bundle, aside, architecture, options)
        _check_places(aside, folder)
        with deferred():
            _replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):  # nothing was written
                folder.rmdir()


def push_together(
    model: Any, repo_id: str, results: str | Path | None, tags: Sequence[str], options: Mapping[str, Any]
) -> str:
    """Upload a sparse model, its bundle and a card. As ``SparseCausalLM.push_to_hub``.

    Raises:
        UserError: as there, and an option that nobody knows.
    """
    check_repository(repo_id)
    for name in options:
        if name not in (*UPLOADS, "max_shard_size"):
            raise UserError(
                f"push_to_hub takes no {name}; it takes results, tags, max_shard_size, {', '.join(UPLOADS)}"
            )
    text = tagged(model.bundle.card(repo_id, results, together=True), tags)
    given = {"commit_message": f"Upload {type(model).__name__}"} | dict(options)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=given.pop("max_shard_size", "50GB"))
        write_text(Path(folder) / CARD, text)
        return push(Path(folder), repo_id, "the model", **given)


def weight_names(folder: Path) -> set[str]:
    """The names of weight files in a folder that a loader takes, or that an earlier save left."""
    if not folder.is_dir():
        return set()
    names = {file.name for file in folder.iterdir() if file.name in (SINGLE, INDEX) or _SHARD.fullmatch(file.name)}
    if INDEX in names:
        with contextlib.suppress(UserError):  # an index that cannot be read names nothing
            names |= {part for part in shards(folder / INDEX) if (folder / part).is_file() and Path(part).name == part}
    return names


def _write(dense: PreTrainedModel, bundle: Bundle, aside: Path, architecture: str, options: dict[str, Any]) -> None:
    dense.save_pretrained(aside, **options)
    config = read_json(aside / "config.json", "the model's config")
    shape, kind = dims_of(config), dense_type(config["model_type"])
    try:
        check_weights(str(aside), config, shape)
    except UserError as error:
        raise UserError(
            f"an {kind.upper()}'s folder cannot hold this model: {str(error).replace(str(aside), 'it')}; merge adapters"
            " (peft: merge_and_unload) and take off parametrisations first"
        ) from None
    write_json(aside / "config.json", config | {"model_type": SAVED_TOGETHER + kind, "architectures": [architecture]})
    if not bundle.specs:
        return
    digest = weight_hash(str(aside), bundle.weight_hash.startswith("full:"))
    saved = dataclasses.replace(bundle, model=str(aside), weight_hash=digest, shape=shape)
    saved.save_pretrained(aside / PREDICTORS_FOLDER)


def _check_places(aside: Path, folder: Path) -> None:
    """Raise :class:`UserError` where a folder stands in a file's place, or a file in that of the bundle's folder."""
    for path in sorted(aside.rglob("*")):
        place = folder / path.relative_to(aside)
        if place.is_dir() != path.is_dir() and os.path.lexists(place):
            kind = "folder" if place.is_dir() else "file"
            raise UserError(f"{place} is a {kind}, in the place of what is saved; move it away, or save elsewhere")


def _replace(aside: Path, folder: Path) -> None:
    """Weights take their places before what an earlier save left is removed. ``bundle.json`` goes first, comes last."""
    before = weight_names(folder)
    new = {file.name for file in aside.iterdir() if file.is_file()}
    for name in new:
        with open(aside / name, "r+b") as written:  # Windows writes out no file that is open for reading alone
            os.fsync(written.fileno())
        share(aside / name)
    predictors, coming = folder / PREDICTORS_FOLDER, aside / PREDICTORS_FOLDER
    if coming.is_dir():
        predictors.mkdir(exist_ok=True)
    (predictors / METADATA).unlink(missing_ok=True)
    if INDEX in new:
        (folder / INDEX).unlink(missing_ok=True)  # it would name new shards among the old
    for name in sorted(new, key=lambda name: (not name.endswith(".safetensors"), name != INDEX, name)):
        os.replace(aside / name, folder / name)
    for name in before - new:
        (folder / name).unlink()
    for file in sorted(coming.glob("*"), key=lambda file: file.name == METADATA):
        os.replace(file, predictors / file.name)
