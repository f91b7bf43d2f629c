"""All commands: ``dejavu NAME ...``, ``python -m dejavu_train NAME ...``, and the files that run one of them.

A command's module is loaded when it runs. So a mistake in the name is told at once, and no command loads another's.
"""

import difflib
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dejavu_train.cli.registry import EXTRAS, has_extras
from dejavu_train.ground.errors import BEGINS_ANEW, GOES_ON, NO_ANSWERS, UserError, exit_on_user_error, missing_extra
from dejavu_train.version import package_version


@dataclass(frozen=True)
class Command:
    """A command: the module whose ``main(argv)`` runs it, what it does, what the line after a signal says.

    several: torchrun may start it as several processes. together: which then do one thing.
    """

    module: str
    about: str
    after_signal: str = BEGINS_ANEW
    several: bool = False
    together: bool = False


ALL = {
    "train": Command("dejavu_train.run.command", "text to bundle: collect, train, calibrate (train.py)", GOES_ON, True),
    "infer": Command(
        "dejavu_train.evaluation.command", "score, time and generate with a bundle (infer.py)", BEGINS_ANEW, True, True
    ),
    "serve": Command("dejavu_train.extras.serving.command", "answer requests through OpenAI's protocol", NO_ANSWERS),
    "quantize": Command("dejavu_train.quantize.command", "write a model's weights in 4 bits", GOES_ON),
    "pretrain": Command("dejavu_train.extras.pretrain.run", "train a small model from text", GOES_ON, True, True),
    "export": Command("dejavu_train.extras.export", "write a folder that vLLM reads"),
    "survey": Command("dejavu_train.extras.survey.command", "tell what any model would gain, untrained", GOES_ON),
    "evidence": Command("dejavu_train.extras.evidence.command", "write a page on what a model gains", GOES_ON),
    "tasks": Command("dejavu_train.extras.tasks.run", "downstream tasks, dense and sparse"),
    "compare": Command("dejavu_train.evaluation.compare", "tables and a picture of several runs of infer"),
    "generation": Command("dejavu_train.extras.generation.run", "texts that dense and sparse models write"),
}
COMMANDS = {name: each for name, each in ALL.items() if has_extras() or not each.module.startswith(EXTRAS)}
LISTED = "\n".join(f"  {name:<12}{each.about}" for name, each in COMMANDS.items())
FIRST_SECONDS = 10.0  # that torchrun has to end a process whose first one has said what is wrong
USAGE = f"usage: dejavu COMMAND [--option value ...]\n\n{LISTED}\n\ndejavu COMMAND --help lists the options of one."


def wait_for_the_first() -> None:
    """Let the first process of torchrun on this host say what is wrong with a command of all.

    torchrun ends the others when one has ended. Who is still there then has a mistake of its own to say.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(FIRST_SECONDS)
    signal.signal(signal.SIGTERM, before)


def run(name: str, argv: Sequence[str] | None = None) -> int:
    """Run a command with its arguments (None: those of the process). Returns the exit code."""
    # Before torch is loaded: waiting threads sleep. Where cores are shared, spinning ones cost a factor of twenty.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    command, world = COMMANDS[name], os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    later = command.together and world != "1" and os.environ.get("LOCAL_RANK", "0") != "0"

    def main(given: Sequence[str] | None) -> None:
        if world != "1" and not command.several:
            may = ", ".join(each for each, other in COMMANDS.items() if other.several)
            raise UserError(
                f"dejavu {name} is one process, got {world} by torchrun, which starts {may} alone; leave torchrun out"
            )
        try:
            importlib.import_module(command.module).main(given)  # takes seconds, in which a signal is heard already
        except ImportError as error:
            if not isinstance(error, ModuleNotFoundError):
                raise
            refusal = missing_extra(error, f"dejavu {name}")
            raise (error if refusal is None else refusal) from None
        except (UserError, OSError):
            if later:
                wait_for_the_first()
            raise

    return exit_on_user_error(main, argv, None if later else command.after_signal)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names. Returns the exit code. Without one all are listed."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if given[0] == "--version":
        print(package_version())
        return 0
    if given[0] in COMMANDS:
        return run(given[0], given[1:])

    def refuse(_: Sequence[str] | None) -> None:
        close = difflib.get_close_matches(given[0], COMMANDS, 1)
        meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"dejavu has no command {given[0]}; {meant}")

    return exit_on_user_error(refuse, given)
