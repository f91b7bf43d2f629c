"""Sphinx's configuration of the site: ``make docs``, then open build/docs/index.html. It opens without a network."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from key_rows import key_rows  # noqa: E402  # found by the line above

project = "dejavu_train"
author = "the authors of dejavu_train"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["results/*/README.md"]
myst_heading_anchors = 4  # as GitHub makes them, so that one link serves both

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True

smartquotes = False

html_theme = "furo"
html_title = f"dejavu_train {release}"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_show_copyright = False
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


class Keys(SphinxDirective):
    """``keys:: CLASS PREFIX``: the keys of a configuration class with defaults and what each is, as --help has them."""

    required_arguments, optional_arguments = 1, 1

    def run(self) -> list[nodes.Node]:
        lines = ["| key | default | meaning |", "| --- | --- | --- |"]
        for key, default, meaning in key_rows(*self.arguments):
            lines.append(f"| `{key}` | {f'`{default}`' if default else ''} | {meaning} |")
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Any) -> None:
    app.add_directive("keys", Keys)
    app.connect("source-read", name_files_outside)
