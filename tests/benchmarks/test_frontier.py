"""The frontier benchmark as a whole: four disjoint sets, report never used for a choice, tables and pictures."""

import dataclasses

import pytest
import torch
from conftest import make_text, save_tiny_opt

from benchmarks import frontier
from benchmarks.frontier_methods import head_sections, plot, sections, sets
from benchmarks.frontier_methods.study import COLUMNS, Sizes, open_study
from dejavu_train.errors import UserError, exit_on_user_error

SMALL = Sizes(300, 200, 200, 100, 1000, 1000, 10, 64, 4, 4, 48, 4)


@pytest.fixture(scope="module")
def wide_opt(tmp_path_factory):
    """Wide enough that a rank of a sixth of its width costs what it should."""
    folder = tmp_path_factory.mktemp("wide-opt")
    return save_tiny_opt(folder, hidden_size=96, word_embed_proj_dim=96, ffn_dim=384, init_std=0.08)


@pytest.fixture
def study(wide_opt, text_file, tmp_path):
    return open_study(str(wide_opt), str(text_file), tmp_path, torch.device("cpu"), SMALL, "tiny")


def test_the_four_sets_are_disjoint(wide_opt, text_file):
    texts = sets.read_texts(str(text_file), str(wide_opt))
    names = {key: {name for name, _ in documents} for key, documents in texts.items()}
    bodies = {key: {text for _, text in documents} for key, documents in texts.items()}
    assert set(names) == {"train", "calibration", "val", "test"}
    for kind in (names, bodies):
        assert sum(len(found) for found in kind.values()) == len(set().union(*kind.values()))


def test_report_is_never_used_for_a_choice(study, wide_opt, text_file, tmp_path):
    """Another test set changes no predictor, no threshold, no share: only the test rows."""
    found = []
    for seed in (0, 1):
        other = open_study(str(wide_opt), str(text_file), tmp_path / str(seed), torch.device("cpu"), SMALL, "tiny")
        if seed:
            other.test = other.val  # any other text
        del other.sets["test"]
        predictors, _ = sections.fitted(other, 16, "int8")
        plan = other.plan(predictors)
        densities = plan.densities(0.5, "measured")
        tuned, _, _ = sections.tuned(other, predictors, 0.5, plan=plan)
        found.append((densities, plan.thresholds(densities), predictors.down.clone(), tuned.up.clone()))
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2]) and torch.equal(found[0][3], found[1][3])


def test_every_section_writes_its_rows(study, monkeypatch):
    monkeypatch.setattr(sections, "QUICK_SHARES", (0.5, 0.7))
    monkeypatch.setattr(sections, "VAL_SHARES", (0.6,))
    work = frontier.plan_of_work(study, full=False)
    assert {"winners", "references", "training_free", "original", "one_for_all", "heads", "criteria"} <= set(work)
    for do in work.values():
        do()
    head_sections.look_ahead(study)
    monkeypatch.setattr(sections, "CANDIDATES", ((64, "int4", (0.6,)),))
    sections.winners(study, (0.6,), full=True)
    made = head_sections.head_predictors(study, 8, head_sections.importance_of(study))
    head_sections.tuned_heads(study, "heads tuned at", made, head_sections.plan_of(study, made, None), 0.75)
    rows = plot.read_rows(study.output / "frontier.csv")
    assert tuple(rows[0]) == COLUMNS
    methods = {row["method"] for row in rows}
    for name in ("oracle", "random", "static", "non-contextual", "exact MaxIP", "CATS", "TEAL", "GRIFFIN"):
        assert name in methods
    for name in ("original recipe", "one predictor for all layers", "look-ahead, distance 2"):
        assert name in methods
    assert any(name.startswith("data-aware SVD") for name in methods)
    assert any(name.startswith("layer by layer") for name in methods)
    assert any("tuned at" in name for name in methods)
    assert {row["set"] for row in rows} == {"test", "val"}
    assert all(float(row["tokens"]) > 100 for row in rows if row["set"] == "test" and row["method"] != "GRIFFIN")
    picture = pytest.importorskip("matplotlib") and plot.draw(study.output / "frontier.csv")
    assert picture.stat().st_size > 10_000


def test_bytes_of_parts_add_up(study):
    predictors = study.predictors(16, "int8")
    (scored,) = study.frontier("x", "y", predictors, [0.6], "uniform")
    (row,) = plot.read_rows(study.output / "frontier.csv")
    parts = [float(row[name]) for name in ("predictor_share", "fc1_share", "fc2_share")]
    assert sum(parts) == pytest.approx(float(row["mlp_share"]), rel=1e-4)
    dense = 4 * 96 * 384
    assert parts[0] == pytest.approx((16 * (96 + 384) + 2 * (16 + 384) + 2 * 384) / dense, rel=1e-4)
    assert scored.tokens == pytest.approx(SMALL.test_tokens, rel=0.15)  # whole windows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is missing"),
        (["--model", "no/such/folder"], "there is no model folder"),
        (["--plot", "no.csv"], "there is no table no.csv"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert exit_on_user_error(frontier.main, arguments) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_section_is_one_line(wide_opt, text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(frontier, "Sizes", lambda: SMALL)
    arguments = ["--model", str(wide_opt), "--text", str(text_file), "--output", str(tmp_path), "--device", "cpu"]
    assert exit_on_user_error(frontier.main, [*arguments, "--sections", "nonsense"]) == 2
    assert "unknown section nonsense" in capsys.readouterr().err


def test_the_command_line_runs_a_section(wide_opt, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(frontier, "Sizes", lambda: dataclasses.replace(SMALL, fit_steps=4))
    arguments = ["--model", str(wide_opt), "--text", str(text_file), "--output", str(tmp_path), "--device", "cpu"]
    frontier.main([*arguments, "--sections", "one_for_all", "--tokens", "200", "--seconds", "1000"])
    assert (tmp_path / "frontier.csv").is_file()


def test_unknown_starts_are_named(study):
    with pytest.raises(UserError, match="unknown start nonsense; it is random, svd or data"):
        study.predictors(16, start="nonsense")


def test_held_out_pieces_cover_the_file(tmp_path):
    from benchmarks.frontier_methods.study import read_heldout

    text = make_text(6000)
    path = tmp_path / "held.jsonl"
    path.write_text('{"id": "a", "text": ' + __import__("json").dumps(text) + "}\n", encoding="utf-8")
    assert "".join(piece for _, piece in read_heldout(str(path))) == text


def test_a_family_is_drawn_by_the_variant_that_was_best_on_choose():
    def row(method, share, value, column):
        return {"method": method, "mlp_share": str(share), "asked": str(share), column: str(value)}

    report = [row("a", 0.1, 3.0, "increase"), row("b", 0.1, 1.0, "increase"), row("c", 0.1, 0.5, "increase")]
    val = [row("a", 0.1, 0.01, "kl"), row("b", 0.1, 0.02, "kl")]
    assert plot.picked(report, val) == [(0.1, 3.0)]  # not the best on test
    assert plot.picked(report[:1], []) == [(0.1, 3.0)]
