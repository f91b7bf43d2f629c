"""Reported faults of files: saving over what is there, the process's defaults."""

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reported_case import ALL, GREEDY, IDS, Case, Row, refusal

from dejavu_train import Bundle
from dejavu_train.evaluation.report import write_results
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_json

# ------------------------------------------------------------------------------------ T6: saving over what is there


@contextlib.contextmanager
def limited(n_bytes: int) -> Iterator[None]:
    """With files of at most so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)


def a_save_that_fails(change: Callable[[Bundle], Any], room: int | None = None) -> Callable[[Case], Any]:
    """The error of a save over a bundle, and whether what was there is as it was."""

    def call(case: Case) -> Any:
        folder = case.own / "bundle"
        case.bundle.save_pretrained(folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        other = case.bundle.at(0.5, 0.5)
        change(other)
        error = None
        try:
            with limited(room) if room else contextlib.nullcontext():
                other.save_pretrained(folder)
        except (UserError, OSError) as refused:
            error = type(refused).__name__
        return error, before == {path.name: path.read_bytes() for path in folder.iterdir()}

    return call


def numbers_of_any_kind(case: Case) -> Any:
    """What is read of metadata with numbers of numpy and torch, after a save over the folder it was loaded from."""
    folder = case.own / "bundle"
    case.bundle.save_pretrained(folder)
    bundle = Bundle.from_pretrained(folder).at(torch.tensor(0.25), np.float32(0.5))
    bundle.metadata["numbers"] = {
        "count": np.int64(3), "share": np.float32(0.5), "flags": np.array([True]), "loss": torch.tensor(2.0),
        "path": Path("a/b"),
    }  # fmt: skip
    bundle.save_pretrained(folder)
    read = Bundle.from_pretrained(folder)
    return read.metadata["numbers"], round(read.mean_density("mlp"), 6), read.digest() == bundle.digest()


def results_that_find_no_room(case: Case) -> Any:
    write_results({"run": {"id": "first"}, "rows": []}, case.own)
    with contextlib.suppress(OSError), limited(1000):
        write_results({"run": {"id": "second"}, "rows": ["x" * 99] * 99}, case.own)
    return sorted(path.name for path in case.own.iterdir()), read_json(case.own / "results.json", "results")["run"][
        "id"
    ]


# ------------------------------------------------------------------------------------------ T8: a check at one door


def masks_of_other_values(backend: str) -> Callable[[Case], Any]:
    """The number of refused masks. Asserts that zeros and ones of every dtype are a mask."""

    def call(case: Case) -> Any:
        model = case.sparse(backend)
        ids = IDS.repeat(2, 1)
        mask = torch.ones_like(ids)
        mask[1, :2] = 0
        asked = {"forward": lambda m: model(ids, attention_mask=m).logits[:, -1]}
        asked["generate"] = lambda m: model.generate(input_ids=ids, attention_mask=m, **GREEDY)
        refused = []
        for name, door in asked.items():
            for value in (2, -1, 0.5, -1e9, float("nan")):
                other = mask.float() if isinstance(value, float) else mask.clone()
                other[0, 1] = value
                line = refusal(lambda other=other, door=door: door(other))
                refused.append((name, line is not None and "attention_mask must hold 0 for padding" in line))
            own = door(mask)
            assert all(torch.equal(door(mask.to(kind)), own) for kind in (torch.bool, torch.int32, torch.float32))
        return sum(done for _, done in refused)

    return call


def masks_of_the_engine(case: Case) -> Any:
    from dejavu_train.engine.request import padding_mask

    return refusal(lambda: padding_mask(IDS, IDS, case.dense().generation_config)) is not None


ROWS = (
    *(Row("T8", f"masks of other values, {name}", masks_of_other_values(name), 10) for name in ALL),
    Row("T8", "masks of other values, an engine by itself", masks_of_the_engine),
    Row("T6", "a set in metadata", a_save_that_fails(lambda b: b.metadata.update(a={1})), ("UserError", True)),
    Row("T6", "no room for tensors", a_save_that_fails(lambda b: None, 1000), ("OSError", True)),
    Row(
        "T6", "no room for bundle.json",
        a_save_that_fails(lambda b: b.metadata.update(a="x" * 300_000), 250_000), ("OSError", True),
    ),
    Row(
        "T6", "numpy numbers in metadata", numbers_of_any_kind,
        ({"count": 3, "share": 0.5, "flags": [True], "loss": 2.0, "path": "a/b"}, 0.25, True),
    ),
    Row("T6", "results without room", results_that_find_no_room, (["results.json"], "first")),
)  # fmt: skip
