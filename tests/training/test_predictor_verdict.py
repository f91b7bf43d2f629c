"""What a finished predictor is called: good, or weak with the reason and a flag."""

import pytest

from dejavu_train.families import Target
from dejavu_train.training.verdict import metrics_line, predictor_verdict


def metrics(mass, recall, density, active):
    return {
        "val/retained_mass": mass,
        "val/recall": recall,
        "val/density": density,
        "val/active_density": active,
    }


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ((0.97, 0.9, 0.1, 0.05), "good"),
        ((0.95, 0.4, 0.02, 0.05), "good"),
        ((0.69, 0.2908, 0.05, 0.172), "weak, the density has room for 29 % of what is active: raise --mlp.density"),
        (
            (0.8, 0.5, 0.1, 0.05),
            "weak, it finds 50 % of what is active, where 100 % fit into the density: raise --mlp.steps or --mlp.rank",
        ),
        ((0.9, 0.95, 0.1, 0.05), "weak, the density is too low: raise --mlp.density"),
    ],
)
def test_a_weak_predictor_says_why(found, verdict):
    assert predictor_verdict(metrics(*found), Target.MLP) == verdict


def test_the_flags_are_those_of_heads_and_of_a_class_without_a_rank():
    assert predictor_verdict(metrics(0.5, 0.3, 0.3, 1.0), Target.HEADS).endswith("raise --heads.density")
    assert predictor_verdict(metrics(0.8, 0.5, 0.1, 0.05), Target.MLP, has_rank=False).endswith("raise --mlp.steps")


def test_the_numbers_of_a_validation_begin_with_what_decides():
    assert metrics_line(metrics(0.6912, 0.2908, 0.05, 0.17)) == "retained mass 0.691, recall 0.291 at density 0.05"
