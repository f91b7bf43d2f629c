"""What results say in sentences."""

import pytest

from dejavu_train.evaluation.report import COLUMNS, drift_table, timing_table
from dejavu_train.evaluation.verdict import verdict


def row(text, mlp, increase, calibrated=False, **values):
    found = {"text": text, "selection": "predicted", "sparse_from": 0, "as_calibrated": calibrated}
    found |= {"asked_mlp_density": mlp, "asked_head_density": 0.85, "head_selected": 0.85, "mlp_selected": mlp}
    found |= {"mlp_candidates": mlp, "mlp_retained_mass": 0.98, "increase": increase, "increase_error": 0.002}
    return found | {"mlp_recall": 0.9, "head_retained_mass": 0.9, "mlp_bytes": 0.1} | values


def timed(**milliseconds):
    shared = {"device": "cpu", "batch": 1, "prompt": 32, "new_tokens": 64}
    times = {name.replace("_", "-"): ms for name, ms in milliseconds.items()}
    return [shared | {"backend": name, "ms_per_token": {"p20": ms, "p50": ms, "p80": ms}} for name, ms in times.items()]


def test_verdict_of_a_bundle_as_calibrated():
    quality = [row("docs", 0.2, 0.0152, True), row("docs", 0.05, 0.9), row("code", 0.2, -0.002, True)]
    assert verdict({"quality": quality, "timing": timed(dense=8.5, dense_cpu=1.4, cpu=0.7)}) == [
        "With 20 % of the neurons and 85 % of the heads:",
        "  docs: a token is 1.5 % less likely (± 0.2) than to the dense model.",
        "  code: a token is 0.2 % more likely (± 0.2) than to the dense model.",
        "The sparse model is close to the dense one.",
        "A token takes 0.7 ms on the backend cpu, instead of 8.5 in transformers' dense model.",
        "That is 2 times as fast as the same engine without predictors, which takes 1.4 ms.",
    ]


@pytest.mark.parametrize(
    ("increase", "said"),
    [(0.009, "almost"), (0.04, "is close"), (0.2, "a higher density"), (0.5, "do not fit"), (40.0, "do not fit")],
)
def test_verdict_follows_the_increase(increase, said):
    lines = verdict({"quality": [row("docs", 0.1, increase)], "timing": []})
    assert said in lines[-1] and len(lines) == 3 and ("(± 0.002)" in lines[1]) == (increase >= 1)


def test_verdict_says_what_selections_miss_and_when_nothing_is_gained():
    quality = [row("docs", 0.2, 0.1, mlp_retained_mass=0.7, mlp_selected=0.08), row("docs", 0.4, 0.01)]
    quality += [row("code", 0.2, 0.1)]  # the densities of most texts, not the largest
    lines = verdict({"quality": quality, "timing": timed(dense=8.5, dense_cpu=0.5, cpu=0.7)})
    assert lines[0].startswith("With 20 % of the neurons as candidates, 8 % selected, and 85 %")
    assert "carry 70 % of" in lines[4] and "slower than the same engine" in lines[-1]
    assert verdict({"quality": [], "timing": []}) == []
    assert "ms on the backend gather. It is plain torch" in verdict({"quality": [], "timing": timed(gather=3.0)})[0]
    lines = verdict({"quality": [], "timing": timed(dense_cpu=1.4, cpu=0.7)})
    assert lines[0] == "A token takes 0.7 ms on the backend cpu." and "2 times as fast as the same engine" in lines[1]


def test_every_column_that_is_not_a_word_has_a_definition():
    plain = {"increase of perplexity on", "backend", "device", "batch", "prompt", "new", "mlp"}
    found = {"quality": [row("docs", 0.2, 0.1)], "timing": []}
    assert {*drift_table(found).headings, *timing_table(found).headings} - plain - {"p50", "p80"} <= set(COLUMNS)
