"""The text source ``self``: loads the dense model and lets it write, where its own text is not there yet."""

import gc
from pathlib import Path
from typing import Any

import torch

from dejavu_train.data.collect import LoadSets
from dejavu_train.data.samples import (
    NOT_BY_LAYERS,
    Rows,
    Write,
    is_cached,
    load_samples,
    tokens_needed,
    transformers_writer,
)
from dejavu_train.data.shards import SETS
from dejavu_train.data.text import SELF, Document, SampleConfig, TextManifest
from dejavu_train.engine.inputs import Sampling
from dejavu_train.engine.runs import RUNS
from dejavu_train.families import dims_of
from dejavu_train.families.dims import engine_refusal
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model, load_tokenizer, resolve_device, weight_hash
from dejavu_train.training.config import RunConfig


def sampled(config: RunConfig) -> LoadSets | None:
    """With the text source ``self``: what gives the documents that the model writes, or finds them written."""
    if config.text.source != SELF:
        return None

    def load() -> tuple[dict[str, list[Document]], TextManifest]:
        loaded = load_samples(
            config.text,
            config.model,
            weight_hash(config.model, revision=config.revision),  # a model's own samples are named by it, always
            config.collect.window,
            budgets_of(config),
            writes_on_gpu(config),
            load_tokenizer(config.model, config.revision),
            lambda rows, length: open_writer(config, rows, length),
        )
        gc.collect()  # the model that wrote is loaded again to collect; two do not fit where one fills the GPU
        torch.cuda.empty_cache()
        return loaded

    return load


def tokens_to_sample(config: RunConfig, on_gpu: bool | None = None) -> int:
    """How many tokens of its own text the model has to write before. Those beside it or in the cache are there.

    Raises:
        UserError: it has to write some, by layers.
    """
    if config.text.source != SELF or (Path(config.model) / "samples.json").is_file():
        return 0
    on_gpu = writes_on_gpu(config) if on_gpu is None else on_gpu
    tokens = tokens_needed(config.text.sample, budgets_of(config), on_gpu)[0]
    if is_cached(config.text, config.model, config.collect.window, tokens):
        return 0
    if config.collect.by_layers:
        raise UserError(NOT_BY_LAYERS)
    return tokens


def budgets_of(config: RunConfig) -> list[tuple[str, int | None]]:
    """Tokens of each set that are asked for, None for all."""
    return [(name, config.collect.budget(name)) for name in SETS]


def writes_on_gpu(config: RunConfig) -> bool:
    """Whether the model writes on a GPU, where it writes more rows at a time."""
    return resolve_device(config.collect.device).type == "cuda"


def open_writer(config: RunConfig, rows: int, length: int) -> tuple[Write, str]:
    """The dense model, loaded, as a function that continues ``rows`` rows up to ``length`` tokens, and its name.

    On a GPU that holds the model it is the decode engine, else ``generate()`` of transformers. So it is for more rows
    than an engine has.

    Raises:
        UserError: the run is by layers.
    """
    if config.collect.by_layers:
        raise UserError(NOT_BY_LAYERS)
    settings, run = config.text.sample, config.collect
    device = resolve_device(run.device)
    model = load_model(config.model, run.dtype, device, run.device_map, config.revision)
    refused = engine_refusal(dims_of(model.config), RUNS)
    if device.type != "cuda" or run.device_map is not None or refused is not None:
        return transformers_writer(model, settings), "transformers"
    from dejavu_train.engine.decode import DecodeEngine  # imports triton
    from dejavu_train.engine.inputs import MAX_BATCH
    from dejavu_train.engine.options import EngineOptions
    from dejavu_train.kernels.common.checks import HEAD_DIMS

    if dims_of(model.config).head_dim not in HEAD_DIMS or rows > MAX_BATCH:
        return transformers_writer(model, settings), "transformers"
    return engine_writer(DecodeEngine(model, options=EngineOptions(batch=rows, context=length)), settings), "engine"


def engine_writer(engine: Any, settings: SampleConfig) -> Write:
    """Sampling by a decode engine, a dense one."""

    def write(prompts: Rows, length: int, seed: int) -> Rows:
        sampling = Sampling(settings.temperature, settings.top_p, seed=seed)
        new = engine.generate(prompts, length - len(prompts[0]), sampling=sampling, stop_tokens=())
        return [prompt + tokens for prompt, tokens in zip(prompts, new, strict=True)]

    return write
