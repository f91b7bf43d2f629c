"""infer.py runs the bundle as it was calibrated, and says so. Other densities are asked for."""

import dataclasses

import pytest
import torch
from bundles import make_bundle
from conftest import REPOSITORY
from four_bit_models import four_bits
from transformers import OPTConfig, OPTForCausalLM

from dejavu_train.evaluation import run
from dejavu_train.evaluation.calibrated import described, ignored, moved, opening, timed, writing
from dejavu_train.evaluation.command import read_config
from dejavu_train.evaluation.config import InferConfig
from dejavu_train.evaluation.perplexity import EvalSetting
from dejavu_train.evaluation.run import quality_rows
from dejavu_train.evaluation.timing import Timing

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    return make_bundle(tiny_opt, cascade=True).at(0.05, 0.5)


def only(bundle, target):
    return dataclasses.replace(bundle, specs={key: spec for key, spec in bundle.specs.items() if key[1] == target})


def config(tiny_opt, **changes):
    return InferConfig(model=str(tiny_opt), bundle="mine", output="out", **changes)


def test_nothing_moves_a_bundle_unless_it_is_asked_for(tiny_opt, bundle):
    assert timed(config(tiny_opt), bundle) is bundle
    fixed = bundle.at(0.2, 0.5, top_k=True)
    assert timed(config(tiny_opt), fixed) is fixed
    other = timed(config(tiny_opt, timing_mlp_density=0.1, timing_head_density=0.75), fixed)
    assert other.mean_density("mlp") == pytest.approx(0.1, abs=0.006) and other.mean_density("heads") == pytest.approx(
        0.75
    )
    assert all(spec.threshold is None for spec in other.specs.values())  # top-k stays top-k
    assert any(spec.top_k for spec in other.specs.values())


@pytest.mark.parametrize(
    ("asked", "densities", "line"),
    [
        ({"mlp_density": (0.1,)}, (0.1, 1.0), "; generated at 10 % of the neurons (candidates of a second stage)"),
        ({"mlp_density": (0.1,), "head_density": (0.75,)}, (0.1, 0.75), " and 75 % of the heads"),
        ({"head_density": (0.75,)}, (0.05, 0.75), " and 75 % of the heads"),
        ({"mlp_density": (0.1, 0.2)}, (0.05, 0.5), ", as several densities are asked for: --timing_mlp_density takes"),
        ({"mlp_density": (0.1,), "head_density": (0.75, 0.5)}, (0.05, 0.5), ", as several densities are asked for"),
        (
            {"mlp_density": (0.1,), "timing_mlp_density": 0.2},
            (0.2, 0.5),
            "timed and generated at 20 % of the neurons",
        ),
        ({}, (0.05, 0.5), "as calibrated"),
    ],
)
def test_one_density_that_is_asked_for_writes_the_text(tiny_opt, bundle, asked, densities, line):
    asked = config(tiny_opt, generate="the", **asked)
    used = writing(asked, bundle)
    found = used.mean_density("mlp"), used.mean_density("heads")
    assert found == pytest.approx(densities, abs=0.006)
    said = opening(asked, bundle, CPU)
    assert line in said and ("several" in line) == ("several" in said)
    assert "generated at" not in opening(config(tiny_opt, mlp_density=(0.1,)), bundle, CPU)


def test_a_density_of_neurons_without_predictors_leaves_the_heads(tiny_opt, bundle):
    heads = only(bundle, "heads")
    assert writing(config(tiny_opt, generate="the", mlp_density=(0.1,)), heads) is heads


def test_a_bundle_moves_within_its_own_way_of_selecting(bundle):
    mixed = bundle.at(0.2, top_k=True)  # its heads have thresholds
    assert mixed.selects_top_k("mlp") and not mixed.selects_top_k("heads")
    again = mixed.at(0.3, 0.8)
    assert again.selects_top_k("mlp") and not again.selects_top_k("heads")
    assert not mixed.at(0.3, top_k=False).selects_top_k("mlp")


def test_top_k_is_said_as_what_it_selects(bundle):
    """Heads are few: the share of them that k is may be far from the density that was asked for."""
    fixed = bundle.at(0.2, 0.5, top_k=True)
    for spec in fixed.specs.values():
        assert spec.density == (1.0 if spec.top_k is None else spec.top_k / spec.n_out)
    dense_heads = bundle.at(0.2, 1.0, top_k=True)
    assert all(spec.threshold is None for spec in dense_heads.at(None, 0.5).specs.values())  # as the MLPs select
    assert not bundle.at(0.2, 1.0).at(None, 0.5).selects_top_k("heads")


@pytest.mark.parametrize(("target", "lacks"), [("mlp", "heads"), ("heads", "mlp")])
def test_a_target_without_predictors_stays_dense_and_is_named(tiny_opt, bundle, target, lacks):
    one = only(bundle, target)
    asked = config(tiny_opt, mlp_density=(0.1,), timing_mlp_density=0.2, head_density=(0.5,), timing_head_density=0.8)
    used = timed(asked, one)
    assert used.mean_density(lacks) == 1.0
    assert used.mean_density(target) == pytest.approx({"mlp": 0.2, "heads": 0.8}[target])
    (line,) = ignored(asked, one)
    flags = {"mlp": "--mlp_density, --timing_mlp_density", "heads": "--head_density, --timing_head_density"}[lacks]
    assert line.startswith(f"mine has no predictors for {lacks}: {flags} change nothing")
    assert not ignored(config(tiny_opt), one) and moved(one, None, None) is one
    rows = quality_rows(asked, one.targets)
    mlp, heads = ({row.mlp_density for row in rows}, {row.head_density for row in rows})
    assert (mlp, heads) == (({None, 1.0, 0.1}, {None, 1.0}) if target == "mlp" else ({None, 1.0}, {None, 1.0, 0.5}))


def test_rows_are_as_calibrated_unless_others_are_asked_for(tiny_opt):
    names = ("predicted", "oracle", "random", "static", "noncontextual")
    rows = quality_rows(config(tiny_opt))
    own = [EvalSetting(name, None, None) for name in names]
    assert rows == [EvalSetting("dense"), *own, EvalSetting("predicted", None, None, 128)]
    assert quality_rows(config(tiny_opt), first=False) == [EvalSetting("dense"), *own[:2]]
    asked = quality_rows(config(tiny_opt, mlp_density=(0.2, 0.1), head_density=(0.85,), sparse_from=(0,)))
    assert asked[:6] == rows[:6]
    assert asked[6:] == [
        *(EvalSetting(name, density) for density in (0.1, 0.2) for name in names),
        *(EvalSetting("predicted", density, 0.85) for density in (0.1, 0.2)),
    ]
    heads = quality_rows(config(tiny_opt, head_density=(0.85,), sparse_from=(0,)))
    assert heads[6:] == [EvalSetting("predicted", None, 0.85)]


def test_the_shipped_config_keeps_the_rows_of_the_readme():
    shipped = read_config(["--config", str(REPOSITORY / "configs/infer/opt-mini.yaml")])
    rows = {(row.selection, row.mlp_density, row.head_density, row.sparse_from) for row in quality_rows(shipped)}
    curve = {(name, d, 1.0, 0) for name in ("predicted", "oracle", "random", "static") for d in (0.05, 0.1, 0.2, 0.4)}
    rest = {("noncontextual", d, 1.0, 0) for d in (0.1, 0.2)} | {("predicted", d, 0.85, 0) for d in (0.1, 0.2)}
    assert curve | rest <= rows and ("noncontextual", 0.05, 1.0, 0) not in rows
    assert shipped.timing_mlp_density is None and shipped.timing_head_density is None


def test_the_first_line_says_what_runs(tiny_opt, bundle, tmp_path):
    plain = "mine: as calibrated, 5 % of the neurons (candidates of a second stage) and 50 % of the heads"
    line = opening(config(tiny_opt), bundle, CPU)
    assert line.startswith(f"{plain}; backend cpu, float32; others are asked for")
    asked = config(tiny_opt, timing_mlp_density=0.1, backend="mask", dtype="bfloat16")
    used = "timed and generated at 10 % of the neurons (candidates of a second stage) and 50 % of the heads"
    assert opening(asked, bundle, CPU) == f"{plain}; {used}; backend mask, bfloat16"
    assert "backend cpu, float16" in opening(config(tiny_opt, dtype="float16"), bundle, CPU)
    assert described(make_bundle(tiny_opt).at(0.2, 1.0, top_k=True)) == (
        "20.3 % of the neurons (the largest logits of each token) and all heads"  # 19 and 20 of 96
    )
    assert described(only(bundle, "mlp")).endswith("and all heads (it has no predictors for them)")
    widths = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 64, "num_attention_heads": 4}
    coded = four_bits(OPTForCausalLM(OPTConfig(num_hidden_layers=1, vocab_size=40, **widths)))
    coded.config.quantization_config = {"quant_method": "dejavu_int4", "bits": 4}
    coded.config.save_pretrained(tmp_path)
    assert "backend cpu, weights in 4 bits" in opening(config(tmp_path), bundle, CPU)


def test_a_timing_says_whether_a_second_stage_ran(tiny_opt, bundle, monkeypatch):
    def timed(_model, _bundle, backend, *_):
        return Timing(backend, "cpu", 1, 4, 4, {})

    monkeypatch.setattr(run, "time_engine", timed)

    def said(backend, given):
        return run._time_one(config(tiny_opt), None, given, backend, torch.ones(1, 4)).second_stage

    assert said("triton", bundle) is False and said("cpu", bundle) is True
    assert said("dense-engine", bundle) is said("triton", bundle.one_stage()) is said("cpu", bundle.at(1.0)) is None
