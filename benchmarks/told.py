"""Whether the engine's log-likelihoods are those of `mask` when both select the same: python -m benchmarks.told

    python -m benchmarks.told --config configs/eval/opt-mini.yaml --folder FOLDER --shots 0 --texts '[]' --limit 110

Takes the options of `python -m dejavu_train.evaluation.lm_eval`. Every request goes through the engine's steps (on a
CPU through their plain-torch operations), which note what was selected for every token; then through `mask` twice, as
it decides by itself and as the engine decided. What is left in the second is not due to decisions that rounding turns
over at a threshold (`benchmarks.near_ties` counts these without an engine). Requests count as apart beyond the goal of
the dtype, column `apart beyond`. Appends one row to told.csv in benchmarks/results, or in the folder that
DEJAVU_RESULTS names.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.rows import append_row, five_digits
from benchmarks.tasks import GOALS, RESULTS, checked_bundle, conditions, densities, log_likelihoods
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.selector import Predicted, Sites
from dejavu_train.bundle.spec import Key
from dejavu_train.engine.inputs import MAX_BATCH
from dejavu_train.engine.step import DecodeStep
from dejavu_train.errors import exit_on_user_error
from dejavu_train.evaluation.lm_eval.model import DejavuLM
from dejavu_train.evaluation.lm_eval.packing import Row
from dejavu_train.evaluation.lm_eval.run import TasksConfig, read_config
from dejavu_train.evaluation.lm_eval.tasks import quiet
from dejavu_train.models.opt import load_opt, load_tokenizer, resolve_device
from dejavu_train.sparse.model import SparseOPTForCausalLM

Answers = list[tuple[int, tuple[float, bool]]]


class Told(Predicted):
    """Decides as ``told`` (B, T, n) says, or by itself where that is empty; ``decided`` is of the last forward pass."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: dict[Key, Tensor] = {}
        self.decided: dict[Key, Tensor] = {}

    def __call__(self, layer: int, target: str, sites: Sites) -> Tensor | None:
        keep = self.told[layer, target] if (layer, target) in self.told else super().__call__(layer, target, sites)
        if keep is not None:
            self.decided[layer, target] = keep
        return keep


@contextlib.contextmanager
def noting_steps() -> Iterator[list[dict[Key, Tensor]]]:
    """Within it every step of an engine notes the (n,) bits of its selections: bit b is row b's."""
    own, steps = DecodeStep.step, []

    def step(self: DecodeStep, *args: Any, **options: Any) -> None:
        own(self, *args, **options)
        steps.append({key: selection.row_bits.clone() for key, selection in self.selections.items()})

    DecodeStep.step = step  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        DecodeStep.step = own  # type: ignore[method-assign]


def selected(steps: Sequence[dict[Key, Tensor]], rows: int) -> dict[Key, Tensor]:
    """By layer and target the (B, T, n) bool of ``rows`` rows that began together; step t is position t."""
    found = {}
    for key in steps[0]:
        bits = torch.stack([step[key] for step in steps])
        shifts = torch.arange(rows, device=bits.device)[:, None, None]
        found[key] = ((bits >> shifts) & 1).bool()
    return found


@dataclasses.dataclass
class Found:
    """Nats of `mask` by itself and as told, by number of a request; all decisions, and by target those that differ."""

    own: dict[int, float] = dataclasses.field(default_factory=dict)
    told: dict[int, float] = dataclasses.field(default_factory=dict)
    decisions: int = 0
    differing: dict[str, int] = dataclasses.field(default_factory=lambda: {"heads": 0, "mlp": 0})


class BothLM(DejavuLM):
    """Answers with the engine, and asks ``mask``, which has a :class:`Told`, the same rows; see ``found``."""

    def __init__(self, engine: SparseOPTForCausalLM, mask: SparseOPTForCausalLM, **options: Any) -> None:
        super().__init__(engine, sparse_from=0, batch_size=MAX_BATCH, **options)
        self.mask, self.found = mask, Found()

    def _scores(self, rows: list[Row], requests: Any) -> Answers:
        engine: Any = self.model
        with noting_steps() as steps:
            answers = super()._scores(rows, requests)
        selector: Any = self.mask._selector
        kept = selected(steps, len(rows))
        self.use(self.mask)
        for told, nats in (({}, self.found.own), (kept, self.found.told)):
            selector.told = told
            nats.update({i: value for i, (value, _) in super()._scores(rows, requests)})
            if not told:
                self._count(rows, kept, dict(selector.decided))
        self.use(engine)
        return answers

    def _count(self, rows: list[Row], kept: dict[Key, Tensor], own: dict[Key, Tensor]) -> None:
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        for (layer, target), keep in kept.items():
            real = (torch.arange(keep.shape[1], device=self.device) < lengths[:, None])[..., None]
            self.found.decisions += int(real.sum()) * keep.shape[2]
            self.found.differing[target] += int(((keep != own[layer, target]) & real).sum())


def summary(found: Found, engine: Sequence[float], tokens: np.ndarray, goal: float) -> dict[str, Any]:
    """The row: by how many nats a token the engine is from `mask` by itself (own) and with its selections (told).

    goal: nats a token, beyond which a request counts as apart.
    """
    row: dict[str, Any] = {"requests": len(tokens), "tokens": int(tokens.sum()), "apart beyond": goal}
    for name in ("own", "told"):
        nats = getattr(found, name)
        apart = np.abs(np.array([nats[i] for i in range(len(tokens))]) - np.array(engine)) / tokens
        row |= {f"{name}: apart": int((apart > goal).sum()), f"{name}: mean": float(apart.mean())}
        row |= {f"{name}: 99 %": float(np.quantile(apart, 0.99)), f"{name}: most": float(apart.max())}
    row["decisions"] = found.decisions
    return row | {f"differing {target}": count for target, count in found.differing.items()}


def both(config: Any, bundle: Bundle, engine_bundle: Bundle) -> BothLM:
    """The two models: the engine's own operations on a GPU, their references elsewhere."""
    device = resolve_device(config.device)
    ops = "triton" if device.type == "cuda" else "reference"
    mask = SparseOPTForCausalLM.from_model(load_opt(config.model, config.dtype, device), bundle, "mask")
    mask._selector = Told(bundle, mask.device, mask)
    dense = load_opt(config.model, config.dtype, device)  # one of its own: the engine lays weights out anew
    engine = SparseOPTForCausalLM.from_model(dense, engine_bundle, "triton", 0, ops=ops)
    return BothLM(engine, mask, tokenizer=load_tokenizer(config.model))


def compared(lm: BothLM, instances: Sequence[Any], goal: float) -> dict[str, Any]:
    """Ask all log-likelihoods; see :func:`summary`."""
    tokens = np.array([len(lm._encode_pair(*instance.args)[1]) for instance in instances])
    nats = [nats for nats, _ in lm.loglikelihood(list(instances))]
    return summary(lm.found, nats, tokens, goal)


def main(argv: Sequence[str] | None = None) -> None:
    quiet()
    config: TasksConfig = read_config(TasksConfig, argv, __doc__ or "")
    shared = conditions(config)
    used = checked_bundle(config)
    asked = log_likelihoods(config)
    row = densities(used) | compared(both(config, used, used), asked, GOALS[config.dtype])
    print(row)
    append_row(RESULTS / "told.csv", five_digits(row) | shared, [*row, *shared])


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
