"""Sixteen threads call one model at once. Every text must be what it is alone.

Each caller draws requests of mixed lengths and reads its own TextIteratorStreamer while the model writes. One caller's
streamer raises after some tokens, another one asks for prompts that are too long. Their calls end with their own
errors, and disturb nobody. Meanwhile ``set_bundle`` changes between two densities. A text is right if it is that of a
bundle that was set at some moment of the call.

A call may wait for all calls that had arrived before it, and for what those left to do. Its first token comes no later,
or the wait is unfair. A row has the longest wait, and by how much the worst call exceeded that.
"""

import dataclasses
import random
import threading
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, TextIteratorStreamer

from dejavu_train import Bundle, SparseOPTForCausalLM
from dejavu_train.models.load import load_model

CALLERS = 16
POOL = 24  # requests, whose texts are known
TIMEOUT = 120.0  # of a streamer: longer silence is a caller that was forgotten
PAUSE = (0.2, 1.0)  # between two calls of set_bundle, seconds


class Broken(RuntimeError):
    """What the broken streamer raises."""


class Streamer(TextIteratorStreamer):
    """Notes when the first new token came. After ``breaks`` tokens it raises."""

    def __init__(self, tokenizer: Any, breaks: int | None = None) -> None:
        super().__init__(tokenizer, skip_prompt=True, timeout=TIMEOUT)
        self.puts, self.breaks, self.first = 0, breaks, 0.0

    def put(self, value: Any) -> None:
        self.puts += 1
        if self.puts == 2:  # the first is the prompt
            self.first = time.perf_counter()
        if self.breaks is not None and self.puts > self.breaks:
            raise Broken("a streamer that raises")
        super().put(value)


@dataclasses.dataclass
class Call:
    """A call's moments in seconds. set_bundle is one as well. first: when its first token came."""

    arrived: float
    first: float
    ended: float


class Crowd:
    """One model, its two bundles and requests with the texts that they have alone."""

    def __init__(self, model: str, bundle: Bundle, backend: str, device: str = "cpu", seed: int = 0) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.bundles = [bundle.at(mlp_density=0.2), bundle.at(mlp_density=0.6)]
        dense = load_model(model, "float32" if device == "cpu" else "float16", device)
        self.model = SparseOPTForCausalLM.from_model(dense, self.bundles[0], backend, "prompt")
        generator = torch.Generator().manual_seed(seed)
        limit, vocabulary = dense.config.max_position_embeddings, dense.config.vocab_size
        self.too_long = torch.randint(4, vocabulary, (1, limit + 3), generator=generator).to(device)
        self.requests: list[tuple[Tensor, int]] = []
        for _ in range(POOL):
            length, new = (int(torch.randint(*bounds, (), generator=generator)) for bounds in ((1, 48), (4, 28)))
            self.requests.append((torch.randint(4, vocabulary, (1, length), generator=generator).to(device), new))
        self.alone: list[list[tuple[str, list[int]]]] = []
        for one in self.bundles:
            self.model.set_bundle(one)
            self.alone.append([self.text(*request)[:2] for request in self.requests])
        self.model.set_bundle(self.bundles[0])
        self.refusal = self.error(self.too_long)
        self.calls: list[Call] = []
        self.changes: list[tuple[float, float, int]] = [(0.0, 0.0, 0)]
        self.wrong: list[str] = []
        self.raised = 0

    def text(self, ids: Tensor, new: int, breaks: int | None = None) -> tuple[str, list[int], Call]:
        """A text as its reader sees it, its tokens, and when."""
        streamer, out = Streamer(self.tokenizer, breaks), {}
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "eos_token_id": None}

        def write() -> None:
            try:
                out["ids"] = self.model.generate(ids, do_sample=False, streamer=streamer, **asked)
            except Exception as error:  # the reader raises it
                out["error"] = error
                streamer.text_queue.put(streamer.stop_signal)

        arrived = time.perf_counter()
        writer = threading.Thread(target=write)
        writer.start()
        text = "".join(streamer)
        writer.join()
        if "error" in out:
            raise out["error"]
        return text, out["ids"][0].tolist(), Call(arrived, streamer.first, time.perf_counter())

    def error(self, ids: Tensor) -> str:
        """What a call that cannot be ends with."""
        try:
            self.text(ids, 8)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    def caller(self, number: int, until: float) -> None:
        draw = random.Random(number)
        while time.perf_counter() < until:
            which = draw.randrange(POOL)
            ids, new = self.requests[which]
            try:
                if number == 0:
                    self._broken(ids, new)
                elif number == 1 and draw.random() < 0.5:
                    fault = self.error(self.too_long)
                    if fault != self.refusal:
                        self.wrong.append(f"a prompt that is too long: {fault}, alone {self.refusal}")
                    self.raised += 1
                    time.sleep(0.05)
                else:
                    self._judge(which, *self.text(ids, new))
            except Exception as error:
                self.wrong.append(f"caller {number}: {type(error).__name__}: {error}")

    def _broken(self, ids: Tensor, new: int) -> None:
        try:
            self.text(ids, new, breaks=2)
        except Broken:
            self.raised += 1
            time.sleep(0.05)
            return
        self.wrong.append("the error of a streamer that raises was lost")

    def _judge(self, which: int, text: str, ids: list[int], call: Call) -> None:
        self.calls.append(call)
        # (began, done, bundle): it may have been in force from when it began until the next one was done.
        ends = [done for _, done, _ in self.changes[1:]] + [float("inf")]
        held = zip(self.changes, ends, strict=False)
        possible = {bundle for (began, _, bundle), end in held if began <= call.ended and end >= call.arrived}
        if not any(self.alone[bundle][which] == (text, ids) for bundle in possible):
            other = [name for name, row in enumerate(self.alone) for alone in row if alone[1] == ids]
            self.wrong.append(f"request {which}: {text[:60]!r} {'of another request' if other else ''}")

    def changer(self, until: float) -> None:
        """set_bundle, now and then."""
        draw, which = random.Random(0), 0
        while time.perf_counter() < until:
            time.sleep(draw.uniform(*PAUSE))
            which = 1 - which
            began = time.perf_counter()
            self.changes.append((began, float("inf"), which))
            try:
                self.model.set_bundle(self.bundles[which])
            except Exception as error:
                self.wrong.append(f"set_bundle: {type(error).__name__}: {error}")
            ended = time.perf_counter()
            self.changes[-1] = (began, ended, which)
            self.calls.append(Call(began, ended, ended))

    def run(self, seconds: float) -> dict[str, Any]:
        """All callers at once for so long. Counts, and what was wrong."""
        until = time.perf_counter() + seconds
        crowd = [threading.Thread(target=self.caller, args=(number, until)) for number in range(CALLERS)]
        crowd.append(threading.Thread(target=self.changer, args=(until,)))
        for one in crowd:
            one.start()
        for one in crowd:
            one.join()
        left_behind = self._left_behind()
        after = [self.text(*request)[:2] for request in self.requests]
        if after != self.alone[self.changes[-1][2]]:
            self.wrong.append("alone again, afterwards: other texts")
        waits = [call.first - call.arrived for call in self.calls]
        return {
            "callers": CALLERS, "seconds": seconds, "calls": len(self.calls), "wrong": len(self.wrong),
            "examples": self.wrong[:5], "raised": self.raised, "set_bundle": len(self.changes) - 1,
            "longest_wait_s": round(max(waits, default=0.0), 3), "beyond_earlier_calls_s": round(left_behind, 3),
        }  # fmt: skip

    def _left_behind(self) -> float:
        """By how much, at most, a call's first token came after the end of all calls that arrived before it."""
        worst, latest = 0.0, 0.0
        for call in sorted(self.calls, key=lambda call: call.arrived):
            worst = max(worst, call.first - max(latest, call.arrived))
            latest = max(latest, call.ended)
        return worst
