"""Checks of infer.py before it imports torch: all that needs neither a model nor a GPU."""

from dataclasses import replace
from typing import Any

from dejavu_train.bundle.folder import check_bundle, require_model
from dejavu_train.data.text_check import check_source
from dejavu_train.evaluation.config import InferConfig, name_texts
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import probe_folder
from dejavu_train.ground.machine import check_device_map, check_device_name, free_memory, require_package
from dejavu_train.models.config_values import INT4, quant_method, read_dims, read_values
from dejavu_train.models.int4_sizes import head_kind, part_sizes
from dejavu_train.models.stored import check_folder, stored_files


def planned_step(config: InferConfig, bundle: Any, device: Any) -> str:
    """How the engine of this device would run a decoding step of a bundle, or why it would not."""
    from dejavu_train.engine.cpu_limits import WHOLE
    from dejavu_train.engine.cpu_plan import cpu_format, weight_bytes
    from dejavu_train.engine.facts import facts_of  # these import torch
    from dejavu_train.engine.options import EngineOptions
    from dejavu_train.engine.plan import plan_step, read_as_codes, with_screen
    from dejavu_train.engine.planned import Engine, Formats
    from dejavu_train.models.load import DTYPES, chosen_dtype

    values, dims = read_values(config.model, config.revision), read_dims(config.model, config.revision)
    engine = Engine.GPU if device.type == "cuda" else Engine.CPU
    packed, room = quant_method(values) == INT4, ""
    group = part_sizes(dims)["down"].group if packed else 0
    if packed:
        name, head = "float16" if engine is Engine.GPU else "float32", head_kind(values)
    else:
        dtype = chosen_dtype(config.dtype, values, stored_files(config.model, revision=config.revision))
        name = head = str(dtype).removeprefix("torch.")
    if engine is Engine.CPU:
        layers, codes = cpu_format("int4" if packed else name, config.stored), frozenset(bundle.specs)
        formats = Formats(layers, layers if layers in WHOLE else "int8", name)
        tied = head == name and bool(values.get("tie_word_embeddings", True))
        room = f"\n{weight_bytes(dims, layers, tied) / 1e9:.3g} GB of weights in the engine, {_free()}"
    else:
        formats = Formats("int4" if packed else name, name if head == "fp16" else head, name, group)
        codes = read_as_codes(bundle, DTYPES[name], config.batch)
    tokens = min(config.prompt + config.new_tokens, dims.max_positions)
    options = EngineOptions(batch=config.batch, context=tokens, guard=config.guard)
    try:
        plan = plan_step(dims, facts_of(bundle, codes, name, config.batch), formats, options, engine)
    except UserError as refusal:
        return f"no engine runs a decoding step: {refusal}"
    if engine is Engine.GPU:
        plan = with_screen(plan, None, None)
        if plan.one_kernel is not None:
            plan = replace(plan, one_kernel=None, one_kernel_why="the GPU may take one, which is known later")
        if plan.screened:  # how much is free, nobody knows before the weights lie there
            plan = replace(plan, head_why=f"{plan.head_why}, where the GPU has room when the engine is built")
    return f"a decoding step:\n{plan.describe()}{room}"


def _free() -> str:
    free = free_memory()
    return "free memory unknown" if free is None else f"{free / 1e9:.3g} GB of memory are free"


def _check_project(name: str) -> None:
    """Raise :class:`UserError` for a project that wandb would refuse when everything has been measured."""
    import wandb

    try:
        wandb.Settings(project=name)
    except (wandb.Error, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--wandb {name!r} cannot be a project's name: {reason}") from None
    if not name.strip():
        raise UserError("--wandb is empty; name a project")


def check(config: InferConfig) -> None:
    """Compare the configuration with the folders of model, bundle and results, the texts and the installed packages.

    Raises:
        UserError: the first mistake, by name.
        OSError: the output cannot be written.
    """
    if config.wandb is not None:
        require_package("wandb", "--wandb", "'dejavu-train[train]'")
        _check_project(config.wandb)
    check_device_map(config.device_map, "--device_map")
    check_device_name(config.device, "--device")
    if config.bundle:
        check_bundle(config.bundle)
    require_model(config.model, config.bundle)
    shape = read_dims(config.model, config.revision)
    check_folder(config.model, shape)
    if config.window - 1 > shape.max_positions:
        raise UserError(f"--window {config.window} exceeds the model's {shape.max_positions} positions; choose less")
    if config.timing and config.prompt + config.new_tokens > shape.max_positions:
        raise UserError(
            f"--prompt {config.prompt} and --new_tokens {config.new_tokens} do not fit: the model has"
            f" {shape.max_positions} positions; choose less"
        )
    if config.generate is not None and config.new_tokens >= shape.max_positions:
        raise UserError(
            f"--new_tokens {config.new_tokens} and a prompt do not fit: the model has {shape.max_positions} positions;"
            " take fewer"
        )
    for source in name_texts(config.text).values():
        check_source(config.source(source))
    probe_folder(config.output)
