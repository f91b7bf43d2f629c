"""Time and memory of a run of each configuration, by size, as ``train.py --help check`` prints it.

The rows are those of ``benchmarks/check_sizes.py``. Readable without torch.
"""

import json
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parent / "sizes.json"
_HEADINGS = ["configuration", "disk, GB", "weights in fp16, GB", "hours", "on"]
_COLUMNS = ("configuration", "disk_gb", "weights_gb", "hours", "device")


def read_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """The rows of a file that ``benchmarks/check_sizes.py`` wrote."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def size_table() -> str:
    """The rows as text: activations on disk, weights on the GPU, and hours on the device that is named."""
    cells = [_HEADINGS, *([f"{row[name]}" for name in _COLUMNS] for row in read_rows())]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEADINGS))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def check_help() -> str:
    """Addition of ``--help check`` to the options."""
    return (
        "--check does no work: it looks for mistakes and prints disk and minutes on this machine.\n"
        "The model's folder may hold a config.json alone.\n\n"
        f"what the configurations of OPT take:\n{size_table()}\n"
    )
