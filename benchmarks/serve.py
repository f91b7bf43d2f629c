"""A server's tokens a second beside its engine and `transformers serve`, and what becomes of requests under load.

    python -m benchmarks.serve speed                             on a CPU: quiet cores, some four minutes
    python -m benchmarks.serve speed --device cuda --rival-options=--continuous-batching
    python -m benchmarks.serve load --seconds 600                64 clients of the package openai on one address
    bash benchmarks/gpu.sh OUTPUT_FOLDER serve                   on a GPU, larger models too

**Speed**: each contestant is a process of its own, with the same environment and as many threads. They take turns, and
the process that asks computes nothing. A turn is as many texts of one length as there are rows, prompts included. The
engine's process calls ``generate()`` with the prompts that the server's clients send.

**Load**: clients ask for texts of mixed lengths, whole and as streams. Some close a stream in the middle, some give up
waiting, some ask for what is refused. Every request must end in a text or in an error of OpenAI's form. Clients that
are refused with 429 wait and ask again.
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.rows import SERVER, append_json, append_row, command_line, made_now

PROMPT = "The model reads a token, and the layer keeps only those rows that matter for it."
PATIENCE = 60.0  # seconds of a client
COLUMNS = (
    "date commit device threads model bundle rows new contestant turns tokens_per_second p20 p80 ratio note versions"
    " sources"
).split()
START_SECONDS = 300.0


def environment(**more: str) -> dict[str, str]:
    """This one, with threads that sleep while they wait, as the commands of dejavu have it."""
    return os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | more


def free_port() -> int:
    """A port at which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextlib.contextmanager
def serving(command: Sequence[str], told: list[str] | None = None) -> Iterator[str]:
    """The address of `dejavu serve` with these options. Raises RuntimeError where it does not start.

    told: gets the line that it says then.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "dejavu_train", "serve", *command, "--port", "0"],
        stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert process.stderr is not None
    said: deque[str] = deque(maxlen=20)
    try:
        for line in process.stderr:
            if line.startswith("serving "):
                if told is not None:
                    told.append(line.strip())
                yield line.split(" at ")[1].split(",")[0]
                return
            said.append(line)
        raise RuntimeError(f"the server ended with {process.wait()}: {''.join(said)}")
    finally:
        process.terminate()
        process.communicate()


class Load:
    """Clients of one server. Counts what became of their requests."""

    def __init__(self, url: str, model: str, most: int, seed: int = 0) -> None:
        self.client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)
        self.model, self.most, self.rng = model, most, random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.first: list[float] = []
        self.whole: list[float] = []

    async def run(self, clients: int, seconds: float) -> dict[str, Any]:
        """Load of so many clients for so long. Returns a row."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(end) for _ in range(clients)))
        await self.client.close()
        row: dict[str, Any] = {"clients": clients, "seconds": seconds, **dict(sorted(self.ends.items()))}
        for name, values in (("first", self.first), ("whole", self.whole)):
            if len(values) > 1:
                parts = statistics.quantiles(values, n=100)
                row |= {f"{name}_p50": round(parts[49], 4), f"{name}_p99": round(parts[98], 4)}
        return row

    async def _client(self, end: float) -> None:
        while time.monotonic() < end:
            try:
                outcome = await self._ask()
            except openai.RateLimitError:
                outcome = "queue full"
                await asyncio.sleep(self.rng.uniform(0.05, 0.3))
            except openai.APIStatusError as error:
                outcome = f"refused {error.status_code}" if isinstance(error.body, dict) else "strange"
            except openai.APITimeoutError:
                outcome = "given up"
            except openai.APIError as error:
                outcome = f"lost: {type(error).__name__}"
            self.ends[outcome] += 1

    async def _ask(self) -> str:
        kind, begun = self.rng.random(), time.perf_counter()
        prompt, new = PROMPT * self.rng.randint(1, 4), self.rng.randint(1, self.most)
        asked: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": new}
        if self.rng.random() < 0.5:
            asked |= {"temperature": self.rng.uniform(0.5, 1.5), "top_p": 0.9, "seed": self.rng.randrange(1000)}
        if kind < 0.05:
            await self.client.completions.create(**asked | {"max_tokens": 10**6})
        if kind < 0.12:
            client = self.client.with_options(timeout=self.rng.uniform(0.01, 0.5))
            await client.completions.create(**asked)
        elif kind < 0.6:
            await self.client.completions.create(**asked)
        else:
            stream, parts = await self.client.completions.create(**asked, stream=True), 0
            leaves = self.rng.randint(1, 5) if kind < 0.75 else None
            async for _ in stream:
                parts += 1
                if parts == 1:
                    self.first.append(time.perf_counter() - begun)
                if parts == leaves:
                    await stream.close()
                    return "left"
        self.whole.append(time.perf_counter() - begun)
        return "text"


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
    """For each line of the input a turn. Prints its rate."""
    from dejavu_train.extras.serving.config import ServeConfig
    from dejavu_train.extras.serving.server import load
    from dejavu_train.models.load import load_tokenizer

    config = ServeConfig(options.model, bundle=options.bundle, device=options.device, rows=options.rows)
    model = load(config)
    pool, rows, new = model.engine_pool(), options.rows, options.new
    engine = pool.engine(rows, pool.shape.max_positions)
    prompts = [load_tokenizer(config.model)(PROMPT).input_ids] * rows
    print("ready", getattr(engine, "threads", 0), flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        made = engine.generate(prompts, new, stop_tokens=(), min_new_tokens=new)
        print(sum(map(len, made)) / (time.perf_counter() - begun), flush=True)


@contextlib.contextmanager
def engine_alone(options: Any) -> Iterator[tuple[Callable[[], float], int]]:
    """The engine's process: a call for a turn of it, and its threads."""
    command = [sys.executable, "-m", "benchmarks.serve", "engine", "--model", options.model]
    command += ["--bundle", options.bundle, "--device", options.device, "--rows", str(options.rows)]
    command += ["--new", str(options.new)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=Path.cwd()
    )
    assert process.stdin is not None and process.stdout is not None
    hear, tell = process.stdout, process.stdin

    def turn() -> float:
        tell.write("\n")
        tell.flush()
        return float(hear.readline())

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
            found |= {"engine": engine()}
            if rival is not None:
                found["transformers serve"] = asyncio.run(tokens_per_second(rival, *asked, {}))
            if turn:
                for name, rate in found.items():
                    rates.setdefault(name, []).append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
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


def write_speed(options: Any) -> None:
    """A row for each contestant: median, p20 and p80, and the median over the engine's."""
    rows = compare(options)  # before anything here imports torch
    import torch
    import transformers

    from benchmarks.cpu_decode import cpu_name

    shared = made_now(*SERVER) | {
        "device": cpu_name() if options.device == "cpu" else torch.cuda.get_device_name(),
        "model": Path(options.model).name, "bundle": Path(options.bundle).name,
        "rows": options.rows, "new": options.new,
        "versions": f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}",
    }  # fmt: skip
    for row in rows:
        numbers = {name: round(value, 4) for name, value in row.items() if isinstance(value, float)}
        append_row(options.out or "benchmarks/results/serve_speed.csv", shared | row | numbers, COLUMNS)
        print(json.dumps(row | numbers), flush=True)


def write_load(options: Any) -> None:
    """A row of counts, and of p50 and p99 of seconds to the first token and to the end."""
    command = ["--model", options.model, "--bundle", options.bundle, "--device", options.device]
    row: dict[str, Any] = {"model": options.model, "device": options.device, "rows": options.rows}
    row |= {"cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 1)}
    with serving([*command, "--rows", str(options.rows)]) as url:
        row |= asyncio.run(Load(url, options.model, options.new).run(options.clients, options.seconds))
    append_json(options.out or "benchmarks/results/serve.jsonl", row | made_now(*SERVER))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parts = {"speed": write_speed, "load": write_load, "engine": engine_process}  # speed starts the engine's process
    parser.add_argument("what", choices=list(parts), metavar="{speed,load}")
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/opt-mini/bundle")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new", type=int, default=128, help="tokens of a text, of a load at most")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--no-rival", dest="rival", action="store_false", help="leave `transformers serve` out")
    parser.add_argument("--rival-options", nargs="*", default=[], help="of `transformers serve`")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    parts[options.what](options)


if __name__ == "__main__":
    main()
