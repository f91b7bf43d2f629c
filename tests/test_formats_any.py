"""Any change of a stored file is refused by a specific check or changes nothing (hypothesis draws the changes)."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import activations

from dejavu_train.data.shard_reader import ShardReader, active_densities
from dejavu_train.data.shards import RecordedWeights
from dejavu_train.ground.errors import UserError

# The same examples in each run: on rare damages libhdf5 itself ends the process, which no test can catch.
small = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def shards(tiny_opt, text_file, tmp_path_factory):
    return shutil.copytree(activations(tiny_opt, text_file), tmp_path_factory.mktemp("any") / "activations")


def refused_or_same(path, data, read, reference):
    """Read with other bytes in ``path``, which gets its own back."""
    original = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    try:
        assert read() == reference
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) > 20
    finally:
        path.unlink()
        path.write_bytes(original)


def changed(data, draw):
    place = draw(st.integers(0, len(data) - 1))
    return (
        data[:place]
        if draw(st.booleans())
        else data[:place] + bytes([data[place] ^ draw(st.integers(1, 255))]) + data[place + 1 :]
    )


@small
@given(st.data())
@pytest.mark.parametrize(
    "name", ["manifest.json", "statistics.json", "layer_00/shard_0000.h5", "layer_00/weights.safetensors"]
)
def test_bytes_of_activations(shards, name, data):
    def read():
        reader = ShardReader(shards, 0, "train")
        weights = RecordedWeights.load(shards, 0, reader.manifest.weight_hash)
        rows = reader.read("mlp_in", 0, 50).float().sum()
        return float(rows), float(weights.up_weight.sum()), active_densities(shards)

    path = shards / name
    refused_or_same(path, changed(path.read_bytes(), data.draw), read, read())
