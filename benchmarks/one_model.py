"""One model all the way on a machine with four GPUs: pretrained, sparsified, quantised, and measured. Then discarded.

    python -m benchmarks.one_model receive PART    takes a part of the data
    python -m benchmarks.one_model start           starts the whole run in the background, in a session of its own
    python -m benchmarks.one_model look            waits for it, says what it does, packs what there is
    python -m benchmarks.one_model run             the whole run in the foreground; begun before, it goes on
    python -m benchmarks.one_model forecast        how long it should take, by size

A call may last ten minutes there, and the machine is kept for half a minute between two. So the run outlives the call
that starts it, and later calls look at it. Its stages:

    pretrain      torchrun on all GPUs; a held-out text stops it early. It gives up what the later stages need
    predictors    train.py: own text, collecting, training on all GPUs, calibration. GPTQ beside it
    measure       a process a GPU: eight texts, eight tasks, ms a token, lossless speed

Each writes its rows at once. A stage that begins late halves its tokens. --shards 2 decodes on two GPUs as well.
rows.csv: scale, what was measured, weights, selection, subject, value. times.csv: every process, its code and seconds.

Before: see benchmarks/one_model_data.py. Rehearsal: `run --scale tiny --device cpu --gpus 2 --work /tmp/w --out /tmp/o`
"""

import argparse
import csv
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.one_model_data import TASKS
from benchmarks.one_model_plan import DENSITY, DRAFTED, GPUS, HEADS, SCALES, Scale, describe, flags_of, forecast
from benchmarks.rows import ROOT, command_line
from benchmarks.texts import TEXTS
from dejavu_train.ground.children import start_child, stop_child

PAIRS = (f"{DENSITY}/1", f"{2 * DENSITY}/1", f"{DENSITY}/{HEADS}")  # of neurons and heads
HELDOUT = ("general", "books", "docs")  # the first one stops pretraining
PROMPTS = ("general", "docs", "wikitext", "code")  # texts that lossless decoding continues
GRACE = 45.0  # seconds after its mark from which a stage is late
FINISHED = "finished"
CALL = [sys.executable, "-m"]


@dataclasses.dataclass
class Job:
    """A process of the measurements. needs: what must be there before. gpus: how many it takes."""

    name: str
    command: list[str]
    needs: tuple[Path, ...] = ()
    gpus: int = 1


class Run:
    """The folders, the clock and the processes of a run.

    Args:
        options: scale, device, gpus, work, out, minutes, pretrain_seconds, shards, only.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.scale: Scale = SCALES[options.scale]
        self.work = Path(options.work)
        self.data, self.rows = self.work / "data", self.work / "rows"
        name, self.mine = f"opt-{options.scale}", self.work / "mine"
        self.model, self.int4 = self.work / name, self.work / "int4" / name  # rows say the name
        self.bundle, self.int4_bundle = self.mine / "bundle", self.work / "int4-bundle"
        self.rows.mkdir(parents=True, exist_ok=True)
        began = self.work / "began"
        if not began.exists():
            began.write_text(str(time.time()))
        self.began = float(began.read_text())
        self.expected = forecast(self.scale, options.gpus)
        self._lock = threading.Lock()

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, whatever was stopped in between."""
        return time.time() - self.began

    def mark(self, stage: str) -> float:
        """Seconds after which a stage should begin."""
        names = list(self.expected)
        return sum(self.expected[name] for name in names[: names.index(stage)])

    def share(self, stage: str) -> float:
        """Of the tokens of a stage that begins now: all, or half where it is late."""
        late = self.elapsed - self.mark(stage)
        share = 0.5 if late > GRACE and self.options.minutes else 1.0
        self.say(f"{stage}: {late:+.0f} s of its mark, {'half' if share < 1 else 'all'} of the tokens")
        return share

    def say(self, text: str) -> None:
        line = f"{self.elapsed:7.0f} s  {text}"
        print(line, flush=True)
        with (self.rows / "said.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @property
    def left(self) -> float | None:
        """Seconds of the run that are left. None: nobody counts them."""
        return max(20.0, 60 * self.options.minutes - self.elapsed) if self.options.minutes else None

    def step(
        self, name: str, command: Sequence[str], gpus: Sequence[int] | None = None, seconds: float | None = None
    ) -> int:
        """Run a process to its end, or end it after so many seconds. Returns its exit code, or 124.

        Its output goes to a log, its time and exit code to times.csv.
        """
        began = self.elapsed
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        if gpus is not None and self.options.device == "cuda":
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        with (self.rows / f"{name}.log").open("ab") as log:
            process = start_child(command, environment, log)
            try:
                code = process.wait(seconds or self.left)
            except subprocess.TimeoutExpired:
                stop_child(process)
                code = 124
        with self._lock, (self.rows / "times.csv").open("a", encoding="utf-8") as file:
            file.write(f"{self.options.scale},{name},{code},{began:.0f},{self.elapsed - began:.0f}\n")
        last = (self.rows / f"{name}.log").read_text("utf-8", "replace").strip().splitlines()[-1:]
        self.say(f"{name}: exit {code} after {self.elapsed - began:.0f} s{f'; {last}' if code else ''}")
        return code

    def pretrain(self) -> None:
        """Train the model on all GPUs, so long that the later stages have their time."""
        if (self.model / "pretraining.json").is_file():
            return
        scale, options = self.scale, self.options
        self.model.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "checkpoints/opt-mini" / name, self.model)
        streams = sorted(map(str, self.data.glob("*.tokens.xz")))
        command = [*self.together(), "-m", "dejavu_train.extras.pretrain", f"--output={self.model}"]
        command += ["--text", *streams, "--heldout", *(str(self.data / f"{name}.jsonl") for name in HELDOUT)]
        command += [*self.pretrain_flags(), "--patience=3", "--validation_steps=50"]
        plainer = ["--compile=false", f"--micro_rows={max(1, scale.micro_rows // 2)}"]  # what comes last counts
        for name, flags in (("pretrain", []), ("pretrain-again", plainer)):
            seconds = self.pretrain_seconds()
            self.say(f"{name}: {seconds:.0f} s on {len(streams)} files of token ids")
            around = self.expected["pretrain"] - scale.pretrain_seconds
            limit = seconds + 2 * around + 60 if options.minutes else None
            if self.step(name, [*command, f"--seconds={seconds:.0f}", *flags], seconds=limit) == 0:
                return

    def pretrain_seconds(self) -> float:
        """So many that the later stages have their time."""
        scale, options = self.scale, self.options
        seconds = options.pretrain_seconds or scale.pretrain_seconds
        if options.minutes:
            around = self.expected["pretrain"] - scale.pretrain_seconds
            later = sum(self.expected.values()) - self.mark("text")
            seconds = min(seconds, 60 * options.minutes - self.elapsed - around - later)
        if seconds < 20:
            raise SystemExit(f"{seconds:.0f} s are left to pretrain; choose a smaller --scale")
        return seconds

    def together(self) -> list[str]:
        """What starts a process for each GPU."""
        return [*CALL, "torch.distributed.run", "--standalone", f"--nproc-per-node={self.options.gpus}"]

    def pretrain_flags(self) -> list[str]:
        """Sizes, and how it learns."""
        scale, options = self.scale, self.options
        sizes = {name: getattr(scale, name) for name in ("d_model", "n_layers", "n_heads", "d_ffn", "context")}
        settings = {
            "learning_rate": scale.learning_rate, "batch_rows": scale.rows, "micro_rows": scale.micro_rows,
            "warmup_steps": scale.warmup_steps, "device": options.device, "checkpoint_seconds": 100_000,
            "compile": "true" if options.device == "cuda" else "false",
        }  # fmt: skip
        return [f"--{name}={value}" for name, value in {**sizes, **settings}.items()]

    def predictors(self) -> None:
        """Own text, collecting, training on all GPUs, calibration. GPTQ beside them, once the text is there."""
        share = self.share("text")
        jobs = "--jobs=auto" if self.options.device == "cuda" else f"--jobs={self.options.gpus}"
        flags = flags_of(
            self.scale, str(self.model), str(self.mine), str(self.work / "text"), share, self.options.device
        )
        beside = threading.Thread(target=self.quantise, args=(flags,))
        beside.start()
        if not (self.bundle / "bundle.json").is_file():
            self.step("predictors", [sys.executable, str(ROOT / "train.py"), *flags, jobs])
        beside.join()
        if (self.bundle / "bundle.json").is_file() and (self.int4 / "config.json").is_file():
            relabel(self.bundle, self.int4, self.int4_bundle)
        shutil.rmtree(self.mine / "activations", ignore_errors=True)

    def quantise(self, flags: Sequence[str]) -> None:
        """GPTQ on the model's own text, on the second GPU."""
        if (self.int4 / "config.json").is_file():
            return
        while not list(self.work.glob("text/self-*/samples.json")):
            if (self.rows / "predictors.log").is_file() and self.failed("predictors"):
                return
            time.sleep(1)
        text = [flag for flag in flags if flag.startswith("--text.")]
        tokens = 10 * self.scale.d_ffn + 512
        command = [*CALL, "dejavu_train.quantize", f"--model={self.model}", f"--output={self.int4}", *text]
        self.step("gptq", [*command, f"--tokens={tokens}"], [min(1, self.options.gpus - 1)])

    def failed(self, name: str) -> bool:
        """Whether a process ended with an error."""
        path = self.rows / "times.csv"
        rows = csv.reader(path.open(encoding="utf-8")) if path.is_file() else iter(())
        return any(row[1] == name and row[2] != "0" for row in rows)

    def measure(self) -> None:
        """Take the measurements: first those of one GPU, then those of several, each time as many as there are GPUs."""
        wanted = tuple(self.options.only.split(","))
        jobs = [job for job in measurements(self, self.share("measure")) if job.name.startswith(wanted)]
        for width in sorted({job.gpus for job in jobs}):
            self.share_out([job for job in jobs if job.gpus == width and not self.is_done(job)], width)

    def share_out(self, waiting: list[Job], width: int) -> None:
        """Every so many GPUs take the next job that no others have."""

        def worker(gpus: Sequence[int]) -> None:
            while True:
                with self._lock:
                    ready = next((job for job in waiting if all(path.exists() for path in job.needs)), None)
                    if ready is None:
                        return
                    waiting.remove(ready)
                self.take(ready, gpus)

        groups = [range(first, first + width) for first in range(0, self.options.gpus - width + 1, width)]
        workers = [threading.Thread(target=worker, args=(gpus,)) for gpus in groups]
        for each in workers:
            each.start()
        for each in workers:
            each.join()
        for job in waiting:
            self.say(f"{job.name}: left out, since {job.needs} are missing")

    def is_done(self, job: Job) -> bool:
        return (self.rows / f"{job.name}.done").exists()

    def take(self, job: Job, gpus: Sequence[int]) -> None:
        """Run a measurement, and put its rows with the others."""
        from benchmarks.one_model_rows import gather  # torch takes seconds to import

        if self.step(job.name, job.command, gpus) == 0:
            (self.rows / f"{job.name}.done").touch()
        with self._lock:
            gather(self.options.scale, self.model, self.rows)


def relabel(bundle: Path, model: Path, to: Path) -> None:
    """The bundle of the fp16 weights as one of the same weights in 4 bits: what it selects does not change."""
    from dejavu_train.bundle.artifact import Bundle
    from dejavu_train.models.opt import weight_hash

    if not to.exists():
        made = dataclasses.replace(
            Bundle.from_pretrained(bundle), model=str(model), weight_hash=weight_hash(str(model))
        )
        made.save_pretrained(to)


def chunks(names: Sequence[str], count: int) -> list[Sequence[str]]:
    """Names dealt out to so many groups.

    >>> chunks("abcde", 2)
    ['ace', 'bd']
    """
    return [names[i::count] for i in range(min(count, len(names)))]


def measurements(run: Run, share: float) -> list[Job]:
    """Every process of the last stage, what matters most first. share: of tokens, questions and prompts."""
    scale, options, rows = run.scale, run.options, run.rows
    device, on_gpu = f"--device={options.device}", options.device == "cuda"
    both = (run.int4, run.bundle)
    jobs = []
    for i, names in enumerate(chunks(list(TEXTS), options.gpus)):
        command = [*CALL, "benchmarks.quantize", "report", f"--model={run.model}", f"--data={run.data}", device]
        command += ["--tf32", f"--texts={','.join(names)}", f"--tokens={int(share * scale.text_tokens)}"]
        command += [f"--weights=gptq={run.int4}", f"--bundles=before={run.bundle}", f"--csv={rows / f'texts-{i}.csv'}"]
        jobs.append(Job(f"texts-{i}", [*command, "--batch-tokens=8192", "--densities", *PAIRS], both))
    for weights, model, bundle in (("fp16", run.model, run.bundle), ("int4", run.int4, run.int4_bundle)):
        command = [*CALL, "benchmarks.lossless_gpu", "speed", f"--model={model}", f"--bundle={bundle}", device]
        command += [f"--prompts={len(PROMPTS) + max(1, int(share * scale.prompts))}", f"--new={scale.new_tokens}"]
        command += [f"--prompt={scale.prompt}", f"--mlp-density={DRAFTED}", f"--out={rows / f'lossless-{weights}.csv'}"]
        command += [] if weights == "fp16" else ["--ways", "draft_length=0", "sparse"]
        command += ["--texts", *(str(run.data / f"{name}.jsonl") for name in PROMPTS)]
        jobs.append(Job(f"lossless-{weights}", command, (model, bundle)))
        dense = (["dense"] if weights == "fp16" else []) + (["dense-engine"] if on_gpu else ["dense-cpu"])
        sparse = "triton" if on_gpu else "cpu"
        for pair in PAIRS:
            neurons, heads = pair.split("/")
            timed = [*(dense if pair == PAIRS[0] else ()), sparse]
            name = f"speed-{weights}-{neurons}-{heads}"
            infer = [
                str(ROOT / "infer.py"),
                f"--model={model}",
                f"--bundle={bundle}",
                "--tokens=0",
                "--timing=true",
                device,
            ]
            infer += [f"--text=wikitext={run.data / 'wikitext.jsonl'}", f"--prompt={scale.prompt}"]
            infer += [f"--new_tokens={min(64, scale.new_tokens)}", f"--timing_mlp_density={neurons}"]
            infer += [f"--timing_head_density={heads}", f"--dtype={'float16' if on_gpu else 'float32'}"]
            one = [f"--output={rows / name}", f"--timing_backends=[{','.join(timed)}]"]
            jobs.append(Job(name, [sys.executable, *infer, *one], (model, bundle)))
            if options.shards > 1:
                name = f"{name}-shards{options.shards}"
                ranks = [*CALL, "torch.distributed.run", "--standalone", f"--nproc-per-node={options.shards}"]
                many = [f"--output={rows / name}", f"--timing_backends=[{','.join([*dense[-1:], sparse])}]"]
                jobs.append(Job(name, [*ranks, *infer, *many], (model, bundle), options.shards))
    for i, names in enumerate(chunks(TASKS, options.gpus)):
        command = [*CALL, "benchmarks.one_model_tasks", f"--model={run.model}", f"--bundle={run.bundle}", device]
        command += [f"--int4={run.int4}", f"--file={run.data / 'tasks.jsonl.xz'}", "--tasks", *names]
        command += [f"--limit={max(2, int(share * scale.questions))}", f"--csv={rows / f'tasks-{i}.csv'}"]
        jobs.append(Job(f"tasks-{i}", [*command, "--densities", *PAIRS], both))
    return jobs


def whole_run(options: argparse.Namespace) -> None:
    """All stages in turn."""
    run = Run(options)
    run.say(f"{options.scale} on {options.gpus} of {options.device}, {options.minutes or 'any number of'} minutes")
    stages: tuple[Callable[[], None], ...] = (run.pretrain, run.predictors, run.measure)
    for stage in stages:
        if stage != run.pretrain and not (run.model / "pretraining.json").is_file():
            run.say("there is no model; the run ends")
            break
        stage()
    pack(options)
    (run.work / FINISHED).touch()
    run.say(f"finished after {run.elapsed / 60:.1f} minutes")


def receive(options: argparse.Namespace) -> None:
    """Put a part's files where the run reads them."""
    data = Path(options.work) / "data"
    data.mkdir(parents=True, exist_ok=True)
    for path in sorted(Path(options.part).iterdir()):
        if path.name.endswith(".tar.xz"):
            with tarfile.open(path) as archive:
                archive.extractall(data, filter="data")
        else:
            shutil.copy(path, data)
    print(f"{data}: {', '.join(sorted(path.name for path in data.iterdir()))}")


def start(options: argparse.Namespace) -> None:
    """Copy the code away from the tree, which every call writes anew, and start the run behind."""
    code = Path(options.work) / "code"
    if not code.exists():
        kept = shutil.ignore_patterns(".*", "__pycache__", "tests", "docs", "one")
        shutil.copytree(ROOT, code, symlinks=True, ignore=kept)
    given = ["scale", "device", "gpus", "work", "out", "minutes", "pretrain_seconds", "shards", "only"]
    flags = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in given]
    command = [*CALL, "benchmarks.one_model", "run", *flags]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(code), os.environ.get("PYTHONPATH", "")])}
    with (Path(options.work) / "run.log").open("ab") as log:
        subprocess.Popen(
            command, cwd=code, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    print("started; look at it with: python -m benchmarks.one_model look")


def look(options: argparse.Namespace) -> None:
    """Wait until the run has finished, or so many seconds, and say what it does every half minute."""
    work, ends, said = Path(options.work), time.time() + options.seconds, 0
    while True:
        lines = (work / "run.log").read_text("utf-8", "replace").splitlines()
        newest = max((work / "rows").glob("*.log"), key=lambda path: path.stat().st_mtime, default=None)
        if newest is not None:
            lines_of = newest.read_text("utf-8", "replace").replace("\r", "\n").strip().splitlines()
            print(f"  {newest.stem}: {' '.join(lines_of[-1:])[:150]}")
        print(*lines[said:], sep="\n", flush=True)
        said = len(lines)
        pack(options)  # every time: a call can be cut off
        if (work / FINISHED).exists() or time.time() > ends:
            break
        time.sleep(min(30, max(1, ends - time.time())))


def pack(options: argparse.Namespace) -> None:
    """Rows and logs into the folder that comes back."""
    rows, out = Path(options.work) / "rows", Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("rows.csv", "times.csv", "said.txt"):
        if (rows / name).is_file():
            shutil.copy(rows / name, out)
    about = Path(options.work) / f"opt-{options.scale}" / "pretraining.json"
    if about.is_file():
        shutil.copy(about, out)
    with tarfile.open(out / "all.tar.xz", "w:xz") as archive:
        archive.add(rows, "rows")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=["receive", "start", "look", "run", "forecast"])
    parser.add_argument("part", nargs="?", help="of receive: a folder that one_model_data.py packed")
    parser.add_argument("--scale", default="1.3b", choices=list(SCALES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, default=GPUS, help="processes where the device is the CPU")
    parser.add_argument("--work", default="/dev/shm/one")
    parser.add_argument("--out", default=os.environ.get("OUT", "/tmp/one_model"), help="where rows are packed")
    parser.add_argument("--minutes", type=float, default=0.0, help="of the run; 0: no marks, no stage is late")
    parser.add_argument("--pretrain-seconds", type=float, default=0.0, help="at most; 0: those of the scale")
    parser.add_argument("--shards", type=int, default=1, help="2: decode on two GPUs as well")
    parser.add_argument("--only", default="", help="measurements, by how their names begin: lossless,speed")
    parser.add_argument("--seconds", type=float, default=540, help="of look, at most")
    options = parser.parse_args(argv)
    if options.what == "forecast":
        print(describe() if options.scale == "1.3b" else json.dumps(forecast(SCALES[options.scale])))
    else:
        {"receive": receive, "start": start, "look": look, "run": whole_run}[options.what](options)


if __name__ == "__main__":
    main()
