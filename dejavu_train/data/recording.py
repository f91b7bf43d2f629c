"""Runs windows of text through a model and hands what its layers read and give to a shard's writer.

Padding stands on the right of a batch and is never recorded.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from dejavu_train.data.config import MEAN_TOKENS, CollectConfig
from dejavu_train.data.shards import ActivationManifest, ShardEntry, ShardWriter, pack_bits
from dejavu_train.data.windows import Window
from dejavu_train.families import BlockParts, ModelDims, blocks_of, dims_of
from dejavu_train.families.block import active_neurons
from dejavu_train.families.dims import SMOOTH
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hooks import head_contribution, output_gram, record

PAD_TOKEN = 1
MOST_WAITING = 4  # layers of a batch that are not written yet
Run = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Recording:
    """Work of a recording: what, and where.

    Attributes:
        planned: all shards with their windows.
        missing: those that are not there, which are to be made.
        part: the number of this process among those that share the work, and how many these are.
    """

    manifest: ActivationManifest
    planned: Sequence[tuple[ShardEntry, list[Window]]]
    missing: Collection[ShardEntry]
    config: CollectConfig
    activations: Path
    part: tuple[int, int] = (0, 1)

    @property
    def windows(self) -> list[Window]:
        """Windows of all shards."""
        return [window for _, windows in self.planned for window in windows]

    @property
    def open_shards(self) -> list[tuple[ShardEntry, list[Window]]]:
        return [(entry, windows) for entry, windows in self.planned if entry in self.missing]


@dataclass(frozen=True)
class HeadReference:
    """Reference that the heads of a layer are measured against.

    Attributes:
        mean: (n_heads, head_dim) fp32, what stands for a skipped head.
        gram: (n_heads, head_dim, head_dim) fp32, see :func:`output_gram`.
    """

    mean: Tensor
    gram: Tensor

    @classmethod
    def of(cls, block: BlockParts, mean: Tensor) -> "HeadReference | None":
        """Reference of a layer's own. None where it has no heads."""
        if block.out is None:
            return None
        weight = block.out.weight.detach()
        return cls(mean.to(weight.device), output_gram(weight, len(mean)))


@dataclass(frozen=True)
class WindowBatch:
    """Windows side by side: ids (B, T), and which of them are tokens and no padding, real (B, T) bool."""

    windows: Sequence[Window]
    ids: Tensor
    real: Tensor

    @classmethod
    def of(cls, windows: Sequence[Window]) -> "WindowBatch":
        lengths = torch.tensor([len(window.ids) for window in windows])
        ids = torch.full((len(windows), int(lengths.max())), PAD_TOKEN)
        for row, window in enumerate(windows):
            ids[row, : len(window.ids)] = torch.from_numpy(window.ids.astype(np.int64))
        return cls(windows, ids, torch.arange(ids.shape[1]) < lengths[:, None])

    @property
    def rows(self) -> int:
        return sum(len(window.ids) for window in self.windows)

    def metadata(self) -> dict[str, np.ndarray]:
        """Token, document and position of each row."""
        lengths = [len(window.ids) for window in self.windows]
        positions = torch.arange(self.ids.shape[1]).expand(len(lengths), -1)
        return {
            "token": self.ids[self.real].numpy().astype(np.int32),
            "document": np.repeat([window.document for window in self.windows], lengths).astype(np.int32),
            "position": positions[self.real].numpy().astype(np.int32),
        }


def batches(windows: Sequence[Window], size: int) -> Iterator[WindowBatch]:
    for first in range(0, len(windows), size):
        yield WindowBatch.of(windows[first : first + size])


class MeanHeads:
    """Sums what the heads of some layers give, for their means."""

    def __init__(self, shape: ModelDims, layers: Iterable[int]) -> None:
        size = (shape.n_kv_heads, shape.group_dim)
        self._totals = {layer: torch.zeros(size, dtype=torch.float64) for layer in layers}
        self.tokens = 0

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Within the context the layers' outputs are added, and ``tokens`` are counted by the caller."""

        def on_layer(layer: int, tensors: dict[str, Tensor]) -> None:
            if "head_out" in tensors:
                self._totals[layer] += tensors["head_out"].double().sum((0, 1)).cpu()

        with record(model, {"head_out"}, list(self._totals), on_layer):
            yield

    def means(self) -> dict[int, Tensor]:
        """By layer (n_heads, head_dim). Zeros of no token."""
        return {layer: total / max(1, self.tokens) for layer, total in self._totals.items()}


def windows_of_means(planned: Sequence[Window]) -> Sequence[Window]:
    """The first windows, over which heads are averaged."""
    ends = np.cumsum([len(window.ids) for window in planned])
    return planned[: int(np.searchsorted(ends, MEAN_TOKENS)) + 1]


class WriterThread:
    """Runs ``writer.write`` in one thread, so that writing overlaps the forward pass. Few jobs wait, so memory is flat.

    An error in the thread is raised in the caller at a later call.
    """

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._pool = ThreadPoolExecutor(1, "shard-writer")
        self._jobs: deque[Future[None]] = deque()

    def put(self, layer: int, start: int, rows: dict[str, np.ndarray], active: int) -> None:
        self._jobs.append(self._pool.submit(self._writer.write, layer, start, rows, active))
        if len(self._jobs) > MOST_WAITING:
            self._jobs.popleft().result()

    def __enter__(self) -> "WriterThread":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            while self._jobs and kind is None:
                self._jobs.popleft().result()
        finally:
            self._pool.shutdown(cancel_futures=True)


def _refuse_not_finite(name: str, layer: int, dtype: str) -> NoReturn:
    raise UserError(
        f"{name} of layer {layer} is not finite in {dtype}; check the model's weights, or collect with"
        " --collect.dtype float32"
    )


@torch.inference_mode()
def record_batch(
    model: Any,
    batch: WindowBatch,
    config: CollectConfig,
    heads: Mapping[int, HeadReference | None],
    writer: Any,
    start: int,
    run: Run | None = None,
) -> None:
    """One forward pass, whose rows (tokens, without padding) go to ``writer.put``.

    Args:
        heads: by layer that is recorded, None of one without heads.
        start: row of the batch's first token.
        run: makes the pass for ids and mask (B, T). None runs the whole decoder.
    """
    blocks, kind = blocks_of(model), dims_of(model.config).activation
    metadata, real = batch.metadata(), batch.real
    dtype = torch.float16 if config.storage == "float16" else torch.bfloat16

    def hidden(tensor: Tensor, kept: Tensor, layer: int, name: str) -> np.ndarray:
        rows = tensor[kept].to(dtype).cpu()
        if not bool(torch.isfinite(rows).all()):
            raise UserError(
                f"{name} of layer {layer} is not finite in {config.storage}; collect with --collect.storage bfloat16"
                " or --collect.dtype float32"
            )
        return (rows if dtype is torch.float16 else rows.view(torch.uint16)).numpy()

    def neurons_of(layer: int, activation: Tensor) -> Tensor:
        if not bool(torch.isfinite(activation.sum(dtype=torch.float32))):  # a NaN would pass for an active neuron
            _refuse_not_finite("the MLP's activation", layer, config.dtype)
        if kind not in SMOOTH:
            return activation != 0
        return active_neurons(kind, activation, torch.linalg.vector_norm(blocks[layer].down.weight.float(), dim=0))

    def heads_of(layer: int, head_out: Tensor, own: HeadReference) -> Tensor:
        given = head_contribution(head_out, blocks[layer].out.weight, own.gram, own.mean)
        if not bool(torch.isfinite(given).all()):
            _refuse_not_finite("the heads' contribution", layer, config.dtype)
        return given

    def on_layer(layer: int, tensors: dict[str, Tensor]) -> None:
        own, rows, count = heads[layer], dict(metadata), 0
        kept = real.to(next(iter(tensors.values())).device)
        if "activation" in tensors:
            active = neurons_of(layer, tensors["activation"][kept])
            rows["mlp_active"], count = pack_bits(active).cpu().numpy(), int(active.sum())
        if own is not None:
            given = heads_of(layer, tensors["head_out"][kept], own)
            rows["head_norm"] = given.clamp_max(65504).half().cpu().numpy()
        rows |= {name: hidden(tensors[name], kept, layer, name) for name in blocks[layer].inputs}
        writer.put(layer, start, rows, count)

    with record(model, {"attn_in", "mlp_in", "activation", "head_out"}, list(heads), on_layer):
        device = model.get_input_embeddings().weight.device
        ids, mask = batch.ids.to(device), real.long().to(device)
        if run is not None:
            run(ids, mask)
        else:  # without logits over the vocabulary, which are of no use here
            model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
