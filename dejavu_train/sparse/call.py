"""State of one call of ``generate()``: it travels with the caller's thread or task, never on the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Call:
    """A call of ``generate()`` that transformers' loops run.

    Attributes:
        model: whose call this is. Another model's forward pass within it is not part of it.
        runtime: what the model runs through until the call ends, whatever ``set_bundle`` does meanwhile.
        sparse_from: first sparse position, one of all rows or (B,).
        behind_prompt: whether that is the end of each row's prompt.
        columns: of the prompt, those already in the cache included.
        ending_tokens: behind the prompt, after which nobody reads a row, or None.
        known: columns of a forward pass that the loop knows of, or None. An adapter may put its own before them.
    """

    model: Any
    runtime: Any
    sparse_from: int | Tensor
    behind_prompt: bool
    columns: int
    ending_tokens: Tensor | None
    known: int | None = None

    def knowing(self, mask: Any) -> "Call":
        """This call in a forward pass of which the loop has a mask (B, S)."""
        return replace(self, known=mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else None)

    def start(self, columns: int) -> int | Tensor:
        """The first sparse position in a pass of so many columns, those in the cache included."""
        if not self.behind_prompt or self.known is None:
            return self.sparse_from
        return self.sparse_from + max(0, columns - self.known)


_CALLS: ContextVar[tuple[Call, ...]] = ContextVar("dejavu_train_calls", default=())


def call_of(model: Any) -> Call | None:
    """The innermost call of this model's ``generate()`` that the caller stands in."""
    return next((call for call in reversed(_CALLS.get()) if call.model is model), None)


@contextmanager
def within(call: Call) -> Iterator[None]:
    """Forward passes of ``call.model`` in this context, in this thread, belong to ``call``."""
    token = _CALLS.set((*_CALLS.get(), call))
    try:
        yield
    finally:
        _CALLS.reset(token)
