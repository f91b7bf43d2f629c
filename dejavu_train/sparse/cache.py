"""The cache of a sparse model: K and V where somebody computed them, and what is needed to compute the rest.

When a head is not selected at a position, nobody reads its W_k and W_v, so its K and V are missing there. The cache
keeps ``attn_in`` of every position and per batch row and head a watermark: K and V are valid for columns below it.
It takes half of what K and V of all heads do, and more than that where heads share them. A head that is
selected again computes the missing columns first. So any history of selections gives what a dense computation of all K
and V would give.

Letters: B batch rows, S columns of the padded batch, d model width, h heads of K and V, e head width.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from dejavu_train.families import Target, dims_of
from dejavu_train.ground.errors import UserError

GROWTH = 128  # columns added at a time, so that a step does not copy the whole cache


class SparseLayer(CacheLayerMixin):
    """One layer's cache. The tensors have room for more columns than ``length``, which are in use.

    Attributes:
        keys, values: (B, h, room, e), zero where nothing was computed.
        attn_in: (B, room, d), the input of the attention block. positions: (B, room) int64, where its rows stand.
        watermark: (B, h) int64. K and V are valid for columns below it.
        length: columns in use.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.attn_in: Tensor | None = None
        self.positions: Tensor | None = None
        self.watermark: Tensor | None = None

    def extend(self, attn_in: Tensor, positions: Tensor, n_heads: int, head_dim: int) -> int:
        """The first of T new columns. They keep ``attn_in`` (B, T, d) and ``positions`` (B, T), K and V have room."""
        rows, new, width = attn_in.shape
        if self.attn_in is None:
            self.attn_in = attn_in.new_zeros(rows, 0, width)
            self.positions = positions.new_zeros(rows, 0, device=attn_in.device)
            self.keys = attn_in.new_zeros(rows, n_heads, 0, head_dim)
            self.values = torch.zeros_like(self.keys)
            self.watermark = torch.zeros(rows, n_heads, dtype=torch.long, device=attn_in.device)
            self.is_initialized = True
        elif self.attn_in.shape[0] != rows:
            raise UserError(
                f"the SparseCache holds {self.attn_in.shape[0]} rows, the input has {rows}; start with a new cache"
            )
        assert self.attn_in is not None and self.positions is not None
        start, self.length = self.length, self.length + new
        lacking = self.length - self.attn_in.shape[1]
        if lacking > 0:
            columns = -(-lacking // GROWTH) * GROWTH
            self.attn_in, self.positions = _wider(self.attn_in, 1, columns), _wider(self.positions, 1, columns)
            self.keys, self.values = _wider(self.keys, 2, columns), _wider(self.values, 2, columns)
        self.attn_in[:, start : self.length], self.positions[:, start : self.length] = attn_in, positions
        return start

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the first ``extend`` knows all sizes."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        raise UserError("a SparseCache belongs to the backend gather; leave past_key_values out for other models")

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns: a negative number says how many, a positive one (older transformers) what stays."""
        keep = self.length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.length)
        self.length = max(keep, 0)
        if self.watermark is not None:
            self.watermark.clamp_(max=self.length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        for name in ("keys", "values", "attn_in", "positions", "watermark"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, indices.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        for name in ("keys", "values", "attn_in", "positions", "watermark"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.repeat_interleave(repeats, dim=0))


class SparseCache(Cache):
    """A transformers cache for the backend ``gather``.

    Reorders, crops, repeats, selects and resets as any cache does, so beam search and assisted generation stay right.

    Args:
        own: by number layers of another kind, of those that have no attention.
    Attributes:
        finished: (B,) bool or None: rows that ``generate`` has ended. They leave the union of the batch.
    """

    layers: list[Any]
    max_cache_len = -1  # unbounded, as peft asks of a cache in whose place it puts its own

    def __init__(self, n_layers: int, own: Mapping[int, Any] = MappingProxyType({})) -> None:
        super().__init__(layers=[own.get(layer) or SparseLayer() for layer in range(n_layers)])
        self.finished: Tensor | None = None

    @classmethod
    def of(cls, model: Any) -> "SparseCache":
        """An empty one for a model. Layers without attention have what transformers gives them, a state or nothing."""
        n_layers, attending = model.config.num_hidden_layers, dims_of(model.config).layers_of(Target.HEADS)
        if len(attending) == n_layers:
            return cls(n_layers)
        layers = enumerate(DynamicCache(config=model.config).layers)
        return cls(n_layers, {number: layer for number, layer in layers if number not in attending})

    def inputs(self, first: int) -> list[Tensor | None]:
        """``attn_in`` of every layer from column ``first`` on, (B, T, d) each. None of one without attention."""
        kept = [getattr(layer, "attn_in", None) for layer in self.layers]
        return [None if each is None else each[:, first : self.get_seq_length()] for each in kept]

    def reset(self) -> None:
        super().reset()
        self.finished = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget columns as each layer does. Raises :class:`UserError` where a layer's state takes none back."""
        if not all(layer.is_croppable for layer in self.layers):
            raise UserError("a cache with states of Mamba layers takes no token back; begin with model.new_cache()")
        super().crop(tokens_to_remove)
        self.finished = None  # a taken-back token may have been the one that ended a row

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.finished = None if self.finished is None else self.finished[beam_idx.to(self.finished.device)]

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.finished = None if self.finished is None else self.finished[indices.to(self.finished.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.finished = None if self.finished is None else self.finished.repeat_interleave(repeats)


def _wider(tensor: Tensor, dim: int, columns: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = columns
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)
