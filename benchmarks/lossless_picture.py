"""A picture of lossless decoding: speed against acceptance, lines by timed cycles and points by whole texts."""

import argparse
import csv
from collections.abc import Callable


def best_speed(cycles: dict[int, float], a: float) -> float:
    """Tokens a dense step by the best length, cycles in dense steps by length.

    >>> round(best_speed({0: 1.0, 3: 1.5}, 0.9), 3)
    2.293
    """
    return max(sum(a**i for i in range(g + 1)) / cycles[g] for g in cycles)


def by_token(accepted: float, drafted: float) -> float:
    """The probability that a token is accepted, of drafts of so many tokens of which so many were, on average.

    >>> round(by_token(0.9 + 0.81, 2), 6)
    0.9
    """
    low, high, whole = 0.0, 1.0, int(drafted)
    for _ in range(50):
        a = (low + high) / 2
        expected = sum(a**i for i in range(1, whole + 1)) + (drafted - whole) * a ** (whole + 1)
        low, high = (a, high) if expected < accepted else (low, a)
    return high


def draw(args: argparse.Namespace) -> None:
    """Lines from cycles that were timed, points where whole texts were: tokens a second against acceptance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with args.out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cycles: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows:
        if row["what"] == "cycle":
            cycles.setdefault((row["model"], row["weights"], row["way"]), {})[int(row["length"])] = float(row["ratio"])
    shown = [key for key in cycles if key[2] == ("sparse" if key[1] == "int4" else "sparse, 4 bits")]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    shares = [0.5 + 0.005 * i for i in range(101)]
    for colour, key in enumerate(shown):
        model, weights, _ = key
        label = f"{model.upper()} {'4 bits' if weights == 'int4' else 'fp16'}"
        axes.plot(shares, [best_speed(cycles[key], a) for a in shares], color=f"C{colour}", label=label)
        forced = [row for row in rows if row["what"] == "forced" and (row["model"], row["weights"], row["way"]) == key]
        axes.plot(*_points(forced, lambda row: float(row["forced"])), "o", color=f"C{colour}")
    speed = [r for r in rows if r["what"] == "speed" and r["way"] == "sparse, 4 bits" and r["text"] == "all"]
    for model, marker in zip(dict.fromkeys(row["model"] for row in speed), "xs^vd", strict=False):
        own = [row for row in speed if row["model"] == model]
        axes.plot(*_points(own, _own_acceptance), marker, color="black", label=f"{model}, measured")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("probability that a drafted token is accepted")
    axes.set_ylabel("speed, our dense engine = 1")
    axes.legend()
    figure.tight_layout()
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.picture, dpi=120)


def _points(rows: list[dict[str, str]], across: Callable[[dict[str, str]], float]) -> tuple[list[float], list[float]]:
    kept = [row for row in rows if row["ratio"]]
    return [across(row) for row in kept], [float(row["ratio"]) for row in kept]


def _own_acceptance(row: dict[str, str]) -> float:
    length, share = float(row["mean_length"]), float(row["acceptance"])
    return by_token(length, length / share) if share else 0.0
