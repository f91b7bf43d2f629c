"""One attention block of a true OPT shape: sets of weights, caches and selections, and its stages as steps by set.

A selected head must first fill the K/V it skipped. `gaps`: a head that each token selects with the density as its rate
lacks a geometric number of positions, 1 / density on average; real heads repeat their choice more, so this is the worse
side. Without gaps only the token's own K/V is computed. The stages advance the watermarks: `reset` puts them back.
"""

from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.decode_problem import SHAPES
from dejavu_train.models.opt import OPTShape
from kernels.attention import flash_decode, head_select, out_projection, qkv
from kernels.common.layer_norm import LayerNormWeights
from kernels.dense import dense_gemv, qkv_dense

SETS = 24  # past the L2, and enough that what a graph takes to start is shared out
ALL_SHAPES = SHAPES | {"175b": OPTShape(12288, 49152, 96, 96, 50272, 2048)}


class Problem:
    """density: selected heads of each row; context: positions before the token; `gaps` may be switched between runs."""

    def __init__(self, shape: OPTShape, context: int, density: float, gaps: bool = False, batch: int = 1) -> None:
        d, h, hd = shape.d_model, shape.n_heads, shape.head_dim
        self.shape, self.context, self.density, self.batch = shape, context, density, batch
        self.sets = SETS
        self.picked = max(1, round(density * h))

        def normal(*size: int) -> torch.Tensor:
            return torch.empty(*size, dtype=torch.float16, device="cuda").normal_(0, 0.02)

        self.gaps = gaps
        missing = 1 + torch.distributions.Geometric(self.picked / h).sample((self.sets, batch, h))
        self._filled = torch.full((self.sets, batch, h), context, dtype=torch.int32, device="cuda")
        self._lacking = (context + 1 - missing.to("cuda")).clamp_min(0).to(torch.int32)
        self.watermark = self.first.clone()

        def one(i: int) -> SimpleNamespace:
            mask = torch.zeros(batch, h, dtype=torch.bool, device="cuda")
            for row in mask:
                row[torch.randperm(h, device="cuda")[: self.picked]] = True
            selection = head_select.head_selection(h, "cuda")
            selection.set_mask(mask)
            # The predictor runs, and decides as the given selection does where one row asks.
            bias = torch.where(mask.any(0), 100.0, -100.0)
            return SimpleNamespace(
                qkv=normal(h, 3, hd, d), qkv_bias=normal(h, 3, hd), out=normal(d, d), out_bias=normal(d),
                predictor=normal(h, d), bias=bias, selection=selection, own=head_select.head_selection(h, "cuda"),
                k=normal(batch, h, context + 1, hd), v=normal(batch, h, context + 1, hd),
                attn_in=normal(batch, context + 1, d), watermark=self.watermark[i], mask=mask,
                ids=mask.any(0).nonzero().flatten(),
            )  # fmt: skip

        self.data = [one(i) for i in range(self.sets)]
        self.union = sum(len(s.ids) for s in self.data) / (self.sets * h)
        self.ln = LayerNormWeights(torch.ones(d, dtype=torch.float16, device="cuda"), normal(d))
        self.x = torch.randn(batch, d, device="cuda")
        self.y = torch.empty(batch, d, device="cuda")
        self.half = normal(batch, d)
        self.threshold = torch.zeros(1, device="cuda")
        self.position = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.row_state = torch.ones(batch, dtype=torch.int32, device="cuda")
        self.q = torch.empty(batch, h, hd, device="cuda")
        self.mixed = torch.randn(batch, d, device="cuda")
        self.scratch = flash_decode.AttentionScratch.empty(batch, h, hd, context + 1, "cuda")

    @property
    def first(self) -> torch.Tensor:
        """(sets, B, h) int32, the watermarks before the token."""
        return self._lacking if self.gaps else self._filled

    def reset(self) -> None:
        self.watermark.copy_(self.first)

    def select(self, i: int, pdl: bool = True) -> None:
        s = self.data[i]
        head_select.head_select(
            self.x, self.ln, s.predictor, s.bias, self.threshold, self.position, self.row_state, s.attn_in, s.own, pdl
        )

    def project(self, i: int, pdl: bool = True, settings: qkv.TileSettings | None = None) -> None:
        s = self.data[i]
        qkv.qkv(s.attn_in, s.qkv, s.qkv_bias, s.selection, self.position, s.watermark, None, self.q, s.k, s.v,
                "backfill", pdl, settings)  # fmt: skip

    def attend(
        self, i: int, pdl: bool = True, dense: bool = False, positions: int | None = None, warps: int | None = None
    ) -> None:
        s = self.data[i]
        flash_decode.flash_decode(self.q, s.k, s.v, None if dense else s.selection, self.position,
                                  None if dense else s.watermark, None, self.mixed, self.scratch, pdl,
                                  positions=positions, warps=warps)  # fmt: skip

    def out(self, i: int, pdl: bool = True, dense: bool = False, settings: Any = None) -> None:
        s = self.data[i]
        out_projection.project_heads(self.mixed, s.out, s.out_bias, self.x, None if dense else s.selection,
                                     self.y, pdl, settings)  # fmt: skip

    def projections(self, i: int) -> None:
        self.project(i)
        self.out(i)

    def block(self, i: int) -> None:
        self.select(i)
        self.project(i)
        self.attend(i)
        self.out(i)

    def dense_project(self, i: int, pdl: bool = True, settings: dense_gemv.RowSettings | None = None) -> None:
        s = self.data[i]
        qkv_dense.qkv_dense(self.x, self.ln, s.qkv, s.qkv_bias, self.position, self.q, s.k, s.v, pdl, settings)

    def dense_block(self, i: int) -> None:
        self.dense_project(i)
        self.attend(i, dense=True)
        self.out(i, dense=True)

    def cublas(self, i: int) -> None:
        s = self.data[i]
        torch.nn.functional.linear(self.half, s.qkv.view(-1, self.shape.d_model))
        torch.nn.functional.linear(self.half, s.out)

    def indexing(self, i: int) -> None:
        """The list given; rows and columns copied by torch, then multiplied."""
        s = self.data[i]
        torch.nn.functional.linear(self.half, s.qkv[s.ids].view(-1, self.shape.d_model))
        columns = s.out.view(self.shape.d_model, self.shape.n_heads, -1)[:, s.ids].reshape(self.shape.d_model, -1)
        torch.nn.functional.linear(self.half[:, : columns.shape[1]], columns)

    def check(self) -> None:
        """The block of set 0 against the plain-torch references, at the tolerance of fp16.

        Raises:
            AssertionError: they differ.
        """
        s = self.data[0]
        self.reset()
        self.block(0)
        got = self.y.clone()
        k, v = s.k.clone(), s.v.clone()
        mark, q, mixed, y = self.first[0].clone(), self.q.clone(), self.mixed.clone(), self.y.clone()
        qkv.qkv_reference(s.attn_in, s.qkv, s.qkv_bias, s.selection, self.position, mark, None, q, k, v)
        flash_decode.flash_decode_reference(
            q, k, v, s.selection, self.position, mark, None, mixed, self.scratch, False
        )  # fmt: skip
        out_projection.project_heads_reference(mixed, s.out, s.out_bias, self.x, s.selection, y, False)
        torch.testing.assert_close(got, y, atol=2e-2, rtol=2e-2)
        self.reset()

    def bytes(self) -> dict[str, int]:
        """What must be read: rows of the union, K/V of each row's own heads (the backlog's inputs stay in the L2)."""
        d, hd = self.shape.d_model, self.shape.head_dim
        rows = round(4 * self.union * self.shape.n_heads * hd * d * 2)
        cache = self.batch * self.picked * hd * 2 * 2 * (self.context + 1)
        predictor = self.shape.n_heads * d * 2
        return {"projections": rows, "qkv": rows * 3 // 4, "out": rows // 4, "attention": cache, "select": predictor,
                "block": rows + cache + predictor}  # fmt: skip
