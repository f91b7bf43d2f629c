"""A machine without numba, with a broken one, or with a cache that cannot be used: gather or a slow start, a line."""

import logging
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from bundles import make_bundle
from numba.core.caching import CacheImpl

from dejavu_train.engine.cpu import entry_point
from dejavu_train.ground.errors import Unsupported
from dejavu_train.models.load import load_model
from dejavu_train.sparse.model import SparseOPTForCausalLM


class NoLibrary:
    """Found first, and numba does not load."""

    @staticmethod
    def find_spec(name, *_):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise OSError("Could not find libllvmlite.so")


def test_from_pretrained_with_a_numba_that_does_not_load(tiny_opt, tmp_path, monkeypatch, caplog):
    make_bundle(tiny_opt).at(0.3, 0.6).save_pretrained(tmp_path)
    for name in list(sys.modules):
        if name.split(".")[0] in ("numba", "llvmlite") or name.startswith("dejavu_train.engine.cpu."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoLibrary, *sys.meta_path])
    model = SparseOPTForCausalLM.from_pretrained(tiny_opt, tmp_path)
    assert model.backend == "gather"
    assert model.generate(torch.tensor([[2, 5]]), max_new_tokens=2, do_sample=False).shape == (1, 4)
    with pytest.raises(Unsupported) as refused:
        SparseOPTForCausalLM.from_pretrained(tiny_opt, tmp_path, backend="cpu")
    for told in (str(refused.value), caplog.text):
        assert "CPU engine cannot be loaded (OSError: Could not find libllvmlite.so)" in told
        assert "pip install numba" in told


@pytest.mark.parametrize("name", ["numba", "dejavu_train.engine.cpu.engine"])
def test_numba_hidden(tiny_opt, monkeypatch, caplog, name):
    monkeypatch.setitem(sys.modules, name, None)
    model = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), make_bundle(tiny_opt).at(0.3, 0.6))
    assert model.backend == "gather" and "pip install numba" in caplog.text
    with pytest.raises(Unsupported, match="pip install numba"):
        SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), make_bundle(tiny_opt).at(0.3, 0.6), "cpu")
    with pytest.raises(Unsupported, match="pip install numba"):  # as infer.py asks for it
        from dejavu_train.engine.cpu import CpuEngine  # noqa: F401


def test_windows_has_other_threads(tiny_opt, monkeypatch, caplog):
    monkeypatch.setattr(sys, "platform", "win32")
    sparse = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), make_bundle(tiny_opt).at(0.3, 0.6))
    assert sparse.backend == "gather" and "this is Windows" in caplog.text


def small():
    """A function in the place of the engine's entry point, which takes 15 seconds to compile."""

    @numba.njit
    def enter(x):
        return x + x

    return enter


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def compile_anew(*kinds):
    """Compile as a new process does. Returns what was found in the cache."""
    enter = small()
    for kind in kinds:
        entry_point._compile(enter, (kind,))
    assert enter(3) == 6
    return sum(enter.stats.cache_hits.values())


@pytest.fixture(params=["locators", "path"])
def no_folder(request, monkeypatch):
    """No place for a cache: numba finds none, or one that cannot be written."""
    if request.param == "locators":
        monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    else:
        monkeypatch.setattr(numba.config, "CACHE_DIR", "/proc/none")
        monkeypatch.setattr(CacheImpl, "_locator_classes", CacheImpl._locator_classes[:1])


def test_without_a_folder_every_process_compiles_and_says_so(no_folder, caplog):
    assert compile_anew(numba.int64) == 0
    assert "NUMBA_CACHE_DIR" in caplog.text and len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_next_start(cache, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_index", full)
    assert compile_anew(numba.int64) == 0
    assert "No space left" in caplog.text and "NUMBA_CACHE_DIR" in caplog.text


@pytest.mark.parametrize("damage", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("kept", [0, 60])
def test_a_damaged_cache_is_written_anew(cache, caplog, damage, kept):
    assert compile_anew(numba.int64) == 0
    assert compile_anew(numba.int64) == 1
    (file,) = Path(cache).rglob(damage)
    file.write_bytes(file.read_bytes()[:kept])
    assert compile_anew(numba.int64) == 0
    assert compile_anew(numba.int64) == 1
    assert not caplog.records


def test_two_processes_that_compile_at_once_share_no_file(cache):
    """Each has seen an empty index. Whichever index stays names the right code."""
    assert compile_anew(numba.int64) == 0
    (index,) = Path(cache).rglob("*.nbi")
    first = index.read_bytes()
    index.unlink()
    assert compile_anew(numba.float64, numba.int64) == 0
    index.write_bytes(first)  # the one that began first ends last
    enter = small()
    entry_point._compile(enter, (numba.int64,))
    assert enter.stats.cache_hits and enter(np.int64(2**40)) == 2**41
    assert len(list(Path(cache).rglob("*.nbc"))) == 2
