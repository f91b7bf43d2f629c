"""Plain text out of Python source and README markup."""

import ast

import pytest

from dejavu_train.data.plain_text import code_without_docstrings, docstrings, readme_prose

SOURCE = '''"""Module."""
raise RuntimeError("never run")
class A:
    """Class."""
    def f(self):
        """Method.

            Indented."""
if True:
    async def g(): "Inside an if."
'''


def test_docstrings_come_in_reading_order_without_importing():
    assert list(docstrings(SOURCE)) == ["Module.", "Class.", "Method.\n\nIndented.", "Inside an if."]


def test_code_keeps_all_but_docstrings():
    source = '''# A comment.
"""Module é."""

import os  # kept


def f(x):
    """Docstring
    of two lines."""
    y = "a string, no docstring"  # é


    return x + y
def g(): "one é line"; return 1
'''
    code = code_without_docstrings(source)
    assert code == (
        "# A comment.\n\nimport os  # kept\n\ndef f(x):\n"
        '    y = "a string, no docstring"  # é\n\n    return x + y\ndef g(): return 1'
    )
    assert not list(docstrings(code))
    without = ast.parse(source)
    for node in ast.walk(without):
        if isinstance(node, ast.Module | ast.FunctionDef):
            node.body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    assert ast.dump(ast.parse(code)) == ast.dump(without)


def test_source_that_is_not_python_is_refused():
    with pytest.raises(SyntaxError):
        code_without_docstrings("def {{ template }}")


MARKDOWN = """# A Tool &amp; more

[![build](https://ci/x.svg)](https://ci/x) ![logo](logo.png)
<p align="center"><b>Made</b> of parts</p>

It reads **many** files, see [the guide](https://a.org/b_(c)) or https://a.org/d.
Names such as `read_file` and __init__ stay.

```python
import tool
print("never shown")
```

| column | other |
| --- | --- |
| cell | cell |

- first item
- second *item*

    indented_code = 1

[ref]: https://a.org
"""

RST = """A Tool
======

.. image:: https://ci/x.svg
   :target: https://ci/x

It reads ``files`` with :class:`tool.Reader`, see `the guide <https://a.org>`_ and |badge|.

.. code-block:: python

   print("never shown")

For instance::

   tool --never shown

>>> never_shown()
1

The end.
"""


def test_markdown_becomes_prose():
    prose = readme_prose(MARKDOWN)
    assert prose.startswith("A Tool & more\n\n")
    assert "Made of parts" in prose and "It reads many files, see the guide or" in prose
    assert "read_file and __init__ stay." in prose and "first item\nsecond item" in prose
    for gone in ("never shown", "cell", "http", "ci/x", "<", "`", "**", "[", "|", "#", "import"):
        assert gone not in prose, gone


def test_restructured_text_becomes_prose():
    prose = readme_prose(RST)
    assert prose.split("\n\n")[0] == "A Tool"
    assert "It reads files with tool.Reader, see the guide and ." in prose
    assert "For instance:" in prose and prose.endswith("The end.")
    for gone in ("never", "::", "image", "http", "==", "`", "|"):
        assert gone not in prose, gone


def test_code_after_a_plain_paragraph_is_dropped_a_continued_list_item_is_not():
    prose = readme_prose("Run it:\n\n    run --fast\n\nThen:\n\n* an item\n\n    which goes on\n")
    assert "run --fast" not in prose and "which goes on" in prose
