"""What `benchmarks.cpu_decode` does not time of the CPU engine, a row each in benchmarks/results/cpu_extra.csv.

    perplexity   int8 weights, and of a 4-bit model its codes, against fp32 on texts, dense and sparse:
                 percent, with a paired bootstrap error over windows
    start        seconds until an engine stands, in a new folder for numba's cache and again; imports are not counted
    stream       tokens a second of infer.py --backend cpu --generate, and of an engine with a callback
    two          tokens a second of one process, and of each of two at once
    interrupt    seconds from Ctrl-C to the end of a process that decodes
    pipeline     milliseconds a token of pipeline("text-generation") with all defaults (256 tokens, sampled with
                 top_k=50) and the bundle as calibrated, beside transformers' dense model: medians of calls in turns

    python -m benchmarks.cpu_extra start stream two interrupt pipeline --bundle checkpoints/demo/bundle
    python -m benchmarks.cpu_extra perplexity --text readmes.jsonl books.jsonl --tokens 4000

Times depend on what else runs: they are for a machine that does nothing else.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cpu_decode import cpu_name
from benchmarks.rows import append_row, command_line, five_digits, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.cpu import CpuEngine
from dejavu_train.engine.cpu.engine import usable_cores
from dejavu_train.engine.cpu.weights import how_stored
from dejavu_train.evaluation.perplexity import increase
from dejavu_train.models.opt import load_opt, load_tokenizer
from dejavu_train.sparse.model import SparseOPTForCausalLM

COLUMNS = (
    "date commit cpu threads model asked_mlp_density asked_head_density what case value error unit note sources".split()
)
WINDOW = 512
PROMPTS = (
    "The package was", "He said that", "In the year", "To install it", "The first", "When the rain", "A function",
)  # fmt: skip
SECONDS = 4.0  # of decoding, where two processes share the machine

WORKER = """
import sys, time
import torch
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.cpu import CpuEngine
from dejavu_train.models.opt import load_opt
task, model, bundle, mlp, heads, seconds = sys.argv[1:]
model, used = load_opt(model), Bundle.from_pretrained(bundle).at(float(mlp), float(heads))
before = time.perf_counter()
engine = CpuEngine(model, used)
print(time.perf_counter() - before, flush=True)
if task == "start":
    raise SystemExit
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.stdin.readline()
tokens, end = 0, time.perf_counter() + float(seconds)
while time.perf_counter() < end:
    tokens += len(engine.generate([[2]], 200, stop_tokens=())[0])
print(tokens / (time.perf_counter() - end + float(seconds)), flush=True)
"""

Found = list[dict[str, Any]]


def worker(args: argparse.Namespace, task: str, seconds: float = SECONDS, **environment: str) -> subprocess.Popen[str]:
    """A process that builds the sparse engine, says how long that took, and decodes once a line is written to it."""
    command = [sys.executable, "-c", WORKER, task, args.model, args.bundle]
    command += [str(args.mlp_density), str(args.head_density), str(seconds)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=os.environ | environment, **pipes)


def answer(process: subprocess.Popen[str]) -> float:
    """The next number that the worker says."""
    assert process.stdout is not None
    return float(process.stdout.readline())


def go(process: subprocess.Popen[str]) -> None:
    """Let the worker decode."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def start(args: argparse.Namespace) -> Found:
    """The first engine compiles, the second reads the cache."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = []
        for _ in range(2):
            with worker(args, "start", NUMBA_CACHE_DIR=folder) as process:
                seconds.append(answer(process))
    return [
        {"case": name, "value": value, "unit": "s"} for name, value in zip(("first", "again"), seconds, strict=True)
    ]


def two(args: argparse.Namespace) -> Found:
    """One process, then two that decode at the same time, then one again."""
    processes = [worker(args, "decode") for _ in range(4)]
    for process in processes:
        answer(process)
    rates = []
    for turn in (processes[:1], processes[1:3], processes[3:]):
        for process in turn:
            go(process)
        rates.append([answer(process) for process in turn])
    for process in processes:
        process.communicate()
    names = ("one", "each of two", "one")
    return [
        {"case": name, "value": rate, "unit": "tokens/s"}
        for name, turn in zip(names, rates, strict=True)
        for rate in turn
    ]


def interrupt(args: argparse.Namespace) -> Found:
    """Ctrl-C while compiled code decodes."""
    process = worker(args, "decode", seconds=60)
    answer(process)
    go(process)
    time.sleep(1)
    before = time.perf_counter()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    assert "KeyboardInterrupt" in told, told
    return [{"case": "Ctrl-C to exit", "value": time.perf_counter() - before, "unit": "s"}]


def stream(args: argparse.Namespace) -> Found:
    """Through infer.py, whose own line says the rate, and through an engine that calls back for each token."""
    model, bundle = load_opt(args.model), Bundle.from_pretrained(args.bundle).at(args.mlp_density, args.head_density)
    engine = CpuEngine(model, bundle)
    tokens = [2, 100, 200, 300]
    engine.generate([tokens], 8, stop_tokens=())
    times = [time.perf_counter()]
    engine.generate([tokens], args.new_tokens, stop_tokens=(), callback=lambda *_: times.append(time.perf_counter()))
    engine.close()
    rows = [{"case": "callback", "value": (len(times) - 1) / (times[-1] - times[0]), "unit": "tokens/s"}]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "prompt.txt"
        text.write_text("the model reads a text that nobody scores. " * 80, encoding="utf-8")
        command = [sys.executable, "infer.py", "--text", str(text), "--model", args.model, "--bundle", args.bundle]
        command += ["--output", folder, "--tokens", "0", "--timing", "false", "--backend", "cpu"]
        command += ["--generate", "the model reads", "--new_tokens", str(args.new_tokens)]
        command += ["--timing_mlp_density", str(args.mlp_density), "--timing_head_density", str(args.head_density)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "tokens a second" in line]
    rate = float(lines[-1].split(" tokens a second")[0].split()[-1])
    return [*rows, {"case": "infer.py --generate", "value": rate, "unit": "tokens/s"}]


def read_rows(path: Path, tokenizer: Any, tokens: int) -> list[list[int]]:
    """One window of each document of a .jsonl file, until there are so many tokens."""
    rows: list[list[int]] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            ids = tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"][: WINDOW - 1]
            if len(ids) >= WINDOW // 2:
                rows.append([2, *ids])
            if sum(map(len, rows)) >= tokens:
                break
    return rows


def perplexity(args: argparse.Namespace) -> Found:
    """Every token through the decoding step, dense and sparse: fp32, int8 with several groups, 4-bit codes."""
    model, tokenizer = load_opt(args.model), load_tokenizer(args.model)
    bundle = Bundle.from_pretrained(args.bundle).at(args.mlp_density, args.head_density)
    rows = {path.stem: read_rows(path, tokenizer, args.tokens) for path in args.text}
    result: Found = []
    formats: dict[str, dict[str, Any]] = {"fp32": {"stored": "float32"}}
    formats |= {f"int8 group {group}": {"stored": "int8", "group": group} for group in args.groups}
    formats |= {"codes": {"stored": "codes"}} if how_stored(model, None)[0] == "codes" else {}
    for name, used in (("dense", None), ("sparse", bundle)):
        reference: dict[str, list[Tensor]] = {}
        for form, options in formats.items():
            engine = CpuEngine(model, used, context=WINDOW, **options)
            scored = {text: engine.score(some) for text, some in rows.items()}
            engine.close()
            reference = reference or scored
            for text, nll in {**scored, "all": [one for some in scored.values() for one in some]}.items():
                exact = reference[text] if text != "all" else [one for some in reference.values() for one in some]
                nats, least = (np.array([float(row.double().sum()) for row in rows]) for rows in (nll, exact))
                value, error = (100 * (share or 0.0) for share in increase(nats, least, [len(row) for row in nll]))
                note = f"perplexity {float(torch.cat(nll).mean().exp()):.4f}, {sum(map(len, nll))} tokens"
                row = {"case": f"{name} {form} on {text}", "value": value, "error": error}
                if form != "fp32":
                    result.append(row | {"unit": "%", "note": note})
    return result


def pipeline_times(
    model: str, bundle: Bundle, prompts: Sequence[str], clock: Callable[[], float], **call: Any
) -> dict[str, list[float]]:
    """Milliseconds a token of a pipeline of the dense model, and of one of ours, for each prompt.

    Each prompt goes through both, and the first is not counted. call: what is given beside the prompt, by default
    nothing.
    """
    from transformers import OPTForCausalLM, pipeline

    tokenizer = load_tokenizer(model)
    models = {
        "transformers dense": OPTForCausalLM.from_pretrained(model),
        "sparse": SparseOPTForCausalLM.from_pretrained(model, bundle),
    }
    writers = {
        name: pipeline("text-generation", each, tokenizer=tokenizer, device="cpu") for name, each in models.items()
    }
    times: dict[str, list[float]] = {name: [] for name in writers}
    for turn, prompt in enumerate(prompts):
        for name, write in writers.items():
            torch.manual_seed(turn)
            before = clock()
            (made,) = write(prompt, return_tensors=True, **call)
            seconds = clock() - before
            new = len(made["generated_token_ids"]) - len(tokenizer(prompt)["input_ids"])
            times[name].append(1e3 * seconds / new)
    return {name: taken[1:] for name, taken in times.items()}


def defaults(args: argparse.Namespace) -> Found:
    """A pipeline of the dense model and one of ours, each prompt through both. The first call of each is not timed."""
    bundle = Bundle.from_pretrained(args.bundle)
    times = pipeline_times(args.model, bundle, ("Once", *PROMPTS), time.perf_counter)
    kept = {"mlp_density": bundle.mean_density("mlp"), "head_density": bundle.mean_density("heads")}
    ratios = [slow / fast for slow, fast in zip(*times.values(), strict=True)]
    note = f"{len(ratios)} pairs, {min(ratios):.3g} to {max(ratios):.3g}; load {os.getloadavg()[0]:.1f}"
    medians = [
        kept | {"case": name, "value": statistics.median(taken), "unit": "ms/token"} for name, taken in times.items()
    ]
    return [
        *medians,
        kept | {"case": "sparse over dense", "value": statistics.median(ratios), "unit": "times", "note": note},
    ]


PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "perplexity": perplexity, "start": start, "stream": stream, "two": two, "interrupt": interrupt,
    "pipeline": defaults,
}  # fmt: skip


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/demo/bundle")
    parser.add_argument("--mlp-density", type=float, default=0.2)
    parser.add_argument("--head-density", type=float, default=0.85)
    parser.add_argument("--text", type=Path, nargs="+", default=[], help=".jsonl files of perplexity, field text")
    parser.add_argument("--tokens", type=int, default=4000, help="of each text")
    parser.add_argument("--groups", type=int, nargs="+", default=[64], help="columns a scale")
    parser.add_argument("--new-tokens", type=int, default=400, help="of stream")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu_extra.csv"))
    args = parser.parse_args()
    if "perplexity" in args.parts and not args.text:
        parser.error("perplexity needs --text FILE.jsonl")
    torch.set_num_threads(usable_cores())
    torch.manual_seed(0)
    conditions = {
        **made_now("dejavu_train/engine/cpu"), "cpu": cpu_name(), "threads": usable_cores(),
        "model": Path(args.model).name, "asked_mlp_density": args.mlp_density,
        "asked_head_density": args.head_density,
    }  # fmt: skip
    for part in args.parts:
        for row in PARTS[part](args):
            append_row(args.out, five_digits(conditions | {"what": part} | row), COLUMNS)
            error = f" +- {row['error']:.2g}" if "error" in row else ""
            print(f"{part}: {row['case']}: {row['value']:.4g}{error} {row['unit']}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
