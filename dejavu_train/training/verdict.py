"""Words for the metrics of a predictor: while it trains, and a verdict when it is done."""

from collections.abc import Mapping

from dejavu_train.bundle.spec import GOOD_MASS
from dejavu_train.families import Target

FOUND = 0.9  # of the recall that the density allows: what a predictor finds that was trained long enough


def most_recall(density: float, active_density: float) -> float:
    """The recall of a perfect predictor: where fewer units are selected than are active, some must be missed.

    >>> most_recall(0.05, 0.1), most_recall(0.2, 0.1), most_recall(0.2, 0.0)
    (0.5, 1.0, 1.0)
    """
    return 1.0 if density >= active_density else density / active_density


def metrics_line(metrics: Mapping[str, float]) -> str:
    """The numbers of one validation. What decides comes first."""
    return (
        f"retained mass {metrics['val/retained_mass']:.3f}, recall {metrics['val/recall']:.3f}"
        f" at density {metrics['val/density']:.3g}"
    )


def predictor_verdict(metrics: Mapping[str, float], target: Target, has_rank: bool = True) -> str:
    """Whether a trained predictor is good or weak. A weak one has the reason, and the flag that may mend it."""
    mass, recall, density = (metrics[f"val/{name}"] for name in ("retained_mass", "recall", "density"))
    if mass >= GOOD_MASS:
        return "good"
    most = most_recall(density, metrics["val/active_density"])
    if recall < FOUND * most:
        why = f"it finds {100 * recall:.0f} % of what is active, where {100 * most:.0f} % fit into the density"
        return f"weak, {why}: raise --{target}.steps" + (f" or --{target}.rank" if has_rank else "")
    fits = f"the density has room for {100 * most:.0f} % of what is active" if most < 1 else "the density is too low"
    return f"weak, {fits}: raise --{target}.density"
