import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY
from small_runs import activations, flags, one_line

import dejavu_train.ground.files as files
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.run.command import at_its_files, main, parse_config, with_saved
from dejavu_train.run.folder import claimed_folder
from dejavu_train.training.stages import calibrate_stage

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_parses_and_reads_itself_again(path, tmp_path):
    config = parse_config(["--config", str(path)])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(yaml.safe_dump(config.to_json()))
    again = parse_config(["--config", str(resolved)])
    assert again.to_json() == config.to_json() and calibrate_stage(again) == calibrate_stage(config)


def test_print_config(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--mlp.rank=9", "--print_config"])
    assert caught.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["mlp"]["rank"] == 9 and printed["trainer"]["devices"] == 1


@pytest.mark.parametrize(
    "more, words",
    [
        (["--layers=0-2"], ["0 to 1", "2"]),
        (["--mlp.rank=100"], ["mlp.rank", "48"]),
        (["--model=/nowhere/opt"], ["/nowhere/opt"]),
        (["--model=README.md/x"], ["README.md/x"]),
        (["--text.source=/nowhere/text.txt"], ["/nowhere/text.txt"]),
        (["--collect.window=4000"], ["give --collect.window 512"]),
        (["--text=self", "--text.sample.length=600"], ["give --text.sample.length 512"]),
        (["--calibrate.mlp_density=0"], ["mlp_density"]),
        (["--trainer.accelerator=tpu"], ["trainer"]),
        (["--trainer.logger=NoLogger"], ["NoLogger"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_mistakes_in_the_configuration(run, capsys, more, words):
    one_line(capsys, run(*more), *words)


def test_disk_too_small(run, capsys, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage)
    one_line(capsys, run(), "GB")
    assert not list((tmp_path / "run").rglob("*.h5"))


@pytest.fixture
def collected(run, tiny_opt, text_file, tmp_path) -> Path:
    """A run folder with activations that a test may damage."""
    return shutil.copytree(activations(tiny_opt, text_file), tmp_path / "run" / "activations")


def test_shard_of_an_older_schema(run, capsys, collected):
    manifest = collected / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema": 2', '"schema": 1'))
    one_line(capsys, run(), "schema 1", "delete the folder and run train.py again")


def test_an_output_of_another_run(run, capsys, collected):
    with claimed_folder(parse_config(run())):
        pass
    one_line(
        capsys,
        run("--collect.window=32", "--seed=3", "--text.documents=60"),
        "collect.window was 64 and is 32; seed was 0 and is 3; text.documents was None and is 60",
        "go on with what it had: --collect.window 64 --seed 0 --text.documents null",
    )


def test_a_run_goes_on_from_its_folder_alone(run, capsys, collected):
    config = parse_config(run("--mlp.ranks={1: 8}", "--layers=1", "--trainer.max_time=00:01:00:00"))
    alone = ["--output", str(collected.parent)]
    assert with_saved(alone) == alone
    with claimed_folder(config):
        pass
    assert parse_config(with_saved(alone)) == dataclasses.replace(config, layers=None)
    assert parse_config(with_saved([*alone, "--layers", "0"])) == dataclasses.replace(config, layers="0")
    (collected.parent / "config.yaml").unlink()  # as runs were before they kept it
    one_line(capsys, alone, "has no config.yaml, by which --output alone goes on; name its configuration once more")
    for more in (["--model=other"], ["--config=other.yaml"], ["--help", "mlp"]):  # another run, described anew
        assert with_saved([*alone, *more]) == [*alone, *more]
    with claimed_folder(config):
        pass
    assert parse_config(with_saved(alone)) == dataclasses.replace(config, layers=None)


def test_a_run_goes_on_from_any_folder(tiny_opt, text_file, tmp_path, monkeypatch, capsys):
    """Its paths begin where it was begun, also after all of it was moved."""
    project = tmp_path / "project"
    (project / "models").mkdir(parents=True)
    shutil.copytree(tiny_opt, project / "models" / "tiny")
    shutil.copy(text_file, project / "text.txt")
    monkeypatch.chdir(project)
    config = parse_config(flags("models/tiny", "text.txt", "runs/one"))
    with claimed_folder(config):
        pass
    assert at_its_files(["--output=runs/one"]) == (project, ["--output=runs/one"])
    for name in ("project", "moved"):
        project = project.rename(tmp_path / name)
        monkeypatch.chdir(tmp_path)
        folder, arguments = at_its_files([f"--output={name}/runs/one"])
        monkeypatch.chdir(folder)
        assert folder == project
        assert parse_config(with_saved(arguments)) == dataclasses.replace(config, output=str(project / "runs/one"))
    monkeypatch.chdir(tmp_path)
    main(["--output=moved/runs/one", "--check"])
    assert "no mistake was found" in capsys.readouterr().out and Path.cwd() == tmp_path
    (project / "runs/one/config.yaml").write_text("mlp: {rank: 8}")  # as somebody has edited it
    assert at_its_files(["--output=moved/runs/one"]) == (tmp_path, ["--output=moved/runs/one"])


def test_a_folder_without_a_run_is_said_with_the_model_that_is_trained(tmp_path, caplog):
    alone = ["--output", str(tmp_path / "mistyped"), "--bundle=second"]
    assert with_saved(alone) == alone
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"there is no run in {tmp_path / 'mistyped'}, so one of checkpoints/opt-mini begins")
    caplog.clear()
    assert with_saved([*alone, "--model=mine"]) and not caplog.records


def test_what_a_run_is_told_beside_its_folder_changes_it_and_is_said(run, collected, caplog):
    caplog.set_level("INFO", logger="dejavu_train")
    config = parse_config(run("--mlp.rank=8"))
    alone = ["--output", str(collected.parent)]
    with claimed_folder(config):
        pass
    changed = [*alone, "--calibrate.mlp_density=0.3", "--bundle=at-30", "--mlp.steps=7"]
    calibrate, mlp = dataclasses.replace(config.calibrate, mlp_density=0.3), dataclasses.replace(config.mlp, steps=7)
    assert parse_config(with_saved(changed)) == dataclasses.replace(
        config, calibrate=calibrate, mlp=mlp, bundle="at-30"
    )
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.endswith(
        "config.yaml but that bundle was bundle and is at-30; mlp.steps was 80 and is 7;"
        " calibrate.mlp_density was 0.4 and is 0.3"
    )


def test_a_model_of_which_only_the_config_is_here(run, tiny_opt, tmp_path, capsys, caplog):
    caplog.set_level("INFO", logger="dejavu_train")
    folder = tmp_path / "config-alone"
    folder.mkdir()
    shutil.copy(tiny_opt / "config.json", folder)
    argv = [*run(), f"--model={folder}", f"--output={tmp_path / 'new'}"]
    assert exit_on_user_error(main, [*argv, "--check"]) == 0
    assert "has a config.json alone" in caplog.text and "no mistake was found" in capsys.readouterr().out
    one_line(capsys, argv, "has no *.safetensors")
    (folder / "model.safetensors").write_bytes(b"cut off")
    one_line(capsys, [*argv, "--check"], "model.safetensors")


def test_a_run_of_an_earlier_version(run, capsys, collected):
    with claimed_folder(parse_config(run())):
        pass
    path = collected.parent / "run.json"
    path.write_text(path.read_text().replace('"schema": 2', '"schema": 1'))
    one_line(capsys, run(), "schema 1", "choose another --output or delete the folder")


def test_two_invocations_of_different_settings_never_work_in_one_folder(run, capsys, collected):
    with claimed_folder(parse_config(run())), claimed_folder(parse_config(run("--layers=0"))):
        one_line(
            capsys, run("--calibrate.mlp_density=0.3"), f"process {os.getpid()} on", "calibrate.mlp_density", "0.3"
        )
