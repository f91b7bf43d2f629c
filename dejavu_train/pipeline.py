"""Walks from text to bundle and does whatever is missing: collect, train all (layer, target), tune, calibrate, bundle.

Several invocations may share one output folder, each with its own ``--layers``: collecting happens once under a lock,
every job has a lock, and whoever finishes the last job calibrates and bundles.
"""

import dataclasses
import gc
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dejavu_train.bundle import Bundle
from dejavu_train.calibrate import calibrate
from dejavu_train.collect import LoadSets, collect
from dejavu_train.config import RunConfig
from dejavu_train.errors import UserError
from dejavu_train.files import locked, read_json, replacing, sha256_file, write_json
from dejavu_train.jobs import Job, is_finished, job_folder, log_summary, run_job, summary_rows
from dejavu_train.opt_model import OPTShape, load_opt, load_tokenizer, read_shape, resolve_device, weight_hash
from dejavu_train.samples import Rows, Write, load_samples, transformers_writer
from dejavu_train.shards import SETS, ShardReader
from dejavu_train.text import SELF, Document, TextManifest
from dejavu_train.trainer import build_trainer, start_device
from dejavu_train.tune import tune

logger = logging.getLogger(__name__)

RUN_SCHEMA = 1


def run(config: RunConfig) -> None:
    """Do what is missing between text and bundle; nothing if the bundle is there.

    Raises:
        UserError: a mistake in the configuration, or a folder that holds something else.
    """
    shape = read_shape(config.model, config.revision)
    config.check(shape)
    output = Path(config.output)
    jobs = config.all_jobs(shape.n_layers)
    check_trainer(config, jobs[0])
    claim_folder(output, config)
    if (output / "bundle" / "bundle.json").is_file():
        print(f"{output / 'bundle'} is complete; nothing to do")
        return
    full_hash = config.verify == "full"
    activations = output / "activations"
    manifest = collect(
        config.model, config.text, config.collect, activations, config.seed, config.revision, full_hash, sampled(config)
    )

    own = config.own_jobs(shape.n_layers)
    began = time.monotonic()
    for number, job in enumerate(own, 1):
        title = f"[{number}/{len(own)}] layer {job[0]} {job[1]}"
        if is_finished(output, job):
            logger.info("%s: trained before", title)
            continue
        logger.info("%s: training", title)
        if not run_job(config, job, title):
            logger.info("%s: another process is training it", title)
    logger.info("trained in %.0f s", time.monotonic() - began)

    open_jobs = [job for job in jobs if not is_finished(output, job)]
    if open_jobs:
        names = ", ".join(f"layer {layer} {target}" for layer, target in open_jobs)
        print(f"predictors still open: {names}; the bundle is written when they are trained")
        return
    with locked(output / ".bundle.lock", "another process is writing the bundle; waiting for it"):
        if not (output / "bundle" / "bundle.json").is_file():
            finish(config, output, jobs, manifest.weight_hash)
    print(f"bundle: {output / 'bundle'}")


def sampled(config: RunConfig) -> LoadSets | None:
    """With the text source ``self``: what gives the documents that the model writes, or finds them written."""
    if config.text.source != SELF:
        return None

    def load() -> tuple[dict[str, list[Document]], TextManifest]:
        loaded = load_samples(
            config.text,
            config.model,
            weight_hash(config.model, config.verify == "full", config.revision),
            config.collect.window,
            [(name, config.collect.budget(name)) for name in SETS],
            resolve_device(config.collect.device).type == "cuda",
            load_tokenizer(config.model, config.revision),
            lambda rows, length: open_writer(config, rows, length),
        )
        gc.collect()  # the model that wrote is loaded again to collect; two do not fit where one fills the GPU
        torch.cuda.empty_cache()
        return loaded

    return load


def open_writer(config: RunConfig, rows: int, length: int) -> tuple[Write, str]:
    """The dense model, loaded, as a function that continues ``rows`` rows up to ``length`` tokens; and its name.

    On a GPU that holds the model it is the decode engine, else ``generate()`` of transformers.
    """
    settings, run = config.text.sample, config.collect
    device = resolve_device(run.device)
    model = load_opt(config.model, run.dtype, device, run.device_map, config.revision)
    if device.type != "cuda" or run.device_map is not None:
        return transformers_writer(model, settings), "transformers"
    from dejavu_train.decode import DecodeEngine, Sampling  # imports triton
    from kernels.attention_common import HEAD_DIMS

    if OPTShape.from_config(model.config).head_dim not in HEAD_DIMS:
        return transformers_writer(model, settings), "transformers"
    engine = DecodeEngine(model, batch=rows, context=length, release=True)

    def write(prompts: Rows, length: int, seed: int) -> Rows:
        sampling = Sampling(settings.temperature, settings.top_p, seed)
        new = engine.generate(prompts, length - len(prompts[0]), sampling=sampling, stop_tokens=())
        return [prompt + tokens for prompt, tokens in zip(prompts, new, strict=True)]

    return write, "engine"


def finish(config: RunConfig, output: Path, jobs: Sequence[Job], weight_hash: str) -> None:
    """Calibrate, write the bundle, and show one table of all predictors."""
    windows = None
    if config.calibrate.sensitivity_tokens:
        windows = ShardReader(output / "activations", 0, "calibrate").windows()
    where = (output / "activations", config.model, config.calibrate, windows)
    if config.tune.steps and not (output / "tuned").is_dir():
        tune_all(config, output, jobs, calibrate(output / "predictors", *where))
    bundle = calibrate(output / ("tuned" if config.tune.steps else "predictors"), *where)
    bundle = dataclasses.replace(bundle, weight_hash=weight_hash)  # the kind of hash that the run asked for
    bundle.save_pretrained(output / "bundle")
    columns, rows = summary_rows(output, jobs)
    with replacing(output / "predictors" / "summary.csv") as path:
        path.write_text("\n".join(",".join(str(value) for value in row) for row in [columns, *rows]) + "\n")
    print(table(columns, rows))
    log_summary(config, jobs)


def tune_all(config: RunConfig, output: Path, jobs: Sequence[Job], bundle: Bundle) -> None:
    """Tune the neuron predictors of ``bundle`` in the model; ``tuned`` holds those, and the others as trained."""
    model = load_opt(config.model, device=start_device(config.trainer), revision=config.revision)
    windows = ShardReader(output / "activations", 0, "train").windows()
    made, figures = tune(model, bundle, windows, config.tune, config.seed)
    folder = output / ".tmp-tuned"
    shutil.rmtree(folder, ignore_errors=True)
    for layer, target in jobs:
        source = job_folder(output, (layer, target))
        own = folder / source.relative_to(output / "predictors")
        shutil.copytree(
            source, own, ignore=lambda _, names: {name for name in names if not name.startswith("predictor.")}
        )
        if target == "mlp" and layer in made:
            tensors = {name: tensor.contiguous() for name, tensor in made[layer].state_dict().items()}
            save_file(tensors, own / "predictor.safetensors")
            facts = read_json(own / "predictor.json", "a finished predictor")
            facts |= {"sha256": sha256_file(own / "predictor.safetensors"), "tuned": figures[-1]}
            write_json(own / "predictor.json", facts)
    folder.rename(output / "tuned")


def check_trainer(config: RunConfig, job: Job) -> None:
    """Refuse trainer arguments that cannot work before anything is collected.

    Raises:
        UserError: as :func:`dejavu_train.trainer.build_trainer`.
    """
    trainer = {**config.trainer, "logger": False}
    build_trainer(dataclasses.replace(config, trainer=trainer), job, Path(config.output), [])


def claim_folder(output: Path, config: RunConfig) -> None:
    """Note the run's identity in the folder, or refuse a folder of another run. One that made nothing yet gives way.

    Raises:
        UserError: another identity, or a file where the folder should be.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"the output {output} is a file; choose a folder")
    path = output / "run.json"
    with locked(output / ".run.lock"):
        if path.exists() and ((output / "activations" / "manifest.json").exists() or (output / "predictors").exists()):
            stored = read_json(path, "the description of the run")
            if stored.get("schema") != RUN_SCHEMA or stored.get("identity") != config.identity():
                difference = first_difference(stored.get("config"), config.identified())
                raise UserError(
                    f"the folder {output} holds another run{difference}; choose another --output or delete the folder"
                )
            return
        write_json(path, {"schema": RUN_SCHEMA, "identity": config.identity(), "config": config.identified()})


def first_difference(stored: Any, asked: Any, name: str = "") -> str:
    """Names the first key in which two configs differ."""
    if isinstance(stored, dict) and isinstance(asked, dict):
        for key in sorted({*stored, *asked}):
            found = first_difference(stored.get(key), asked.get(key), f"{name}.{key}" if name else key)
            if found:
                return found
        return ""
    return "" if stored == asked else f" ({name} is {stored} there, {asked} here)"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as aligned text; fractions with three digits."""

    def show(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3f}" if value <= 1 else f"{value:.0f}"
        return str(value)

    cells = [list(columns), *([show(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
