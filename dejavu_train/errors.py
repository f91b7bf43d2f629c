"""User mistakes are one line on stderr and exit code 2; our own bugs keep their traceback."""

import sys
from collections.abc import Callable, Sequence


class UserError(ValueError):
    """A mistake of the person who called us. The message is one line: what was expected, what was got, the remedy."""


def exit_on_user_error(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Run ``main(argv)``; return 0, or 2 after printing the one line of a :class:`UserError`."""
    try:
        main(argv)
    except UserError as error:
        message = " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last complete piece", file=sys.stderr)
        return 130
    return 0


class Unsupported(UserError):
    """Something that the decode engine does not do and the backend ``gather`` does."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; use backend='gather'")
