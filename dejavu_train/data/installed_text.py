"""Text that every machine with this project's training extra has already: read from installed packages, cached.

Four sources, each a list of documents with versions and hashes in a manifest. Nothing is imported, downloaded or
redistributed:

``installed-docs``
    Docstrings of 14 packages, about 26 MB of technical English, one document per module.
``installed-readmes``
    Long descriptions in the metadata of those packages and of all that they require, markup and code removed.
``installed-licences``
    Licence and notice files in the same metadata folders.
``installed-code``
    Python source of the 14 packages without docstrings: a fixed share of their files.
"""

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dejavu_train.data.plain_text import code_without_docstrings, docstrings, readme_prose
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_json, replacing, sha256_text, write_json
from dejavu_train.ground.progress import progress

logger = logging.getLogger(__name__)

# Import name -> distribution. All are pinned in constraints.txt; the order is part of the result, because the first
# occurrence of a repeated paragraph stays.
PACKAGES = {
    "numpy": "numpy",
    "pandas": "pandas",
    "matplotlib": "matplotlib",
    "networkx": "networkx",
    "sympy": "sympy",
    "torch": "torch",
    "transformers": "transformers",
    "torchmetrics": "torchmetrics",
    "lightning": "lightning",
    "datasets": "datasets",
    "huggingface_hub": "huggingface-hub",
    "wandb": "wandb",
    "h5py": "h5py",
    "jsonargparse": "jsonargparse",
}
MIN_DOCUMENT_CHARACTERS = 400
CODE_SHARE = 50  # installed-code draws one file in so many: about 3 MB
FORMAT = 1

# What only CUDA builds of torch require; without it CPU and CUDA installations read the same distributions.
_GPU_ONLY = re.compile(r"nvidia-|cuda-|(pytorch-)?triton")
_LEGAL = re.compile(r"licen[cs]e|notice|copying|copyright", re.IGNORECASE)
_NAMES_OF_PEOPLE = re.compile(r"authors|contributors|maintainers", re.IGNORECASE)
_TEXT_SUFFIXES = ("", ".txt", ".md", ".rst")

Documents = list[dict[str, str]]


def _version(distribution: str) -> str:
    """Version of a distribution without its local part, so that ``2.13.0+cpu`` and ``2.13.0+cu130`` are one.

    Raises:
        UserError: the distribution is missing.
    """
    try:
        return importlib.metadata.version(distribution).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"the installed text sources read {distribution}, which is not installed;"
            " run pip install 'dejavu-train[train]', or name another text source"
        ) from None


def package_versions() -> dict[str, str]:
    """Version of every package in ``PACKAGES``, by import name.

    Raises:
        UserError: a package is missing.
    """
    return {package: _version(distribution) for package, distribution in PACKAGES.items()}


def required_versions() -> dict[str, str]:
    """Version of every distribution in ``PACKAGES`` and of all that they require here, by normalised name, sorted.

    Passed over are requirements that are not installed, whose environment markers do not hold, or that only CUDA builds
    of torch have.

    Raises:
        UserError: a package of ``PACKAGES`` is missing.
    """
    for distribution in PACKAGES.values():
        _version(distribution)
    extras_read: dict[str, set[str]] = {}
    pending: list[tuple[str, set[str]]] = [(distribution, set()) for distribution in PACKAGES.values()]
    while pending:
        name, extras = pending.pop()
        name = canonicalize_name(name)
        new = ({""} | extras) - extras_read.get(name, set())
        if not new or _GPU_ONLY.match(name):
            continue
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        extras_read.setdefault(name, set()).update(new)
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in new):
                pending.append((requirement.name, requirement.extras))
    return {name: _version(name) for name in sorted(extras_read)}


def _python_files() -> list[tuple[str, Path]]:
    """(document name, path) of every Python file of the packages, in the order of ``PACKAGES``, then by path."""
    files = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)  # finds without importing
        if spec is None or spec.origin is None:
            raise UserError(f"the package {package} has no source folder; reinstall it or name another text source")
        folder = Path(spec.origin).parent
        files += [(f"{package}/{path.relative_to(folder).as_posix()}", path) for path in sorted(folder.rglob("*.py"))]
    return files


def _folded(paragraph: str) -> str:
    """Words of a paragraph, whatever white space stands between them. Equal ones are the same paragraph."""
    return " ".join(paragraph.split())


def _folded_legal(paragraph: str) -> str:
    """The same for licences, which are quoted with other line breaks, bullets and comment marks."""
    return " ".join(re.findall(r"\w+", paragraph.lower()))


def _first_occurrences(paragraphs: Iterator[str], seen: set[str], key_of: Callable[[str], str] = _folded) -> str:
    """Join the paragraphs whose key is not in ``seen`` with blank lines, and add their keys to it."""
    kept = []
    for paragraph in paragraphs:
        key = key_of(paragraph)
        if key and key not in seen:
            seen.add(key)
            kept.append(paragraph)
    return "\n\n".join(kept)


def _paragraphs(text: str) -> Iterator[str]:
    return (part.strip("\n") for part in text.split("\n\n"))


def _parsed(source: Path, extract: Callable[[str], str]) -> str:
    """``extract`` of a Python file. Empty for templates and test data that are not Python."""
    try:
        return extract(source.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return ""


def _long_enough(documents: Iterator[tuple[str, str]]) -> Documents:
    return [{"name": name, "text": text} for name, text in documents if len(text) >= MIN_DOCUMENT_CHARACTERS]


def _read_docs() -> Documents:
    seen: set[str] = set()
    files = progress(_python_files(), "reading installed-docs", None, "file")
    texts = ((name, _parsed(path, lambda source: "\n\n".join(docstrings(source)))) for name, path in files)
    return _long_enough((name, _first_occurrences(_paragraphs(text), seen)) for name, text in texts)


def _read_readmes() -> Documents:
    seen: set[str] = set()
    texts = []
    names = required_versions()
    for name in progress(names, "reading installed-readmes", len(names), "package"):
        metadata = importlib.metadata.metadata(name)
        # Older metadata has the description as a header, newer as the body.
        body = metadata.get_payload() or metadata["Description"] or ""  # type: ignore[attr-defined]
        texts.append((name, readme_prose(body)))
    return _long_enough((name, _first_occurrences(_paragraphs(text), seen)) for name, text in texts)


def _legal_files(distribution: str) -> list[tuple[str, Path]]:
    """(path inside the metadata folder, path) of the licence and notice files of a distribution, sorted."""
    documents = []
    for file in importlib.metadata.files(distribution) or []:
        inside = "/".join(file.parts[1:])
        if (
            file.parts[0].endswith(".dist-info")
            and _LEGAL.search(inside)
            and not _NAMES_OF_PEOPLE.search(file.name)
            and (file.suffix.lower() in _TEXT_SUFFIXES or _LEGAL.search(file.suffix))
        ):
            documents.append((inside, Path(str(file.locate()))))
    return sorted(documents)


def _read_licences() -> Documents:
    seen: set[str] = set()
    texts = []
    names = required_versions()
    for name in progress(names, "reading installed-licences", len(names), "package"):
        for inside, path in _legal_files(name):
            if path.is_file():
                body = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
                # Blank lines with spaces on them end a paragraph too.
                texts.append((f"{name}/{inside}", re.sub(r"\n[ \t]+(?=\n)", "\n", body)))
    return _long_enough((name, _first_occurrences(_paragraphs(text), seen, _folded_legal)) for name, text in texts)


def _drawn(name: str) -> bool:
    """Whether a file belongs to installed-code: one in ``CODE_SHARE``, by a hash of its name."""
    return int.from_bytes(hashlib.sha256(f"installed-code|{name}".encode()).digest()[:8], "big") % CODE_SHARE == 0


def _read_code() -> Documents:
    comments: set[str] = set()

    def without_repeated_comments(text: str) -> str:
        """Licences stand at the head of thousands of files: a paragraph of comments stays where it is first read."""
        kept = []
        for part in _paragraphs(text):
            only_comments = all(line.lstrip().startswith("#") for line in part.splitlines())
            if part.strip() and not (only_comments and part in comments):
                kept.append(part)
            if only_comments:
                comments.add(part)
        return "\n\n".join(kept)

    files = [(name, path) for name, path in _python_files() if _drawn(name)]
    texts = (
        (name, _parsed(path, code_without_docstrings))
        for name, path in progress(files, "reading installed-code", len(files), "file")
    )
    return _long_enough((name, without_repeated_comments(text)) for name, text in texts)


# Source -> (versions that the text depends on, reader).
_READERS: dict[str, tuple[Callable[[], dict[str, str]], Callable[[], Documents]]] = {
    "installed-docs": (package_versions, _read_docs),
    "installed-readmes": (required_versions, _read_readmes),
    "installed-licences": (required_versions, _read_licences),
    "installed-code": (package_versions, _read_code),
}


def load_installed(source: str, cache: str | Path) -> tuple[Documents, dict[str, str]]:
    """The documents (``name``, ``text``) of an installed source and the versions they come from.

    Args:
        source: ``installed-docs``, ``installed-readmes``, ``installed-licences`` or ``installed-code``.
        cache: folder for ``SOURCE.jsonl.gz`` and its manifest ``SOURCE.json``. A cache of other versions is made anew,
            with a warning, because numbers measured on it are no longer comparable.

    Raises:
        UserError: a package is missing.
    """
    read_versions, read = _READERS[source]
    versions = read_versions()
    folder = Path(cache)
    manifest_path, text_path = folder / f"{source}.json", folder / f"{source}.jsonl.gz"
    if manifest_path.is_file() and text_path.is_file():
        manifest = read_json(manifest_path, f"the cache of {source}")
        if manifest.get("versions") == versions and manifest.get("format") == FORMAT:
            with gzip.open(text_path, "rt", encoding="utf-8") as file:
                return [json.loads(line) for line in file], versions
        before = manifest.get("versions", {})
        changed = sorted(name for name in {*versions, *before} if before.get(name) != versions.get(name))
        logger.warning("%s: versions changed (%s); the text is read anew", source, ", ".join(changed) or "format")
    elif sys.stderr.isatty():
        logger.info("reading %s from %d installed packages (once)", source, len(versions))
    documents = read()
    with replacing(text_path) as temporary, gzip.open(temporary, "wt", encoding="utf-8", compresslevel=4) as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)
    n_bytes = sum(len(document["text"].encode()) for document in documents)
    digest = sha256_text("".join(sha256_text(document["text"]) for document in documents))
    write_json(
        manifest_path,
        {"format": FORMAT, "versions": versions, "documents": len(documents), "bytes": n_bytes, "sha256": digest},
    )
    return documents, versions
