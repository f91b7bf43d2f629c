"""Object storage by fsspec: files of a folder that lie in a store, and come from there when they are read.

A folder with the file ``store.json`` may lack files: :func:`bring` fetches what is asked for. fsspec reaches S3, GCS
and others, each through a package of its own. Its credentials and endpoints come from the environment.
"""

import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dejavu_train.errors import UserError, first_line
from dejavu_train.files import read_json, replacing, write_json

MARK = "store.json"
THREADS = 8  # files that travel at once


class Store:
    """A folder of a store.

    Args:
        address: as of fsspec, for instance ``s3://bucket/folder``.

    Raises:
        UserError: fsspec does not know the protocol, or its package is not installed.
    """

    def __init__(self, address: str) -> None:
        import fsspec

        self.address = address.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.address)
        except ImportError as error:
            raise UserError(f"--store {address}: {first_line(error)}; pip install the package that it names") from None
        except ValueError as error:
            raise UserError(
                f"--store {address}: {first_line(error)}; give an address such as s3://bucket/run"
            ) from None

    def sizes(self) -> dict[str, int]:
        """Bytes of all files by their names in the store."""
        self._files.invalidate_cache()
        try:
            found = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {name.removeprefix(self._root).lstrip("/"): int(about["size"]) for name, about in found.items()}

    def read(self, name: str) -> bytes:
        contents: bytes = self._files.cat_file(f"{self._root}/{name}")
        return contents

    def put(self, folder: Path, names: Iterable[str]) -> None:
        """Upload files of ``folder``."""

        def put(name: str) -> None:
            self._files.put_file(str(folder / name), f"{self._root}/{name}")

        self._each(put, names)

    def get(self, folder: Path, names: Iterable[str]) -> None:
        """Fetch files into ``folder``. Each appears whole under its name."""

        def get(name: str) -> None:
            with replacing(folder / name) as path:
                self._files.get_file(f"{self._root}/{name}", str(path))

        self._each(get, names)

    def _each(self, work: Any, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, names))


@functools.lru_cache(maxsize=8)
def _opened(address: str) -> Store:
    return Store(address)


def mark(folder: Path, store: Store, inside: str) -> None:
    """Note that every file of ``folder`` lies in a store, in its folder ``inside``."""
    write_json(folder / MARK, {"address": f"{store.address}/{inside}"})


def is_marked(folder: str | Path) -> bool:
    """Whether every file of the folder lies in a store."""
    return (Path(folder) / MARK).is_file()


def marked_address(folder: str | Path) -> str:
    """Where the files of a marked folder lie."""
    return str(read_json(Path(folder) / MARK, "the address of a store")["address"])


def bring(folder: str | Path, path: Path) -> None:
    """Fetch a file of ``folder`` from its store, if it has one and the file is not here."""
    if not path.is_file() and is_marked(folder):
        _opened(marked_address(folder)).get(Path(folder), [path.relative_to(folder).as_posix()])
