"""How long a server's rows pause while long prompts join them, and the first token of each turn of a chat.

    python -m benchmarks.serve_prompts --prompt 600                                         opt-mini on a CPU
    python -m benchmarks.serve_prompts --model FOLDER --bundle FOLDER/predictors --device cuda

**Pauses**: all rows but one write. Prompts of random ids join them, one after another. A pause is the time between two
parts of a stream, as its client sees it. A part may hold several tokens, and waits for whole characters, so the
server's own quantiles of the time between tokens stand beside. **Chat**: each turn sends the whole text so far and a
new sentence. Rows go to benchmarks/results/serve_prompts.jsonl.
"""

import asyncio
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.rows import SERVER, append_json, command_line, device_name, made_now
from benchmarks.serve import PROMPT, serving

TURNS, REPLY = 5, 64  # of a chat, and tokens of a reply


def quantiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the longest, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    found = {"p50": cuts[49], "p99": cuts[98], "longest": max(seconds)}
    return {f"{name}_{part}_ms": round(1e3 * value, 2) for part, value in found.items()}


class Pauses:
    """Streams of one server, and when their parts came."""

    def __init__(self, client: openai.AsyncOpenAI, model: str, vocab: int) -> None:
        self.client, self.model, self.vocab, self.rng = client, model, vocab, random.Random(0)
        self.came: list[list[float]] = []

    async def stream(self, prompt: Any, new: int) -> tuple[float, str, int]:
        """Seconds to the first part, the text, and how many of the prompt's tokens were there."""
        begun, came, text, cached = time.perf_counter(), [], "", 0
        asked = {"model": self.model, "prompt": prompt, "max_tokens": new, "temperature": 0}
        more = {"extra_body": {"min_tokens": new}, "stream_options": {"include_usage": True}}
        async for part in await self.client.completions.create(**asked, **more, stream=True):
            if part.choices:
                came.append(time.perf_counter())
                text += part.choices[0].text
            elif part.usage is not None and part.usage.prompt_tokens_details is not None:
                cached = part.usage.prompt_tokens_details.cached_tokens or 0
        self.came.append(came)
        return came[0] - begun, text, cached

    def ids(self, n: int) -> list[int]:
        return [self.rng.randrange(3, self.vocab) for _ in range(n)]

    async def joined(self, rows: int, prompt: int, joins: int, new: int) -> dict[str, Any]:
        """Rows write `new` tokens each, and after a quarter of a second prompts join them."""
        writers = [asyncio.create_task(self.stream(self.ids(16), new)) for _ in range(rows - 1)]
        await asyncio.sleep(0.25)
        begun, firsts = time.perf_counter(), []
        for _ in range(joins):
            firsts.append((await self.stream(self.ids(prompt), 2))[0])
        ended, lengths = time.perf_counter(), {len(each) for each in self.came}
        await asyncio.gather(*writers)
        pauses: dict[str, list[float]] = {"joining": [], "quiet": []}
        for came in (each for each in self.came if len(each) > max(lengths)):
            for before, after in zip(came, came[1:], strict=False):
                if before >= begun:
                    pauses["joining" if after <= ended else "quiet"].append(after - before)
        row: dict[str, Any] = {"prompt": prompt, "joins": joins} | quantiles("first", firsts)
        for name, seconds in pauses.items():
            row |= quantiles(name, seconds) if len(seconds) > 1 else {}
        return row

    async def chat(self, tokens: int, page: Callable[[], str]) -> dict[str, Any]:
        """First token by the server's own clock, in milliseconds, and cached tokens of each turn.

        tokens: of the first turn, about. page: the server's metrics.
        """
        text, firsts, found = PROMPT * max(1, tokens // 18), [], []
        for _ in range(TURNS):
            before = first_seconds(page())
            _, reply, cached = await self.stream(text, REPLY)
            firsts.append(round(1e3 * (first_seconds(page()) - before), 2))
            found.append(cached)
            text += reply + PROMPT
        return {"chat_first_ms": firsts, "chat_cached": found}


def first_seconds(page: str) -> float:
    """Seconds to the first tokens of all requests together."""
    return float(re.findall(r"first_token_seconds_sum (\S+)", page)[0])


async def measured(url: str, options: Any) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        streams = Pauses(client, options.model, options.vocab)
        row = await streams.joined(options.rows, options.prompt, options.joins, options.new)

        def page() -> str:
            return httpx.get(url.removesuffix("/v1") + "/metrics").text

        for quantile, value in re.findall(r'between_tokens_seconds{quantile="([\d.]+)"} (\S+)', page()):
            row[f"between_p{float(quantile) * 100:.0f}_ms"] = round(1e3 * float(value), 2)
        return row | await streams.chat(options.chat, page)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/opt-mini/bundle")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--prefill-chunk", type=int, help="tokens of a prompt between two steps. As the server's")
    parser.add_argument("--joins", type=int, default=20)
    parser.add_argument("--new", type=int, default=400, help="tokens of the rows that write meanwhile")
    parser.add_argument("--chat", type=int, default=400, help="tokens of a chat's first turn, about")
    parser.add_argument("--vocab", type=int, default=4000, help="random ids are below it")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serve_prompts.jsonl"))
    options = parser.parse_args()
    command = ["--model", options.model, "--device", options.device, "--rows", str(options.rows)]
    command += ["--bundle", options.bundle] if options.bundle else []
    command += ["--prefill_chunk", str(options.prefill_chunk)] if options.prefill_chunk else []
    begun = time.perf_counter()
    told: list[str] = []
    with serving(command, told) as url:
        row: dict[str, Any] = {"model": Path(options.model).name, "bundle": Path(options.bundle).name}
        row |= {"device": device_name(options.device), "prefill_chunk": options.prefill_chunk, "rows": options.rows}
        row |= {"ready_s": round(time.perf_counter() - begun, 2), "told": told[0]}
        row |= asyncio.run(measured(url, options))
    append_json(options.out, row | made_now(*SERVER))


if __name__ == "__main__":
    main()
