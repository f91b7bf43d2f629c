"""Takes plain text out of Python source and of README markup: docstrings, code without docstrings, prose.

Pure functions of strings. Nothing is imported or run.
"""

import ast
import html
import inspect
import re
import warnings
from collections.abc import Iterator

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        return ast.parse(source)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements in order of appearance."""
    # ast.walk goes breadth first; reading order makes a better text.
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        # Only statements can hold a definition; expressions are most of a tree.
        pending.extend(
            child
            for child in reversed(list(ast.iter_child_nodes(node)))
            if isinstance(child, ast.stmt | ast.excepthandler)
        )


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module's source in order of appearance, dedented.

    Raises:
        SyntaxError, ValueError, RecursionError: ``source`` is not Python.
    """
    for node in _statements(_parse(source)):
        if isinstance(node, _Documented):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield inspect.cleandoc(text)


def code_without_docstrings(source: str) -> str:
    r"""A module's source, comments and layout as they are, without the docstrings.

    Runs of blank lines become one, so that a paragraph is what stands between blank lines.

    Raises:
        SyntaxError, ValueError, RecursionError: ``source`` is not Python.

    >>> code_without_docstrings('def f():\n    "Doc."\n    return 1  # one\n')
    'def f():\n    return 1  # one'
    """
    lines = source.encode("utf-8").splitlines(keepends=True)  # ast counts columns in bytes
    for node in _statements(_parse(source)):
        if not isinstance(node, _Documented) or ast.get_docstring(node, clean=False) is None:
            continue
        text = node.body[0].value  # type: ignore[attr-defined]
        first, last = text.lineno - 1, text.end_lineno - 1
        before, after = lines[first][: text.col_offset], lines[last][text.end_col_offset :]
        lines[first : last + 1] = [b""] * (last - first + 1)
        left = before + after.lstrip(b"; ")
        lines[first] = left if left.strip() else b""
    text = b"".join(lines).decode("utf-8")
    return re.sub(r"\n(?:[ \t]*\n)+", "\n\n", text).strip("\n")


_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[^\n]*\n.*?^[ \t]*\2[ \t]*$", re.MULTILINE | re.DOTALL)
_COMMENT_OR_TAG = re.compile(r"<!--.*?-->|</?[a-zA-Z][\w-]*(?:\s[^<>]*)?/?>", re.DOTALL)
_CODE_ELEMENT = re.compile(r"<(pre|script|style|table)\b.*?</\1>", re.DOTALL | re.IGNORECASE)
_REPLACED = [  # in this order
    (re.compile(r"\[!\[[^\]]*\]\s*(?:\([^)]*\)|\[[^\]]*\])\]\s*(?:\([^)]*\)|\[[^\]]*\])"), ""),  # badge with a link
    (re.compile(r"!\[[^\]]*\]\s*(?:\([^)]*\)|\[[^\]]*\])"), ""),  # image
    (re.compile(r"\[([^\[\]]+)\]\((?:[^()]|\([^()]*\))*\)"), r"\1"),  # [text](address)
    (re.compile(r"\[([^\[\]]+)\]\[[^\]]*\]"), r"\1"),  # [text][reference]
    (re.compile(r"^[ \t]*\[[^\]]+\]:[ \t]+\S.*$", re.MULTILINE), ""),  # definition of a reference
    (re.compile(r"`([^`<>]*?)\s*<[^`<>]*>`__?"), r"\1"),  # `text <address>`_
    (re.compile(r":[a-zA-Z:+-]+:`([^`]*)`"), r"\1"),  # role
    (re.compile(r"\|[^|\s][^|\n]*\|_{0,2}"), ""),  # substitution, mostly badges
    (re.compile(r"`([^`]+)`_{1,2}(?!\w)"), r"\1"),  # `text`_
    (re.compile(r"``?([^`\n]+)``?"), r"\1"),
    (re.compile(r"(\*\*|(?<!\w)__(?=[A-Za-z][^_]* ))([^*_\n]+)\1"), r"\2"),  # not __init__
    (re.compile(r"(?<![\w*])[*_]([^*_\n]+)[*_](?![\w*])"), r"\1"),
    (re.compile(r"(?:https?|ftp)://\S+|<[^<>\s]+@[^<>\s]+>"), ""),
]
_MARKER = re.compile(r"^[ \t]*(?:#{1,6}[ \t]+|>[ \t]?|(?:[-*+•]|\d+[.)])[ \t]+)*")
_LIST_ITEM = re.compile(r"[ \t]*(?:[-*+•]|\d+[.)])[ \t]")
_WITHOUT_LETTERS = re.compile(r"[\W\d_]*")


def _outside_blocks(text: str) -> Iterator[str]:
    """The lines that belong to no reStructuredText directive, literal block, doctest, table or rule."""
    inside = -1  # indentation of the line that opened the block being left out
    for line in text.splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if inside >= 0 and (not stripped or indent > inside):
            yield ""
            continue
        inside = -1
        if stripped.startswith(".. ") or stripped == "..":
            inside = indent
            yield ""
        elif stripped.startswith((">>>", "|", "+-", "+=", "$ ")) or " | " in stripped:
            yield ""
        elif stripped and _WITHOUT_LETTERS.fullmatch(stripped):
            yield ""  # underlined headings, rules, rows of symbols
        elif stripped.endswith("::"):
            inside = indent
            yield line[: line.rstrip().rindex("::") + 1] if stripped != "::" else ""
        else:
            yield line


def readme_prose(markup: str) -> str:
    r"""The sentences of a README in Markdown or reStructuredText.

    Code, badges, images, tables, directives, addresses and markup characters are removed. Headings and list items stay
    as plain lines, the text of a link stays without its address.

    >>> readme_prose("# Title\n\nSee [the *guide*](http://a.b) now.\n\n```\ncode()\n```\n\n- one item")
    'Title\n\nSee the guide now.\n\none item'
    """
    text = markup.replace("\r\n", "\n").expandtabs(4)
    text = _FENCE.sub("", text)
    text = "\n".join(_outside_blocks(text))
    text = _COMMENT_OR_TAG.sub("", _CODE_ELEMENT.sub("", text))
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    paragraphs = []
    in_list = False
    for block in re.split(r"\n[ \t]*(?:\n[ \t]*)*\n", html.unescape(text)):
        lines = [line for line in block.splitlines() if line.strip()]
        if lines and not lines[0].startswith(" "):
            in_list = _LIST_ITEM.match(lines[0]) is not None
        if not in_list and lines and all(line.startswith("    ") for line in lines):
            continue  # indented code
        plain = [_MARKER.sub("", line).rstrip() for line in lines]
        kept = [line for line in plain if not _WITHOUT_LETTERS.fullmatch(line)]
        if kept:
            paragraphs.append("\n".join(kept))
    return "\n\n".join(paragraphs)
