"""Several processes of one host collect by layers, each a range of the shards. Files hand the plan over to them.

activations/parts.json   the model and how it runs
activations/parts.npz    ids (tokens,) int32, and of each window its length, document and shard
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from dejavu_train.data.collect_layers import STREAM, collect_by_layers
from dejavu_train.data.config import CollectConfig
from dejavu_train.data.recording import Recording
from dejavu_train.data.shards import ActivationManifest
from dejavu_train.data.windows import Window
from dejavu_train.ground.files import read_json, replacing, write_json
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.models.load import resolve_device

ABOUT, PLAN = "parts.json", "parts.npz"


def write_parts(recording: Recording, model: str, revision: str | None) -> None:
    """Hand the plan of a recording over, whose manifest is saved."""
    windows = recording.windows
    shards = [np.full(len(each), entry.index) for entry, each in recording.planned]
    with replacing(recording.activations / PLAN) as path, path.open("wb") as file:
        np.savez(
            file,
            ids=np.concatenate([window.ids for window in windows]).astype(np.int32),
            length=np.array([len(window.ids) for window in windows]),
            document=np.array([window.document for window in windows]),
            shard=np.concatenate(shards),
        )
    about = {"model": model, "revision": revision, "collect": dataclasses.asdict(recording.config)}
    write_json(recording.activations / ABOUT, about)


def record_part(activations: Path, number: int, count: int) -> None:
    """Record what is missing of the part ``number`` of ``count``."""
    about = read_json(activations / ABOUT, "the plan of collecting")
    config = CollectConfig(**about["collect"])
    whole = _read_plan(activations, config)
    own = [entry for i, (entry, _) in enumerate(whole.planned) if i * count // len(whole.planned) == number]
    missing = set(whole.missing) & set(own)
    if missing:
        walk = LayerWalk(about["model"], resolve_device(config.device), config.dtype, about["revision"])
        collect_by_layers(walk, dataclasses.replace(whole, missing=missing, part=(number, count)))


def remove_parts(activations: Path) -> None:
    """Remove what handed the plan over, and streams that processes left behind that ended early: of parts, or alone."""
    for path in (activations / ABOUT, activations / PLAN):
        path.unlink(missing_ok=True)
    for folder in (activations / STREAM, *activations.glob(f"{STREAM}-*")):
        if folder.is_dir():
            shutil.rmtree(folder)


def _read_plan(activations: Path, config: CollectConfig) -> Recording:
    manifest = ActivationManifest.load(activations)
    with np.load(activations / PLAN, allow_pickle=False) as stored:
        plan: dict[str, Any] = {name: stored[name] for name in stored.files}
    ids = np.split(plan["ids"], np.cumsum(plan["length"])[:-1])
    windows = [Window(int(document), each) for document, each in zip(plan["document"], ids, strict=True)]
    of_shard = {entry.index: (entry, list[Window]()) for entry in manifest.shards}
    for shard, window in zip(plan["shard"], windows, strict=True):
        of_shard[int(shard)][1].append(window)
    missing = set(manifest.missing(activations))
    return Recording(manifest, list(of_shard.values()), missing, config, activations)
