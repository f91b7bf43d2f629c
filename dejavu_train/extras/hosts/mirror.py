"""Keeps what a run makes in a store as well: ``train.py --store s3://bucket/run``. Other hosts go on from there.

    activations/    uploaded when they are complete, read from there where they are not here, file by file
    predictors/     a finished predictor each, fetched before training and before calibration
    BUNDLE/         the bundle

What says that something is complete travels last. What a stage's identity or a digest does not fit is made anew or
refused, as it is in a folder.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from dejavu_train.data.shards import MANIFEST, STATISTICS, file_digests, is_marked
from dejavu_train.extras.hosts.store import Store, mark, marked_address
from dejavu_train.families import UnitKey
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.locks import locked
from dejavu_train.training.config import RunConfig
from dejavu_train.training.job import claimed, job_folder

logger = logging.getLogger(__name__)
ACTIVATIONS, PREDICTORS, BUNDLE = "activations", "predictors", "bundle.json"
PREDICTOR = ("predictor.safetensors", "stage.json", "config.yaml", "predictor.json")  # the last makes it one


def pull(config: RunConfig) -> None:
    """Fetch what the store has and the folder has not: predictors, the bundle, what describes the activations.

    Raises:
        UserError: the store holds activations of another run.
    """
    if config.store is None:
        return
    store, output = Store(config.store), Path(config.output)
    with locked(output / ".holders" / "store"):
        names = store.sizes()
        activations = output / ACTIVATIONS
        if f"{ACTIVATIONS}/{STATISTICS}" in names and not (activations / STATISTICS).is_file():
            _check_same(store, activations)
            store.get(output, [f"{ACTIVATIONS}/{MANIFEST}"])
            store.get(output, [f"{ACTIVATIONS}/{STATISTICS}"])
            mark(activations, store, ACTIVATIONS)
        finished = [name for name in names if name.startswith(f"{PREDICTORS}/") and name.endswith(f"/{PREDICTOR[-1]}")]
        for folder in [name.rpartition("/")[0] for name in finished]:
            with claimed(output / folder) as free:
                if free and not (output / folder / "stage.json").is_file():  # nothing of it was begun here
                    _get(store, output, folder, names, PREDICTOR[-1])
        if f"{config.bundle}/{BUNDLE}" in names and not (output / config.bundle / BUNDLE).is_file():
            _get(store, output, config.bundle, names, BUNDLE)


def _get(store: Store, output: Path, folder: str, names: Iterable[str], last: str) -> None:
    files = [name for name in names if name.rpartition("/")[0] == folder]
    store.get(output, [name for name in files if not name.endswith(f"/{last}")])
    store.get(output, [f"{folder}/{last}"])
    logger.info("%s: from %s", folder, store.address)


def push_activations(config: RunConfig) -> None:
    """Upload complete activations, unless they are there.

    Raises:
        UserError: the store holds activations of another run.
    """
    activations = Path(config.output) / ACTIVATIONS
    if config.store is None:
        return
    store = Store(config.store)
    if is_marked(activations) and marked_address(activations) != f"{store.address}/{ACTIVATIONS}":
        raise UserError(
            f"{activations} lies in the store {marked_address(activations)}, not in {store.address}; give that --store,"
            " or choose another --output"
        )
    with locked(activations / ".holders", "another process uploads the activations; waiting for it"):
        if is_marked(activations):
            return
        there = store.sizes()
        if f"{ACTIVATIONS}/{MANIFEST}" in there:
            _check_same(store, activations)
        store.put(activations.parent, [f"{ACTIVATIONS}/{MANIFEST}"])
        files = {f"{ACTIVATIONS}/{name}": activations / name for name in file_digests(activations) if name != MANIFEST}
        missing = [name for name, path in files.items() if there.get(name) != path.stat().st_size]
        logger.info("uploading %d of %d files of the activations to %s", len(missing), len(files), store.address)
        store.put(activations.parent, missing)
        store.put(activations.parent, [f"{ACTIVATIONS}/{STATISTICS}"])
        mark(activations, store, ACTIVATIONS)


def push_predictor(config: RunConfig, job: UnitKey) -> None:
    """Upload a finished predictor, unless it is there."""
    _push(config, (job_folder(config.output, job) / name for name in PREDICTOR))


def push_bundle(config: RunConfig) -> None:
    """Upload the bundle, unless it is there."""
    files = [path for path in (Path(config.output) / config.bundle).iterdir() if path.is_file()]
    _push(config, sorted(files, key=lambda path: path.name == BUNDLE))


def _push(config: RunConfig, paths: Iterable[Path]) -> None:
    if config.store is None:
        return
    *others, last = [path.relative_to(config.output).as_posix() for path in paths]
    store = Store(config.store)
    if not store.has(last, (Path(config.output) / last).read_bytes()):
        store.put(Path(config.output), others)
        store.put(Path(config.output), [last])


def _check_same(store: Store, activations: Path) -> None:
    path = activations / MANIFEST
    if path.is_file() and not store.has(f"{ACTIVATIONS}/{MANIFEST}", path.read_bytes()):
        raise UserError(
            f"{store.address} holds activations of another run than {activations}; choose another --store or --output"
        )
