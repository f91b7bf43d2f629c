"""Output of ``train.py --check`` after all checks: stages, what of them is there, tokens, bytes and minutes.

Nothing is written. The minutes are those of estimate.py, which times a block and some steps on the device of the run.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from dejavu_train.data.containers import is_compressed
from dejavu_train.data.samples import CYCLE, SampleManifest, tokens_needed
from dejavu_train.data.shards import SETS, ActivationManifest
from dejavu_train.data.text import SELF
from dejavu_train.families import TARGETS, ModelDims
from dejavu_train.models.stored import has_config_alone
from dejavu_train.run.estimate import Estimate
from dejavu_train.run.folder import check_run_folder
from dejavu_train.run.footprint import memory_line
from dejavu_train.run.own_text import budgets_of, tokens_to_sample, writes_on_gpu
from dejavu_train.run.pipeline import bundle_stage, checked, unused_heads
from dejavu_train.training.config import RunConfig
from dejavu_train.training.job import has_predictor, job_folder, stored_stage
from dejavu_train.training.stages import calibrate_stage, train_stage, tune_stage
from dejavu_train.training.trainer import start_device

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4  # of English in OPT's vocabulary, about; for a guess from a file's size
SHARES = {"train": 0.76, "calibration": 0.08, "val": 0.08}  # of a text's documents


def print_plan(config: RunConfig) -> None:
    """Check everything that needs no work, then print what ``train.py`` would do.

    Raises:
        UserError: as :func:`dejavu_train.run.pipeline.run` before any work.
    """
    config, shape = checked(config, only_plan=True)
    if has_config_alone(config.model):
        logger.info("%s has a config.json alone: weights and tokenizer are not looked at", config.model)
    whole = calibrate_stage(config)
    check_run_folder(config, whole)  # stages are named by the configuration as it was given, with its open densities
    output = Path(config.output)
    rows = [("stage", "state", "about")]
    seconds: dict[str, float] = {}
    estimate = Estimate.measure(config, shape)
    manifest_path = output / "activations" / "manifest.json"
    manifest = ActivationManifest.load(output / "activations") if manifest_path.is_file() else None
    missing = None if manifest is None else manifest.missing(output / "activations")
    sets = expected_tokens(config) if manifest is None else _recorded(manifest)
    tokens = None if None in sets.values() else sum(filter(None, sets.values()))
    if missing == []:
        state = "reused"
    else:
        state = "to do" if missing is None or manifest is None else f"{len(missing)} of {len(manifest.shards)} shards"
        to_do = sum(filter(None, sets.values())) if missing is None else sum(entry.tokens for entry in missing)
        seconds["text"] = estimate.sampling(tokens_to_sample(config))
        seconds["collecting"] = estimate.collecting(to_do, to_do * row_bytes(config, shape))
    most = "" if tokens is None or manifest is not None or is_measured(config) else ", at most: the text was not read"
    rows.append(("collect", state, _size(config, shape, tokens) + most))
    recorded = {name: sets.get(name) or 0 for name in SETS}

    for target in TARGETS:
        stage = train_stage(config, target)
        jobs = [job for job in config.all_jobs(shape) if job[1] == target]
        before = {job: stored_stage(job_folder(output, job)) for job in jobs if has_predictor(output, job)}
        done = [job for job in before if stage.matches(before[job])]
        own = [job for job in config.own_jobs(shape) if job[1] == target and job not in done]
        if jobs:
            steps = config.predictor(target).steps
            other = [stage.difference(stored) for job, stored in before.items() if job not in done]
            why = f"; trained before, but {other[0]}" if other else ""
            about = f"{len(own)} predictors of {steps} steps at most{why}" if own else f"{len(done)} predictors"
            rows.append((stage.name, _state(len(done), len(jobs)), about))
            if own:
                seconds["training"] = seconds.get("training", 0.0) + estimate.training(target, len(own), recorded)
    if config.tune.steps:
        made = tune_stage(config).matches(stored_stage(output / "tuned"))
        rows.append(("tune", "reused" if made else "to do", f"{config.tune.steps} steps"))
        seconds["tuning"] = 0.0 if made else estimate.tuning()
    made = whole.matches(bundle_stage(output / config.bundle))
    rows.append(("calibrate", "reused" if made else "to do", f"writes {output / config.bundle}"))
    seconds["calibrating"] = 0.0 if made else estimate.calibrating(recorded["calibration"])
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    print("\n".join(f"{a.ljust(widths[0])}  {b.ljust(widths[1])}  {c}" for a, b, c in rows))
    unit, length = ("hours", 3600) if sum(seconds.values()) > 3 * 3600 else ("minutes", 60)
    parts = ", ".join(f"{name} {spent / length:.1f}" for name, spent in seconds.items() if spent)
    if config.collect.by_layers:
        print(memory_line(config, shape, tokens or 0))
    print(
        f"{unit}: about {sum(seconds.values()) / length:.1f}{f' ({parts})' if parts else ''}, from a block and training"
        f" steps that were timed just now on {_device_name(start_device(config.trainer))}; early stopping saves some"
    )
    if not made and (notice := unused_heads(config, config.all_jobs(shape))):
        print(notice)
    print("no mistake was found; the same command without --check begins")


def stage_seconds(estimate: Estimate, rows: Mapping[str, int], sampled: int) -> dict[str, float]:
    """Seconds of each stage where nothing is there yet, on one device.

    Args:
        rows: tokens of each set.
        sampled: tokens that the model writes before.
    """
    config, shape = estimate.config, estimate.shape
    tokens = sum(rows.values())
    jobs = config.all_jobs(shape)
    numbers = {target: sum(job.target == target for job in jobs) for target in TARGETS}
    return {
        "text": estimate.sampling(sampled),
        "collecting": estimate.collecting(tokens, tokens * row_bytes(config, shape)),
        "training": sum(estimate.training(target, count, rows) for target, count in numbers.items() if count),
        "tuning": estimate.tuning(),
        "calibrating": estimate.calibrating(rows["calibration"]),
    }


def expected_tokens(config: RunConfig, on_gpu: bool | None = None) -> dict[str, int | None]:
    """How many tokens of each set will be recorded, about: what is asked for, where only reading the text would tell.

    None: all of such a text.
    ``on_gpu`` says whether the model writes its text on a GPU. None: as the run would.
    """
    on_gpu = writes_on_gpu(config) if on_gpu is None else on_gpu
    available: int | None = None
    shares = SHARES
    source = config.text.source
    if source == SELF:
        shares = {name: CYCLE.count(name) / len(CYCLE) for name in SHARES}
        available = tokens_needed(config.text.sample, budgets_of(config), on_gpu)[0]
        if (Path(config.model) / "samples.json").is_file():
            available = config.text.sample.tokens or SampleManifest.load(Path(config.model)).tokens
    elif is_measured(config):
        available = Path(str(source)).stat().st_size // BYTES_PER_TOKEN
    tokens: dict[str, int | None] = {}
    for name, share in shares.items():
        known = [config.collect.budget(name), None if available is None else round(share * available)]
        tokens[name] = min((each for each in known if each is not None), default=None)
    return tokens


def is_measured(config: RunConfig) -> bool:
    """Tell whether the length of the text follows from its file's size, or from the model that writes it."""
    source = config.text.source
    if source == SELF:
        return True
    plain = isinstance(source, str) and Path(source).is_file() and not is_compressed(source)
    return plain and config.text.documents is None


def _recorded(manifest: ActivationManifest) -> dict[str, int | None]:
    return {name: sum(entry.tokens for entry in manifest.of_set(name)) for name in SETS}


def row_bytes(config: RunConfig, shape: ModelDims) -> int:
    """Bytes of one token in the shards of all layers."""
    return ActivationManifest(config.model, "", shape, config.collect.storage, {}, {}, ()).row_bytes()


def _size(config: RunConfig, shape: ModelDims, tokens: int | None) -> str:
    if tokens is None:
        return "all tokens of the text"
    gigabytes = tokens * row_bytes(config, shape) / 1e9
    return f"{tokens:,} tokens, {gigabytes:.2f} GB of activations"


def _state(done: int, asked: int) -> str:
    if done == asked:
        return "reused"
    return f"{asked - done} of {asked} to do" if done else "to do"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"a CPU ({torch.get_num_threads()} threads)"
