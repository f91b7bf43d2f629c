"""Reads the text in a local file. What a file is its first bytes decide, and its name is compared with them.

Plain text, JSON and JSON lines are read as they are, or compressed as .gz, .xz or .zst, and rows of .parquet. Every
other kind of file is named, with what to do.
"""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.ground.machine import require_package

PARQUET = "Parquet"
_COMPRESSED = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}  # by the last suffix of a name, those that are read
_TEXTS = (".txt", ".json", ".jsonl", ".ndjson", ".parquet", *_COMPRESSED)
_UNREAD = (".bz2", ".zip", ".7z", ".tar", ".lz4", ".csv", ".tsv")  # names that can only be meant as files
_BEGINNINGS = (  # of files
    (b"\x1f\x8b", "gzip"), (b"\xfd7zXZ\x00", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"),
    *((b"BZh%d" % level, "bzip2") for level in range(1, 10)),
    (b"PAR1", PARQUET), (b"PK\x03\x04", "a zip archive"), (b"PK\x05\x06", "a zip archive"), (b"7z\xbc\xaf", "7z"),
    (b"\x04\x22\x4d\x18", "lz4"), (b"ARROW1", "Arrow"), (b"%PDF-", "a PDF"), (b"\x89HDF", "HDF5"),
    (b"SQLite format 3", "a database of SQLite"), (b"Rar!", "rar"), (b"\x1f\x9d", "compress"),
    (b"\x5d\x00\x00", "lzma"), (b"\x78\x9c", "zlib"), (b"\x78\xda", "zlib"), (b"\xff\x06\x00\x00sNaPpY", "snappy"),
    (b"FEA1", "Feather"), (b"Obj\x01", "Avro"), (b"\x93NUMPY", "an array of NumPy"),
    *((bytes([128, version]), "a pickle") for version in range(2, 6)),
    (b"\x89PNG", "a picture"), (b"\xff\xd8\xff", "a picture"),
    (b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip
_PARQUET_ROWS = 1000  # read at a time


def suffixes(path: str | Path) -> list[str]:
    """The suffixes of a file's name, by which its kind is known, in small letters: A.JSONL.XZ is as a.jsonl.xz."""
    return [suffix.lower() for suffix in Path(path).suffixes]


def is_compressed(path: str | Path) -> bool:
    """Whether a file's name says that its text is longer than the file."""
    return suffixes(path)[-1:] in ([".parquet"], *([suffix] for suffix in _COMPRESSED))


def is_file_name(source: str) -> bool:
    """Whether a name can only be meant as that of a file, there or not."""
    last = next(iter(suffixes(source)[-1:]), "")
    return last in (*_TEXTS, *_UNREAD) or source.startswith((".", "/", "~"))


def text_kind(path: Path) -> str:
    """The suffix of what a file holds once it is unpacked: ``.jsonl`` of a.jsonl.gz. "" where it has none."""
    found = [suffix for suffix in suffixes(path) if suffix not in _COMPRESSED]
    return ".jsonl" if {".jsonl", ".ndjson"} & {*found} else next(iter(found[-1:]), "")


def read_text(path: Path, most: int = -1) -> str:
    """The text of a file, with ``most``, its whole lines among the first so many bytes. Line ends become newlines.

    Raises:
        UserError: the file is damaged, no UTF-8, or of a kind that is not read, by name.
    """
    suffix = path.suffix.lower()
    with open(path, "rb") as file:
        found = _kind(file.read(512))
    if found != _COMPRESSED.get(suffix):
        raise UserError(f"the text file {path} {_mismatch(path, found)}")
    try:
        with _opened(path, found) as file:
            data: bytes = file.read(*([most] if most >= 0 else []))
    except (lzma.LZMAError, EOFError, zlib.error, OSError) as error:
        if found is None or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise UserError(f"the text file {path} is damaged ({first_line(error)}); fetch it again") from None
    if found is not None and (inner := _kind(data[:512])) is not None:
        raise UserError(f"the text file {path} is {found} of {inner}, which is not read; {_remedy(path, inner)}")
    if len(data) == most:
        data = data[: data.rfind(b"\n") + 1]
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"the text file {path} is not UTF-8 (byte {error.start}); convert it to UTF-8") from None
    if "\0" in text:
        raise UserError(
            f"the text file {path} holds zero bytes (byte {text.index(chr(0))}), so it is no text in UTF-8; convert it,"
            " from UTF-16 by iconv -f UTF-16 -t UTF-8"
        )
    return text.replace("\r\n", "\n")


def parquet_rows(path: Path, field: str, first: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file: ``field``, and ``id`` and ``name`` where it has them.

    Args:
        first: of its first rows alone.
    Raises:
        UserError: a damaged file, one without the field, or without the package that reads it.
    """
    with open(path, "rb") as file:
        found = _kind(file.read(512))
        if found != PARQUET:
            raise UserError(f"the text file {path} {_mismatch(path, found)}")
        require_package("pyarrow", f"the text file {path} is {PARQUET} and", "'dejavu-train[train]'")
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.ParquetFile(file)
            names = table.schema_arrow.names
            if field not in names:
                raise UserError(f"{path} has no field {field!r}; it has {', '.join(names)}: give --text.field")
            columns = [name for name in dict.fromkeys((field, "id", "name")) if name in names]
            for batch in table.iter_batches(_PARQUET_ROWS, columns=columns):
                yield from batch.to_pylist()
                if first:
                    return
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"the text file {path} is damaged ({first_line(error)}); fetch it again") from None


def _kind(data: bytes) -> str | None:
    """Kind of file that begins so. None: no known kind, so it may be text."""
    if data[257:262] == b"ustar":
        return "tar"
    return next((kind for beginning, kind in _BEGINNINGS if data.startswith(beginning)), None)


def _opened(path: Path, kind: str | None) -> Any:
    if kind == "zstd":
        require_package("pyarrow", f"the text file {path} is zstd and", "'dejavu-train[train]'")
        import pyarrow

        return pyarrow.input_stream(str(path), compression="zstd")
    openers: dict[str | None, Any] = {"gzip": gzip.open, "xz": lzma.open}
    return openers.get(kind, open)(path, "rb")


def _mismatch(path: Path, found: str | None) -> str:
    """How a file is another kind than its name says, and what to do."""
    named = PARQUET if path.suffix.lower() == ".parquet" else _COMPRESSED.get(path.suffix.lower())
    if found is None:
        return f"is named as {named} and is not; give it the name of what it is, or fetch it again"
    how = f"is {found}" if named is None else f"is named as {named} and is {found}"
    return f"{how}; {_remedy(path, found)}"


def _remedy(path: Path, found: str) -> str:
    if found.startswith("UTF-"):
        return f"it is not UTF-8: convert it by iconv -f {found} -t UTF-8"
    suffix = next((suffix for suffix, kind in (*_COMPRESSED.items(), (".parquet", PARQUET)) if kind == found), None)
    if suffix is not None and suffix != path.suffix.lower():
        return f"give it a name that ends in {suffix}"
    return "unpack it, or convert it to .txt or .jsonl (also .gz, .xz, .zst)"
