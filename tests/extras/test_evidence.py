"""Evidence on a tiny model: scorers of answers, scores against a plain loop, a command that goes on, its page."""

import csv
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from bundles import make_bundle
from conftest import make_text, save_tiny_opt
from task_files import write_task_files

from dejavu_train.bundle.cost_model import spec_bytes
from dejavu_train.cli.commands import main
from dejavu_train.evaluation.perplexity import EvalCorpus
from dejavu_train.extras.evidence import page as pages
from dejavu_train.extras.evidence import quality, speed, variants
from dejavu_train.extras.evidence.cell import Ledger
from dejavu_train.extras.evidence.picture import draw
from dejavu_train.extras.evidence.variants import Variant
from dejavu_train.extras.evidence.verdict import verdict
from dejavu_train.families import Target, blocks_of
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hooks import at_module, hooked
from dejavu_train.models.load import load_model, load_tokenizer
from dejavu_train.models.weight_format import FLOAT32


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def asked_of(name, records, texts, folder, shots=0, room=10**6):
    """Samples of a set whose records lie in ``folder``, answered by ``texts``. lm-eval scores them."""
    sets = pytest.importorskip("dejavu_train.extras.tasks.sets", reason="the extra eval is not installed")
    from dejavu_train.extras.tasks.tasks import ask

    write_lines(folder / f"{name}.jsonl", records)
    pytest.importorskip("math_verify", reason="the extra evidence is not installed")
    task = sets.load_set(name, str(folder))
    written = SimpleNamespace(tok_encode=str.split, max_length=room, tokenizer=None, apply_chat_template=None)
    written.generate_until = lambda requests: texts[: len(requests)]
    questions = sets.build_set(name, task, None, shots, written, 16)
    return [float(each[sets.SETS[name].metric]) for each in ask(written, questions).samples[name]], questions


ADD = {"prompt": "def add(a, b):\n", "test": "def check(f):\n    assert f(1, 2) == 3\n", "entry_point": "add"}
TWICE = {"instruction_id_list": ["keywords:frequency", "punctuation:no_comma"]} | {
    "kwargs": [{"keyword": "bee", "frequency": 2, "relation": "at least"}, {}]
}
JUDGED = {
    "gsm8k": (
        {"question": "3 + 4?", "answer": "It is.\n#### 1,007"},
        ["So 3 + 4 = 1007.", "#### 1,007", "They pay $1,007."],
        ["7", "First 1007, then 8.", "none", ""],
    ),
    "math500": (
        {"problem": "Half?", "solution": "So $\\boxed{\\frac{1}{2}}$.", "answer": "\\frac{1}{2}"},
        ["Thus $x = \\boxed{\\dfrac12}$.", "\\boxed{0.5}", "The final answer is $1/2$. I hope it is correct."],
        ["\\boxed{2}", "no idea", ""],
    ),
    "ifeval": ({"key": 1, "prompt": "Bees."} | TWICE, ["A bee and a bee"], ["A bee, a bee", "A bee", ""]),
    "humaneval": (ADD, ["    return a + b"], ["    return a - b", "    raise SystemExit(0)", "    return (", ""]),
}


@pytest.mark.parametrize("name", JUDGED)
def test_each_set_tells_right_answers_from_wrong_ones(name, tmp_path):
    record, right, wrong = JUDGED[name]
    judged, _ = asked_of(name, [record] * len(right + wrong), right + wrong, tmp_path)
    assert judged == [1.0] * len(right) + [0.0] * len(wrong)


def test_worked_examples_are_those_of_the_folder_and_as_many_as_fit(tmp_path):
    sets = pytest.importorskip("dejavu_train.extras.tasks.sets", reason="the extra eval is not installed")
    record = JUDGED["gsm8k"][0]
    write_lines(tmp_path / "gsm8k_train.jsonl", [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(9)])
    _, asked = asked_of("gsm8k", [record], ["7"], tmp_path, 3)
    text = asked.tasks["gsm8k"].instances[0].args[0]
    assert asked.shots == 3 and text.count("Question:") == 4 and "1,007" not in text
    assert asked_of("gsm8k", [record], ["7"], tmp_path, 5, room=31)[1].shots == 2
    assert asked_of("gsm8k", [record], ["7"], tmp_path, 5, room=16)[1].fitting == 0
    (tmp_path / "gsm8k_train.jsonl").unlink()
    assert asked_of("gsm8k", [record], ["7"], tmp_path, 3)[1].shots == 0
    write_lines(tmp_path / "gsm8k.jsonl", [record, {"question": "3 + 4?"}])
    with pytest.raises(UserError, match=r"gsm8k\.jsonl, line 2: there is no 'answer'"):
        sets.load_set("gsm8k", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no file .*math500\.jsonl|needs a package"):
        sets.load_set("math500", str(tmp_path))


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import os; os._exit(0)", "open('x', 'w').write('x' * 2**21)", "x = bytearray(2**32)"],
)
def test_a_program_that_passes_a_limit_has_not_passed(program):
    programs = pytest.importorskip("dejavu_train.extras.tasks.programs")
    assert programs.passes("open('x', 'w').write('y')") and not programs.passes(program, seconds=2)


def test_a_haystack_hides_one_number_and_is_no_longer_than_asked(tiny_opt):
    sets = pytest.importorskip("dejavu_train.extras.tasks.sets", reason="the extra eval is not installed")
    tokenizer = load_tokenizer(str(tiny_opt))
    records = sets.haystacks(tokenizer, 900, 6, seed=1)
    for number, record in enumerate(records):
        name, (value,) = record["gen_prefix"].split()[5], record["outputs"]
        assert record["input"].count(f"for {name} is: {value}.") == 1
        hidden = record["input"].count("One of the special")
        assert hidden > 2 if number % 2 else hidden == 1
        assert 600 < len(tokenizer(f"{record['input']} {record['gen_prefix']}")["input_ids"]) <= 900 - sets.ANSWER
        assert [sets.judge_found(record, [text])["found"] for text in (f"It is {value}.", "It is 12.")] == [1, 0]
    assert records == sets.haystacks(tokenizer, 900, 6, seed=1) != sets.haystacks(tokenizer, 900, 6, seed=2)


def test_scores_are_those_of_a_plain_loop(tiny_opt):
    dense, other = (load_model(str(tiny_opt)) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.05)
    draw = torch.Generator().manual_seed(3)
    windows = torch.randint(4, dense.config.vocab_size, (4, 12), generator=draw).tolist()
    held = EvalCorpus(windows, [0, 0, 1, 2], [22, 11, 11], 0, True)
    found = quality.score(Variant(dense), Variant(other), held, 24)
    kl, same, nats = [], 0, [0.0, 0.0]
    for window in windows:
        with torch.no_grad():
            a, b = (model(torch.tensor([window])).logits[0, :-1].log_softmax(-1) for model in (dense, other))
        kl += (a.exp() * (a - b)).sum(-1).tolist()
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        wanted = torch.tensor(window[1:])[:, None]
        nats = [total - float(logs.gather(1, wanted).sum()) for total, logs in zip(nats, (a, b), strict=True)]
    assert found["perplexity"] == pytest.approx(math.exp(nats[1] / 44), rel=1e-4)
    assert found["increase"] == pytest.approx(math.exp((nats[1] - nats[0]) / 44) - 1, abs=1e-5)
    assert found["kl_mean"] == pytest.approx(sum(kl) / 44, rel=1e-3) and found["kl_mean"] > 0
    assert found["kl_p99"] > found["kl_mean"] and found["top1"] == same / 44
    alike = quality.score(Variant(dense), Variant(dense), held, 24)
    assert (alike["increase"], alike["kl_mean"], alike["top1"]) == (0, 0, 1)


def test_static_rows_and_thresholds_read_as_much_as_the_sparse_model(tiny_opt, bundle):
    model, ids, bundle = load_model(str(tiny_opt)), torch.arange(4, 20)[None], bundle.at(0.2, 0.7)
    weights, budget = FLOAT32, variants.step_bytes(model, bundle.shape, ids, bundle)
    masks = variants.static_masks(bundle, weights, model.device)
    unit = weights.unit_bytes(bundle.shape)
    for key, mask in masks.items():
        often, kept = bundle.frequency(*key), mask[0, 0]
        assert 0 < int(kept.sum()) < kept.numel() and often[kept].min() >= often[~kept].max(), key
        of_each = unit.up + often * unit.down if key.target == Target.MLP else torch.full_like(often, unit.head)
        allowed = spec_bytes(bundle.specs[key], bundle.shape, weights)
        assert float(of_each[kept].sum()) <= allowed < float(of_each[kept].sum() + of_each.max())
    whole = variants.step_bytes(model, bundle.shape, ids, live=1.0)
    assert whole > variants.step_bytes(model, bundle.shape, ids) > 0 and whole > budget
    seen = []
    for share in (0.2, 0.6, 10.0):
        hooks, left = variants.thresholds(model, ids, share * whole)
        found: list[torch.Tensor] = []
        with hooks(), hooked([at_module(blocks_of(model)[0].up, "input", found.append)]):
            seen.append(model(ids).logits)
        kept = float((found[0] != 0).float().mean())
        assert kept == 1.0 if share > 1 else share / 2 < kept < 1 and 0 <= left < 0.01 * whole
    assert torch.equal(seen[2], model(ids).logits) and not torch.allclose(seen[0], seen[1])
    with pytest.raises(UserError, match="thresholds"):
        variants.thresholds(model, ids, -1.0)


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
    make_bundle(model).at(0.2, 1.0).save_pretrained(folder / "bundle")
    write_task_files(folder)
    write_lines(
        folder / "gsm8k.jsonl", [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(2)]
    )
    (folder / "own.txt").write_text(make_text(3000, seed=5), encoding="utf-8")
    flags = {
        "model": model, "bundle": folder / "bundle", "local": folder, "text": f"own={folder / 'own.txt'}",
        "tokens": 128, "window": 32, "rows": "1", "prompts": "8,100000", "new_tokens": 3, "tasks": "piqa,mmlu",
        "sets": "gsm8k,math500,humaneval,retrieval", "contexts": "128,4096",
        "answer_tokens": 16, "set_shots": 0, "limit": 2, "device": "cpu", "smaller": model,
    }  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def offline(monkeypatch, quick_bandwidth):
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
    # A picture takes a third of a second, and a part is drawn after each further part.
    monkeypatch.setattr(pages, "draw", lambda *a: a[2].with_suffix(".png").exists() or draw(*a))
    assert main(command) not in (0, None)
    timed = json.loads((tmp_path / "parts" / "speed.json").read_text())["cells"]
    most[0] = 100
    assert main(command) == 0
    assert "of the neurons active" in capsys.readouterr().out
    names = list(dict.fromkeys(done))
    assert done == names, "no cell is measured twice"
    assert json.loads((tmp_path / "parts" / "speed.json").read_text())["cells"] == timed
    found, page = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "evidence.html").read_text()
    assert [name for name, rows in found["rows"].items() if not rows] == []
    rows = {row["variant"]: row for row in found["rows"]["quality"]}
    assert [*rows] == names and names[-3:] == ["static", "thresholds", "smaller model"]
    assert rows["exact skip"]["kl_mean"] == 0 == rows["smaller model"]["kl_mean"] < rows["static"]["kl_mean"]
    assert rows["static"]["megabytes"] == rows["sparse"]["megabytes"] >= rows["thresholds"]["megabytes"]
    assert rows["4 bits"]["megabytes"] < rows["exact skip"]["megabytes"] < rows["dense"]["megabytes"]
    assert {"dense", "exact skip", "sparse", "4 bits", "lossless"} <= {row["variant"] for row in found["rows"]["speed"]}
    told = {one["what"]: one["why"] for one in found["not_measured"]}
    assert "positions" in told["speed behind a prompt of 100,000"] and "hub" in told["tasks: mmlu"]
    assert "answers to math500" in told and "--run_code" in told["answers to humaneval"]
    assert "positions" in told["answers to retrieval 4096"]
    titles = ("Active neurons", "Speed", "Quality", "Tasks", "Long answers", "Not measured", "Released weights")
    assert all(f">{title}<" in page for title in titles)
    with open(tmp_path / "quality.csv", newline="") as file:
        assert [row["variant"] for row in csv.DictReader(file)] == names


def test_a_plan_measures_nothing_and_a_budget_names_what_it_leaves_out(asked, tmp_path, offline, capsys, monkeypatch):
    command = ["evidence", *asked, "--output", str(tmp_path), "--parts", "speed,tasks"]
    monkeypatch.setattr(speed, "measure", lambda *_: pytest.fail("a cell was measured"))
    assert main([*command, "--plan"]) == 0
    said = capsys.readouterr().out
    assert all(words in said for words in ("speed: ", "4 bits: made by gptq first", "cells left", "in all "))
    assert "tasks: 1 cells left" in said and "left out, tasks: mmlu: " in said and "HF_HUB_OFFLINE is set" in said
    assert list(tmp_path.iterdir()) == []
    assert main([*command, "--parts", "speed", "--budget", "1e-9"]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    left_out = [one for one in found["not_measured"] if "--budget" in one["why"]]
    assert found["rows"]["speed"] == [] and len(left_out) > 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--parts", "size"], "--parts must be some of active, speed"),
        (["--sets", "mbpp"], "--sets must be some of gsm8k, math500"),
        (["--contexts", "64"], "--contexts"),
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


def test_a_model_whose_tensors_do_not_fit_is_refused_before_anything_is_written(
    asked, tiny_opt, tmp_path, offline, capsys
):
    model = shutil.copytree(tiny_opt, tmp_path / "model")
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"ffn_dim": values["ffn_dim"] + 8}))
    text = asked[asked.index("--text") : asked.index("--rows")]
    flags = ["--output", str(tmp_path / "out"), "--parts", "speed", "--device", "cpu", *text]
    assert main(["evidence", "--model", str(model), *flags]) == 2
    assert "fc1" in capsys.readouterr().err and not (tmp_path / "out").exists()
