"""Counts of a server, in the form that Prometheus reads."""

import threading
from collections import Counter, deque

RECENT = 1000  # of a summary's observations, from which its quantiles are
QUANTILES = (0.5, 0.99)
HELP = {
    "requests_total": "Texts by what became of them.",
    "prompt_tokens_total": "Tokens of prompts that were run.",
    "generated_tokens_total": "Tokens that were written.",
    "steps_total": "Calls of the engine for all rows.",
    "cached_tokens_total": "Tokens of prompts whose keys and values were there.",
    "first_token_seconds": "Seconds from asking to the first tokens.",
    "between_tokens_seconds": "Seconds from one token of a text to its next.",
    "rows_active": "Texts being written.",
    "rows_waiting": "Texts that wait.",
}


class Metrics:
    """Counters and gauges. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[tuple[str, str]] = Counter()
        self._recent: dict[str, deque[float]] = {}

    def add(self, name: str, value: float = 1, label: str = "") -> None:
        """Count. label: such as ``outcome="done"``."""
        with self._lock:
            self._values[name, label] += value  # type: ignore[assignment]

    def observe(self, name: str, seconds: float) -> None:
        """Add an observation to a summary."""
        with self._lock:
            self._recent.setdefault(name, deque(maxlen=RECENT)).append(seconds)
            self._values[f"{name}_sum", ""] += seconds  # type: ignore[assignment]
            self._values[f"{name}_count", ""] += 1

    def put(self, name: str, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name, ""] = value  # type: ignore[assignment]

    def write(self) -> str:
        """The page."""
        with self._lock:
            values = sorted(self._values.items())
            recent = {name: sorted(seen) for name, seen in self._recent.items()}
        lines = []
        for name, about in HELP.items():
            summary = name.endswith("_seconds")
            kind = "summary" if summary else "gauge" if name.startswith("rows_") else "counter"
            lines += [f"# HELP dejavu_{name} {about}", f"# TYPE dejavu_{name} {kind}"]
            for quantile in QUANTILES if name in recent else ():
                seen = recent[name]
                value = seen[min(len(seen) - 1, int(quantile * len(seen)))]
                lines.append(f'dejavu_{name}{{quantile="{quantile:g}"}} {value:.12g}')
            for each in (f"{name}_sum", f"{name}_count") if summary else (name,):
                found = [(label, value) for (known, label), value in values if known == each]
                for label, value in found or [("", 0)]:
                    lines.append(f"dejavu_{each}{f'{{{label}}}' if label else ''} {value:.12g}")
        return "\n".join(lines) + "\n"
