"""Modules of ours join those of transformers when these are loaded, not when someone looks whether they are there."""

import importlib
import importlib.util
import sys

from dejavu_train.models import register


def test_looking_for_a_module_is_not_loading_it(tmp_path, monkeypatch):
    (tmp_path / "their_module.py").write_text("VALUE = 1\n")
    (tmp_path / "our_module.py").write_text("import their_module\ntheir_module.VALUE += 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(register, "OURS", {"their_module": "our_module"})
    monkeypatch.setattr(sys, "meta_path", [register._Finder(), *sys.meta_path])
    assert importlib.util.find_spec("their_module") is not None
    assert "our_module" not in sys.modules
    assert importlib.import_module("their_module").VALUE == 2
    for name in ("their_module", "our_module"):
        del sys.modules[name]
