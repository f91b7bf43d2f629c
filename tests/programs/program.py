"""Draws programs, runs them, and makes a failing one short."""

import contextlib
import dataclasses
import json
import logging
import random
import signal
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dejavu_train.ground.errors import UserError

from .calls import DRAWS
from .compute import draw_compute, run_compute
from .edit import draw_density
from .judge import Finding, same_weights
from .refusals import allowed
from .world import Base, World, check_apart

SECONDS = 300  # of one program, else it hangs

Program = dict[str, Any]


@dataclasses.dataclass
class Outcome:
    """What became of a program.

    Attributes:
        calls: carried out, refused ones among them. refusals: (call, message).
        finding: what is wrong, or None. call: in which.
        kind: mismatch, exception, refusal (in no row of the table) or hang.
    """

    calls: int
    refusals: list[tuple[str, str]]
    finding: str | None = None
    call: str | None = None
    kind: str | None = None


def seeds_of(text: str) -> range:
    """The seeds of ``first-last``, or of one number."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def draw(seed: int) -> Program:
    """The program of a seed: its profile, and its calls with all they need."""
    rng = random.Random(seed)
    backend = rng.choice(["mask"] * 5 + ["gather"] * 5 + ["auto"] * 5 + ["cpu"] * 2 + ["reference"] * 3)
    dtype = "float32" if backend == "cpu" or rng.random() < 0.75 else rng.choice(["float16", "bfloat16"])
    coded = dtype == "float32" and rng.random() < 0.1
    made: dict[str, Any] = {"cascade": not coded and rng.random() < 0.4}
    made |= {"means": rng.random() < 0.35, "lookahead": rng.random() < 0.25}
    made["dtype"] = rng.choice(["float16"] * 3 + ["int8"])
    profile: Program = {
        "backend": backend,
        "dtype": dtype,
        "coded": coded,
        "made": made,
        "exact": seed % 2 == 0,
        "density": draw_density(rng),
        "start": rng.choice((0, 0, 0, "prompt", "prompt", 5)),
    }
    calls: list[dict[str, Any]] = [{"call": "load", **DRAWS["load"][0](rng, profile)}]
    names = [name for name, (_, _, weight) in DRAWS.items() for _ in range(weight)]
    if rng.random() < 0.6:
        calls.append(draw_compute(rng, profile))
    for _ in range(rng.randint(2, 5)):
        name = rng.choice(names)
        calls.append({"call": name, **DRAWS[name][0](rng, profile)})
        if rng.random() < 0.7:
            calls.append(draw_compute(rng, profile))
    calls += [draw_compute(rng, profile), draw_compute(rng, profile)]
    return {"seed": seed, **profile, "calls": calls}


def without(program: Program, names: set[str]) -> Program:
    """The program without calls of these names or kinds. What is left out of the first, the load, is its kind."""
    calls = [call for call in program["calls"] if not {call["call"], call.get("kind")} & names]
    then = [call for call in calls if {call.get("then", {}).get("call"), call.get("then", {}).get("kind")} & names]
    calls = [call for call in calls if call not in then]
    if not calls or calls[0]["call"] != "load":
        calls.insert(0, program["calls"][0] | {"kind": "coded" if program["coded"] else "from_model"})
    return program | {"calls": calls}


def _hangs(*_: Any) -> None:
    raise TimeoutError(f"a program ran for {SECONDS} s")


def run(program: Program, base: Base) -> Outcome:
    """Carry out a program. The first finding ends it."""
    world_keys = ("exact", "backend", "made", "start")
    outcome = Outcome(0, [])
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(SECONDS)
    torch.manual_seed(program["seed"])
    try:
        with tempfile.TemporaryDirectory() as scratch:
            world = World(
                base, Path(scratch), density=tuple(program["density"]), **{key: program[key] for key in world_keys}
            )
            for number, call in enumerate(program["calls"]):
                _carry_out(world, call, number, outcome)
                if outcome.finding is not None:
                    outcome.call = call["call"]
                    break
    except TimeoutError as error:
        outcome.finding, outcome.kind = str(error), "hang"
    finally:
        signal.alarm(0)
    return outcome


def _carry_out(world: World, call: dict[str, Any], number: int, outcome: Outcome) -> None:
    name = call["call"]
    if world.model is None and name != "load":
        return  # the load was refused
    outcome.calls += 1
    try:
        if name in DRAWS:
            DRAWS[name][1](world, call)
        else:
            run_compute(world, call)
        if world.model is not None:
            check_apart(world)
            same_weights(world.model, world.truth, 1e-5 if world.drifts else 0.0)
    except UserError as refusal:
        message = " ".join(str(refusal).split())
        outcome.refusals.append((name, message))
        if not allowed(name, message):
            outcome.finding, outcome.kind = f"call {number} ({name}): refused by no row: {message}", "refusal"
    except Finding as found:
        outcome.finding, outcome.kind = f"call {number} ({name}): {found}", "mismatch"
    except TimeoutError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        outcome.finding = f"call {number} ({name}): {text} ({Path(place.filename).name}:{place.lineno})"
        outcome.kind = "exception"


def shrink(program: Program, base: Base, races: int = 3) -> tuple[Program, Outcome]:
    """The program without the calls that its finding does not need. Races are tried several times."""

    def fails(shorter: Program) -> Outcome | None:
        for _ in range(tries):
            found = run(shorter, base)
            if found.kind == kind and found.call == first.call:
                return found
        return None

    first = run(program, base)
    kind, tries = first.kind, races if "(thread)" in str(first.finding) else 1
    best, outcome = program, first
    if kind is None or kind == "hang":
        return best, outcome
    place = 1
    while place < len(best["calls"]):
        shorter = best | {"calls": best["calls"][:place] + best["calls"][place + 1 :]}
        found = fails(shorter)
        if found is None:
            place += 1
        else:
            best, outcome = shorter, found
    return best, outcome


def describe(program: Program) -> str:
    """A program in some lines."""
    profile = {key: value for key, value in program.items() if key != "calls"}
    return "\n".join([json.dumps(profile), *("  " + json.dumps(call) for call in program["calls"])])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings of transformers and one-line notices of ours say nothing about a program."""
    from transformers.utils import logging as notices

    notices.disable_progress_bar()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


__all__ = ["Outcome", "Program", "describe", "draw", "quiet", "run", "shrink", "without"]
