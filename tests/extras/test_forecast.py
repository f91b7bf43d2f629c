"""``train.py --plan``: by hand on known rates, against a measured row, and of a model by its config.json alone."""

import dataclasses
import json
import shutil

import pytest
from conftest import REPOSITORY
from family_models import HYBRIDS
from small_runs import flags

from benchmarks.decode_problem import SHAPES
from dejavu_train.extras.hosts.forecast import START_SECONDS, forecast, stated
from dejavu_train.extras.hosts.hardware import Hardware, hardware_of, known_hardware
from dejavu_train.extras.pretrain.models import config_values
from dejavu_train.families import Target, dims_of
from dejavu_train.ground.errors import UserError, exit_on_user_error
from dejavu_train.models.config_values import read_dims
from dejavu_train.run.command import main, parse_config
from dejavu_train.run.estimate import JOB_SECONDS, STEP_SECONDS
from dejavu_train.training.config import PlanConfig

LAYER = 4 * 48**2 + 2 * 48 * 96  # weights of the tiny model's layer
GPU = Hardware("X", 10, 1e-3, 1e-6, 10, {"tflops": "", "read_tb_s": "", "step_ms": ""})


@pytest.fixture
def known(tiny_opt, text_file, tmp_path):
    config = parse_config(flags(tiny_opt, text_file, tmp_path / "run"))
    return config, read_dims(str(tiny_opt), None)


def test_by_hand(known):
    plan = PlanConfig(gpus=3, disk_gb_s=2e-3)
    run = forecast(*known, GPU, plan)
    row = 4 * 48 + 12 + 2 * 4 + 12
    assert run.tokens == 16000 and run.shards == 16000 * 2 * row
    collecting = 16000 * 2 * max(2 * LAYER / 1e9, row / 2e6) + 32000 * row / 2e6
    assert run.seconds["collecting"] == pytest.approx(START_SECONDS + collecting)
    # Four jobs on three GPUs are two rounds. 80 steps, and 5 validations of 8 batches, of 10 ms each.
    width = 2 * 48 + 12
    job = JOB_SECONDS + 16000 * width / 2e6 + 80 * (0.010 + STEP_SECONDS) + 5 * 8 * 0.010
    assert run.seconds["training"] == pytest.approx(START_SECONDS + 2 * job, rel=1e-6)
    assert run.seconds["text"] == run.seconds["tuning"] == 0, "what there is nothing to do for does not start"
    assert run.gpus == {**dict.fromkeys(run.seconds, 1), "training": 3}
    assert run.paid == pytest.approx(3 * run.hours) and run.busy < run.paid
    half = forecast(*known, GPU, plan, 0.5)
    assert half.shards == run.shards / 2 and half.hours < run.hours


def test_all_gpus_read_one_disk(known):
    """Two layers have four jobs, and each reads its rows. More GPUs make the disk no faster."""
    slow = PlanConfig(gpus=4, disk_gb_s=1e-4)
    width = 2 * 48 + 12
    assert forecast(*known, GPU, slow).seconds["training"] == pytest.approx(START_SECONDS + 4 * 16000 * width / 1e5)


def test_a_larger_step_takes_its_operations(known):
    config, shape = known
    flops = 2 * 256 * (48 * 96 + 3 * 16 * (48 + 96))
    slow = dataclasses.replace(GPU, tflops=flops / 1e12 / 5)
    steps = stated(config, shape, slow, 1e9).steps
    assert steps(Target.MLP) == pytest.approx((5.0, 5.0)) and steps(Target.HEADS) == (0.010, 0.010)


def test_a_layer_without_a_target_counts_by_its_own_weights(known):
    """Attention, an MLP and mixtures of Nemotron-H share no layer."""
    shape = dims_of(HYBRIDS["nemotron_h"])
    numbers = shape.weights - shape.outer_weights
    assert stated(known[0], shape, GPU, 1e9).token == pytest.approx(2 * numbers / GPU.tflops / 1e12)


def test_predictors_of_a_row_that_was_measured(tmp_path):
    """Eight predictors of the 6.7B shape. Only what a step takes comes from the same row."""
    (row,) = map(json.loads, (REPOSITORY / "benchmarks/results/training.jsonl").read_text().splitlines())
    (tmp_path / "config.json").write_text(json.dumps(config_values("opt", dataclasses.asdict(SHAPES["6.7b"]))))
    config = parse_config([f"--model={tmp_path}", "--mlp.rank=256", "--mlp.steps=1000", "--heads.steps=600"])
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=1024))
    estimate = stated(config, SHAPES["6.7b"], known_hardware()["H200"], float("inf"))  # files were in memory
    rows = {"train": 200_000, "val": 10_000, "calibration": 0}
    seconds = sum(estimate.training(target, row["layers"], rows) for target in Target)
    assert 0.8 < seconds / row["seconds"] < 1.1


@pytest.fixture
def alone(tiny_opt, tmp_path):
    """Flags for a model of which only the config.json is here."""
    folder = tmp_path / "config-alone"
    folder.mkdir()
    shutil.copy(tiny_opt / "config.json", folder)
    return [f"--model={folder}", f"--output={tmp_path}/new", "--collect.window=64", "--mlp.rank=8", "--heads.rank=4"]


def test_a_model_by_its_config_alone(alone, tmp_path, capsys):
    assert exit_on_user_error(main, [*alone, "--plan.gpus=2", "--plan.price=2.5"]) == 0
    printed = capsys.readouterr().out
    assert "2 x H200, a disk of 1 GB/s" in printed and "25% of the tokens" in printed and "price" in printed
    assert "training.jsonl, 6.7B on an H200" in printed and not (tmp_path / "new").exists()
    assert exit_on_user_error(main, [*alone, "--plan"]) == 0
    assert "price" not in capsys.readouterr().out


def test_what_a_large_model_needs(tmp_path, capsys, text_file):
    """By layers a layer and the embeddings on the GPU, two blocks of memory beside it, and the states that are more."""
    (tmp_path / "config.json").write_text(json.dumps(config_values("opt", dataclasses.asdict(SHAPES["66b"]))))
    large = [f"--model={tmp_path}", "--plan.gpu=h100", "--collect.dtype=float16", "--calibrate.head_loss_tokens=0"]
    assert exit_on_user_error(main, large) == 0
    printed = capsys.readouterr().out
    assert "exceed the 80 GB of one H100: --collect.device_map auto" in printed and "one host, 2 at least" in printed
    assert exit_on_user_error(main, [*large, "--plan.gpus=2", "--collect.device_map=auto"]) == 0
    assert "exceed" not in capsys.readouterr().out
    assert exit_on_user_error(main, [*large, "--collect.by_layers=true", f"--text.source={text_file}"]) == 0
    d, f = 9216, 4 * 9216
    layer, outside = 4 * d * d + 2 * d * f, (SHAPES["66b"].vocab_size + 2048) * d
    config = parse_config([*large, "--collect.by_layers=true", f"--text.source={text_file}"])
    states = 2 * d * 11 * config.calibrate.sensitivity_tokens * 64
    device, host = f"{2 * (layer + outside) / 1e9:.1f} GB of weights and", f"{2 * 2**31 / 1e9:.1f} GB in host"
    assert 2**30 < 2 * layer < 2**31
    printed = capsys.readouterr().out
    assert all(each in printed for each in (device, host, f"{states / 1e9:.1f} GB of states")), printed


@pytest.mark.parametrize("more, said", [
    (["--plan.gpu=A100"], "plan.gpu A100 was never measured; choose H100 or H200, or give --plan.tflops and"),
    (["--plan.gpus=0"], "plan.gpus must be at least 1, got 0"),
    (["--plan.disk_gb_s=0"], "plan.disk_gb_s must lie above 0"),
    (["--plan", "--text.source=allenai/c4", "--collect.val_tokens=null"], "set --collect.train_tokens"),
])  # fmt: skip
def test_mistakes_of_a_plan(alone, more, said):
    with pytest.raises(UserError, match=said):
        main([*alone, *more])


def test_rates_that_are_stated():
    found = hardware_of(PlanConfig("A100", tflops=50, read_tb_s=1))
    assert (found.tflops, found.read_tb_s, found.memory_gb) == (50, 1, None)
    assert found.sources["tflops"] == "stated" and "training.jsonl" in found.sources["step_ms"]
