"""What Linux alone has: a branch for macOS and Windows, or a line that names the cause. Neither system is at hand."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY
from forks import Forks

from dejavu_train.data.bulk_read import fill
from dejavu_train.ground import children, locks, machine


@pytest.fixture
def without_links(tmp_path):
    """The package as a checkout without links has it: a text file for each."""
    shutil.copytree(REPOSITORY / "dejavu_train", tmp_path / "dejavu_train", symlinks=True)
    for place in (tmp_path / "dejavu_train").rglob("*"):
        if place.is_symlink():
            target = os.readlink(place)
            place.unlink()
            place.write_text(target)
    return tmp_path


RUN = "import runpy; runpy.run_module('dejavu_train', run_name='__main__', alter_sys=True)"


def test_a_checkout_without_links_says_nothing_strange(without_links):
    shutil.copytree(REPOSITORY / "checkpoints/opt-mini", without_links / "model")
    with Forks(["torch", "transformers"], os.environ | {"PYTHONPATH": str(without_links)}) as forks:
        for argv in (["infer", "--bundle=model/bundle", "--check"], ["train", "--model=model", "--check"]):
            started = forks.start(without_links, RUN, *argv)
            code, said = started.wait(), started.out.read_text() + started.err.read_text()
            assert code == 0 and "link" not in said and "Traceback" not in said, said


@pytest.mark.parametrize(("platform", "expected"), [("linux", 2048), ("darwin", 2)])
def test_peaks_of_memory_are_bytes(platform, expected, monkeypatch):
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=2))
    monkeypatch.setitem(sys.modules, "resource", usage)
    monkeypatch.setattr(machine.sys, "platform", platform)
    assert machine.peak_memory() == expected


def test_windows_counts_no_peak(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert machine.peak_memory() is None


def test_rows_are_read_without_preadv(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "preadv", raising=False)
    expected = torch.arange(60, dtype=torch.float32).view(12, 5)
    (tmp_path / "rows").write_bytes(b"head" + expected.numpy().tobytes())
    found = torch.empty(7, 5)
    fill(found, [(tmp_path / "rows", 4 + 20 * 3, 0, 4), (tmp_path / "rows", 4, 4, 3)])
    assert torch.equal(found, torch.cat([expected[3:7], expected[:3]]))


class Kernel32:
    """As much of Windows as says whether a process runs."""

    def __init__(self, running, denied):
        self.running, self.denied, self.closed = running, denied, []

    def OpenProcess(self, right, inherit, pid):
        return 7 if pid in self.running or pid == 2 else 0

    def GetLastError(self):
        return locks.ACCESS_DENIED if self.denied else 87

    def WaitForSingleObject(self, handle, milliseconds):
        return 258 if self.running else 0

    def CloseHandle(self, handle):
        self.closed.append(handle)


@pytest.mark.parametrize(
    ("pid", "running", "denied", "started"),
    [(5, {5}, False, ""), (5, set(), False, None), (5, set(), True, ""), (2, set(), False, None)],
)
def test_windows_is_asked_whether_a_process_runs_and_none_is_ended(pid, running, denied, started, monkeypatch):
    kernel = Kernel32(running, denied)
    monkeypatch.setattr(ctypes, "WinDLL", lambda *_, **__: kernel, raising=False)
    monkeypatch.setattr(locks.sys, "platform", "win32")
    monkeypatch.setattr(locks, "Path", lambda _: SimpleNamespace(read_bytes=missing))
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("os.kill ends a process of Windows"))
    assert locks._started(pid) == started
    assert kernel.closed == ([7] if pid in running or pid == 2 else [])


def missing():
    raise FileNotFoundError("/proc")


def test_a_child_is_stopped_where_processes_have_no_groups(monkeypatch):
    monkeypatch.delattr(os, "killpg")
    child = children.start_child([sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
    children.stop_child(child)
    assert child.returncode == -signal.SIGTERM


def test_a_program_whose_name_is_of_another_encoding_is_looked_at(tmp_path):
    program = tmp_path / os.fsdecode(b"sl\xe9ep")
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "600"]) as process:
        try:
            assert locks._started(process.pid).isdigit()
        finally:
            process.kill()
