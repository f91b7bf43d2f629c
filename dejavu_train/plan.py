"""What ``train.py --check`` prints after all checks: stages, what of them is there, tokens, bytes and minutes.

Nothing is written. The minutes follow from a second of measuring on the device of the run: one product of matrices,
from which the passes of the dense model are reckoned, and some training steps of a real predictor on random rows.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from dejavu_train.config import RunConfig
from dejavu_train.data.samples import CYCLE, TOKENS_ON_CPU, TOKENS_ON_GPU, SampleManifest
from dejavu_train.data.shards import ActivationManifest
from dejavu_train.data.text import SELF, is_compressed
from dejavu_train.models.opt import resolve_device, torch_dtype
from dejavu_train.models.shape import TARGETS, OPTShape
from dejavu_train.pipeline import bundle_stage, checked
from dejavu_train.predictors.losses import Batch, get_loss
from dejavu_train.run_folder import check_run_folder
from dejavu_train.stages import calibrate_stage, train_stage, tune_stage
from dejavu_train.training.build import make_predictor
from dejavu_train.training.job import has_predictor, job_folder, stored_stage
from dejavu_train.training.trainer import start_device

BYTES_PER_TOKEN = 4  # of English in OPT's vocabulary, about; for a guess from a file's size
SHARES = {"train": 0.76, "calibration": 0.08, "val": 0.08}  # of a text's documents
TRIAL_STEPS = 5


def print_plan(config: RunConfig) -> None:
    """Check everything that needs no work, then print what ``train.py`` would do.

    Raises:
        UserError: as :func:`dejavu_train.pipeline.run` before any work.
    """
    config, shape = checked(config)
    whole = calibrate_stage(config)
    config, _ = check_run_folder(config, whole)
    output = Path(config.output)
    rows = [("stage", "state", "about")]
    seconds = 0.0

    manifest_path = output / "activations" / "manifest.json"
    manifest = ActivationManifest.load(output / "activations") if manifest_path.is_file() else None
    missing = None if manifest is None else manifest.missing(output / "activations")
    tokens = expected_tokens(config) if manifest is None else sum(entry.tokens for entry in manifest.shards)
    if missing == []:
        state = "reused"
    else:
        state = "to do" if missing is None or manifest is None else f"{len(missing)} of {len(manifest.shards)} shards"
        to_do = tokens if missing is None else sum(entry.tokens for entry in missing)
        seconds += 0.0 if to_do is None else to_do * seconds_per_token(config, shape)
    rows.append(("collect", state, _size(config, shape, tokens)))

    for target in TARGETS:
        stage = train_stage(config, target)
        jobs = [job for job in config.all_jobs(shape.n_layers) if job[1] == target]
        before = {job: stored_stage(job_folder(output, job)) for job in jobs if has_predictor(output, job)}
        done = [job for job in before if stage.matches(before[job])]
        own = [job for job in config.own_jobs(shape.n_layers) if job[1] == target and job not in done]
        if jobs:
            steps = config.predictor(target).steps
            other = [stage.difference(stored) for job, stored in before.items() if job not in done]
            why = f"; trained before, but {other[0]}" if other else ""
            about = f"{len(own)} predictors of {steps} steps at most{why}" if own else f"{len(done)} predictors"
            rows.append((stage.name, _state(len(done), len(jobs)), about))
            seconds += len(own) * steps * seconds_per_step(config, shape, target) if own else 0.0
    if config.tune.steps:
        made = tune_stage(config).matches(stored_stage(output / "tuned"))
        rows.append(("tune", "reused" if made else "to do", f"{config.tune.steps} steps"))
    bundle = output / config.bundle
    rows.append(("calibrate", "reused" if whole.matches(bundle_stage(bundle)) else "to do", f"writes {bundle}"))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    print("\n".join(f"{a.ljust(widths[0])}  {b.ljust(widths[1])}  {c}" for a, b, c in rows))
    device = start_device(config.trainer)
    print(
        f"minutes: about {seconds / 60:.1f} of collecting and training, from a product of matrices and {TRIAL_STEPS}"
        f" training steps that were timed just now on {_device_name(device)}; text, tuning, validations and calibration"
        " are not counted"
    )
    print("no mistake was found; the same command without --check begins")


def expected_tokens(config: RunConfig) -> int | None:
    """How many tokens will be recorded, about; None where only reading the text would tell."""
    available: int | None = None
    shares = SHARES
    if config.text.source == SELF:
        shares = {name: CYCLE.count(name) / len(CYCLE) for name in SHARES}
        on_gpu = resolve_device(config.collect.device).type == "cuda"
        available = config.text.sample.tokens or (TOKENS_ON_GPU if on_gpu else TOKENS_ON_CPU)
        if (Path(config.model) / "samples.json").is_file():
            available = config.text.sample.tokens or SampleManifest.load(Path(config.model)).tokens
    elif isinstance(config.text.source, str) and Path(config.text.source).is_file():
        if not is_compressed(config.text.source) and config.text.documents is None:
            available = Path(config.text.source).stat().st_size // BYTES_PER_TOKEN
    total = 0.0
    for name, share in shares.items():
        budget = config.collect.budget(name)
        if available is None and budget is None:
            return None
        total += min(each for each in (budget, None if available is None else share * available) if each is not None)
    return round(total)


def seconds_per_token(config: RunConfig, shape: OPTShape) -> float:
    """Of one pass through the dense model's blocks, reckoned from one product of matrices on the device."""
    device = resolve_device(config.collect.device)
    dtype = torch_dtype(config.collect.dtype)
    rows = min(1024, config.collect.window * config.collect.batch_size)
    a = torch.randn(rows, shape.d_model, device=device).to(dtype)
    b = torch.randn(shape.d_model, shape.d_ffn, device=device).to(dtype)
    taken = _timed(lambda: a @ b, device)
    parameters = shape.n_layers * (4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ffn)
    return taken / rows * parameters / (shape.d_model * shape.d_ffn)


def seconds_per_step(config: RunConfig, shape: OPTShape, target: str) -> float:
    """Of one training step of a predictor of the target, timed on random rows."""
    device, section = start_device(config.trainer), config.predictor(target)
    predictor = make_predictor(config, (0, target), shape.d_model, shape.units(target)).to(device)
    inputs = torch.randn(config.data.batch_size, shape.d_model, device=device)
    active = torch.rand(config.data.batch_size, shape.units(target), device=device) < 0.1
    batch = Batch(inputs, active, torch.rand(active.shape, device=device) * active)
    loss = get_loss(section.loss, f"{target}.loss")
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        loss(predictor(inputs), batch).backward()
        optimizer.step()

    return _timed(step, device, TRIAL_STEPS)


def _timed(work: Callable[[], object], device: torch.device, times: int = 3) -> float:
    """Median seconds of a call, after one that is not counted."""
    found: list[float] = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return sorted(found[1:])[times // 2]


def _size(config: RunConfig, shape: OPTShape, tokens: int | None) -> str:
    if tokens is None:
        return "all tokens of the text"
    row = ActivationManifest(config.model, "", shape, config.collect.storage, {}, {}, ()).row_bytes()
    gigabytes = tokens * row * shape.n_layers / 1e9
    return f"{tokens:,} tokens, {gigabytes:.2f} GB of activations"


def _state(done: int, asked: int) -> str:
    if done == asked:
        return "reused"
    return f"{asked - done} of {asked} to do" if done else "to do"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"a CPU ({torch.get_num_threads()} threads)"
