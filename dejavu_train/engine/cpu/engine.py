"""The decode engine for CPUs: reads an OPT and a bundle, writes tokens; a whole step is one call of compiled code.

Dense and sparse come from the same code: a layer without a predictor runs densely. At batch 1 a processor reads weights
at the speed of its memory, so a step takes as long as the rows that it reads. Threads are as many as the process may
use; they wait without taking time from other work (see ``team``).
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu_train.engine.cpu import arrays
from dejavu_train.engine.cpu.entry_point import enter, prepare
from dejavu_train.engine.cpu.prefill import not_finite, prefill
from dejavu_train.engine.cpu.selectors import TargetPredictor, make_selectors, read_predictors
from dejavu_train.engine.cpu.step import MODE, N_STEPS, SCORE, TAIL_ONLY
from dejavu_train.engine.cpu.threads import SUPPORTED, new_control
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.engine.inputs import Sampling, check_rows, per_row, read_continuation, summary
from dejavu_train.errors import UserError
from dejavu_train.machine import cores

MAX_BATCH = 4
CALL_SECONDS = 0.05  # a call of compiled code takes at most about this long, so that Ctrl-C is heard
MODES = {
    "greedy": arrays.GREEDY,
    "temperature": arrays.TEMPERATURE,
    "top_p": arrays.TOP_P,
    "top_k": arrays.TOP_K_MODE,
}
Callback = Callable[[int, int], None]


def usable_cores() -> int:
    """How many threads an engine has by itself: as many as `machine.cores`, and no more than torch was told to use."""
    return max(1, min(cores(), torch.get_num_threads()))


class CpuEngine:
    """Decodes up to `batch` rows of up to `context` tokens on a CPU, by the selection rules of a bundle.

    Threads may share an engine: a call waits until those before it have their last token.
    K and V of skipped heads are computed when a head is next selected, so decoding equals the masked dense model.

    Args:
        model: a Hugging Face OPTForCausalLM, or `CpuWeights`, which several engines may share.
        bundle: a `Bundle`, or a list of `TargetPredictor`; None = dense.
        batch: rows, at most 4. Fewer prompts may be given.
        context: tokens a row can hold, prompt included; None = the model's limit.
        stored: float32, int8 or codes, how weights are kept; a given `CpuWeights` keeps its own. None = the codes of a
            4-bit model where they fit, else float32.
        group: columns that share a scale of int8 weights, a multiple of 64 up to 4096, of codes 64 or the model's
            group; None = 64.
        threads: None = as many as the process may use.
        release: give up the Hugging Face model's own tensors while copying.
    Raises:
        UserError: a size or format that does not fit, or an uncalibrated bundle.
    """

    def __init__(
        self,
        model: Any,
        bundle: Any = None,
        *,
        batch: int = 1,
        context: int | None = None,
        stored: str | None = None,
        group: int | None = None,
        threads: int | None = None,
        release: bool = False,
    ) -> None:
        if not SUPPORTED:
            raise UserError("the CPU engine needs POSIX threads (Linux or macOS); use backend gather")
        if not 1 <= batch <= MAX_BATCH:
            raise UserError(f"the CPU engine decodes 1 to {MAX_BATCH} rows at once, got a batch of {batch}")
        if threads is not None and threads < 1:
            raise UserError(f"threads must be at least 1, got {threads}")
        given = isinstance(model, CpuWeights)
        predictors, means, cascades = _rules(bundle)
        # Planes of a second stage are made from the weights as the model has them, not from rounded ones.
        late = release and stored == "int8" and bool(cascades)
        self.weights = model if given else CpuWeights.from_model(model, stored, group, release and not late)
        self.shape = self.weights.shape
        limit = self.shape.max_positions
        if context is not None and not 2 <= context <= limit:
            raise UserError(f"a context of {context} tokens does not fit: this model has positions for 2 to {limit}")
        if not self.shape.has_layers_of(getattr(bundle, "shape", self.shape)):
            raise UserError(f"the bundle belongs to another shape, {bundle.shape}, the model has {self.shape}")
        self.batch, self.context = batch, context or limit
        self.threads = threads or usable_cores()
        self.predictors = predictors
        fc1 = None if given or stored != "int8" else lambda i: model.model.decoder.layers[i].fc1.weight
        self.selectors = make_selectors(self.weights, predictors, means, cascades, fc1)
        if late:
            for parameter in model.model.decoder.layers.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype)
        operand = np.float32 if self.weights.model.rows.dtype == np.float32 else np.int16
        kept = int((self.selectors.kept >= 0).sum())
        self.state = arrays.new_state(self.shape, batch, self.context, kept, operand)
        self.scratch = arrays.new_scratch(self.shape, batch, self.context, self.threads, self.selectors, operand)
        self._command = np.zeros(8, np.int64)
        self._arguments = (self.weights.model, self.selectors, self.state, self.scratch, new_control(), self._command)
        self._seconds_per_step = CALL_SECONDS
        prepare((*self._arguments, 0, self.threads))
        for thread in range(1, self.threads):
            threading.Thread(
                target=enter, args=(*self._arguments, thread, self.threads), name=f"cpu-engine-{thread}", daemon=True
            ).start()
        self._owner = os.getpid()
        self._busy = threading.RLock()
        self._in_use = False  # within a call of `generate` or `score`, by the thread that holds the lock
        self._close = weakref.finalize(self, _send_home, self._arguments, self.threads, self._owner, self._busy)

    def describe(self) -> str:
        """What was decided when the engine was built: size, format, threads, and which layers are sparse."""
        rows = f"{self.batch} rows of {self.context} tokens"
        lines = [f"{rows}, weights in {self.weights.describe()}, {self.threads} threads"]
        for target, column in (("mlp", arrays.MLP), ("heads", arrays.HEADS)):
            line = f"{target}: {int((self.selectors.at[:, column] >= 0).sum())} of {self.shape.n_layers} layers sparse"
            tested = int((self.selectors.fine >= 0).sum())
            lines.append(line + (f", {tested} with a second stage" if target == "mlp" and tested else ""))
        return "\n".join(lines)

    def close(self) -> None:
        """Send the threads home; the engine cannot be used afterwards. Done by itself when the engine is forgotten."""
        self._close()

    def reset(self) -> None:
        """Forget all rows."""
        self.state.clear()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within it no other call begins: its rows stand in the engine from the first token to the last."""
        self._check_alive()  # a forked process may have copied the lock while it was held
        with self._busy:
            if self._in_use:
                raise UserError("this engine is decoding and called this callback; build another engine for its calls")
            self._in_use = True
            try:
                yield
            finally:
                self._in_use = False

    def _check_alive(self) -> None:
        if os.getpid() != self._owner:
            raise UserError("a forked process has no threads of this engine; build a new one there")
        if not self._close.alive:
            raise UserError("this engine was closed; build a new one")

    def _call(self, n_steps: int, mode: str, score: bool, tail_only: bool = False) -> None:
        self._check_alive()
        with self._busy:
            command = self._command
            command[N_STEPS], command[MODE], command[SCORE], command[TAIL_ONLY] = n_steps, MODES[mode], score, tail_only
            enter(*self._arguments, 0, self.threads)

    def step(self, mode: str = "greedy", score: bool = False) -> None:
        """One token for every row that is not done."""
        self._call(1, mode, score)

    def tail(self, mode: str = "greedy", score: bool = False) -> None:
        """The tokens that follow what `begin` ran densely."""
        self._call(1, mode, score, tail_only=True)

    def _steps(self, n: int, mode: str, score: bool) -> int:
        """Up to n steps in one call of compiled code that takes about CALL_SECONDS; returns how many were asked for."""
        n = max(1, min(n, int(CALL_SECONDS / self._seconds_per_step)))
        started = time.perf_counter()
        self._call(n, mode, score)
        self._seconds_per_step = max((time.perf_counter() - started) / n, 1e-6)
        return n

    def begin(
        self,
        rows: Sequence[Sequence[int]],
        total: Sequence[int],
        sparse_from: Sequence[int],
        prefilled: Sequence[int],
        sampler: Sampling,
        min_new_tokens: int = 0,
    ) -> None:
        """Write the known tokens, run `prefilled` tokens of each row densely at once, stand before the first step."""
        check_rows(rows, total, self.batch, self.context, self.shape)
        state, n = self.state, len(rows)
        state.clear()
        for b, row in enumerate(rows):
            state.tokens[b, : len(row)] = row
            state.known[b], state.limit[b], state.sparse_from[b] = len(row), total[b], sparse_from[b]
            state.least[b] = len(row) + min_new_tokens
            state.position[b] = prefilled[b] - 1
            # Not done, so that the tail gives the row its next token; whether it is sparse is decided there.
            state.row_state[b] = arrays.DENSE
            state.seed[b] = sampler.seed * MAX_BATCH + b
            if prefilled[b]:
                self.scratch.residual[b] = prefill(self.weights, self.selectors, state, b, prefilled[b]).numpy()
                state.watermark[:, b] = prefilled[b]
        state.temperature[:n], state.top_p[:n] = sampler.temperature or 1.0, sampler.top_p
        state.top_k[:n] = sampler.top_k

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (2,),
        sparse_from: int | Sequence[int] | None = None,
        prompt_phase: str = "dense",
        callback: Callback | None = None,
        min_new_tokens: int = 0,
    ) -> list[list[int]]:
        """Continue each prompt (a list of token ids) until a stop token or the limit; returns the new tokens.

        Args:
            max_new_tokens: at most this many per row; prompt and new tokens must fit the context.
            sampling: None = greedy.
            stop_tokens: at most 8 ids; the stop token is the row's last new token.
            sparse_from: first sparse position of each row; None = after the prompt, as in the paper; 0 = everywhere.
            prompt_phase: "dense" = what lies before `sparse_from` at once; "steps" = token by token.
            callback: called as (row, token) for each new token as soon as it exists; it cannot call this engine.
            min_new_tokens: before so many new tokens no stop token is chosen.
        Raises:
            UserError: see the messages; nothing is decoded then. Or numbers that are not finite, while decoding.
        """
        sampler = sampling or Sampling()
        asked = read_continuation(prompts, max_new_tokens, stop_tokens, sparse_from, prompt_phase, not self.predictors)
        lengths, left, n, shown = asked.lengths, asked.n_steps, len(prompts), list(asked.lengths)
        with self._alone():
            self.begin(prompts, asked.total, asked.starts, asked.at_once, sampler, min_new_tokens)
            self.state.stops[: len(stop_tokens)] = list(stop_tokens)
            self.tail(sampler.mode)
            while True:
                self._check_numbers()
                if callback is not None:
                    self._notify(callback, shown)
                if left <= 0 or (self.state.row_state[:n] == arrays.DONE).all():
                    break
                left -= self._steps(left if callback is None else 1, sampler.mode, False)
            ends = [int(position) + 1 for position in self.state.position[:n]]
            return [self.state.tokens[b, lengths[b] : ends[b]].tolist() for b in range(n)]

    def _check_numbers(self) -> None:
        """Raise if a number of a row was not finite since `begin`."""
        if self.state.fault.any():
            b = int(self.state.fault.argmax())
            raise not_finite(int(self.state.fault_site[b]) - 1, self.shape, b, int(self.state.fault[b]) - 1)

    def _notify(self, callback: Callback, shown: list[int]) -> None:
        for b, first in enumerate(shown):
            end = int(self.state.position[b]) + 1
            for token in self.state.tokens[b, first:end].tolist():
                callback(b, token)
            shown[b] = max(first, end)

    def score(self, rows: Sequence[Sequence[int]], sparse_from: int | Sequence[int] = 0) -> list[Tensor]:
        """Teacher forcing, every token through the decoding step: -log p of all tokens of a row but its first.

        Args:
            rows: token ids, each of 2 to `context` tokens; any number of rows, taken `batch` at a time.
            sparse_from: first sparse position; earlier ones select everything.
        Returns:
            One fp32 tensor (n - 1,) per row.
        """
        lengths = [len(row) for row in rows]
        if not rows or min(lengths) < 2:
            raise UserError("scoring needs rows of at least 2 tokens: the first is given, the others are scored")
        starts = per_row(sparse_from, lengths)
        result: list[Tensor] = []
        for first in range(0, len(rows), self.batch):
            part = slice(first, first + self.batch)
            n = lengths[part]
            with self._alone():
                self.begin(rows[part], n, starts[part], [0] * len(n), Sampling())
                self.tail("greedy", score=True)
                left = max(n) - 1
                while left > 0:
                    left -= self._steps(left, "greedy", True)
                    self._check_numbers()
                result += [torch.from_numpy(self.state.nll[b, 1:length].copy()) for b, length in enumerate(n)]
        return result

    def perplexity(self, rows: Sequence[Sequence[int]], sparse_from: int | Sequence[int] = 0) -> dict[str, float]:
        """exp of the mean of `score` over all rows; {"perplexity", "nats", "tokens"}."""
        return summary(self.score(rows, sparse_from))

    def bytes_read(self) -> dict[str, int]:
        """Bytes that the steps since the last call of this read: weights, predictors, lm_head, kv."""
        total = self.scratch.bytes_read.sum(axis=0)
        self.scratch.bytes_read[:] = 0
        names = {"weights": arrays.WEIGHTS, "predictors": arrays.PREDICTORS, "lm_head": arrays.LM_HEAD, "kv": arrays.KV}
        return {name: int(total[column]) for name, column in names.items()}


def _rules(bundle: Any) -> tuple[list[TargetPredictor], dict[int, Tensor], dict[int, tuple[Tensor, Tensor, Tensor]]]:
    if bundle is None or isinstance(bundle, list):
        return bundle or [], {}, {}
    return read_predictors(bundle), bundle.head_means(), bundle.cascades()


def _send_home(team: tuple[Any, ...], n_threads: int, owner: int, busy: Any) -> None:
    if os.getpid() != owner or not busy.acquire(timeout=1.0):
        return  # after a fork there are no threads; while another thread decodes, they end with the process
    team[-1][N_STEPS] = -1
    if n_threads > 1:
        enter(*team, 0, n_threads)
