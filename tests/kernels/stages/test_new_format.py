"""A format that the library does not have, rows of fp8 with a scale each: all of it is here, and no stage is touched.

Its scale is a function for the MLP, and a walk for products of rows.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.launch import load_vector, wait_for_predecessor
from dejavu_train.kernels.common.layer_norm import (
    LayerNormWeights,
    NormKind,
    layer_norm_reference,
    norm_vectors,
    normalised_pieces,
)
from dejavu_train.kernels.common.selection import PackedSelection, Selection
from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights
from dejavu_train.kernels.mlp.pack import pack
from dejavu_train.kernels.stages import listed_numbers
from dejavu_train.kernels.stages import mlp as stage
from dejavu_train.kernels.stages.listed import keyed
from dejavu_train.kernels.stages.number_rows import row_pieces, row_product
from dejavu_train.kernels.stages.rows import launch_walk
from dejavu_train.kernels.stages.sink import LinearSink, QkvSink, qkv_sink_reference


@triton.jit
def row_scale(parts, row):
    return tl.load(parts[1] + row)


@triton.jit
def _walk_scaled(x, norm, weight, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr):
    c = tl.arange(0, how.block)
    wait_for_predecessor(PDL)
    xs = load_vector(x, c, how.d, how.block)
    gains, shifts = norm_vectors(norm, c, how.d, how.block)
    n = normalised_pieces(xs, gains, shifts, norm, c, how.d, how.block, tl.float32)
    for begin in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        line = tl.cast(begin, tl.int32)
        ahead = sink.ahead(sink, line, 0, line < n_rows, line < n_rows, n_rows)
        w = row_pieces(weight, line, n_rows, c, how.d, how.block, 1)
        product = tl.sum(row_product(w, n, 0, how.d, how.block), 0) * tl.load(scales + line)
        sink.put(sink, product, ahead, line, 0, line < n_rows, n_rows)


@keyed
class ScaledWalk(NamedTuple):
    d: int
    block: int
    walk: Any = _walk_scaled


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


def test_rows_of_fp8_are_multiplied_with_a_norm_and_any_sink(device):
    n_heads, head_dim, d = 3, 8, 40
    torch.manual_seed(0)
    n = n_heads * 3 * head_dim
    rows, bias = Fp8Rows.of(torch.randn(n, d, device=device)), torch.randn(n, device=device)
    x, ln = (
        torch.randn(1, d, device=device),
        LayerNormWeights(torch.randn(d, device=device), None, kind=NormKind.RMS_NORM),
    )
    products = layer_norm_reference(x.double(), ln, torch.float64) @ rows.dense(torch.float64).T
    y = torch.full((1, n), float("nan"), device=device)

    def cache():
        k, v = torch.full((2, 1, n_heads, 5, head_dim), float("nan"), device=device)
        q, position = torch.full((1, n_heads, head_dim), float("nan"), device=device), torch.tensor([3], device=device)
        return HeadStep(q, KvCache(k, v, k[:, 0, :0]), position.int())

    got, want = cache(), cache()
    for sink in (LinearSink(y, bias), QkvSink.of(got, bias)):
        launch_walk(2, x, ln.args(), rows.parts(), sink, None, n, ScaledWalk(d, 32), False)
    torch.testing.assert_close(y.double(), products + bias, atol=1e-4, rtol=1e-4)
    qkv_sink_reference(products.float(), bias.view(n_heads, 3, head_dim), want)
    for a, b in ((got.q, want.q), (got.cache.k, want.cache.k), (got.cache.v, want.cache.v)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, equal_nan=True)
