"""Lets the layers of a model run one at a time, in the model's own forward pass.

Masks, positions and what else a model hands to its layers come from the model itself, so any family runs. Layers that
are not wanted hand on what they are given, and their weights are not read.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Act = Callable[[int, Any, Tensor, tuple[Any, ...], dict[str, Any]], Any]
"""``act(number, layer, hidden, args, kwargs)`` gives what the layer gives."""


class Enough(Exception):
    """Leaves a forward pass whose rest nobody needs."""


class LayerExchange:
    """Exchanges what the layers of a model do.

    Args:
        layers: of ``model``, in order.
    """

    def __init__(self, model: Any, layers: Sequence[nn.Module]) -> None:
        self.model, self.layers = model, layers
        self._values: int | None = None
        """How many values a layer gives, the hidden states first. 0: those alone. None: nobody has asked a layer."""

    @contextmanager
    def exchanged(self, act: Act) -> Iterator[None]:
        """Within the context each layer gives what ``act`` says. Where that is a tensor, others see its usual form."""

        def forward_of(number: int, own: Any) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                kwargs = dict(kwargs)
                given, *rest = args if args else (kwargs.pop("hidden_states"),)
                made = act(number, own, given, tuple(rest), kwargs)
                return (made, *[None] * (self._values - 1)) if self._values and isinstance(made, Tensor) else made

            return forward

        try:
            for number, own in enumerate(self.layers):
                own.forward = forward_of(number, own)
            yield
        finally:
            for own in self.layers:
                own.__dict__.pop("forward", None)

    def ask_first(self, ids: Tensor, run: Callable[..., Any]) -> None:
        """Learn how many values layers give, where that is not known, for ids (S, T).

        Args:
            run: called once with the first layer, its hidden states and its other arguments, in the place of the layer.
        """
        if self._values is not None:
            return
        found: list[Any] = []

        def act(number: int, own: Any, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found.append(run(own, given, *args, **kwargs))
            raise Enough

        with self.exchanged(act):
            self.run(ids)
        if found:
            self._values = len(found[0]) if isinstance(found[0], (tuple, list)) else 0

    def run(self, ids: Tensor, mask: Tensor | None = None) -> None:
        """A forward pass without logits, which may end early."""
        try:
            self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
        except Enough:
            pass


def own_forward(own: Any, *args: Any, **kwargs: Any) -> Any:
    """Output of a layer that is exchanged, by its class. Its hooks do not run again."""
    return type(own).forward(own, *args, **kwargs)


def first(output: Any) -> Tensor:
    """The hidden states in what a layer gives."""
    made: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return made


@contextmanager
def placed(
    layer: nn.Module, device: torch.device, dtype: torch.dtype | None, stored: dict[str, Tensor]
) -> Iterator[None]:
    """Within the context the layer's weights lie on the device, numbers among them in dtype. Buffers keep theirs.

    Args:
        stored: by names within the layer tensors to take in the place of its own. They are taken out of it.
    """
    tensors = dict((*layer.named_parameters(), *layer.named_buffers()))
    before = [tensor.data for tensor in tensors.values()]
    try:
        for name, tensor in tensors.items():
            wanted = dtype if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else None
            moved = stored.pop(name, tensor.data).to(device)
            tensor.data = moved if wanted is None else moved.to(wanted)  # rounded on the device, which is faster
        yield
    finally:
        for tensor, data in zip(tensors.values(), before, strict=True):
            tensor.data = data
