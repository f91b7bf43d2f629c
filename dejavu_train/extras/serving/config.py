"""The keys of ``dejavu serve``. Readable without torch."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from dejavu_train.bundle.folder import named_model, require_model
from dejavu_train.engine.cpu_limits import Stored
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import COUNT, Range, check_ranges
from dejavu_train.models.installed import installed

KEY = "DEJAVU_API_KEY"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*]+")


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """A server for one model and bundle."""

    model: str = ""
    """Folder or hub id of the model. Empty: the one that the bundle was made for."""
    revision: str | None = None
    """Commit or tag of a hub model."""
    bundle: str = ""
    """Folder or hub id of the predictors. Empty: those in the model's folder, and without a model opt-mini's."""
    name: str | None = None
    """Name of the model for clients. null: as in model."""
    backend: Literal["auto", "cpu", "triton"] = "auto"
    """The engine. auto: that of the device."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str | None = None
    """float32, float16 or bfloat16. null: float16 on a GPU, on a CPU float32, where weights are rounded as they lie."""
    stored: Stored | None = None
    """Format of the weights in the CPU engine. null: 4 bits of a model that has them, else dtype."""
    rows: int = 8
    """Texts that are written at once."""
    context: int | None = None
    """Tokens of a text, prompt included. null: the model's limit."""
    prefill_chunk: int | None = None
    """Tokens of a prompt that run between two steps of others. null: as the engine takes by itself."""
    queue: int = 64
    """Texts that may wait. One more is answered with 429."""
    lossless: bool = False
    """Write the dense model's own text, one request at a time, drafted sparsely."""
    host: str = "127.0.0.1"
    """Address to listen at. 0.0.0.0 lets other machines in."""
    port: int = 8000
    """0 takes a free one, and the first line says which."""
    api_key: str | None = None
    """Key that clients must send. null: the environment's DEJAVU_API_KEY, else no key."""
    allow_origin: tuple[str, ...] = ()
    """Origins of web pages that may ask, such as https://example.org, or * for all."""
    sparse_from: Literal["prompt"] | int = "prompt"
    """First sparse position of a text. prompt: behind its prompt. 0: prompts are run sparsely too, token by token."""
    log: str | None = None
    """File to which a line is appended for each request. null: none."""
    drain: int = 60
    """Seconds that running requests have after SIGTERM."""

    def __post_init__(self) -> None:
        bundle = self.bundle if self.bundle or self.model else "checkpoints/opt-mini/bundle"
        if isinstance(self.allow_origin, str):  # of a caller in Python, who has one
            object.__setattr__(self, "allow_origin", (self.allow_origin,))
        object.__setattr__(self, "bundle", installed(bundle) if bundle else "")
        object.__setattr__(self, "model", installed(self.model) if self.model else named_model(self.bundle))

    def check(self) -> None:
        """Raise :class:`UserError` for a value out of range, or a bundle that does not say its model."""
        require_model(self.model, self.bundle)
        ports = Range(0, 65535)
        context = Range(2, COUNT.most)
        ranges = {"rows": Range(1, 32), "context": context, "queue": Range(0, COUNT.most), "port": ports}
        check_ranges(self, "--", ranges | {"drain": COUNT, "prefill_chunk": COUNT})
        if isinstance(self.sparse_from, int) and not 0 <= self.sparse_from <= COUNT.most:
            raise UserError(f"--sparse_from must be prompt or a position from 0 on, got {self.sparse_from}")
        if self.lossless and self.sparse_from != "prompt":
            raise UserError("a lossless server runs prompts densely; leave --sparse_from out")
        self.key({})
        for origin in self.allow_origin:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise UserError(f"--allow_origin must be * or such as https://example.org:8080, got {origin!r}")

    def key(self, environment: Mapping[str, str]) -> str | None:
        """Key that clients must send. None: nothing is asked for.

        Raises:
            UserError: an option or a variable that is set and empty: a server without a key by accident.
        """
        if self.api_key is not None:
            if not self.api_key.strip():
                raise UserError("--api_key is empty; give a key, or leave it out for none")
            return self.api_key.strip()
        found = environment.get(KEY)
        if found is not None and not found.strip():
            raise UserError(f"the environment's {KEY} is empty; set it to a key, or unset it for a server without one")
        return None if found is None else found.strip()
