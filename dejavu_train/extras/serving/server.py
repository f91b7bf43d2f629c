"""A model, its engine, its line and its application together, and uvicorn around them."""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import torch
import uvicorn
from transformers.generation import GenerationConfig

from dejavu_train.engine.inputs import MAX_STOPS
from dejavu_train.engine.request import token_list
from dejavu_train.engine.rows import Rows
from dejavu_train.extras.serving.app import make_app
from dejavu_train.extras.serving.config import ServeConfig
from dejavu_train.extras.serving.line import Line
from dejavu_train.extras.serving.log import LogFile, log_requests
from dejavu_train.extras.serving.lossless_rows import LosslessRows
from dejavu_train.extras.serving.metrics import Metrics
from dejavu_train.extras.serving.requests import Reader
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_tokenizer
from dejavu_train.sparse.model import SparseCausalLM

HANG_UP = getattr(signal, "SIGHUP", None)  # which Windows does not have
ERROR_SECONDS = 10  # that requests have behind the drain to send their errors


def load(config: ServeConfig) -> SparseCausalLM:
    """The model and its bundle, where and as they are served. Raises :class:`UserError` where there is none."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and config.backend != "cpu" else "cpu"
    rounded = config.stored in ("int8", "int4")  # layer by layer, from the numbers as they lie in their files
    dtype = config.dtype or ("float16" if device != "cpu" else "auto" if rounded else "float32")
    model: SparseCausalLM = SparseCausalLM.from_pretrained(
        config.model, config.bundle or None, config.backend, "prompt",
        dtype=dtype, device=device, revision=config.revision, stored=config.stored,
    )  # fmt: skip
    return model


class ServedModel:
    """Served model, its line started.

    Args:
        key: that clients must send. None: that of the configuration, if it has one.

    Raises:
        UserError: no such model or bundle, or no engine for it here.
    """

    def __init__(self, config: ServeConfig, key: str | None = None) -> None:
        key = config.key({}) if key is None else key
        self.model = load(config)
        tokenizer, pool = load_tokenizer(config.model, config.revision), self.model.engine_pool()
        if config.rows > pool.max_rows:
            raise UserError(f"--rows must be at most {pool.max_rows} with this engine, got {config.rows}")
        context = min(config.context or pool.shape.max_positions, pool.shape.max_positions)
        self.name = config.name or config.model
        settings: GenerationConfig = self.model.generation_config
        stops = [token for token in token_list(settings.eos_token_id) if 0 <= token < pool.shape.vocab_size]
        if len(stops) > MAX_STOPS:
            raise UserError(
                f"the engine knows at most {MAX_STOPS} stop tokens, and the model's eos_token_id has"
                f" {len(stops)}; leave some out in its generation_config.json"
            )
        with pool.turn():
            engine = pool.engine(1 if config.lossless else config.rows, context)
            if config.prefill_chunk is not None:
                engine.cut(config.prefill_chunk)
            began = time.perf_counter()
            engine.warm_up()
            self.warm_seconds = time.perf_counter() - began
            rows = LosslessRows(engine, stops) if config.lossless else Rows(engine, stops)
        self.about = f"{engine.batch} rows of {context} tokens" + (", lossless" if config.lossless else "")
        self.about += f", warmed up in {self.warm_seconds:.1f} s"
        self.line = Line(rows, stops, config.queue, Metrics(), pool.turn())
        bundle = self.model.bundle
        density = {str(target.value): round(bundle.mean_density(target), 4) for target in bundle.targets}
        start = None if config.sparse_from == "prompt" else int(config.sparse_from)
        scores = engine.scores and not config.lossless
        reader = Reader(tokenizer, context, pool.shape.vocab_size, config.lossless, scores, start)
        self.app = make_app(self.line, reader, self.name, density, key, config.allow_origin)
        self.line.start()


class _Server(uvicorn.Server):
    """uvicorn, whose requests end in an error of their own form once the drain is over."""

    def __init__(self, config: uvicorn.Config, line: Line, drain: int) -> None:
        super().__init__(config)
        self._line, self._drain = line, drain

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGHUP, of a terminal that closes, ends the server as SIGTERM does. uvicorn itself does not hear it."""
        with super().capture_signals():
            if (
                HANG_UP is None
                or signal.getsignal(HANG_UP) is signal.SIG_IGN
                or threading.current_thread() is not threading.main_thread()
            ):
                yield
                return
            before = signal.signal(HANG_UP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(HANG_UP, before)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = asyncio.get_running_loop().call_later(self._drain, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    def _cut_off(self) -> None:
        self._line.stop()
        with contextlib.suppress(OSError):  # of a terminal that is gone
            print(f"requests were still running after {self._drain} seconds; give --drain more", file=sys.stderr)


def run(served: ServedModel, listening: socket.socket, drain: int, log: LogFile | None = None) -> None:
    """Answer until SIGTERM, SIGINT or SIGHUP, or until the engine fails.

    Args:
        drain: seconds that running requests have to end. log: of a line a request.
    """
    # Connections take this from the socket. Else the body of an answer waits 40 ms until its headers are acknowledged.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(
        served.app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain + ERROR_SECONDS,
        server_header=False,
    )
    server = _Server(config, served.line, drain)
    if log is not None:
        log_requests(log)

    def stop() -> None:
        server.should_exit = True

    served.line.failed = stop
    try:
        server.run(sockets=[listening])
    finally:
        served.line.close()
