"""Evidence on a tiny model: scorers of answers, scores against a plain loop, a command that goes on, its page."""

import csv
import importlib.util
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from bundles import make_bundle
from conftest import make_text, save_tiny_opt
from task_files import write_task_files

from dejavu_train.cli.commands import main
from dejavu_train.evaluation.perplexity import EvalCorpus
from dejavu_train.extras.evidence import answers, generation, quality, speed
from dejavu_train.extras.evidence.cell import Ledger
from dejavu_train.extras.evidence.records import Records
from dejavu_train.extras.evidence.scoring import score
from dejavu_train.extras.evidence.variants import Variant
from dejavu_train.extras.evidence.verdict import verdict
from dejavu_train.extras.evidence.writer import Answer, cut
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model

GSM8K = [
    ("She has 3 + 4 = 7 apples.\n#### 7", "#### 7", True),
    ("#### 7 apples, of 12", "#### 7", True),
    ("#### 12 apples, of 7", "#### 7", False),
    ("So they pay $1,200.50 in all.", "It is.\n#### 1200.5", True),
    ("The rest is -3.", "#### -3", True),
    ("The rest is 3.", "#### -3", False),
    ("First 7, then 8.", "#### 7", False),
    ("It is seven.", "#### 7", False),
    ("", "#### 7", False),
]
MATH500 = [
    (r"Thus $x = \boxed{\dfrac12}$.", r"\frac{1}{2}", True),
    (r"\boxed{1} is wrong, so \boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
    (r"\boxed{\frac{1}{2}} is wrong, so \boxed{1}", r"\frac{1}{2}", False),
    (r"\boxed{\frac{1}{2}", r"\frac{1}{2}", False),
    ("The answer is 1,000.", "1000", True),
    ("The answer is 4.", "5", False),
    ("So we get $x = 3$.", "3", True),
    (r"\boxed{12\text{ cm}}", "12", True),
    (r"\boxed{90^\circ}", "90", True),
    (r"\boxed{(1, 2)}", "(1,2)", True),
    (r"\boxed{(2,1)}", "(1,2)", False),
    (r"\boxed{\sqrt2}", r"\sqrt{2}", True),
    (r"\boxed{.50}", "0.5", True),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", True),
    ("no idea", "5", False),
]


@pytest.mark.parametrize(("answer", "reference", "right"), GSM8K)
def test_gsm8k_takes_the_number_that_an_answer_ends_on(answer, reference, right):
    assert answers.gsm8k_right(answer, reference) is right


@pytest.mark.parametrize(("answer", "reference", "right"), MATH500)
def test_math500_takes_the_expression_that_an_answer_ends_on(answer, reference, right):
    assert answers.math_right(answer, reference) is right


def test_gsm8k_judges_as_the_filters_of_lm_eval():
    extraction = pytest.importorskip("lm_eval.filters.extraction", reason="the extra eval is not installed")
    strict = extraction.RegexFilter(r"#### (\-?[0-9\.\,]+)")
    free = extraction.RegexFilter(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1)
    for text in (
        "so it is.\n#### 1,250",
        "#### -4\n\nQuestion: 9",
        "They have 12 apples, and 30",
        "It costs $18",
        "none",
    ):
        theirs = strict.apply([[text]], [{}])[0][0]
        theirs = free.apply([[text]], [{}])[0][0] if theirs == "[invalid]" else theirs
        plain = theirs.replace(",", "").replace("$", "")
        assert answers.number_of(text) == (None if theirs == "[invalid]" else Fraction(plain)), text


def test_math500_judges_as_lm_eval_where_both_have_one_spelling():
    lm_eval = pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    path = Path(lm_eval.__file__).parent / "tasks" / "hendrycks_math" / "utils.py"
    found = importlib.util.spec_from_file_location("hendrycks_math_utils", path)
    theirs = importlib.util.module_from_spec(found)
    found.loader.exec_module(theirs)
    pairs = [
        (r"\dfrac{1}{2}", r"\frac12"), ("1/2", r"\frac{1}{2}"), ("0.5", r".5"), (r"\sqrt3", r"\sqrt{3}"),
        ("x=5", "5"), (r"10\%", "10"), (r"\left(1,2\right)", "(1,2)"), ("1", "2"), (r"\frac12", r"\frac13"),
        ("(1,2)", "(2,1)"), (r"90^\circ", "90"), (r"2\text{ cm}", "2"), ("-1", "1"),
    ]  # fmt: skip
    judged = [theirs.is_equiv(*pair) for pair in pairs]
    assert [answers.plain_form(a) == answers.plain_form(b) for a, b in pairs] == judged
    assert True in judged and False in judged


def test_a_row_of_answers_counts_what_was_judged():
    good, long = Answer("4", 10, 2.0, True), Answer("5", 30, 3.0, False)
    row = generation.row_of(
        "gsm8k", "sparse", [(good, True, 2), (long, False, 0), (Answer("", 0, 0.0, False), None, 0)]
    )
    assert (row.examples, row.unjudged, row.accuracy, row.cut, row.shots) == (2, 1, 0.5, 0.5, 1.0)
    assert (row.tokens_per_answer, row.tokens_per_second, row.right_per_second) == (20, 8, 0.2)
    assert row.error == pytest.approx(math.sqrt(0.125))
    with pytest.raises(UserError, match="no question fits the model"):
        generation.row_of("gsm8k", "sparse", [(good, None, 0)])


def test_an_answer_ends_at_the_first_stop_string_and_a_prompt_has_worked_examples():
    assert cut("7.\nProblem: 2\nQuestion: 3", ["Question:", "Problem:"]) == "7.\n"
    assert cut("7.", ["Question:"]) == "7."
    record, worked = {"question": "How many?", "answer": "#### 3"}, [{"question": "And?", "answer": "It is. #### 9"}]
    said = generation.plain_prompt("gsm8k", record, worked)
    assert said == "Question: And?\nAnswer: It is. #### 9\n\nQuestion: How many?\nAnswer:"
    assert "#### 3" not in said


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_records_come_from_the_folder_and_name_what_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_lines(tmp_path / "gsm8k.jsonl", [{"question": "How many?", "answer": "#### 1"}] * 3)
    write_lines(tmp_path / "math500.jsonl", [{"problem": "What?", "answer": "1"}, {"problem": "What?"}])
    records = Records(str(tmp_path), 2)
    assert len(records.get("gsm8k")) == 2 and records.examples("gsm8k", 4) == []
    with pytest.raises(UserError, match=r"math500\.jsonl, record 2 has no answer"):
        records.get("math500")
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set.*give --local a folder"):
        Records(None, 2).get("gsm8k")


def test_scores_are_those_of_a_plain_loop(tiny_opt):
    dense, other = (load_model(str(tiny_opt)) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.05)
    draw = torch.Generator().manual_seed(3)
    windows = torch.randint(4, dense.config.vocab_size, (4, 12), generator=draw).tolist()
    held = EvalCorpus(windows, [0, 0, 1, 2], [22, 11, 11], 0, True)
    found = score(Variant(dense), Variant(other), held, 24)
    kl, same, nats = [], 0, [0.0, 0.0]
    for window in windows:
        with torch.no_grad():
            a, b = (model(torch.tensor([window])).logits[0, :-1].log_softmax(-1) for model in (dense, other))
        kl += (a.exp() * (a - b)).sum(-1).tolist()
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        wanted = torch.tensor(window[1:])[:, None]
        nats = [total - float(logs.gather(1, wanted).sum()) for total, logs in zip(nats, (a, b), strict=True)]
    assert found.dense_perplexity == pytest.approx(math.exp(nats[0] / 44), rel=1e-4)
    assert found.perplexity == pytest.approx(math.exp(nats[1] / 44), rel=1e-4)
    assert found.increase == pytest.approx(math.exp((nats[1] - nats[0]) / 44) - 1, abs=1e-5)
    assert found.kl_mean == pytest.approx(sum(kl) / 44, rel=1e-3) and found.kl_mean > 0
    assert found.kl_p99 > found.kl_mean and found.top1 == same / 44
    alike = score(Variant(dense), Variant(dense), held, 24)
    assert (alike.increase, alike.kl_mean, alike.top1) == (0, 0, 1)


def test_a_verdict_says_what_the_rows_say():
    speeds = {"dense": 4.0, "exact skip": 3.0, "sparse": 2.0, "4 bits": 1.0}
    rows = {
        "active": [{"nonzero": 0.04}, {"nonzero": 0.06}],
        "speed": [{"variant": name, "rows": 1, "prompt": 32, "ms": ms} for name, ms in speeds.items()],
        "quality": [{"variant": "sparse", "text": "docs", "increase": 0.02, "top1": 0.9}],
        "generation": [{"set": "gsm8k", "variant": v, "accuracy": a} for v, a in (("dense", 0.5), ("sparse", 0.25))],
    }
    said = verdict(rows)
    rivals = "Beside it: exact skip 3 ms, 4 bits 1 ms."
    for words in (
        "5 % of the neurons",
        "2 times as fast as",
        rivals,
        "loses little: at most +2 %",
        "25 % instead of 50 %",
    ):
        assert words in said
    rows["speed"][2]["ms"], rows["quality"][0]["increase"] = 4.0, 0.5
    assert "no faster than" in verdict(rows) and "loses much" in verdict(rows)
    assert verdict({}) == "Nothing was measured yet."


def test_a_ledger_is_begun_anew_for_another_key_or_a_broken_file(tmp_path):
    path = tmp_path / "speed.json"
    Ledger(path, {"model": "a"}).add("cell", [{"ms": 1.0}], 2.0)
    assert Ledger(path, {"model": "a"}).cells["cell"]["rows"] == [{"ms": 1.0}]
    assert Ledger(path, {"model": "b"}).cells == {}
    path.write_text("{")
    assert Ledger(path, {"model": "a"}).cells == {}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """The flags of a small run, whose local data are there. The model's sizes fit 4 bits."""
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    folder = tmp_path_factory.mktemp("evidence")
    model = save_tiny_opt(folder / "model", hidden_size=64, word_embed_proj_dim=64, ffn_dim=128)
    make_bundle(model).save_pretrained(folder / "bundle")
    write_task_files(folder)
    write_lines(
        folder / "gsm8k.jsonl", [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(2)]
    )
    (folder / "own.txt").write_text(make_text(3000, seed=5), encoding="utf-8")
    flags = {
        "model": model, "bundle": folder / "bundle", "local": folder, "text": f"own={folder / 'own.txt'}",
        "tokens": 128, "window": 32, "rows": "1", "prompts": "8,100000", "new_tokens": 3, "tasks": "piqa,mmlu",
        "sets": "gsm8k,math500", "answer_tokens": 16, "set_shots": 0, "limit": 2, "device": "cpu",
    }  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_run_that_was_ended_goes_on_and_the_page_is_complete(asked, tmp_path, offline, monkeypatch, capsys):
    command = ["evidence", *asked, "--output", str(tmp_path)]
    done, measure, most = [], quality.measure, [2]

    def measure_some(subject, variant, *rest):
        if len(done) == most[0]:
            raise KeyboardInterrupt
        done.append(variant)
        return measure(subject, variant, *rest)

    monkeypatch.setattr(quality, "measure", measure_some)
    assert main(command) not in (0, None)
    timed = json.loads((tmp_path / "parts" / "speed.json").read_text())["cells"]
    most[0] = 100
    capsys.readouterr()
    assert main(command) == 0
    assert "of the neurons active" in capsys.readouterr().out
    names = list(dict.fromkeys(done))
    assert done == names, "no cell is measured twice"
    assert json.loads((tmp_path / "parts" / "speed.json").read_text())["cells"] == timed
    found, page = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "evidence.html").read_text()
    assert [name for name, rows in found["rows"].items() if not rows] == []
    assert [row["variant"] for row in found["rows"]["quality"]] == names
    assert {"dense", "exact skip", "sparse", "4 bits", "lossless"} <= {row["variant"] for row in found["rows"]["speed"]}
    told = {one["what"]: one["why"] for one in found["not_measured"]}
    assert "positions" in told["speed behind a prompt of 100,000"] and "hub" in told["tasks: mmlu"]
    assert "answers to math500" in told
    for title in ("Active neurons", "Speed", "Quality", "Tasks", "Long answers", "Not measured", "Released weights"):
        assert f">{title}<" in page
    with open(tmp_path / "quality.csv", newline="") as file:
        assert [row["variant"] for row in csv.DictReader(file)] == names


def test_a_plan_measures_nothing_and_a_budget_names_what_it_leaves_out(asked, tmp_path, offline, capsys, monkeypatch):
    command = ["evidence", *asked, "--output", str(tmp_path), "--parts", "speed"]
    monkeypatch.setattr(speed, "measure", lambda *_: pytest.fail("a cell was measured"))
    assert main([*command, "--plan"]) == 0
    said = capsys.readouterr().out
    assert "speed: " in said and "cells left" in said and "in all " in said and list(tmp_path.iterdir()) == []
    assert main([*command, "--budget", "1e-9"]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    left_out = [one for one in found["not_measured"] if "--budget" in one["why"]]
    assert found["rows"]["speed"] == [] and len(left_out) > 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--parts", "size"], "--parts must be some of active, speed"),
        (["--sets", "humaneval"], "--sets must be some of gsm8k, math500"),
        (["--local", "nowhere"], "there is no folder nowhere; give --local"),
        (["--four_bits", "nowhere"], "there is no folder nowhere; give --four_bits"),
        (["--budget", "0"], "--budget"),
        (["--rows", "0"], "--rows"),
    ],
)
def test_mistakes_are_one_line(flags, words, tiny_opt, capsys):
    assert main(["evidence", "--model", str(tiny_opt), *flags]) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.strip().splitlines()) == 1
