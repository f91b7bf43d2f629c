"""One model all the way on a machine with some GPUs: pretrained, sparsified, quantised, and measured.

    python -m benchmarks.texts prepare --data DATA                        the eight texts and train_docs.jsonl, in .data
    python -m benchmarks.one_model --data DATA --out OUTPUT_FOLDER        the whole run; begun before, it goes on

DATA holds general_train.jsonl.xz, books_train_*.jsonl.xz, or token ids of both as pretraining reads them, and the files
of the tasks in tasks/. Stages:

    pretrain      torchrun on all GPUs; a held-out text stops it early
    predictors    train.py: own text, collecting, training on all GPUs, calibration. Then GPTQ
    measure       a process a GPU: `dejavu evidence`, and rows of real text in each kind of weights

OUTPUT_FOLDER gets evidence/, real-rows.csv, logs, and times.csv: every process, its exit code and seconds.
one_model.json has the results of evidence, and how the model was pretrained. Predictors read what attention reads, as
one kernel for all layers asks of them.

Rehearsal: `--scale tiny --device cpu --gpus 2 --work /tmp/w --out /tmp/o`
In a hurry: `--set pretrain_seconds=300 own_tokens=90000 --quantize=--quantizer=rtn --only evidence`
"""

import argparse
import dataclasses
import os
import queue
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.rows import ROOT, SCORE, STEP, command_line, made_now
from benchmarks.texts import TEXTS
from dejavu_train.ground.files import read_json, write_json

DENSITY = 0.1  # of the neurons, at which the bundle is calibrated
HELDOUT = ("general", "books", "docs")  # the first one stops pretraining
PROMPTS = ("general", "docs", "wikitext", "code")  # texts that are continued
SHOWN = ("rows", "versions", "machine", "seconds")  # of the results of evidence
CALL = [sys.executable, "-m"]


@dataclasses.dataclass(frozen=True)
class Scale:
    """A model, and how much is done with it."""

    d_model: int
    n_layers: int
    n_heads: int
    d_ffn: int
    learning_rate: float
    micro_rows: int
    rank: int
    rows: int = 128  # sequences of a step
    context: int = 1024
    warmup_steps: int = 60
    own_tokens: int = 200_000  # that the model writes and that are recorded
    steps: int = 1000  # of each predictor
    text_tokens: int = 30_000  # of each text
    questions: int = 300  # of each task
    prompt: int = 128
    pretrain_seconds: float = 540.0

    def changed(self, words: Sequence[str]) -> "Scale":
        """The scale with other values, of words name=value."""
        given = dict(word.split("=") for word in words)
        return dataclasses.replace(self, **{name: type(getattr(self, name))(each) for name, each in given.items()})


SCALES = {
    "tiny": Scale(
        128, 2, 4, 512, 3e-3, 2, 16, rows=4, context=128, warmup_steps=4, own_tokens=16_000, steps=20,
        text_tokens=1500, questions=6, prompt=32, pretrain_seconds=40.0,
    ),
    "100m": Scale(768, 12, 12, 3072, 2e-3, 32, 128),
    "350m": Scale(1024, 24, 16, 4096, 1.2e-3, 16, 128),
    "1.3b": Scale(2048, 24, 32, 8192, 8e-4, 8, 128),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """A process of the measurements."""

    name: str
    command: list[str]


class Run:
    """The folders and the processes of a run.

    Args:
        options: those of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.scale = options, SCALES[options.scale].changed(options.set)
        self.work, self.rows, self.texts = Path(options.work), Path(options.out), Path(options.texts)
        name, self.mine = f"opt-{options.scale}", self.work / "mine"
        self.model, self.int4 = self.work / name, self.work / "int4" / name  # rows say the name
        self.bundle, self.int4_bundle = self.mine / "bundle", self.work / "int4-bundle"
        self.visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(options.gpus)))).split(",")
        self.rows.mkdir(parents=True, exist_ok=True)
        self.began, self._lock = time.monotonic(), threading.Lock()

    def step(self, name: str, command: Sequence[str], gpus: Sequence[int] | None = None) -> int:
        """Run a process to its end. Its output goes to a log, its exit code and time to times.csv."""
        began = time.monotonic()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        if gpus is not None and self.options.device == "cuda":
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(self.visible[gpu] for gpu in gpus)}
        with (self.rows / f"{name}.log").open("ab") as log:
            code = subprocess.run(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
            ).returncode
        taken = time.monotonic() - began
        with self._lock, (self.rows / "times.csv").open("a", encoding="utf-8") as file:
            file.write(f"{self.options.scale},{name},{code},{began - self.began:.0f},{taken:.0f}\n")
        last = (self.rows / f"{name}.log").read_text("utf-8", "replace").strip().splitlines()[-1:]
        print(f"{name}: exit {code} after {taken:.0f} s{f'; {last}' if code else ''}", flush=True)
        return code

    def pretrain(self) -> None:
        """Train the model on all GPUs."""
        if (self.model / "pretraining.json").is_file():
            return
        scale, options = self.scale, self.options
        self.model.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "checkpoints/opt-mini" / name, self.model)
        data = Path(options.data)
        texts = [*data.glob("books_train_*"), *data.glob("general_train.*"), *self.texts.glob("train_docs.*")]
        command = [*self.together(options.gpus), "-m", "dejavu_train.extras.pretrain", f"--output={self.model}"]
        command += ["--text", *map(str, sorted(texts))]
        command += ["--heldout", *(str(self.texts / f"{name}.jsonl") for name in HELDOUT)]
        sizes = {name: getattr(scale, name) for name in ("d_model", "n_layers", "n_heads", "d_ffn", "context")}
        settings = {
            "learning_rate": scale.learning_rate, "batch_rows": scale.rows, "micro_rows": scale.micro_rows,
            "warmup_steps": scale.warmup_steps, "device": options.device, "checkpoint_seconds": 100_000,
            "compile": "true" if options.device == "cuda" else "false", "patience": 3, "validation_steps": 50,
            "seconds": scale.pretrain_seconds,
        }  # fmt: skip
        self.step("pretrain", [*command, *(f"--{name}={value}" for name, value in {**sizes, **settings}.items())])

    @staticmethod
    def together(gpus: int) -> list[str]:
        """The command that starts a process for each GPU."""
        return [*CALL, "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]

    def predictors(self) -> None:
        """Own text, collecting, training on all GPUs, calibration. Then GPTQ on the same text."""
        scale, on_gpu = self.scale, self.options.device == "cuda"
        text = [f"--text.cache={self.work / 'text'}", f"--text.sample.tokens={scale.own_tokens}"]
        if not (self.bundle / "bundle.json").is_file():
            self.step("predictors", [
                sys.executable, str(ROOT / "train.py"), f"--config={ROOT / 'configs/base.yaml'}",
                f"--model={self.model}", f"--output={self.mine}", *text, "--collect.window=512",
                "--collect.train_tokens=null", "--collect.val_tokens=null", "--collect.calibration_tokens=null",
                f"--collect.dtype={'float16' if on_gpu else 'float32'}", f"--mlp.rank={scale.rank}",
                f"--mlp.steps={scale.steps}", "--mlp.lookahead=1", f"--calibrate.mlp_density={DENSITY}",
                "--heads.enabled=false", "--calibrate.head_density=1.0", "--trainer.logger=false",
                f"--trainer.accelerator={'gpu' if on_gpu else 'cpu'}", "--data.num_workers=0",
                *([] if on_gpu else ["--calibrate.sensitivity_tokens=512"]),
                "--jobs=auto" if on_gpu else f"--jobs={self.options.gpus}", *shlex.split(self.options.train),
            ])  # fmt: skip
        if not (self.int4 / "config.json").is_file():
            command = [*CALL, "dejavu_train.quantize", f"--model={self.model}", f"--output={self.int4}", *text]
            command += [f"--tokens={10 * scale.d_ffn + 512}", *shlex.split(self.options.quantize)]
            self.step("gptq", command, [0])
        if (self.bundle / "bundle.json").is_file() and (self.int4 / "config.json").is_file():
            relabel(self.bundle, self.int4, self.int4_bundle)
        shutil.rmtree(self.mine / "activations", ignore_errors=True)

    def measure(self) -> None:
        """Take the measurements: every GPU takes the next that no other has."""
        wanted = tuple(self.options.only.split(","))
        free = queue.SimpleQueue[int]()
        for gpu in range(self.options.gpus):
            free.put(gpu)

        def take(job: Job) -> None:
            done, gpu = self.rows / f"{job.name}.done", free.get()
            if not done.exists() and self.step(job.name, job.command, [gpu]) == 0:
                done.touch()
            free.put(gpu)

        with ThreadPoolExecutor(self.options.gpus) as pool:
            list(pool.map(take, [job for job in measurements(self) if job.name.startswith(wanted)]))

    def gather(self) -> None:
        """Put what a page shows into one file."""
        if (results := self.rows / "evidence/results.json").is_file():
            measured = read_json(results, "results of evidence")
            found = {"pretraining": read_json(self.model / "pretraining.json", "what pretraining tells")}
            found |= {"evidence": {name: measured[name] for name in SHOWN}, **made_now(*STEP, *SCORE)}
            write_json(self.rows / "one_model.json", found)


def relabel(bundle: Path, model: Path, to: Path) -> None:
    """The bundle of the fp16 weights as one of the same weights in 4 bits: what it selects does not change."""
    from dejavu_train.bundle.artifact import Bundle
    from dejavu_train.models.load import weight_hash

    if not to.exists():
        made = Bundle.from_pretrained(bundle)
        dataclasses.replace(made, model=str(model), weight_hash=weight_hash(str(model))).save_pretrained(to)


def measurements(run: Run) -> list[Job]:
    """Every process of the last stage, what matters most first."""
    scale, device = run.scale, f"--device={run.options.device}"
    command = [*CALL, "dejavu_train", "evidence", f"--model={run.model}", f"--bundle={run.bundle}", device]
    command += ["--text", *(f"{name}={run.texts / name}.jsonl" for name in TEXTS), f"--tokens={scale.text_tokens}"]
    command += [f"--four_bits={run.int4}", f"--local={run.options.data}", f"--limit={scale.questions}"]
    jobs = [Job("evidence", [*command, f"--output={run.rows / 'evidence'}", *shlex.split(run.options.evidence)])]
    for weights, model, bundle in (("fp16", run.model, run.bundle), ("int4", run.int4, run.int4_bundle)):
        command = [*CALL, "benchmarks.real_rows", f"--model={model}", f"--bundle={bundle}", device]
        command += [f"--prompt={scale.prompt}", f"--mlp-density={DENSITY}", f"--out={run.rows / 'real-rows.csv'}"]
        command += ["--texts", *(str(run.texts / f"{text}.jsonl") for text in PROMPTS)]
        jobs.append(Job(f"real-rows-{weights}", command))
    return jobs


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--scale", default="1.3b", choices=list(SCALES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, default=4, help="processes where the device is the CPU")
    parser.add_argument("--data", default=".data", help="where the texts of pretraining lie")
    parser.add_argument("--texts", default=".data", help="what `benchmarks.texts prepare` wrote")
    parser.add_argument("--work", default="/dev/shm/one")
    parser.add_argument("--out", required=True, help="a folder for rows and logs")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="what else the scale says")
    parser.add_argument("--train", default="", help="more flags of train.py, in one word")
    parser.add_argument("--quantize", default="", help="the same of dejavu_train.quantize")
    parser.add_argument("--evidence", default="", help="the same of dejavu evidence")
    parser.add_argument("--only", default="", help="measurements, by how their names begin: evidence,real")
    run = Run(parser.parse_args(argv))
    run.pretrain()
    if not (run.model / "pretraining.json").is_file():
        print("there is no model; the run ends")
        return 1
    run.predictors()
    run.measure()
    run.gather()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
