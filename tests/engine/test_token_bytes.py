"""Expected bytes of a step: those that the CPU engine counts while it decodes."""

import pytest
import torch
from conftest import REPOSITORY

from dejavu_train import Bundle
from dejavu_train.engine.cpu import CpuEngine
from dejavu_train.engine.token_bytes import step_bytes
from dejavu_train.models.load import load_model


@pytest.mark.parametrize("density", [0.1, 0.2, None])
def test_expected_bytes_are_near_those_that_are_read(density):
    """Within a fifth: the text is not that of the calibration."""
    folder = REPOSITORY / "checkpoints/opt-mini"
    bundle = Bundle.from_pretrained(folder / "bundle")
    bundle = bundle.at(1.0, 1.0) if density is None else bundle.at(mlp_density=density)
    engine = CpuEngine(load_model(str(folder)), bundle, context=64)
    prompt = torch.arange(20, 30).tolist()
    engine.generate([prompt], 1, stop_tokens=())
    engine.bytes_read()
    engine.generate([prompt], 33, stop_tokens=())
    counted = engine.bytes_read()
    steps = 32  # the first token follows from the prompt
    read = (counted["weights"] + counted["predictors"] + counted["lm_head"]) / steps
    expected = step_bytes(bundle, engine.plan)
    assert expected.read == pytest.approx(read, rel=0.2)
    assert (expected.read == expected.dense) == (density is None)
