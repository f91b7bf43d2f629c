"""Reads text sources, writes nothing: documents, their four disjoint sets, and windows of token ids.

A document's set follows from a fixed hash of its source and name. So runs on two machines agree on what was held out,
and exchange nothing.
"""

import dataclasses
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejavu_train.data.containers import is_file_name, parquet_rows, read_text, text_kind
from dejavu_train.data.paragraphs import read_paragraph_hashes, without_pretrained
from dejavu_train.ground.class_path import bound_arguments, import_named
from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.ground.files import sha256_file, sha256_text
from dejavu_train.ground.ranges import COUNT, SEED, SHARE, Range, check_ranges

logger = logging.getLogger(__name__)

SETS = ("train", "calibration", "val", "test")
MIN_DOCUMENT_CHARACTERS = 4000
MAX_DOCUMENT_CHARACTERS = 40_000  # plain text is cut before that, and longer JSONL documents are cut as plain text is
INSTALLED_DOCS = "installed-docs"
SELF = "self"
INSTALLED = (INSTALLED_DOCS, "installed-readmes", "installed-licences", "installed-code")  # see installed_text


@dataclasses.dataclass(frozen=True)
class Document:
    """A text with a name that is unique within its source. Of a model's own text (``ids``) only the token ids exist."""

    name: str
    text: str
    ids: np.ndarray | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """How the model writes its own text."""

    tokens: int | None = None
    """How many. null: those that the model's folder carries. Without any what collect.*_tokens ask for, at most
    1,000,000 on a GPU and 200,000 on a CPU."""
    length: int | None = None
    """Tokens written in one go, the leading </s> included. null: collect.window."""
    temperature: float = 1.0
    """Logits are divided by it."""
    top_p: float = 1.0
    """Tokens are drawn from the smallest set that has this probability. 1: from all."""
    prompts: str | None = None
    """A text file whose documents begin the samples. null: </s> alone does."""
    prompt_tokens: int = 32
    """Tokens of each of those documents that are given."""
    batch_size: int = 32
    """Rows written at once. On a GPU more than 32 are written by transformers, not by the engine."""
    seed: int = 0
    """Seed of the draws, below 67,108,864: what the engine holds for a row."""

    def check(self) -> None:
        """Raise :class:`UserError` for a value out of range."""
        ranges = {
            "tokens": Range(2, COUNT.most), "length": Range(2, COUNT.most), "prompt_tokens": COUNT,
            "seed": Range(0, 2**26 - 1), "batch_size": Range(1, 4096),
            "temperature": Range(0, 10**6, above=True), "top_p": SHARE,
        }  # fmt: skip
        check_ranges(self, "text.sample.", ranges)


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Where text comes from."""

    source: str | dict[str, Any] = SELF
    """Also ``--text`` alone. ``self`` (sampled from the model itself), ``installed-docs`` (or ``-readmes``,
    ``-licences``, ``-code``), or a local .txt, .json, .jsonl or .parquet file (also .gz, .xz, .zst). A hub dataset such
    as allenai/c4. Or class_path and init_args of your own text, see docs/guides/extend.md."""
    sample: SampleConfig = dataclasses.field(default_factory=SampleConfig)
    """How the model writes its own text, with source self."""
    config: str | None = None
    """Configuration of a hub dataset, for instance en."""
    revision: str | None = None
    """Commit or tag of a hub dataset. Pin it, so that a rerun reads the same text."""
    split: str = "train"
    """Split of a hub dataset."""
    field: str = "text"
    """Field that holds the text, of a hub dataset or a JSONL line."""
    documents: int | None = None
    """Read at most this many documents, drawn at random with ``seed``. All by default (hub datasets: 500)."""
    seed: int = 0
    """Seed of that draw."""
    cache: str = "checkpoints/text"
    """Folder where installed sources and the model's own text are cached."""

    def check(self) -> None:
        """Raise :class:`UserError` for a value out of range."""
        check_ranges(self, "text.", {"documents": COUNT, "seed": SEED})
        self.sample.check()

    @property
    def key(self) -> str:
        """Source as the split hashes it: a file's name without its folder, a class's, else the source itself."""
        if isinstance(self.source, dict):
            return str(self.source.get("class_path"))
        return Path(self.source).name if Path(self.source).is_file() else self.source

    @property
    def file(self) -> str | None:
        """The file that is read, if the text is one: the source, or the prompts of the model's own text."""
        if self.source == SELF:
            return self.sample.prompts
        return self.source if isinstance(self.source, str) and _names_file(self.source) else None

    def file_sha256(self) -> str | None:
        """Hash of that file's bytes.

        Raises:
            UserError: it is not there.
        """
        if self.file is None:
            return None
        require_file(self.file)
        return sha256_file(self.file)


def require_file(name: str) -> None:
    """Raise :class:`UserError` for a text file that is not there, or is a folder."""
    if Path(name).is_dir():
        raise UserError(f"the text {name} is a folder; name a .txt or .jsonl file in it")
    if not Path(name).is_file():
        raise UserError(f"there is no text file {name}")


def _names_file(source: str) -> bool:
    return (Path(source).exists() and source not in INSTALLED) or is_file_name(source)


@dataclasses.dataclass(frozen=True)
class TextManifest:
    """Text that was read. Stands in the manifests of shards and bundles."""

    source: str
    revision: str | None
    sha256: str
    documents: dict[str, int]
    skipped_paragraphs: int
    versions: dict[str, str]
    train_sha256: tuple[str, ...] = ()
    """Short hashes of the train documents, by which infer.py recognises text that was trained on."""
    file_sha256: str | None = None
    """Hash of a local file, or of the file of prompts: other text is not taken for this one."""
    samples: dict[str, Any] | None = None
    """Settings by which a model's own text was sampled."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_BLANK = re.compile(r"\n[ \t\f\v\r]*\n")
# Where text without blank lines is cut, best first: between lines, sentences, words.
_NEXT_BEST = [re.compile(pattern) for pattern in (r"[\n\r\f]", r"(?<=[.!?])\s", r"\s")]


def cut_plain_text(text: str) -> list[Document]:
    """Cut plain text at blank lines into numbered documents of at least 4,000 characters (the last may be shorter).

    Where no blank line comes within 40,000 characters, the cut is at the end of a line. Without one it is behind a
    sentence, else between two words, else there.
    """
    documents: list[Document] = []
    start = 0

    def take(stop: int, after: int) -> None:
        nonlocal start
        if text[start:stop].strip():
            documents.append(Document(str(len(documents)), text[start:stop]))
        start = after

    ends = [blank.span() for blank in _BLANK.finditer(text)] + [(len(text), len(text))]
    for stop, after in ends:
        while stop - start > MAX_DOCUMENT_CHARACTERS:
            least, most = start + MIN_DOCUMENT_CHARACTERS, start + MAX_DOCUMENT_CHARACTERS
            cut_at = next(filter(None, (cut.search(text, least, most) for cut in _NEXT_BEST)), None)
            take(*(cut_at.span() if cut_at else (most, most)))
        if stop - start >= MIN_DOCUMENT_CHARACTERS or stop == len(text):
            take(stop, after)
    return documents


def local_documents(path: Path, field: str, most: int = -1) -> list[Document]:
    """The documents of a file, or with ``most`` those among its first bytes. Raises as :func:`load_documents`."""
    kind = text_kind(path)
    if path.suffix.lower() == ".parquet":
        rows = enumerate(parquet_rows(path, field, first=most >= 0), 1)
        documents = [document for number, row in rows for document in _of_row(row, f"row {number} of {path}", field)]
    else:
        text = read_text(path, most)
        if not text.strip() and most >= 0:
            return []
        if kind == ".json" and text.lstrip().startswith("["):
            documents = _of_array(text, path, field, most)
        elif kind in (".json", ".jsonl"):
            documents = _of_lines(text, path, field)
        else:
            _warn_of_form(path, kind, text)
            documents = cut_plain_text(text)
    if not documents and most < 0:
        raise UserError(f"the text file {path} is empty")
    return documents


def _of_lines(text: str, path: Path, field: str) -> list[Document]:
    documents = []
    for number, line in enumerate(text.split("\n"), 1):  # JSON strings may hold the other characters that end lines
        if line.strip():
            documents += _of_row(_parsed(line), f"line {number} of {path}", field)
    return documents


def _of_array(text: str, path: Path, field: str, most: int) -> list[Document]:
    """The items of a JSON array. Among its first bytes there is no whole array, so that nothing is known of it."""
    if most >= 0:
        return []
    items = _parsed(text)
    if not isinstance(items, list):
        raise UserError(
            f"the text file {path} is no whole JSON array; fetch it again, or name it .jsonl if it is lines"
        )
    documents = []
    for number, item in enumerate(items, 1):
        row = {field: item} if isinstance(item, str) else item
        documents += _of_row(row, f"item {number} of {path}", field)
    return documents


def _parsed(text: str) -> Any:
    """Value that JSON says. None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _of_row(row: Any, place: str, field: str) -> list[Document]:
    """The documents of a row of a file: one, or the parts of a long one.

    Args:
        place: for messages, and by its first number the name of a row without ``id`` or ``name``.
    Raises:
        UserError: no such field, or no text in it.
    """
    if not isinstance(row, dict) or field not in row:
        raise UserError(
            f"{place} is not a JSON object with a field {field!r}; mend that line, or name the field that holds the"
            " text: --text.field, of infer.py --text_field"
        )
    value = _text_of(row[field], place, field)
    number = int(place.split()[1]) - 1
    name = next((str(row[key]) for key in ("id", "name") if row.get(key) is not None), str(number))
    _text_of(name, place, "id")
    if len(value) > MAX_DOCUMENT_CHARACTERS:
        return [Document(f"{name}.{part.name}", part.text) for part in cut_plain_text(value)]
    return [Document(name, value)]


def _text_of(value: Any, place: str, field: str) -> str:
    """``value`` as it is: the one check of what any source gives as text. Raises :class:`UserError` for no text."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise UserError(f"{place}: the field {field!r} must be text, got {kind}; leave that row out, or name the field")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(f"{place} holds half a surrogate pair, which is no text; leave it out")
    return value


def _warn_of_form(path: Path, kind: str, text: str) -> None:
    """Say so where what is read as plain text looks like another form."""
    lines = [line.strip() for line in text[:100_000].split("\n")[:20] if line.strip()]
    looks, name = "", ""
    if lines and all(line.startswith('{"') for line in lines) and lines[0].endswith("}"):
        looks, name = "JSON lines", ".jsonl"
    elif re.match(r'\s*\[\s*["{]', text) and text.rstrip().endswith("]"):
        looks, name = "a JSON array", ".json"
    elif kind in (".csv", ".tsv"):
        looks, name = "a table", ".jsonl once it is converted"
    if looks:
        logger.warning("%s is read as plain text, but looks like %s; name it %s to read it as such", path, looks, name)


def _hub_documents(source: TextSource, name: str) -> list[Document]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"there is no text file {name}, and to read it as a hub dataset the package datasets is needed:"
            " pip install 'dejavu-train[train]'"
        ) from None
    count = source.documents or 500
    try:
        stream = datasets.load_dataset(
            name, source.config, split=source.split, revision=source.revision, streaming=True
        )
        rows = list(itertools.islice(stream.shuffle(seed=source.seed, buffer_size=10_000), count))
    except Exception as error:  # the hub client raises many classes for one thing: not to be had
        raise UserError(f"cannot read {name}: no such file, and as a hub dataset: {first_line(error)}") from None
    if not rows:
        raise UserError(f"the dataset {name} has no rows in its split {source.split}; give another one by --text.split")
    if source.field not in rows[0]:
        raise UserError(f"the dataset {name} has no field {source.field!r}; it has {', '.join(rows[0])}")
    texts = [_text_of(row[source.field], f"a row of the dataset {name}", source.field) for row in rows]
    return [Document(sha256_text(text)[:16], text) for text in texts]


def import_text(value: dict[str, Any], key: str = "text.source") -> tuple[Any, dict[str, Any]]:
    """The class or function that ``value`` (class_path, init_args) names, which iterates over pairs of id and text,
    and its arguments.

    Raises:
        UserError: it cannot be imported, or does not take them.
    """
    kind = import_named(value, key)
    return kind, bound_arguments(kind, value, key)


def _own_documents(value: dict[str, Any]) -> list[Document]:
    kind, arguments = import_text(value)
    documents: dict[str, Document] = {}
    for number, item in enumerate(kind(**arguments)):
        if not isinstance(item, (tuple, list)) or len(item) != 2 or not all(isinstance(part, str) for part in item):
            raise UserError(f"text.source {value['class_path']}: document {number} is no pair of id and text")
        if item[0] in documents:
            raise UserError(f"text.source {value['class_path']}: two documents have the id {item[0]}")
        for part in item:
            _text_of(part, f"document {number} of text.source {value['class_path']}", "text")
        documents[item[0]] = Document(*item)
    return list(documents.values())


def load_documents(source: TextSource) -> tuple[list[Document], dict[str, str]]:
    """All documents of a source, and the package versions it depends on (installed sources only).

    Raises:
        UserError: nothing there, an empty file, not UTF-8, a missing package.
    """
    versions: dict[str, str] = {}
    if source.source == SELF:
        raise UserError("the text source self is written by the model, there is nothing to read; name a text")
    if isinstance(source.source, dict):
        documents = _own_documents(source.source)
    elif source.source in INSTALLED:
        from dejavu_train.data.installed_text import load_installed

        rows, versions = load_installed(source.source, source.cache)
        documents = [Document(row["name"], row["text"]) for row in rows]
    elif Path(source.source).is_file():
        documents = local_documents(Path(source.source), source.field)
    elif _names_file(source.source):
        require_file(source.source)
    else:
        documents = _hub_documents(source, source.source)
    if source.documents is not None and len(documents) > source.documents:
        order = np.random.default_rng(source.seed).permutation(len(documents))[: source.documents]
        documents = [documents[index] for index in sorted(order)]
    return documents, versions


def split_of(source_key: str, name: str) -> str:
    """The set of a document: 76 % are of train, the others equally of calibration, val and test."""
    draw = int.from_bytes(hashlib.sha256(f"split-v1|{source_key}|{name}".encode()).digest()[:8], "big") % 100
    return "train" if draw < 76 else SETS[1 + (draw - 76) // 8]


def places_of(documents: Sequence[Document], source_key: str) -> list[str]:
    """The set of each document. Copies of one text are in one set, so that what is held out was not trained on.

    That set is the one of the first. White space makes no other text.
    """
    chosen: dict[str, str] = {}
    return [chosen.setdefault(_folded(document.text), split_of(source_key, document.name)) for document in documents]


def _folded(text: str) -> str:
    return sha256_text(" ".join(text.split()))


def drop_pretrained(documents: Sequence[Document], hashes: np.ndarray) -> tuple[list[Document], int]:
    """Documents without paragraphs that the model was pretrained on, and how many paragraphs were dropped."""
    kept, skipped = [], 0
    for document in documents:
        text, dropped = without_pretrained(document.text, hashes)
        skipped += dropped
        if text.strip():
            kept.append(Document(document.name, text))
    return kept, skipped


def split_documents(
    documents: Sequence[Document], source_key: str, pretrained_hashes: np.ndarray | None = None
) -> tuple[dict[str, list[Document]], int]:
    """Sort documents into the four sets. Outside ``train``, drop the paragraphs the model was pretrained on.

    Returns:
        The sets, and how many paragraphs were dropped.

    Raises:
        UserError: a set is empty.
    """
    sets: dict[str, list[Document]] = {name: [] for name in SETS}
    for document, place in zip(documents, places_of(documents, source_key), strict=True):
        sets[place].append(document)
    skipped = 0
    if pretrained_hashes is not None:
        for name in SETS[1:]:
            sets[name], dropped = drop_pretrained(sets[name], pretrained_hashes)
            skipped += dropped
    empty = [name for name in SETS if not sets[name]]
    if empty:
        raise UserError(
            f"the text {source_key} has {len(documents)} documents and none falls into the set {empty[0]};"
            " give more text, of about 250 KB (plain text is cut into documents of 4,000 characters)"
        )
    return sets, skipped


def load_sets(source: TextSource, model: str) -> tuple[dict[str, list[Document]], TextManifest]:
    """Load a source and split it, leaving out of the held-out sets what ``model`` was pretrained on.

    Raises:
        UserError: as :func:`load_documents` and :func:`split_documents`.
    """
    documents, versions = load_documents(source)
    sets, skipped = split_documents(documents, source.key, read_paragraph_hashes(model))
    copies = len(documents) - len({_folded(document.text) for document in documents})
    if copies:
        logger.warning(
            "%d of %d documents are copies of others; all copies of a text are in one set, so none is held out that"
            " was trained on", copies, len(documents),
        )  # fmt: skip
    if skipped:
        logger.info("%d paragraphs of held-out documents left out: the model was pretrained on them", skipped)
    manifest = TextManifest(
        source=source.key,
        revision=source.revision,
        sha256=sha256_text("".join(sha256_text(document.text) for document in documents)),
        documents={name: len(sets[name]) for name in SETS},
        skipped_paragraphs=skipped,
        versions=versions,
        file_sha256=source.file_sha256(),
        train_sha256=tuple(sha256_text(document.text)[:16] for document in sets["train"]),
    )
    return sets, manifest
