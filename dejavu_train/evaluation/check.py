"""What infer.py looks at before it imports torch: all that needs neither a model nor a GPU."""

from dejavu_train.bundle.folder import check_bundle, require_model
from dejavu_train.data.text_check import check_source
from dejavu_train.errors import UserError
from dejavu_train.evaluation.config import InferConfig, name_texts
from dejavu_train.files import probe_folder
from dejavu_train.machine import check_device_map, check_device_name, require_package
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.stored import check_folder


def check(config: InferConfig) -> None:
    """Compare the configuration with the folders of model, bundle and results, the texts and the installed packages.

    Raises:
        UserError: the first mistake, by name.
        OSError: the output cannot be written.
    """
    if config.wandb is not None:
        require_package("wandb", "--wandb", "'dejavu-train[train]'")
        from dejavu_train.evaluation.project import check_project  # imports wandb

        check_project(config.wandb)
    check_device_map(config.device_map, "--device_map")
    check_device_name(config.device, "--device")
    check_bundle(config.bundle)
    require_model(config.model, config.bundle)
    shape = read_dims(config.model, config.revision)
    check_folder(config.model, shape)
    if config.window - 1 > shape.max_positions:
        raise UserError(f"--window {config.window} exceeds the model's {shape.max_positions} positions")
    if config.timing and config.prompt + config.new_tokens > shape.max_positions:
        raise UserError(
            f"--prompt {config.prompt} and --new_tokens {config.new_tokens} do not fit: the model has"
            f" {shape.max_positions} positions"
        )
    if config.generate is not None and config.new_tokens >= shape.max_positions:
        raise UserError(
            f"--new_tokens {config.new_tokens} and a prompt do not fit: the model has {shape.max_positions} positions;"
            " take fewer"
        )
    for source in name_texts(config.text).values():
        check_source(config.source(source))
    probe_folder(config.output)
