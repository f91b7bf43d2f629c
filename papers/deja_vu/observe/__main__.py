"""Observes a dense model: python -m papers.deja_vu.observe --config FILE [--option value ...]."""

import logging
import os
import sys
from collections.abc import Sequence

# Before torch is loaded: waiting threads sleep. Where cores are shared, spinning ones cost more than they save.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from dejavu_train.bundle.folder import require_model
from dejavu_train.cli.parser import parse
from dejavu_train.ground.errors import UserError, exit_on_user_error
from papers.deja_vu.observe.config import ObserveConfig


def read_config(argv: Sequence[str] | None) -> ObserveConfig:
    """Flags (None: those of the process) and YAML files as a checked config. Raises as :func:`parse`."""
    config = parse(ObserveConfig, argv, "python -m papers.deja_vu.observe", str(ObserveConfig.__doc__))
    config.check()
    return config


def main(argv: Sequence[str] | None = None) -> None:
    """Everything the command does. Raises :class:`UserError` for what the user can mend."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = read_config(argv)
    require_model(config.model, config.bundle)
    import torch  # these take seconds, in which a signal is heard already
    import transformers

    from dejavu_train.bundle.artifact import Bundle
    from dejavu_train.families.base import dense_type, dims_of
    from dejavu_train.models.config_values import read_values
    from dejavu_train.models.load import load_model, load_tokenizer, resolve_device
    from papers.deja_vu.observe.run import observe

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(config.seed)
    values = read_values(config.model, config.revision)
    if dense_type(values["model_type"]) != "opt" or dims_of(values, config.model).post_norm:
        raise UserError(
            f"the observations are those of a pre-norm OPT, and {config.model} is of type {values['model_type']}; give"
            " an OPT, or type infer.py for quality and speed"
        )
    bundle = None if config.bundle is None else Bundle.from_pretrained(config.bundle)
    if bundle is not None:
        bundle.check_model(config.model, config.revision)
    tokenizer = load_tokenizer(config.model, config.revision)
    device = resolve_device(config.device)
    model = load_model(config.model, config.dtype, device, config.device_map, config.revision)
    folder = observe(config, model, tokenizer, bundle)
    logging.getLogger(__name__).info("wrote %s", folder)


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
