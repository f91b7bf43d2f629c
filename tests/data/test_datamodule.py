import mmap
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from small_runs import activations
from torch.utils.data import DataLoader

from dejavu_train.data.config import DataConfig
from dejavu_train.data.datamodule import BlockShuffled, InMemoryLoader, ShardDataModule
from dejavu_train.data.shard_reader import ShardReader
from dejavu_train.data.shards import unpack_bits
from dejavu_train.families import Site, UnitKey
from dejavu_train.ground.errors import UserError

DATASETS = {"d": "document", "p": "position", "x": "mlp_in"}


@pytest.fixture
def reader(tiny_opt, text_file):
    return ShardReader(activations(tiny_opt, text_file), 0, "train")


def keys(batches):
    """Rows as (document, position, first value)."""
    return [
        key
        for batch in batches
        for key in zip(batch["d"].tolist(), batch["p"].tolist(), batch["x"][:, 0].tolist(), strict=True)
    ]


def dataset(reader, batch_size=100, **options):
    return BlockShuffled({name: (reader, dataset) for name, dataset in DATASETS.items()}, batch_size, **options)


def test_an_epoch_has_every_row_once_in_a_new_order(reader):
    data = dataset(reader, pool_blocks=2)
    first, second = keys(data), keys(data)
    assert len(data) == 120 and len(first) == 12000
    assert Counter(first) == Counter(second) and first != second
    assert keys(dataset(reader, pool_blocks=2)) == first
    in_order = keys(dataset(reader, pool_blocks=0))
    assert in_order != first and Counter(in_order) == Counter(first)
    neighbours = sum(a[0] == b[0] for a, b in zip(first, first[1:], strict=False))
    assert neighbours < 0.5 * sum(a[0] == b[0] for a, b in zip(in_order, in_order[1:], strict=False))


def test_ranks_and_workers_split_evenly(reader):
    parts = [keys(dataset(reader, batch_size=70, pool_blocks=3, rank=rank, world=3)) for rank in range(3)]
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) == 4000 // 70 * 70
    everything = Counter(keys(dataset(reader, pool_blocks=0)))
    assert not sum(map(Counter, parts), Counter()) - everything  # no row twice
    validation = [keys(dataset(reader, batch_size=70, pool_blocks=0, rank=rank, world=3)) for rank in range(3)]
    assert sum(map(Counter, validation), Counter()) == everything


@pytest.mark.parametrize("world, workers", [(2, 1), (7, 1), (3, 2)])
def test_all_rows_are_validated_whatever_the_ranks_and_training_stays_equal(reader, world, workers):
    """12,000 rows and 11,999: neither rank counts nor remainders may lose a row."""
    for rows in (12000, 11999):
        for pool_blocks in (0, 2):
            parts = [
                dataset(reader, 70, pool_blocks=pool_blocks, rank=r, world=world, workers=workers) for r in range(world)
            ]
            for part in parts:
                part.reader = SimpleNamespace(rows=rows, blocks=lambda rows=rows: [(0, 5000), (5000, rows)])
            ranges = [part.row_ranges(r * workers + w) for r, part in enumerate(parts) for w in range(workers)]
            read = sum(stop - start for each in ranges for start, stop in each)
            if pool_blocks:
                assert len({len(part) for part in parts}) == 1 and read == rows - rows % (world * workers)
            else:
                assert read == rows == len({row for each in ranges for span in each for row in range(*span)})
                assert sum(len(part) for part in parts) == sum(
                    -(-sum(stop - start for start, stop in each) // 70) for each in ranges
                )


def test_resident_rows_are_the_same_rows(reader):
    cpu = torch.device("cpu")
    everything = Counter(keys(dataset(reader, pool_blocks=0)))
    whole = InMemoryLoader(dataset(reader, pool_blocks=2), cpu)
    first, second = keys(whole), keys(whole)
    assert len(whole) == 120 and Counter(first) == Counter(second) == everything and first != second
    parts = [
        keys(InMemoryLoader(dataset(reader, batch_size=70, pool_blocks=2, rank=r, world=3), cpu)) for r in range(3)
    ]
    assert {len(part) for part in parts} == {4000 // 70 * 70}
    assert not sum(map(Counter, parts), Counter()) - everything
    assert keys(InMemoryLoader(dataset(reader, pool_blocks=0), cpu)) == keys(dataset(reader, pool_blocks=0))


def test_worker_processes_read_the_same_rows(tiny_opt, text_file):
    folder = activations(tiny_opt, text_file)
    data = ShardDataModule(
        folder, UnitKey(0, "mlp"), Site(0, "mlp_in"), DataConfig(batch_size=100, num_workers=2, memory_gb=0), 0
    )
    loader = data.train_dataloader()
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader) == 120
        sums = torch.cat([batch["inputs"].float().sum(1) for batch in batches]).sort().values
        reader = ShardReader(folder, 0, "train")
        torch.testing.assert_close(sums, reader.read("mlp_in", 0, reader.rows).float().sum(1).sort().values)


@pytest.mark.parametrize("memory_gb", [0, 4])
def test_batches_of_each_target(tiny_opt, text_file, memory_gb):
    folder = activations(tiny_opt, text_file)
    config = DataConfig(batch_size=64, memory_gb=memory_gb)
    mlp = next(iter(ShardDataModule(folder, UnitKey(1, "mlp"), Site(1, "mlp_in"), config, 0).train_dataloader()))
    assert set(mlp) == {"inputs", "active"}
    assert mlp["inputs"].shape == (64, 48) and mlp["active"].shape == (64, 12) and mlp["active"].dtype == torch.uint8
    heads = next(iter(ShardDataModule(folder, UnitKey(1, "heads"), Site(1, "attn_in"), config, 0).train_dataloader()))
    assert set(heads) == {"inputs", "contribution"} and heads["contribution"].shape == (64, 4)


def test_look_ahead_pairs_the_same_rows(tiny_opt, text_file):
    folder = activations(tiny_opt, text_file)
    data = ShardDataModule(folder, UnitKey(1, "mlp"), Site(0, "mlp_in"), DataConfig(batch_size=50), 0)
    batch = next(iter(data.val_dataloader()))
    early, own = ShardReader(folder, 0, "val"), ShardReader(folder, 1, "val")
    assert torch.equal(batch["inputs"], early.read("mlp_in", 0, 50))
    assert torch.equal(batch["mlp_in"], own.read("mlp_in", 0, 50))
    assert torch.equal(unpack_bits(batch["active"], 96), own.read("mlp_active", 0, 50))


def test_mistakes(tiny_opt, text_file):
    with pytest.raises(UserError, match="batch_size"):
        DataConfig(batch_size=0)
    config = DataConfig(num_workers=5000, memory_gb=0)
    data = ShardDataModule(activations(tiny_opt, text_file), UnitKey(0, "mlp"), Site(0, "mlp_in"), config, 0)
    with pytest.raises(UserError, match="fewer than the 5000 readers"):
        data.val_dataloader()


def test_workers_without_shared_memory_are_refused(tiny_opt, text_file, monkeypatch, tmp_path):
    """Three batches of 500 rows, of 48 numbers in 16 bits and 96 bits, and a page for each of two tensors."""
    folder = activations(tiny_opt, text_file)
    config = DataConfig(batch_size=500, num_workers=1, memory_gb=0)
    data = ShardDataModule(folder, UnitKey(0, "mlp"), Site(0, "mlp_in"), config, 0)
    needed = 3 * (500 * (48 * 2 + 96 // 8) + 2 * mmap.PAGESIZE)
    monkeypatch.setattr("dejavu_train.data.datamodule.SHARED_MEMORY", tmp_path)
    free = {"bytes": needed}
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free["bytes"]))
    assert data.train_dataloader().timeout > 0
    free["bytes"] -= 1
    for made in (data.train_dataloader, data.val_dataloader):
        with pytest.raises(UserError, match="1 loader processes need .* set data.num_workers 0"):
            made()
    monkeypatch.setattr("dejavu_train.data.datamodule.SHARED_MEMORY", tmp_path / "none")  # as on macOS
    data.train_dataloader()


def test_a_worker_shares_its_batches_alone(reader):
    loader = DataLoader(dataset(reader, pool_blocks=2, workers=1), batch_size=None, num_workers=1)
    batch = next(iter(loader))
    assert all(batch[name].untyped_storage().nbytes() == batch[name].nbytes for name in DATASETS)
