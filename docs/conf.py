"""Sphinx's configuration of the site: ``make docs``, then open build/docs/index.html. It opens without a network."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from dejavu_train.version import package_version  # noqa: E402

project = "dejavu_train"
author = "the authors of dejavu_train"
version = release = package_version()

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["results/*/README.md"]
myst_heading_anchors = 4  # as GitHub makes them, so that one link serves both

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"dejavu_train {release}"
html_static_path: list[str] = []
html_copy_source = False
html_show_sphinx = False

LINK = re.compile(r"(?<!!)\[([^]]+)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")


def name_files_outside(_app: Any, page: str, source: list[str]) -> None:
    """Links to files beside docs/ become their names: the site holds pages, the repository holds the rest."""

    def named(match: re.Match[str]) -> str:
        target = (ROOT / "docs" / page).parent.joinpath(match[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        where = f"`{target.relative_to(ROOT)}`"
        return where if match[1].strip("`") == target.name else f"{match[1]} ({where})"

    source[0] = LINK.sub(named, source[0])


def hide_fields(_app: Any, what: str, name: str, *_rest: Any) -> tuple[str, str] | None:
    """A configuration's signature is its list of keys, which follows with an explanation of each."""
    return ("", "") if what == "class" and name.endswith(("Config", "TextSource", "PredictorSpec")) else None


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", hide_fields)
    app.connect("source-read", name_files_outside)
