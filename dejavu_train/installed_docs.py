"""Reads the docstrings of installed packages (with ``ast``, nothing is imported), writes a cached JSONL.

The quick start's text: about 26 MB of technical English that every machine with this project's training extra has
already, so nothing is downloaded and nothing redistributed.
"""

import ast
import gzip
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from dejavu_train.errors import UserError
from dejavu_train.files import read_json, replacing, sha256_text, write_json

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
FORMAT = 1


def installed_versions() -> dict[str, str]:
    """Version of every package that is read.

    Raises:
        UserError: a package is missing.
    """
    versions = {}
    for package, distribution in PACKAGES.items():
        try:
            versions[package] = importlib.metadata.version(distribution).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"the text source installed-docs reads the documentation of {distribution}, which is not installed;"
                " run pip install 'dejavu-train[train]', or name another text source"
            ) from None
    return versions


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module's source in order of appearance, dedented."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        tree = ast.parse(source)
    # ast.walk goes breadth first; reading order makes a better text.
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield inspect.cleandoc(text)
        # Only statements can hold a definition; expressions are most of a tree.
        pending.extend(
            child
            for child in reversed(list(ast.iter_child_nodes(node)))
            if isinstance(child, ast.stmt | ast.excepthandler)
        )


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)  # finds without importing
    if spec is None or spec.origin is None:
        raise UserError(f"the package {package} has no source folder; reinstall it or name another text source")
    return Path(spec.origin).parent


def _read_packages() -> list[dict[str, str]]:
    files = []
    for package in PACKAGES:
        folder = _package_folder(package)
        files += [(package, folder, path) for path in sorted(folder.rglob("*.py"))]
    seen: set[str] = set()
    documents = []
    for package, folder, path in tqdm(files, desc="reading installed docs", unit="file", disable=None):
        try:
            texts = list(docstrings(path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
            continue  # templates and test data that are not Python
        paragraphs = []
        for paragraph in (part.strip("\n") for text in texts for part in text.split("\n\n")):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                paragraphs.append(paragraph)
        text = "\n\n".join(paragraphs)
        if len(text) >= MIN_DOCUMENT_CHARACTERS:
            documents.append({"name": f"{package}/{path.relative_to(folder).as_posix()}", "text": text})
    return documents


def load_installed_docs(cache: str | Path) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The documents (``name``, ``text``) and the package versions they come from.

    Args:
        cache: folder for ``installed-docs.jsonl.gz`` and its manifest. A cache of other versions is made anew, with
            a warning, because numbers measured on it are no longer comparable.

    Raises:
        UserError: a package is missing.
    """
    versions = installed_versions()
    folder = Path(cache)
    manifest_path, text_path = folder / "installed-docs.json", folder / "installed-docs.jsonl.gz"
    if manifest_path.is_file() and text_path.is_file():
        manifest = read_json(manifest_path, "the cache of installed-docs")
        if manifest.get("versions") == versions and manifest.get("format") == FORMAT:
            with gzip.open(text_path, "rt", encoding="utf-8") as file:
                return [json.loads(line) for line in file], versions
        changed = [name for name in versions if manifest.get("versions", {}).get(name) != versions[name]]
        logger.warning("installed-docs: versions changed (%s); the text is read anew", ", ".join(changed) or "format")
    elif sys.stderr.isatty():
        logger.info("reading the documentation of %d installed packages (once)", len(PACKAGES))
    documents = _read_packages()
    with replacing(text_path) as temporary, gzip.open(temporary, "wt", encoding="utf-8", compresslevel=4) as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)
    n_bytes = sum(len(document["text"].encode()) for document in documents)
    digest = sha256_text("".join(sha256_text(document["text"]) for document in documents))
    write_json(
        manifest_path,
        {"format": FORMAT, "versions": versions, "documents": len(documents), "bytes": n_bytes, "sha256": digest},
    )
    return documents, versions
