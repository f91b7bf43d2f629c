"""A server under load: 64 clients of the package openai on one address, and its speed beside the engine's own.

    python -m benchmarks.serve --seconds 600 --out benchmarks/results/serve.jsonl

Clients ask for texts of mixed lengths, whole and as streams. Some close a stream in the middle, some give up waiting,
some ask for what is refused. Every request must end in a text or in an error of OpenAI's form. The row has counts, and
p50 and p99 of seconds to the first token and to the end. Clients that are refused with 429 wait and ask again.

Then as many clients as the engine has rows write texts of one length. The row has their tokens a second, those of the
engine's own rows with the same prompts, and the ratio. Engine and server take turns, and medians are compared.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from benchmarks.rows import command_line, made_now

PROMPT = "The model reads a token, and the layer keeps only those rows that matter for it."
PATIENCE = 60.0  # seconds of a client
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch, as the server has it: its threads would spin


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


async def tokens_per_second(url: str, model: str, rows: int, new: int) -> float:
    """Of so many clients at once, each with a text of ``new`` tokens."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
        begun = time.perf_counter()
        ask = client.completions.create
        more = {"min_tokens": new}
        found = await asyncio.gather(
            *(ask(model=model, prompt=PROMPT, max_tokens=new, temperature=0, extra_body=more) for _ in range(rows))
        )
        return sum(each.usage.completion_tokens for each in found if each.usage) / (time.perf_counter() - begun)


def engine_tokens_per_second(engine: Any, prompt: list[int], rows: int, new: int) -> float:
    """Of the engine alone, the prompts included."""
    begun = time.perf_counter()
    made = engine.generate([prompt] * rows, new, stop_tokens=(), min_new_tokens=new)
    return sum(map(len, made)) / (time.perf_counter() - begun)


def compare(url: str, options: Any) -> dict[str, Any]:
    """Server and engine in turns."""
    from dejavu_train.models.opt import load_tokenizer
    from dejavu_train.sparse.model import SparseCausalLM

    model = SparseCausalLM.from_pretrained(options.model, options.bundle, sparse_from="prompt", device=options.device)
    prompt = load_tokenizer(options.model)(PROMPT).input_ids
    pool = model.engine_pool()
    engine = pool.engine(options.rows, pool.shape.max_positions)
    served, own = [], []
    for turn in range(options.turns + 1):
        pair = (
            asyncio.run(tokens_per_second(url, options.model, options.rows, options.new)),
            engine_tokens_per_second(engine, prompt, options.rows, options.new),
        )
        if turn:  # the first is for what is compiled and captured
            served.append(pair[0])
            own.append(pair[1])
    found = {"served": statistics.median(served), "engine": statistics.median(own)}
    return {"rows": options.rows, "new": options.new} | found | {"ratio": found["served"] / found["engine"]}


def start(command: Sequence[str]) -> tuple[subprocess.Popen[str], str]:
    """A server, and its address. Raises RuntimeError where it does not start."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dejavu_train", "serve", *command, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("serving "):
            return process, line.split(" at ")[1].split(",")[0]
    raise RuntimeError(f"the server ended with {process.wait()}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/opt-mini/bundle")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new", type=int, default=128, help="tokens of a text where speed is compared")
    parser.add_argument("--turns", type=int, default=5, help="of server and engine, 0 = no comparison")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    command = ["--model", options.model, "--bundle", options.bundle, "--device", options.device]
    process, url = start([*command, "--rows", str(options.rows)])
    try:
        row: dict[str, Any] = {"model": options.model, "device": options.device, "cores": os.cpu_count()}
        if options.seconds:
            row |= asyncio.run(Load(url, options.model, options.new).run(options.clients, options.seconds))
        if options.turns:
            row |= compare(url, options)
    finally:
        process.terminate()
        process.wait()
    row |= made_now("dejavu_train/serving", "dejavu_train/engine")
    print(json.dumps(row), flush=True)
    if options.out:
        with open(options.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
