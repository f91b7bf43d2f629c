"""Files are written aside and renamed, so that a kill at any moment leaves the old file or the new one, never half."""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dejavu_train.ground.errors import UserError
from dejavu_train.ground.signals import deferred


def share(path: Path) -> None:
    """Give a file that was made private to the user, as mkstemp and safetensors make them, any new file's mode."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``. Rename it to ``path`` on success, remove it on failure.

    The temporary name begins with ``.tmp-`` so that readers which list a folder can pass it over.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = None
    try:
        with deferred():  # a signal between the file's creation and its name would leave it behind
            handle, name = tempfile.mkstemp(prefix=".tmp-", suffix="-" + path.name, dir=path.parent)
            temporary = Path(name)
            os.close(handle)
        with _system_errors(path):
            yield temporary
        _settle(temporary)
        os.replace(temporary, path)
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_files(folder: str | Path, last: str) -> Iterator[Path]:
    """Yield an empty folder within ``folder``. On success its files take their places, the one called ``last`` last.

    Until all of them are written nothing in ``folder`` changes. The files that are there may be read, or mapped, while
    they are replaced. A folder that is new is removed on failure.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder))
    try:
        with _system_errors(folder):
            yield aside
        written = sorted(aside.iterdir(), key=lambda path: (path.name == last, path.name))
        for path in written:
            _settle(path)
        with deferred():  # a signal between two of them would leave some of either
            for path in written:
                os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # nothing was written
                folder.rmdir()


@contextlib.contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """An error of writing as the operating system's, of ``path``."""
    try:
        yield
    except Exception as error:
        reason = system_error(error)
        if reason is None or isinstance(error, UserError):
            raise
        raise OSError(reason, os.strerror(reason), str(path)) from error


def _settle(path: Path) -> None:
    """Have a written file on the disk, in the mode of any new file."""
    with open(path, "r+b") as written:  # Windows writes out no file that is open for reading alone
        os.fsync(written.fileno())
    share(path)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed began to write into a folder. Call it where nobody else writes there."""
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def system_error(error: BaseException) -> int | None:
    """The number of the operating system's error (as in ``errno``) behind an error of writing. None if there is none.

    HDF5 and safetensors say it in words only.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"errno ?= ?(\d+)|\[Errno (\d+)\]|\(os error (\d+)\)", str(error))
    return next(int(number) for number in match.groups() if number) if match else None


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 ``text`` to ``path`` atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON to ``path`` atomically. Numbers and paths are as :func:`plain` has them."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, default=_plain) + "\n")


def plain(value: Any, what: str) -> Any:
    """``value`` as JSON has it: numbers and arrays of numpy and torch as numbers and lists, paths as text.

    Raises:
        UserError: something in it that JSON cannot hold. ``what`` names it.
    """
    try:
        return json.loads(json.dumps(value, default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{what} cannot be written as JSON ({error}); leave that out, or make it text") from None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a {type(value).__name__} is no number, text, list or mapping")


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON file. ``what`` names it in the error.

    Raises:
        UserError: the file is missing, not UTF-8 or not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{what} is missing: there is no file {path}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{what} at {path} is not readable JSON ({error}); restore it or make it anew") from None


def write_sealed(path: str | Path, value: dict[str, Any]) -> None:
    """Write ``value`` as JSON with the digest of it all, which :func:`read_sealed` compares."""
    write_json(path, value | {"digest": json_digest(value)})


def read_sealed(path: str | Path, what: str) -> dict[str, Any]:
    """Read what :func:`write_sealed` wrote. Files of earlier versions have no digest and are taken as they are.

    Raises:
        UserError: as :func:`read_json`, or a value was changed.
    """
    value = read_json(path, what)
    if not isinstance(value, dict):
        raise UserError(f"{what} at {path} does not hold keys and values; restore it or make it anew")
    digest = value.pop("digest", None)
    if digest is not None and digest != json_digest(value):
        raise UserError(f"{what} at {path} was changed since it was written; restore it or make it anew")
    return value


def json_digest(value: Any) -> str:
    """SHA-256 of ``value`` as canonical JSON: insensitive to layout, sensitive to every value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True, default=_plain).encode()).hexdigest()


def sha256_file(path: str | Path) -> str:
    """SHA-256 of the file's bytes, in hexadecimal. A file that did not change is read once in a process."""
    status = os.stat(path)
    return _sha256(str(path), status.st_mtime_ns, status.st_size, status.st_ino)


@functools.lru_cache(maxsize=100_000)
def _sha256(path: str, *_state: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_zip(path: str | Path) -> None:
    """Compare a checkpoint, which is a zip archive, with the checksums in it. torch does not.

    Raises:
        zipfile.BadZipFile: they differ, or it is none.
    """
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
        if bad is not None:
            raise zipfile.BadZipFile(f"{bad} was changed")


def sha256_text(text: str) -> str:
    """SHA-256 of the UTF-8 bytes of ``text``, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def way_from(folder: str | Path, path: str) -> str:
    """How to get from a folder to an absolute path. The path itself where they share no folder but the root.

    So both may be moved together.
    """
    here = os.path.abspath(folder)
    shared = os.path.commonpath([path, here])
    return path if os.path.dirname(shared) == shared else os.path.relpath(path, here)


def require_disk(folder: str | Path, n_bytes: int, what: str) -> None:
    """Refuse to start what will not fit.

    Raises:
        UserError: the file system of ``folder`` has less than ``n_bytes`` free.
    """
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < n_bytes:
        raise UserError(
            f"{what} needs {n_bytes / 1e9:.2f} GB in {folder}, which has {free / 1e9:.2f} GB free;"
            " choose another output folder or fewer tokens"
        )


LONGEST_NAME = ".tmp-12345678-predictors.safetensors"  # of what is written into an output folder
LEAST_SPACE, LEAST_FILES = 1_000_000, 16


def require_name(output: str) -> None:
    """Raise :class:`UserError` for an output that is no name, or one whose ~ the shell has left as it is."""
    if not output.strip():
        raise UserError("--output is empty; name a folder")
    if output.startswith("~"):
        raise UserError(f"the output {output} begins with ~, which only a shell makes a home of; write the whole path")


def probe_folder(folder: str | Path) -> None:
    """Write a file where an output folder is or will be, so that what cannot be written is known before any work.

    Leave nothing. A folder that is not there is not made, even for a moment: another process may begin to write there.

    Raises:
        UserError: the path is a file, or its file system is full.
        OSError: what the system says: no permission, a name that is too long, read-only, ...
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"the output {folder} is a file; choose a folder")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(folder / LONGEST_NAME)  # the whole path may be too long
        with contextlib.ExitStack() as stack:
            place = there
            if there != folder:
                place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".tmp-", dir=there)))
            require_disk(there, LEAST_SPACE, "anything that is written")
            _require_names(there)
            handle, name = tempfile.mkstemp(prefix=".tmp-", suffix=LONGEST_NAME[13:], dir=place)
            # Who holds the folder may have taken this file for a leftover.
            stack.callback(Path(name).unlink, missing_ok=True)
            with open(handle, "wb") as file:
                file.write(b"0" * 4096)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def _require_names(folder: Path) -> None:
    """Refuse a file system that holds no more files. Some do not say how many they hold."""
    system = os.statvfs(folder) if hasattr(os, "statvfs") else None
    if system is not None and system.f_files and system.f_favail < LEAST_FILES:
        raise OSError(errno.ENOSPC, "No more files fit on the file system")
