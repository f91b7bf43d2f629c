"""The decode engine for CPUs: reads an OPT and a bundle, writes tokens. A whole step is one call of compiled code.

Dense and sparse come from the same code: a layer without a predictor runs densely. At batch 1 a processor reads weights
at the speed of its memory, so a step takes as long as the rows that it reads. Threads are as many as the process may
use. They wait without taking time from other work (see ``team``).
"""

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dejavu_train.engine.cpu import arrays
from dejavu_train.engine.cpu.entry_point import enter, prepare
from dejavu_train.engine.cpu.prefill import fault, prefill
from dejavu_train.engine.cpu.selectors import Rules, read_rules
from dejavu_train.engine.cpu.step import MODE, N_STEPS, SCORE, TAIL_ONLY
from dejavu_train.engine.cpu.threads import SUPPORTED, new_control
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.engine.cpu_limits import MAX_BATCH
from dejavu_train.engine.inputs import Sampling, check_rows
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.plan import plan_step
from dejavu_train.engine.planned import Engine
from dejavu_train.engine.session import Session
from dejavu_train.engine.turns import Turns
from dejavu_train.errors import UserError
from dejavu_train.families import blocks_of
from dejavu_train.machine import cores

CALL_SECONDS = 0.05  # a call of compiled code takes at most about this long, so that Ctrl-C is heard
MODES = {
    "greedy": arrays.GREEDY,
    "temperature": arrays.TEMPERATURE,
    "top_p": arrays.TOP_P,
    "top_k": arrays.TOP_K_MODE,
}


def usable_cores() -> int:
    """How many threads an engine has by itself: as many as `machine.cores`, and no more than torch was told to use."""
    return max(1, min(cores(), torch.get_num_threads()))


class CpuEngine(Session):
    """Decodes up to `batch` rows of up to `context` tokens on a CPU, by the selection rules of a bundle.

    Threads may share an engine: a call waits until those before it have their last token.
    K and V of skipped heads are computed when a head is next selected, so decoding equals the masked dense model.

    Args:
        model: a Hugging Face model, or `CpuWeights`, which several engines may share.
        bundle: a `Bundle`, a list of `CpuPredictor`, or the `rules` of an engine with the same weights. None: a
            dense engine.
        batch: rows, at most 4. Fewer prompts may be given.
        context: tokens a row can hold, prompt included. None = the model's limit.
        stored: float32, int8 or codes, how weights are kept. A given `CpuWeights` keeps its own. None = the codes of a
            4-bit model where they fit, else float32.
        group: columns that share a scale of int8 weights, a multiple of 64 up to 4096, of codes 64 or the model's
            group. None = 64.
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
        if threads is not None and threads < 1:
            raise UserError(f"threads must be at least 1, got {threads}")
        given = isinstance(model, CpuWeights)
        options = EngineOptions(batch, context)
        # Planes of a second stage are made from the weights as the model has them, not from rounded ones.
        late = release and stored == "int8" and hasattr(bundle, "cascades") and bool(bundle.cascades())
        self.weights = model if given else CpuWeights.from_model(model, stored, group, release and not late)
        self.shape = self.weights.shape
        if not self.shape.has_layers_of(getattr(bundle, "shape", self.shape)):
            raise UserError(f"the bundle belongs to another shape, {bundle.shape}, the model has {self.shape}")
        self.threads = threads or usable_cores()
        up = None if given or stored != "int8" else lambda i: blocks_of(model)[i].up.weight
        self.rules = bundle if isinstance(bundle, Rules) else read_rules(self.weights, bundle, up)
        self.selectors = self.rules.selectors
        self.plan = plan_step(self.shape, self.rules.facts(batch), self.weights.formats, options, Engine.CPU)
        self.batch, self.context = self.plan.batch, self.plan.context
        if late:
            for parameter in (each for block in blocks_of(model) for each in block.whole.parameters()):
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
        super().__init__()
        self._team = threading.Lock()  # held while the threads run compiled code
        self._close = weakref.finalize(self, _send_home, self._arguments, self.threads, self._owner, self._team)

    def describe(self) -> str:
        """What was decided when the engine was built, with the reasons, how weights are kept, and the threads."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{self.plan.describe()}\nkept as {self.weights.describe()}, {threads}"

    def close(self) -> None:
        """Send the threads home. The engine cannot be used afterwards. Done by itself when the engine is forgotten."""
        self._close()

    @property
    def turns(self) -> Turns:
        """Of this process: one that was forked may have copied them while a call held them."""
        self._check_alive()
        return super().turns

    def _check_alive(self) -> None:
        if os.getpid() != self._owner:
            raise UserError("a forked process has no threads of this engine; build a new one there")
        if not self._close.alive:
            raise UserError("this engine was closed; build a new one")

    def _call(self, n_steps: int, mode: str, score: bool, tail_only: bool = False) -> None:
        self._check_alive()
        with self._team:
            self._check_alive()  # closed by another thread while this one waited
            command = self._command
            command[N_STEPS], command[MODE], command[SCORE], command[TAIL_ONLY] = n_steps, MODES[mode], score, tail_only
            enter(*self._arguments, 0, self.threads)

    def step(self, mode: str = "greedy", score: bool = False) -> None:
        """One token for every row that is not done."""
        self._call(1, mode, score)

    def steps(self, n: int, mode: str, score: bool = False) -> int:
        """Up to n steps in one call of compiled code that takes about CALL_SECONDS. See `Session.steps`."""
        n = max(1, min(n, int(CALL_SECONDS / self._seconds_per_step)))
        started = time.perf_counter()
        self._call(n, mode, score)
        self._seconds_per_step = max((time.perf_counter() - started) / n, 1e-6)
        return n

    def look(self, n: int) -> tuple[list[int], bool]:
        """Raises UserError for numbers that are not finite, by layer. See `Session.look`."""
        state = self.state
        if state.fault.any():
            b = int(state.fault.argmax())
            raise fault(int(state.fault_site[b]) - 1, b, int(state.fault[b]) - 1)
        return (state.position[:n] + 1).tolist(), bool((state.row_state[:n] == arrays.DONE).all())

    def begin(
        self,
        rows: Sequence[Sequence[int]],
        total: Sequence[int],
        sparse_from: Sequence[int],
        prefilled: Sequence[int],
        sampler: Sampling,
        *,
        least: Sequence[int] | None = None,
        stops: Sequence[int] = (),
        score: bool = False,
    ) -> None:
        """See `Session.begin`."""
        check_rows(rows, total, self.batch, self.context, self.shape)
        state, n = self.state, len(rows)
        state.clear()
        for b, row in enumerate(rows):
            state.tokens[b, : len(row)] = row
            state.known[b], state.limit[b], state.sparse_from[b] = len(row), total[b], sparse_from[b]
            state.least[b] = least[b] if least else 0
            state.position[b] = prefilled[b] - 1
            # Not done, so that the tail gives the row its next token; whether it is sparse is decided there.
            state.row_state[b] = arrays.DENSE
            state.seed[b] = sampler.seed * MAX_BATCH + b
            if prefilled[b]:
                self.scratch.residual[b] = prefill(self.weights, self.selectors, state, b, prefilled[b]).numpy()
                state.watermark[:, b] = prefilled[b]
        state.temperature[:n], state.top_p[:n] = sampler.temperature or 1.0, sampler.top_p
        state.top_k[:n] = sampler.top_k
        state.stops[: len(stops)] = list(stops)
        self._call(1, sampler.mode, score, tail_only=True)

    def bytes_read(self) -> dict[str, int]:
        """Bytes that the steps since the last call of this read: weights, predictors, lm_head, kv."""
        total = self.scratch.bytes_read.sum(axis=0)
        self.scratch.bytes_read[:] = 0
        names = {"weights": arrays.WEIGHTS, "predictors": arrays.PREDICTORS, "lm_head": arrays.LM_HEAD, "kv": arrays.KV}
        return {name: int(total[column]) for name, column in names.items()}


def _send_home(arguments: tuple[Any, ...], n_threads: int, owner: int, team: threading.Lock) -> None:
    if os.getpid() != owner or not team.acquire(timeout=1.0):
        return  # after a fork there are no threads; while another thread decodes, they end with the process
    arguments[-1][N_STEPS] = -1
    if n_threads > 1:
        enter(*arguments, 0, n_threads)
