"""User mistakes are one line on stderr and exit code 2. Our own bugs keep their traceback."""

import errno
import os
import re
import sys
from collections.abc import Callable, Sequence

from dejavu_train.ground.signals import Interrupted, heard


class UserError(ValueError):
    """A mistake of the person who called us. The message is one line: what was expected, what was got, the remedy.

    Attributes:
        tokens: what a row held when a logit of an engine was not finite, for whoever can say in which layer, else None.
    """

    tokens: list[int] | None = None


GOES_ON = "the same command goes on from the last complete piece"
BEGINS_ANEW = "what was written until then is kept, the same command begins anew"
NOTHING_KEPT = "nothing was written, the same command begins anew"
NO_ANSWERS = "requests are answered no longer"


def exit_on_user_error(
    main: Callable[[Sequence[str] | None], None],
    argv: Sequence[str] | None = None,
    after_signal: str | None = BEGINS_ANEW,
) -> int:
    """Run ``main(argv)``. Return 0, after a user's mistake 2 (its one line is printed), after a signal 128 + it.

    Args:
        after_signal: what the line after a signal says of the same command. None: another process says it.
    """
    try:
        with heard():
            main(argv)
    except UserError as error:
        message = " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)
        return 2
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("out of memory|can't allocate memory", str(error)):
            raise
        print(f"error: {describe(error)}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt) as error:
        name = str(error) or "SIGINT"
        if after_signal is not None:
            print(f"interrupted by {name}; {after_signal}", file=sys.stderr)
        return error.exit_code if isinstance(error, Interrupted) else 130
    return 0


_REMEDIES = {
    errno.ENOSPC: "free some space or inodes, or choose another folder; the same command goes on",
    errno.EDQUOT: "free some of your quota, or choose another folder; the same command goes on",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or choose another folder",
    errno.EACCES: "give yourself the permission, or choose another path",
    errno.EPERM: "give yourself the permission, or choose another path",
    errno.EROFS: "choose a path on a file system that can be written",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOENT: "make the folder it is in, or choose another path",
    errno.ENOTDIR: "a part of the path is a file; choose another path",
    errno.EISDIR: "a folder stands where a file belongs; move it away",
    errno.EEXIST: "something else stands there; move it away",
    errno.ELOOP: "its links go in a circle; choose another path",
    errno.EADDRINUSE: "choose another --port, or end what listens there",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "free some memory",
    errno.ENOLCK: "its file system has no locks; choose a path on another one",
    errno.ENOTSUP: "its file system cannot do that; choose a path on another one",
    errno.EPIPE: "who read what is printed has left; read all of it, or send it to a file",
    errno.EIO: "the disk or the network does not answer; try again, or choose another path",
}


def describe(error: OSError | MemoryError | RuntimeError) -> str:
    """One line of what the operating system refused: the path, the reason, the remedy. Others are without memory."""
    if not isinstance(error, OSError):
        return f"memory ends ({first_line(error)}); ask for less at once, or free some"
    reason = error.strerror or str(error) or type(error).__name__
    path = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    remedy = _REMEDIES.get(error.errno or 0, "check the path and try again")
    if error.errno == errno.ENOENT and error.filename is None:  # as tempfile says it
        remedy = "set TMPDIR to a folder that can be written"
    return " ".join(f"{path}{reason}; {remedy}".split())


def first_line(error: BaseException) -> str:
    """First line of a library's error, or its class where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


EXTRAS = {  # extra of pyproject.toml -> packages that it brings
    "train": ("lightning", "torchmetrics", "h5py", "datasets", "wandb", "matplotlib", "fsspec"),
    "eval": ("lm_eval",),
    "serve": ("fastapi", "uvicorn"),
    "large": ("accelerate",),
    "neighbours": ("hnswlib",),
    "s3": ("s3fs",),
    "ray": ("ray",),
}


def missing_extra(error: ModuleNotFoundError, what: str) -> UserError | None:
    """One line for a package of one of our extras that is not installed. None for any other module."""
    package = (error.name or "").partition(".")[0]
    extra = next((name for name, packages in EXTRAS.items() if package in packages), None)
    if extra is None:
        return None
    return UserError(f"{what} needs the package {package}, which is not installed: pip install 'dejavu-train[{extra}]'")


class Unsupported(UserError):
    """Something that the decode engine does not do and the backend ``gather`` does.

    Attributes:
        reason: the message without that remedy.
        expected: what to say where ``gather`` is meant to do it, and is no loss. "" elsewhere.
    """

    def __init__(self, what: str, expected: str = "") -> None:
        self.reason, self.expected = what, expected
        super().__init__(f"{what}; use backend='gather'")

    def among_ranks(self) -> UserError:
        """The same for one of several processes that decode together, which ``gather`` does not."""
        return UserError(f"{self.reason}; or start one process, without torchrun")
