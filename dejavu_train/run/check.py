"""Checks of train.py before it imports torch and Lightning: all that needs neither a model nor a GPU."""

from pathlib import Path

from dejavu_train.cli.registry import extra
from dejavu_train.data.text import SELF
from dejavu_train.data.text_check import check_sets
from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import probe_folder, require_name
from dejavu_train.ground.machine import check_device_map, check_device_name, has_package, require_package
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.stored import check_folder, has_config_alone
from dejavu_train.training.config import RunConfig

TRAIN_EXTRA = "'dejavu-train[train]'"


def check(config: RunConfig, only_plan: bool = False) -> ModelDims:
    """Compare the configuration with the model's folder, the text, the output and the installed packages.

    Args:
        only_plan: nothing will be done. A model's folder may have a config.json alone then.
    Returns:
        The sizes of the model.

    Raises:
        UserError: the first mistake, by name.
        OSError: the output cannot be written.
    """
    check_packages()
    _check_asked_packages(config)
    check_device_name(config.collect.device, "collect.device")
    shape = read_dims(config.model, config.revision)
    config.check(shape)
    if not (only_plan and has_config_alone(config.model)):
        check_folder(config.model, shape)
    check_sets(config.text, config.model, config.collect.window, ("train", "calibration", "val"))
    check_output(config)
    return shape


def check_output(config: RunConfig) -> None:
    """Write into every folder that the run will write into, so that what cannot be is known before any work.

    Raises:
        UserError: something else stands in a folder's place, or in the bundle's folder.
        OSError: what the system says.
    """
    require_name(config.output)
    output = Path(config.output)
    probe_folder(output)
    bundle = output / config.bundle
    names = [".holders", "activations", "predictors", config.bundle, *(["tuned"] if config.tune.steps else [])]
    for name in names:
        probe_folder(output / name)
    if bundle.is_dir() and not (bundle / "bundle.json").is_file():
        others = [path.name for path in bundle.iterdir() if not path.name.startswith(".tmp-")]
        foreign = sorted(set(others) - {"predictors.safetensors", "README.md"})  # those a killed run may leave
        if foreign:
            raise UserError(f"{bundle} holds {foreign[0]}, which is no part of a bundle; choose another --bundle")
    if not (output / "activations" / "manifest.json").is_file():
        if config.text.source == SELF and not (Path(config.model) / "samples.json").is_file():
            probe_folder(config.text.cache)


def check_packages() -> None:
    """Raise :class:`UserError` where only what inference needs is installed. Nothing is imported."""
    missing = [name for name in ("lightning", "torchmetrics", "h5py") if not has_package(name)]
    if missing:
        raise UserError(f"training needs {', '.join(missing)}: pip install {TRAIN_EXTRA}")


def _check_asked_packages(config: RunConfig) -> None:
    check_device_map(config.collect.device_map, "collect.device_map")
    if config.store is not None:
        extra("hosts.store", "--store").Store(config.store).sizes()
    if config.scheduler == "ray":
        require_package("ray", "--scheduler ray", "'dejavu-train[ray]'")
    loggers = config.trainer.get("logger")
    for entry in loggers if isinstance(loggers, (list, tuple)) else [loggers]:
        path = str(entry.get("class_path") if isinstance(entry, dict) else entry)
        if path.endswith("WandbLogger"):
            require_package("wandb", f"the logger {path}", TRAIN_EXTRA)
        if path.endswith("TensorBoardLogger") and not has_package("tensorboardX"):
            require_package("tensorboard", f"the logger {path}", "tensorboard")
