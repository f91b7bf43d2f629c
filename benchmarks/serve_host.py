"""What the server's own work costs: an engine that computes nothing, with steps of a fixed time beside the caller.

    python -m benchmarks.serve_host --turns 30                      some 20 seconds, no GPU
    python -m benchmarks.serve_host --step-ms 0.23 --join-ms 0.3    a small model on a large GPU

The server is `dejavu serve`'s line, application and HTTP in a process of their own. Its engine is a clock: a step and a
prompt take so many milliseconds of it, one after another, and whoever waits for them sleeps. Tokens are drawn.

A turn is that of `benchmarks.serve_speed`. ``plain`` clients hold their connections and send bytes that were made
before, so a turn is the server's. ``openai`` clients are the package of this name, whose own work is in the turn.
``milliseconds`` is the median turn, ``least`` what the clock alone needs. CPU time is that of the server's threads.
It is measured for texts of two lengths: the difference gives microseconds a step, the rest microseconds a request.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.rows import append_json, command_line, made_now
from benchmarks.serve_speed import PROMPT, tokens_per_second
from benchmarks.servers import environment
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.scores import Score
from dejavu_train.engine.session import Session, Sight

CHUNK = 16  # steps at most between two looks, as the GPU engine has it
SHORT = 16  # tokens of the shorter texts


class Clock(Session):
    """An engine of drawn tokens, whose steps take time on a clock beside the caller."""

    beside = True

    def __init__(self, batch: int, context: int, vocab: int, step_ms: float, join_ms: float) -> None:
        super().__init__()
        self.batch, self.context, self.shape = batch, context, SimpleNamespace(vocab_size=vocab)
        self.state = SimpleNamespace(tokens=np.random.default_rng(0).integers(4, vocab, (batch, context)))
        self._held, self._total = np.zeros(batch, int), np.zeros(batch, int)
        self._step, self._join, self._ready = step_ms / 1000, join_ms / 1000, 0.0

    def _queue(self, seconds: float) -> None:
        self._ready = max(self._ready, time.perf_counter()) + seconds

    def open(self, stops: Sequence[int]) -> None:
        self._total[:] = 0

    def begin(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def place(self, b: int, row: Row) -> list[Score]:
        self._held[b], self._total[b] = len(row.tokens) + 1, row.total
        self._queue(self._join)
        return []

    def steps(self, n: int, mode: str, score: bool = False) -> int:
        n = min(n, CHUNK)
        np.minimum(self._held + n, self._total, out=self._held)
        self._queue(n * self._step)
        return n

    def read(self, n: int) -> tuple[list[int], list[bool], dict[int, Any]]:
        return self._held[:n].tolist(), (self._held >= self._total)[:n].tolist(), {}

    def sight(self) -> Callable[[], Sight]:
        found, ready = Sight(self.state.tokens, *self.read(self.batch)), self._ready

        def wait() -> Sight:
            time.sleep(max(0.0, ready - time.perf_counter()))
            return found

        return wait

    def end(self, b: int) -> None:
        self._total[b] = 0


def server_process(options: Any) -> None:
    """Serve the clock. Prints the address."""
    import contextlib
    import socket

    from dejavu_train.engine.rows import Rows
    from dejavu_train.extras.serving.app import make_app
    from dejavu_train.extras.serving.line import Line
    from dejavu_train.extras.serving.metrics import Metrics
    from dejavu_train.extras.serving.requests import Reader
    from dejavu_train.extras.serving.server import run
    from dejavu_train.models.opt import load_tokenizer

    tokenizer = load_tokenizer(options.model)
    clock = Clock(options.rows, 1024, len(tokenizer), options.step_ms, options.join_ms)
    line = Line(Rows(clock, ()), (), 64, Metrics(), contextlib.nullcontext())
    app = make_app(line, Reader(tokenizer, 1024, len(tokenizer), False), "clock", {})
    line.start()
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    served: Any = SimpleNamespace(app=app, line=line, forced=False)
    run(served, listening, 5)


class Plain:
    """Clients that hold their connections. Each asks for a text and reads the whole answer."""

    def __init__(self, url: str, new: int) -> None:
        body = json.dumps({"model": "clock", "prompt": PROMPT, "max_tokens": new, "temperature": 0}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        self.address, self.bytes = urlsplit(url), head.encode() + b"\r\n\r\n" + body
        self.new = new

    async def turns(self, rows: int, turns: int) -> list[float]:
        """Seconds of each turn."""
        held = [await asyncio.open_connection(self.address.hostname, self.address.port) for _ in range(rows)]
        found = []
        for _ in range(turns):
            begun = time.perf_counter()
            for _, writer in held:
                writer.write(self.bytes)
            answers = await asyncio.gather(*(self._answer(reader) for reader, _ in held))
            found.append(time.perf_counter() - begun)
            for answer in answers:
                assert answer["usage"]["completion_tokens"] == self.new, answer
        for _, writer in held:
            writer.close()
        return found

    async def _answer(self, reader: asyncio.StreamReader) -> Any:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        return json.loads(await reader.readexactly(size))


def cpu_seconds(process: int) -> float:
    """CPU time of all threads of a process so far."""
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in tasks) / 1e9


async def openai_turns(url: str, options: Any) -> list[float]:
    """Seconds of each turn."""
    asked = f"{url}/v1", "clock", options.rows, options.new, {}
    return [options.rows * options.new / await tokens_per_second(*asked) for _ in range(options.turns)]


def measure(options: Any) -> dict[str, Any]:
    """A row."""
    more = ["--model", options.model, "--rows", str(options.rows)]
    more += ["--step-ms", str(options.step_ms), "--join-ms", str(options.join_ms)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serve_host", "--server", *more],
        stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        spent, plain = {}, []
        for new in (SHORT, options.new):
            clients = Plain(url, new)
            asyncio.run(clients.turns(options.rows, 3))
            before = cpu_seconds(process.pid)
            plain = asyncio.run(clients.turns(options.rows, options.turns))
            spent[new] = (cpu_seconds(process.pid) - before) / options.turns
        theirs = asyncio.run(openai_turns(url, options))
    finally:
        process.terminate()
        process.communicate()
    a_step = (spent[options.new] - spent[SHORT]) / (options.new - SHORT)
    return {
        "rows": options.rows, "new": options.new, "step_ms": options.step_ms, "join_ms": options.join_ms,
        "turns": options.turns, "least": round((options.new - 1) * options.step_ms + options.rows * options.join_ms, 1),
        "plain_milliseconds": round(1000 * statistics.median(plain), 1),
        "openai_milliseconds": round(1000 * statistics.median(theirs), 1),
        "microseconds_a_step": round(1e6 * a_step, 1),
        "microseconds_a_request": round(1e6 * (spent[SHORT] - SHORT * a_step) / options.rows, 1),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="checkpoints/opt-mini", help="whose tokenizer is taken")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new", type=int, default=128, help="tokens of a text")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--step-ms", type=float, default=0.23)
    parser.add_argument("--join-ms", type=float, default=0.3)
    parser.add_argument("--server", action="store_true", help="be the server's process")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if options.server:
        server_process(options)
    else:
        append_json(options.out, measure(options) | made_now("dejavu_train/extras/serving", "dejavu_train/engine"))


if __name__ == "__main__":
    main()
