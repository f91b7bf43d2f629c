"""Reads the beginning of a text, or all of a small one, without torch or a tokenizer. Refuses what cannot be used."""

from pathlib import Path

from dejavu_train.data.containers import is_compressed
from dejavu_train.data.paragraphs import read_paragraph_hashes
from dejavu_train.data.text import (
    INSTALLED,
    SELF,
    Document,
    TextSource,
    load_documents,
    local_documents,
    require_file,
    split_documents,
)
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.machine import require_package

SMALL = 8_000_000  # bytes of a file that is read whole; compressed ones are read as far as SMALL of them


def check_source(source: TextSource) -> list[Document] | None:
    """Look whether a text is there and of the kind that its name promises.

    Returns:
        All its documents, where it is a small file.

    Raises:
        UserError: no file, not UTF-8, a line that is no JSON object with the field, or a hub dataset without the
            package that reads it.
    """
    if source.file is not None:
        path = Path(source.file)
        require_file(source.file)
        if source.source == SELF or path.stat().st_size > SMALL or is_compressed(path):
            local_documents(path, source.field, SMALL // 8)
            return None
        return load_documents(source)[0]
    if isinstance(source.source, str) and source.source not in (SELF, *INSTALLED):
        require_package("datasets", f"there is no text file {source.source}; a hub dataset", "'dejavu-train[train]'")
    return None


def check_sets(source: TextSource, model: str, window: int, needed: tuple[str, ...]) -> None:
    """The same, and that each of the sets ``needed`` can hold one sequence of ``window`` tokens.

    A token is at least one byte of UTF-8, so a set with fewer bytes is refused without a tokenizer.

    Raises:
        UserError: as :func:`check_source`. A set is empty or too small.
    """
    documents = check_source(source)
    if documents is None:
        return
    sets, _ = split_documents(documents, source.key, read_paragraph_hashes(model))
    for name in needed:
        n_bytes = sum(len(document.text.encode()) for document in sets[name])
        if n_bytes < window - 1:
            raise UserError(
                f"the set {name} of the text {source.key} has {n_bytes} bytes, fewer than one sequence of {window}"
                " tokens; give more text or a smaller window"
            )
