"""Runs a model larger than its device: a layer is read, works on what is asked, and is dropped. The rest stays."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dejavu_train.models.config_values import quant_method
from dejavu_train.models.hooks import decoder_layers
from dejavu_train.models.layer_exchange import Enough, LayerExchange, own_forward, placed
from dejavu_train.models.layer_reader import LayerReader
from dejavu_train.models.load import load_model, mapped_dtype, torch_dtype
from dejavu_train.models.stored import stored_files

Call = tuple[tuple[Any, ...], dict[str, Any]]


class LayerWalk:
    """A model of which one layer at a time is on the device.

    Args:
        name: folder or hub id.
        device: where a layer runs, and where everything around the layers lies.
        dtype: in which the model runs. Codes of 4 bits keep theirs.
    Raises:
        UserError: as :func:`load_model`.
    """

    def __init__(self, name: str, device: torch.device, dtype: str, revision: str | None = None) -> None:
        self.model: Any = load_model(name, mapped_dtype(stored_files(name, revision=revision)), "cpu", None, revision)
        coded = quant_method(self.model.config.to_dict()) is not None
        self.device, self.dtype = device, None if coded else torch_dtype(dtype)
        self.layers = decoder_layers(self.model)
        self.reader = LayerReader(name, self.model, self.layers, revision, coded, device.type == "cuda")
        self.exchange = LayerExchange(self.model, self.layers)
        inside = {id(tensor) for layer in self.layers for tensor in (*layer.parameters(), *layer.buffers())}
        for path, tensor in self.model.named_parameters():
            if id(tensor) not in inside:
                exact = self.reader.exact(path, tensor).data
                tensor.data = exact.to(device, self.dtype if tensor.is_floating_point() else None)
        for tensor in self.model.buffers():
            if id(tensor) not in inside:
                tensor.data = tensor.data.to(device)

    @contextmanager
    def layer(self, number: int, step: int = 1) -> Iterator[Any]:
        """The layer on the device, while that which lies ``step`` further begins to be read."""
        stored = self.reader.take(number, number + step)
        with placed(self.layers[number], self.device, self.dtype, stored):
            own = self.layers[number]
            with torch.inference_mode():
                ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
                self.exchange.ask_first(ids, lambda _, *args, **kwargs: own_forward(own, *args, **kwargs))
            yield own

    def call(self, ids: Tensor, wanted: int) -> tuple[Tensor, Call]:
        """Arguments of a layer for ids (B, T): (B, T, d), which is what the first layer reads, and the rest.

        A layer of this walk is on the device, this one or another.
        """
        found: list[tuple[Tensor, Call]] = []

        def act(number: int, own: Any, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if number < wanted:
                return given
            found.append((given, (args, kwargs)))
            raise Enough

        with self.exchange.exchanged(act):
            self.exchange.run(ids)
        return found[0]

    def logits(self, ids: Tensor, hidden: Callable[[], Tensor]) -> Tensor:
        """(B, T, V) for ids (B, T), with ``hidden`` () -> (B, T, d) behind the last layer."""

        def act(number: int, own: Any, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return hidden() if number == 0 else given

        with self.exchange.exchanged(act):
            made: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return made
