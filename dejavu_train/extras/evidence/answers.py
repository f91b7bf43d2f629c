"""Scorers of answers to gsm8k and math500: the number or the expression that a text ends on, against the set's.

Written anew after the sets' own cards, and compared with lm-eval's functions in tests.
"""

import re
from fractions import Fraction

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
MARK = "####"


def gsm8k_right(answer: str, reference: str) -> bool:
    """Tell whether an answer's number is the one behind ``####`` of the reference.

    Behind ``####`` of the answer the first number counts, else the last one of the text.

    >>> gsm8k_right("So she pays $1,200.50.", "It is so. #### 1200.5")
    True
    """
    wanted, found = number_of(reference), number_of(answer)
    return wanted is not None and wanted == found


def number_of(text: str) -> Fraction | None:
    """The number that a text gives as its answer. None where it has none.

    >>> number_of("8 - 3 = 5"), number_of("#### 7 apples, not 9"), number_of("none")
    (Fraction(5, 1), Fraction(7, 1), None)
    """
    marked = text.rpartition(MARK)[2] if MARK in text else ""
    numbers = NUMBER.findall(marked) or NUMBER.findall(text)
    if not numbers:
        return None
    return Fraction((numbers[0] if NUMBER.search(marked) else numbers[-1]).replace(",", "").replace("$", ""))


def math_right(answer: str, reference: str) -> bool:
    r"""Tell whether an answer's expression is the reference's, both written in one way.

    The last ``\boxed{...}`` counts, else what stands behind the last "answer is", else between the last two dollars.

    >>> math_right(r"Thus $x = \boxed{\dfrac12}$.", r"\frac{1}{2}"), math_right("The answer is 4.", "5")
    (True, False)
    """
    found = expression_of(answer)
    return found is not None and plain_form(found) == plain_form(reference)


def expression_of(text: str) -> str | None:
    """The expression that a text gives as its answer. None where it has none."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start >= 0:
        depth, first = 0, text.index("{", start)
        for place in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[first + 1 : place]
        return None
    said = re.findall(r"answer is:?\s*\$?(.+?)\$?\s*(?:\.\s|\.?$|\n)", text, re.IGNORECASE | re.MULTILINE)
    dollars = re.findall(r"\$([^$]+)\$", text)
    return said[-1] if said else dollars[-1] if dollars else None


def plain_form(expression: str) -> str:
    r"""An expression in one spelling: no spaces, units or degrees, ``\frac{a}{b}`` for fractions, plain numbers.

    >>> plain_form(r"\dfrac{1}{2}\text{ cm}"), plain_form("1,000"), plain_form("0.50"), plain_form("x = 3")
    ('\\frac{1}{2}', '1000', '0.5', '3')
    """
    text = expression.strip().rstrip(".")
    text = re.sub(r"\\(?:text|mbox|textrm)\{\s[^}]*\}\s*$", "", text)  # a unit behind a number
    text = re.sub(r"\\(?:text|mbox|textbf|mathrm|textrm)\{([^}]*)\}", r"\1", text)
    for gone in ("\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "^\\circ", "^{\\circ}", "\\$", "\\%", "%", "$", " "):
        text = text.replace(gone, "")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\w)\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text) if re.fullmatch(r"-?[\d,]+(?:\.\d+)?", text) else text
    sides = text.split("=")
    text = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else text
    if re.fullmatch(r"-?\d+/\d+", text):
        over, under = text.lstrip("-").split("/")
        text = "-" * text.startswith("-") + f"\\frac{{{over}}}{{{under}}}"
    if re.fullmatch(r"-?\d*\.\d+", text):
        text = text.rstrip("0").rstrip(".")
        text = re.sub(r"^(-?)\.", r"\g<1>0.", text)
    return text
