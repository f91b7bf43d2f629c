"""Digests of several files at once."""

import hashlib
import threading

from dejavu_train.data import bulk_read
from dejavu_train.data.bulk_read import sha256_files


def test_files_are_hashed_side_by_side_and_stand_in_their_order(tmp_path, monkeypatch):
    paths, meeting = [tmp_path / f"{number}" for number in range(20)], threading.Barrier(2, timeout=30)
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (number + 1))
    digest = hashlib.file_digest

    def met(file, name):
        meeting.wait()  # breaks where one file is over before the next begins
        return digest(file, name)

    monkeypatch.setattr(bulk_read, "cores", lambda: 2)
    monkeypatch.setattr(hashlib, "file_digest", met)
    assert sha256_files(paths) == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
