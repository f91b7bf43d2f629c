"""Any change of a stored file is refused by a specific check or changes nothing."""

import random
import shutil

import pytest
from files.mutate import bytes_of
from small_runs import activations

from dejavu_train.data.shard_reader import ShardReader, active_densities
from dejavu_train.data.shards import RecordedWeights
from dejavu_train.ground.errors import UserError

SEEDS = range(40)  # always the same: on rare damages libhdf5 itself ends the process, which no test can catch


@pytest.fixture(scope="module")
def shards(tiny_opt, text_file, tmp_path_factory):
    return shutil.copytree(activations(tiny_opt, text_file), tmp_path_factory.mktemp("any") / "activations")


@pytest.mark.parametrize(
    "name", ["manifest.json", "statistics.json", "layer_00/shard_0000.h5", "layer_00/weights.safetensors"]
)
def test_bytes_of_activations(shards, name):
    def read():
        reader = ShardReader(shards, 0, "train")
        weights = RecordedWeights.load(shards, 0, reader.manifest.weight_hash)
        rows = reader.read("mlp_in", 0, 50).float().sum()
        return float(rows), float(weights.up_weight.sum()), active_densities(shards)

    path, whole, refused = shards / name, read(), 0
    original = path.read_bytes()
    for seed in SEEDS:
        data, about = bytes_of(random.Random(seed), original)
        path.unlink()  # what is mapped of the file before goes on
        path.write_bytes(data)
        try:
            assert read() == whole, about
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) > 20
    path.unlink()
    path.write_bytes(original)
    assert refused
