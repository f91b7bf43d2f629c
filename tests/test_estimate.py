"""What --check reckons from timed passes, by hand, and that a timed pass is what collecting does."""

import dataclasses
import gzip

import pytest
import torch
from small_runs import flags

from dejavu_train.models.config_values import read_dims
from dejavu_train.run.command import parse_config
from dejavu_train.run.estimate import Estimate, _one_block
from dejavu_train.run.plan import expected_tokens, print_plan


@pytest.fixture
def known(tiny_opt, text_file, tmp_path):
    """Blocks of a microsecond, steps of 10 ms, validations of 20 ms. Two layers, d_model 48, d_ffn 96."""
    config = parse_config(flags(tiny_opt, text_file, tmp_path / "run", "--calibrate.sensitivity_tokens=1000"))
    return Estimate(config, read_dims(str(tiny_opt), None), 1e-6, 2e-6, lambda _: (0.010, 0.020))


def test_seconds_by_hand(known):
    assert known.collecting(1_000_000, 0) == pytest.approx(2.0)
    assert known.collecting(1_000_000, 4 * 10**9) == pytest.approx(8.0)  # the disk is slower: written, then read
    head = 320 * 48 / (4 * 48**2 + 2 * 48 * 96)
    assert known.sampling(1_000_000) == pytest.approx(2.0 * (2 + head))
    rows = {"train": 0, "val": 1000, "calibration": 0}  # 4 batches of 256, scored 4 times and once more
    assert known.training("mlp", 3, rows) == pytest.approx(3 * (0.3 + 80 * 0.0115 + 20 * 0.020), rel=1e-3)
    curves = 500 * 2 * 96 * 4e-8
    probes = 500 * (5 + 6) * 2 * (1 + head) * 1e-6
    assert known.calibrating(500) == pytest.approx(curves + probes + 500 * 2e-6 * 4)
    tuned = dataclasses.replace(known.config, tune=dataclasses.replace(known.config.tune, steps=10, tokens=1000))
    assert dataclasses.replace(known, config=tuned).tuning() == pytest.approx(10 * 1000 * 2e-6 * 4)


def test_measuring_takes_a_moment_and_leaves_no_trace(known):
    state = torch.get_rng_state()
    measured = Estimate.measure(known.config, known.shape)
    assert 1e-8 < measured.block < 1e-2 and 1e-8 < measured.row < 1
    assert torch.equal(torch.get_rng_state(), state)


def test_a_block_is_made_without_drawing_its_weights(known):
    """Of a 66B model a draw takes longer than all that is timed."""
    for name, parameter in _one_block(known.config, torch.device("cpu")).named_parameters():
        assert torch.equal(parameter, torch.full_like(parameter, 0.01)), name


def test_tokens_of_each_set(known):
    assert expected_tokens(known.config) == {"train": 12000, "calibration": 2000, "val": 2000}


def test_what_only_reading_would_tell_is_at_most(tiny_opt, text_file, tmp_path, capsys):
    packed = tmp_path / "text.txt.gz"
    packed.write_bytes(gzip.compress(text_file.read_bytes()))
    for text in (text_file, packed):
        print_plan(parse_config(flags(tiny_opt, text, tmp_path / "run")))
        collect = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("collect"))
        assert collect.endswith("at most: the text was not read") == (text == packed)
