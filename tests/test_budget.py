"""Lines of rooms against their budget."""

import budget


def test_a_file_counts_for_its_room():
    assert budget.room_of("dejavu_train/engine/cpu/step.py") == "dejavu_train/engine"
    assert budget.room_of("kernels/stages/mlp.py") == budget.room_of("dejavu_train/kernels/stages/mlp.py")
    assert budget.room_of("dejavu_train/evaluation/survey/run.py") == "dejavu_train/extras"  # where it stood before
    assert budget.room_of("dejavu_train/version.py") == "dejavu_train, loose"
    assert budget.room_of("docs/start/demo.md") == "docs, words" and budget.room_of("README.md") == ""
    assert [budget.room_of(name) for name in ("train.py", "tests/conftest.py")] == ["", "tests"]
    assert budget.room_of("packages/dejavu-vllm/dejavu_vllm/ops.py") == "packages/dejavu-vllm"
    assert budget.room_of("packages/dejavu-vllm/tests/conftest.py") == "tests"


def test_a_room_above_its_budget_is_named(monkeypatch, tmp_path, capsys):
    (tmp_path / "budget.toml").write_text('core = 9\n"dejavu_train/data" = 2\n')
    monkeypatch.setattr(budget, "ROOT", tmp_path)
    monkeypatch.setattr(budget, "files", lambda commit: [("dejavu_train/data/text.py", "a\nb\nc\n")])
    assert budget.main([]) == 1
    assert capsys.readouterr().err == "dejavu_train/data: 3, and budget.toml has 2\n"
