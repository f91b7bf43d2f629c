"""The flag --check, which every command of the library takes beside its configuration."""

from collections.abc import Sequence

from dejavu_train.errors import UserError


def take_check(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether ``--check`` stands among the flags, which asks for no work, and the other flags.

    Raises:
        UserError: a word behind it, which would be the value of the flag before.
    """
    for flag, word in zip(argv, [*argv, "--"][1:], strict=True):
        if flag.startswith("--check=") or (flag == "--check" and not word.startswith("-")):
            raise UserError(f"--check takes no value, got {flag.partition('=')[2] or word}; write --check alone")
    return "--check" in argv, [flag for flag in argv if flag != "--check"]
