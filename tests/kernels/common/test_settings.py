"""Launch settings: rows of files, which file a GPU takes, and that the committed files fit the kernels."""

import json
import re
from dataclasses import dataclass

import pytest
import torch
from conftest import REPOSITORY
from settings_kinds import KINDS

from benchmarks.rows import code_of
from dejavu_train.kernels.common import partial_sums, settings
from dejavu_train.kernels.common.settings import Settings, SettingsFile, SettingsRow, committed_files, file_for, tried

CPU = torch.device("cpu")
ROWS = {
    "float": [
        {"for": {"d": [None, 8]}, "use": {"warps": 1}},
        {"for": {"d": [9, 16], "all": True}, "use": {"warps": 2}},
        {"for": {"d": [16, None]}, "use": {"warps": 3}},
        {"for": {}, "use": {"warps": 4}},
    ],
    "float32": [{"for": {}, "use": {"warps": 8}}],
    "int4": [{"for": {"d": [0, 8]}, "use": {"warps": 5}}],
}


@pytest.fixture
def made(tmp_path):
    path = tmp_path / "made.json"
    path.write_text(json.dumps({"gpus": ["X1"], "multiprocessors": 7, "stages": {"made up": ROWS}}))
    return SettingsFile.read(path)


@pytest.mark.parametrize(
    ("format", "d", "every", "warps"),
    [
        ("float", 8, True, 1),
        ("float", 9, True, 2),
        ("float", 9, False, 4),
        ("float", 16, True, 2),
        ("float", 16, False, 3),
        ("bfloat16", 99, True, 3),  # a dtype that is not named
        ("float32", 8, True, 8),
        ("int4", 8, False, 5),
    ],
)
def test_the_first_row_that_a_shape_meets_counts(made, format, d, every, warps):
    assert made.values("made up", format, {"d": d, "all": every}) == {"warps": warps}


def test_what_no_row_is_for_is_named(made):
    with pytest.raises(ValueError, match="made.json: no row of stage made up, format int4 is for {'d': 9}"):
        made.values("made up", "int4", {"d": 9})
    for stage, format in (("made up", "int8"), ("another", "float")):
        with pytest.raises(ValueError, match=f"made.json has no settings of stage {stage}, format {format}"):
            made.values(stage, format, {})


@pytest.mark.parametrize(
    "text", ["", "[]", '{"gpus": [], "multiprocessors": 1}', '{"gpus": 1, "multiprocessors": 1, "stages": {}}']
)
def test_a_file_that_is_none_is_named(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="broken.json: not a file of launch settings"):
        SettingsFile.read(path)


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200.json"),
        ("NVIDIA H100 80GB HBM3", "h100.json"),
        ("NVIDIA H100 PCIe", "h100.json"),
        ("NVIDIA GH200 480GB", "other.json"),
        ("NVIDIA A100-SXM4-80GB", "other.json"),
        ("NVIDIA GeForce RTX 4090", "other.json"),
        (None, "interpreter.json"),
    ],
)
def test_the_file_of_a_gpu(gpu, name):
    assert file_for(gpu).name == name


def test_the_digest_is_that_of_the_file_and_changes_with_it(made, tmp_path):
    path = tmp_path / "made.json"
    assert str(made) == f"made.json {made.digest}" and len(made.digest) == 12
    path.write_text(path.read_text().replace('"warps": 1', '"warps": 2'))
    assert SettingsFile.read(path).digest != made.digest


@pytest.mark.parametrize("name", sorted(committed_files()))
def test_every_stage_has_rows_that_make_its_settings(name):
    """The last row of each format is for every shape, and no row stands behind such a one."""
    file = committed_files()[name]
    assert set(file.stages) == set(KINDS) and len(KINDS) > 2
    for stage, formats in file.stages.items():
        for rows in formats.values():
            assert [bool(row.conditions) for row in rows] == [True] * (len(rows) - 1) + [False], (stage, rows)
            for row in rows:
                KINDS[stage](**row.values)


def test_files_of_gpus_say_which():
    named = {file.name for file in committed_files().values() if file.gpus}
    assert named == set(committed_files()) - {settings.OTHER, settings.INTERPRETER}
    assert all((file.multiprocessors > 0) == bool(file.gpus) for file in committed_files().values())


def test_values_are_looked_up_and_tried(monkeypatch, made):
    monkeypatch.setattr(Settings, "kinds", {})
    monkeypatch.setattr(settings, "settings_file", lambda device: made)
    settings.forget_settings()

    @dataclass(frozen=True)
    class MadeUp(Settings, stage="made up"):
        warps: int

    assert Settings.kinds == {"made up": MadeUp}
    assert MadeUp.find("int4", CPU, d=3) == MadeUp(5)
    with tried("made up", {"warps": 7}):
        assert MadeUp.find("int4", CPU, d=3) == MadeUp(7)
        with tried("another", {"warps": 9}):
            assert MadeUp.find("int4", CPU, d=99) == MadeUp(7)
    assert MadeUp.find("int4", CPU, d=3) == MadeUp(5)
    settings.forget_settings()


def test_a_row_compares_what_is_no_range():
    assert SettingsRow({"policy": "always", "d": [None, 4]}, {}).meets({"policy": "always", "d": 4, "further": 1})
    assert not SettingsRow({"policy": "always"}, {}).meets({"policy": "backfill"})


@pytest.mark.parametrize(("multiprocessors", "rows"), [(16, 512), (108, 512), (132, 528), (148, 592)])
def test_scratch_has_four_rows_for_each_multiprocessor(monkeypatch, multiprocessors, rows):
    """And never fewer than small GPUs' batches share."""
    monkeypatch.setattr(partial_sums, "n_sms", lambda _: multiprocessors)
    assert partial_sums.most_splits(CPU) == len(partial_sums.partial_sums(1, CPU)) == rows


def test_no_code_counts_the_multiprocessors_of_one_card():
    """Nor two or three programs on each of them. In words the numbers may stand, and in the files of settings."""
    places = [path for room in ("kernels", "dejavu_train", "benchmarks") for path in (REPOSITORY / room).rglob("*.py")]
    sources = {str(path.relative_to(REPOSITORY)): path.read_text("utf-8") for path in places}
    assert len(sources) > 200
    counts = re.compile(r"\b(132|264|396)\b")
    assert [name for name, text in sources.items() if counts.search(text) and counts.search(code_of(text))] == []
