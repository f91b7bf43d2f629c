"""Digests of several files at once."""

import hashlib
import threading

import pytest

from dejavu_train.data import bulk_read
from dejavu_train.data.bulk_read import sha256_files


def write(folder, count):
    paths = [folder / f"{number}" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (number + 1))
    return paths


def test_digests_stand_in_the_order_of_the_files(tmp_path):
    paths = write(tmp_path, 20)
    assert sha256_files(paths) == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert sha256_files([]) == []


def test_files_are_hashed_side_by_side(tmp_path, monkeypatch):
    meeting = threading.Barrier(2, timeout=30)
    digest = hashlib.file_digest

    def met(file, name):
        meeting.wait()  # breaks where one file is over before the next begins
        return digest(file, name)

    monkeypatch.setattr(bulk_read, "cores", lambda: 2)
    monkeypatch.setattr(hashlib, "file_digest", met)
    assert len(set(sha256_files(write(tmp_path, 4)))) == 4


def test_a_file_that_is_not_there_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        sha256_files([*write(tmp_path, 3), tmp_path / "none"])
