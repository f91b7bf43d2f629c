"""The variants of `study`: what each changes in the default recipe, and the texts that they are trained on."""

import dataclasses
from typing import Any

TRAIN_TEXTS: dict[str, dict[str, Any]] = {  # name -> settings of text.sample and collect
    "self": {},
    "self-half": {"tokens": 500_000},  # what the next ones are compared with
    "temperature-0.8": {"tokens": 500_000, "temperature": 0.8},
    "temperature-1.2": {"tokens": 500_000, "temperature": 1.2},
    "temperature-1.5": {"tokens": 500_000, "temperature": 1.5},
    "length-128": {"tokens": 500_000, "length": 128},
    "vocabulary": {"tokens": 500_000, "length": 256, "prompts": True},  # every row's first token: any of the vocabulary
    "self-3m": {"tokens": 3_000_000},  # 32 GB of activations
}


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a layer's predictor is trained; the defaults are those of configs/opt-mini.yaml."""

    steps: int = 800
    batch: int = 512
    learning_rate: float = 0.01
    power: float = 1.0
    """A miss costs the contribution to this power."""
    hard: float = 0.0
    """Rows weigh as their own loss to this power: what is missed most counts more, whatever text it is of."""
    anchor: float = 0.0
    """Price of the squared distance from the start, in units of the start's own square."""
    average: float = 0.0
    """Decay of an exponential average of the weights, which is what is kept; 0: the last weights."""
    experts: int = 1
    """So many predictors share out the rows by the nearest of as many centres; a token reads one of them."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row's recipe: the training text, the fit, flags of train.py, what is tuned, and how it is calibrated."""

    says: str
    text: str = "self"
    seed: int = 0
    fit: Fit = Fit()
    flags: tuple[str, ...] = ()
    tune: dict[str, Any] | None = None
    """Settings of TuneConfig; ``share``: the bytes at which it is tuned; ``fresh``: tokens sampled for it."""
    calibrations: dict[str, dict[str, Any]] = dataclasses.field(default_factory=lambda: {"": {}})
    """Label -> changed keys of ``calibrate``; ``shift``: the mean of what is skipped goes into fc2's bias."""
    heads: bool = False


def _ranks(*ranks: int) -> tuple[str, ...]:
    return (f"--mlp.ranks={{{', '.join(f'{layer}: {rank}' for layer, rank in enumerate(ranks))}}}",)


SHORT = {"tokens": 8192, "batch_tokens": 8192}  # half the tokens a step, so that 1,500 steps end in time
VARIANTS: dict[str, Variant] = {  # what is long or decides most stands first
    "tune-1500": Variant("1,500 steps in the model", tune={"steps": 1500, "share": 0.08, **SHORT}),
    "tune-1500-fresh": Variant(
        "the same on 2M tokens of its own", tune={"steps": 1500, "share": 0.08, "fresh": 2_000_000, **SHORT}
    ),
    "base": Variant(
        "the default recipe",
        calibrations={
            "": {},
            "shift": {"shift": True},
            "sensitivity-2k": {"sensitivity_tokens": 2048},
            "sensitivity-64k": {"sensitivity_tokens": 65_536},
            "rows-80k": {"rows": 80_000},
            "cascade-0.998": {"cascade": 0.998},
            "cascade-0.9995": {"cascade": 0.9995},
        },
    ),
    "heads": Variant(
        "heads at 85 %",
        heads=True,
        calibrations={
            "": {},
            "sensitivity-2k": {"sensitivity_tokens": 2048},
            "sensitivity-64k": {"sensitivity_tokens": 65_536},
        },
    ),
    "experts-4": Variant("four predictors, one is read", fit=Fit(experts=4, batch=2048)),
    "experts-8": Variant("eight predictors, one is read", fit=Fit(experts=8, batch=4096)),
    "batch-4096-3000": Variant("3,000 steps of 4,096", fit=Fit(batch=4096, steps=3000)),
    "tune-300": Variant("300 steps in the model", tune={"steps": 300, "share": 0.08}),
    "tune-300-at-10": Variant("300 steps, tuned at 10 % of the bytes", tune={"steps": 300, "share": 0.10}),
    "tune-300-fast": Variant("300 steps at 4e-3", tune={"steps": 300, "share": 0.08, "learning_rate": 4e-3}),
    "base-1": Variant("another seed of the training", seed=1),
    "hard-1": Variant("rows weigh as their loss", fit=Fit(hard=1.0)),
    "hard-0.5": Variant("rows weigh as the root of their loss", fit=Fit(hard=0.5)),
    "rank-48": Variant("rank 48", flags=("--mlp.rank=48",)),
    "rank-96": Variant("rank 96", flags=("--mlp.rank=96",)),
    "ranks-steep": Variant("ranks by layer, 64 on average", flags=_ranks(128, 16, 48, 48, 64, 80)),
    "ranks-mild": Variant("ranks by layer, 64 on average", flags=_ranks(96, 32, 64, 64, 64, 64)),
    "power-1.5": Variant("contribution to the power 1.5", fit=Fit(power=1.5)),
    "average": Variant("averaged weights", fit=Fit(average=0.99)),
    "batch-4096": Variant("batches of 4,096", fit=Fit(batch=4096)),
    "self-half": Variant("half as many tokens", text="self-half"),
    "vocabulary": Variant("samples begin with any token", text="vocabulary"),
    "both": Variant("half own text, half that", text="self-half+vocabulary"),
    "temperature-1.2": Variant("sampled at 1.2", text="temperature-1.2"),
    "temperature-0.8": Variant("sampled at 0.8", text="temperature-0.8"),
    "anchor-0.1": Variant("held to the SVD start", fit=Fit(anchor=0.1)),
    "length-128": Variant("samples of 128 tokens", text="length-128"),
    "temperature-1.5": Variant("sampled at 1.5", text="temperature-1.5"),
    "steps-3000": Variant("3,000 steps", fit=Fit(steps=3000)),
    "tune-300-slow": Variant("300 steps at a rate of 1e-3", tune={"steps": 300, "share": 0.08, "learning_rate": 1e-3}),
    "power-0.75": Variant("contribution to the power 0.75", fit=Fit(power=0.75)),
    "anchor-1": Variant("held ten times as strongly", fit=Fit(anchor=1.0)),
    "rank-80": Variant("rank 80", flags=("--mlp.rank=80",)),
    "self-3m": Variant("3M tokens, 3,000 steps of 2,048", text="self-3m", fit=Fit(batch=2048, steps=3000)),
}
