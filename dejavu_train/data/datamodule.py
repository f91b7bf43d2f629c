"""Reads activation shards, writes nothing: shuffled batches for one predictor.

Single random rows are what makes HDF5 slow. So whole blocks (chunks of rows) are drawn in random order. A pool of
blocks is held, its rows are shuffled, and batches are cut from it. Every rank and worker takes an equal stretch of the
shuffled sequence. So all have the same number of batches, and none waits for another. What is read in order, for
validation, is read whole: stretches differ by a row.

Rows that fit into ``memory_gb`` are read once, by several threads, and kept on the training device. Then neither disk
nor bus limits a step.
"""

import mmap
import shutil
from collections.abc import Iterator
from pathlib import Path

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dejavu_train.data.config import POOL_BLOCKS, DataConfig
from dejavu_train.data.shard_reader import ShardReader
from dejavu_train.families import Site, Target, UnitKey
from dejavu_train.ground.errors import UserError

SHARED_MEMORY = Path("/dev/shm")
BATCHES_AHEAD = 2  # that a loader process makes ahead, as torch has it
LONGEST_WAIT = 300  # seconds for a batch of a loader process, after which it is taken for lost

RawBatch = dict[str, Tensor]


class BlockShuffled(IterableDataset[RawBatch]):
    """Batches of ``batch_size`` rows. An epoch's order follows from ``seed`` and the count of epochs begun.

    Args:
        sources: key in the batch -> (reader, dataset). All readers have the same rows.
        batch_size: rows of a batch on one rank.
        rank, world: which part is ours.
        workers: worker processes of the loader. 0 counts as one.
        pool_blocks: blocks shuffled together. 0 reads in order, without shuffling.
        seed: of the order.

    Each batch has the named tensors.
    """

    def __init__(
        self,
        sources: dict[str, tuple[ShardReader, str]],
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        pool_blocks: int = POOL_BLOCKS,
        seed: int = 0,
    ) -> None:
        self.sources, self.batch_size = sources, batch_size
        self.reader = next(iter(sources.values()))[0]  # the one that is asked for rows and blocks
        self.rank, self.world, self.workers = rank, world, max(1, workers)
        self.pool_blocks, self.seed = pool_blocks, seed
        self.epoch = 0
        self.skip = 0  # batches of the first epoch that were trained on before a resume

    def __len__(self) -> int:
        """Batches of this rank in an epoch, of shuffled ones the same on every rank."""
        first = self.rank * self.workers
        return sum(self._batches(consumer) for consumer in range(first, first + self.workers))

    def _stretch(self, consumer: int) -> tuple[int, int]:
        """Where in the sequence of all rows those of a consumer begin and end."""
        rows, consumers = self.reader.rows, self.world * self.workers
        if self.pool_blocks:
            rows -= rows % consumers
        return consumer * rows // consumers, (consumer + 1) * rows // consumers

    def _batches(self, consumer: int) -> int:
        first, last = self._stretch(consumer)
        return (last - first) // self.batch_size if self.pool_blocks else -(-(last - first) // self.batch_size)

    def row_ranges(self, consumer: int) -> list[tuple[int, int]]:
        """The row ranges of one consumer, in the order in which it reads them."""
        blocks = self.reader.blocks()
        if self.pool_blocks:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(len(blocks))
            blocks = [blocks[i] for i in order]
        first, last = self._stretch(consumer)
        row_ranges, passed = [], 0
        for start, stop in blocks:
            low, high = max(first - passed, 0), min(last - passed, stop - start)
            if low < high:
                row_ranges.append((start + low, start + high))
            passed += stop - start
        return row_ranges

    def __iter__(self) -> Iterator[RawBatch]:
        worker = get_worker_info()
        skip, self.skip = self.skip, 0
        # Workers make the batches of a rank in turns; the first of them makes the first batch that is not left out.
        turn = (0 if worker is None else worker.id + skip) % self.workers
        consumer = self.rank * self.workers + turn
        row_ranges = self.row_ranges(consumer)
        generator = np.random.default_rng([self.seed, self.epoch, consumer])
        self.epoch += 1
        own_skip = -(-(skip - turn) // self.workers)
        left: RawBatch = {}
        yielded, limit = 0, self._batches(consumer)
        step = self.pool_blocks or 8
        for first in range(0, len(row_ranges), step):
            pool = self._read_pool(row_ranges[first : first + step], left, generator)
            rows = len(next(iter(pool.values())))
            is_last = first + step >= len(row_ranges)
            count = -(-rows // self.batch_size) if is_last and not self.pool_blocks else rows // self.batch_size
            for number in range(count):
                if yielded == limit:
                    return
                part = slice(number * self.batch_size, (number + 1) * self.batch_size)
                batch: RawBatch = {name: tensor[part] for name, tensor in pool.items()}
                if worker is not None:  # of a view the whole pool would go into shared memory
                    batch = {name: tensor.clone() for name, tensor in batch.items()}
                yielded += 1
                if yielded > own_skip:
                    yield batch
            left = {name: tensor[count * self.batch_size :] for name, tensor in pool.items()}

    def _read_pool(self, row_ranges: list[tuple[int, int]], left: RawBatch, generator: np.random.Generator) -> RawBatch:
        pool: RawBatch = {}
        shuffle: Tensor | None = None
        for name, (reader, dataset) in self.sources.items():
            parts = [reader.read_stored(dataset, start, stop) for start, stop in row_ranges]
            tensor = torch.cat([left[name], *parts] if left else parts)
            if self.pool_blocks:
                if shuffle is None:
                    shuffle = torch.from_numpy(generator.permutation(len(tensor)))
                tensor = tensor[shuffle]
            pool[name] = tensor
        return pool


class InMemoryLoader:
    """The same rows, read once and kept on ``device``. An epoch's order follows from the seed and the epoch.

    Args:
        streamed: says which rows are this rank's, and in which batches.
        device: where the rows stay.
    """

    def __init__(self, streamed: BlockShuffled, device: torch.device) -> None:
        self.epoch, self.streamed = streamed.epoch, streamed
        row_ranges = _joined(streamed.row_ranges(streamed.rank))
        self.rows = {
            name: reader.read_rows(dataset, row_ranges, device) for name, (reader, dataset) in streamed.sources.items()
        }

    def __len__(self) -> int:
        return len(self.streamed)

    def __iter__(self) -> Iterator[RawBatch]:
        first = next(iter(self.rows.values()))
        order = torch.arange(len(first))
        if self.streamed.pool_blocks:
            generator = torch.Generator().manual_seed(self.streamed.seed * 100_003 + self.epoch)
            order = torch.randperm(len(first), generator=generator)
        order = order.to(first.device)
        self.epoch += 1
        size = self.streamed.batch_size
        skip, self.streamed.skip = self.streamed.skip, 0
        for number in range(skip, len(self)):
            chosen = order[number * size : (number + 1) * size]
            yield {name: tensor[chosen] for name, tensor in self.rows.items()}


def _joined(row_ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(row_ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _row_bytes(sources: dict[str, tuple[ShardReader, str]]) -> int:
    return sum(reader.read_stored(dataset, 0, 1).nbytes for reader, dataset in sources.values())


def _require_shared_memory(dataset: BlockShuffled, workers: int) -> None:
    """Refuse loader processes whose batches do not fit into shared memory: one that cannot write waits for ever.

    Raises:
        UserError: with the bytes that are needed and there.
    """
    if not SHARED_MEMORY.is_dir():  # as on macOS and Windows
        return
    pages = len(dataset.sources) * mmap.PAGESIZE  # each tensor has a file
    needed = (BATCHES_AHEAD * workers + 1) * (dataset.batch_size * _row_bytes(dataset.sources) + pages)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        raise UserError(
            f"{workers} loader processes need {needed / 1e6:.1f} MB of shared memory for their batches, and"
            f" {SHARED_MEMORY} has {free / 1e6:.1f} MB free; set data.num_workers 0, lower data.batch_size, or enlarge"
            " it (docker run --shm-size 1g)"
        )


class ShardDataModule(lightning.LightningDataModule):
    """Train and val batches of one (layer, target).

    Args:
        activations: folder of shards.
        key: the layer and the target.
        site: what the predictor reads, of an earlier layer for look-ahead.
        config: sizes.
        seed: of the order.

    Raises:
        UserError: shards that are missing or wrong, or too few rows for one batch.

    A batch is a dict: ``inputs`` (B, d) as stored. For ``mlp`` ``active`` (B, ceil(n / 8)) uint8, packed, and
    ``mlp_in`` (B, d) if it is not the input already. For ``heads`` ``contribution`` (B, n).
    """

    def __init__(
        self,
        activations: str | Path,
        key: UnitKey,
        site: Site,
        config: DataConfig,
        seed: int,
    ) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        self.target, self.site = key.target, site
        self._readers = {name: ShardReader(activations, key.layer, name) for name in ("train", "val")}
        self._inputs = self._readers
        if site.layer != key.layer:
            self._inputs = {name: ShardReader(activations, site.layer, name) for name in ("train", "val")}
        self._mlp_in_is_input = site == UnitKey(key.layer, Target.MLP).site
        shape = self._readers["train"].manifest.shape
        self.d_in, self.n_units = shape.d_model, shape.units(key.target)

    def train_batches(self, world: int) -> int:
        """Batches of an epoch on one of ``world`` ranks."""
        return len(self._dataset("train", True, 0, world)[0])

    def _dataset(self, set_name: str, shuffle: bool, rank: int, world: int) -> tuple[BlockShuffled, bool]:
        """The batches of a rank, and whether their rows fit into memory."""
        reader = self._readers[set_name]
        sources: dict[str, tuple[ShardReader, str]] = {"inputs": (self._inputs[set_name], self.site.input)}
        if self.target == Target.HEADS:
            sources["contribution"] = (reader, "head_norm")
        else:
            sources["active"] = (reader, "mlp_active")
            if not self._mlp_in_is_input:
                sources["mlp_in"] = (reader, "mlp_in")
        row_bytes = _row_bytes(sources)
        resident = reader.rows * row_bytes <= self.config.memory_gb * 1e9 * world
        workers = 0 if resident else self.config.num_workers
        consumers = world * max(1, workers)
        batch_size = min(max(1, self.config.batch_size // world), reader.rows // consumers)
        if batch_size < 1:
            raise UserError(
                f"the set {set_name} has {reader.rows} rows, fewer than the {consumers} readers; collect more tokens"
            )
        pool_blocks = POOL_BLOCKS if shuffle else 0
        return BlockShuffled(sources, batch_size, rank, world, workers, pool_blocks, self.seed), resident

    def _loader(self, set_name: str, shuffle: bool) -> DataLoader[RawBatch] | InMemoryLoader:
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        dataset, resident = self._dataset(set_name, shuffle, rank, world)
        workers = 0 if resident else self.config.num_workers
        if trainer is not None:
            # A resumed run goes on with the order and at the place that it would have had.
            dataset.epoch = trainer.current_epoch
            if shuffle and trainer.fit_loop.restarting:
                dataset.skip = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if resident:
            return InMemoryLoader(dataset, torch.device("cpu") if trainer is None else trainer.strategy.root_device)
        if workers:
            _require_shared_memory(dataset, workers)
        return DataLoader(
            dataset,
            batch_size=None,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            timeout=LONGEST_WAIT if workers else 0,
        )

    def train_dataloader(self) -> DataLoader[RawBatch] | InMemoryLoader:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[RawBatch] | InMemoryLoader:
        return self._loader("val", shuffle=False)
