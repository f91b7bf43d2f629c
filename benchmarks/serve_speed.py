"""Tokens a second of a server whose rows are all taken, beside its engine alone and beside `transformers serve`.

    python -m benchmarks.serve_speed --turns 7                             on a CPU: quiet cores, some four minutes
    python -m benchmarks.serve_speed --device cuda --rival-options=--continuous-batching
    bash benchmarks/serve_gpu.sh OUTPUT_FOLDER                             on a GPU, larger models too, and pipeline()

Each contestant is a process of its own, with the same environment and as many threads. They take turns, and the process
that asks computes nothing. A turn is as many texts of one length as there are rows, prompts included, from the first
request to the last answer. The engine's process loads what the server loads, and calls ``generate()`` with the prompts
that the server's clients send. The first turn is for what is compiled, captured or cached.

After each turn the engine's process takes its steps alone, as `benchmarks.cpu_decode` does. `engine, steps` says how
many tokens a second they are, without a prompt. It is above `engine` by the share that prompts take. Where it is far
above, something else had the cores. `transformers serve` has the dense model, in the same number type.

A row for each contestant in --out: median, p20 and p80, and the median over the engine's.
"""

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.rows import append_row, command_line, made_now
from benchmarks.servers import START_SECONDS, environment, free_port, serving

PROMPT = "The model reads a token, and the layer keeps only those rows that matter for it."
MOST_APART = 1.5  # times: steps alone over texts, above which something else had the cores
COLUMNS = (
    "date commit device threads model bundle rows new contestant turns tokens_per_second p20 p80 ratio note versions"
    " sources"
).split()


async def tokens_per_second(url: str, model: str, rows: int, new: int, more: dict[str, Any]) -> float:
    """Of so many clients at once, each with a text of ``new`` tokens. more: what OpenAI's API does not know."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
        begun = time.perf_counter()
        ask = client.completions.create
        found = await asyncio.gather(
            *(ask(model=model, prompt=PROMPT, max_tokens=new, temperature=0, extra_body=more) for _ in range(rows))
        )
        return sum(each.usage.completion_tokens for each in found if each.usage) / (time.perf_counter() - begun)


def engine_process(options: Any) -> None:
    """For each line of the input: a turn, then as many steps alone. Prints both rates."""
    from dejavu_train.engine.inputs import Row
    from dejavu_train.extras.serving.config import ServeConfig
    from dejavu_train.extras.serving.server import load
    from dejavu_train.models.opt import load_tokenizer

    config = ServeConfig(options.model, bundle=options.bundle, device=options.device, rows=options.rows)
    model = load(config)
    pool, rows, new = model.engine_pool(), options.rows, options.new
    engine = pool.engine(rows, pool.shape.max_positions)
    prompts = [load_tokenizer(config.model)(PROMPT).input_ids] * rows
    print("ready", getattr(engine, "threads", 0), flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        made = engine.generate(prompts, new, stop_tokens=(), min_new_tokens=new)
        whole = sum(map(len, made)) / (time.perf_counter() - begun)
        engine.begin([Row.of_prompt(prompt, len(prompt) + new) for prompt in prompts])
        engine.look(rows)
        begun = time.perf_counter()
        left = new - 1
        while left > 0:
            left -= engine.steps(left, "greedy")
        engine.look(rows)
        print(whole, rows * (new - 1) / (time.perf_counter() - begun), flush=True)


@contextlib.contextmanager
def engine_alone(options: Any) -> Iterator[tuple[Callable[[], list[float]], int]]:
    """The engine's process: a call for a turn of it, and its threads."""
    command = [sys.executable, "-m", "benchmarks.serve_speed", "--engine", "--model", options.model]
    command += ["--bundle", options.bundle, "--device", options.device, "--rows", str(options.rows)]
    command += ["--new", str(options.new)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=Path.cwd()
    )
    assert process.stdin is not None and process.stdout is not None
    hear, tell = process.stdout, process.stdin

    def turn() -> list[float]:
        tell.write("\n")
        tell.flush()
        return [float(word) for word in hear.readline().split()]

    try:
        yield turn, int(hear.readline().split()[1])
    finally:
        process.terminate()
        process.communicate()


@contextlib.contextmanager
def transformers_serve(model: str, device: str, more: Sequence[str]) -> Iterator[str]:
    """The address of `transformers serve` with this model, preloaded."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("transformers")), "serve", model, "--device", device]
    command += ["--dtype", "float32" if device == "cpu" else "float16", "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, *more], env=environment(HF_HUB_OFFLINE="1"), **quiet)  # type: ignore[call-overload]
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"transformers serve did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def compare(options: Any) -> list[dict[str, Any]]:
    """Contestants in turns, and a row for each."""
    rates: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        command = ["--model", options.model, "--bundle", options.bundle, "--device", options.device]
        url = stack.enter_context(serving([*command, "--rows", str(options.rows)]))
        engine, threads = stack.enter_context(engine_alone(options))
        rival = None
        if options.rival:
            rival = stack.enter_context(transformers_serve(options.model, options.device, options.rival_options))
        for turn in range(options.turns + 1):
            least = {"min_tokens": options.new}
            asked = options.model, options.rows, options.new
            found = {"server": asyncio.run(tokens_per_second(url, *asked, least))}
            found |= dict(zip(("engine", "engine, steps"), engine(), strict=True))
            if rival is not None:
                found["transformers serve"] = asyncio.run(tokens_per_second(rival, *asked, {}))
            if turn:
                for name, rate in found.items():
                    rates.setdefault(name, []).append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    apart = medians["engine, steps"] / medians["engine"]
    if apart > MOST_APART:
        print(f"steps alone are {apart:.2f} times as fast as texts: the cores were not quiet", file=sys.stderr)
    return [
        {
            "threads": threads, "contestant": name, "turns": len(values), "tokens_per_second": medians[name],
            "p20": _cut(values, 0), "p80": _cut(values, 3), "ratio": medians[name] / medians["engine"],
            "note": " ".join(options.rival_options) if name == "transformers serve" else "",
        }
        for name, values in rates.items()
    ]  # fmt: skip


def _cut(values: Sequence[float], i: int) -> float:
    return statistics.quantiles(values, n=5, method="inclusive")[i] if len(values) > 1 else values[0]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/opt-mini/bundle")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new", type=int, default=128, help="tokens of a text")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--no-rival", dest="rival", action="store_false", help="leave `transformers serve` out")
    parser.add_argument("--rival-options", nargs="*", default=[], help="of `transformers serve`")
    parser.add_argument("--engine", action="store_true", help="be the engine's process")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serve_speed.csv"))
    options = parser.parse_args(argv)
    if options.engine:
        engine_process(options)
        return
    rows = compare(options)  # before anything here imports torch
    import torch
    import transformers

    from benchmarks.cpu_decode import cpu_name

    device = cpu_name() if options.device == "cpu" else torch.cuda.get_device_name()
    shared = made_now("dejavu_train/extras/serving", "dejavu_train/engine") | {
        "device": device, "model": Path(options.model).name, "bundle": Path(options.bundle).name,
        "rows": options.rows, "new": options.new,
        "versions": f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}",
    }  # fmt: skip
    for row in rows:
        numbers = {name: round(value, 4) for name, value in row.items() if isinstance(value, float)}
        append_row(options.out, shared | row | numbers, COLUMNS)
        print(json.dumps(row | numbers), flush=True)


if __name__ == "__main__":
    main()
