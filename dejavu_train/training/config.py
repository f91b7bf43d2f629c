"""The configuration of a run: one dataclass per section, and the jobs it asks for. Readable without torch."""

import dataclasses
import json
from typing import Any, Literal

from dejavu_train.bundle.allocation import parse_budget
from dejavu_train.calibration.config import CalibrateConfig, check_reachable
from dejavu_train.data.config import CONSTANTS, POOL_BLOCKS, CollectConfig, DataConfig
from dejavu_train.data.text import SELF, TextSource
from dejavu_train.families import TARGETS, ModelDims, Site, Target, UnitKey
from dejavu_train.families.dims import listed
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import COUNT, NUMBER, RATE, SEED, SHARE, Range, check_ranges
from dejavu_train.models.config_values import read_values
from dejavu_train.models.installed import installed
from dejavu_train.models.weight_format import stored_format
from dejavu_train.training.sizes import check_help

INVOCATION = ("layers", "targets", "jobs", "scheduler", "resources", "plan")  # keys of one invocation, never kept
LOSSES = ("paper", "pos_weight", "contribution", "listwise", "regression", "log_contribution")  # in predictors.losses
# Options of 0.2. Identities of stages still have them, so that its runs go on.
_CONSTANTS: dict[str, Any] = {f"collect.{name}": value for name, value in CONSTANTS.items()}
_CONSTANTS |= {"data.pool_blocks": POOL_BLOCKS, "mlp.density_allocation": True, "heads.density_allocation": False}
for _target in ("mlp", "heads"):
    _CONSTANTS |= {f"{_target}.lookahead_nearest": False, f"{_target}.monitor": "retained_mass"}
    _CONSTANTS[f"{_target}.warmup"] = 0.05


@dataclasses.dataclass(frozen=True)
class PredictorConfig:
    """The predictors of one target and how they are trained."""

    enabled: bool = True
    """false: this target has no predictors and stays dense."""
    rank: int = 64
    """Width of the bottleneck."""
    ranks: dict[int, int] = dataclasses.field(default_factory=dict)
    """Rank of single layers, where it differs."""
    nonlinearity: Literal["none", "relu"] = "none"
    """Between the two matrices."""
    bias: bool = True
    """One offset per unit."""
    init: Literal["random", "small", "svd", "whitened_svd"] = "whitened_svd"
    """First values: random, small, the SVD of the map into the neurons, or that SVD weighed with the inputs' second
    moment. The last two are of mlp only."""
    lookahead: int = 0
    """How many halves with a target before its own the predictor reads: 0 its own, 1 the half before, and so on."""
    predictor: dict[str, Any] | None = None
    """A predictor of your own, class_path and init_args, in place of the low-rank one. See docs/guides/extend.md."""
    loss: str | dict[str, Any] = "contribution"
    """paper, pos_weight, contribution, listwise, regression or log_contribution. With arguments, or for a loss of your
    own: class_path and init_args, such as contribution and negative_weight."""
    density: float | None = None
    """Mean density at which the predictors will be deployed. Metrics and early stopping refer to it. null: that of
    calibrate when they are first trained. Layers of mlp share it in proportion to their true density."""
    steps: int = 1000
    """Optimiser steps at most. 0 keeps the first values: with an SVD initialisation they are a baseline without
    training."""
    learning_rate: float = 4e-3
    """Highest rate of AdamW, after a twentieth of the steps."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    validations: int = 10
    """How often the val set is scored during those steps."""
    patience: int = 4
    """Stop after so many validations in which the retained mass at that density did not improve. 0 never stops."""

    def check(self, section: str, shape: ModelDims) -> None:
        """Raise :class:`UserError` for a value that cannot be meant."""
        ranges = {
            "rank": COUNT, "steps": NUMBER, "validations": COUNT, "patience": NUMBER, "density": SHARE,
            "learning_rate": RATE, "weight_decay": Range(0, 100), "lookahead": Range(0, 2 * shape.n_layers),
        }  # fmt: skip
        check_ranges(self, f"{section}.", ranges)
        for rank in self.ranks.values():
            if rank < 1:
                raise UserError(f"{section}.ranks must be at least 1, got {rank}")
        for rank in (self.rank, *self.ranks.values()):
            if self.predictor is None and rank > shape.d_model:
                raise UserError(f"{section}.rank is {rank}, above the model's width {shape.d_model}; choose less")
        for layer in self.ranks:
            if not 0 <= layer < shape.n_layers:
                raise UserError(f"{section}.ranks: the model has layers 0 to {shape.n_layers - 1}, got {layer}")
        if section == "heads" and self.init in ("svd", "whitened_svd") and self.predictor is None:
            raise UserError(f"heads.init cannot be {self.init}: heads have no weight to decompose; use small or random")
        if isinstance(self.loss, str) and self.loss not in LOSSES:
            raise UserError(f"{section}.loss: unknown loss {self.loss}; the losses are {', '.join(LOSSES)}")

    def describe(self, layer: int) -> dict[str, Any]:
        """Kind of the predictor of ``layer`` for a checkpoint."""
        if self.predictor is not None:
            unused = {"rank": 0, "nonlinearity": "none", "bias": False}
            return {"kind": "custom", **unused, "init_args": {}, **self.predictor}
        kept = {"rank": self.rank_of(layer), "nonlinearity": self.nonlinearity, "bias": self.bias}
        return {"kind": "low_rank", **kept}

    def rank_of(self, layer: int) -> int:
        return self.ranks.get(layer, self.rank)

    def site(self, key: UnitKey, shape: ModelDims) -> Site:
        """Site that the predictor of ``key`` reads. Raises UserError before the first layer.

        Where layers have no target, it is as far back as there are sites.
        """
        sites = sorted(shape.sites)
        place = sites.index(key.site) - self.lookahead
        if place < 0 and not shape.pattern:
            raise UserError(
                f"{key.target}.lookahead {self.lookahead} reaches before the first layer for layer {key.layer};"
                " choose less"
            )
        return sites[max(0, place)]


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """How the trained neuron predictors are tuned in the model, all heads computed, before the final calibration."""

    steps: int = 0
    """Optimiser steps. 0: none. They are for a GPU: docs/results/texts.md says what they gain."""
    density: float | None = None
    """Mean density of the neurons at which they are tuned. null: calibrate's (or its budget) when first tuned."""
    learning_rate: float = 2e-3
    """Highest rate of Adam. A twentieth of the steps rise to it."""
    tokens: int = 16_000
    """Tokens of a step."""
    batch_tokens: int = 4096
    """Tokens in one pass through the model. A step adds up as many passes as it needs."""
    width: float = 1.0
    """Width of the sigmoid in the backward pass, in units of a logit."""
    price: float | None = None
    """The first price: nats per token that the bytes of all dense MLPs are worth. null: the slope that was measured."""

    def check(self) -> None:
        """Raise :class:`UserError` for a value that cannot be meant."""
        positive = Range(0, 10**12, above=True)
        ranges = {"steps": NUMBER, "density": SHARE, "learning_rate": RATE, "tokens": COUNT, "batch_tokens": COUNT}
        check_ranges(self, "tune.", ranges | {"width": positive, "price": positive})

    def passes(self, window: int) -> tuple[int, int]:
        """How many passes a step has, and windows of so many tokens in each."""
        return max(1, round(self.tokens / max(self.batch_tokens, window))), max(1, self.batch_tokens // window)


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Hardware on which --plan reckons what a run takes. Nothing is run."""

    gpu: str = "H200"
    """H200, H100, or another name with plan.tflops and plan.read_tb_s."""
    gpus: int = 1
    """How many of them. Predictors train on all, the other stages run on one."""
    price: float | None = None
    """Price of one GPU for an hour, in whatever currency."""
    disk_gb_s: float = 1.0
    """Gigabytes that the disk writes, or reads, in a second."""
    tflops: float | None = None
    """Products of 16-bit matrices, in 10^12 operations a second. null: as measured for plan.gpu."""
    read_tb_s: float | None = None
    """Weights read while text is written, in TB/s. null: as measured for plan.gpu."""

    def __post_init__(self) -> None:
        rates = dict.fromkeys(("price", "disk_gb_s", "tflops", "read_tb_s"), Range(0, 10**6, above=True))
        check_ranges(self, "plan.", {"gpus": COUNT} | rates)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything train.py needs to know."""

    EXAMPLES = (
        "python train.py --config configs/opt-mini.yaml                          the demo: seven minutes of a CPU core",
        "python train.py --model facebook/opt-1.3b --output checkpoints/mine     any model, with defaults",
        "python train.py --config configs/opt-6.7b.yaml --check                  disk and minutes, without any work",
        "python train.py --config configs/opt-66b.yaml --plan.gpus 4             the same on hardware that is not here",
    )
    COMMON = (
        "model", "output", "text.source", "collect.train_tokens", "mlp.rank", "mlp.density", "mlp.steps",
        "calibrate.mlp_density", "calibrate.head_density", "calibrate.dtype", "trainer",
    )  # fmt: skip
    GROUPS = {
        "run": (
            "Of this invocation",
            ("revision", "bundle", "store", "verify", "seed", *INVOCATION[:-1]),
        )
    }
    CONSTANTS = _CONSTANTS
    NOTES = {"check": ("--check, and what the configurations take: disk, GPU, hours", check_help)}

    model: str = "checkpoints/opt-mini"
    """Folder or hub id of a model that docs/guides/families.md lists."""
    revision: str | None = None
    """Commit or tag of a hub model."""
    output: str = "checkpoints/demo"
    """Folder of everything that is made."""
    bundle: str = "bundle"
    """Folder of the bundle in it. Another name keeps the bundles of earlier settings."""
    store: str | None = None
    """Address on object storage, such as s3://bucket/run, where activations, predictors and bundle are kept too. A host
    that lacks them reads them there."""
    verify: Literal["sampled", "full"] = "sampled"
    """Name the model by a hash over samples of its weights, or over every byte (slow for a large model)."""
    seed: int = 0
    """Seed of the text's order, the first values and the batches."""
    layers: str | int | None = None
    """Layers that this invocation trains, as 0-5 or 0,2,4. null: all."""
    targets: str = "mlp,heads"
    """Targets that this invocation trains."""
    jobs: str | int = 1
    """Processes that train at once, and by layers collect and calibrate. auto: one for each GPU of this host, or of
    Ray's cluster."""
    scheduler: Literal["local", "ray"] = "local"
    """Where they run: on this host, or by Ray on several that share the output folder."""
    resources: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Resources that each of them asks Ray for, as --resources.NAME VALUE: options of a task, such as num_gpus."""
    text: TextSource = dataclasses.field(default_factory=TextSource)
    """Where text comes from."""
    collect: CollectConfig = dataclasses.field(default_factory=CollectConfig)
    """Recording of the dense model."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """How shards are read for training."""
    mlp: PredictorConfig = dataclasses.field(default_factory=PredictorConfig)
    """Predictors of the neurons."""
    heads: PredictorConfig = dataclasses.field(
        default_factory=lambda: PredictorConfig(
            rank=12, init="small", loss="log_contribution", density=0.85, learning_rate=3e-3
        )
    )
    """Predictors of the attention heads."""
    calibrate: CalibrateConfig = dataclasses.field(default_factory=CalibrateConfig)
    """Thresholds."""
    tune: TuneConfig = dataclasses.field(default_factory=TuneConfig)
    """Training of the neurons' predictors inside the sparse model, after all others and before the last calibration."""
    trainer: dict[str, Any] = dataclasses.field(default_factory=lambda: {"devices": 1})
    """Arguments of the Lightning Trainer: --trainer.NAME VALUE, classes as class_path and init_args. --trainer.help
    lists them."""
    plan: PlanConfig | None = None
    """--plan: do no work, print what the run takes on stated hardware. Of the model config.json is enough."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", installed(self.model))

    def predictor(self, target: Target) -> PredictorConfig:
        return self.mlp if target == Target.MLP else self.heads

    def settled(self, shape: ModelDims) -> "RunConfig":
        """The same with what a model's family decides, where it is auto: the second stage and the dtype."""
        low_rank = self.mlp.enabled and self.mlp.predictor is None
        return dataclasses.replace(
            self, collect=self.collect.settled(shape), calibrate=self.calibrate.settled(shape, low_rank)
        )

    def check(self, shape: ModelDims) -> None:
        """Raise :class:`UserError` for a value that does not fit the model."""
        check_ranges(self, "", {"seed": SEED})
        parse_layers(self.layers, shape.n_layers)
        self._check_jobs()
        for target in parse_targets(self.targets):
            if not self.predictor(target).enabled and self.targets == target:
                raise UserError(f"--targets {target} asks for predictors that {target}.enabled: false leaves out")
        for target in TARGETS:
            if self.predictor(target).enabled:
                self.predictor(target).check(target, shape)
        for job in self.own_jobs(shape):
            self.predictor(job.target).site(job, shape)
        if not self.own_jobs(shape) and any(self.predictor(target).enabled for target in parse_targets(self.targets)):
            has = [f"{target} in layers {listed(shape.layers_of(target))}" for target in parse_targets(self.targets)]
            raise UserError(f"--layers {self.layers} names no layer with a target; the model has {' and '.join(has)}")
        if not any(self.predictor(target).enabled for target in TARGETS):
            raise UserError("mlp.enabled and heads.enabled are both false: there is nothing to train")
        if not self.heads.enabled and self.calibrate.head_density < 1 and self.calibrate.budget is None:
            raise UserError(
                f"calibrate.head_density {self.calibrate.head_density:g} needs the predictors that heads.enabled: false"
                " leaves out; enable them, or ask for 1.0"
            )
        self.text.check()
        sample, most = self.text.sample, shape.max_positions
        length = sample.length or self.collect.window
        own = length if self.text.source == SELF else 0
        for name, asked in (("collect.window", self.collect.window), ("text.sample.length", own)):
            if asked > most:
                raise UserError(f"{name} is {asked}, but the model has {most} positions; give --{name} {most}")
        if sample.prompts is not None and sample.prompt_tokens + 1 >= length:
            raise UserError(
                f"text.sample.prompt_tokens is {sample.prompt_tokens}, of samples of {length} tokens; choose less"
            )
        if self.text.source == SELF and (sample.tokens or 4 * length) < 4 * length:
            raise UserError(
                f"text.sample.tokens is {sample.tokens}, fewer than the four samples of {length} tokens that the sets"
                " need; raise it"
            )
        for name in ("train", "val", "calibration"):
            tokens = self.collect.budget(name)
            if tokens is not None and tokens < self.collect.window:
                raise UserError(
                    f"collect.{name}_tokens is {tokens}, fewer than one sequence of collect.window"
                    f" {self.collect.window}; raise the one or lower the other"
                )
        self.calibrate.check(shape, [target for target in TARGETS if self.predictor(target).enabled])
        self._check_budget(shape)
        self.tune.check()
        check_bundle_name(self.bundle)
        self._check_tune(shape)
        if self.tune.steps and (not self.mlp.enabled or self.calibrate.selection != "threshold"):
            raise UserError("tune.steps needs predictors of the mlp and calibrate.selection threshold")

    def _check_tune(self, shape: ModelDims) -> None:
        """A bundle whose MLPs are all dense has nothing to tune, which would be found out after training."""
        if not self.tune.steps:
            return
        if self.tune.density is not None:
            check_reachable(self.tune.density, "tune.density", Target.MLP, self.calibrate.dense_layers, shape)
        open_density = self.tune.density is None and (self.calibrate.budget or self.calibrate.retained_mass)
        dense = not open_density and (self.tune.density or self.calibrate.mlp_density) == 1
        if dense or set(self.calibrate.dense_layers) >= set(shape.layers_of(Target.MLP)):
            raise UserError(
                "tune.steps has nothing to tune where every MLP is dense; ask for a density below 1, or set tune.steps"
                " to 0"
            )

    def _check_budget(self, shape: ModelDims) -> None:
        """A budget that the predictors alone exceed is known before anything is collected."""
        budget = None if self.calibrate.budget is None else parse_budget(self.calibrate.budget).bytes_per_token
        if budget is None:
            return
        from dejavu_train.bundle.cost_model import predictor_bytes, spec_bytes  # import torch
        from dejavu_train.bundle.spec import PredictorSpec

        weights = stored_format(read_values(self.model, self.revision))
        dense = weights.unit_bytes(shape).dense
        least = 0.0 if self.heads.enabled else dense(shape, Target.HEADS) * len(shape.layers_of(Target.HEADS))
        for job in self.all_jobs(shape):
            section, n_out = self.predictor(job.target), shape.units(job.target)
            site, rank, dtype = (
                section.site(job, shape),
                section.rank_of(job.layer),
                self.calibrate.dtype_of(job.target),
            )
            kind = section.describe(job.layer)["kind"]  # of a custom one the bytes are not known yet, and count as none
            sizes = (rank, shape.d_model, n_out)
            spec = PredictorSpec(*job, site.input, site.layer, *sizes, kind, bias=section.bias, dtype=dtype)
            least += min(predictor_bytes(spec), spec_bytes(spec, shape, weights))
        if budget < least:
            raise UserError(
                f"calibrate.budget {self.calibrate.budget} cannot be met: the predictors alone read {least:.4g} bytes;"
                " raise the budget, or choose a lower rank or calibrate.dtype int4"
            )

    def _check_jobs(self) -> None:
        text = str(self.jobs)
        if text != "auto" and not (text.isdigit() and 1 <= int(text) <= 1024):
            raise UserError(f"--jobs must be auto or a number from 1 to 1024, got {text}")
        if self.resources and self.scheduler == "local":
            raise UserError("resources are what Ray is asked for; set --scheduler ray as well")
        if text != "1" and str(self.trainer.get("devices", 1)) != "1":
            raise UserError(
                f"--jobs {text} trains each predictor on one device, got trainer.devices {self.trainer['devices']};"
                " leave out one of the two"
            )

    def all_jobs(self, shape: ModelDims) -> list[UnitKey]:
        """Every (layer, target) that the bundle needs."""
        return [UnitKey(layer, t) for t in TARGETS if self.predictor(t).enabled for layer in shape.layers_of(t)]

    def own_jobs(self, shape: ModelDims) -> list[UnitKey]:
        """Jobs of them that this invocation was asked for."""
        layers, targets = parse_layers(self.layers, shape.n_layers), parse_targets(self.targets)
        return [job for job in self.all_jobs(shape) if job.layer in layers and job.target in targets]

    def to_json(self) -> dict[str, Any]:
        """Plain values that JSON and YAML can hold. ``parse_config`` reads them again."""
        values = dataclasses.asdict(self)
        return json.loads(json.dumps(values))


_TAKEN = (  # what else lies in an output folder
    "activations", "predictors", "tuned", "run.json", "config.yaml", "tuning.ckpt", "calibration-states", "wandb",
    "results.json", "report.html", "curve.png", "observations", "generation", "experiments",
)  # fmt: skip
_LONGEST_NAME = 200  # bytes; file systems take 255


def check_bundle_name(name: str) -> None:
    """Refuse what cannot be the name of a folder within the output, or is that of something else there.

    Raises:
        UserError: such a name.
    """
    wrong = not name.strip() or name != name.strip() or name.startswith(".") or not name.isprintable()
    if wrong or "/" in name or "\\" in name or len(name.encode()) > _LONGEST_NAME:
        raise UserError(f"bundle must be the name of a folder within the output, got {name!r}; choose a plain one")
    if name.lower() in _TAKEN:
        raise UserError(f"bundle must name a folder of its own within the output: {name} is that of something else")


def parse_layers(text: str | int | None, n_layers: int) -> list[int]:
    """``"0-5"``, ``"0,2,4"``, ``3`` or None -> sorted layer numbers.

    Raises:
        UserError: not of that form, or out of range.
    """
    if text is None:
        return list(range(n_layers))
    layers: set[int] = set()
    for part in str(text).split(","):
        first, dash, last = part.strip().partition("-")
        ends = [first, last] if dash else [first]
        if not all(end.isdecimal() and len(end) < 10 for end in ends) or int(ends[-1]) < int(first):
            raise UserError(f"--layers must look like 0-5 or 0,2,4, got {text}")
        if int(ends[-1]) >= n_layers:  # before a range of any length is made
            raise UserError(f"--layers {text}: the model has layers 0 to {n_layers - 1}, got {ends[-1]}")
        layers.update(range(int(first), int(ends[-1]) + 1))
    return sorted(layers)


def parse_targets(text: str) -> list[Target]:
    """``"mlp,heads"`` -> names.

    Raises:
        UserError: an unknown target.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [name for name in names if name not in TARGETS]
    if wrong or not names:
        raise UserError(f"--targets must be some of {', '.join(TARGETS)}, got {text}")
    return [target for target in TARGETS if target in names]
