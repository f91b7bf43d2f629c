"""Mutates one file of a finished run at a time and looks what becomes of it.

    python -m benchmarks.mutations --count 1000 --seed 0 --out benchmarks/results/mutations.jsonl

Each mutation is one of: a byte changed, the file cut, a JSON value replaced by another one or by another type, a key
left out. Then train.py calibrates from the run once more, into a bundle of another name, and infer's reader reads the
bundle. Each mutation must be refused (one line, exit 2), or leave the new bundle as it was, byte for byte (what was
damaged was made anew, or is not read).
"""

import argparse
import collections
import contextlib
import copy
import io
import json
import logging
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tiny_run import flags, make_inputs
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.cli import main as train
from dejavu_train.errors import exit_on_user_error

VALUES: list[Any] = [None, True, -1, 0, 3, 3.5, 1e300, float("nan"), "x", "", [], {}, [1], {"a": 1}]
KINDS = {
    "bundle": "bundle/*", "manifest": "activations/*.json", "shards": "activations/layer_*/*", "run": "run.json",
    "predictors": "predictors/layer_*/*/*[jr]s*", "model": "model/*",
}  # fmt: skip


def mutated(path: Path, draw: random.Random) -> tuple[bytes, str]:
    """The file's bytes with one change, and what it is."""
    data = path.read_bytes()
    kind = draw.choice(["byte", "cut"] + ["value", "key"] * 3 if path.suffix == ".json" else ["byte"] * 3 + ["cut"])
    if kind in ("value", "key"):
        whole = json.loads(data)
        value = copy.deepcopy(whole)
        inside = value
        while True:
            keys = list(range(len(inside))) if isinstance(inside, list) else list(inside)
            key = draw.choice(keys)
            if not isinstance(inside[key], (dict, list)) or not inside[key] or draw.random() < 0.3:
                break
            inside = inside[key]
        if kind == "key":
            del inside[key]
        else:
            inside[key] = draw.choice(VALUES)
        return json.dumps(value).encode(), f"{kind} {key}"
    if kind == "cut":
        return data[: draw.randrange(len(data))], "cut"
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :], f"byte {place}"


def outcome(argv: Sequence[str], output: Path, reference: tuple[bytes, bytes]) -> str:
    """refused, same, different, or traceback with its last line."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = exit_on_user_error(train, argv)
            if code == 0:
                Bundle.from_pretrained(output / "again")
    except ValueError as error:
        return "refused" if type(error).__name__ == "UserError" else "traceback " + traceback.format_exc(limit=-1)
    except BaseException:
        return "traceback " + traceback.format_exc(limit=-1)
    if code:
        return "refused" if errors.getvalue().count("error: ") == 1 else f"code {code}"
    contents = [(output / "again" / name).read_bytes() for name in ("bundle.json", "predictors.safetensors")]
    return "same" if tuple(contents) == reference else "different"


def mutate(count: int, seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Mutate so many times, or for so long; returns counts by kind and outcome, and what went wrong."""
    draw = random.Random(seed)
    logging.disable(logging.CRITICAL)
    model, text = make_inputs(folder)
    whole = folder / "whole"
    shutil.move(model, folder / "model-0")
    short = ("--mlp.steps=6", "--heads.steps=6", "--mlp.validations=1", "--heads.validations=1")
    argv = [*flags(folder / "model", text, folder / "run", *short), "--calibrate.sensitivity_tokens=0"]
    shutil.copytree(folder / "model-0", folder / "model")
    assert exit_on_user_error(train, argv) == 0 and exit_on_user_error(train, [*argv, "--bundle=again"]) == 0
    names = ("bundle.json", "predictors.safetensors")
    reference = tuple((folder / "run/again" / name).read_bytes() for name in names)
    shutil.rmtree(folder / "run/again")
    shutil.move(folder / "run", whole)
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    wrong: list[str] = []
    until = time.monotonic() + seconds
    for number in range(count):
        if time.monotonic() > until:
            break
        kind = list(KINDS)[number % len(KINDS)]
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.rmtree(folder / "model")
        shutil.copytree(folder / "model-0", folder / "model")
        shutil.copytree(whole, folder / "run", ignore=shutil.ignore_patterns("csv", ".holders"))
        base = folder if kind == "model" else folder / "run"
        files = sorted(p for p in base.glob(KINDS[kind]) if p.suffix in (".json", ".h5", ".safetensors"))
        path = draw.choice(files)
        data, what = mutated(path, draw)
        path.unlink()
        path.write_bytes(data)
        if kind == "bundle":  # what infer.py does
            result = outcome_of_bundle(folder / "run/bundle")
        else:
            result = outcome([*argv, "--bundle=again"], folder / "run", reference)
        found[kind][result.split()[0]] += 1
        if result.split()[0] not in ("refused", "same"):
            wrong.append(f"{kind}: {path.relative_to(folder)}: {what}: {' '.join(result.split())[-200:]}")
    logging.disable(logging.NOTSET)
    return {"count": sum(sum(c.values()) for c in found.values()), "seed": seed, "found": found, "wrong": wrong}


def outcome_of_bundle(folder: Path) -> str:
    """Of a bundle that infer.py reads."""
    return "refused" if exit_quietly(lambda _: Bundle.from_pretrained(folder)) else "same"


def exit_quietly(read: Any) -> int:
    with contextlib.redirect_stderr(io.StringIO()):
        return exit_on_user_error(read)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = mutate(options.count, options.seed, Path(folder), options.seconds)
    row = json.dumps(found | {"date": time.strftime("%Y-%m-%d")})
    print(json.dumps(found, indent=1))
    if options.out:
        with open(options.out, "a") as file:
            file.write(row + "\n")


if __name__ == "__main__":
    main()
