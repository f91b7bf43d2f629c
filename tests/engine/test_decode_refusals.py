"""A CPU tensor given to a kernel is one line that says so (what the engine refuses stands in test_decode.py)."""

import pytest
import torch
from predictor_helpers import predict_select

from dejavu_train.kernels.attention.out_projection import project_heads
from dejavu_train.kernels.common.limits import Products
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.dense.dense_rows import dense_rows
from dejavu_train.kernels.formats.matrix import Rows
from dejavu_train.kernels.stages.predictor import Predictor, PredictorWeights

MODULES = ("launch", "checks")


def run_select(x, w):
    predict_select(
        x, Predictor.of(PredictorWeights(w, w.T.contiguous()), 0.0, Selection.empty(8, "cpu"), Products.TILES)
    )


@pytest.mark.parametrize(
    ("run", "part"),
    [
        (run_select, "x: expected a CUDA tensor, got one on cpu"),
        (
            lambda x, w: dense_rows(x, None, Rows(w), None, "none", torch.empty(1, 4)),
            "x: expected a CUDA tensor, got one on",
        ),
        (lambda x, w: project_heads(x, Rows(w), x, x, None, x), "mixed: expected a CUDA tensor, got one on cpu"),
    ],
)
def test_a_cpu_tensor_given_to_a_kernel_is_one_line(run, part, monkeypatch):
    for name in MODULES:  # another test of this process may have asked for the interpreter
        monkeypatch.setattr(f"dejavu_train.kernels.common.{name}.INTERPRET", False)
    with pytest.raises(ValueError) as caught:
        run(torch.randn(1, 8), torch.randn(4, 8))
    assert part in str(caught.value) and "\n" not in str(caught.value)
