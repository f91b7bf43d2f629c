"""Activations in the interpreter against float64."""

import pytest
import torch
import triton
import triton.language as tl

from dejavu_train.kernels.common.activation import ACTIVATIONS, activation_of, activation_reference

EDGES = (0.0, -0.0, 1e-8, 300.0, -300.0, 6e4, -6e4, float("inf"), float("nan"))


@triton.jit
def _apply_kernel(x, y, activation: tl.constexpr, THRESHOLD: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, activation(tl.load(x + at), THRESHOLD))
    tl.store(y + N, activation(tl.load(x), THRESHOLD))  # of a number, as of a tile


@pytest.mark.parametrize("name", [*ACTIVATIONS, "fatrelu"])
def test_equals_the_reference(device, name):
    name, threshold = ("relu", 0.75) if name == "fatrelu" else (name, 0.0)
    x = torch.cat((torch.tensor(EDGES), torch.linspace(-8, 8, 64 - len(EDGES)))).to(device)
    y = torch.empty(65, device=device)
    _apply_kernel[(1,)](x, y, activation_of(name, threshold), threshold, N=64)
    want = activation_reference(x.double(), name, threshold)
    torch.testing.assert_close(y[:64].double(), want, atol=2e-6, rtol=2e-6, equal_nan=True)
    assert y[64] == y[0]
    if name == "relu" and threshold:
        assert (y[:64] == 0).sum() > (x <= 0).sum()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="expected one of none, relu, relu2, gelu, gelu_tanh, silu, got 'tanh'"):
        activation_of("tanh")
    for name, threshold in (("relu", -1.0), ("silu", 0.5)):
        with pytest.raises(ValueError, match="expected a threshold of relu or relu2"):
            activation_of(name, threshold)
