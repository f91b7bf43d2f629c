"""The cells of the decoding benchmark: what one row of benchmarks/results/decode.csv measures."""

import dataclasses
import itertools
from dataclasses import dataclass

from benchmarks.decode_problem import UNION
from dejavu_train.kernels.common.limits import MOST_TOKENS

ENGINES = ("dense", "exact", "sparse", "hf", "hf-compile")
NOT_OPTIONS = ("engine", "batch", "prompt")
FAMILIES = ("afm-4.5b", "prosparse-7b", "minitron-8b", "nemotron-4-15b", "bloom-7b1")


@dataclass(frozen=True)
class Cell:
    """One engine under one condition.

    Args:
        engine: ours are dense, which reads all rows, exact, which leaves silent neurons out, and sparse, which leaves
            out what predictors do not select. hf is transformers' generate(), hf-compile the same with a static cache.
        mlp_density, head_density: of what the rows of the batch select together. 1 = no predictor, dense.
        rank: of the MLP predictors. 0 = 4 % of the dense MLP's bytes in fp16.
        predictors: dtype of the MLP predictors, float16 or int4.
        weights: of the layers, float16 or int4.
        lm_head: float16 or int4.
        screen: whether the token is found through an int8 screen of the LM head.
        site: halves between the site that the MLP's predictor reads and fc1.
        heads_site: halves between the site that the heads' predictor reads and q/k/v.
        one_kernel: whether all layers may run as one kernel.
    """

    engine: str = "sparse"
    batch: int = 1
    prompt: int = 128
    mlp_density: float = 0.1
    head_density: float = 0.5
    rank: int = 0
    predictors: str = "float16"
    weights: str = "float16"
    lm_head: str = "float16"
    screen: bool = False
    site: int = 0
    heads_site: int = 0
    one_kernel: bool = True

    @property
    def options(self) -> str:
        """What differs from the defaults, beside what has a column of its own."""
        changed = (
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name not in NOT_OPTIONS and getattr(self, field.name) != field.default
        )
        return " ".join(changed)

    @property
    def zeros(self) -> str:
        """The engine's option: read rows of silent neurons, or let the plan choose."""
        return "read" if self.engine == "dense" else "auto"


def read_cells(text: str) -> list[Cell]:
    """Words key=value[,value...] to the cells of all their combinations.

    >>> [(cell.engine, cell.batch) for cell in read_cells("engine=dense,sparse batch=2")]
    [('dense', 2), ('sparse', 2)]
    """
    kinds = {field.name: field.type for field in dataclasses.fields(Cell)}
    choices: dict[str, list[object]] = {}
    for word in text.split():
        name, _, values = word.partition("=")
        kind = kinds.get(name)
        if kind is None or not values:
            raise SystemExit(f"error: a cell has no '{word}'; write key=value, keys are {', '.join(kinds)}")
        choices[name] = [value == "True" if kind is bool else kind(value) for value in values.split(",")]  # type: ignore[operator]
    for engine in choices.get("engine", []):
        if engine not in ENGINES:
            raise SystemExit(f"error: engine must be one of {', '.join(ENGINES)}, got {engine}")
    cells = [Cell(**dict(zip(choices, picked, strict=True))) for picked in itertools.product(*choices.values())]  # type: ignore[arg-type]
    if any(cell.batch > MOST_TOKENS and cell.predictors == "int4" for cell in cells):
        raise SystemExit(
            f"error: predictors=int4 are for up to {MOST_TOKENS} rows; an engine of more has them as float16"
        )
    return cells


def required_cells(model: str) -> list[Cell]:
    """The cells of the pages' tables for one model. Sparse ones first, so that fc2 is laid out twice only."""
    coded = {"weights": "int4", "predictors": "int4", "lm_head": "int4"}
    if model in FAMILIES:
        both = [Cell("sparse", head_density=1.0, site=1), Cell("dense")]
        return [Cell("hf-compile"), *both, *(dataclasses.replace(cell, **coded) for cell in both)]
    prompts = (128, 1024) if model in ("6.7b", "66b") else (128,)
    sparse = [Cell(prompt=prompt, site=1) for prompt in prompts]
    sparse += [Cell(head_density=density, site=1) for density in (0.85, 1.0)]
    dense = [Cell("dense", prompt=prompt) for prompt in prompts]
    for batch, union in UNION.get(model, {}).items():
        sparse.append(Cell(batch=batch, mlp_density=union, head_density=1.0))
        dense.append(Cell("dense", batch))
    cells = [*sparse, *dense]
    screened = {"weights": "int4", "screen": True}
    return [
        *([Cell("hf-compile"), Cell("hf")] if model in ("1.3b", "6.7b") else []),
        *cells,
        *(dataclasses.replace(cell, **screened, predictors="int4" if cell.engine == "sparse" else cell.predictors)
          for cell in cells if cell.batch <= MOST_TOKENS),
    ]  # fmt: skip
