"""Weights, inputs and steps of the sparse-MLP benchmark: several sets of each, every part runnable alone.

Random weights of the true shapes. The share of selected neurons that are active ("live") is set through fc1's bias;
thresholds are put on the predictor's own logits so that the density is exact; every set has its own input and list.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.gather_gemv import LiveRows, gather_gemv, gather_gemv_reference
from kernels.launch import (
    GatherSettings,
    ScatterSettings,
    SelectGatherSettings,
    gather_settings,
    select_gather_settings,
)
from kernels.layer_norm import LayerNormWeights, layer_norm, layer_norm_reference
from kernels.scatter_gemv import ScatterScratch, scatter_gemv, scatter_gemv_reference
from kernels.select import PredictorWeights, Selection, select_rows
from kernels.select_gather import select_gather, select_gather_rows

SHAPES = {"1.3b": 2048, "6.7b": 4096, "13b": 5120, "30b": 7168, "66b": 9216, "175b": 12288}
LIVE_BIAS = {0.6: 0.2533, 1.0: 12.0}  # P(N(0, 1) + bias > 0)


class Problem:
    """One shape (n = 4 d neurons) at one density. `step_*` are what `harness.measure` replays."""

    def __init__(self, d: int, rank: int, sets: int, live: float = 0.6, quantize: torch.dtype | None = None,
                 batch: int = 1, n: int | None = None, block: int = 64) -> None:  # fmt: skip
        self.n, self.d, self.rank, self.sets, self.live, self.batch = n or 4 * d, d, rank, sets, live, batch
        n = self.n
        half: dict[str, Any] = {"dtype": torch.float16, "device": "cuda"}
        torch.manual_seed(0)
        self.fc1 = [torch.empty(n, d, **half).normal_(0, d**-0.5) for _ in range(sets)]
        self.fc2_t = [torch.empty(n, d, **half).normal_(0, n**-0.5) for _ in range(sets)]
        self.b1 = torch.full((n,), LIVE_BIAS[live], **half)
        self.b2 = torch.zeros(d, **half)
        self.ln = LayerNormWeights(torch.ones(d, **half), torch.zeros(d, **half))
        self.predictors = []
        for _ in range(sets):
            down = torch.empty(rank, d, **half).normal_(0, d**-0.5)
            up = torch.empty(n, rank, **half).normal_(0, rank**-0.5)
            predictor = PredictorWeights(down, up, torch.zeros(n, device="cuda"))
            self.predictors.append(predictor.quantized(quantize) if quantize else predictor)
        self.x = [torch.randn(batch, d, device="cuda") for _ in range(sets)]
        self.normalised = [layer_norm_reference(x, self.ln, torch.float16) for x in self.x]
        self.hidden = torch.empty(batch, rank, device="cuda")
        self.out = torch.empty(batch, d, device="cuda")
        self.scratch = ScatterScratch.empty(batch, d, "cuda")
        self.block: int = block
        self.select_warps: int | None = None
        self.a_settings: GatherSettings | None = None
        self.norm_settings: GatherSettings | None = None
        self.separate_norm = False
        self.fc1_settings = gather_settings(d, batch, False, n)
        self.fc2_settings: ScatterSettings | None = None
        self.fused_fc2_settings: ScatterSettings | None = None
        self.atomic_fc2_settings: ScatterSettings | None = None
        self.fused_settings: SelectGatherSettings = select_gather_settings(d)
        self.make_lists()

    def use_settings(self, found: dict[str, Any]) -> None:
        """Settings of a sweep (one width of its JSON) in place of the committed table."""
        if "fc1" in found:
            self.fc1_settings = GatherSettings(**found["fc1"])
        if "down" in found:
            self.a_settings = GatherSettings(**found["down"])
        if "fused" in found:
            self.fused_settings = SelectGatherSettings(**found["fused"])
        for name, field in (("fc2", "fused_fc2_settings"), ("fc2a", "atomic_fc2_settings"), ("fc2l", "fc2_settings")):
            if name in found:
                setattr(self, field, ScatterSettings(**found[name]))
        if "norm" in found:
            self.norm_settings = GatherSettings(**found["norm"])
        self.separate_norm = found["separate_norm"]
        self.block, self.select_warps = found["select"]
        self.make_lists()

    def make_lists(self) -> None:
        """Buffers whose shape depends on the settings."""
        self.selections = [Selection.empty(self.n, "cuda", self.block) for _ in range(self.sets)]
        self.lives = [LiveRows.empty(self.n, self.batch, "cuda", self.fc1_settings.programs) for _ in range(self.sets)]
        block = self.fused_settings.block
        self.fused_lives = [select_gather_rows(self.n, self.d, "cuda", block) for _ in range(self.sets)]

    def set_density(self, density: float) -> None:
        """Thresholds for exactly round(density * n) neurons, and all lists filled. In a batch it is the density of the
        union; the rows are independent, so each row's own is lower than in a real model with the same union."""
        self.density = density
        count = max(1, round((1 - (1 - density) ** (1 / self.batch)) * self.n))
        logits = torch.empty(self.batch, self.n, device="cuda")
        self.thresholds = []
        for i in range(self.sets):
            self.down(i, False)
            select_rows(self.hidden, self.predictors[i], 0.0, self.selections[i], logits_out=logits)
            ranked = logits.flatten().sort(descending=True).values
            last = count * self.batch
            below = ranked[last] if last < ranked.numel() else ranked[-1] - 1
            self.thresholds.append(((ranked[last - 1] + below) / 2).reshape(1))
        self.fill()

    def fill(self) -> None:
        for i in range(self.sets):
            self.step_whole(i)
            if self.batch == 1:
                self.step_fused(i)
        self.indices = [selection.indices() for selection in self.selections]
        torch.cuda.synchronize()

    # The four stages
    def down_normed(self, i: int, pdl: bool) -> None:
        """LayerNorm as a kernel of its own, so that every program reads d 16-bit values and not x, weight and bias."""
        p = self.predictors[i]
        layer_norm(self.x[i], self.ln, self.normalised[i], pdl)
        gather_gemv(self.normalised[i], p.down, None, None, "none", self.hidden, None, p.down_scale, pdl=True,
                    settings=self.norm_settings)  # fmt: skip

    def down(self, i: int, pdl: bool) -> None:
        if self.separate_norm:
            self.down_normed(i, pdl)
            return
        p = self.predictors[i]
        gather_gemv(self.x[i], p.down, None, None, "none", self.hidden, self.ln, p.down_scale,
                    normalised_out=self.normalised[i], pdl=pdl, settings=self.a_settings)  # fmt: skip

    def select(self, i: int, pdl: bool) -> None:
        select_rows(self.hidden, self.predictors[i], self.thresholds[i], self.selections[i], pdl=pdl,
                    warps=self.select_warps)  # fmt: skip

    def first(self, i: int, pdl: bool) -> None:
        gather_gemv(self.normalised[i], self.fc1[i], self.b1, self.selections[i], "relu", self.lives[i], pdl=pdl,
                    settings=self.fc1_settings)  # fmt: skip

    def second(self, i: int, pdl: bool) -> None:
        scatter_gemv(self.lives[i], self.fc2_t[i], self.b2, self.x[i], None, self.out, scratch=self.scratch, pdl=pdl,
                     settings=self.fc2_settings)  # fmt: skip

    def select_first(self, i: int, pdl: bool) -> None:
        """Select and fc1 in one kernel."""
        select_gather(self.hidden, self.predictors[i], self.thresholds[i], self.normalised[i], self.fc1[i], self.b1,
                      self.fused_lives[i], pdl=pdl, settings=self.fused_settings)  # fmt: skip

    def second_fused(self, i: int, pdl: bool) -> None:
        scatter_gemv(self.fused_lives[i], self.fc2_t[i], self.b2, self.x[i], None, self.out, scratch=self.scratch,
                     pdl=pdl, settings=self.fused_fc2_settings)  # fmt: skip

    def second_atomic(self, i: int, pdl: bool) -> None:
        scatter_gemv(self.fused_lives[i], self.fc2_t[i], self.b2, self.out, None, self.out, scratch=self.scratch,
                     pdl=pdl, settings=self.atomic_fc2_settings, deterministic=False)  # fmt: skip

    # What is timed
    def step_atomic(self, i: int) -> None:
        self.down(i, False)
        self.select_first(i, True)
        self.second_atomic(i, True)

    def step_fused(self, i: int, enter: bool = False, inner: bool = True) -> None:
        """The whole in three kernels."""
        self.down(i, enter)
        self.select_first(i, inner)
        self.second_fused(i, inner)

    def step_whole(self, i: int, enter: bool = False, inner: bool = True) -> None:
        """LayerNorm, predictor, selection, fc1, fc2, residual. enter: also overlap the step before (a chain)."""
        self.down(i, enter)
        self.select(i, inner)
        self.first(i, inner)
        self.second(i, inner)

    def step_predict(self, i: int) -> None:
        self.down(i, False)
        self.select(i, True)

    def step_mlp(self, i: int) -> None:
        self.first(i, False)
        self.second(i, True)

    def step_mlp_atomic(self, i: int) -> None:
        self.first(i, False)
        scatter_gemv(self.lives[i], self.fc2_t[i], self.b2, self.out, None, self.out, scratch=self.scratch, pdl=True,
                     settings=self.fc2_settings, deterministic=False)  # fmt: skip

    def step_dense_cublas(self, i: int) -> None:
        """The two products alone: no bias, ReLU, LayerNorm or residual, which would only slow the baseline."""
        h = F.linear(self.normalised[i], self.fc1[i])
        F.linear(h, self.fc2_t[i].view(self.d, self.n))

    def step_indexing(self, i: int) -> None:
        index = self.indices[i]
        h = F.linear(self.normalised[i], self.fc1[i][index], self.b1[index]).relu_()
        torch.mm(h, self.fc2_t[i][index])

    def step_dense_ours(self, i: int) -> None:
        gather_gemv(self.x[i], self.fc1[i], self.b1, None, "relu", self._dense_h(), self.ln, pdl=False)
        scatter_gemv(self._dense_h(), self.fc2_t[i], self.b2, self.x[i], None, self.out, scratch=self.scratch, pdl=True)

    def _dense_h(self) -> Tensor:
        if not hasattr(self, "h"):
            self.h = torch.empty(self.batch, self.n, dtype=torch.float16, device="cuda")
        return self.h

    # Bytes that must be read
    def bytes(self) -> dict[str, int]:
        """fc2 counts live rows only; the predictor counts its stored dtype and scales."""
        selected = sum(index.numel() for index in self.indices) / self.sets
        live = sum(int(live.counts.sum()) for live in self.lives) / self.sets
        p = self.predictors[0]
        stored = sum(t.numel() * t.element_size() for t in (p.down, p.up, p.bias, p.down_scale, p.up_scale)
                        if t is not None)  # fmt: skip
        fc1, fc2 = int(selected * self.d * 2), int(live * self.d * 2)
        a = p.down.numel() * p.down.element_size()
        return {"predictor": stored, "down": a, "select": stored - a, "fc1": fc1, "fc2": fc2,
                "fused": stored - a + fc1, "whole": stored + fc1 + fc2,
                "dense": 4 * self.n * self.d}  # fmt: skip

    def check(self, i: int = 0) -> float:
        """The largest difference from the reference over the sets' own selection, relative to its largest value."""
        if self.batch == 1:
            self.step_fused(i)
            fused = self.out.clone()
        self.step_whole(i)
        mask = self.selections[i].to_mask(self.batch)
        h = gather_gemv_reference(layer_norm_reference(self.x[i], self.ln, torch.float16), self.fc1[i], self.b1, mask,
                                  "relu")  # fmt: skip
        want = scatter_gemv_reference(h, self.fc2_t[i], self.b2, self.x[i])
        error = float((self.out - want).abs().max() / want.abs().max())
        if self.batch == 1:
            error = max(error, float((fused - want).abs().max() / want.abs().max()))
        if not error < 5e-3:
            raise AssertionError(f"sparse MLP differs from its reference by {error:.2e} at {self.n} x {self.d}")
        return error


Step = Callable[[int], None]
