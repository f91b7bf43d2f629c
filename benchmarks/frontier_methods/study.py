"""A model, its four sets of text, and one way to put any method into rows of the table."""

import csv
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.frontier_methods import fit as fitting
from benchmarks.frontier_methods.heads import HeadStatistics, head_statistics
from benchmarks.frontier_methods.plain_opt import PlainOPT
from benchmarks.frontier_methods.plan import Plan, make_plan
from benchmarks.frontier_methods.predictors import Predictors
from benchmarks.frontier_methods.score import Reference, Scored
from benchmarks.frontier_methods.select import WEIGHT_BYTES, Gates
from benchmarks.frontier_methods.sets import Batch, batches, endless, read_texts, take
from dejavu_train.data.text import START_TOKEN
from dejavu_train.errors import UserError
from dejavu_train.models.opt import load_opt, load_tokenizer

COLUMNS = (
    "model", "text", "set", "section", "method", "sharing", "asked", "mlp_share", "predictor_share", "fc1_share",
    "fc2_share", "block_share", "mlp_density", "head_density", "recall", "retained_mass", "perplexity", "increase",
    "error", "kl", "tokens", "train_seconds", "detail",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much text and training a study takes. Two presets: a CPU in minutes, and a GPU."""

    test_tokens: int = 12_000
    val_tokens: int = 8_000
    calibration_tokens: int = 8_000
    probe_tokens: int = 2_000
    rows: int = 60_000
    tune_tokens: int = 60_000
    fit_steps: int = 400
    fit_rows: int = 512
    tune_steps: int = 30
    tune_batch: int = 4
    window: int = 512
    batch: int = 8


GPU_SIZES = Sizes(110_000, 40_000, 30_000, 8_000, 200_000, 2_000_000, 600, 1024, 300, 32, 512, 32)
BRIEF_WIDTH = 768
BRIEF_SIZES = Sizes(110_000, 16_000, 16_000, 4_000, 120_000, 1_000_000, 500, 1024, 250, 16, 512, 16)


@dataclass
class Study:
    """Everything that methods share."""

    name: str
    text: str
    model: PlainOPT
    sizes: Sizes
    output: Path
    sets: dict[str, list[Batch]]
    tune_parts: list[Batch]
    test: Reference
    val: Reference
    extra: dict[str, Reference] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._rows: dict[str, fitting.Rows] = {}
        self._statistics: HeadStatistics | None = None

    @property
    def brief(self) -> bool:
        """A large model gets the variants that matter only."""
        return self.model.d >= BRIEF_WIDTH

    def rows(self, set_name: str = "train") -> fitting.Rows:
        if set_name not in self._rows:
            limit = self.sizes.rows if set_name == "train" else 8192
            self._rows[set_name] = fitting.record_rows(self.model, self.sets[set_name], limit)
        return self._rows[set_name]

    @property
    def statistics(self) -> HeadStatistics:
        if self._statistics is None:
            self._statistics = head_statistics(self.model, self.sets["train"][: max(2, 60_000 // self._per_batch())])
        return self._statistics

    def _per_batch(self) -> int:
        return self.sizes.batch * self.sizes.window

    def train_batches(self, seed: int = 0) -> Any:
        return endless(self.tune_parts, seed)

    def probe_parts(self) -> list[Batch]:
        """A few batches of the calibration set, spread over its lengths."""
        wanted = max(1, self.sizes.probe_tokens // self._per_batch())
        parts = self.sets["calibration"]
        if self.sizes.probe_tokens < self._per_batch():
            rows = max(1, self.sizes.probe_tokens // self.sizes.window)
            first = parts[0]
            return [Batch(first.ids[:rows], first.scored[:rows], first.document[:rows])]
        return parts[:wanted]

    def plan(self, scorer: Any, losses: bool = True, survivors: Sequence[float] | None = None, **gates: Any) -> Plan:
        made = Gates(self.model, mlp=scorer, **gates)
        return make_plan(self.model, scorer, self.sets["calibration"], self.probe_parts(), survivors, losses, made)

    def write(self, section: str, method: str, scored: Scored | None, report: dict[str, Any], **more: Any) -> None:
        """One row, on disk at once: a study that is cut short leaves what it had."""
        values: dict[str, Any] = {
            "model": self.name, "text": self.text, "set": "test", "section": section, "method": method,
            **{k: v for k, v in report.items() if k != "layers"},
        }  # fmt: skip
        if scored is not None:
            values |= {k: getattr(scored, k) for k in ("perplexity", "increase", "error", "kl", "tokens")}
        values |= more
        detail = values.get("detail", "")
        values["detail"] = detail if isinstance(detail, str) else json.dumps(detail)
        path = self.output / "frontier.csv"
        new = not path.exists()
        with open(path, "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in values.items()})
        elapsed = time.perf_counter() - self.started
        print(
            f"[{elapsed:6.1f}s] {section:10s} {method:42s} {values.get('sharing', ''):12s} {values['set']:8s}"
            f" mlp {values.get('mlp_share', 1):.3f} heads {values.get('head_density', 1):.3f}"
            f" increase {100 * values.get('increase', 0):+7.3f}% ±{100 * values.get('error', 0):.3f}"
            f" kl {values.get('kl', 0):.5f}",
            flush=True,
        )

    def frontier(
        self,
        section: str,
        method: str,
        scorer: Any,
        shares: Sequence[float],
        sharing: str = "measured",
        on: str = "test",
        plan: Plan | None = None,
        layers: bool = False,
        **more: Any,
    ) -> list[Scored]:
        """Rows of one method over budgets, shares of the dense MLP's bytes; those that cannot be met are left out."""
        gate_options = more.pop("gates", {})
        plan = plan or self.plan(scorer, losses=sharing == "measured", **gate_options)
        reference = {"test": self.test, "val": self.val, **self.extra}[on]
        found = []
        for share in shares:
            try:
                densities = plan.densities(share, sharing)
            except UserError:
                continue
            gates = Gates(self.model, mlp=scorer, mlp_thresholds=plan.thresholds(densities), **gate_options)
            scored = reference.score(gates)
            read = gates.report()
            row = dict(more)
            if layers:
                one = 2 * WEIGHT_BYTES * self.model.d * self.model.f
                bytes_read = [round(sum(layer["bytes"].values()) / one, 4) for layer in read["layers"]]
                row["detail"] = {
                    "densities": [round(x, 4) for x in densities],
                    "layer_shares": bytes_read,
                    **more.get("detail", {}),
                }
            self.write(section, method, scored, read, set=on, sharing=sharing, asked=share, **row)
            found.append(scored)
        return found

    def predictors(
        self,
        rank: int | Sequence[int],
        kind: str = "fp16",
        distance: int = 0,
        start: str = "data",
        nonlinearity: str = "none",
        weighted: bool = True,
        seed: int = 0,
    ) -> Predictors:
        """New MLP predictors; ``start`` is ``random``, ``svd`` or ``data`` (data-aware SVD)."""
        torch.manual_seed(seed)
        ranks = [rank] * self.model.n_layers if isinstance(rank, int) else list(rank)
        made = Predictors(self.model, "mlp", ranks, kind, distance, nonlinearity)
        if start not in ("random", "svd", "data"):
            raise UserError(f"unknown start {start}; it is random, svd or data")
        if start != "random":
            made.start_at_svd(self.model, self.rows().covariances(made.sites) if start == "data" else None, weighted)
        return made


Parts = tuple[dict[str, list[Batch]], list[Batch]]


def read_parts(model_name: str, text: str, sizes: Sizes) -> Parts:
    """The four sets as batches, and the train batches that predictors are tuned on.

    Raises:
        UserError: a tokenizer or text that cannot be read.
    """
    tokenizer, texts = load_tokenizer(model_name), read_texts(text, model_name)
    wanted = {
        "train": sizes.rows,
        "calibration": sizes.calibration_tokens,
        "val": sizes.val_tokens,
        "test": sizes.test_tokens,
    }
    sets = {
        name: batches(take(tokenizer, texts[name], sizes.window, tokens, seed), sizes.batch)
        for seed, (name, tokens) in enumerate(wanted.items())
    }
    return sets, batches(take(tokenizer, texts["train"], sizes.window, sizes.tune_tokens, 4), sizes.tune_batch)


def open_study(
    model_name: str,
    text: str,
    output: Path,
    device: torch.device,
    sizes: Sizes,
    label: str,
    extra: Sequence[str] = (),
    parts: Parts | None = None,
) -> Study:
    """Load a model and its text (or take its ``parts``, read before).

    Raises:
        UserError: a model or text that cannot be read.
    """
    hf = load_opt(model_name)
    model = PlainOPT(hf, device)
    if model.d >= BRIEF_WIDTH and sizes == GPU_SIZES:
        sizes = BRIEF_SIZES
    sets, tuned = parts or read_parts(model_name, text, sizes)
    output.mkdir(parents=True, exist_ok=True)
    study = Study(
        label, Path(text).name, model, sizes, output, sets, tuned,
        Reference(model, sets["test"]), Reference(model, sets["val"]),
    )  # fmt: skip
    tokenizer = load_tokenizer(model_name) if extra else None
    for path in extra:
        documents = read_heldout(path)
        more = batches(take(tokenizer, documents, sizes.window, sizes.test_tokens, 5), sizes.batch)
        study.extra[Path(path).stem] = Reference(model, more)
    assert START_TOKEN == int(sets["test"][0].ids[0, 0])
    return study


def read_heldout(path: str) -> list[tuple[str, str]]:
    """Documents of a JSONL file that is scored whole, cut into pieces so that errors can be told from them."""
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    pieces = []
    for i, row in enumerate(rows):
        text = row["text"]
        pieces += [(f"{i}-{start}", text[start : start + 20_000]) for start in range(0, len(text), 20_000)]
    return pieces
