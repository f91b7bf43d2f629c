"""The ranges of numbers in a configuration: a value outside is one line that names key, range and value."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from dejavu_train.ground.errors import UserError


@dataclass(frozen=True)
class Range:
    """From ``least`` to ``most``, both included. ``least`` itself is not where ``above`` is true."""

    least: float
    most: float
    above: bool = False

    def refusal(self, number: float) -> str | None:
        """Words for what ``number`` must be. None where it is that. NaN never is."""
        if self.above:
            return None if self.least < number <= self.most else f"lie above {self.least} and at most at {self.most:g}"
        if self.least <= number <= self.most:
            return None
        return f"be at most {self.most:,.0f}" if number > self.most else f"be at least {self.least}"


COUNT = Range(1, 10**12)
NUMBER = Range(0, 10**12)  # zero means: not at all
SHARE = Range(0, 1, above=True)
RATE = Range(0, 10, above=True)  # of learning; Adam moves every weight by about so much a step
SEED = Range(0, 2**32 - 1)
COLDEST = 1e-6  # temperature; times the noise of a choice it is less than a logit's own rounding
WIDEST = 1e30  # a number that fp32 holds, also as a factor or divisor of a logit


def check_whole(name: str, number: Any) -> None:
    """Raise :class:`UserError` for a number with a fraction, or what is no number. None stands for no number."""
    if number is not None and not isinstance(number, Integral):
        raise UserError(f"{name} must be a whole number, got {number!r}")


def check_ranges(values: Any, prefix: str, ranges: Mapping[str, Range]) -> None:
    """Compare every number in the attributes of ``values`` that ``ranges`` names. None stands for no number.

    Raises:
        UserError: the first that lies outside, as ``prefix`` and its name.
    """
    for name, allowed in ranges.items():
        value = getattr(values, name)
        for number in value if isinstance(value, Iterable) else [value]:
            refusal = None if number is None else allowed.refusal(number)
            if refusal is not None:
                raise UserError(f"{prefix}{name} must {refusal}, got {number}")
