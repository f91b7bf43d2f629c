import errno
import fcntl
import json
import os
import shutil

import h5py
import numpy as np
import pytest
import torch
from small_runs import activations

from dejavu_train.data.shard_reader import ShardReader, active_densities
from dejavu_train.data.shards import (
    ActivationManifest,
    RecordedWeights,
    ShardEntry,
    ShardWriter,
    chunk_rows,
    pack_bits,
    shard_path,
    unpack_bits,
)
from dejavu_train.families import ModelDims
from dejavu_train.families.dims import Activation
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_json, write_json


@pytest.fixture
def copied(tiny_opt, text_file, tmp_path):
    """A copy of the activations that a test may damage."""
    return shutil.copytree(activations(tiny_opt, text_file), tmp_path / "activations")


@pytest.mark.parametrize("units", [1, 8, 13, 96])
def test_bits_round_trip(units):
    active = torch.rand(5, units) < 0.3
    packed = pack_bits(active)
    assert np.array_equal(packed.numpy(), np.packbits(active.numpy(), axis=1))
    assert torch.equal(unpack_bits(packed, units), active)


def test_chunk_rows_stay_within_a_megabyte():
    assert chunk_rows(384) == 1024 and chunk_rows(4096) == 128 and chunk_rows(12288) == 32


def test_reader_joins_shards(tiny_opt, text_file):
    reader = ShardReader(activations(tiny_opt, text_file), 1, "train")
    entries = reader.manifest.of_set("train")
    assert len(entries) > 1 and reader.rows == sum(entry.tokens for entry in entries) == 12000
    first = entries[0].tokens
    across = reader.read("mlp_in", first - 2, first + 3)
    assert across.shape == (5, 48) and across.dtype == torch.float16
    assert torch.equal(across[2:], reader.read("mlp_in", first, first + 3))
    assert [stop for _, stop in reader.blocks()][-1] == reader.rows
    assert len(reader.read("position", 0, reader.rows)) == reader.rows
    reader.close()


def test_density_statistics(tiny_opt, text_file):
    folder = activations(tiny_opt, text_file)
    counted = []
    for layer in (0, 1):
        readers = [ShardReader(folder, layer, name) for name in ("train", "val", "calibration")]
        counted.append(torch.cat([r.read("mlp_active", 0, r.rows) for r in readers]).float().mean().item())
    assert active_densities(folder) == pytest.approx(dict(enumerate(counted)), abs=1e-6)


def test_bfloat16_is_stored_as_uint16(tmp_path):
    shape = ModelDims(8, 10, 1, 2, 300, 64)
    entry = ShardEntry(0, "train", 3)
    manifest = ActivationManifest("m", "hash", shape, "bfloat16", {"seed": 0}, {}, (entry,))
    manifest.save(tmp_path)
    hidden = torch.randn(3, 8).bfloat16()
    rows = {
        "attn_in": hidden.view(torch.uint16).numpy(),
        "mlp_in": hidden.view(torch.uint16).numpy(),
        "mlp_active": pack_bits(torch.ones(3, 10, dtype=torch.bool)).numpy(),
        "head_norm": np.ones((3, 2), np.float16),
        **{name: np.arange(3) for name in ("token", "document", "position")},
    }
    with ShardWriter(tmp_path, manifest, entry) as writer:
        writer.write(0, 0, rows, 30)
    assert torch.equal(ShardReader(tmp_path, 0, "train").read("attn_in", 0, 3), hidden)


def test_a_failed_shard_leaves_nothing(tmp_path):
    manifest = ActivationManifest(
        "m", "hash", ModelDims(8, 8, 2, 2, 300, 64), "float16", {}, {}, (ShardEntry(0, "train", 4),)
    )
    with pytest.raises(RuntimeError), ShardWriter(tmp_path, manifest, manifest.shards[0]):
        raise RuntimeError("killed")
    assert not list(tmp_path.rglob("*.h5"))
    assert manifest.missing(tmp_path) == list(manifest.shards)


def refuse(folder, *words, layer=0):
    with pytest.raises(UserError) as caught:
        reader = ShardReader(folder, layer, "train")
        reader.read("mlp_in", 0, reader.rows)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_truncated_shard(copied):
    path = shard_path(copied, 0, 1)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    refuse(copied, "shard_0001.h5", "truncated")


def test_no_lock_of_the_file_system_is_taken(copied):
    with open(shard_path(copied, 0, 1), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # with HDF5's locks the shard could not be opened now
        reader = ShardReader(copied, 0, "train")
        assert len(reader.read("mlp_in", 0, reader.rows)) == reader.rows


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EROFS, errno.ENOTSUP])
def test_locks_that_were_asked_for_and_are_not_there(copied, monkeypatch, number):
    def refuses(*_, **__):
        raise OSError(f"Unable to open file (unable to lock file, errno = {number}, error message = 'no')")

    monkeypatch.setattr(h5py, "File", refuses)
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "TRUE")
    refuse(copied, "cannot lock", os.strerror(number), "set HDF5_USE_FILE_LOCKING=FALSE")


def test_a_shard_that_the_system_does_not_give_is_not_damaged(copied, monkeypatch):
    def refuses(*_, **__):
        raise OSError(errno.EIO, "Unable to open file (file read failed, errno = 5)")

    monkeypatch.setattr(h5py, "File", refuses)
    with pytest.raises(OSError, match="Input/output error") as caught:
        ShardReader(copied, 0, "train")
    assert caught.value.errno == errno.EIO and caught.value.filename.endswith(".h5")


def test_shard_of_another_model(copied):
    with h5py.File(shard_path(copied, 0, 0), "r+") as file:
        file.attrs["weight_hash"] = "other"
    refuse(copied, "shard_0000.h5", "another model")


def test_shard_of_another_layer(copied):
    shutil.copy(shard_path(copied, 1, 0), shard_path(copied, 0, 0))
    refuse(copied, "shard_0000.h5", "layer")


def test_older_schema(copied):
    with h5py.File(shard_path(copied, 0, 0), "r+") as file:
        file.attrs["schema"] = 1
    refuse(copied, "shard_0000.h5", "schema 1")
    values = read_json(copied / "manifest.json", "manifest")
    write_json(copied / "manifest.json", values | {"schema": 1})
    refuse(copied, "schema 1")


def without_digests(activations):
    """As an earlier version left them: what is in the shards decides, not their digests."""
    path = activations / "statistics.json"
    path.write_text(json.dumps({"active_density": json.loads(path.read_text())["active_density"]}))
    return activations


def test_not_a_number(copied):
    without_digests(copied)
    with h5py.File(shard_path(copied, 0, 1), "r+") as file:
        file["mlp_in"][7, 3] = np.nan
    refuse(copied, "shard_0001.h5", "not finite")


def test_missing_shard_and_layer_out_of_range(copied):
    shard_path(copied, 0, 2).unlink()
    refuse(copied, "shard_0002.h5", "missing")
    refuse(copied, "layer 2", "0-1", layer=2)


def test_missing_and_damaged_manifest(copied):
    (copied / "manifest.json").write_text('{"schema": 2}')
    refuse(copied, "manifest")
    (copied / "manifest.json").unlink()
    refuse(copied, "manifest")


def test_layer_weights_are_checked(copied):
    manifest = ActivationManifest.load(copied)
    weights = RecordedWeights.load(copied, 0, manifest.weight_hash)
    assert weights.up_weight.shape == (96, 48) and weights.down_norm.shape == (96,)
    with pytest.raises(UserError, match="another model"):
        RecordedWeights.load(copied, 0, "other")
    (copied / "layer_00" / "weights.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(UserError, match="damaged"):
        RecordedWeights.load(copied, 0, manifest.weight_hash)


CPU = torch.device("cpu")


def test_many_rows_are_read_past_the_library(tiny_opt, text_file):
    reader = ShardReader(activations(tiny_opt, text_file), 1, "train")
    first = reader.manifest.of_set("train")[0].tokens
    row_ranges = [(first + 7, first + 9), (3, first + 5), (0, 3)]  # across two shards, in any order
    for name in ("mlp_in", "mlp_active", "head_norm", "position"):
        wanted = torch.cat([reader.read_stored(name, *row_range) for row_range in row_ranges])
        with torch.inference_mode():  # as in validation
            got = reader.read_rows(name, row_ranges, CPU)
            assert not got.is_inference()  # the threads that fill it are in no such mode
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)


def test_many_rows_of_a_compressed_dataset_go_through_the_library(copied):
    without_digests(copied)
    with h5py.File(shard_path(copied, 0, 0), "r+") as file:
        values = file["mlp_in"][:]
        del file["mlp_in"]
        file.create_dataset("mlp_in", data=values, compression="gzip", chunks=(64, 48))
    reader = ShardReader(copied, 0, "train")
    assert torch.equal(reader.read_rows("mlp_in", [(5, 300)], CPU), reader.read("mlp_in", 5, 300))


def test_a_changed_byte_of_a_shard_or_the_manifest(copied):
    path = shard_path(copied, 0, 1)
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    refuse(copied, "shard_0001.h5 was changed", "delete it")
    manifest = copied / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"storage": "float16"', '"storage": "bfloat16"'))
    refuse(copied, "manifest.json was changed")


def test_many_rows_are_checked(copied):
    without_digests(copied)
    with h5py.File(shard_path(copied, 0, 1), "r+") as file:
        file["mlp_in"][7, 3] = np.nan
    reader = ShardReader(copied, 0, "train")
    with pytest.raises(UserError, match="layer_00.*not finite"):
        reader.read_rows("mlp_in", [(0, reader.rows)], CPU)
    reader.read_rows("head_norm", [(0, reader.rows)], CPU)
    path = shard_path(copied, 0, 1)
    with open(path, "r+b") as file:  # while the handle is open
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(UserError, match="layer 0 is damaged.*shard_0001.h5 ends at byte"):
        for name in ("attn_in", "mlp_in", "head_norm"):
            reader.read_rows(name, [(0, reader.rows)], CPU)


def test_weights_of_a_gated_layer_are_kept_and_give_contributions(tmp_path):
    gated = RecordedWeights(
        torch.randn(6, 4), torch.zeros(6), torch.rand(6), torch.zeros(2, 2), torch.randn(6, 4), torch.randn(6),
        Activation.RELU2,
    )  # fmt: skip
    gated.save(tmp_path, 0, "hash")
    read = RecordedWeights.load(tmp_path, 0, "hash")
    x = torch.randn(5, 4)
    gate = (x @ gated.gate_weight.T + gated.gate_bias).relu().square()
    expected = (gate * (x @ gated.up_weight.T)).abs() * gated.down_norm
    torch.testing.assert_close(read.contribution(x), expected)
    assert read.activation == "relu2" and torch.equal(read.deciding[0], gated.gate_weight)


def test_names_in_the_file_of_a_layers_weights_are_those_of_before(tmp_path):
    from safetensors import safe_open

    RecordedWeights(torch.ones(6, 4), torch.zeros(6), torch.ones(6), torch.zeros(2, 2)).save(tmp_path, 0, "h")
    with safe_open(tmp_path / "layer_00" / "weights.safetensors", "pt") as file:
        assert set(file.keys()) == {"fc1_weight", "fc1_bias", "fc2_norm", "head_mean"}
        assert file.metadata() == {"model": "h"}
