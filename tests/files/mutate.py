"""Mutations of bytes and of JSON."""

import copy
import random
from typing import Any

VALUES = (None, -1, 0, 3, 1e30, 2**70, 0.5, "", "x", True, [], {}, ["a"], {"a": 1}, float("nan"))


def bytes_of(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """Other bytes, and how they were made."""
    place = rng.randrange(len(data))
    way = rng.choice(("cut", "flip", "insert", "append", "empty", "zeros", "twice"))
    if way == "cut":
        return data[:place], f"cut at {place}"
    if way == "flip":
        flipped = bytes([data[place] ^ 1 << rng.randrange(8)])
        return data[:place] + flipped + data[place + 1 :], f"a bit of byte {place} flipped"
    if way == "insert":
        return data[:place] + rng.randbytes(3) + data[place:], f"three bytes inserted at {place}"
    if way == "append":
        return data + rng.randbytes(5), "five bytes appended"
    if way == "zeros":
        return data[:place] + bytes(min(16, len(data) - place)) + data[place + 16 :], f"zeros at {place}"
    return (b"", "empty") if way == "empty" else (data + data, "twice")


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values within a JSON value."""
    found = [way] if way else []
    if isinstance(value, dict):
        return found + [each for key, inner in value.items() for each in places(inner, (*way, key))]
    if isinstance(value, list):
        return found + [each for i, inner in enumerate(value[:6]) for each in places(inner, (*way, i))]
    return found


def json_of(rng: random.Random, value: Any) -> tuple[Any, str]:
    """A JSON value with one value within it replaced or taken out, and which."""
    made = copy.deepcopy(value)
    *way, last = rng.choice(places(made))
    holder = made
    for key in way:
        holder = holder[key]
    said = ".".join(map(str, [*way, last]))
    if rng.random() < 0.3:
        del holder[last]
        return made, f"without {said}"
    new = rng.choice(VALUES)
    holder[last] = copy.deepcopy(new)
    return made, f"{said} is {new!r}"
