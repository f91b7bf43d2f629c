"""Runs a decoder layer by layer over all texts at once, so that each layer's weights are read once.

The model's own layers are called, with what the model itself hands to them. So positions, masks and kinds of layers are
transformers' own. What a layer gets besides the hidden states must not depend on the text.

Letters: W windows, S selections, T positions, d model width.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dejavu_train.ground.errors import UserError
from dejavu_train.models.layer_exchange import LayerExchange, first

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class LayerRunner:
    """The layers of a model, called one by one.

    Args:
        model: dense, on the CPU. What stands around its layers is moved to ``device`` in 32 bits.
        layers: name of their list.
    """

    def __init__(self, model: Any, layers: str, device: torch.device) -> None:
        self.model, self.device = model, device
        self.layers: Any = model.get_submodule(layers)
        self.arguments: dict[int, list[Arguments]] = {}  # by the number of rows
        self._exchange = LayerExchange(model, self.layers)
        inside = {id(tensor) for each in self.layers for tensor in (*each.parameters(), *each.buffers())}
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in inside:
                tensor.data = tensor.data.to(device, torch.float32 if tensor.is_floating_point() else tensor.dtype)

    def embed(self, ids: Tensor, copies: int) -> Tensor:
        """(W, copies, T, d) fp32, what the first layer reads, the same for each copy, of token ids (W, T).

        Raises:
            UserError: layers do not run on the text alone, token by token from left to right.
        """
        rows, kind = [], type(self.model).__name__
        self.arguments = {n: self._collect(ids[0].expand(n, -1).to(self.device))[1] for n in {1, copies}}
        if any(len(each) != len(self.layers) for each in self.arguments.values()):
            raise UserError(f"{kind} does not run each of its layers once on a text; no survey reads it")
        for window in ids:
            hidden, arguments = self._collect(window.expand(copies, -1).to(self.device))
            rows.append(hidden.float())
            if not _equal(arguments, self.arguments[copies]) or hidden.shape[1] != ids.shape[1]:
                raise UserError(f"{kind} hands more of a text to its layers than hidden states; no survey reads it")
        if not self._is_causal(rows[0][:1]):
            raise UserError(f"{kind} reads the tokens behind a position too, so it writes no text; no survey reads it")
        return torch.stack(rows)

    def _is_causal(self, hidden: Tensor) -> bool:
        """Whether what the first layer makes of (1, T, d) does not depend on what stands behind a position."""
        other = torch.cat([hidden[:, :-1], -hidden[:, -1:]], 1)
        with self.layer(0) as (_, call):
            made, expected = call(other)[:, :-1], call(hidden)[:, :-1]
        if not made.numel() or not bool(expected.isfinite().all()):
            return True  # there is nothing behind, or the logits will say what is wrong
        return torch.allclose(made, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))

    @contextmanager
    def layer(self, number: int) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """A layer in 32 bits on the device, and a function that calls it with (S, T, d), or with one row of it."""
        own = self.layers[number]
        tensors = (*own.parameters(), *own.buffers())
        placed = all(
            each.device == self.device and each.dtype == torch.float32 for each in tensors if each.is_floating_point()
        )
        used = own if placed else copy.deepcopy(own).to(self.device, torch.float32)

        def call(hidden: Tensor) -> Tensor:
            args, kwargs = self.arguments[len(hidden)][number]
            return first(used(hidden, *args, **kwargs))

        yield used, call

    def logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """(1, T, V) fp32, what the model makes of (1, T, d) behind its last layer, for token ids (1, T)."""
        last = len(self.layers) - 1
        with self._exchange.exchanged(lambda number, own, given, *_: hidden if number == last else given):
            made: Tensor = self.model(input_ids=ids.to(self.device), use_cache=False).logits
        return made.float()

    def _collect(self, ids: Tensor) -> tuple[Tensor, list[Arguments]]:
        """Input of the first layer for (S, T), and every layer's other arguments."""
        arguments: list[Arguments] = []
        hidden: list[Tensor] = []

        def note(number: int, own: Any, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            if number == 0:
                hidden.append(given.detach().clone())
            arguments.append((args, kwargs))
            return given

        self._exchange.ask_first(ids[:1], self._run_copy)
        with self._exchange.exchanged(note):
            self._exchange.run(ids)
        return hidden[0] if hidden else torch.empty(len(ids), 0, 0, dtype=torch.float32), arguments

    def _run_copy(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        layer = copy.deepcopy(own).to(self.device, torch.float32)
        layer.__dict__.pop("forward", None)
        return layer(*args, **kwargs)


def _equal(a: Any, b: Any) -> bool:
    """Whether two trees of arguments hold the same tensors. Other objects are taken for the same."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return True
