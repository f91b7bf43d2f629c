"""Which paragraphs a model was pretrained on: hashes of them in its folder, by which held-out text leaves them out."""

import hashlib
import lzma
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dejavu_train.data.packed import pack, unpack
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import replacing

PARAGRAPH_HASHES = "pretraining_paragraphs.bin"  # in the folder of a model that carries them
MIN_HASHED_CHARACTERS = 80


def paragraph_hash(paragraph: str) -> int:
    """32 bits of SHA-256 of the paragraph with its white space folded."""
    return int.from_bytes(hashlib.sha256(" ".join(paragraph.split()).encode()).digest()[:4], "big")


def hash_paragraphs(texts: Iterable[str]) -> np.ndarray:
    """Sorted, distinct uint32 hashes of the paragraphs of at least 80 characters."""
    hashes = {
        paragraph_hash(part) for text in texts for part in text.split("\n\n") if len(part) >= MIN_HASHED_CHARACTERS
    }
    return np.array(sorted(hashes), dtype=np.uint32)


def write_paragraph_hashes(path: str | Path, hashes: np.ndarray) -> None:
    """Store sorted hashes, as the differences between them."""
    with replacing(path) as temporary:
        temporary.write_bytes(pack(np.diff(hashes, prepend=np.uint32(0))))


def read_paragraph_hashes(model: str) -> np.ndarray | None:
    """The hashes of the paragraphs a model was pretrained on, if its folder carries them."""
    path = Path(model) / PARAGRAPH_HASHES
    if not path.is_file():
        return None
    try:
        differences = unpack(path.read_bytes())
    except (lzma.LZMAError, ValueError):
        raise UserError(f"{path} is damaged; restore it, without it held-out text cannot be told apart") from None
    return np.cumsum(differences, dtype=np.uint64).astype(np.uint32)


def without_pretrained(text: str, hashes: np.ndarray) -> tuple[str, int]:
    """``text`` without the paragraphs whose hashes are among ``hashes`` (sorted), and how many were left out."""
    kept, skipped = [], 0
    for part in text.split("\n\n"):
        if len(part) >= MIN_HASHED_CHARACTERS:
            value = paragraph_hash(part)
            place = int(np.searchsorted(hashes, value))
            if place < len(hashes) and int(hashes[place]) == value:
                skipped += 1
                continue
        kept.append(part)
    return "\n\n".join(kept), skipped
