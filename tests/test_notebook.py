"""examples/quickstart.ipynb: its code cells in order, and the output that stands in the file."""

import contextlib
import io
import json
import re

import pytest
from conftest import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "quickstart.ipynb"


def test_the_notebook_runs_and_shows_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)  # as Jupyter does
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    space: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), space)
        (output,) = cell["outputs"]
        shown, now = "".join(output["text"]), printed.getvalue()
        assert shown and output["name"] == "stdout"
        if "perplexity" in shown:  # another machine rounds otherwise, and may end a text otherwise
            values = [[float(value) for value in re.findall(r"perplexity (\S+)", text)] for text in (shown, now)]
            assert values[1] == pytest.approx(values[0], abs=0.2) and values[1][0] < values[1][-1]
        else:
            assert now.splitlines()[0] == shown.splitlines()[0]
