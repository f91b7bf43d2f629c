"""installed_text.py: each source on small made-up distributions, and its cache."""

import importlib
import json

import pytest

from dejavu_train.data import installed_text
from dejavu_train.data.installed_text import load_installed, required_versions
from dejavu_train.data.text import INSTALLED, TextSource, load_documents
from dejavu_train.ground.errors import UserError

LONG = " ".join(["A sentence that is long enough to be told from another one."] * 8)
GRANT = "Permission is hereby granted to any person to use, copy and change this software, free of charge. " * 3


def distribution(root, name, readme="", requires=(), files=None, version="1.0"):
    """Install a made-up distribution into ``root``, a folder on sys.path."""
    folder = root / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    (folder / "METADATA").write_text("\n".join(lines) + "\n\n" + readme, encoding="utf-8")
    written = {f"{folder.name}/{path}": text for path, text in (files or {}).items() if not path.endswith(".py")}
    written |= {path: text for path, text in (files or {}).items() if path.endswith(".py")}
    for path, text in written.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    record = [*written, f"{folder.name}/METADATA", f"{folder.name}/RECORD"]
    (folder / "RECORD").write_text("".join(f"{path},,\n" for path in record), encoding="utf-8")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Two made-up packages, of which the second is only required."""
    root = tmp_path / "site"
    distribution(
        root,
        "fake-tool",
        f"# Fake\n\n{LONG}\n\nOnly the tool says this. {LONG}\n",
        requires=[
            "Fake.Base>=1",
            'fake-missing; extra == "never"',
            "fake-not-installed",
            'fake-base; python_version < "3"',
            "nvidia-fake",
        ],
        files={
            "licenses/LICENSE.txt": f"Copyright one\n\n{GRANT}\n",
            "licenses/AUTHORS": f"Many people. {LONG}",
            "vendor.txt": LONG,
            "fake_tool/__init__.py": f'"""{LONG}"""\nVALUE = 1\n',
            "fake_tool/more.py": "# The licence.\n\n" + "".join(f"value_{i} = {i}\n" for i in range(60)),
            "fake_tool/other.py": f'"""Doc."""\n\n# The licence.\n\nnames = [\n    "{LONG}"\n]\n',
            "fake_tool/template.py": "{{ not python }}" * 60,
        },
    )
    quoted = "\n".join("> " + line for line in GRANT.upper().split(". "))
    distribution(
        root,
        "fake-base",
        f"Base\n====\n\n{LONG}\n\nOnly the base says this, {LONG}\n",
        files={"NOTICE": f"{quoted}\n \t\nA notice of its own. {LONG}\n"},
    )
    distribution(root, "nvidia-fake", f"Never read, {LONG}")
    monkeypatch.syspath_prepend(root)
    monkeypatch.setattr(installed_text, "PACKAGES", {"fake_tool": "fake-tool"})
    monkeypatch.setattr(installed_text, "_drawn", lambda name: True)
    importlib.invalidate_caches()
    return root


def by_name(source, folder):
    return {row["name"]: row["text"] for row in load_installed(source, folder)[0]}


def test_requirements_are_followed_where_their_markers_hold(site):
    assert required_versions() == {"fake-base": "1.0", "fake-tool": "1.0"}


def test_docs_are_docstrings(site, tmp_path):
    assert by_name("installed-docs", tmp_path) == {"fake_tool/__init__.py": LONG}


def test_readmes_repeat_no_paragraph(site, tmp_path):
    found = by_name("installed-readmes", tmp_path)
    assert list(found) == ["fake-base", "fake-tool"]
    assert found["fake-base"] == f"Base\n\n{LONG}\n\nOnly the base says this, {LONG}"
    assert found["fake-tool"] == f"Fake\n\nOnly the tool says this. {LONG}"


def test_licences_have_each_paragraph_once_however_it_is_wrapped(site, tmp_path, monkeypatch):
    monkeypatch.setattr(installed_text, "MIN_DOCUMENT_CHARACTERS", 10)
    found = by_name("installed-licences", tmp_path)
    assert list(found) == ["fake-base/NOTICE", "fake-tool/licenses/LICENSE.txt"]
    assert found["fake-base/NOTICE"].endswith(f"\n\nA notice of its own. {LONG}")
    assert found["fake-tool/licenses/LICENSE.txt"] == "Copyright one"  # fake-base grants the permission already


def test_code_has_no_docstrings_and_each_comment_paragraph_once(site, tmp_path):
    found = by_name("installed-code", tmp_path)
    assert list(found) == ["fake_tool/more.py", "fake_tool/other.py"]  # __init__ is short without its docstring
    assert found["fake_tool/more.py"].startswith("# The licence.\n\nvalue_0 = 0\n")
    assert found["fake_tool/other.py"].startswith("names = [\n")


def test_code_draws_a_fixed_share_of_the_files():
    names = [f"package/module_{i}.py" for i in range(5000)]
    drawn = [name for name in names if installed_text._drawn(name)]
    assert abs(len(drawn) / 5000 - 1 / installed_text.CODE_SHARE) < 0.01
    # The same on every machine.
    assert drawn[:3] == [
        "package/module_60.py",
        "package/module_64.py",
        "package/module_96.py",
    ]


@pytest.mark.parametrize("source", INSTALLED)
def test_sources_are_cached_and_remade_for_other_versions(site, tmp_path, source, monkeypatch, caplog):
    documents, versions = load_installed(source, tmp_path)
    assert documents and versions["fake_tool" if "fake_tool" in versions else "fake-tool"] == "1.0"
    manifest = json.loads((tmp_path / f"{source}.json").read_text())
    assert manifest["versions"] == versions and manifest["documents"] == len(documents)
    assert manifest["bytes"] == sum(len(row["text"].encode()) for row in documents)

    read_versions, _ = installed_text._READERS[source]
    monkeypatch.setitem(installed_text._READERS, source, (read_versions, lambda: pytest.fail("no cache was used")))
    loaded, loaded_versions = load_documents(TextSource(source=source, cache=str(tmp_path)))
    assert [document.text for document in loaded] == [row["text"] for row in documents]
    assert loaded_versions == versions
    other = versions | {"fake-base": "2.0"}
    monkeypatch.setitem(installed_text._READERS, source, (lambda: other, lambda: documents[:1]))
    assert load_installed(source, tmp_path) == (documents[:1], other)
    assert f"{source}: versions changed (fake-base)" in caplog.text


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(installed_text, "PACKAGES", {"nothing_of_this_name": "nothing-of-this-name"})
    for versions in (installed_text.package_versions, required_versions):
        with pytest.raises(UserError, match=r"dejavu-train\[train\]"):
            versions()
