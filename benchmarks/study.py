"""What makes predictors hold better on every text: variants of one recipe, trained and scored on texts to choose by.

    python -m benchmarks.texts prepare-val --data FOLDER     the texts that variants are chosen on (.data/val_*.jsonl)
    python -m benchmarks.study collect TEXT                  samples of a text and their activations
    python -m benchmarks.study run VARIANT ...               rows of variants, appended to docs/texts/study.csv
    python -m benchmarks.study list                          all variants; `texts VARIANT ...`: what they are trained on

A variant is trained on activations that others share, by the library's start, loss, rounding, schedule and calibration
in a plain loop that keeps a layer's rows on the device: some seconds a layer. Every row is scored at equal bytes by
calibration, 8.3 and 10.6 % of the MLPs', by the divergence from the dense model (it scatters far less than the increase
of perplexity) on 30,000 tokens of each val text. Nothing here reads a test text.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dejavu_train.calibration.calibrate as calibration
from benchmarks.rows import append_row, commit
from benchmarks.study_score import read_corpora, score, skipped_means
from benchmarks.study_variants import TRAIN_TEXTS, VARIANTS, Variant
from benchmarks.texts import BYTES, VAL_TOKENS, at_bytes
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.cli import parse_config
from dejavu_train.config import RunConfig, TuneConfig
from dejavu_train.data.collect import collect
from dejavu_train.data.samples import MAX_SEED, load_samples
from dejavu_train.data.shard_reader import ShardReader
from dejavu_train.data.shards import ActivationManifest, LayerWeights
from dejavu_train.data.windows import plan_windows
from dejavu_train.evaluation.perplexity import EvalCorpus
from dejavu_train.files import read_sealed, sha256_file, write_sealed
from dejavu_train.locks import locked
from dejavu_train.models.opt import load_opt, load_tokenizer, read_shape, resolve_device
from dejavu_train.models.weight_format import FLOAT16
from dejavu_train.pipeline import open_writer, sampled
from dejavu_train.predictors.low_rank import LowRankPredictor, svd_init
from dejavu_train.predictors.metrics import total
from dejavu_train.training.build import make_predictor
from dejavu_train.training.finetune import finetune
from dejavu_train.training.job import deployed_density, export, init_module, job_folder
from dejavu_train.training.lit_predictor import LitPredictor

TOKENS, SEED = 1_000_000, 1
MORE_SEED = 77  # of text that is only tuned on
SENSITIVITY_TOKENS = 16_384
SHIFT_TOKENS = 20_000


@dataclasses.dataclass
class StudyRow:
    """One variant at one budget on one val text."""

    variant: str
    seed: int
    trained_on: str
    train_tokens: int
    text: str
    documents: int
    tokens: int
    asked: str
    mlp_density: float
    head_density: float
    mlp_bytes: float
    divergence: float
    increase: float
    error: float
    recall: float
    retained_mass: float
    head_share: float
    seconds: float
    device: str
    torch: str
    commit: str
    date: str


class Experts(nn.Module):
    """Several low-rank predictors; a row goes through the one whose centre is nearest to its input."""

    def __init__(self, predictors: Sequence[LowRankPredictor], centres: Tensor) -> None:
        super().__init__()
        self.predictors = nn.ModuleList(predictors)
        self.register_buffer("centres", centres)

    def nearest(self, x: Tensor) -> Tensor:
        centres = self.get_buffer("centres")
        return (x.float() @ centres.T - centres.square().sum(-1) / 2).argmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        chosen = self.nearest(flat)
        logits = flat.new_zeros(len(flat), self.predictors[0].up.shape[0])
        for number, predictor in enumerate(self.predictors):
            logits[chosen == number] = predictor(flat[chosen == number])
        return logits.unflatten(0, x.shape[:-1])


EXPERTS: dict[int, Experts] = {}  # of the variant that runs, by layer


@contextlib.contextmanager
def experts_deployed(dtype: str) -> Iterator[None]:
    """Within the context calibration and selection see ``EXPERTS``, rounded as deployed, in the place of predictors."""
    stored, read, deployed = calibration.as_stored, calibration.read_predictor, Bundle.predictor
    for experts in EXPERTS.values():
        for predictor in experts.predictors:
            predictor.requires_grad_(False)
            predictor.rounded_to = None
            stored(predictor.cpu(), calibration.stored_tensors(predictor, dtype))

    def read_marked(folder: Path, classes: Any = None) -> Any:
        found = read(folder, classes)
        if found.metadata["target"] == "mlp" and found.metadata["layer"] in EXPERTS:
            found.predictor.__dict__["experts"] = EXPERTS[found.metadata["layer"]]  # not one of its submodules
        return found

    calibration.read_predictor = read_marked  # type: ignore[assignment]
    calibration.as_stored = lambda predictor, tensors: predictor.__dict__.get("experts") or stored(predictor, tensors)
    Bundle.predictor = lambda self, layer, target: (  # type: ignore[method-assign]
        EXPERTS[layer] if target == "mlp" and layer in EXPERTS else deployed(self, layer, target)
    )
    try:
        yield
    finally:
        calibration.read_predictor, calibration.as_stored = read, stored
        Bundle.predictor = deployed  # type: ignore[method-assign]


def config_of(options: argparse.Namespace, text: str, seed: int, flags: Sequence[str], heads: bool) -> RunConfig:
    """The run configuration of a training text: opt-mini's, sampled as TRAIN_TEXTS says."""
    given = {"tokens": TOKENS, **TRAIN_TEXTS[text], "seed": SEED}
    if given.pop("prompts", None):
        given |= {"prompts": str(_vocabulary_file(options)), "prompt_tokens": 1}
    if options.tokens:
        given["tokens"] = options.tokens
    sample = [f"--text.sample.{name}={value}" for name, value in given.items()]
    only = [] if heads else ["--heads.enabled=false", "--calibrate.head_density=1.0"]
    every = [f"--collect.{name}_tokens=null" for name in ("train", "val", "calibration")]
    return parse_config(
        [f"--config={options.config}", f"--model={options.model}", f"--output={options.work}/texts/{text}"]
        + [f"--seed={seed}", f"--text.cache={options.work}/samples", f"--trainer.accelerator={options.accelerator}"]
        + [f"--calibrate.sensitivity_tokens={SENSITIVITY_TOKENS}", "--trainer.logger=false"]
        + [*every, *sample, *only, *flags]
    )


def _vocabulary_file(options: argparse.Namespace) -> Path:
    path = Path(options.work) / "vocabulary.jsonl"
    with locked(path.with_suffix(".holders"), "another process is writing the vocabulary"):
        if not path.is_file():
            tokenizer = load_tokenizer(options.model)
            texts = [tokenizer.decode([number]) for number in range(4, len(tokenizer))]
            order = np.random.default_rng(SEED).permutation(len(texts))
            lines = (f'{{"id": {i}, "text": {json.dumps(texts[i])}}}\n' for i in order if texts[i].strip())
            path.write_text("".join(lines), "utf-8")
    return path


def collect_text(options: argparse.Namespace, text: str) -> None:
    """Samples and activations of a training text, once; as train.py makes them."""
    began = time.perf_counter()
    config = config_of(options, text, 0, (), True)
    collect(
        config.model, config.text, config.collect, f"{config.output}/activations", config.seed, config.revision, False,
        sampled(config),
    )  # fmt: skip
    print(f"{text}: sampled and collected in {time.perf_counter() - began:.0f} s", flush=True)


def fit_layer(variant: Variant, config: RunConfig, job: tuple[int, str], folders: Sequence[Path], to: Path) -> int:
    """Train one predictor as ``training.job.fit`` does, from rows that lie on the device, and write it to ``to``.

    Returns: rows that it learns on.
    """
    layer, target = job
    fit, section = variant.fit, config.predictor(target)
    device = resolve_device("cpu" if config.trainer["accelerator"] == "cpu" else "auto")
    torch.manual_seed(config.seed * 1000 + 2 * layer + (target == "mlp"))
    manifest = ActivationManifest.load(folders[0])
    sizes = (manifest.shape.d_model, manifest.shape.units(target))
    site, _ = section.site(target, layer)
    names = {"inputs": site, **({"active": "mlp_active"} if target == "mlp" else {"contribution": "head_norm"})}
    readers = [ShardReader(folder, layer, "train") for folder in folders]
    rows = {
        key: torch.cat([reader.read_rows(name, [(0, reader.rows)], device) for reader in readers])
        for key, name in names.items()
    }
    count = len(rows["inputs"])

    def make() -> LitPredictor:
        module = LitPredictor(
            target, make_predictor(config, job, *sizes), sizes[1], deployed_density(config, job, folders[0]),
            section.loss, fit.learning_rate, section.weight_decay, section.warmup,
        )  # fmt: skip
        init_module(module, config, job, folders[0], manifest.weight_hash)
        return module.to(device)

    module = make()
    if target == "mlp" and fit.experts > 1:
        centres = _centres(rows["inputs"], fit.experts)
        experts = Experts([make().predictor for _ in range(fit.experts)], centres)
        weights = LayerWeights.load(folders[0], layer, manifest.weight_hash).to(device)
        some = rows["inputs"][torch.randperm(count, device=device)[: 16_384 * fit.experts]].float()
        nearest = experts.nearest(some)
        for number, predictor in enumerate(experts.predictors):
            own = some[nearest == number].double()
            svd_init(predictor, weights.fc1_weight, weights.fc1_bias, own.T @ own / max(1, len(own)))
        model: nn.Module = EXPERTS.setdefault(layer, experts.to(device))
    else:
        model = module.predictor
    parameters = list(model.parameters())
    start = [parameter.detach().clone() for parameter in parameters]
    mean = [value.clone() for value in start]
    optimiser = torch.optim.AdamW(parameters, lr=fit.learning_rate, weight_decay=0.0, fused=device.type == "cuda")
    warm = max(1, round(section.warmup * fit.steps))
    for step in range(fit.steps):
        late = max(0.0, (step - warm) / max(1, fit.steps - warm))
        share = (step + 1) / warm if step < warm else 0.01 + 0.495 * (1 + math.cos(math.pi * late))
        for group in optimiser.param_groups:
            group["lr"] = share * fit.learning_rate
        picked = torch.randint(count, (fit.batch,), device=device)
        with torch.no_grad():
            batch = module.make_batch({name: values[picked] for name, values in rows.items()}, True)
            if target == "mlp" and fit.power != 1.0:
                assert batch.contribution is not None
                batch = dataclasses.replace(batch, contribution=batch.contribution**fit.power)
        logits = model(batch.inputs)
        loss = _hard_loss(logits, batch, fit.hard) if target == "mlp" and fit.hard else module._loss_of(logits, batch)
        if fit.anchor and target == "mlp":
            apart = zip(parameters, start, strict=True)
            moved = sum((p - s).square().sum() / s.square().sum().clamp_min(1e-9) for p, s in apart)
            loss = loss + fit.anchor * moved
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        if fit.average:
            keep = min(fit.average, (step + 1) / (step + 10))
            torch._foreach_lerp_(mean, [p.detach() for p in parameters], 1 - keep)
    if fit.average:
        with torch.no_grad():
            for parameter, value in zip(parameters, mean, strict=True):
                parameter.copy_(value)
    folder = job_folder(to, job)
    folder.mkdir(parents=True, exist_ok=True)
    export(folder, config, job, module.predictor, sizes, {})
    return count


def _hard_loss(logits: Tensor, batch: Any, power: float) -> Tensor:
    """``contribution`` with every row weighed by its own loss to ``power``; weights are 1 on average."""
    cost = batch.contribution * batch.active
    count = batch.active.sum().clamp_min(1)
    cost = cost * (count / cost.sum().clamp_min(1e-12))
    weight = torch.where(batch.active, cost, 0.1)
    rows = (weight * F.softplus(logits) - cost * logits).sum(-1) / count
    emphasis = rows.detach() ** power
    return (rows * emphasis / emphasis.mean()).sum()


@torch.no_grad()
def _centres(x: Tensor, count: int, rounds: int = 20) -> Tensor:
    """k-means: ``count`` centres of 32,768 of the rows."""
    some = x[torch.randperm(len(x), device=x.device)[:32_768]].float()
    centres = some[:count].clone()
    for _ in range(rounds):
        nearest = torch.cdist(some, centres).argmin(1)
        for number in range(count):
            if bool((nearest == number).any()):
                centres[number] = some[nearest == number].mean(0)
    return centres


def fresh_windows(config: RunConfig, tokens: int) -> list[list[int]]:
    """Windows of text that the model writes for tuning alone, without activations."""
    sample = dataclasses.replace(config.text.sample, tokens=tokens, seed=MORE_SEED % MAX_SEED)
    run = dataclasses.replace(config, text=dataclasses.replace(config.text, sample=sample))
    manifest = ActivationManifest.load(Path(config.output) / "activations")
    sets, _ = load_samples(
        run.text, run.model, manifest.weight_hash, run.collect.window, [("train", None)], torch.cuda.is_available(),
        load_tokenizer(run.model), lambda rows, length: open_writer(run, rows, length),
    )  # fmt: skip
    return [w.ids.tolist() for w in plan_windows(sets["train"], None, run.collect, None, 0)]


def tuned(
    options: argparse.Namespace, config: RunConfig, model: Any, bundle: Bundle, settings: dict[str, Any], folder: Path
) -> None:
    """Tune the neurons' predictors in the model and put them in the place of those in ``folder``."""
    from safetensors.torch import save_file

    settings = dict(settings)
    share, fresh = settings.pop("share"), settings.pop("fresh", 0)
    if options.steps:
        settings["steps"] = options.steps
    windows = ShardReader(Path(config.output) / "activations", 0, "train").windows()
    if fresh:
        windows = fresh_windows(config, options.tokens or fresh)
    how = TuneConfig(**{"batch_tokens": 16_384, **settings})
    tuned, metrics = finetune(model, bundle.at(at_bytes(bundle, share)), windows, how, FLOAT16, config.seed)
    print([f"{m['step']:.0f}: {m['nats']:.4f} at {100 * m['share']:.1f} %" for m in metrics], flush=True)
    for layer, predictor in tuned.items():
        tensors = {name: tensor.contiguous() for name, tensor in predictor.state_dict().items()}
        own = job_folder(folder, (layer, "mlp"))
        save_file(tensors, own / "predictor.safetensors")
        metadata = read_sealed(own / "predictor.json", "a finished predictor")
        write_sealed(own / "predictor.json", metadata | {"sha256": sha256_file(own / "predictor.safetensors")})


def run_variant(options: argparse.Namespace, name: str, corpora: dict[str, EvalCorpus]) -> None:
    """Train, calibrate in every way the variant asks for, score; a row per calibration, budget and text."""
    variant = VARIANTS[name]
    if options.steps:
        variant = dataclasses.replace(variant, fit=dataclasses.replace(variant.fit, steps=options.steps))
    EXPERTS.clear()
    began = time.perf_counter()
    texts = variant.text.split("+")
    configs = [config_of(options, text, variant.seed + options.seed, variant.flags, variant.heads) for text in texts]
    config = configs[0]
    folders = [Path(each.output) / "activations" for each in configs]
    folder = Path(options.work) / "variants" / f"{name}-{options.seed}"
    jobs = config.all_jobs(read_shape(config.model).n_layers)
    rows = max(fit_layer(variant, config, job, folders, folder) for job in jobs)
    device = resolve_device("cpu" if options.accelerator == "cpu" else "auto")
    model = load_opt(config.model, device=device)
    windows = ShardReader(folders[0], 0, "calibration").windows()
    targets = ["mlp", "heads"] if variant.heads else ["mlp"]

    def calibrated(**changes: Any) -> Bundle:
        settings = dataclasses.replace(config.calibrate, **changes)
        if options.tokens:
            settings = dataclasses.replace(settings, sensitivity_tokens=256)
        measured = calibration.measure_curves(
            folder / "predictors", folders[0], settings, windows, lambda: model, str(device), targets=targets
        )
        return calibration.choose(measured, settings, FLOAT16)

    with experts_deployed(config.calibrate.dtype_of("mlp")):
        if variant.tune:
            tuned(options, config, model, calibrated(), variant.tune, folder)
        for label, changes in variant.calibrations.items():
            changes = dict(changes)
            shift = changes.pop("shift", False)
            bundle = calibrated(**changes)
            points = {f"{100 * share:g} % of the bytes": (at_bytes(bundle, share), 1.0) for share in BYTES}
            points |= {"10 % of candidates": (0.1, 1.0), "20 % of candidates": (0.2, 1.0)}
            if variant.heads:
                points = {asked: (mlp, 1.0) for asked, (mlp, _) in list(points.items())[1:2]}
                points["heads at 85 %"] = (next(iter(points.values()))[0], 0.85)
            shifts = {}
            if shift:
                moved = {asked: bundle.at(*point) for asked, point in points.items()}
                tokens = options.tokens or SHIFT_TOKENS
                shifts = {
                    asked: skipped_means(model, each, windows, min(tokens, SHIFT_TOKENS), options.batch_tokens)
                    for asked, each in moved.items()
                }
            write_rows(options, model, bundle, corpora, points, shifts, began, rows, f"{name} {label}".strip(), variant)
    shutil.rmtree(folder, ignore_errors=True)


def write_rows(
    options: argparse.Namespace, model: Any, bundle: Bundle, corpora: dict[str, EvalCorpus],
    points: dict[str, tuple[float, float]], shifts: dict[str, list[Tensor]], began: float, rows: int, name: str,
    variant: Variant,
) -> None:  # fmt: skip
    """Score the points on every text; rows are written as they come."""
    for text, held in corpora.items():
        for asked, result in score(model, bundle, held, points, shifts, options.batch_tokens).items():
            mlp, heads = (
                total(s for (_, t), s in result["sums"].items() if t == target) for target in ("mlp", "heads")
            )
            row = StudyRow(
                variant=name, seed=variant.seed + options.seed, trained_on=variant.text, train_tokens=rows, text=text,
                documents=len(held.document_tokens), tokens=held.tokens, asked=asked,
                mlp_density=round(points[asked][0], 5), head_density=points[asked][1],
                mlp_bytes=round(result["bytes"], 5), divergence=round(float(result["kl"].sum()) / held.tokens, 7),
                increase=round(result["increase"], 6), error=round(result["error"] or 0.0, 6),
                recall=round(mlp.recall, 5), retained_mass=round(mlp.retained_mass, 6),
                head_share=round(heads.density, 5), seconds=round(time.perf_counter() - began, 1),
                device=torch.cuda.get_device_name() if model.device.type == "cuda" else "CPU",
                torch=torch.__version__, commit=commit(), date=datetime.date.today().isoformat(),
            )  # fmt: skip
            append_row(options.output, dataclasses.asdict(row), [field.name for field in dataclasses.fields(StudyRow)])
            if asked.startswith(("10.6", "heads")):
                line = f"{1000 * row.divergence:.2f} mnats, {100 * row.increase:+.2f} % at {100 * row.mlp_bytes:.1f} %"
                print(f"{name}: {text}, {asked}: {line}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", choices=("collect", "run", "list", "texts"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--config", default="configs/opt-mini.yaml")
    parser.add_argument("--data", default=".data")
    parser.add_argument("--work", default="checkpoints/study")
    parser.add_argument("--accelerator", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=0, help="instead of every text's, to try the script")
    parser.add_argument("--steps", type=int, default=0, help="instead of every variant's, to try the script")
    parser.add_argument("--val-tokens", type=int, default=VAL_TOKENS)
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--output", default="docs/texts/study.csv")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if options.command == "list":
        print("\n".join(VARIANTS))
    elif options.command == "texts":
        sources = [text for name in options.names for text in VARIANTS[name].text.split("+")]
        print("\n".join(dict.fromkeys(sources)))
    elif options.command == "collect":
        for name in options.names:
            collect_text(options, name)
    else:
        corpora = read_corpora(options)
        for name in options.names:
            run_variant(options, name, corpora)


if __name__ == "__main__":
    main()
