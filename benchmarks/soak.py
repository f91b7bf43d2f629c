"""Interrupts training at random moments and compares the bundle with that of an undisturbed run, bit for bit.

    python -m benchmarks.soak --interruptions 100 --seed 0 --out benchmarks/results/soak.jsonl

A run is interrupted by SIGKILL, SIGTERM or SIGINT, one of them drawn, when it has used a drawn part of the CPU time of
an undisturbed run (up to 40 %), and started again with the same command, until it ends; then the next run begins. CPU
time, so that the moments are spread in the same way whatever else the machine does. A row is appended for every run;
with the same seed and file the command goes on behind the rows that are there.
"""

import argparse
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

from benchmarks.tiny_run import bundle_bytes, flags, make_inputs, start

SIGNALS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
PHASES = {
    "text and collecting": "collecting", "training": ": training", "sensitivity": "sensitivity of", "tuning": "tuning:",
    "last calibration": "step 11 of 12",
}  # fmt: skip


def phase(text: str) -> str:
    """The phase that the log of an attempt reached last."""
    reached = [(text.rfind(words), name) for name, words in PHASES.items() if words in text]
    return max(reached)[1] if reached else "start"


def cpu_seconds(process: Any) -> float:
    """User and system time of a process so far; where the system does not say, of the wall since its start."""
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
        process = self.start(folder / "undisturbed", folder / "log")
        self.cpu_seconds = 0.0
        while process.is_alive():
            self.cpu_seconds = max(self.cpu_seconds, cpu_seconds(process))
            time.sleep(0.005)
        process.join()
        assert process.exitcode == 0, (folder / "log").read_text()
        self.reference = bundle_bytes(folder / "undisturbed")

    def start(self, output: Path, log: Path) -> Any:
        process = start(flags(self.model, self.text, output), log)
        process.began = time.monotonic()
        return process

    def run(self, number: int, seed: int, most: int) -> dict[str, Any]:
        """One run, interrupted up to ``most`` times; counts by signal, phase and outcome."""
        draw = random.Random(f"{seed} {number}")
        output = self.folder / f"run-{number}"
        by_signal: collections.Counter[str] = collections.Counter()
        phases: collections.Counter[str] = collections.Counter()
        wrong = []
        for attempt in range(1000):
            log = self.folder / f"log-{number}-{attempt}"
            process = self.start(output, log)
            moment = draw.uniform(0, 0.4) * self.cpu_seconds if sum(by_signal.values()) < most else float("inf")
            while process.is_alive() and cpu_seconds(process) < moment:
                time.sleep(0.003)
            asked = draw.choice(list(SIGNALS))
            if process.is_alive():
                os.kill(process.pid, asked)
            process.join()
            if process.exitcode == 0:  # perhaps it was done before the signal came
                break
            said = log.read_text() if log.is_file() else ""
            by_signal[asked.name] += 1
            phases[phase(said)] += 1
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interruptions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    rows = []
    if options.out and options.out.is_file():
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    rows = [row for row in rows if row["seed"] == options.seed]
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder))
        while (left := options.interruptions - sum(row["interruptions"] for row in rows)) > 0:
            row = soak.run(len(rows), options.seed, left) | {"torch": torch.__version__, "date": time.strftime("%F")}
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
