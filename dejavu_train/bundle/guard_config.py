"""Settings of a guard at run time. What it does: bundle/guard.py. Readable without torch."""

from dataclasses import dataclass

from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import COUNT, NUMBER, check_ranges, check_whole


@dataclass(frozen=True)
class Guard:
    """How often a token is decoded densely, and what is done with what it shows.

    The thresholds of MLP predictors move by stochastic approximation (Robbins and Monro, 1951). With the contribution
    mass m of a dense token, and its part k that the selection would have kept,

        threshold += gain (k - promised m) / (mean of m) / slope

    where slope is how fast the retained mass falls with the threshold, on the calibration curve. The error is one of
    sums, as the retained mass of a calibration is. So its mean is zero exactly where the promise holds. A mean of the
    tokens' own ratios would pull a right threshold to a wrong place. The gain is 1 / (tokens measured so far) at first
    and never less than 1 / `memory`: an average over about the last `memory` measured tokens. A long memory has little
    noise and follows a change of text slowly. A short one follows fast, and a right threshold wanders by about (spread
    of a token's retained mass) / sqrt(2 memory).

    Of a cascade the candidates' threshold moves so that what passes both stages holds the promise. The second stage's
    thresholds stay, because they test the weights themselves, which no change of text makes wrong. The engine of a
    GPU runs no second stage, so there the candidates hold it. Thresholds of heads stay. What heads retain is measured.

    Attributes:
        every: Every so many-th decoding step is dense. 2 or more, or 0: no guard.
        control: Move the thresholds. False: dense tokens and measurements only.
        retained_mass: The promise, for every layer: a share in (0, 1). null (None in Python): each layer's own at the
            bundle's calibration.
        memory: Measured tokens that the controller averages over. Rows of a batch count one each.
    Raises:
        UserError: a value outside its range.
    """

    every: int = 16
    control: bool = True
    retained_mass: float | None = None
    memory: int = 512

    def __post_init__(self) -> None:
        check_whole("guard.every", self.every)
        check_whole("guard.memory", self.memory)
        check_ranges(self, "guard.", {"every": NUMBER})
        if self.every == 1:
            raise UserError(f"guard.every must be at least 2, or 0 for no guard, got {self.every}")
        if self.retained_mass is not None and not 0 < self.retained_mass < 1:
            raise UserError(f"guard.retained_mass must lie between 0 and 1, got {self.retained_mass}")
        check_ranges(self, "guard.", {"memory": COUNT})
