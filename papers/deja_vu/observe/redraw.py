"""Draws pictures anew from the CSV files of an earlier observation: python -m ...observe.redraw FOLDER."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejavu_train.evaluation.rows import read_csv
from dejavu_train.ground.errors import UserError, exit_on_user_error
from papers.deja_vu.observe.attention import HeadRow, UniformityRow
from papers.deja_vu.observe.cost import CostRow
from papers.deja_vu.observe.neighbours import NeighbourRow
from papers.deja_vu.observe.predictors import PredictorRow
from papers.deja_vu.observe.residual import CosineRow
from papers.deja_vu.observe.run import draw
from papers.deja_vu.observe.selections import SelectionRow
from papers.deja_vu.observe.union import UnionRow
from papers.deja_vu.observe.units import SparsityRow

KINDS: dict[str, type[Any]] = {
    "sparsity": SparsityRow,
    "cosine": CosineRow,
    "heads": HeadRow,
    "uniformity": UniformityRow,
    "union": UnionRow,
    "selections": SelectionRow,
    "predictors": PredictorRow,
    "neighbours": NeighbourRow,
    "cost": CostRow,
}


def redraw(folder: str | Path) -> list[str]:
    """Draw everything whose CSV lies in ``folder``. Returns the names that were drawn.

    Raises:
        UserError: no CSV of an observation there, or one with other columns.
    """
    folder = Path(folder)
    stored = {name: folder / f"{name}.csv" for name in KINDS}
    rows: dict[str, Sequence[Any]] = {
        name: read_csv(path, KINDS[name]) for name, path in stored.items() if path.is_file()
    }
    if not rows:
        files = ", ".join(f"{name}.csv" for name in KINDS)
        raise UserError(f"{folder} has none of {files}; give the folder observations of an earlier run")
    return draw(rows, folder)


def main(argv: Sequence[str] | None = None) -> None:
    """Raises :class:`UserError` for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m papers.deja_vu.observe.redraw", description=__doc__)
    parser.add_argument("folder", help="with the CSV files of an observation")
    print("drawn:", ", ".join(redraw(parser.parse_args(argv).folder)) or "nothing, matplotlib is not installed")


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
