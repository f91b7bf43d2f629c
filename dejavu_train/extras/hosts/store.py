"""Object storage by fsspec: files of a folder that lie in a store, and come from there when they are read.

A folder with the file ``store.json`` may lack files: :func:`bring` fetches what is asked for. fsspec reaches S3, GCS
and others, each through a package of its own. Its credentials and endpoints come from the environment.
"""

import contextlib
import errno
import functools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dejavu_train.data.shards import STORE
from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.ground.files import read_json, replacing, write_json

THREADS = 8  # files that travel at once
_EXAMPLE = "give an address such as s3://bucket/run"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk here


class Store:
    """A folder of a store.

    Args:
        address: as of fsspec, for instance ``s3://bucket/folder``.

    Raises:
        UserError: no bucket, a protocol that fsspec does not know, or one whose package is not installed.
    """

    def __init__(self, address: str) -> None:
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self.address = address.rstrip("/")
        try:
            self._files, root = fsspec.core.url_to_fs(address)
        except ImportError as error:
            extra = "'dejavu-train[s3]'" if address.startswith("s3:") else "the package that it names"
            raise UserError(f"--store {address}: {first_line(error)}; pip install {extra}") from None
        except ValueError as error:
            raise UserError(f"--store {address}: {first_line(error)}; {_EXAMPLE}") from None
        if isinstance(self._files, LocalFileSystem):  # alone in that folders must be there
            self._files = LocalFileSystem(auto_mkdir=True)
        self._root = root.rstrip("/")
        if not self._root:
            raise UserError(f"--store {address} names no bucket; {_EXAMPLE}")

    def sizes(self) -> dict[str, int]:
        """Bytes of all files by their names in the store.

        Raises:
            UserError: the store refuses, does not answer, or has no such bucket.
        """
        self._files.invalidate_cache()
        with self._answering():
            found = self._files.find(self._root, detail=True)
        return {name.removeprefix(self._root).lstrip("/"): int(about["size"]) for name, about in found.items()}

    def has(self, name: str, contents: bytes) -> bool:
        """Whether a small file of the store is this one. Raises :class:`UserError` as :meth:`sizes`."""
        with self._answering():
            try:
                return bool(self._files.cat_file(f"{self._root}/{name}") == contents)
            except FileNotFoundError:
                return False

    def put(self, folder: Path, names: Iterable[str]) -> None:
        """Upload files of ``folder``. Raises :class:`UserError` as :meth:`sizes`."""

        def put(name: str) -> None:
            with self._answering():
                self._files.put_file(str(folder / name), f"{self._root}/{name}")

        self._each(put, names)

    def get(self, folder: Path, names: Iterable[str]) -> None:
        """Fetch files into ``folder``, each whole under its name. Raises :class:`UserError` as :meth:`sizes`."""

        def get(name: str) -> None:
            with replacing(folder / name) as path, self._answering():
                self._files.get_file(f"{self._root}/{name}", str(path))

        self._each(get, names)

    def _each(self, work: Any, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, names))

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn errors of a store's packages into one line: their own classes, and the system's errors that name no file
        of this machine. A full disk here, and mistakes of ours, stay as they are."""
        try:
            yield
        except Exception as error:
            here = isinstance(error, OSError) and (error.filename is not None or error.errno in _FULL)
            if here or type(error).__module__ == "builtins" and not isinstance(error, OSError):
                raise
            raise UserError(
                f"--store {self.address}: {first_line(error)}; check address, credentials and network; the same command"
                " goes on"
            ) from None


@functools.lru_cache(maxsize=8)
def _opened(address: str) -> Store:
    return Store(address)


def mark(folder: Path, store: Store, inside: str) -> None:
    """Note that every file of ``folder`` lies in a store, in its folder ``inside``."""
    write_json(folder / STORE, {"address": f"{store.address}/{inside}"})


def marked_address(folder: str | Path) -> str:
    """Where the files of a marked folder lie."""
    return str(read_json(Path(folder) / STORE, "the address of a store")["address"])


def bring(folder: str | Path, path: Path) -> None:
    """Fetch a file of a marked folder from its store."""
    _opened(marked_address(folder)).get(Path(folder), [path.relative_to(folder).as_posix()])
