"""The tables of the Deja Vu paper that are about tasks, for any model and bundle.

    python -m papers.deja_vu.tables --config papers/deja_vu/configs/tables.yaml --folder FOLDER

- ``table4``: the MLPs alone at 85 % sparsity, and the heads alone at 50 %.
- ``fig7``: accuracies and perplexities over the total sparsity, predicted and oracle.
- ``structures``: blocks in parallel or left out (appendix C.3), dense and at the bundle's own densities.

Every row stands beside the dense model on the same examples, through ``mask`` from the first token on. In ``table4``
and ``fig7`` predictors select alone, as in the paper: second stages of a cascade are off.
"""

import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import OPTForCausalLM

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.folder import require_model
from dejavu_train.cli.parser import parse
from dejavu_train.evaluation.shared_config import ModelConfig
from dejavu_train.extras.tasks.config import AskedOptions
from dejavu_train.extras.tasks.model import DejavuLM
from dejavu_train.extras.tasks.run import all_questions, versions
from dejavu_train.extras.tasks.tasks import TaskRow, ask, change_of, compare, mean_rows, quiet
from dejavu_train.families import TARGETS, Target
from dejavu_train.ground.errors import UserError, exit_on_user_error
from dejavu_train.ground.files import write_json
from dejavu_train.ground.progress import set_up_logging
from dejavu_train.models.load import load_model, load_tokenizer, resolve_device
from papers.deja_vu.restructure import STRUCTURES, check_structure, restructured
from papers.deja_vu.studied import SELECTED_BY, StudiedOPT, densities_for, total_sparsity
from papers.deja_vu.trend import plot_trend

logger = logging.getLogger(__name__)

TABLES = ("table4", "fig7", "structures")
TABLE4 = ((0.15, 1.0), (1.0, 0.5))
DENSITIES = {Target.MLP: "mlp_density", Target.HEADS: "head_density"}  # of a variant, by target


@dataclasses.dataclass(frozen=True)
class PaperConfig(AskedOptions, ModelConfig):
    """Which tables, on which tasks."""

    RESULTS = "paper"

    tables: tuple[str, ...] = TABLES
    """Some of table4, fig7, structures. Each variant asks everything once."""
    sparsities: tuple[float, ...] = (0.25, 0.5, 0.62, 0.75, 0.85, 0.9)
    """Of fig7: shares of all blocks' weights that are not read, predictors excluded."""
    selections: tuple[str, ...] = tuple(SELECTED_BY)
    """Of fig7: predicted, oracle."""
    structures: tuple[str, ...] = tuple(STRUCTURES[1:])
    """As restructure.py defines them."""

    def check(self) -> None:
        """Raise UserError for a value that cannot be meant."""
        for name, known in (("tables", TABLES), ("selections", SELECTED_BY)):
            unknown = [value for value in getattr(self, name) if value not in known]
            if unknown:
                raise UserError(f"--{name}: {unknown[0]} is none of {', '.join(known)}")
        if not self.tables:
            raise UserError(f"--tables is empty; name some of {', '.join(TABLES)}")
        for structure in self.structures:
            check_structure(structure)
        if any(not 0 < sparsity <= 0.95 for sparsity in self.sparsities):
            raise UserError(f"--sparsities must lie above 0 and at most at 0.95, got {list(self.sparsities)}")
        super().check()


@dataclasses.dataclass(frozen=True)
class Variant:
    """One model that is compared with dense. Densities as asked. 1.0 is dense."""

    table: str
    selection: str
    structure: str = "sequential"
    mlp_density: float = 1.0
    head_density: float = 1.0

    def __str__(self) -> str:
        asked = f"{self.mlp_density:.0%} of neurons, {self.head_density:.0%} of heads"
        return f"{self.table}, {self.selection}, {self.structure}, {asked}"


@dataclasses.dataclass(frozen=True)
class PaperRow:
    """A metric of a variant, with the densities and the total sparsity that were measured on these requests."""

    variant: Variant
    mlp_selected: float
    head_selected: float
    total_sparsity: float
    row: TaskRow

    def flat(self) -> dict[str, Any]:
        """As one level of keys. What was asked is ``asked_...``."""
        asked = dataclasses.asdict(self.variant)
        named = {f"asked_{name}" if name.endswith("density") else name: value for name, value in asked.items()}
        measured = {name: getattr(self, name) for name in ("mlp_selected", "head_selected", "total_sparsity")}
        return named | measured | dataclasses.asdict(self.row)


def variants(config: PaperConfig, bundle: Bundle) -> list[Variant]:
    """All that is asked, in the order of the tables, less what the bundle has no predictors for."""
    result = [Variant("table4", "predicted", "sequential", *pair) for pair in TABLE4 if "table4" in config.tables]
    if "fig7" in config.tables:
        for sparsity in config.sparsities:
            pair = densities_for(sparsity, bundle.shape)
            result += [Variant("fig7", selection, "sequential", *pair) for selection in config.selections]
    if "structures" in config.tables:
        calibrated = (bundle.mean_density(Target.MLP), bundle.mean_density(Target.HEADS))
        for structure in config.structures:
            result.append(Variant("structures", "dense", structure))
            result.append(Variant("structures", "predicted", structure, *calibrated))
    lacking = [
        v for v in result if any(getattr(v, name) < 1 for t, name in DENSITIES.items() if t not in bundle.targets)
    ]
    for variant in lacking:
        logger.info("left out, the bundle has predictors for %s only: %s", " and ".join(bundle.targets), variant)
    return [variant for variant in result if variant not in lacking]


def paper(config: PaperConfig) -> Iterator[list[PaperRow]]:
    """Ask the dense model, then every variant, whose rows come as they are made.

    Raises:
        UserError: a bundle of another model or without predictors for what is asked, an unknown task, a missing file.
    """
    bundle = Bundle.from_pretrained(config.bundle)
    bundle.check_model(config.model)
    asked = variants(config, bundle)
    alone = bundle.one_stage()
    bundles = {
        v: (bundle if v.table == "structures" else alone.at(v.mlp_density, v.head_density))
        for v in asked
        if v.selection != "dense"
    }  # before anything slow: what the bundle lacks is an error here
    questions = all_questions(config)
    dense = load_model(config.model, config.dtype, resolve_device(config.device))
    lm = DejavuLM(dense, load_tokenizer(config.model), sparse_from=0, batch_size=config.batch_size)
    reference = [ask(lm, part) for part in questions]
    for number, variant in enumerate(asked, 1):
        model: OPTForCausalLM = dense
        if variant.selection != "dense":
            model = StudiedOPT.study(dense, bundles[variant], variant.selection)
        lm.use(model)
        with restructured(model, variant.structure):
            runs = [ask(lm, part) for part in questions]
        mlp, heads = (model.density(t) if isinstance(model, StudiedOPT) else 1.0 for t in TARGETS)
        unread = total_sparsity(mlp, heads, bundle.shape)
        by_part = [compare(run, other) for run, other in zip(runs, reference, strict=True)]
        rows = [row for part in by_part for row in (*part, *mean_rows(part))]
        yield [PaperRow(variant, mlp, heads, unread, row) for row in rows]
        logger.info("%d of %d: %s", number, len(asked), variant)


def table(rows: Sequence[PaperRow]) -> str:
    """Mean accuracies and perplexities as Markdown."""
    lines = ["| table | model | total sparsity | measure | value | dense | change |", "| --- |" + " --- |" * 6]
    for one in rows:
        row, variant = one.row, one.variant
        if row.metric == "perplexity" or row.task == "mean":
            accuracy = row.metric != "perplexity"
            what = f"{variant.selection}, {variant.structure}"
            what += f", {one.mlp_selected:.0%} of neurons, {one.head_selected:.0%} of heads"
            name = f"mean accuracy, {row.shots} shot" if accuracy else f"{row.task} perplexity, {row.shots} shot"
            scale = 100 if accuracy else 1
            lines.append(
                f"| {variant.table} | {what} | {one.total_sparsity:.0%} | {name} | {scale * row.value:,.2f} |"
                f" {scale * row.dense:,.2f} | {change_of(row)} |"
            )
    return "\n".join(lines)


def read_config(argv: Sequence[str] | None, prog: str = "python -m papers.deja_vu.tables") -> PaperConfig:
    """Flags (None: those of the process) and YAML files as a checked config. Raises as :func:`parse`."""
    config = parse(PaperConfig, argv, prog, str(PaperConfig.__doc__))
    config.check()
    return config


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, ask, write paper.json and fig7."""
    config = read_config(argv)
    require_model(config.model, config.bundle)
    set_up_logging()
    transformers.utils.logging.disable_progress_bar()
    write_paper(config)


def write_paper(config: PaperConfig) -> None:
    """Ask and print the table. paper.json grows by a variant at a time, fig7 is last. Raises as :func:`paper`."""
    quiet()
    rows: list[PaperRow] = []
    about = {"config": dataclasses.asdict(config), "versions": versions()}
    for found in paper(config):
        rows += found
        write_json(Path(config.output) / "paper.json", about | {"rows": [row.flat() for row in rows]})
    print(table(rows))
    if not plot_trend([row.flat() for row in rows], Path(config.output) / "fig7"):
        logger.info("no fig7.svg: there are no rows of fig7, or matplotlib is not installed")


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(exit_on_user_error(main))
