"""The command line of train.py."""

import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from dejavu_train.cli.flags import options, take_check
from dejavu_train.cli.parser import parse
from dejavu_train.cli.registry import extra
from dejavu_train.ground.children import forget_launcher
from dejavu_train.ground.experiments import flattened
from dejavu_train.ground.progress import set_up_logging
from dejavu_train.run.check import check, check_packages
from dejavu_train.run.folder import begun_in, saved_config
from dejavu_train.training.config import INVOCATION, RunConfig
from dejavu_train.training.stages import difference_of

logger = logging.getLogger(__name__)


def parse_config(argv: Sequence[str] | None) -> RunConfig:
    """Flags (None: those of the process) and YAML files as a config. Raises as :func:`parse`."""
    return parse(
        RunConfig,
        argv,
        "train.py",
        "Train the predictors of a model: collect, train every (layer, target), calibrate, write the bundle. Does"
        " whatever is missing; the same command goes on after an interruption. --check only looks for mistakes and"
        " prints what would be done. --plan prints what it takes on hardware that is not here.",
    )


def _goes_on(arguments: Sequence[str]) -> bool:
    """Whether the arguments mean the run in ``--output``: they name neither a configuration nor a model."""
    names = {name for name, _, _ in options(arguments)}
    return "output" in names and not names & {"config", "model", "help", "print_config"}


def _saved(arguments: Sequence[str]) -> Path | None:
    """The configuration of the run that the arguments mean, where there is one."""
    return saved_config(parse_config(arguments).output) if _goes_on(arguments) else None


def at_its_files(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder where relative paths of a run that goes on begin, and the arguments as they are said there.

    That is this folder, unless the model or the text is not here, and is where the run was begun.
    """
    path = _saved(arguments)
    if path is None:
        return Path.cwd(), list(arguments)
    begun, config = begun_in(path.parent), parse_config(["--config", str(path)])
    given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}  # config may name an installed model in its place
    named = [name for name in (given.get("model"), config.text.file) if name is not None]
    if not any((begun / name).exists() and not Path(name).exists() for name in named):
        return Path.cwd(), list(arguments)
    logger.info("relative paths begin in %s, where the run was begun", begun)
    return begun, [*arguments, f"--output={path.parent.absolute()}"]


def with_saved(arguments: Sequence[str]) -> list[str]:
    """The arguments, behind the configuration of the run in ``--output`` where they name neither a configuration nor a
    model: what else they give changes that run. A line says all keys that differ."""
    path = _saved(arguments)
    if path is None:
        if _goes_on(arguments):
            config = parse_config(arguments)
            logger.warning(
                "there is no run in %s, so one of %s begins, the default model; --model or --config names another one",
                config.output,
                config.model,
            )
        return list(arguments)
    both = ["--config", str(path), *arguments]
    before, now = (flattened(parse_config(given).to_json()) for given in (both[:2], both))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    keys = [key for key in keys if key.partition(".")[0] not in ("output", *INVOCATION)]
    said = f" but that {difference_of(before, now, keys)}" if keys else ""
    logger.info("going on with %s%s", path, said)
    return both


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check what needs no model, and run. See :func:`dejavu_train.run.pipeline.run`."""
    forget_launcher()
    arguments = sys.argv[1:] if argv is None else argv
    if "--trainer.help" in arguments:
        check_packages()
        from dejavu_train.training.trainer import print_help

        print_help()
        return
    only_check, arguments = take_check(arguments)
    set_up_logging()
    folder, arguments = at_its_files(arguments)
    with contextlib.chdir(folder):
        _train(parse_config(with_saved(arguments)), only_check)


def _train(config: RunConfig, only_check: bool) -> None:
    if config.plan is not None:
        check_packages()
        extra("hosts.forecast", "--plan").print_forecast(config, config.plan)  # imports torch, which takes seconds
        return
    check(config, only_plan=only_check)
    if only_check:
        from dejavu_train.run.plan import print_plan  # imports torch and lightning, which takes seconds

        print_plan(config)
        return
    from dejavu_train.run.pipeline import run  # likewise

    run(config)
