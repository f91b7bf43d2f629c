"""A format that the library does not have, rows of fp8 with a scale each: one class here, and no stage is touched."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from dejavu_train.kernels.common.selection import PackedSelection, Selection
from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights
from dejavu_train.kernels.mlp.pack import pack
from dejavu_train.kernels.stages import listed_numbers
from dejavu_train.kernels.stages import mlp as stage
from dejavu_train.kernels.stages.listed_numbers import row_scale


@dataclass(frozen=True)
class Fp8Rows:
    """A matrix (n, d): codes (n, d) fp8 times scales (n) fp32."""

    codes: Tensor
    scales: Tensor
    format: str = "fp8"

    @classmethod
    def of(cls, numbers: Tensor) -> "Fp8Rows":
        scales = numbers.abs().amax(1) / 448
        return cls((numbers / scales[:, None]).to(torch.float8_e4m3fn), scales)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def parts(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.codes.to(dtype) * self.scales[:, None].to(dtype)


@pytest.mark.parametrize("hidden", [None, Hidden("relu"), Hidden("silu")], ids=str)
def test_rows_of_fp8_go_through_the_mlp(device, monkeypatch, hidden):
    monkeypatch.setitem(stage.LAUNCHES, "fp8", partial(listed_numbers.launch, factor=row_scale))
    n, d = 45, 96
    torch.manual_seed(0)
    selection = Selection.from_mask(torch.rand(1, n, device=device) < 0.5, 16)
    rows = PackedSelection.empty(n, device)
    pack(selection, rows)
    up, down, gate = (
        Linear(Fp8Rows.of(torch.randn(n, d, device=device) * d**-0.5), torch.randn(size, device=device))
        for size in (n, d, n)
    )
    weights = MlpWeights(up, down) if hidden is None else MlpWeights(up, down, gate, hidden)
    x, residual = torch.randn(1, d, device=device).half(), torch.randn(1, d, device=device)
    out = torch.full((1, d), float("nan"), device=device)
    stage.mlp(x, None, weights, residual, rows, out)
    h = torch.where(selection.to_mask(1), stage.hidden_reference(x.double(), weights), 0.0)
    want = h @ down.weight.dense(torch.float64) + down.bias.double() + residual
    torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-4)
