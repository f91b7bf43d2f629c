"""The states between two layers: their files have all their blocks, so that a full disk is an error at once."""

import errno
import os

import pytest
import torch

from dejavu_train.data.stream import Stream
from dejavu_train.ground.errors import describe

needs_fallocate = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system gives out blocks later")


def made(folder, rows=4096):
    return Stream(folder, "one", (rows, 64), torch.float16)


@needs_fallocate
def test_files_have_all_their_blocks(tmp_path):
    made(tmp_path)
    for name in ("even.bin", "odd.bin"):
        about = (tmp_path / name).stat()
        assert about.st_size == 4096 * 64 * 2 <= 512 * about.st_blocks


def test_what_files_hold_stays(tmp_path):
    states = torch.randn(4096, 64).half()
    before = made(tmp_path)
    before.write(0, states)
    before.advance()
    again = made(tmp_path)
    assert again.next == 1 and torch.equal(again.read(0, 4096), states)
    assert made(tmp_path, rows=64).next == 0


@needs_fallocate
def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError) as refused:
        made(tmp_path)
    assert describe(refused.value).startswith(f"{tmp_path / 'even.bin'}: No space left on device; free some space")
