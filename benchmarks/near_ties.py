"""Why log-likelihoods are not the same to the last digit in every order of sums: decisions within rounding.

    python -m benchmarks.near_ties --config configs/eval/opt-mini.yaml --folder FOLDER --shots 0 --limit 110

Takes the options of `python -m dejavu_train.evaluation.lm_eval`. The same requests through `mask` in single and in
double precision: what differs is rounding, which every backend does in an order of its own. Then `mask` in single
precision once more with the decisions of double precision, all of them or those of one target: what is left is not due
to them.
Appends one row to benchmarks/results/near_ties.csv.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.rows import append_row, five_digits
from benchmarks.tasks import GOALS, RESULTS, checked_bundle, conditions, densities, log_likelihoods
from dejavu_train.bundle.selector import Predicted, Sites
from dejavu_train.bundle.spec import Key
from dejavu_train.errors import exit_on_user_error
from dejavu_train.evaluation.lm_eval.model import DejavuLM
from dejavu_train.evaluation.lm_eval.packing import build_rows, pack
from dejavu_train.evaluation.lm_eval.run import TasksConfig, read_config
from dejavu_train.evaluation.lm_eval.tasks import quiet
from dejavu_train.models.opt import load_opt, load_tokenizer, resolve_device
from dejavu_train.sparse.model import SparseOPTForCausalLM

POSITIONS = 2048  # of a batch
WAYS = {"single": (), "double": (), "told": ("heads", "mlp"), "told heads": ("heads",), "told mlp": ("mlp",)}


class Noting(Predicted):
    """Notes the distance of every logit to its threshold, and what was decided, in the last forward pass."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.distance: dict[Key, Tensor] = {}
        self.kept: dict[Key, Tensor] = {}

    def __call__(self, layer: int, target: str, sites: Sites) -> Tensor | None:
        keep = super().__call__(layer, target, sites)
        if keep is not None:
            spec = self.bundle.specs[layer, target]
            inputs = sites[spec.site, spec.site_layer].to(torch.float32)
            self.distance[layer, target] = self.predictors[layer, target](inputs) - spec.threshold
            self.kept[layer, target] = keep
        return keep


class Told(Predicted):
    """Decides for ``targets`` as ``kept`` (B, T, n) says, and multiplies with the same fc1 as the bundle does."""

    kept: dict[Key, Tensor]
    targets: tuple[str, ...]

    def __call__(self, layer: int, target: str, sites: Sites) -> Tensor | None:
        return self.kept.get((layer, target)) if target in self.targets else super().__call__(layer, target, sites)


@dataclasses.dataclass
class Found:
    """By request the nats of each way and its tokens; all decisions and by target those that differ; of those at a
    predictor's threshold the distance to it in single precision, and by how much the two logits differ."""

    nats: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {way: [] for way in WAYS})
    tokens: list[int] = dataclasses.field(default_factory=list)
    decisions: int = 0
    differing: dict[str, int] = dataclasses.field(default_factory=lambda: {"heads": 0, "mlp": 0})
    distances: list[Tensor] = dataclasses.field(default_factory=list)
    rounding: list[Tensor] = dataclasses.field(default_factory=list)


def compare(lm: DejavuLM, models: dict[str, Any], pairs: Sequence[tuple[list[int], list[int]]], found: Found) -> None:
    """One batch of (context, continuation) token ids through all ways."""
    rows = build_rows(pairs, lm.max_length, shared=True)
    packed = pack(rows, 1)
    real = (packed.attention_mask == 1) if packed.position_ids is None else packed.position_ids >= 0
    real = real.to(lm.device)
    single, double = (models[way]._selector for way in ("single", "double"))
    for way, model in models.items():
        if WAYS[way]:
            model._selector.kept = double.kept
        lm.use(model)
        asked: Any = [(None, *pair) for pair in pairs]
        answers = lm._loglikelihood_tokens(asked, disable_tqdm=True, override_bs=len(rows))
        found.nats[way] += [nats for nats, _ in answers]
    found.tokens += [len(continuation) for _, continuation in pairs]
    for key, kept in single.kept.items():
        found.decisions += int(real.sum()) * kept.shape[-1]
        found.differing[key[1]] += int(((kept != double.kept[key]) & real[..., None]).sum())
        mine, other = single.distance[key], double.distance[key]
        crossed = ((mine > 0) != (other > 0)) & real[..., None]
        found.distances.append(mine[crossed].abs())
        found.rounding.append((mine - other)[crossed].abs())


def summary(found: Found) -> dict[str, Any]:
    """The row: how many requests are apart, and how many with the same decisions."""
    tokens = np.array(found.tokens)
    nats = {way: np.array(values) / tokens for way, values in found.nats.items()}
    row: dict[str, Any] = {"requests": len(tokens)}
    for way in ("single", *(way for way, targets in WAYS.items() if targets)):
        apart = np.abs(nats[way] - nats["double"])
        row |= {f"{way}: apart": int((apart > GOALS["float32"]).sum()), f"{way}: 99 %": float(np.quantile(apart, 0.99))}
        row[f"{way}: most"] = float(apart.max())
    distances, rounding = torch.cat(found.distances), torch.cat(found.rounding)
    row |= {"decisions": found.decisions, **{f"differing {target}": n for target, n in found.differing.items()}}
    row |= {"differing at a predictor's threshold": len(distances)}
    row |= {"distance to it, median": float(distances.median()) if len(distances) else None}
    return row | {"rounding there, median": float(rounding.median()) if len(rounding) else None}


def main(argv: Sequence[str] | None = None) -> None:
    quiet()
    config: TasksConfig = read_config(TasksConfig, argv, __doc__ or "")
    shared = conditions(config)
    used = checked_bundle(config)
    models: dict[str, Any] = {}
    for way in WAYS:
        dense = load_opt(config.model, "float32", resolve_device(config.device))
        dense = dense.double() if way == "double" else dense
        models[way] = SparseOPTForCausalLM.from_model(dense, used, "mask")
        models[way]._selector = (Told if WAYS[way] else Noting)(used, dense.device, dense)
        models[way]._selector.targets = WAYS[way]
    lm = DejavuLM(models["single"], sparse_from=0, tokenizer=load_tokenizer(config.model))
    pairs = [lm._encode_pair(*one.args) for one in log_likelihoods(config)]
    pairs.sort(key=lambda pair: (-len(pair[0]), pair))
    found = Found()
    while pairs:
        n = max(1, POSITIONS // (len(pairs[0][0]) + len(pairs[0][1])))
        compare(lm, models, pairs[:n], found)
        pairs = pairs[n:]
    row = densities(used) | summary(found)
    print(row)
    append_row(RESULTS / "near_ties.csv", five_digits(row) | shared, [*row, *shared])


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
