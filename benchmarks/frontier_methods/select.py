"""Turns scores into masks inside a forward pass, and counts what would have been read.

A scorer says how much each unit of a layer seems to matter; everything above the layer's threshold is selected. Every
method of the comparison is a scorer, so that they differ in nothing else: the same thresholds by quantile, the same
sharing out, the same counting of bytes.

Letters: B batch, T positions, n units, d model width, h heads, e head width, L layers.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.frontier_methods.plain_opt import PlainOPT, Sites
from benchmarks.frontier_methods.sets import Batch

WEIGHT_BYTES = 2  # the model's own weights, fp16


class Scorer(Protocol):
    """One method."""

    def begin(self, part: Batch, model: PlainOPT) -> None:
        """A new batch is about to run."""
        ...

    def scores(self, layer: int, sites: Sites, values: Tensor) -> Tensor:
        """(B, T, n); ``values`` is the activation (B, T, f) or the heads' output (B, T, h, e) of this pass."""
        ...

    def fixed_bytes(self, layer: int) -> float:
        """Read per token whatever is selected."""
        ...


class Gates:
    """An edit that keeps the selected units of every layer and counts them.

    Args:
        model: the dense model.
        mlp, heads: a scorer each, or None for a dense target.
        mlp_thresholds, head_thresholds: one per layer; None keeps the layer dense.
        top_k: neurons per token instead of thresholds, per layer; head_top_k: heads, for all layers.
        replacement: (L, h, e) what a skipped head's output is replaced by; None is zero.
        offsets: (L, d) added to the output of every sparse MLP.
        fc2_floor: contributions at or below this are not worth their fc2 row, per layer.
        from_position: earlier positions are dense.
        together: windows that are decoded as one batch; the union of what they select is counted as well.
    """

    def __init__(
        self,
        model: PlainOPT,
        mlp: Any = None,
        heads: Any = None,
        mlp_thresholds: Sequence[float | None] | None = None,
        head_thresholds: Sequence[float | None] | None = None,
        top_k: Sequence[int] | None = None,
        head_top_k: int | None = None,
        replacement: Tensor | None = None,
        offsets: Tensor | None = None,
        fc2_floor: Sequence[float] | None = None,
        from_position: int = 0,
        together: int = 1,
    ) -> None:
        self.together = together
        self.model, self.mlp_scorer, self.head_scorer = model, mlp, heads
        dense: list[float | None] = [None] * model.n_layers
        self.mlp_thresholds = list(mlp_thresholds) if mlp_thresholds is not None else list(dense)
        self.head_thresholds = list(head_thresholds) if head_thresholds is not None else list(dense)
        self.top_k, self.head_top_k, self.replacement, self.offsets = top_k, head_top_k, replacement, offsets
        self.fc2_floor, self.from_position = fc2_floor, from_position
        self.valid = torch.empty(0)
        self.reset()

    def reset(self) -> None:
        self.tokens = 0.0
        names = ("selected", "hits", "active", "mass", "mass_kept", "survivors", "heads", "steps", "rows", "hit_rows")
        # on the device, so that counting never waits for it
        zeros = torch.zeros(self.model.n_layers, dtype=torch.float64, device=self.model.device)
        self.sums = {name: zeros.clone() for name in names}

    def begin(self, part: Batch, final: Tensor, model: PlainOPT) -> None:
        late = torch.arange(part.ids.shape[1], device=part.ids.device) >= self.from_position
        self.valid = (part.scored & late).double()[..., None]  # (B, T, 1)
        self.tokens += float(self.valid.sum())
        for scorer in (self.mlp_scorer, self.head_scorer):
            if scorer is not None:
                scorer.begin(part, model)

    def only(self, target: str, layer: int, threshold: float | None) -> None:
        """Make everything dense but one layer of one target."""
        self.mlp_thresholds = [None] * self.model.n_layers
        self.head_thresholds = [None] * self.model.n_layers
        (self.mlp_thresholds if target == "mlp" else self.head_thresholds)[layer] = threshold

    def _count(self, name: str, layer: int, values: Tensor) -> None:
        self.sums[name][layer] += (values.double() * self.valid).sum()

    def _keep(self, scores: Tensor, threshold: float | None, top_k: int | None) -> Tensor:
        if top_k is not None:
            keep = torch.zeros_like(scores, dtype=torch.bool)
            keep.scatter_(-1, scores.topk(top_k, dim=-1).indices, True)
        else:
            assert threshold is not None
            keep = scores > threshold
        if self.from_position:
            keep[:, : self.from_position] = True
        return keep

    def mlp(self, layer: int, sites: Sites, activation: Tensor) -> Tensor:
        live = activation > 0
        contribution = activation * self.model.layers[layer].fc2_norm
        threshold = self.mlp_thresholds[layer]
        if self.mlp_scorer is None or (threshold is None and self.top_k is None):
            keep = torch.ones_like(live)
        else:
            count = None if self.top_k is None else self.top_k[layer]
            keep = self._keep(self.mlp_scorer.scores(layer, sites, activation), threshold, count)
            if (counted := getattr(self.mlp_scorer, "counted", None)) is not None:
                self._count("survivors", layer, counted(threshold))
            elif (survivors := getattr(self.mlp_scorer, "survivors", None)) is not None:
                self._count("survivors", layer, survivors)
        read = keep & live
        if self.fc2_floor is not None:
            read = read & (contribution > self.fc2_floor[layer])
        self._count("selected", layer, keep.sum(-1, keepdim=True))
        self._count("hits", layer, read.sum(-1, keepdim=True))
        self._count("active", layer, live.sum(-1, keepdim=True))
        self._count("mass", layer, contribution.sum(-1, keepdim=True))
        self._count("mass_kept", layer, (contribution * read).sum(-1, keepdim=True))
        if self.together > 1:
            self._count_union(layer, keep, read)
        return activation * read

    def _count_union(self, layer: int, keep: Tensor, read: Tensor) -> None:
        groups = keep.shape[0] // self.together
        used = groups * self.together
        # windows far apart in the order of the text form a batch; steps at which all of them have a token
        whole = self.valid[:used].bool().unflatten(0, (self.together, groups)).all(0)
        self.sums["steps"][layer] += whole.sum()
        for name, mask in (("rows", keep), ("hit_rows", read)):
            union = mask[:used].unflatten(0, (self.together, groups)).any(0)
            self.sums[name][layer] += (union & whole).sum()

    def union_share(self) -> float:
        """Bytes that one step of a batch reads over the dense MLP's."""
        model, total = self.model, 0.0
        for layer in range(model.n_layers):
            steps = max(float(self.sums["steps"][layer]), 1.0)
            rows, hits = (float(self.sums[name][layer]) / steps for name in ("rows", "hit_rows"))
            scorer = self.mlp_scorer if self.mlp_thresholds[layer] is not None or self.top_k is not None else None
            total += sum(mlp_parts(model, scorer, layer, rows, hits).values())
        return total / (2 * WEIGHT_BYTES * model.d * model.f * model.n_layers)

    def heads(self, layer: int, sites: Sites, out: Tensor) -> Tensor:
        threshold = self.head_thresholds[layer]
        if self.head_scorer is None or (threshold is None and self.head_top_k is None):
            self._count("heads", layer, torch.full_like(out[..., :1, 0], out.shape[-2]))
            return out
        keep = self._keep(self.head_scorer.scores(layer, sites, out), threshold, self.head_top_k)
        self._count("heads", layer, keep.sum(-1, keepdim=True))
        rest: Tensor | float = 0.0 if self.replacement is None else self.replacement[layer]
        return torch.where(keep[..., None], out, torch.as_tensor(rest, dtype=out.dtype, device=out.device))

    def offset(self, layer: int, target: str) -> Tensor | None:
        if target == "mlp" and self.offsets is not None and self.mlp_thresholds[layer] is not None:
            return self.offsets[layer]
        return None

    def report(self) -> dict[str, Any]:
        """Per layer and in sum: densities, recall, retained mass, bytes by part and their share of the dense MLP."""
        model, per = self.model, {name: (v / max(self.tokens, 1)).tolist() for name, v in self.sums.items()}
        layers = []
        for i in range(model.n_layers):
            sparse = self.mlp_scorer is not None and (self.mlp_thresholds[i] is not None or self.top_k is not None)
            layers.append(
                {
                    "layer": i,
                    "density": per["selected"][i] / model.f,
                    "active": per["active"][i] / model.f,
                    "recall": per["hits"][i] / max(per["active"][i], 1e-9),
                    "retained_mass": per["mass_kept"][i] / max(per["mass"][i], 1e-9),
                    "head_density": per["heads"][i] / model.n_heads,
                    "bytes": mlp_parts(
                        model,
                        self.mlp_scorer if sparse else None,
                        i,
                        per["selected"][i],
                        per["hits"][i] if sparse else model.f,
                        per["survivors"][i],
                    ),
                    "attention_bytes": self._attention_bytes(i, per["heads"][i]),
                }
            )
        dense = 2 * WEIGHT_BYTES * model.d * model.f * model.n_layers
        parts = {name: sum(row["bytes"][name] for row in layers) / dense for name in layers[0]["bytes"]}
        attention = sum(row["attention_bytes"] for row in layers)
        whole = dense + 4 * WEIGHT_BYTES * model.d**2 * model.n_layers
        return {
            "layers": layers,
            "mlp_density": sum(row["density"] for row in layers) / model.n_layers,
            "head_density": sum(row["head_density"] for row in layers) / model.n_layers,
            "recall": sum(per["hits"]) / max(sum(per["active"]), 1e-9),
            "retained_mass": sum(row["retained_mass"] for row in layers) / model.n_layers,
            **{f"{name}_share": share for name, share in parts.items()},
            "mlp_share": sum(parts.values()),
            "block_share": (sum(parts.values()) * dense + attention) / whole,
        }

    def _attention_bytes(self, layer: int, selected: float) -> float:
        model = self.model
        row = 4 * WEIGHT_BYTES * model.d * (model.d // model.n_heads)
        if self.head_scorer is None or (self.head_thresholds[layer] is None and self.head_top_k is None):
            return float(row * model.n_heads)
        # replacing skipped heads is free: W (out - mean) of the selected, and W mean of all in the bias
        return row * selected + self.head_scorer.fixed_bytes(layer)


def mlp_parts(
    model: PlainOPT, scorer: Any, layer: int, selected: float, hits: float, survivors: float = 0.0
) -> dict[str, float]:
    """Bytes per token of one layer's MLP by part; ``selected`` and ``hits`` are counts per token."""
    row = WEIGHT_BYTES * model.d
    if scorer is None:
        return {"predictor": 0.0, "fc1": row * model.f, "fc2": row * model.f}
    own = getattr(scorer, "row_bytes", None)  # a cascade reads fc1 in parts
    fc1 = row * selected if own is None else own(layer, selected, survivors)
    return {"predictor": scorer.fixed_bytes(layer), "fc1": fc1, "fc2": row * hits}
