"""What a person gets wrong, as a table: each mistake is one line with its remedy."""

import dataclasses
import errno
import functools
import importlib.util
import json
import math
import os
import shutil
import typing

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import activations, one_line

from dejavu_train.evaluation.config import InferConfig
from dejavu_train.ground import files, machine
from dejavu_train.ground.errors import UserError, describe, exit_on_user_error
from dejavu_train.ground.files import probe_folder, read_sealed, replacing, write_json, write_sealed
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.load import load_tokenizer
from dejavu_train.models.stored import check_folder
from dejavu_train.models.tokenizer_hash import tokenizer_hash
from dejavu_train.run.check import check_output
from dejavu_train.run.command import main, parse_config
from dejavu_train.training.config import RunConfig


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


def test_a_reader_that_has_left_is_named():
    said = describe(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert said == "Broken pipe; who read what is printed has left; read all of it, or send it to a file"


@pytest.mark.parametrize("said", ["DefaultCPUAllocator: can't allocate memory", "CUDA out of memory"])
def test_memory_that_ends_is_a_line_and_other_faults_keep_their_traceback(said, capsys):
    def fail(errors):
        raise errors[0]

    for error in (RuntimeError(said), MemoryError(said)):
        assert exit_on_user_error(fail, [error]) == 2
        assert capsys.readouterr().err == f"error: memory ends ({said}); ask for less at once, or free some\n"
    with pytest.raises(RuntimeError, match="a bug"):
        exit_on_user_error(fail, [RuntimeError("a bug")])


def test_a_full_disk_is_known_before_any_work(tmp_path, monkeypatch, run, capsys):
    full = os.statvfs(tmp_path)
    values = type("Full", (), {name: getattr(full, name) for name in dir(full) if name[:2] == "f_"})()
    values.f_files, values.f_favail = 100, 3
    monkeypatch.setattr(files.os, "statvfs", lambda path: values)
    with pytest.raises(OSError, match="No more files fit"):
        probe_folder(tmp_path)
    one_line(capsys, run(), "No more files fit", "free some space or inodes")


def test_a_probe_makes_no_folder_that_another_process_may_begin_to_use(tmp_path, monkeypatch):
    folder, seen = tmp_path / "run" / "bundle", []
    monkeypatch.setattr(files, "require_disk", lambda path, *_: seen.append((path, (tmp_path / "run").exists())))
    probe_folder(folder)
    assert seen == [(tmp_path, False)] and not list(tmp_path.iterdir())
    folder.mkdir(parents=True)
    monkeypatch.setattr(files.os, "fsync", lambda handle: files.remove_leftovers(folder))
    probe_folder(folder)  # though who holds the folder clears it meanwhile
    assert not list(folder.iterdir())


def test_model_or_text_that_changed_after_collecting_or_after_everything(run, capsys, tiny_opt, text_file, tmp_path):
    """In the folder whose name the run knows: another tokenizer of the same size, other weights, another text."""
    own, text = shutil.copytree(tiny_opt, tmp_path / "own"), shutil.copy(text_file, tmp_path / "text.txt")
    few = [f"--model={own}", f"--text.source={text}", "--mlp.steps=2", "--mlp.validations=1", "--targets=mlp"]
    few += ["--heads.enabled=false", "--calibrate.head_density=1"]
    assert exit_on_user_error(main, run(*few, "--layers=0")) == 0
    tokenizer, weights = own / "tokenizer.json", own / "model.safetensors"
    values, tensors, words = json.loads(tokenizer.read_text()), load_file(weights), text.read_text()
    for finished in (False, True):
        merges = values["model"]["merges"]
        changed = values | {"model": values["model"] | {"merges": [*merges[:-2], merges[-1], merges[-2]]}}
        tokenizer.write_text(json.dumps(changed))
        one_line(capsys, run(*few), "another tokenizer", tokenizer_hash(str(own))[:12], "put back the tokenizer")
        tokenizer.write_text(json.dumps(values))
        save_file(tensors | {"model.decoder.final_layer_norm.bias": torch.ones(48)}, weights, {"format": "pt"})
        one_line(capsys, run(*few), "other weights")
        save_file(tensors, weights, {"format": "pt"})
        text.write_text(words + "more")
        one_line(capsys, run(*few), "text.txt has changed since", "restore it")
        text.write_text(words)
        assert exit_on_user_error(main, run(*few)) == 0
        assert ("nothing to do" in capsys.readouterr().out) == finished
    os.unlink(text)
    one_line(capsys, run(*few), f"there is no text file {text}")


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


def numbers(kind, prefix=""):
    """Dotted names of the fields that hold numbers."""
    for name, hint in typing.get_type_hints(kind).items():
        parts = {hint, *typing.get_args(hint)}
        if dataclasses.is_dataclass(hint):
            yield from numbers(hint, f"{prefix}{name}.")
        elif parts & {int, float} and str not in parts and typing.get_origin(hint) is not dict:
            yield prefix + name


def replaced(config, names, value):
    first, *inner = names
    return dataclasses.replace(config, **{first: replaced(getattr(config, first), inner, value) if inner else value})


@pytest.mark.parametrize("kind", [RunConfig, InferConfig])
def test_every_number_has_a_range(kind, tiny_opt):
    """A number that cannot be meant is refused, and the line names its key."""
    shape = [read_dims(str(tiny_opt))] if kind is RunConfig else []
    rank = {name: dataclasses.replace(getattr(RunConfig(), name), rank=4) for name in ("mlp", "heads")}
    good = RunConfig(**rank) if kind is RunConfig else InferConfig()
    names = list(numbers(kind))
    assert len(names) > 12
    for name in names:
        many = isinstance(functools.reduce(getattr, name.split("."), good), tuple)
        for value in (-7, 10**30, 1e30, math.nan, math.inf):
            with pytest.raises(UserError) as caught:
                replaced(good, name.split("."), (value,) if many else value).check(*shape)
            assert name.split(".")[-1] in str(caught.value), (name, value, caught.value)


def test_what_is_too_small_for_what_follows(run, capsys, tmp_path):
    one_line(capsys, run("--collect.calibration_tokens=20"), "collect.calibration_tokens is 20", "sequence")
    one_line(capsys, run("--calibrate.budget=5%"), "sensitivity_tokens above 0")
    one_line(capsys, run("--layers=0-99999999"), "layers 0 to 1")
    one_line(capsys, run("--layers=\u00b2"), "--layers must look like")
    few = ["--text.source=self", "--text.sample.tokens=100"]
    one_line(capsys, run(*few), "four samples of 64 tokens")
    path = tmp_path / "few.txt"
    path.write_text("\n\n".join("word " * 5 * (1 + i % 2) + "." * 3995 for i in range(60)))
    one_line(capsys, run(f"--text.source={path}", "--collect.window=512", "--text.documents=2"), "none falls into")
    assert not (tmp_path / "run").exists()


def damaged(folder, name, change):
    path = folder / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


MODEL_MISTAKES = {
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    "empty tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json is damaged"),
    "small vocabulary": (
        lambda f: damaged(f, "tokenizer.json", lambda v: v | {"added_tokens": [{"id": 9999}]}), "the token 9999"
    ),
    "a list": (lambda f: (f / "config.json").write_text("[1]"), "must hold keys and values"),
    "text for a size": (lambda f: damaged(f, "config.json", lambda v: v | {"ffn_dim": "96"}), "ffn_dim of"),
    "no layers": (lambda f: damaged(f, "config.json", lambda v: v | {"num_hidden_layers": 0}), "num_hidden_layers of"),
    "heads": (lambda f: damaged(f, "config.json", lambda v: v | {"num_attention_heads": 5}), "do not divide"),
    "a number for a switch": (lambda f: damaged(f, "config.json", lambda v: v | {"use_cache": 3.5}), "use_cache of"),
    "a share of 7": (lambda f: damaged(f, "config.json", lambda v: v | {"dropout": 7}), "dropout of"),
    "no such token": (
        lambda f: damaged(f, "generation_config.json", lambda v: v | {"eos_token_id": [2, 99999]}), "a token below"
    ),
    "generation's list": (lambda f: (f / "generation_config.json").write_text("[]"), "must hold keys and values"),
    "fewer layers": (lambda f: damaged(f, "config.json", lambda v: v | {"num_hidden_layers": 1}), "layers.1."),
    "another size": (lambda f: damaged(f, "config.json", lambda v: v | {"ffn_dim": 80}), "96x48, its config asks"),
    "untied head": (lambda f: damaged(f, "config.json", lambda v: v | {"tie_word_embeddings": False}), "lm_head"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no *.safetensors"),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 9000), "truncated"),
    "broken index": (lambda f: (f / "model.safetensors").rename(f / "model.safetensors.index.json"), "weight index"),
    "index without a file": (
        lambda f: (f / "model.safetensors").rename(f / "model-2.safetensors") and
        (f / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {"a": "b.safetensors"}}'),
        "lacks b.safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODEL_MISTAKES)
def test_a_model_folder_that_is_not_complete(name, tiny_opt, tmp_path, run, capsys):
    folder = tmp_path / "opt"
    shutil.copytree(tiny_opt, folder, ignore=shutil.ignore_patterns("activations"))
    check_folder(str(folder), read_dims(str(folder)))
    change, words = MODEL_MISTAKES[name]
    change(folder)
    one_line(capsys, run(f"--model={folder}"), words)


TOKENIZER_MISTAKES = {
    "a decoder of no type": ("tokenizer.json", lambda v: v | {"decoder": v["decoder"] | {"type": ""}}),
    "a number for a token": ("tokenizer_config.json", lambda v: v | {"eos_token": 3.5}),
}


@pytest.mark.parametrize("name", TOKENIZER_MISTAKES)
def test_a_tokenizer_that_the_package_cannot_read(name, tiny_opt, tmp_path):
    folder = shutil.copytree(tiny_opt, tmp_path / "opt", ignore=shutil.ignore_patterns("activations"))
    damaged(folder, *TOKENIZER_MISTAKES[name])
    with pytest.raises(UserError, match="cannot load a tokenizer from"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("package", "more", "words"),
    [
        ("lightning", (), "training needs lightning: pip install 'dejavu-train[train]'"),
        ("h5py", (), "pip install 'dejavu-train[train]'"),
        ("wandb", ("--trainer.logger=WandbLogger",), "the logger WandbLogger needs the package wandb"),
        ("datasets", ("--text.source=some/set",), "there is no text file some/set; a hub dataset needs the package"),
        ("accelerate", ("--collect.device_map=auto",), "dejavu-train[large]"),
    ],
)
def test_a_package_that_is_missing(package, more, words, run, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    one_line(capsys, run(*more), words)


@pytest.mark.parametrize(
    "more",
    [
        ["devices=foo"], ["devices=-2"], ["accumulate_grad_batches=0"], ["val_check_interval=-1"], ["max_steps=5"],
        ["gradient_clip_val=x"], ["precision=7"], ["callbacks=[{class_path: no.Such}]"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_trainer_arguments_that_cannot_be(more, run, capsys, tmp_path):
    line = one_line(capsys, run(*(f"--trainer.{flag}" for flag in more)), "trainer")
    assert line.count("do not fit") <= 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "more, words",
    [
        (["--bundle=a/b"], "bundle must be the name of a folder"),
        (["--bundle=.."], "bundle must be the name of a folder"),
        (["--bundle= x"], "bundle must be the name of a folder"),
        (["--bundle=a\x07b"], "bundle must be the name of a folder"),
        (["--bundle=" + "x" * 300], "bundle must be the name of a folder"),
        (["--bundle=run.json"], "is that of something else"),
        (["--bundle=Predictors"], "is that of something else"),
        (["--calibrate.mlp_density=0.0001"], "calibrate.mlp_density must be at least 0.001"),
        (["--calibrate.head_density=0.01"], "calibrate.head_density must be at least 0.0208"),
        (["--calibrate.dense_layers=1"], "the 1 calibrate.dense_layers of 2 alone are 0.5 in the mean"),
        (["--calibrate.dense_layers=1", "--calibrate.retained_mass=0.9", "--calibrate.head_density=0.4"], "head_den"),
        (["--tune.steps=2", "--calibrate.mlp_density=1"], "nothing to tune"),
        (["--tune.steps=2", "--tune.density=0.0001"], "tune.density must be at least"),
    ],
)  # fmt: skip
def test_what_would_be_found_out_at_the_end(more, words, run, capsys, tmp_path):
    one_line(capsys, run(*more), words)
    assert not (tmp_path / "run").exists()


def test_own_text_by_layers_leaves_no_folder(run, capsys, tmp_path):
    argv = run("--text.source=self", "--collect.by_layers=true", f"--text.cache={tmp_path / 'cache'}")
    one_line(capsys, argv, "text.source self needs all layers", "--text FILE")
    assert not (tmp_path / "run").exists()


def test_dense_layers_that_can_be(run, tiny_opt):
    for more in (["--calibrate.budget=1%"], ["--calibrate.mlp_density=0.5"], ["--calibrate.mlp_density=1"]):
        more += ["--calibrate.dense_layers=1", "--calibrate.sensitivity_tokens=10", "--calibrate.head_density=1"]
        parse_config(run(*more)).check(read_dims(str(tiny_opt)))


@pytest.mark.parametrize("place", ["predictors", "activations", ".holders", "bundle"])
def test_a_file_where_a_folder_of_the_run_belongs(place, run, capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / place).write_text("mine")
    one_line(capsys, run(), place, "is a file")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [place]


def test_a_bundle_is_not_written_among_other_files(run, capsys, tmp_path):
    folder = tmp_path / "run" / "mine"
    folder.mkdir(parents=True)
    (folder / "predictors.safetensors").write_text("of a killed run")
    check_output(parse_config(run("--bundle=mine")))
    (folder / "notes.txt").write_text("x")
    one_line(capsys, run("--bundle=mine"), "holds notes.txt, which is no part of a bundle; choose another --bundle")


def test_check_prints_the_plan_and_leaves_nothing(run, capsys, tmp_path, tiny_opt, text_file):
    main(run("--check"))
    printed = capsys.readouterr().out
    assert "16,000 tokens" in printed and "2 predictors of 80 steps" in printed and "minutes: about" in printed
    assert not (tmp_path / "run").exists()
    one_line(capsys, [*run("--check"), "true"], "--check takes no value, got true")
    shutil.copytree(activations(tiny_opt, text_file), tmp_path / "run" / "activations")
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    main(run("--check"))
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["collect", "reused"]
    assert sorted(path for path in (tmp_path / "run").rglob("*")) == before


def test_values_that_would_fail_late_are_refused_before_anything_is_written(run, capsys, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": "x"}\n')  # which a reader of hub datasets would take
    for flag, words in (
        (f"--text.source={tmp_path / 'texts'}", "is a folder; name a .txt or .jsonl file in it"),
        ("--collect.device_map=nonsense", "collect.device_map must be one of auto, balanced"),
        ("--output=", "--output is empty"),
        ("--check=true", "--check takes no value, got true; write --check alone"),
        ("--output=~/run", "begins with ~"),
    ):
        one_line(capsys, run(flag), words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts"]
