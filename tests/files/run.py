"""Makes the file of a seed, has it read, and judges what came."""

import dataclasses
import random
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from dejavu_train.ground.errors import UserError

from .kinds import KINDS, Base


@dataclasses.dataclass
class Outcome:
    """What became of a file.

    Attributes:
        refusal: the line that refused it, or None. finding: what is wrong, or None.
    """

    kind: str
    about: str
    refusal: str | None = None
    finding: str | None = None


def run(seed: int, base: Base) -> Outcome:
    """A seed is a file: its kind follows from the seed's remainder, all else is drawn."""
    kind = list(KINDS)[seed % len(KINDS)]
    with tempfile.TemporaryDirectory() as folder:
        drawn = KINDS[kind](random.Random(seed), Path(folder), base)
        outcome = Outcome(kind, drawn.about)
        try:
            got = drawn.read()
        except UserError as error:
            outcome.refusal = str(error)
            if drawn.is_whole:
                outcome.finding = f"a whole file is refused: {error}"
        except OSError as error:
            outcome.refusal = str(error)
            if error.errno is None:
                outcome.finding = f"OSError without a number: {error}"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            outcome.finding = f"{said} ({Path(place.filename).name}:{place.lineno})"
        else:
            outcome.finding = _difference(got, drawn.truth())
    return outcome


def _difference(got: Any, truth: Any) -> str | None:
    """How what was read is not what another reader read. None where it is the same."""
    if truth is None:
        return "read, and no other reader can read it"
    if isinstance(truth, dict):
        for name, want in truth.items():
            if not np.allclose(got[name], want, rtol=1e-5, atol=1e-6, equal_nan=True):
                return f"{name} is off by {np.abs(got[name] - want).max():.3g}"
        return None
    return None if got == truth else f"read {str(got)[:150]}, not {str(truth)[:150]}"
