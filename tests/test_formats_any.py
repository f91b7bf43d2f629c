"""Any change of a stored file is refused by a specific check or changes nothing (hypothesis draws the changes)."""

import json
import shutil

import pytest
from bundles import make_bundle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import activations

from dejavu_train.bundle.artifact import METADATA, TENSORS, Bundle
from dejavu_train.data.shard_reader import ShardReader, active_densities
from dejavu_train.data.shards import RecordedWeights
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import json_digest

any_json = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 40) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
# The same examples in each run: on rare damages libhdf5 itself ends the process, which no test can catch.
small = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def bundle_folder(tiny_opt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any") / "bundle"
    make_bundle(tiny_opt).save_pretrained(folder)
    return folder


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
@pytest.mark.parametrize("name", [METADATA, TENSORS])
def test_bytes_of_a_bundle(bundle_folder, name, data):
    def read():
        return {key: spec.threshold for key, spec in Bundle.from_pretrained(bundle_folder).specs.items()}

    path = bundle_folder / name
    refused_or_same(path, changed(path.read_bytes(), data.draw), read, read())


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


@small
@given(st.data())
def test_values_of_a_bundle_that_was_signed_again(bundle_folder, data):
    """Somebody who knows the format: the digest fits, the value does not."""
    path = bundle_folder / METADATA
    values = json.loads(path.read_text())
    values.pop("sha256")
    spec = data.draw(st.sampled_from(values["predictors"]))
    name = data.draw(st.sampled_from(sorted(spec)))
    spec[name] = data.draw(any_json)

    def read():
        try:
            bundle = Bundle.from_pretrained(bundle_folder)
        except UserError:
            raise
        for key in bundle.specs:  # what was accepted can be used
            bundle.predictor(*key)
        return True

    refused_or_same(path, json.dumps(values | {"sha256": json_digest(values)}).encode(), read, True)
