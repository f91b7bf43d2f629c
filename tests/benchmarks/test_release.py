"""What a release asks for and says: rows of the demo, the changelog, the tag."""

import subprocess

import pytest

from benchmarks import release

CHANGELOG = "# Changelog\n\n## [Unreleased]\n{}\n## [1.0.0] - 2026-11-26\n\n### Added\n\n- A first thing.\n"
LATER = "\n### Added\n\n- A second thing.\n\n### Fixed\n\n- A fault.\n"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of a release that misses nothing, whose demo is new and whose other rows are older."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.0.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG.format(""))
    who = "-c user.name=someone -c user.email=someone@example.org"
    subprocess.run(f"git init -q && git add . && git {who} commit -qm Begin", shell=True, cwd=tmp_path, check=True)
    subprocess.run("git config user.name someone && git config user.email s@example.org", shell=True, cwd=tmp_path)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "older_tables", lambda: [("cpu", "speed.md", "2 of 3 rows older")])
    return tmp_path


def test_a_release_is_tagged_with_its_changes_and_its_older_tables(repository, capsys):
    assert release.main([]) == 0 and "- A first thing." in capsys.readouterr().out
    assert release.main(["--tag"]) == 0
    said = subprocess.check_output(
        ["git", "for-each-ref", "--format=%(objecttype) %(contents)"], cwd=repository, text=True
    )
    assert "tag dejavu_train 1.0.0" in said and "- A first thing." in said
    assert "- speed.md, cpu: 2 of 3 rows older" in said
    assert release.main(["--tag"]) == 1 and "v1.0.0 is there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (lambda root, patch: patch.setattr(release, "older_tables", lambda: [("demo", "demo.md", "1 of 1 rows older")]),
         "demo.md, table demo: 1 of 1 rows older; run what its last line names"),
        (lambda root, patch: (root / "CHANGELOG.md").write_text(CHANGELOG.format(LATER)), "lines under Unreleased"),
        (lambda root, patch: (root / "pyproject.toml").write_text('[project]\nversion = "1.1.0"\n'),
         "no section of 1.1.0"),
        (lambda root, patch: (root / "CHANGELOG.md").write_text("## [1.0.0] - 2026-11-26\n"),
         "working tree differs"),
    ],
)  # fmt: skip
def test_what_is_missing_stops_a_release(repository, monkeypatch, capsys, plant, said):
    plant(repository, monkeypatch)
    assert release.main(["--tag"]) == 1 and said in capsys.readouterr().err
    assert not subprocess.check_output(["git", "tag"], cwd=repository)


def test_unreleased_lines_are_folded_into_the_version(repository):
    (repository / "CHANGELOG.md").write_text(CHANGELOG.format(LATER))
    assert release.main(["--fold"]) == 0
    folded = (repository / "CHANGELOG.md").read_text()
    added = "### Added\n\n- A first thing.\n- A second thing.\n\n### Fixed\n\n- A fault.\n"
    assert folded == CHANGELOG.format("").replace("### Added\n\n- A first thing.\n", added)
    assert release.main(["--fold"]) == 0 and (repository / "CHANGELOG.md").read_text() == folded


def test_tables_whose_rows_are_older_are_found(monkeypatch):
    monkeypatch.setattr("benchmarks.table_maker.is_older", lambda row: True)
    older = {table: mark for table, _, mark in release.older_tables()}
    assert set(release.MUST_BE_NEW) < set(older) and all("rows are older" in mark for mark in older.values())
    monkeypatch.setattr("benchmarks.table_maker.is_older", lambda row: False)
    assert list(release.older_tables()) == []
