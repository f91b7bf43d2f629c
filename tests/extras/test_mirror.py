"""``--store``: a run goes on from a store on another host, reads there what it lacks, and makes the same files."""

import errno
import os
import shutil
import subprocess
import sys
import uuid

import fsspec
import pytest
from conftest import REPOSITORY
from small_runs import activations, flags

from dejavu_train.data.shard_reader import ShardReader
from dejavu_train.data.shards import STORE, ActivationManifest
from dejavu_train.extras.hosts.store import Store
from dejavu_train.ground.errors import UserError, exit_on_user_error
from dejavu_train.run.command import main

BRIEF = ("--mlp.steps=10", "--heads.steps=10")


@pytest.fixture
def address():
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def begun(tiny_opt, text_file, tmp_path):
    """An output whose activations are there."""
    shutil.copytree(activations(tiny_opt, text_file), tmp_path / "first" / "activations")
    return tmp_path / "first"


def files(folder):
    wanted = [*folder.glob("predictors/*/*/predictor.*"), *folder.glob("bundle/*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in wanted if path.name != "README.md"}


def test_another_host_goes_on_from_a_store(begun, address, tiny_opt, text_file, tmp_path, caplog):
    def run(output, *more):
        main(flags(tiny_opt, text_file, output, f"--store={address}", *BRIEF, *more))

    run(begun, "--layers=0")
    store, root = fsspec.core.url_to_fs(address)
    assert store.exists(f"{root}/activations/statistics.json") and not store.exists(f"{root}/bundle/bundle.json")
    other = tmp_path / "second"
    run(other, "--layers=1")
    assert "collecting" not in caplog.text and "layer 1 mlp: " in caplog.text
    shards = {path.parent.name for path in other.glob("activations/*/shard_*.h5")}
    assert shards == {"layer_01", "layer_00"}  # the layer that it trained, and calibration of both
    read = {name: len(ActivationManifest.load(other / "activations").of_set(name)) for name in ("train", "calibration")}
    assert len(list(other.glob("activations/layer_00/shard_*.h5"))) == read["calibration"]
    assert store.exists(f"{root}/bundle/bundle.json")
    third = tmp_path / "third"
    caplog.clear()
    run(third)
    assert "training" not in caplog.text and files(third) == files(other) and len(files(third)) == 10
    assert not list(third.glob("activations/*/shard_*.h5"))
    alone = tmp_path / "alone"
    shutil.copytree(activations(tiny_opt, text_file), alone / "activations")
    main(flags(tiny_opt, text_file, alone, *BRIEF))
    assert files(alone).keys() == files(third).keys()
    assert all(files(alone)[name] == data for name, data in files(third).items() if name.endswith("safetensors"))


def test_what_a_store_gives_is_compared(begun, address, tiny_opt, text_file, tmp_path):
    main(flags(tiny_opt, text_file, begun, f"--store={address}", *BRIEF, "--layers=0", "--targets=heads"))
    store, root = fsspec.core.url_to_fs(address)
    other = tmp_path / "second"
    shutil.copytree(begun / "activations", other / "activations", ignore=lambda _, names: set(names) - {
        "layer_00", "layer_01", "manifest.json", "statistics.json", STORE, "weights.safetensors",
    })  # fmt: skip
    name = f"{root}/activations/layer_00/shard_0000.h5"
    damaged = bytearray(store.cat_file(name))
    damaged[-100] ^= 255
    store.pipe_file(name, bytes(damaged))
    with pytest.raises(UserError, match="shard_0000.h5 was changed since it was written"):
        ShardReader(other / "activations", 0, "train")
    with pytest.raises(UserError, match="lies in the store memory://.*give that --store"):
        main(flags(tiny_opt, text_file, begun, "--store=memory://elsewhere", *BRIEF, "--layers=0"))
    with pytest.raises(UserError, match="holds activations of another run than .*choose another --store or --output"):
        manifest = f"{root}/activations/manifest.json"
        store.pipe_file(manifest, store.cat_file(manifest) + b" ")
        (begun / "activations" / STORE).unlink()
        main(flags(tiny_opt, text_file, begun, f"--store={address}", *BRIEF, "--layers=0", "--targets=heads"))


class Unreachable(Exception):
    """As a store's package has them: a class of its own."""


@pytest.mark.parametrize("uploaded", [3, 16, 17, 24])
def test_an_upload_that_breaks_off_is_made_up_for(begun, address, tiny_opt, text_file, capsys, monkeypatch, uploaded):
    """Among the activations, within a predictor, in front of a predictor's last file, within the bundle."""
    run = flags(tiny_opt, text_file, begun, f"--store={address}", *BRIEF, "--targets=heads", "--mlp.enabled=false")
    store, root = fsspec.core.url_to_fs(address)
    put, left = type(store).put_file, [uploaded]

    def broken(*arguments, **more):
        left[0] -= 1
        if left[0] < 0:
            raise Unreachable("Could not connect\nat all")
        put(*arguments, **more)

    monkeypatch.setattr(type(store), "put_file", broken)
    assert exit_on_user_error(main, run) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (
        said == f"error: --store {address}: Could not connect; check address, credentials and network; the same"
        " command goes on"
    )
    assert not list(begun.rglob(".tmp-*")) and (begun / "activations" / STORE).exists() == (uploaded > 13)
    monkeypatch.setattr(type(store), "put_file", put)
    assert exit_on_user_error(main, run) == 0
    here = files(begun)
    assert here and {name: store.cat_file(f"{root}/{name}") for name in here} == here


@pytest.mark.parametrize("error, said", [
    (PermissionError("Access Denied"), "Access Denied"),
    (FileNotFoundError("The specified bucket does not exist"), "The specified bucket"),
    (TimeoutError(), "TimeoutError"),
    (OSError(errno.ENOSPC, "No space left on device"), None),
    (FileNotFoundError(errno.ENOENT, "gone", "/a/file/of/ours"), None),
    (KeyError("ours"), None),
])  # fmt: skip
def test_what_a_store_says_is_told_from_what_happens_here(tmp_path, monkeypatch, error, said):
    store = Store("memory://somewhere/run")

    def broken(*_, **__):
        raise error

    for name in ("find", "put_file", "get_file"):
        monkeypatch.setattr(type(store._files), name, broken)
    for call in (store.sizes, lambda: store.put(tmp_path, ["a"]), lambda: store.get(tmp_path, ["a"])):
        with pytest.raises(Exception) as raised:
            call()
        assert isinstance(raised.value, UserError) == (said is not None)
        assert said is None or str(raised.value).startswith(f"--store memory://somewhere/run: {said}")
        assert not list(tmp_path.iterdir())


def test_a_folder_is_a_store(tmp_path):
    (tmp_path / "a").write_text("1")
    store = Store(str(tmp_path / "not" / "there"))
    assert store.sizes() == {}
    store.put(tmp_path, ["a"])
    store.get(tmp_path / "back", ["a"])
    assert store.sizes() == {"a": 1} and (tmp_path / "back" / "a").read_text() == "1"


@pytest.mark.parametrize("address, said", [
    ("memory://", "--store memory:// names no bucket; give an address such as s3://bucket/run"),
    ("nowhere://bucket/run", "--store nowhere://bucket/run: Protocol not known: nowhere; give an address such as"),
    ("s3://bucket/run", "--store s3://bucket/run: .*s3fs.*; pip install 'dejavu-train.s3.'"),
])  # fmt: skip
def test_a_store_that_cannot_be(tiny_opt, text_file, tmp_path, monkeypatch, address, said):
    monkeypatch.setitem(sys.modules, "s3fs", None)  # not installed
    with pytest.raises(UserError, match=said):
        main(flags(tiny_opt, text_file, tmp_path / "run", f"--store={address}"))


SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.skipif("S3_PACKAGES" not in os.environ, reason="packages of S3 are not here: make test-long")
def test_a_store_on_a_server_of_s3(begun, tiny_opt, text_file, tmp_path):
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    paths = os.pathsep.join([str(REPOSITORY), os.environ["S3_PACKAGES"]])
    known = {**os.environ, **keys, "AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path), "PYTHONPATH": paths}
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], env=known, **piped) as server:
        known["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.stdout.readline().strip()}"

        def python(*arguments, without=(), **more):
            env = {name: value for name, value in (known | more).items() if name not in without}
            return subprocess.run([sys.executable, *arguments], env=env, text=True, capture_output=True)

        def run(output, *more, **settings):
            arguments = flags(tiny_opt, text_file, output, "--store=s3://bucket/run", *BRIEF, *more)
            return python(str(REPOSITORY / "train.py"), *arguments, **settings)

        missing = run(tmp_path / "nowhere")
        nobody = run(tmp_path / "nowhere", without=keys)
        silent = run(tmp_path / "nowhere", AWS_ENDPOINT_URL="http://127.0.0.1:9")
        made = python("-c", "import s3fs; s3fs.S3FileSystem().mkdir('bucket')")
        first, second = run(begun), run(tmp_path / "second", "--calibrate.mlp_density=0.3", "--bundle=other")
        listed = python("-c", "import s3fs; print(*s3fs.S3FileSystem().find('bucket/run'))").stdout
        server.stdin.close()
    for failed in (missing, nobody, silent):
        (said,) = failed.stderr.splitlines()
        assert failed.returncode == 2 and said.startswith("error: --store s3://bucket/run: "), said
    assert not (tmp_path / "nowhere").exists()
    assert (made.returncode, first.returncode, second.returncode) == (0, 0, 0), (first.stderr, second.stderr)
    assert "bucket/run/bundle/bundle.json" in listed and "bucket/run/other/bundle.json" in listed
    assert "collecting" not in second.stderr and " steps in " not in second.stderr
    read = {path.name for path in (tmp_path / "second" / "activations" / "layer_00").glob("shard_*.h5")}
    assert read and read < {path.name for path in (begun / "activations" / "layer_00").glob("shard_*.h5")}
