"""A dense decoding step whose products are PyTorch's int4 kernel, in the same graph with the rest of our step.

`torch._weight_int4pack_mm` takes bf16 and groups of 128 along inputs, with a scale and a zero point each. Our LayerNorm
kernel writes its input, our kernels add biases and residuals behind it; attention, LM head and the choice of a token
are ours. Codes are random. One row.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from dejavu_train.engine.weights import CODE_SIZE, DecodeWeights
from dejavu_train.models.opt import OPTShape
from kernels.common.launch import use_pdl
from kernels.common.layer_norm import LayerNormWeights, layer_norm
from kernels.dense import dense_batch, dense_gemv

RIVAL = "torch-int4"
GROUP = 128
STD = 0.02


@dataclass(frozen=True)
class RivalRows:
    """A matrix of `shape`, its last number the inputs, as PyTorch's int4 kernel reads it."""

    codes: Tensor
    scales: Tensor
    shape: tuple[int, ...]

    @classmethod
    def random(cls, *shape: int) -> "RivalRows":
        d = shape[-1]
        n = torch.Size(shape[:-1]).numel()
        codes = torch.randint(0, 256, (n, d // 2), dtype=torch.uint8, device="cuda")
        scales = torch.full((d // GROUP, n, 2), STD / CODE_SIZE, dtype=torch.bfloat16, device="cuda")
        scales[..., 1] = 0
        return cls(torch._convert_weight_to_int4pack(codes, 8), scales, shape)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def times(self, x: Tensor) -> Tensor:
        """x (1, d) bf16 -> (1, n) bf16."""
        return torch._weight_int4pack_mm(x, self.codes, GROUP, self.scales)


def rival_weights(shape: OPTShape) -> DecodeWeights:
    """Random layers whose matrices are the rival's."""
    d, ffn, h, e = shape.d_model, shape.d_ffn, shape.n_heads, shape.head_dim
    made = DecodeWeights.random(replace(shape, n_layers=1), torch.float16, "cuda", packed=True)
    (template,) = made.layers
    layers: list[Any] = [
        replace(
            template,
            qkv=RivalRows.random(h, 3, e, d),
            out=RivalRows.random(d, h * e),
            fc1=RivalRows.random(ffn, d),
            fc2=RivalRows.random(d, ffn),
            fc2_transposed=False,
        )
        for _ in range(shape.n_layers)
    ]
    return replace(made, shape=shape, layers=layers)


def rival_operations() -> dict[str, Any]:
    """The operations of a dense step of one row that differ from ours, by name."""
    return {"qkv_dense": qkv_dense, "project_heads": project_heads, "dense_rows": dense_rows, "dense_wide": dense_wide}


def _normalised(x: Tensor, ln: LayerNormWeights, pdl: bool) -> Tensor:
    n = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    layer_norm(x, ln, n, pdl)
    return n


def qkv_dense(x, ln, weight, bias, position, q, k_cache, v_cache, pdl=False) -> None:  # type: ignore[no-untyped-def]
    """See `kernels.dense.qkv_dense.qkv_dense`."""
    rows = weight.times(_normalised(x, ln, pdl))
    pdl = use_pdl(pdl, x.device)
    _, n_heads, head_dim = q.shape
    dense_batch._split_kernel[(1, triton.cdiv(rows.shape[1], dense_batch.BLOCK))](
        rows, bias, position, q, k_cache, v_cache, k_cache.shape[2], H=n_heads, HEAD_DIM=head_dim,
        BLOCK=dense_batch.BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def _added(product: Tensor, bias: Tensor, residual: Tensor, out: Tensor, pdl: bool) -> None:
    pdl = use_pdl(pdl, out.device)
    d = out.shape[1]
    dense_batch._add_kernel[(1, triton.cdiv(d, dense_batch.BLOCK))](
        product, bias, residual, out, D=d, BLOCK=dense_batch.BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )


def project_heads(mixed, weight, bias, residual, selection, out, pdl=False) -> None:  # type: ignore[no-untyped-def]
    """See `kernels.attention.out_projection.project_heads`, all heads."""
    _added(weight.times(mixed.bfloat16()), bias, residual, out, pdl)


def dense_rows(x, ln, weight, bias, activation, out, pdl=False) -> None:  # type: ignore[no-untyped-def]
    """See `kernels.dense.dense_gemv.dense_rows`; the LM head is ours."""
    if isinstance(weight, RivalRows):
        out.copy_((weight.times(_normalised(x, ln, pdl)) + bias).relu())
    else:
        dense_gemv.dense_rows(x, ln, weight, bias, activation, out, pdl)


def dense_wide(hidden, weight, bias, residual, out, pdl=False) -> None:  # type: ignore[no-untyped-def]
    """See `kernels.dense.dense_wide.dense_wide`."""
    _added(weight.times(hidden.bfloat16()), bias, residual, out, pdl)
