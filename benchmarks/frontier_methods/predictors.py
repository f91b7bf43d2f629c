"""Low-rank predictors of all layers in one module, with weights as they would be stored: fp16, fp8, int8, int4.

Letters: L layers, d model width, r rank, n units.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.frontier_methods.plain_opt import PlainOPT, Sites
from benchmarks.frontier_methods.sets import Batch
from dejavu_train.errors import UserError
from dejavu_train.predictors.low_rank import LowRankPredictor, svd_init

BITS = {"fp32": 32, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4, "int3": 3, "int2": 2}


def quantised(weight: Tensor, kind: str) -> Tensor:
    """``weight`` (..., rows, columns) as it reads back from ``kind``, with one scale per row; gradients pass through.

    Integers are symmetric; the scale of int4 and below minimises the squared error over a few clipping points. A kind
    such as ``int4/32`` has a scale for every 32 columns of a row instead.
    """
    if kind == "fp32":
        return weight
    if "/" in kind:
        plain, group = grouped_kind(kind)
        columns = weight.shape[-1]
        parts = F.pad(weight, (0, -columns % group)).unflatten(-1, (-1, group))
        return quantised(parts, plain).flatten(-2)[..., :columns]
    with torch.no_grad():
        if kind == "fp16":
            back = weight.half().to(weight.dtype)
        elif kind == "fp8":
            scale = weight.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 448.0
            back = (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
        else:
            top = 2 ** (BITS[kind] - 1) - 1
            peak = weight.abs().amax(-1, keepdim=True).clamp_min(1e-8)
            back, best = weight, torch.full_like(peak, torch.inf)
            for clip in (1.0,) if BITS[kind] == 8 else (1.0, 0.88, 0.76, 0.64, 0.52):
                scale = (peak * clip / top).half().to(weight.dtype).clamp_min(1e-7)
                tried = (weight / scale).round().clamp(-top, top) * scale
                error = (tried - weight).square().sum(-1, keepdim=True)
                back, best = torch.where(error < best, tried, back), torch.minimum(error, best)
    return weight + (back - weight).detach()


def grouped_kind(kind: str) -> tuple[str, int]:
    """``int4/32`` -> (``int4``, 32)."""
    plain, _, group = kind.partition("/")
    return plain, int(group)


def stored_bytes(rows: int, columns: int, kind: str) -> float:
    """Bytes of a matrix with one fp16 scale per row or group (none for fp16)."""
    if "/" in kind:
        plain, group = grouped_kind(kind)
        groups = -(-columns // group)
        return rows * columns * BITS[plain] / 8 + 2 * rows * groups
    return rows * columns * BITS[kind] / 8 + (0 if kind in ("fp16", "fp32") else 2 * rows)


class Predictors(nn.Module):
    """One predictor per layer for one target.

    Args:
        model: whose layers they select from.
        target: ``mlp`` or ``heads``.
        ranks: one per layer.
        kind: how weights are stored.
        distance: half-blocks between the site that is read and the target's own.
        nonlinearity: ``none`` or ``relu``.
    """

    def __init__(
        self,
        model: PlainOPT,
        target: str,
        ranks: Sequence[int],
        kind: str = "fp16",
        distance: int = 0,
        nonlinearity: str = "none",
    ) -> None:
        super().__init__()
        if max(ranks) > model.d:
            raise UserError(f"predictor rank must lie between 1 and the input width {model.d}, got {max(ranks)}")
        self.target, self.kind, self.ranks, self.nonlinearity = target, kind, list(ranks), nonlinearity
        self.d, self.n = model.d, model.f if target == "mlp" else model.n_heads
        self.sites = [site_at(target, layer, distance) for layer in range(model.n_layers)]
        self.tables: list[Tensor | None] = [None] * model.n_layers
        self.ids = torch.empty(0)
        n_layers, rank = model.n_layers, max(ranks)
        self.down = nn.Parameter(torch.randn(n_layers, rank, self.d) * self.d**-0.5)
        self.up = nn.Parameter(torch.randn(n_layers, self.n, rank) * rank**-0.5)
        self.bias = nn.Parameter(torch.zeros(n_layers, self.n))
        used = torch.arange(rank)[None] < torch.tensor(self.ranks)[:, None]
        self.register_buffer("used", used.float())  # (L, r): ranks a layer does not have stay zero
        self.to(model.device)

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """down (L, r, d), up (L, n, r), bias (L, n) as stored."""
        used: Tensor = self.used  # type: ignore[assignment]
        down = quantised(self.down * used[:, :, None], self.kind)
        up = quantised(self.up * used[:, None, :], self.kind)
        return down, up, quantised(self.bias, "fp32" if self.kind == "fp32" else "fp16")

    def logits(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """(L, N, d) -> (L, N, n); ``ids`` (N) the tokens, when there are tables."""
        down, up, bias = self.weights()
        hidden = x @ down.transpose(1, 2)
        if self.nonlinearity == "relu":
            hidden = F.relu(hidden)
        out = torch.baddbmm(bias[:, None], hidden, up.transpose(1, 2))
        if ids is not None and any(table is not None for table in self.tables):
            none = out.new_zeros(1, self.n)
            out = out + torch.stack(
                [(none if table is None else table[ids]).expand_as(out[0]) for table in self.tables]
            )
        return out

    def begin(self, part: Batch, model: PlainOPT) -> None:
        self.ids = part.ids

    def layer_logits(self, layer: int, x: Tensor, weights: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """(..., d) -> (..., n) of one layer; ``weights`` when the caller has them already."""
        down, up, bias = self.weights() if weights is None else weights
        hidden = F.linear(x, down[layer])
        if self.nonlinearity == "relu":
            hidden = F.relu(hidden)
        out = F.linear(hidden, up[layer], bias[layer])
        table = self.tables[layer]
        return out if table is None else out + table[self.ids]

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        site = self.sites[layer]
        return self.layer_logits(layer, sites[site], self._frozen())

    def _frozen(self) -> tuple[Tensor, Tensor, Tensor]:
        """Stored weights, computed once per version of the parameters (scoring never changes them)."""
        version = (self.down._version, self.up._version, self.bias._version, self.kind)
        if getattr(self, "_cache_version", None) != version:
            with torch.no_grad():
                self._cache, self._cache_version = self.weights(), version
        return self._cache

    def fixed_bytes(self, layer: int) -> float:
        rank = self.ranks[layer]
        table = 0.0 if self.tables[layer] is None else stored_bytes(1, self.n, "int4")  # the row of one token
        return stored_bytes(rank, self.d, self.kind) + stored_bytes(self.n, rank, self.kind) + 2 * self.n + table

    @torch.no_grad()
    def start_at_svd(
        self, model: PlainOPT, covariances: Sequence[Tensor] | None = None, weighted: bool = True
    ) -> "Predictors":
        """Best low-rank approximation of fc1 (MLP only), in the given inputs' covariance or over all directions.

        With ``weighted`` logits are in units of contribution: pre-activation x the norm of the neuron's fc2 column.
        """
        for layer, weights in enumerate(model.layers):
            one = LowRankPredictor(self.d, self.down.shape[1], self.n)
            svd_init(one, weights.fc1_weight, weights.fc1_bias, None if covariances is None else covariances[layer])
            scale = weights.fc2_norm / weights.fc2_norm.mean() if weighted else torch.ones_like(weights.fc2_norm)
            self.down[layer].copy_(one.down)
            self.up[layer].copy_(one.up.to(scale.device) * scale[:, None])
            self.bias[layer].copy_(weights.fc1_bias * scale)
        return self

    @torch.no_grad()
    def rescale(self, factors: Sequence[float]) -> None:
        """Multiply every layer's logits by a factor, tables included."""
        for layer, factor in enumerate(factors):
            self.up[layer] *= factor
            self.bias[layer] *= factor
            table = self.tables[layer]
            if table is not None:
                self.tables[layer] = table * factor

    def stored_as(self, kind: str) -> "Predictors":
        """The same predictors, stored in another dtype."""
        import copy

        other = copy.deepcopy(self)
        other.kind = kind
        return other


def site_at(target: str, layer: int, distance: int) -> tuple[str, int]:
    """The site ``distance`` half-blocks before the target's own; the nearest existing one before the first layer.

    >>> site_at("mlp", 3, 1), site_at("mlp", 3, 2), site_at("heads", 3, 1), site_at("mlp", 0, 4)
    (('attn_in', 3), ('mlp_in', 2), ('mlp_in', 2), ('attn_in', 0))
    """
    place = max(0, 2 * layer + (target == "mlp") - distance)
    return ("attn_in", "mlp_in")[place % 2], place // 2


class OneForAll(Predictors):
    """ShadowLLM's shape: one early activation (after the first attention), one hidden layer, every layer's neurons."""

    def __init__(self, model: PlainOPT, rank: int, kind: str = "fp16") -> None:
        super().__init__(model, "mlp", [rank] * model.n_layers, kind, nonlinearity="relu")
        self.sites = [("mlp_in", 0)] * model.n_layers

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        down, up, bias = super().weights()
        return down[:1].expand_as(down), up, bias

    def fixed_bytes(self, layer: int) -> float:
        own = super().fixed_bytes(layer)
        return own if layer == 0 else own - stored_bytes(self.ranks[layer], self.d, self.kind)


class SharedDown(Predictors):
    """Head predictors on the first projection of MLP predictors that read ``attn_in`` (distance 1): one A per block."""

    def __init__(self, model: PlainOPT, mlp: Predictors) -> None:
        super().__init__(model, "heads", mlp.ranks, mlp.kind)
        assert mlp.sites == self.sites, "both must read attn_in of their own block"
        self.source = [mlp]  # in a list: its parameters are not ours

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        _, up, bias = super().weights()
        return self.source[0].weights()[0].detach(), up, bias

    def fixed_bytes(self, layer: int) -> float:
        return super().fixed_bytes(layer) - stored_bytes(self.ranks[layer], self.d, self.kind)
