"""Predictors on disk: read strictly, stored in every dtype."""

import json

import pytest
import torch

from dejavu_train.ground.errors import UserError
from dejavu_train.predictors import checkpoint as cal
from dejavu_train.predictors.low_rank import LowRankPredictor


def test_a_damaged_predictor_is_named(tmp_path):
    path = tmp_path / "layer_00" / "mlp"
    path.mkdir(parents=True)
    with pytest.raises(UserError, match="a finished predictor is missing"):
        cal.read_predictor(path)
    metadata = {"d_in": 4, "rank": 2, "n_out": 8, "nonlinearity": "none", "bias": False}
    (path / "predictor.json").write_text(json.dumps(metadata))
    (path / "predictor.safetensors").write_bytes(b"half a file")
    with pytest.raises(UserError, match=r"is damaged .*train it again"):
        cal.read_predictor(path)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 0), ("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 2e-2), ("int4", 0.5)]
)
def test_stored_tensors_read_back(dtype, tolerance):
    predictor = LowRankPredictor(12, 4, 20)
    before = [p.detach().clone() for p in predictor.parameters()]
    back = cal.as_stored(predictor, cal.stored_tensors(predictor, dtype))
    for old, new in zip(before, back.parameters(), strict=True):
        assert new.dtype == torch.float32
        assert torch.allclose(old, new, rtol=0, atol=float(tolerance * old.abs().max()) + 1e-12)
