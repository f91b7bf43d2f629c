"""Makes ten mistakes, each in a process of its own, and writes how long it took until the line was there.

    python -m benchmarks.mistakes --out benchmarks/results/mistakes.jsonl

``cpu_s`` is user and system time of the process, ``wall_s`` what a person waits; with other work on the machine only
the first says something, so the load average stands in the row. ``torch`` says whether torch was imported.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MISTAKES = [
    ["train.py", "--mlp.rnk=3"],
    ["train.py", "--mlp.learning_rate=-1"],
    ["train.py", "--layers=0-99999999"],
    ["train.py", "--calibrate.budget=5%", "--calibrate.sensitivity_tokens=0"],
    ["train.py", "--text.source=nowhere.txt"],
    ["train.py", "--model=./nowhere"],
    ["train.py", "--model={model_without_tokenizer}"],
    ["train.py", "--output=/proc/run"],
    ["infer.py", "--bundle=./nowhere"],
    ["infer.py", "--densities=7"],
]
RUN = """
import runpy, sys
sys.argv = {argv!r}
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("torch" in sys.modules)
"""


def measure(argv: Sequence[str]) -> dict[str, Any]:
    """One row: the command, its line, seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", RUN.format(argv=list(argv))], capture_output=True, text=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return {
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "wall_s": round(wall, 2), "load": round(os.getloadavg()[0], 1), "cores": os.cpu_count(),
        "torch": done.stdout.strip() == "True", "message": done.stderr.strip(),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for path in Path("checkpoints/opt-mini").iterdir():
            if path.name != "tokenizer.json":
                (Path(folder) / path.name).symlink_to(path.absolute())
        for mistake in MISTAKES:
            row = measure([flag.format(model_without_tokenizer=folder) for flag in mistake])
            row["message"] = row["message"].replace(folder, "MODEL")
            shown = " ".join(mistake).format(model_without_tokenizer="MODEL")
            rows.append({"command": shown} | row | {"python": platform.python_version(), "date": time.strftime("%F")})
            print(f"{row['cpu_s']:.2f} s CPU, {row['wall_s']:.2f} s: {shown}: {row['message']}")
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
