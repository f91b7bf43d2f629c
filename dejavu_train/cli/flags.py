"""The flags of a command line: one walk over them, and --check, which commands take beside their configuration."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dejavu_train.ground.errors import UserError


class Option(NamedTuple):
    """A flag's name without its dashes, its values, and both as they were typed."""

    name: str
    values: list[str]
    words: list[str]


def options(argv: Sequence[str]) -> Iterator[Option]:
    """Every option: ``--name=value``, or ``--name`` and all that follows up to the next option. ``-h`` is ``--help``.

    Raises:
        UserError: a word in front of all options, or behind ``--name=value``.
    """
    left = list(argv)
    while left:
        words = [left.pop(0)]
        token = "--help" if words[0] == "-h" else words[0]
        if not token.startswith("--"):
            raise UserError(f"expected an option such as --name, got {token}")
        name, equals, value = token[2:].partition("=")
        while not equals and left and not left[0].startswith("--") and left[0] != "-h":
            words.append(left.pop(0))
        yield Option(name, [value] if equals else words[1:], words)


def take_check(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether ``--check`` stands among the flags, which asks for no work, and the other flags.

    Raises:
        UserError: a value of it, or as :func:`options`.
    """
    others: list[str] = []
    for name, values, words in options(argv):
        if name != "check":
            others += words
        elif values:
            raise UserError(f"--check takes no value, got {' '.join(values)}; write --check alone")
    return len(others) < len(argv), others
