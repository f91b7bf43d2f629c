"""What merged kernels saved: numbers of a tree, kernels of two outputs side by side, tables of made-up rows."""

import pytest

from benchmarks import merged, tables_stages
from benchmarks.rows import append_row
from benchmarks.tables_format import read_csv

TREE = [
    ("kernels/a.py", '"""Text."""\n\n@triton.jit\ndef _a_kernel(x, y, z):\n    pass\n\n\ndef a(x): ...\n'),
    ("kernels/b.py", "class B:\n    def b(self, x, /, *, y): ...\n"),
    ("tests/c.py", "@triton.jit\ndef _c_kernel(a, b, c, d, e): ...\n"),
]
LINE = "{}: {} registers, 0 B stack (0 in loops), {} B shared, {}loops of {} instructions\n"


def test_the_numbers_of_a_tree_are_those_of_its_kernels(monkeypatch):
    monkeypatch.setattr(merged, "sources", lambda at: TREE)
    assert merged.numbers_of("any") == {"lines": 10, "code": 6, "kernels": 1, "of_device": 3, "of_others": 2}


def test_kernels_of_two_outputs_are_matched_by_case(tmp_path, monkeypatch, capsys):
    old = LINE.format("sparse_mlp 4096 own _sparse_mlp_kernel", 100, 9216, "", "464")
    old += LINE.format("sparse_mlp 4096 own _add_kernel", 46, 1280, "", "none")
    old += LINE.format("4 bits: int4_mlp 9216 _int4_mlp_kernel", 200, 40064, "", "8, 9")
    old += LINE.format("gone 4096 _gone_kernel", 1, 1, "", "none")
    new = LINE.format("mlp 4096 own _mlp_kernel", 102, 9216, "dependent, ", "464")
    new += LINE.format("mlp 4096 own _add_kernel", 46, 1280, "plain, ", "none")
    new += LINE.format("4 bits: mlp 9216 _mlp_kernel", 195, 40064, "dependent, ", "8, 9")
    (tmp_path / "old.txt").write_text(old)
    (tmp_path / "new.txt").write_text(new)
    path = tmp_path / merged.REGISTERS
    monkeypatch.setattr(merged, "ROOT", tmp_path)
    assert merged.main(["registers", str(tmp_path / "old.txt"), str(tmp_path / "new.txt")]) == 0
    assert "gone 4096 0" in capsys.readouterr().out
    rows = read_csv(path)
    assert [row["kernel_after"] for row in rows] == ["_mlp_kernel", "_add_kernel", "_mlp_kernel"]
    assert (rows[0]["registers_before"], rows[0]["registers_after"]) == ("100", "102")
    table = tables_stages.registers_table(tmp_path)
    assert "| mlp own | sparse_mlp_kernel to mlp_kernel | 100 to 102 | 9,216 | | |" in table
    assert "| 4 bits: mlp | int4_mlp_kernel to mlp_kernel | | | 200 to 195 | 40,064 |" in table
    assert "3 kernels: more registers 1, fewer 1." in table


@pytest.mark.parametrize(("change", "spread", "slower"), [(0.03, 0.001, 1), (0.03, 0.04, 0), (0.01, 0.0, 0)])
def test_cells_show_the_newest_times_and_who_is_slower(tmp_path, change, spread, slower):
    cell = {"model": "66b", "engine": "sparse", "batch": 2, "options": "head_density=1.0 weights=int4"}
    times = {"before_ms": 6.2, "after_ms": 6.6, "spread": spread, "rounds": 2, "before_commit": "11dec66"}
    for gpu, commit, each in (("NVIDIA H200", "a", 0.5), ("NVIDIA H200", "b", change), ("NVIDIA H100 80GB", "c", -0.1)):
        append_row(
            tmp_path / tables_stages.CELLS, {"gpu": gpu} | cell | times | {"change": each, "after_commit": commit}
        )
    other = {"gpu": "NVIDIA H200", "change": 9, "after_commit": "d"}
    append_row(tmp_path / tables_stages.CELLS, {**cell, **times, **other, "before_commit": "older"})
    table = tables_stages.cells_table(tmp_path)
    said = "| 66B, 4 bits, two rows, sparse, all heads | 6.2 | 6.6 |"
    (line,) = [line for line in table.splitlines() if line.startswith(said)]
    assert line.endswith(f"| {100 * spread:.2f} % | 2 | b | +50.0 % | -10.0 % |")
    assert f"Slower by more than 2 % and the spread: {slower} of 1" in table


def test_lines_before_and_after_stand_side_by_side(tmp_path, monkeypatch):
    counted = iter([{"lines": 1200, "code": 800, "kernels": 4, "of_device": 61, "of_others": 18}] * 2)
    monkeypatch.setattr(merged, "ROOT", tmp_path)
    monkeypatch.setattr(merged, "STEPS", (("a merge", "a^", "a"),))
    monkeypatch.setattr(merged, "numbers_of", lambda at: next(counted) | ({"lines": 1100} if at == "a" else {}))
    merged.main(["lines"])
    assert "| a merge | 1,200 to 1,100 | 800 to 800 |" in tables_stages.lines_table(tmp_path)
