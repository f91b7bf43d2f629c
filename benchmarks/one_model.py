"""One model all the way on a machine with some GPUs: pretrained, sparsified, quantised, and measured.

    python -m benchmarks.texts prepare --data DATA                        the eight texts and train_docs.jsonl, in .data
    python -m benchmarks.one_model --data DATA --out OUTPUT_FOLDER        the whole run; begun before, it goes on

DATA holds general_train.jsonl.xz, books_train_*.jsonl.xz, or token ids of both as pretraining reads them, and the files
of the tasks in tasks/. Stages:

    pretrain      torchrun on all GPUs; a held-out text stops it early
    predictors    train.py: own text, collecting, training on all GPUs, calibration. Then GPTQ
    measure       a process a GPU: eight texts, eight tasks, ms a token, rows of real text, lossless speed

Each process writes its rows at once. rows.csv: scale, what was measured,
weights, selection, subject, value. times.csv: every process, its exit code and seconds.

Rehearsal: `--scale tiny --device cpu --gpus 2 --work /tmp/w --out /tmp/o`
In a hurry: `--set pretrain_seconds=300 own_tokens=90000 heads=1 --quantize=--quantizer=rtn --only texts,speed,real`
"""

import argparse
import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.one_model_rows import gather
from benchmarks.rows import ROOT, command_line
from benchmarks.texts import TEXTS

DENSITY = 0.1  # of the neurons, at which the bundle is calibrated
DRAFTED = 0.2  # of the neurons, with all heads: lossless drafts
HELDOUT = ("general", "books", "docs")  # the first one stops pretraining
PROMPTS = ("general", "docs", "wikitext", "code")  # texts that are continued
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
    head_rank: int
    rows: int = 128  # sequences of a step
    context: int = 1024
    warmup_steps: int = 60
    own_tokens: int = 200_000  # that the model writes and that are recorded
    steps: int = 1000  # of each predictor
    text_tokens: int = 30_000  # of each text
    questions: int = 300  # of each task
    prompts: int = 16  # of lossless decoding
    new_tokens: int = 192
    prompt: int = 128
    pretrain_seconds: float = 540.0
    heads: float = 0.85  # at which the bundle is calibrated. 1: heads have no predictors

    @property
    def pairs(self) -> tuple[str, ...]:
        """Densities of neurons and heads that are measured."""
        return f"{DENSITY}/1", f"{2 * DENSITY}/1", *([f"{DENSITY}/{self.heads}"] if self.heads < 1 else [])

    def changed(self, words: Sequence[str]) -> "Scale":
        """The scale with other values, of words name=value."""
        given = dict(word.split("=") for word in words)
        return dataclasses.replace(self, **{name: type(getattr(self, name))(each) for name, each in given.items()})


SCALES = {
    "tiny": Scale(
        128, 2, 4, 512, 3e-3, 2, 16, 4, rows=4, context=128, warmup_steps=4, own_tokens=16_000, steps=20,
        text_tokens=1500, questions=6, prompts=2, new_tokens=16, prompt=32, pretrain_seconds=40.0,
    ),
    "100m": Scale(768, 12, 12, 3072, 2e-3, 32, 128, 12),
    "350m": Scale(1024, 24, 16, 4096, 1.2e-3, 16, 128, 16),
    "1.3b": Scale(2048, 24, 32, 8192, 8e-4, 8, 128, 32),
}  # fmt: skip


@dataclasses.dataclass
class Job:
    """A process of the measurements. needs: what must be there before."""

    name: str
    command: list[str]
    needs: tuple[Path, ...] = ()


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
        self.rows.mkdir(parents=True, exist_ok=True)
        self.began, self._lock = time.monotonic(), threading.Lock()

    def step(self, name: str, command: Sequence[str], gpus: Sequence[int] | None = None) -> int:
        """Run a process to its end. Its output goes to a log, its exit code and time to times.csv."""
        began = time.monotonic()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        if gpus is not None and self.options.device == "cuda":
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
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
                f"--heads.rank={scale.head_rank}", f"--mlp.steps={scale.steps}", f"--heads.steps={scale.steps}",
                f"--calibrate.mlp_density={DENSITY}", f"--calibrate.head_density={scale.heads}",
                f"--heads.enabled={str(scale.heads < 1).lower()}", "--trainer.logger=false",
                f"--trainer.accelerator={'gpu' if on_gpu else 'cpu'}", "--data.num_workers=0",
                *([] if on_gpu else ["--calibrate.sensitivity_tokens=512", "--calibrate.head_loss_tokens=512"]),
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
        waiting = [job for job in measurements(self) if job.name.startswith(wanted) and not self.done(job).exists()]

        def worker(gpu: int) -> None:
            while True:
                with self._lock:
                    ready = next((job for job in waiting if all(path.exists() for path in job.needs)), None)
                    if ready is None:
                        return
                    waiting.remove(ready)
                if self.step(ready.name, ready.command, [gpu]) == 0:
                    self.done(ready).touch()
                with self._lock:
                    gather(self.options.scale, self.model, self.rows)

        workers = [threading.Thread(target=worker, args=(gpu,)) for gpu in range(self.options.gpus)]
        for each in workers:
            each.start()
        for each in workers:
            each.join()
        for job in waiting:
            print(f"{job.name}: left out, since {job.needs} are missing")

    def done(self, job: Job) -> Path:
        return self.rows / f"{job.name}.done"


def relabel(bundle: Path, model: Path, to: Path) -> None:
    """The bundle of the fp16 weights as one of the same weights in 4 bits: what it selects does not change."""
    from dejavu_train.bundle.artifact import Bundle
    from dejavu_train.models.load import weight_hash

    if not to.exists():
        made = Bundle.from_pretrained(bundle)
        dataclasses.replace(made, model=str(model), weight_hash=weight_hash(str(model))).save_pretrained(to)


def measurements(run: Run) -> list[Job]:
    """Every process of the last stage, what matters most first."""
    device, count = f"--device={run.options.device}", run.options.gpus
    kinds = (("fp16", run.model, run.bundle), ("int4", run.int4, run.int4_bundle))
    jobs = [text_job(run, i, list(TEXTS)[i::count], device) for i in range(min(count, len(TEXTS)))]
    for weights, model, bundle in kinds:
        jobs += [
            *speed_jobs(run, weights, model, bundle, device), rows_job(run, weights, model, bundle, device),
            lossless_job(run, weights, model, bundle, device),
        ]  # fmt: skip
    return jobs + [job for kind in kinds for job in task_jobs(run, *kind, device)]


def text_job(run: Run, number: int, names: Sequence[str], device: str) -> Job:
    """Perplexities of some texts, of both weights."""
    command = [*CALL, "benchmarks.quantize", "report", f"--model={run.model}", f"--data={run.texts}", device]
    command += ["--tf32", f"--texts={','.join(names)}", f"--tokens={run.scale.text_tokens}", "--batch-tokens=8192"]
    command += [f"--weights=gptq={run.int4}", f"--bundle={run.bundle}"]
    command += [f"--csv={run.rows / f'texts-{number}.csv'}", "--densities", *run.scale.pairs]
    return Job(f"texts-{number}", command, (run.int4, run.bundle))


def task_jobs(run: Run, weights: str, model: Path, bundle: Path, device: str) -> list[Job]:
    """Answers to the questions of the tasks, dense and at each selection."""
    jobs = []
    for pair in run.scale.pairs:
        neurons, heads = pair.split("/")
        name = f"tasks-{weights}-{neurons}-{heads}"
        command = ["env", f"DEJAVU_RESULTS={run.rows / name}", *CALL, "benchmarks.tasks", f"--model={model}", device]
        command += [f"--config={ROOT / 'configs/eval/opt-mini.yaml'}", f"--bundle={bundle}", "--shots=[0]", "--text=[]"]
        command += [f"--folder={run.options.data}", f"--limit={run.scale.questions}"]
        command += [f"--mlp_density={neurons}", f"--head_density={heads}"]
        jobs.append(Job(name, command, (model, bundle)))
    return jobs


def rows_job(run: Run, weights: str, model: Path, bundle: Path, device: str) -> Job:
    """Rows of real text together, of one kind of weights."""
    name = f"real-rows-{weights}"
    command = [*CALL, "benchmarks.real_rows", f"--model={model}", f"--bundle={bundle}", device]
    command += [f"--prompt={run.scale.prompt}", f"--mlp-density={DENSITY}", f"--out={run.rows / name}.csv"]
    command += ["--texts", *(str(run.texts / f"{text}.jsonl") for text in PROMPTS)]
    return Job(name, command, (model, bundle))


def lossless_job(run: Run, weights: str, model: Path, bundle: Path, device: str) -> Job:
    """Lossless speed of one kind of weights."""
    scale = run.scale
    command = [*CALL, "benchmarks.lossless", "speed", f"--model={model}", f"--bundle={bundle}", device]
    command += [f"--prompts={len(PROMPTS) + scale.prompts}", f"--new={scale.new_tokens}", f"--prompt={scale.prompt}"]
    command += [f"--mlp-density={DRAFTED}", f"--out={run.rows / f'lossless-{weights}.csv'}"]
    command += [] if weights == "fp16" else ["--ways", "draft_length=0", "sparse"]
    command += ["--texts", *(str(run.texts / f"{name}.jsonl") for name in PROMPTS)]
    return Job(f"lossless-{weights}", command, (model, bundle))


def speed_jobs(run: Run, weights: str, model: Path, bundle: Path, device: str) -> list[Job]:
    """Milliseconds a token of one kind of weights, at each selection."""
    scale, on_gpu = run.scale, run.options.device == "cuda"
    dense = (["dense"] if weights == "fp16" else []) + (["dense-engine"] if on_gpu else ["dense-cpu"])
    sparse, jobs = "triton" if on_gpu else "cpu", []
    for pair in scale.pairs:
        neurons, heads = pair.split("/")
        name = f"speed-{weights}-{neurons}-{heads}"
        infer = [
            str(ROOT / "infer.py"), f"--model={model}", f"--bundle={bundle}", "--tokens=0", "--timing=true", device,
            f"--text=wikitext={run.texts / 'wikitext.jsonl'}", f"--prompt={scale.prompt}",
            f"--new_tokens={min(64, scale.new_tokens)}", f"--timing_mlp_density={neurons}",
            f"--timing_head_density={heads}", f"--dtype={'float16' if on_gpu else 'float32'}",
        ]  # fmt: skip
        timed = ",".join([*(dense if pair == scale.pairs[0] else ()), sparse])
        one = [f"--output={run.rows / name}", f"--timing_backends=[{timed}]"]
        jobs.append(Job(name, [sys.executable, *infer, *one], (model, bundle)))
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
    parser.add_argument("--only", default="", help="measurements, by how their names begin: lossless,speed")
    run = Run(parser.parse_args(argv))
    run.pretrain()
    if not (run.model / "pretraining.json").is_file():
        print("there is no model; the run ends")
        return 1
    run.predictors()
    run.measure()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
