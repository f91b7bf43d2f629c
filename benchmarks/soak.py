"""Interrupts training at random moments and compares the bundle with that of an undisturbed run, bit for bit.

    python -m benchmarks.soak --interruptions 100 --seed 0 --out benchmarks/results/soak.jsonl

A run is interrupted when it has used a drawn part, up to 40 %, of the CPU time of an undisturbed run. The signal is
drawn from SIGKILL, SIGTERM and SIGINT. The same command then starts it again, until it ends. Then the next run begins.
CPU time, so that the moments are spread in the same way whatever else the machine does. A row is appended for every
run, with the same seed and file the command goes on behind the rows that are there.

Most moments fall into the long phases. With --aim PHASE [PHASE ...] each interruption waits for one of these phases. It
comes after a drawn part of the CPU time that the undisturbed run spent in that phase.
"""

import collections
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import command_line, made_now
from benchmarks.tiny_run import bundle_bytes, flags, make_inputs, start

SIGNALS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
PHASES = {
    "text and collecting": "collecting", "training": "] layer ", "sensitivity": "trained in", "tuning": "tuning:",
    "last calibration": "step 11 of 12",
}  # fmt: skip
AIMED = 6  # interruptions of a run that aims


def phase(log: Path, output: Path) -> str:
    """The phase that an attempt reached last, by its log. What is calibrated after tuning is calibrated last."""
    said = log.read_text() if log.is_file() else ""
    reached = ["start", *(name for name, words in PHASES.items() if words in said)][-1]
    return "last calibration" if reached == "sensitivity" and (output / "tuned").is_dir() else reached


def cpu_seconds(process: Any) -> float:
    """User and system time of a process so far, where the system does not say, of the wall since its start."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.monotonic() - process.began if process.is_alive() else float("inf")


class Soak:
    """The inputs of all runs, and an undisturbed one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.text = make_inputs(folder)
        start(["--print_config"], folder / "log").join()  # the server has imported everything now
        log, output = folder / "undisturbed-log", folder / "undisturbed"
        process = self.start(output, log)
        self.cpu_seconds = 0.0
        self.spent: collections.Counter[str] = collections.Counter()  # CPU seconds by phase
        while process.is_alive():
            now = max(self.cpu_seconds, cpu_seconds(process))
            self.spent[phase(log, output)] += now - self.cpu_seconds
            self.cpu_seconds = now
            time.sleep(0.005)
        process.join()
        assert process.exitcode == 0, log.read_text()
        self.reference = bundle_bytes(folder / "undisturbed")

    def start(self, output: Path, log: Path) -> Any:
        process = start(flags(self.model, self.text, output), log)
        process.began = time.monotonic()
        return process

    def await_moment(self, process: Any, log: Path, output: Path, aim: str | None, part: float) -> None:
        """Return when the process has ended, or when it is to be interrupted. ``aim`` None: anywhere."""
        begin, length = 0.0, 0.4 * self.cpu_seconds
        if aim is not None:
            while process.is_alive() and phase(log, output) != aim:
                time.sleep(0.003)
            begin, length = cpu_seconds(process), self.spent[aim]
        while process.is_alive() and cpu_seconds(process) < begin + part * length:
            time.sleep(0.003)

    def run(self, number: int, seed: int, most: int, aims: Sequence[str] = ()) -> dict[str, Any]:
        """One run, interrupted up to ``most`` times. Counts by signal, phase and outcome."""
        draw = random.Random(f"{seed} {number}")
        planned: list[str | None] = [None] * most
        if aims:  # in the order of the phases, of which a run has each once
            planned = sorted(draw.choices(aims, k=min(most, AIMED)), key=list(PHASES).index)  # type: ignore[arg-type]
        output = self.folder / f"run-{number}"
        by_signal: collections.Counter[str] = collections.Counter()
        phases: collections.Counter[str] = collections.Counter()
        wrong = []
        for attempt in range(1000):
            log = self.folder / f"log-{number}-{attempt}"
            process = self.start(output, log)
            part, asked = draw.random(), draw.choice(list(SIGNALS))
            if planned:
                self.await_moment(process, log, output, planned.pop(0), part)
                if process.is_alive():
                    os.kill(process.pid, asked)
            process.join()
            if process.exitcode == 0:  # perhaps it was done before the signal came
                break
            said = log.read_text() if log.is_file() else ""
            by_signal[asked.name] += 1
            phases[phase(log, output)] += 1
            if process.exitcode != (SIGNALS[asked] if said else -asked):  # the command had not begun to listen
                wrong.append(f"{asked.name}: code {process.exitcode}: {said[-500:]}")
                if process.exitcode > 0:  # it ended by a mistake of its own
                    break
        same = process.exitcode == 0 and bundle_bytes(output) == self.reference
        return {
            "seed": seed, "run": number, "interruptions": sum(by_signal.values()), "same_bundle": same, "wrong": wrong,
            "signals": dict(sorted(by_signal.items())), "phases": dict(sorted(phases.items())),
        }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--interruptions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--aim", nargs="+", choices=list(PHASES), default=[], metavar="PHASE", help=", ".join(PHASES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    rows = []
    if options.out and options.out.is_file():
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    rows = [row for row in rows if row["seed"] == options.seed]
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder))
        while (left := options.interruptions - sum(row["interruptions"] for row in rows)) > 0:
            row = soak.run(len(rows), options.seed, left, options.aim)
            row |= {"torch": torch.__version__, **made_now("dejavu_train")}
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
