"""Mutates one file of a finished run at a time and looks what becomes of it.

    python -m benchmarks.mutations --count 1000 --seed 0 --out benchmarks/results/mutations.jsonl

A mutation changes a byte, cuts the file, or leaves out a key. Or it replaces a value of JSON or YAML by another one, or
by one of another type. Then the commands are called as before: train.py goes on in the folder, and what infer.py does
with model and bundle is done. It must end in one of

    refused      one line, exit 2
    reported     a changed configuration: the log says what is made anew, and because of which key
    same         the bundle is the same, byte for byte, and so are tokens, logits and what is generated

Anything else (``different``, ``traceback``, another exit code, no end within two minutes of CPU time) is a defect and
stands in the row. A row is appended for every fifty mutations, with the same seed and file the command goes on behind
the rows that are there.
"""

import collections
import contextlib
import copy
import hashlib
import io
import json
import logging
import os
import random
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

os.environ["HF_HUB_OFFLINE"] = "1"  # where a mutated name could be one of the hub, nobody is asked

from benchmarks.rows import command_line, made_now
from benchmarks.tiny_run import bundle_bytes, flags, make_inputs
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.evaluation.check import check
from dejavu_train.evaluation.config import InferConfig
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.models.opt import load_tokenizer
from dejavu_train.run.command import main as train
from dejavu_train.sparse.model import SparseOPTForCausalLM

VALUES: list[Any] = [None, True, -1, 0, 3, 3.5, 1e300, float("nan"), "x", "", [], {}, [1], {"a": 1}]
KINDS = {
    "config": "run.yaml", "bundle": "run/bundle/*", "manifest": "run/activations/*.json",
    "shards": "run/activations/layer_*/*", "run": "run/run.json", "predictors": "run/predictors/layer_*/*/*[jr]s*",
    "model": "model/*",
}  # fmt: skip
SUFFIXES = (".yaml", ".json", ".h5", ".safetensors")
SENTENCE = "the model reads a token and each layer keeps those rows"
ROW_OF = 50
LONGEST_CPU_SECONDS = 120


def mutated(path: Path, draw: random.Random) -> tuple[bytes, str]:
    """The file's bytes with one change, and what it is."""
    data = path.read_bytes()
    structured = path.suffix in (".json", ".yaml")
    kind = draw.choice(["byte", "cut"] + ["value", "key"] * 3 if structured else ["byte"] * 3 + ["cut"])
    if kind in ("value", "key"):
        whole = yaml.safe_load(data) if path.suffix == ".yaml" else json.loads(data)
        changed = copy.deepcopy(whole)
        inside, names = changed, []
        while True:
            key = draw.choice(list(range(len(inside))) if isinstance(inside, list) else list(inside))
            names.append(str(key))
            if not isinstance(inside[key], (dict, list)) or not inside[key] or draw.random() < 0.3:
                break
            inside = inside[key]
        if kind == "key":
            del inside[key]
        else:
            inside[key] = draw.choice(VALUES)
        text = yaml.safe_dump(changed) if path.suffix == ".yaml" else json.dumps(changed)
        return text.encode(), f"{kind} {'.'.join(names)}" + (f" = {inside[key]}" if kind == "value" else "")
    if kind == "cut":
        place = draw.randrange(len(data))
        return data[:place], f"cut at {place}"
    place, bit = draw.randrange(len(data)), draw.randrange(8)
    return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :], f"bit {bit} of byte {place}"


class Run:
    """A finished tiny run in ``folder``: model, text, run.yaml and the run itself, restored before every mutation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model, text = make_inputs(folder)
        short = ("--mlp.steps=6", "--heads.steps=6", "--mlp.validations=1", "--heads.validations=1", "--tune.steps=0")
        argv = [*flags(model, text, folder / "run", *short), "--calibrate.sensitivity_tokens=0"]
        values: dict[str, Any] = {}
        for name, _, value in (flag[2:].partition("=") for flag in argv):
            *outer, last = name.split(".")
            section = values
            for key in outer:
                section = section.setdefault(key, {})
            section[last] = yaml.safe_load(value)
        (folder / "run.yaml").write_text(yaml.safe_dump(values))
        self.argv = ["--config", str(folder / "run.yaml")]
        assert exit_on_user_error(train, self.argv) == 0
        self.bundle = bundle_bytes(folder / "run")
        self.parts = ("run", "model", "run.yaml", "text.txt")
        for name in self.parts:
            (folder / name).rename(folder / f"whole-{name}")
        self.restore()
        self.answers = self.infer()

    def restore(self) -> None:
        for path in self.folder.iterdir():
            if not path.name.startswith("whole-"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in self.parts:
            whole = self.folder / f"whole-{name}"
            if whole.is_dir():
                shutil.copytree(whole, self.folder / name, ignore=shutil.ignore_patterns("csv", ".holders"))
            else:
                shutil.copy(whole, self.folder / name)

    def infer(self) -> str:
        """A digest of what infer.py reads and reckons: tokens, logits of every position, and text that goes on."""
        model, bundle = str(self.folder / "model"), str(self.folder / "run/bundle")
        check(InferConfig(model=model, bundle=bundle, text=str(self.folder / "text.txt"), timing=False, window=64))
        read = Bundle.from_pretrained(bundle)
        read.check_model(model)
        ids = torch.tensor([load_tokenizer(model)(SENTENCE)["input_ids"]])
        sparse = SparseOPTForCausalLM.from_pretrained(model, read, backend="mask")
        with torch.no_grad():
            logits = sparse(ids).logits
        written = sparse.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        parts = (ids.numpy(), logits.numpy(), written.numpy())
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    def outcome(self, kind: str) -> str:
        """What the commands make of the files as they are now. See the head of this file."""
        if kind != "bundle":  # train.py writes a damaged bundle anew: tests/test_pipeline.py
            code, said = called(lambda: exit_on_user_error(train, [*self.argv, *self.again(kind)]))
            if code != 0:
                return code_of(code, said)
            name = "bundle" if kind == "config" else "again"
            if self.read(name) != self.bundle:
                return "reported" if kind == "config" and " anew" in said else "different: " + said[-200:]
        answers: list[str] = []
        code, said = called(lambda: exit_on_user_error(lambda _: answers.append(self.infer())))
        if code != 0:
            return code_of(code, said)
        if answers != [self.answers] and not (kind == "config" and " anew" in said):
            return "different answers"
        return "same"

    def again(self, kind: str) -> list[str]:
        """Damaged parts of a run are read for a bundle of another name. A changed configuration, for the same one."""
        return [] if kind == "config" else ["--bundle=again"]

    def read(self, bundle: str) -> tuple[bytes, ...]:
        names = ("bundle.json", "predictors.safetensors")
        return tuple((self.folder / "run" / bundle / name).read_bytes() for name in names)


def called(work: Callable[[], int]) -> tuple[int | str, str]:
    """The exit code, or the last line of a traceback, and what was logged and printed."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = logging.getLogger("dejavu_train")
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), limited():
            return work(), said.getvalue()
    except BaseException:
        return "traceback " + " ".join(traceback.format_exc(limit=-2).split())[-300:], said.getvalue()
    finally:
        logger.removeHandler(handler)


def code_of(code: int | str, said: str) -> str:
    if code in (130, 143):  # somebody wants us to end, not the command
        raise SystemExit(code)
    if code == 2 and said.count("error: ") == 1:
        return "refused"
    return code if isinstance(code, str) else f"code {code}: {said[-200:]}"


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise where the block takes too long, counted in CPU time: the machine may be busy with other things."""

    def hung(*_: object) -> None:
        raise RuntimeError(f"no end within {LONGEST_CPU_SECONDS} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, hung)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def mutate(run: Run, count: int, seed: int, first: int = 0) -> dict[str, Any]:
    """Mutate ``count`` times, the mutations with the numbers ``first`` and up. Counts by kind, and what went wrong."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    wrong: list[str] = []
    for number in range(first, first + count):
        draw = random.Random(f"{seed} {number}")
        kind = list(KINDS)[number % len(KINDS)]
        run.restore()
        path = draw.choice(sorted(p for p in run.folder.glob(KINDS[kind]) if p.suffix in SUFFIXES))
        data, what = mutated(path, draw)
        path.unlink()
        path.write_bytes(data)
        result = run.outcome(kind)
        name = result.split()[0].rstrip(":")
        counts[kind][name] += 1
        if name not in ("refused", "reported", "same"):
            wrong.append(f"{number}: {kind}: {path.relative_to(run.folder)}: {what}: {' '.join(result.split())}")
    return {"seed": seed, "first": first, "count": count, "found": counts, "wrong": wrong}


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    rows = []
    if options.out and options.out.is_file():
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    done = sum(row["count"] for row in rows if row["seed"] == options.seed and row["first"] >= options.first)
    quiet_logs()
    out = options.out and options.out.absolute()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # a mutated path may be a relative one
        run = Run(Path(folder))
        for first in range(options.first + done, options.first + options.count, ROW_OF):
            row = mutate(run, min(ROW_OF, options.first + options.count - first), options.seed, first)
            line = json.dumps(row | {"torch": torch.__version__} | made_now("dejavu_train"))
            print(line, flush=True)
            if out:
                with open(out, "a") as file:
                    file.write(line + "\n")


def quiet_logs() -> None:
    """Our own log goes to what :func:`called` collects. Libraries' logs nowhere."""
    logging.getLogger().handlers = [logging.NullHandler()]
    logging.getLogger("dejavu_train").setLevel(logging.INFO)


if __name__ == "__main__":
    main()
