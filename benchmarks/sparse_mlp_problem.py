"""Weights, inputs and steps of the sparse-MLP benchmark: several sets of each, every stage runnable alone.

The stages are those of the decode engine, called as it calls them. Random weights of the true shapes. The share of
selected neurons that are active ("live") is set through fc1's bias; thresholds are put on the predictor's own logits so
that the density is exact; every set has its own input and list.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.dense.dense_batch import dense_add, dense_hidden
from kernels.dense.dense_gemv import dense_rows
from kernels.dense.dense_wide import dense_wide
from kernels.mlp.select import PredictorWeights, Selection, predict_reference, predict_select
from kernels.mlp.sparse_fc1 import sparse_fc1
from kernels.mlp.sparse_fc2 import PackedSelection, pack, packed_block, partial_sums, sparse_fc2
from kernels.mlp.sparse_mlp import sparse_mlp
from kernels.mlp.sparse_mlp_batch import (
    BatchActivations,
    fc1_batch,
    fc1_batch_reference,
    fc2_batch,
    fc2_batch_reference,
)

LIVE_BIAS = {0.6: 0.2533, 1.0: 12.0}  # P(N(0, 1) + bias > 0)


class Problem:
    """One shape (n = 4 d neurons) at one density and batch. `step_*` are what `harness.measure` replays."""

    def __init__(self, d: int, rank: int, sets: int, live: float = 0.6, quantize: torch.dtype | None = None,
                 batch: int = 1) -> None:  # fmt: skip
        self.n, self.d, self.rank, self.sets, self.live, self.batch = 4 * d, d, rank, sets, live, batch
        n = self.n
        half: dict[str, Any] = {"dtype": torch.float16, "device": "cuda"}
        torch.manual_seed(0)
        self.fc1 = [torch.empty(n, d, **half).normal_(0, d**-0.5) for _ in range(sets)]
        self.fc2_t = [torch.empty(n, d, **half).normal_(0, n**-0.5) for _ in range(sets)]
        self.b1, self.b2 = torch.full((n,), LIVE_BIAS[live], **half), torch.zeros(d, **half)
        self.ln = LayerNormWeights(torch.ones(d, **half), torch.zeros(d, **half))
        self.predictors = []
        for _ in range(sets):
            down = torch.empty(rank, d, **half).normal_(0, d**-0.5)
            up = torch.empty(n, rank, **half).normal_(0, rank**-0.5)
            predictor = PredictorWeights(down, up, torch.zeros(n, device="cuda"))
            predictor = predictor.quantized(quantize) if quantize else predictor
            self.predictors.append(predictor.with_norm(self.ln))
        self.x = [torch.randn(batch, d, device="cuda") for _ in range(sets)]
        self.normalised = [layer_norm_reference(x, self.ln, torch.float16) for x in self.x]
        self.hidden, self.out = torch.empty(batch, rank, device="cuda"), torch.empty(batch, d, device="cuda")
        self.dense_h = torch.empty(batch, n, device="cuda")
        self.row_state = torch.ones(batch, dtype=torch.int32, device="cuda")
        self.partials = partial_sums(d, "cuda")
        block = packed_block(d) if batch == 1 else 64
        self.selections = [Selection.empty(n, "cuda", block) for _ in range(sets)]
        if batch == 1:
            self.packed = [PackedSelection.empty(n, "cuda") for _ in range(sets)]
        else:
            self.rows = [BatchActivations.empty(n, batch, d, torch.float16, "cuda") for _ in range(sets)]

    def set_density(self, density: float) -> None:
        """Thresholds for exactly round(density * n) neurons, and all lists filled. In a batch it is the density of the
        union; the rows are independent, so each row's own is lower than in a real model with the same union."""
        self.density = density
        count = max(1, round((1 - (1 - density) ** (1 / self.batch)) * self.n)) * self.batch
        self.thresholds = []
        for i in range(self.sets):
            logits = predict_reference(self.x[i], self.predictors[i], self.ln)
            ranked = logits.flatten().sort(descending=True).values
            below = ranked[count] if count < ranked.numel() else ranked[-1] - 1
            self.thresholds.append(((ranked[count - 1] + below) / 2).reshape(1))
        for i in range(self.sets):
            self.step_whole(i)
            self.first(i, False)  # values for fc2 alone
        self.indices = [selection.indices() for selection in self.selections]
        torch.cuda.synchronize()

    # The stages, as the engine calls them
    def predict(self, i: int, pdl: bool) -> None:
        """LayerNorm, both products of the predictor, threshold, list."""
        predict_select(
            self.x[i], self.predictors[i], self.thresholds[i], self.selections[i], ln=self.ln, row_state=self.row_state,
            hidden=self.hidden, normalised_out=self.normalised[i], pdl=pdl,
        )  # fmt: skip

    def pack(self, i: int, pdl: bool) -> None:
        pack(self.selections[i], self.packed[i], pdl=pdl)

    def first(self, i: int, pdl: bool) -> None:
        x, weight, bias = self.normalised[i], self.fc1[i], self.b1
        if self.batch == 1:
            sparse_fc1(x, weight, bias, self.packed[i], early=True, pdl=pdl)
        else:
            fc1_batch(x, weight, bias, self.selections[i], self.rows[i], pdl=pdl)

    def second(self, i: int, pdl: bool) -> None:
        weight, bias, x = self.fc2_t[i], self.b2, self.x[i]
        if self.batch == 1:
            sparse_fc2(self.packed[i], weight, bias, x, self.out, partials=self.partials, pdl=pdl)
        else:
            fc2_batch(self.rows[i], weight, bias, x, self.out, pdl=pdl)

    def both(self, i: int, pdl: bool) -> None:
        """fc1 and fc2, in one grid where the engine does so."""
        if self.batch > 1:
            self.first(i, pdl)
            self.second(i, pdl)
            return
        sparse_mlp(
            self.normalised[i], None, self.fc1[i], self.b1, self.fc2_t[i], self.b2, self.x[i], self.packed[i], self.out,
            partials=self.partials, early="x", pdl=pdl,
        )  # fmt: skip

    # What is timed
    def step_whole(self, i: int, enter: bool = False, inner: bool = True) -> None:
        """LayerNorm, predictor, selection, fc1, fc2, residual. enter: also overlap the step before (a chain)."""
        self.predict(i, enter)
        if self.batch == 1:
            self.pack(i, inner)
        self.both(i, inner)

    def step_dense_cublas(self, i: int) -> None:
        """The two products alone: no bias, ReLU, LayerNorm or residual, which would only slow the baseline."""
        h = F.linear(self.normalised[i], self.fc1[i])
        F.linear(h, self.fc2_t[i].view(self.d, self.n))

    def step_dense_engine(self, i: int) -> None:
        """What the engine runs in place of a sparse MLP, LayerNorm to residual."""
        fc2 = self.fc2_t[i].view(self.d, self.n)
        if self.batch == 1:
            dense_rows(self.x[i], self.ln, self.fc1[i], self.b1, "relu", self.dense_h, pdl=True)
            dense_wide(self.dense_h, fc2, self.b2, self.x[i], self.out, pdl=True)
            return
        h = dense_hidden(self.x[i], self.ln, self.fc1[i], self.b1, "relu", pdl=True)
        dense_add(h, fc2, self.b2, self.x[i], self.out, pdl=True)

    def step_indexing(self, i: int) -> None:
        index = self.indices[i]
        h = F.linear(self.normalised[i], self.fc1[i][index], self.b1[index]).relu_()
        torch.mm(h, self.fc2_t[i][index])

    # Bytes that must be read
    def bytes(self) -> dict[str, int]:
        """fc2 counts live rows only; the predictor counts its stored dtype and scales."""
        selected = sum(index.numel() for index in self.indices) / self.sets
        lives = [int((h != 0).any(0).sum()) for h in (self._activations(i) for i in range(self.sets))]
        p = self.predictors[0]
        stored = sum(t.numel() * t.element_size() for t in (p.down, p.up, p.bias, p.down_scale, p.up_scale)
                     if t is not None)  # fmt: skip
        fc1, fc2 = int(selected * self.d * 2), int(sum(lives) / self.sets * self.d * 2)
        return {"predictor": stored, "fc1": fc1, "fc2": fc2, "whole": stored + fc1 + fc2, "dense": 4 * self.n * self.d}

    def _activations(self, i: int) -> Tensor:
        """(B, n) of the reference over the set's own selection."""
        mask = self.selections[i].to_mask(self.batch)
        x = layer_norm_reference(self.x[i], self.ln, torch.float16)
        return fc1_batch_reference(x, self.fc1[i], self.b1, mask)

    def check(self, i: int = 0) -> float:
        """The largest difference from the reference over the set's own selection, relative to its largest value."""
        self.out.fill_(float("nan"))
        self.step_whole(i)
        expected = fc2_batch_reference(self._activations(i), self.fc2_t[i], self.b2, self.x[i])
        error = float((self.out - expected).abs().max() / expected.abs().max())
        if not error < 5e-3:
            raise AssertionError(f"sparse MLP differs from its reference by {error:.2e} at {self.n} x {self.d}")
        return error
