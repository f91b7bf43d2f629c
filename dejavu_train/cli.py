"""The command line of train.py: one jsonargparse parser, dataclass defaults < YAML < flags, errors of one line."""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import lightning
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from dejavu_train.config import RunConfig
from dejavu_train.errors import UserError


class Parser(LightningArgumentParser):
    """Raises a mistake as :class:`UserError` instead of printing the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        raise UserError(message) from None


def build_parser() -> Parser:
    """Parser of :class:`RunConfig` and of the Trainer's arguments."""
    parser = Parser(
        prog="train.py",
        description="Train the predictors of an OPT: collect, train every (layer, target), calibrate, write the bundle."
        " Does whatever is missing; the same command goes on after an interruption.",
    )
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; brings --print_config with it")
    parser.add_class_arguments(RunConfig, None, skip={"trainer"}, sub_configs=False)
    parser.add_lightning_class_args(lightning.Trainer, "trainer", required=False)
    parser.set_defaults({"trainer.devices": 1})
    return parser


def parse_config(argv: Sequence[str] | None) -> RunConfig:
    """Parse flags (None: those of the process) into a config.

    Raises:
        UserError: an unknown key, a value of the wrong type, a file that cannot be read.
    """
    parser = build_parser()
    parsed: Any = parser.parse_args(None if argv is None else list(argv))
    trainer = _plain(parsed.pop("trainer"))
    if str(trainer.get("devices")).isdigit():
        trainer["devices"] = int(trainer["devices"])  # a flag's 2 arrives as text
    parsed.pop("config", None)
    values = parser.instantiate_classes(parsed)
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    return RunConfig(**{name: value for name, value in values.items() if name in fields}, trainer=trainer)


def _plain(value: Any) -> Any:
    """Namespaces as dicts, at any depth."""
    if isinstance(value, Namespace):
        return {name: _plain(entry) for name, entry in vars(value).items()}
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def set_up_logging() -> None:
    """Our lines on stderr, without those of the libraries below."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("dejavu_train").setLevel(logging.INFO)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse and run; see :func:`dejavu_train.pipeline.run`."""
    from dejavu_train.pipeline import run

    config = parse_config(argv)
    set_up_logging()
    run(config)
