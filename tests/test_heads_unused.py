"""Predictors of heads that would be trained and not used: said before the run, and never silently gone."""

import pytest
from bundles import make_bundle

from dejavu_train.families import ModelDims, Target
from dejavu_train.run.command import parse_config
from dejavu_train.run.pipeline import bundle_summary, unused_heads


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], True),
        (["--calibrate.head_density=0.85"], False),
        (["--calibrate.budget=600kB"], False),
        (["--heads.enabled=false"], False),
        (["--mlp.enabled=false"], True),
    ],
)
def test_a_run_says_before_it_starts_that_heads_will_not_be_used(flags, said):
    config = parse_config(["--model=folder", *flags])
    notice = unused_heads(config, config.all_jobs(ModelDims(48, 96, 6, 4, 320, 512)))
    assert bool(notice) == said
    if said:
        assert notice.startswith(f"6 of {12 if not flags else 6} predictors are of heads")
        assert "--heads.enabled false" in notice and "--calibrate.head_density 0.85" in notice


def test_the_summary_of_a_bundle_names_its_heads(tiny_opt):
    bundle = make_bundle(tiny_opt)
    assert "heads: all run, because their density is 1." in bundle_summary(bundle.at(0.3, 1.0))
    assert "heads: recall" in bundle_summary(bundle.at(0.3, 0.5))
    alone = type(bundle)(
        bundle.model,
        shape=bundle.shape,
        specs={key: spec for key, spec in bundle.at(0.3, 1.0).specs.items() if spec.target == Target.MLP},
        tensors={name: t for name, t in bundle.tensors.items() if ".mlp." in name},
        metadata={},
        weight_hash=bundle.weight_hash,
        tokenizer_hash=bundle.tokenizer_hash,
    )
    assert "heads: all run, because they have no predictors" in bundle_summary(alone)
