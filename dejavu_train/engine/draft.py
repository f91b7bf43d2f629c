"""Settings of lossless decoding. Readable without torch."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import check_whole

MOST_DRAFTED = 7  # verified in eight slots with the token before them
DRAFT_WEIGHTS = ("int4", "int8")
SETTINGS = ("draft_length", "draft_weights")  # of `generate()`, in the order of `Draft`


@dataclasses.dataclass(frozen=True)
class Draft:
    """Settings of lossless decoding.

    Attributes:
        length: tokens in each draft, 0 to 7. 0 = the dense model alone. None = chosen from what was accepted so far.
        weights: of the draft. None = the model's. "int4" = rounded to 4 bits, beside fp16 weights on a GPU or
            fp32 ones on a CPU. "int8" = rounded to 8 bits, beside fp32 weights on a CPU. Else a folder of the model in
            4 bits, on a GPU.
    Raises:
        UserError: a value outside its range.
    """

    length: int | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        check_whole("draft_length", self.length)
        if self.length is not None and not 0 <= self.length <= MOST_DRAFTED:
            raise UserError(f"draft_length must lie in 0 to {MOST_DRAFTED}, or be left out, got {self.length}")
        if self.weights is not None and self.weights not in DRAFT_WEIGHTS and not Path(self.weights).is_dir():
            raise UserError(
                f"draft_weights must be {', '.join(DRAFT_WEIGHTS)} or a folder of the model in 4 bits, got"
                f" {self.weights}; or leave it out"
            )

    @classmethod
    def taken_from(cls, keywords: dict[str, Any], default: Mapping[str, Any] | None = None) -> "Draft | None":
        """Take ``lossless``, ``draft_length`` and ``draft_weights`` out of the keywords of ``generate()``.

        Args:
            default: what a bundle asks for where ``lossless`` is left out, see `default_of`. None = nothing.
        Returns:
            None where decoding is not to be lossless.
        Raises:
            UserError: a value outside its range, or one of a draft without ``lossless``.
        """
        lossless = keywords.pop("lossless", None)
        given = {name: keywords.pop(name) for name in SETTINGS if name in keywords}
        asked = {name: value for name, value in given.items() if value is not None}
        if not (default is not None if lossless is None else lossless):
            if asked:
                raise UserError(f"{' and '.join(given)} is for lossless decoding; pass lossless=True, or leave it out")
            return None
        values = {**(default or {}), **asked}
        return cls(*(values.get(name) for name in SETTINGS))


def default_of(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Settings of a draft that a bundle's metadata ask of ``generate()`` under ``lossless``, or None.

    Raises:
        UserError: anything but true, false, or an object with settings of a draft.
    """
    asked = metadata.get("lossless", False)
    if isinstance(asked, bool):
        return {} if asked else None
    if not isinstance(asked, Mapping) or not set(asked) <= set(SETTINGS):
        raise UserError(
            f"the bundle's metadata ask for lossless {asked}; write true, false, or an object with"
            f" {' and '.join(SETTINGS)}"
        )
    return asked


def check_alone(rows: int) -> None:
    """Raise :class:`UserError` for more than one sequence."""
    if rows != 1:
        raise UserError(
            f"lossless decoding is for one sequence at a time, got {rows}; give one prompt, or lossless=False"
        )
