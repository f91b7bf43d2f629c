"""Tables and pictures say what results.json says, whatever is missing."""

import numpy as np
import pytest
from matplotlib import pyplot

from dejavu_train.evaluation import picture, report
from dejavu_train.evaluation.perplexity import EvalCorpus, EvalResult, EvalSetting
from dejavu_train.evaluation.picture import plot_curves
from dejavu_train.evaluation.texts import EvalText
from dejavu_train.evaluation.timing import Timing
from dejavu_train.predictors.metrics import SelectionSums

HELD = EvalCorpus([[2, 5, 6]] * 4, [0, 0, 1, 1], [4, 4], 30)
TEXTS = [
    EvalText("docs", "installed-docs", "ab", "test", False, "in domain", 3, 512, HELD),
    EvalText("prose", "prose.txt", "cd", None, True, "unseen", 0, 512, HELD),
]


def quality(row, nats, tp=8, fp=2, fn=2, kept=9.0):
    sums = {}
    for target, units in (("mlp", 100), ("heads", 20)):
        sums[0, target] = SelectionSums()
        for name, value in {"tp": tp, "fp": fp, "fn": fn, "units": units, "kept": kept, "mass": 10.0}.items():
            setattr(sums[0, target], name, getattr(sums[0, target], name) + value)
    return EvalResult(row, np.array(nats), sums, {0: 25} if row.selection == "predicted" else {}, 0.125)


@pytest.fixture
def found():
    scored = [quality(EvalSetting("dense"), [8.0, 8.0]), quality(EvalSetting("predicted", None, None), [8.1, 8.1])]
    scored[1].calibrated = (0.05, 0.5)
    for density in (0.1, 0.2):
        scored += [
            quality(EvalSetting(name, density), [8.1, 8.1]) for name in ("predicted", "oracle", "random", "static")
        ]
    scored.append(quality(EvalSetting("predicted", 0.1, 0.85), [8.4, 8.4]))
    timing = Timing("gather", "cpu", 1, 32, 64, {"p20": 1.0, "p50": 1.25, "p80": 2.0})
    others = [quality(EvalSetting("dense"), [9.0, 8.0]), quality(EvalSetting("predicted", 0.2), [9.9, 8.0])]
    return report.results("models/mini", "bundle", [(TEXTS[0], scored), (TEXTS[1], others)], [timing])


def test_rows(found):
    dense, own, predicted = found["quality"][:3]
    assert own["as_calibrated"] and (own["asked_mlp_density"], own["asked_head_density"]) == (0.05, 0.5)
    assert own["head_recall"] == 0.8 and not predicted["as_calibrated"] and not dense["as_calibrated"]
    assert dense["perplexity"] == pytest.approx(np.exp(2.0), rel=1e-5)
    assert dense["bits_per_byte"] == pytest.approx(16 / np.log(2) / 30, rel=1e-5)
    assert predicted["increase"] == pytest.approx(np.expm1(0.2 / 8), rel=1e-5)
    assert predicted["increase_error"] == pytest.approx(0, abs=1e-9)
    assert predicted["mlp_selected"] == 0.1 and predicted["head_selected"] == 1.0 and predicted["head_recall"] is None
    assert predicted["mlp_candidates"] == 0.25 and predicted["mlp_bytes"] == 0.125
    assert dense["mlp_bytes"] == 1 and dense["mlp_candidates"] is None
    mine = [row for row in found["quality"] if row["text"] == "docs"]
    assert mine[-1]["head_selected"] == 0.5 and mine[-1]["head_recall"] == 0.8
    assert mine[-1]["asked_head_density"] == 0.85 and mine[-1]["head_retained_mass"] == 0.9
    other = found["quality"][-1]
    assert other["text"] == "prose" and other["increase"] == pytest.approx(np.expm1(0.9 / 8), rel=1e-5)
    assert [(text["name"], text["domain"], text["whole"]) for text in found["texts"]] == [
        ("docs", "in domain", False),
        ("prose", "unseen", True),
    ]
    assert found["layers"][0] == {
        "text": "docs", "layer": 0, "target": "mlp",
        "selected": 0.1, "recall": 0.8, "precision": 0.8, "retained_mass": 0.9
    }  # fmt: skip
    assert [(row["text"], row["target"]) for row in found["layers"]] == [
        ("docs", "mlp"), ("docs", "heads"), ("prose", "mlp")
    ]  # fmt: skip


def test_table(found):
    text = report.tables(found)
    assert "2.53%" in text and "1.250" in text and "heads 0" in text
    drift = next(part for part in text.split("\n\n") if part.startswith("increase of perplexity on"))
    lines = [line.split() for line in drift.splitlines()[1:]]
    # as calibrated, then texts of one density side by side
    assert [line[0] for line in lines] == ["docs", "docs", "docs", "prose", "docs"]
    assert lines[0][1:6] == ["as", "calibrated", "(5", "%,", "50"]
    assert lines[3][1:6] == ["20", "%,", "100", "%", "0.250"] and "11.91%" in lines[3] and lines[3][-1] == "-"
    assert "second stage" not in text
    found["timing"] += [found["timing"][0] | {"backend": "triton", "second_stage": False}]
    assert report.tables(found).endswith("\ntriton read candidates of the second stage whole")
    found |= {"texts": [], "quality": [], "layers": [], "timing": []}
    assert report.tables(found).count("\n") == 0


def test_picture(found, tmp_path):
    assert plot_curves(found, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    report.write_results(found, tmp_path / "new")
    assert (tmp_path / "new/results.json").is_file()


def drawn_words(found, monkeypatch):
    """Everything that curve.png says, in one panel, and what stands on its axis of likelihoods."""
    figures = []
    monkeypatch.setattr(picture, "save", lambda figure, *_: figures.append(figure))
    assert plot_curves(found, "curve.png")
    (panel,) = figures[0].axes
    pyplot.close(figures[0])
    return "\n".join([text.get_text() for text in panel.texts] + [panel.get_title("left"), panel.get_xlabel()]), panel


def test_the_picture_says_its_verdict(found, monkeypatch):
    calibrated, curve = found["quality"][1], found["quality"][6]
    words, panel = drawn_words(found, monkeypatch)
    assert calibrated["as_calibrated"] and calibrated["text"] == "docs" and curve["asked_mlp_density"] == 0.2
    assert "With 10 % of the MLP neurons, a token is 2.5 % less likely" in words
    for name in ("dense model", "oracle", "predicted", "static"):
        assert name in words
    assert "random" not in words and "MLP neurons that are read" in words
    assert panel.get_ylim()[0] > 50  # all near the dense model: no room is left empty below
    for row in found["quality"]:
        row["increase"] = 79.0 if row["selection"] == "static" else row["increase"]
        row["as_calibrated"] = False
    words, panel = drawn_words(found, monkeypatch)
    assert "80 times less likely" in words and panel.get_ylim()[0] == 0
    found["quality"] = [row for row in found["quality"] if row["selection"] == "dense"]
    assert not plot_curves(found, "curve.png")
