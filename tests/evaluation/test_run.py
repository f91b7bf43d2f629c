"""infer.py from its command line: results.json, table, picture. Every mistake is one line and exit code 2."""

import json
import subprocess
import sys

import pytest
import torch
from bundles import make_bundle
from conftest import REPOSITORY, make_text, save_tiny_opt

from dejavu_train.data.text import cut_plain_text
from dejavu_train.evaluation.check import planned_step
from dejavu_train.evaluation.command import main
from dejavu_train.evaluation.config import InferConfig
from dejavu_train.evaluation.timing import ON_CPU
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.ground.files import sha256_text

ROW_KEYS = {
    "text", "selection", "as_calibrated", "asked_mlp_density", "asked_head_density", "mlp_candidates", "mlp_selected",
    "head_selected", "sparse_from", "perplexity", "increase", "increase_error", "bits_per_byte", "mlp_recall",
    "mlp_retained_mass", "head_recall", "head_retained_mass", "mlp_bytes", "tokens",
}  # fmt: skip
TEXT_KEYS = {
    "name", "source", "sha256", "set", "whole", "domain", "documents", "tokens", "bytes", "window",
    "pretrained_paragraphs",
}  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    return make_bundle(tiny_opt).at(0.1, 0.85)


@pytest.fixture(scope="module")
def short_text(tmp_path_factory):
    path = tmp_path_factory.mktemp("short") / "short.txt"
    path.write_text(make_text(2000, seed=3), encoding="utf-8")
    return path


@pytest.fixture
def arguments(tiny_opt, bundle_folder, short_text, tmp_path, quick_bandwidth):
    return {
        "config": str(REPOSITORY / "configs/infer/opt-mini.yaml"),
        "model": str(tiny_opt),
        "bundle": str(bundle_folder),
        "output": str(tmp_path / "out"),
        "text": str(short_text),
        "window": "64",
        "tokens": "400",
        "new_tokens": "4",
        "device": "cpu",
        "prompt": "8",
        "sparse_from": "0,16",
    }


def flags(values):
    """A list is a flag that is repeated."""
    each = [(name, part) for name, value in values.items() for part in (value if isinstance(value, list) else [value])]
    return [part for name, value in each for part in (f"--{name}", str(value))]


def run(arguments, **changes):
    return exit_on_user_error(main, flags({k: v for k, v in (arguments | changes).items() if v is not None}))


def test_everything_from_the_command_line(arguments, capsys, tmp_path):
    assert run(arguments, generate="the model reads") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("the model reads")
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert found["schema"] == 3
    measured = {"schema", "model", "bundle", "versions", "texts", "quality", "layers", "timing", "read_gb_s"}
    assert measured | {"run", "config", "hashes", "not_measured"} == set(found)
    assert found["config"]["tokens"] == int(arguments["tokens"]) and len(found["hashes"]["model"]) == 64
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "there is no tasks/results.json" in page and found["hashes"]["bundle"] in page
    (text,) = found["texts"]
    assert text.keys() == TEXT_KEYS
    assert text["tokens"] >= 400 and text["name"] == "short" and text["domain"] == "unseen" and not text["whole"]
    rows = found["quality"]
    assert all(row.keys() == ROW_KEYS for row in rows)
    dense = rows[0]
    assert dense["selection"] == "dense" and dense["increase"] == 0 and dense["mlp_selected"] == 1
    for row in rows[1:]:
        assert row["increase"] == pytest.approx(row["perplexity"] / dense["perplexity"] - 1, abs=2e-5)
        assert row["increase_error"] is None or row["increase_error"] >= 0
        assert row["tokens"] == text["tokens"]
        assert (row["head_recall"] is None) == (row["asked_head_density"] == 1)
        assert (row["mlp_bytes"] is None) == (row["selection"] not in ("dense", "predicted"))
    for name in ("predicted", "oracle", "random", "static", "noncontextual"):
        assert sum(row["selection"] == name and row["head_selected"] == 1 for row in rows) >= 2
    assert {row["sparse_from"] for row in rows} == {0, 16}
    own = [row for row in rows if row["as_calibrated"]]
    assert rows[1] == own[0] and own[0]["selection"] == "predicted"
    assert {(row["asked_mlp_density"], row["asked_head_density"]) for row in own} == {(0.1, 0.85)}
    kinds = ["predicted", "oracle", "random", "static", "noncontextual"]
    assert [(row["selection"], row["sparse_from"]) for row in own] == [*((k, 0) for k in kinds), ("predicted", 16)]
    assert [(row["layer"], row["target"]) for row in found["layers"]] == [
        (i, t) for t in ("mlp", "heads") for i in (0, 1)
    ]
    assert found["layers"][0].keys() == {"text", "layer", "target", "selected", "recall", "precision", "retained_mass"}
    assert [row["backend"] for row in found["timing"]] == ["dense", *ON_CPU]  # those of this device
    theirs, *ours = [row["megabytes_per_token"] for row in found["timing"]]
    assert theirs is None and ours[0] > ours[1] > ours[2] > 0 and found["read_gb_s"] > 0.1
    for row in found["timing"]:
        assert row.keys() == {
            "backend", "device", "batch", "prompt", "new_tokens", "first_token_ms", "ms_per_token",
            "megabytes_per_token", "asked_mlp_density", "asked_head_density", "second_stage",
        }  # fmt: skip
        own_densities = (0.1, 0.85) if row["backend"] == "cpu" else (1.0, 1.0)
        assert (row["asked_mlp_density"], row["asked_head_density"]) == pytest.approx(own_densities)
        assert row["first_token_ms"] > 0
        assert 0 < row["ms_per_token"]["p20"] <= row["ms_per_token"]["p50"] <= row["ms_per_token"]["p80"]
    for row in rows:
        assert f"{row['perplexity']:.5g}" in printed
    assert "ms/token" in printed and "mlp 1" in printed
    assert (tmp_path / "out/curve.png").read_bytes()[:4] == b"\x89PNG"
    assert not list((tmp_path / "out").glob(".tmp-*"))

    # The same command again is another run: the rows of the first are kept under its id.
    assert run(arguments, tokens=0, timing="false") == 0
    again = json.loads((tmp_path / "out/results.json").read_text())
    assert again["quality"] == [] and again["run"]["id"] != found["run"]["id"]
    assert json.loads((tmp_path / f"out/results-{found['run']['id']}.json").read_text()) == found


def test_without_scores_and_times_no_text_is_read(arguments, monkeypatch, capsys):
    def read(*_):
        raise AssertionError("a text is read")

    monkeypatch.setattr("dejavu_train.evaluation.run.load_text", read)
    assert run(arguments, tokens=0, timing="false", generate="the model", new_tokens=3, backend="gather") == 0
    assert "the model" in capsys.readouterr().out


def test_one_density_writes_the_text(arguments, caplog):
    caplog.set_level("INFO")
    alone = {"tokens": 0, "timing": "false", "generate": "the model", "backend": "gather", "head_density": "[]"}
    assert run(arguments, mlp_density="0.5", **alone) == 0
    assert "gather, at 50 % of the neurons and all heads, generated" in caplog.text


def test_a_process_of_its_own_and_no_matplotlib(arguments, tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    values = arguments | {"mlp_density": "0.3", "curve_mlp_density": "", "selections": "predicted", "timing": "false"}
    command = [sys.executable, "infer.py", *flags(values)]
    environment = {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 3 and "matplotlib is not installed" in done.stderr
    assert (tmp_path / "out/results.json").is_file() and not (tmp_path / "out/curve.png").exists()


def error_line(capsys) -> str:
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("error: "), captured.err
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "./nowhere"}, "no model folder ./nowhere"),
        ({"bundle": "./nowhere"}, "no bundle folder ./nowhere"),
        ({"text": "./nowhere.txt"}, "no text file ./nowhere.txt"),
        ({"densities": "0.1"}, "unknown option --densities, which is no longer there; its name is --mlp_density"),
        ({"curve_selections": "oracle"}, "--curve_selections, which is no longer there; give --selections"),
        ({"mlp_density": "0.1,2"}, "--mlp_density"),
        ({"selections": "predicted,magic"}, "magic"),
        ({"tokens": "-3"}, "--tokens"),
        ({"window": "2000"}, "positions"),
        ({"window": "1"}, "--window"),
        ({"prompt": "500"}, "--prompt"),
        ({"device": "warp"}, "device"),
        ({"dtype": "int3"}, "dtype"),
        ({"backend": "magic"}, "--backend"),
        ({"timing_backends": "magic"}, "--timing_backends"),
        ({"text_set": "dev"}, "text_set is no option any more, it is always test, got dev; leave it out"),
        ({"text": "=a.txt"}, "NAME=SOURCE"),
        ({"text": "name="}, "NAME=SOURCE"),
        ({"text": ["a/one.txt", "b/one.jsonl"]}, "two texts are named one"),
        ({"yardstick_texts": "some"}, "--yardstick_texts"),
        ({"verify": "full"}, "sampled hash"),
        ({"verify": "some"}, "--verify"),
        ({"new_tokens": "0"}, "--new_tokens"),
        ({"generate": "the " * 600}, "--generate"),
        ({"guard.every": "4"}, "give a prompt with --generate"),
        ({"observe.tokens": "3"}, "--observe.tokens, which is no longer there; type python -m papers.deja_vu.observe"),
        ({"paper": "{}"}, "--paper, which is no longer there; type python -m papers.deja_vu.tables"),
        ({"guard.every": "1", "generate": "the"}, "guard.every must be at least 2"),
        ({"guard.every": "4", "generate": "the", "backend": "mask"}, "auto, gather or triton, got mask"),
        ({"lossless": "true"}, "give a prompt with --generate"),
        (
            {"lossless": "true", "generate": "the", "backend": "gather"},
            "--lossless is for --backend auto, cpu or triton",
        ),
        ({"lossless": "true", "generate": "the", "guard.every": "4"}, "leave --guard.every out"),
        ({"lossless": "true", "generate": "the", "draft_length": "8"}, "draft_length must lie in 0 to 7"),
        ({"generate": "the", "draft_length": "3"}, "pass lossless=True"),
    ],
)
def test_mistakes_are_one_line(arguments, changes, message, capsys, tmp_path):
    assert run(arguments, **changes) == 2
    assert message in error_line(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"generate": "Once", "backend": "triton"}, "--backend triton"),
        ({"timing": "true", "timing_backends": "[dense-engine]"}, "--timing_backends dense-engine"),
    ],
)
def test_an_engine_for_gpus_is_refused_on_a_cpu_before_any_work(
    arguments, changes, flag, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr("dejavu_train.kernels.common.checks.INTERPRET", False)
    assert run(arguments, device="cpu", **changes) == 2
    assert f"{flag} needs a GPU, and this would run on cpu" in error_line(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "asked", [{"timing": "true", "timing_backends": "[dense-cpu]"}, {"generate": "the", "backend": "cpu"}]
)
def test_an_engine_without_numba_is_refused_before_any_work(arguments, asked, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert run(arguments, **asked) == 2
    assert "the CPU engine cannot be loaded" in error_line(capsys)
    assert not (tmp_path / "out").exists()


def test_without_numba_what_else_there_is_is_measured(arguments, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert run(arguments, tokens=0, generate="the", new_tokens=3) == 0
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert [(row["backend"], row["asked_mlp_density"]) for row in found["timing"]] == [("dense", 1.0), ("gather", 0.1)]
    assert ["the CPU engine cannot be loaded" in one["why"] for one in found["not_measured"]] == [True] * 3


def test_a_guard_reports_the_retained_mass_of_generation(arguments, capsys, tmp_path):
    path = tmp_path / "guard.yaml"
    path.write_text("guard: {every: 4, memory: 8}\n")
    asked = {"config": path, "tokens": "0", "timing": "false", "generate": "the", "new_tokens": "13"}
    asked["backend"] = "gather"
    assert run(arguments | {"prompt": None, "sparse_from": None}, **asked) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())["guard"]
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("guard: "))
    assert found["guard"] == {"every": 4, "control": True, "retained_mass": None, "memory": 8}
    assert found["tokens"] == 3 and line.startswith("guard: 3 tokens measured, thresholds moved; retained mass: mlp 0.")
    assert f"mlp {found['mlp']['retained_mass']:.4f}, heads {found['heads']['retained_mass']:.4f}" in line


def test_lossless_text_comes_with_what_was_accepted(arguments, capsys, tmp_path, no_pictures):
    texts = []
    for options in (
        {"lossless": "true"},
        {"lossless": "true", "draft_length": "3"},
        {"lossless": "true", "draft_length": "0"},
        {"backend": "dense-cpu"},
    ):
        asked = {"tokens": "0", "timing": "false", "generate": "the", "new_tokens": "13", "dtype": "float32"}
        assert run(arguments | {"prompt": None, "sparse_from": None}, **asked, **options) == 0
        lines = capsys.readouterr().out.splitlines()
        found = json.loads((tmp_path / "out" / "results.json").read_text())
        if "lossless" in options:
            assert found["lossless"]["tokens"] == 12, "the first follows from the prompt"
            line = next(line for line in lines if line.startswith("lossless: "))
            told = f"{found['lossless']['acceptance']:.0%} of {found['lossless']['drafted']} drafted"
            assert (told if options.get("draft_length") != "0" else "second, nothing was drafted") in line
            assert line in (tmp_path / "out" / "report.html").read_text()
        texts.append(lines[0])
    assert found.get("lossless") is None and len(set(texts)) == 1


def test_output_is_a_file(arguments, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(arguments, output=str(tmp_path / "file")) == 2
    assert "is a file" in error_line(capsys)


def test_text_that_was_trained_on_is_named(arguments, tiny_opt, short_text, tmp_path, caplog, no_pictures):
    known = [sha256_text(document.text)[:16] for document in cut_plain_text(short_text.read_text())]
    seen = make_bundle(tiny_opt).at(0.1, 0.85)
    object.__setattr__(seen, "metadata", {"text": {"train_sha256": known[:1]}})
    seen.save_pretrained(tmp_path / "seen")
    with caplog.at_level("WARNING"):
        asked = {"tokens": 40, "timing": "false", "mlp_density": "0.1", "curve_mlp_density": "[]"}
        assert run(arguments, bundle=str(tmp_path / "seen"), **asked) == 0
    assert "documents of short trained the predictors" in caplog.text


def test_many_texts_have_rows_tables_and_panels_of_their_own(arguments, short_text, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": make_text(33, seed=i)}) + "\n" for i in range(3)))
    texts = [str(short_text), f"stories={other}"]
    changes = {"text": texts, "timing": "false", "mlp_density": "0.1,0.3", "curve_mlp_density": "0.5"}
    assert run(arguments, **changes) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert [(text["name"], text["source"]) for text in found["texts"]] == [("short", texts[0]), ("stories", str(other))]
    first, second = found["texts"]
    assert not first["whole"] and second["whole"] and second["documents"] == 3
    assert second["bytes"] == sum(len(make_text(33, seed=i)) for i in range(3))
    by_text = {name: [row for row in found["quality"] if row["text"] == name] for name in ("short", "stories")}
    assert {row["asked_mlp_density"] for row in by_text["short"]} == {1.0, 0.1, 0.3, 0.5}
    kinds = {(row["selection"], row["asked_mlp_density"], row["asked_head_density"]) for row in by_text["stories"]}
    expected = {(name, density, 1.0) for name in ("predicted", "oracle") for density in (0.1, 0.3)}
    own = {(name, 0.1, 0.85) for name in ("predicted", "oracle")}  # as calibrated
    assert kinds == {("dense", 1.0, 1.0), *own, *expected, ("predicted", 0.3, 0.85)}
    for rows in by_text.values():
        for row in rows[1:]:
            assert row["increase"] == pytest.approx(row["perplexity"] / rows[0]["perplexity"] - 1, abs=2e-5)
    assert {row["text"] for row in found["layers"]} == {"short", "stories"}
    assert printed.count("stories") == 6 and "whole" in printed and f"{second['tokens']:,}" in printed
    assert (tmp_path / "out/curve.png").read_bytes()[:4] == b"\x89PNG"
    # A text is scored alike whatever stands beside it, and all of them get all rows on request.
    assert run(arguments, **changes | {"text": texts[1], "yardstick_texts": "all", "output": tmp_path / "alone"}) == 0
    alone = json.loads((tmp_path / "alone/results.json").read_text())["quality"]
    assert len(alone) == len(by_text["short"])
    names = ("selection", "as_calibrated", "asked_mlp_density", "asked_head_density", "sparse_from")
    same = {tuple(row[name] for name in names): row for row in alone}
    for row in by_text["stories"]:
        again = same[tuple(row[name] for name in names)]
        assert again == row


def test_a_check_says_of_a_screen_what_only_the_engine_can_decide(tmp_path):
    model = save_tiny_opt(tmp_path, hidden_size=64, word_embed_proj_dim=64)
    bundle = make_bundle(model).at(0.3, 0.75)

    def said(device, **options):
        return planned_step(InferConfig(model=str(model), **options), bundle, torch.device(device))

    assert "greedy tokens through a screen, where the GPU has room when the engine is built" in said("cuda")
    assert "all logits, because a screen is for one row" in said("cuda", batch=2)
    assert "greedy tokens through a screen\n" in said("cpu")


def test_a_model_without_predictors(tiny_opt, tmp_path, capsys):
    """Scored, timed and written exactly. The verdict says what predictors could leave out."""
    text = tmp_path / "text.txt"
    text.write_text("the model reads a token and the layer keeps only those rows that matter. " * 400)
    common = ["--model", str(tiny_opt), "--text", str(text), "--tokens", "600", "--window", "64"]
    main([*common, "--new_tokens", "8", "--generate", "the model", "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["selection"] for row in found["quality"]] == ["dense"]
    read = {row["backend"]: row["megabytes_per_token"] for row in found["timing"]}
    assert {*read} == {"dense", "dense-cpu", "dense-cpu-read"} and found["exact"]["tokens"] == 8 + 3
    assert "greedy tokens are those of transformers' dense model." in printed
    active = found["quality"][0]["mlp_active"]
    assert 0.2 < active < 0.8 and found["exact"]["active"] == pytest.approx(active)
    layer = found["exact"]["layer_bytes"]
    assert layer["exact"] / layer["dense"] == pytest.approx((4 + 2 * (1 + active)) / 8, rel=1e-3)  # d_ffn = 2 d
    assert "without predictors" in printed and f"{100 * active:.2g} % of the neurons are active" in printed
