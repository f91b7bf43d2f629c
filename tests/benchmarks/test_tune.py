"""What the tuning command keeps and writes, with a clock and times that are made up."""

import csv
import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from settings_kinds import KINDS

from benchmarks import tune
from benchmarks.tune import Log, Tuner, gpu_word, problems, ranges, text_of, tuned_rows
from dejavu_train.kernels.common import settings
from dejavu_train.kernels.common.settings import Lookup, Row, SettingsFile, committed_files

BASE = committed_files()["h200.json"]
GPU = "NVIDIA H200"
SHAPES = (("screen", (("d", 2048),)), ("screen", (("d", 4096),)), ("sums", (("bytes", 4), ("waves", 1))))
FOUND = [{Lookup(stage, "float", shape): [lambda: None]} for stage, shape in SHAPES]


class Times:
    """A timer without a GPU. Two warps and four rows are best, 16 rows are refused. It counts what was timed."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, calls) -> float:
        ((stage, values),) = settings._tried.items()
        self.asked.append(json.dumps([stage, values]))
        if values.get("rows") == 16:
            raise ValueError("too many rows")
        return 10 + abs(values["warps"] - 2) + abs(values.get("rows", 4) - 4)


def tuned(path, times, until=float("inf")) -> SettingsFile:
    clock = itertools.count()
    tuner = Tuner(BASE, Log(path, GPU), times, until, lambda: next(clock))
    return tune.tune(tuner, iter(FOUND), ["screen", "sums"])


def test_what_is_faster_stands_in_front(tmp_path):
    made = tuned(tmp_path / "log.csv", Times())
    new = made.rows("screen", "float")
    best = {"programs": 3, "rows": 4, "warps": 2}
    assert new[0] == Row({"d": [1536, 3072]}, best)
    assert new[1] == Row({"d": [3073, 5120]}, {**best, "programs": 2})
    assert list(new[2:]) == list(BASE.rows("screen", "float"))
    assert made.values("screen", "float", {"d": 2048}) == best
    assert made.values("screen", "float", {"d": 9216}) == BASE.values("screen", "float", {"d": 9216})
    assert made.rows("sums", "float")[0] == Row({"waves": [1, 1], "bytes": 4}, {"stripe": 32, "chunk": 32, "warps": 2})
    assert made.stages["advance"] == BASE.stages["advance"]


def test_a_tuning_that_is_stopped_goes_on(tmp_path):
    """However often: nothing is timed twice, and the file is that of an undisturbed run."""
    whole, parts = Times(), Times()
    want = text_of(tuned(tmp_path / "whole.csv", whole))
    for _ in range(100):
        timed = len(parts.asked)
        try:
            made = tuned(tmp_path / "parts.csv", parts, until=5)
            break
        except TimeoutError:
            assert timed < len(parts.asked) <= timed + 5
    assert text_of(made) == want and parts.asked == whole.asked and timed > 5


def test_what_ended_the_process_is_not_tried_again(tmp_path):
    class Crash(Exception):
        pass

    def dies(calls):
        raise Crash

    path = tmp_path / "log.csv"
    with pytest.raises(Crash):
        tuned(path, dies)
    (row,) = csv.DictReader(path.open(newline=""))
    assert row["us"] == "broken" and row["sources"].startswith("kernels/")
    times = Times()
    tuned(path, times)
    assert row["values"] not in {json.dumps(dict(sorted(json.loads(each)[1].items()))) for each in times.asked[:1]}


def test_times_of_other_sources_and_gpus_do_not_count(tmp_path):
    path = tmp_path / "log.csv"
    tuned(path, Times())
    assert Log(path, GPU).times and not Log(path, "NVIDIA L4").times
    path.write_text(path.read_text().replace("kernels/sample ", "kernels/sample 0"))
    assert not Log(path, GPU).times


ROWS = [Row({"d": [None, 4096]}, {"warps": 1}), Row({}, {"warps": 2})]


@pytest.mark.parametrize(
    ("best", "new"),
    [
        ({}, []),
        ({(("d", 1024),): 1, (("d", 8192),): 2}, []),
        ({(("d", 1024),): 4}, [({"d": [768, 1280]}, 4)]),
        ({(("d", 1000),): 4, (("d", 2000),): 4, (("d", 8000),): 2}, [({"d": [750, 5000]}, 4)]),
        ({(("d", 1000),): 4, (("d", 2000),): 1, (("d", 8000),): 4},
         [({"d": [750, 1500]}, 4), ({"d": [5001, 10000]}, 4)]),
        ({(("all", True), ("d", 8)): 4, (("all", False), ("d", 8)): 4},
         [({"d": [6, 10], "all": True}, 4), ({"d": [6, 10], "all": False}, 4)]),
        ({(("policy", "x"),): 4}, [({"policy": "x"}, 4)]),
    ],
)  # fmt: skip
def test_rows_of_what_was_measured(best, new):
    rows = ROWS if all("d" in dict(shape) for shape in best) else [Row({}, {"warps": 3})]
    made = tuned_rows(rows, {shape: {"warps": warps} for shape, warps in best.items()})
    assert made == [Row(conditions, {"warps": warps}) for conditions, warps in new] + list(rows)


def test_ranges_meet_halfway():
    assert ranges([1000, 2000, 4000]) == [[750, 1500], [1501, 3000], [3001, 5000]]
    assert ranges([1]) == [[1, 1]]


@pytest.mark.parametrize("name", sorted(committed_files()))
def test_committed_files_are_as_the_command_writes_them(name):
    assert (settings.FOLDER / name).read_text() == text_of(committed_files()[name])


def test_every_stage_has_choices_of_fields_that_its_settings_have():
    assert set(KINDS) == set(tune.STAGES), "enter a stage's choices in benchmarks/tune.py"
    for name, choices in tune.CHOICES.items():
        assert set(choices) <= {field.name for field in dataclasses.fields(KINDS[name.split()[0]])}, name
        assert all(len(set(values)) == len(values) > 1 for values in choices.values()), name


def test_the_calls_of_a_step_look_settings_up(device):
    """The calls that are timed are prepared as on a GPU, at a small width, and nothing runs."""
    found = list(problems([256], torch.device(device)))
    assert len(found) == 3
    assert {lookup.stage for group in found for lookup in group} == set(tune.STAGES)


@pytest.mark.parametrize(
    ("gpu", "word"), [("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA GeForce RTX 4090", "4090"), (GPU, "H200")]
)
def test_the_word_of_a_gpu(gpu, word):
    assert gpu_word(gpu) == word


def test_the_command_writes_a_file_for_a_new_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "problems", lambda widths, device: iter(FOUND))
    out = tmp_path / "made.json"
    args = SimpleNamespace(seconds=-1, widths=[256], stages=["screen"], out=out, log=tmp_path / "log.csv")
    given = ("NVIDIA A100-SXM4-80GB", 108, torch.device("cpu"), Times())
    assert tune.run(args, *given) == 1 and not out.exists()
    assert "the same command goes on" in capsys.readouterr().out
    args.seconds = 600
    assert tune.run(args, *given) == 0 and str(out) in capsys.readouterr().out
    made = SettingsFile.read(out)
    assert made.gpus == ("A100",) and made.multiprocessors == 108 and out.read_text() == text_of(made)
    assert made.values("screen", "float", {"d": 2048})["warps"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_without_a_gpu_the_command_ends_with_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        tune.main(["--seconds", "300"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("error: ") and said.err.endswith(" on a CUDA device, and torch found none\n")
