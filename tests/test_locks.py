"""Holders of a folder: who excludes whom, who counts as gone, and that two at once never both go on."""

import contextlib
import gc
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from dejavu_train.ground import locks
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.ground.locks import LockHeld, claim, holders, locked
from dejavu_train.training import job as job_module
from dejavu_train.training.job import claimed


def dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def put(folder, **changes):
    with claim(folder, "mine"):
        values = json.loads(next(folder.glob("*.json")).read_text())
    path = folder / f"other-{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(values | changes))
    return path


@pytest.mark.parametrize("hold", [lambda folder: claim(folder, "one"), locked, claimed], ids=["claim", "lock", "job"])
def test_a_signal_at_any_moment_leaves_no_holder(tmp_path, hold, capsys):
    """At every call of what takes and leaves a folder, for there the interpreter looks for signals.

    What dies is not waited for: no cycle keeps a holder.
    """
    files = {module.__file__ for module in (locks, job_module, contextlib, threading, pathlib)}
    before = sys.gettrace()

    def ended_at(moment):
        seen = 0

        def trace(frame, *_):
            nonlocal seen
            seen += frame.f_code.co_filename in files
            if seen == moment:
                sys.settrace(None)
                signal.getsignal(signal.SIGTERM)(signal.SIGTERM, frame)

        def main(argv):
            sys.settrace(trace)
            try:
                with hold(tmp_path):
                    pass
            finally:
                sys.settrace(before)

        assert exit_on_user_error(main) == (143 if (came := seen >= moment) else 0)
        return came

    gc.disable()
    try:
        moment = 1
        while ended_at(moment):
            assert not list(tmp_path.rglob("*.json")) and not locks.ours(), f"moment {moment}"
            moment += 1
    finally:
        gc.enable()
    assert moment > 30


def test_those_that_agree_hold_a_folder_together(tmp_path):
    with claim(tmp_path, "one"), claim(tmp_path, "one"):
        for identity in ("two", None):
            with pytest.raises(LockHeld, match=f"process {os.getpid()} on "), claim(tmp_path, identity):
                pass
        assert len(holders(tmp_path)) == 2
    assert not list(tmp_path.iterdir())
    with claim(tmp_path), pytest.raises(LockHeld), claim(tmp_path):
        pass


def test_a_holder_whose_process_is_gone_does_not_count(tmp_path):
    for changes in ({"pid": dead_pid()}, {"started": "1"}):
        path = put(tmp_path, **changes)
        with claim(tmp_path):
            assert not path.exists()
    put(tmp_path)  # this process lives
    with pytest.raises(LockHeld), claim(tmp_path):
        pass


def test_a_holder_on_another_machine_counts_while_its_file_is_touched(tmp_path):
    path = put(tmp_path, host="far", machine="far 1", pid=7)
    with pytest.raises(LockHeld, match="process 7 on far"), claim(tmp_path):
        pass
    long_ago = time.time() - locks.GONE_SECONDS - 5
    os.utime(path, (long_ago, long_ago))
    with claim(tmp_path):
        assert not path.exists()


def test_a_holder_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.02)
    with claim(tmp_path):
        path = next(tmp_path.glob("*.json"))
        os.utime(path, (0, 0))
        time.sleep(0.2)
        assert time.time() - path.stat().st_mtime < 60


def test_a_file_that_is_none_of_ours_is_taken_away(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with claim(tmp_path):
        assert len(list(tmp_path.iterdir())) == 1


def _count(folder, rounds):
    for _ in range(rounds):
        with locked(folder / "lock"):
            value = int((folder / "count").read_text())
            time.sleep(0.001)
            (folder / "count").write_text(str(value + 1))


def test_a_file_that_another_process_is_writing_stays(tmp_path):
    """Files are written aside under a hidden name that ends alike: seen when four processes began together."""
    halfway = tmp_path / ".tmp-abc-host-12-0000.json"
    halfway.write_text("")
    assert holders(tmp_path) == [] and halfway.exists()


def test_processes_take_turns(tmp_path):
    (tmp_path / "count").write_text("0")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_count, args=(tmp_path, 5)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert (tmp_path / "count").read_text() == "20"


def test_waiting_names_the_holder(tmp_path, capsys, monkeypatch):
    path = put(tmp_path, host="far", machine="far 1", pid=7)
    sleep = time.sleep

    def leave(seconds):
        if seconds > 0.1:  # the wait between two attempts, not the moment of giving way
            path.unlink(missing_ok=True)
        sleep(0.001)

    monkeypatch.setattr(locks.time, "sleep", leave)
    with locked(tmp_path, "waiting for it"):
        pass
    assert capsys.readouterr().err == "waiting for it (process 7 on far)\n"
