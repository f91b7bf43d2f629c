"""Draws the picture anew from rows.csv and positions.csv: python -m ...generation.redraw FOLDER."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dejavu_train.evaluation.rows import read_csv
from dejavu_train.extras.generation.picture import draw
from dejavu_train.extras.generation.run import GenerationRow, PositionRow
from dejavu_train.ground.errors import UserError, exit_on_user_error


def redraw(folder: str | Path) -> bool:
    """Draw what lies in ``folder``. False without matplotlib.

    Raises:
        UserError: a file is missing there, or has other columns.
    """
    folder = Path(folder)
    paths = [folder / "rows.csv", folder / "positions.csv"]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is missing: name the folder generation of an earlier run")
    rows, positions = (read_csv(path, kind) for path, kind in zip(paths, (GenerationRow, PositionRow), strict=True))
    return draw(rows, positions, folder / "generation")


def main(argv: Sequence[str] | None = None) -> None:
    """Raises :class:`UserError` for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m dejavu_train.extras.generation.redraw", description=__doc__)
    parser.add_argument("folder", help="generation, of an earlier run")
    print("drawn" if redraw(parser.parse_args(argv).folder) else "not drawn: matplotlib is not installed")


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
