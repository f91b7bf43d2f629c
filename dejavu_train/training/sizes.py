"""Time and memory of a run of each configuration, by size, as ``train.py --help check`` prints it.

The rows are those of ``benchmarks/check_sizes.py``. Readable without torch.
"""

import json
import textwrap
from pathlib import Path
from typing import Any

from dejavu_train.ground.table import table

ROWS = Path(__file__).parent / "sizes.json"
_HEADINGS = ["configuration", "disk, GB", "weights in fp16, GB", "hours", "on"]
_COLUMNS = ("configuration", "disk_gb", "weights_gb", "hours", "device")


def read_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """The rows of a file that ``benchmarks/check_sizes.py`` wrote."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def size_table() -> str:
    """The rows as text: activations on disk, weights on the GPU, and hours on the device that is named."""
    return textwrap.indent(table(_HEADINGS, [[f"{row[name]}" for name in _COLUMNS] for row in read_rows()]), "  ")


def check_help() -> str:
    """Addition of ``--help check`` to the options."""
    return (
        "--check does no work: it looks for mistakes and prints disk and minutes on this machine.\n"
        "The model's folder may hold a config.json alone.\n\n"
        f"what the configurations of OPT take:\n{size_table()}\n"
    )
