"""infer.py as one of several processes of torchrun: what they do together, and that all end when one ends."""

import contextlib
import io
import logging
from collections.abc import Iterator

from dejavu_train.engine.ranks.group import Group, group_of_launcher, launched
from dejavu_train.evaluation.config import InferConfig
from dejavu_train.ground.errors import UserError

TIMED = ("dense-engine", "triton")
BACKENDS = ("auto", "triton", "dense-engine")


def check_ranks(config: InferConfig) -> None:
    """Raise UserError for what several processes do not do together."""
    asked = {
        "--tokens": config.tokens != 0,
        "--guard.every": bool(config.guard.every),
        "--device_map": config.device_map is not None,
        "--wandb": config.wandb is not None,
    }
    several = "under torchrun infer.py times and generates"
    if asked.pop("--tokens"):
        raise UserError(f"{several}, and scores nothing: give --tokens 0, or start one process")
    for flag in (flag for flag, given in asked.items() if given):
        raise UserError(f"{several}, without {flag}: leave it out, or start one process")
    for flag, names, allowed in (
        ("--backend", [config.backend] if config.generate is not None else [], BACKENDS),
        ("--timing_backends", config.timing_backends if config.timing else (), TIMED),
    ):
        for name in (name for name in names if name not in allowed):
            raise UserError(f"{several} with {flag} {', '.join(allowed)}, got {name}; or start one process")


@contextlib.contextmanager
def together(config: InferConfig) -> Iterator[Group | None]:
    """The ranks of torchrun, or None for one process. Ranks but the first say nothing.

    Raises:
        UserError: as `check_ranks` and `group_of_launcher`.
        SystemExit: on later ranks, in the place of a user's mistake, which the first rank prints.
    """
    if not launched():
        yield None
        return
    check_ranks(config)
    group = group_of_launcher(config.device)
    try:
        if group.rank == 0:
            yield group
        else:
            logging.disable(logging.WARNING)
            with contextlib.redirect_stdout(io.StringIO()):
                yield group
    except BaseException as error:
        group.fail(error)
        if isinstance(error, UserError) and group.rank > 0:
            raise SystemExit(2) from None
        raise
