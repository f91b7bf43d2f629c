"""One model all the way: the clock of its stages, its questions, and how its rows become tables."""

import argparse
import csv
import json
import lzma
import time

import numpy as np
import pytest
import torch
from conftest import make_text

from benchmarks.lossless_rows import read_prompts
from benchmarks.one_model import FINISHED, Job, Run, look, measurements, receive
from benchmarks.one_model_plan import SCALES, forecast, pretraining_step
from benchmarks.one_model_rows import gather
from benchmarks.one_model_tasks import Choice, Question, answers_of, batches_of, likelihoods, read_questions, rows_of
from benchmarks.tables_one_model import ONE_MODEL, forecast_check_table, opening_table, result_table, time_table
from dejavu_train.models.opt import load_opt


@pytest.fixture
def options(tmp_path):
    return argparse.Namespace(
        scale="1.3b", device="cpu", gpus=4, work=str(tmp_path / "work"), out=str(tmp_path / "out"), minutes=23.0,
        pretrain_seconds=0.0, shards=1, only="", seconds=0.0, part=str(tmp_path / "part"),
    )  # fmt: skip


@pytest.fixture
def run(options):
    return Run(options)


def test_a_stage_that_is_late_halves_its_tokens(run, options, monkeypatch):
    assert run.share("text") == 1.0
    run.began = time.time() - run.mark("text") - 60
    assert run.share("text") == 0.5
    options.minutes = 0.0
    assert run.share("text") == 1.0
    assert Run(options).began == pytest.approx(time.time(), abs=60), "a run that goes on keeps its clock"


def test_pretraining_gives_up_what_the_later_stages_need(run, options, monkeypatch):
    asked = []
    monkeypatch.setattr(run, "step", lambda name, command, seconds: asked.append(command) or 0)
    run.pretrain()
    run.began = time.time() - 600
    run.pretrain()
    seconds = [next(float(flag[10:]) for flag in command if flag.startswith("--seconds=")) for command in asked]
    later = sum(forecast(SCALES["1.3b"]).values()) - run.mark("text")
    assert seconds[0] == 540 and seconds[1] < 60 * 23 - 600 - later
    assert asked[0][:5] == run.together() and "--nproc-per-node=4" in asked[0]
    monkeypatch.setattr(run, "step", lambda name, command, seconds: asked.append(command) or 1)
    run.pretrain()
    assert "--micro_rows=4" in asked[-1] and "--micro_rows=4" not in asked[-2], "a second try is a plainer one"
    run.began = time.time() - 1200
    with pytest.raises(SystemExit, match="choose a smaller --scale"):
        run.pretrain()


def test_the_forecast_fits_a_lease():
    assert 60 * 15 < sum(forecast(SCALES["1.3b"]).values()) < 60 * 23
    widths = [pretraining_step(SCALES[name]) for name in ("100m", "350m", "1.3b")]
    assert widths == sorted(widths) and sum(forecast(SCALES["350m"]).values()) < sum(forecast(SCALES["1.3b"]).values())


def test_measurements_wait_for_what_they_need_and_failures_leave_others_alone(run, options, monkeypatch):
    jobs = measurements(run, 0.5)
    assert jobs[0].name == "texts-0" and jobs[-1].name == "tasks-3", "tasks are what may be missing"
    assert len({job.name for job in jobs}) == len(jobs) == 16
    texts = next(job for job in jobs if job.name == "texts-0").command
    assert "--tokens=15000" in texts
    options.shards = 2
    assert sum(job.gpus == 2 for job in measurements(run, 1.0)) == 6
    there, taken = run.work / "there", []
    there.touch()
    jobs = [Job("a", [], (there,)), Job("b", [], (run.work / "missing",)), Job("two", [], (), gpus=2)]
    monkeypatch.setattr("benchmarks.one_model.measurements", lambda *_: jobs)
    monkeypatch.setattr("benchmarks.one_model_rows.gather", lambda *_: None)
    monkeypatch.setattr(run, "step", lambda name, *rest: taken.append((name, *rest[1])) or 1)
    options.only = "two,b"
    run.measure()
    assert [name for name, *_ in taken] == ["two"]
    options.only = ""
    taken.clear()
    run.measure()
    assert [name for name, *_ in taken] == ["a", "two"] and taken[1] == ("two", 0, 1)
    assert not (run.rows / "a.done").exists()
    assert "b: left out" in (run.rows / "said.txt").read_text()


def test_a_process_leaves_its_time_and_its_last_line(run):
    assert run.step("fails", ["python3", "-c", "print('the reason'); raise SystemExit(3)"], [0]) == 3
    assert run.step("hangs", ["sleep", "60"], seconds=0.2) == 124
    assert run.failed("fails") and not run.failed("works")
    assert "the reason" in (run.rows / "said.txt").read_text()
    (run.work / "run.log").write_text("says something\n")
    (run.work / FINISHED).touch()
    look(run.options)
    assert (run.work.parent / "out" / "times.csv").read_text().startswith("1.3b,fails,3,")


def test_parts_arrive_beside_each_other(options, tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "stream1.tokens.xz").write_bytes(b"ids")
    receive(options)
    assert (tmp_path / "work" / "data" / "stream1.tokens.xz").read_bytes() == b"ids"


def test_prompts_come_from_files_that_are_held_out_whole(tiny_opt, tmp_path):
    for name in ("books", "code"):
        lines = [json.dumps({"id": i, "text": make_text(60, seed=i)}) for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("books", "code")]
    found = list(read_prompts(str(tiny_opt), 16, 5, files))
    assert [name for name, _ in found] == ["books", "code", "books", "code", "books"]
    assert all(len(ids) == 16 and ids[0] == 2 for _, ids in found) and found[0] != found[2]


def test_likelihoods_are_those_of_each_answer_alone(tiny_opt, tmp_path):
    model, generator = load_opt(str(tiny_opt)), np.random.default_rng(0)
    pairs = [(generator.integers(4, 300, n).tolist(), generator.integers(4, 300, m).tolist())
             for n, m in [(7, 1), (3, 4), (12, 2), (3, 3)]]  # fmt: skip
    choices = [Choice((context + answer)[:-1], answer) for context, answer in pairs]
    assert sorted(n for numbers in batches_of(choices, 20) for n in numbers) == [0, 1, 2, 3]
    nats, greedy = likelihoods(model, choices, 20)
    for (context, answer), found, best in zip(pairs, nats, greedy, strict=True):
        with torch.no_grad():
            logs = model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1].log_softmax(-1)
        expected = logs.gather(1, torch.tensor(answer)[:, None]).sum()
        assert found == pytest.approx(float(expected), abs=1e-3)
        assert best == bool((logs.argmax(-1) == torch.tensor(answer)).all())
    path = tmp_path / "tasks.jsonl.xz"
    rows = [{"task": "one", "gold": 1, "choices": pairs[:2]}, {"task": "two", "gold": None, "choices": pairs[2:3]}]
    with lzma.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, [*rows, rows[0]])))
    questions = read_questions(path, ["one", "two"], 1, positions=5)
    assert [len(question.choices) for question in questions] == [2, 1]
    assert questions[1].choices[0] == Choice((pairs[2][0] + pairs[2][1])[:-1][-5:], pairs[2][1])


def test_answers_and_what_changed():
    choice = Choice([4], [5])
    questions = [Question("a", 1, (choice, choice)), Question("a", 0, (choice, choice)), Question("l", None, (choice,))]
    answers = answers_of(questions, [-2.0, -1.0, -3.0, -1.0, -9.0], [False, False, False, True, True])
    assert answers == [1, 1, 0]
    first, last = rows_of(questions, answers, [1, 0, -1])
    assert first == {"task": "a", "examples": 2, "accuracy": 0.5, "changed": 0.5}
    assert last["accuracy"] == 1.0 and last["changed"] == 1.0


def _write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_rows_of_all_processes_become_one_table(tmp_path):
    rows, model = tmp_path / "rows", tmp_path / "model"
    (rows / "speed-int4-0.1-1").mkdir(parents=True)
    model.mkdir()
    held = {"general.jsonl": {"bits_per_byte": 1.25, "density": [0.1, 0.3]}}
    told = {"device": "H100", "torch": "2.11", "steps": 7, "seconds": 540.0, "tokens": 70_000_000, "processes": 4}
    (model / "pretraining.json").write_text(json.dumps(told | {"stream_tokens": 35_000_000, "heldout": held}))
    same = {"text": "docs", "tokens": 9, "error": 0.1, "block_bytes": 0.2, "versions": "torch 2.11"}
    drafted = {"weights": "gptq", "asked_mlp_density": 0.2, "asked_head_density": 1.0}
    dense = {"weights": "fp16", "asked_mlp_density": 1.0, "asked_head_density": 1.0}
    _write(rows / "texts-0.csv", [same | dense | {"perplexity": 10.0, "increase": 0.0},
                                  same | drafted | {"perplexity": 12.0, "increase": np.log(1.2)}])  # fmt: skip
    task = {"task": "copa", "examples": 4, "accuracy": 0.75, "changed": 0.25, "device": "H100", "torch": "2.11"}
    _write(rows / "tasks-0.csv", [task | {"weights": "4 bits", "mlp_density": 0.2, "head_density": 1.0}])
    timing = {"backend": "triton", "asked_mlp_density": 0.204, "asked_head_density": 1.0, "prompt": 128,
              "ms_per_token": {"p50": 0.4321}, "new_tokens": 64, "device": "H100"}  # fmt: skip
    results = {"timing": [timing], "versions": {"torch": "2.11"}}
    (rows / "speed-int4-0.1-1" / "results.json").write_text(json.dumps(results))
    lossless = {"what": "speed", "text": "all", "weights": "int4", "way": "sparse", "decoding": "greedy", "tokens": 5,
                "ratio": 1.25, "acceptance": 0.9, "gpu": "H100", "torch": "2.11"}  # fmt: skip
    rivals = [{"way": "prompt lookup", "ratio": 2.0}, {"way": "sparse, and copies", "ratio": 1.2}]
    _write(rows / "lossless-int4.csv", [lossless, *(lossless | rival for rival in rivals)])
    spans = [
        "pretrain,0,1,600",
        "predictors,0,601,300",
        "texts-0,0,901,100",
        "speed-a,0,950,150",
        "speed-a-shards2,0,1100,500",
    ]
    (rows / "times.csv").write_text("".join(f"1.3b,{span}\n" for span in spans))
    gather("1.3b", model, rows)
    (tmp_path / ONE_MODEL).parent.mkdir(parents=True)
    (rows / "rows.csv").rename(tmp_path / ONE_MODEL)
    line = next(line for line in result_table(tmp_path).splitlines() if line.startswith("| 4 bits"))
    assert line == "| 4 bits | 20 %, 100 % | 12 | +20.0 | 75.0 | 25.0 | 0.432 | | 1.25, 90 % (sparse) |"
    opening = [
        "| on one H100 | neurons read | perplexity of eight texts | ms per token |",
        "| 4 bits | 20 % | 12 | 0.432 |",
    ]
    assert opening_table(tmp_path).splitlines()[::2] == opening
    checked = [line.rsplit("|", 2)[1].strip() for line in forecast_check_table(tmp_path).strip().splitlines()]
    assert checked[2:] == ["60", "300", "199", "130"], "what several GPUs take is left out"
    told = time_table(tmp_path)
    assert "70 million tokens in 540 s (35 million" in told and "| pretrain | 1 | 600 |" in told
    assert "general 1.25" in told and "20.0 % of the neurons" in told
