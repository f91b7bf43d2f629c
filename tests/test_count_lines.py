"""What counts as a line of code."""

from count_lines import code_lines

SOURCE = '''"""A docstring
of two lines."""

import os  # a comment behind code


class Kept:
    size: int
    """What an attribute is."""

    # a comment alone
    def name(self):
        "Says."
        text = """a text that is a value
        of two lines"""
        return (
            text,

            os.sep,
        )
'''


def test_comments_docstrings_and_blanks_are_no_code():
    # import, class, size, def; text: 2 lines; return with its blank, which stands within a statement
    assert code_lines(SOURCE) == 4 + 2 + 5 - 1
    assert code_lines("") == code_lines("# only this\n") == code_lines('"""Only this."""\n') == 0
