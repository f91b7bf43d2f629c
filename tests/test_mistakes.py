"""What a person gets wrong, as a table: each mistake is one line with its remedy; our own bugs keep their traceback."""

import errno
import json
import os
import shutil

import pytest
from conftest import save_tiny_opt
from small_runs import activations, flags

from dejavu_train import files, pipeline
from dejavu_train.cli import main
from dejavu_train.errors import describe, exit_on_user_error
from dejavu_train.files import probe_folder, read_sealed, replacing, write_json, write_sealed
from dejavu_train.models.opt import load_opt


def one_line(capsys, argv, *words):
    """Exit code 2 and one line on stderr that has all the words."""
    capsys.readouterr()
    assert exit_on_user_error(main, argv) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and all(word in errors[0] for word in words), errors


@pytest.fixture
def run(tiny_opt, text_file, tmp_path):
    def argv(*more):
        return flags(tiny_opt, text_file, tmp_path / "run", *more)

    return argv


def folders(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "nowhere").symlink_to(tmp_path / "not" / "there")
    return {
        "under a file": (tmp_path / "file" / "run", "Not a directory"),
        "of the kernel": ("/proc/run", "/proc/run"),
        "a dangling link": (tmp_path / "nowhere", "nowhere"),
        "a long name": (tmp_path / ("x" * 300), "File name too long; choose a shorter path"),
        "a file": (tmp_path / "file", "is a file; choose a folder"),
    }


@pytest.mark.parametrize("place", ["under a file", "of the kernel", "a dangling link", "a long name", "a file"])
def test_an_output_that_cannot_be(run, capsys, tmp_path, place):
    path, words = folders(tmp_path)[place]
    one_line(capsys, run(f"--output={path}"), words)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_what_the_system_refuses_names_path_and_remedy(tmp_path, number):
    for error in (
        OSError(number, os.strerror(number)),
        RuntimeError(f"Unable to write (errno = {number}, error message = 'x')"),  # as HDF5 says it
        ValueError(f"Error while serializing: I/O error: x (os error {number})"),  # as safetensors says it
    ):
        with pytest.raises(OSError) as caught, replacing(tmp_path / "bundle.json"):
            raise error
        line = describe(caught.value)
        assert f"bundle.json: {os.strerror(number)}; " in line and "check the path" not in line
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_known_before_any_work(tmp_path, monkeypatch, run, capsys):
    full = os.statvfs(tmp_path)
    values = type("Full", (), {name: getattr(full, name) for name in dir(full) if name[:2] == "f_"})()
    values.f_files, values.f_favail = 100, 3
    monkeypatch.setattr(files.os, "statvfs", lambda path: values)
    with pytest.raises(OSError, match="No more files fit"):
        probe_folder(tmp_path)
    one_line(capsys, run(), "No more files fit", "free some space or inodes")


@pytest.mark.parametrize("function", ["collect", "run_job", "finish"])
def test_a_bug_in_a_phase_keeps_its_traceback(run, monkeypatch, tiny_opt, text_file, tmp_path, function):
    def bug(*_args, **_options):
        raise RuntimeError("a bug")

    shutil.copytree(activations(tiny_opt, text_file), tmp_path / "run" / "activations")
    monkeypatch.setattr(pipeline, function, bug)
    if function == "finish":
        monkeypatch.setattr(pipeline, "is_finished", lambda *_: True)
    with pytest.raises(RuntimeError, match="a bug"):
        exit_on_user_error(main, run())


def test_a_head_that_is_not_stored_is_not_made_up(tmp_path, run, capsys):
    folder = save_tiny_opt(tmp_path / "opt")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match="lack 1 tensors of its config, first .'lm_head.weight'"):
        load_opt(str(folder))


def test_a_model_with_more_layers_than_its_config_says(tmp_path):
    folder = save_tiny_opt(tmp_path / "opt")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match="layers.1.*num_hidden_layers is 1"):
        load_opt(str(folder))


def test_text_that_changed_or_went_after_collecting(run, capsys, text_file, tmp_path):
    own = shutil.copy(text_file, tmp_path / "text.txt")
    few = [f"--text.source={own}", "--mlp.steps=2", "--mlp.validations=1", "--layers=0", "--targets=mlp"]
    assert exit_on_user_error(main, run(*few)) == 0
    with open(own, "a") as file:
        file.write("more")
    one_line(capsys, run(*few), "text.txt has changed since", "restore it")
    os.unlink(own)
    one_line(capsys, run(*few), f"there is no text file {own}")


def test_values_that_were_changed(tmp_path):
    path = tmp_path / "stage.json"
    write_sealed(path, {"rank": 3})
    assert read_sealed(path, "it") == {"rank": 3}
    write_json(path, json.loads(path.read_text()) | {"rank": 4})
    with pytest.raises(ValueError, match="stage.json was changed"):
        read_sealed(path, "it")
    write_json(path, {"rank": 4})  # of an earlier version
    assert read_sealed(path, "it") == {"rank": 4}


def test_a_changed_predictor_is_trained_anew(run, tiny_opt, text_file, tmp_path, caplog):
    shutil.copytree(activations(tiny_opt, text_file), tmp_path / "run" / "activations")
    few = ["--mlp.steps=2", "--mlp.validations=1", "--layers=0", "--targets=mlp"]
    assert exit_on_user_error(main, run(*few)) == 0
    path = tmp_path / "run" / "predictors" / "layer_00" / "mlp" / "predictor.safetensors"
    before = path.read_bytes()
    path.unlink()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert exit_on_user_error(main, run(*few)) == 0
    assert path.read_bytes() == before
