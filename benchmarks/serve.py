"""A server under load: 64 clients of the package openai on one address.

    python -m benchmarks.serve --seconds 600 --out benchmarks/results/serve.jsonl

Clients ask for texts of mixed lengths, whole and as streams. Some close a stream in the middle, some give up waiting,
some ask for what is refused. Every request must end in a text or in an error of OpenAI's form. The row has counts, and
p50 and p99 of seconds to the first token and to the end. Clients that are refused with 429 wait and ask again.

How fast a server is beside its engine, `benchmarks.serve_speed` says. What clients see who ask wrongly,
`benchmarks.malformed`.
"""

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from benchmarks.rows import append_json, command_line, made_now
from benchmarks.servers import serving

PROMPT = "The model reads a token, and the layer keeps only those rows that matter for it."
PATIENCE = 60.0  # seconds of a client


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


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/opt-mini/bundle")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new", type=int, default=128, help="tokens of a text at most")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    command = ["--model", options.model, "--bundle", options.bundle, "--device", options.device]
    row: dict[str, Any] = {"model": options.model, "device": options.device, "rows": options.rows}
    row |= {"cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 1)}
    with serving([*command, "--rows", str(options.rows)]) as url:
        row |= asyncio.run(Load(url, options.model, options.new).run(options.clients, options.seconds))
    append_json(options.out, row | made_now("dejavu_train/extras/serving", "dejavu_train/engine"))


if __name__ == "__main__":
    main()
