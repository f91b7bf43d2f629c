"""The log of requests: a line each, in a file."""

import contextlib
import logging
import sys

from dejavu_train.ground.errors import UserError

ACCESS = "uvicorn.access"  # the logger that hears of each answer


class LogFile(logging.FileHandler):
    """Appends to a file. What cannot be written, on a full disk for instance, is told once, and the server goes on.

    Raises:
        UserError: a file that cannot be opened.
    """

    def __init__(self, path: str) -> None:
        try:
            super().__init__(path, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write the log {path}: {error.strerror}; give --log another file") from None
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self.told = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by `logging` for what a line's writing raised."""
        if not self.told:
            self.told = True
            with contextlib.suppress(OSError):  # stderr may lie on the same disk
                said = f"cannot write the log {self.baseFilename}: {sys.exception()}"
                print(f"{said}; requests are answered, and some are not logged", file=sys.stderr, flush=True)


def log_requests(file: LogFile) -> None:
    """Have uvicorn write a line for each answer to a file. Call it when uvicorn has set up its own logging."""
    logger = logging.getLogger(ACCESS)
    logger.handlers, logger.propagate = [file], False
    logger.setLevel(logging.INFO)
