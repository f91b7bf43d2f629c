"""Collects by layers: each layer runs over all windows before the next one is read. So weights are read once.

The states between two layers lie on the disk (stream.py), so a killed run goes on with the layer in which it was. Each
batch is the one that the whole model would see, so the shards are the same.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu_train.data.config import MEAN_TOKENS, CollectConfig
from dejavu_train.data.recording import (
    HeadReference,
    MeanHeads,
    Recording,
    Run,
    WindowBatch,
    WriterThread,
    batches,
    record_batch,
    windows_of_means,
)
from dejavu_train.data.shards import (
    WEIGHTS,
    ActivationManifest,
    RecordedWeights,
    ShardEntry,
    ShardWriter,
    layer_folder,
    shard_path,
)
from dejavu_train.data.stream import Stream
from dejavu_train.data.untrained import probes_of, warn_of_logits
from dejavu_train.data.windows import Window
from dejavu_train.families import blocks_of
from dejavu_train.ground.progress import Progress
from dejavu_train.models.layer_exchange import Enough, first, own_forward
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.models.load import torch_dtype

STREAM = "stream"


class StreamPass:
    """Runs batches through the next layer of a stream.

    Args:
        stream: where each batch has its rows.
    """

    def __init__(self, walk: LayerWalk, stream: Stream) -> None:
        self.walk, self.stream = walk, stream

    @contextlib.contextmanager
    def layer(self) -> Iterator[Callable[[WindowBatch, int], Run]]:
        """The next layer on the device. Gives a function that makes the pass of a batch whose rows begin at ``start``:
        it reads the stream and writes it."""
        with self.walk.layer(self.stream.next):
            yield self._pass_of
        self.stream.advance()

    def _pass_of(self, batch: WindowBatch, start: int) -> Run:
        stream, real = self.stream, batch.real.to(self.walk.device)

        def act(number: int, own: Any, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if number > stream.next:
                raise Enough
            hidden = self._padded(batch, start) if number == 0 and stream.next > 0 else given
            if number < stream.next:
                return hidden
            made = own_forward(own, hidden, *args, **kwargs)
            stream.write(start, first(made)[real].cpu())
            return made

        def run(ids: Tensor, mask: Tensor) -> None:
            with self.walk.exchange.exchanged(act):
                self.walk.exchange.run(ids, mask)

        return run

    @torch.inference_mode()
    def logits(self, batch: WindowBatch, start: int) -> Tensor:
        """(B, T, V) behind the last layer, once all have run."""
        return self.walk.logits(batch.ids.to(self.walk.device), lambda: self._padded(batch, start))

    def _padded(self, batch: WindowBatch, start: int) -> Tensor:
        """(B, T, d) with zeros at padding, of which no token sees anything."""
        states = self.stream.read(start, batch.rows).to(self.walk.device)
        padded = states.new_zeros((*batch.real.shape, states.shape[1]))
        padded[batch.real.to(self.walk.device)] = states
        return padded


def stream_bytes(manifest: ActivationManifest, tokens: int, config: CollectConfig) -> int:
    """Bytes of both files, for ``tokens`` recorded tokens."""
    return 2 * (tokens + MEAN_TOKENS) * manifest.shape.d_model * torch_dtype(config.dtype).itemsize


@dataclass(frozen=True)
class _Batches:
    """Batches that go through a layer, in the order of their rows in the stream.

    Attributes:
        averaged: over which the means of heads are taken.
        judged: by which the model is judged.
    """

    averaged: list[WindowBatch]
    judged: list[WindowBatch]
    of_shards: list[tuple[ShardEntry, list[WindowBatch]]]

    @classmethod
    def of(cls, recording: Recording, probes: Sequence[np.ndarray]) -> "_Batches":
        size = recording.config.batch_size
        return cls(
            list(batches(windows_of_means(recording.windows), 1)),
            [WindowBatch.of([Window(0, ids)]) for ids in probes],
            [(entry, list(batches(windows, size))) for entry, windows in recording.open_shards],
        )

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in (*self.averaged, *self.judged)) + sum(
            entry.tokens for entry, _ in self.of_shards
        )


def collect_by_layers(walk: LayerWalk, recording: Recording) -> None:
    """Record the missing shards, a layer after the other. The first process of several judges the model."""
    manifest, config = recording.manifest, recording.config
    number, count = recording.part
    probes = probes_of([window.ids for window in recording.windows if len(window.ids) > 1]) if number == 0 else []
    parts = _Batches.of(recording, probes)
    identity = [manifest.weight_hash, [entry.index for entry, _ in parts.of_shards], config.batch_size]
    size, n_layers = (parts.rows, manifest.shape.d_model), manifest.shape.n_layers
    stream = Stream(
        recording.activations / (STREAM if count == 1 else f"{STREAM}-{number}-of-{count}"),
        identity,
        size,
        torch_dtype(config.dtype),
    )
    passes = StreamPass(walk, stream)
    with Progress("collecting", parts.rows * n_layers, "row", parts.rows * stream.next) as progress:
        while stream.next < n_layers:
            _collect_layer(passes, recording, parts, progress)
    starts = _starts(parts.judged, sum(batch.rows for batch in parts.averaged))
    made = (passes.logits(*each) for each in zip(parts.judged, starts, strict=True))
    warn_of_logits(manifest.shape.vocab_size, probes, made)
    stream.remove()


def _collect_layer(passes: StreamPass, recording: Recording, parts: _Batches, progress: Progress) -> None:
    """The next layer over all rows."""
    manifest, config, activations = recording.manifest, recording.config, recording.activations
    walk, layer, start = passes.walk, passes.stream.next, 0
    means, device, block = MeanHeads(manifest.shape, [layer]), walk.device, blocks_of(walk.model)[layer]
    with passes.layer() as pass_of, torch.inference_mode():
        with means.watching(walk.model):
            for batch in parts.averaged:
                pass_of(batch, start)(batch.ids.to(device), batch.real.long().to(device))
                start += batch.rows
                means.tokens += batch.rows
        heads: dict[int, HeadReference | None] = {}
        if block.targets:
            if not (layer_folder(activations, layer) / WEIGHTS).is_file():
                save_layer_weights(activations, manifest, layer, block, means.means()[layer])
            mean = RecordedWeights.load(activations, layer, manifest.weight_hash).head_mean
            heads[layer] = HeadReference.of(block, mean)
        for batch in parts.judged:
            pass_of(batch, start)(batch.ids.to(device), batch.real.long().to(device))
            start += batch.rows
        progress.update(start)
        for entry, batches_of in parts.of_shards:
            with contextlib.ExitStack() as stack:
                thread = None
                if heads and not shard_path(activations, layer, entry.index).is_file():
                    writer = stack.enter_context(ShardWriter(activations, manifest, entry, [layer]))
                    thread = stack.enter_context(WriterThread(writer))
                row = 0
                for batch in batches_of:
                    run = pass_of(batch, start + row)
                    if thread is None:
                        run(batch.ids.to(device), batch.real.long().to(device))
                    else:
                        record_batch(walk.model, batch, config, heads, thread, row, run)
                    row += batch.rows
                    progress.update(batch.rows)
            start += row


def save_layer_weights(
    activations: Path, manifest: ActivationManifest, layer: int, block: Any, head_mean: Tensor
) -> None:
    """Save what losses need of a layer."""
    RecordedWeights.of(block, manifest.shape, head_mean).save(activations, layer, manifest.weight_hash)


def _starts(batches_of: Sequence[WindowBatch], start: int) -> list[int]:
    """The first row of each batch."""
    starts = []
    for batch in batches_of:
        starts.append(start)
        start += batch.rows
    return starts
