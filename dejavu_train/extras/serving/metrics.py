"""Counts of a server, in the form that Prometheus reads."""

import threading
from collections import Counter

HELP = {
    "requests_total": "Texts by what became of them.",
    "prompt_tokens_total": "Tokens of prompts that were run.",
    "generated_tokens_total": "Tokens that were written.",
    "steps_total": "Calls of the engine for all rows.",
    "first_token_seconds_sum": "Seconds from asking to the first tokens.",
    "first_token_seconds_count": "Texts that had first tokens.",
    "rows_active": "Texts being written.",
    "rows_waiting": "Texts that wait.",
}


class Metrics:
    """Counters and gauges. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, value: float = 1, label: str = "") -> None:
        """Count. label: such as ``outcome="done"``."""
        with self._lock:
            self._values[name, label] += value  # type: ignore[assignment]

    def put(self, name: str, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name, ""] = value  # type: ignore[assignment]

    def write(self) -> str:
        """The page."""
        with self._lock:
            values = sorted(self._values.items())
        lines = []
        for name, about in HELP.items():
            kind = "gauge" if name.startswith("rows_") else "counter"
            lines += [f"# HELP dejavu_{name} {about}", f"# TYPE dejavu_{name} {kind}"]
            found = [(label, value) for (known, label), value in values if known == name]
            for label, value in found or [("", 0)]:
                lines.append(f"dejavu_{name}{f'{{{label}}}' if label else ''} {value:.12g}")
        return "\n".join(lines) + "\n"
