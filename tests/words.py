"""Holds the rule for writers where a program can: `make lint` runs it over pages, docstrings and messages.

    python tests/words.py              new offenders, and lines of the baseline that are gone
    python tests/words.py --shrink     takes what is gone out of the baseline
    python tests/words.py --all        every offender with its place, and counts by kind of file

The rule stands in CONTRIBUTING.md. Pages are Markdown files and notebooks. Messages are the texts of errors, warnings
and log lines. Tables, code and commands are left out: `code` between backticks counts as one word without numbers.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = Path("tests/words_baseline.txt")
GLOSSARY = Path("docs/concepts/glossary.md")
# What the baseline may not excuse.
CLEAN = ("README.md", "docs/index.md", "docs/start/", "docs/guides/", "docs/concepts/")
NUMBERS_FREE = ("docs/results/", "docs/notes/", "benchmarks/")  # reports of measurements
NOT_OURS = ("tests/earlier/",)  # files that an earlier version wrote
LONGEST, NUMBERS, NUMBERS_IN_100 = 25, 2, 5
MESSAGES = re.compile(r"(Error|Warning|Exit|Failure)$|^(warn|warning|error|info|critical|fail|exit)$")
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|App|Fig|Sec|Eq|Tab|al|approx)|\b[A-WYZ])\.$")
CLOSES = {"<!-- table": "<!-- end", "<!--": "-->"}  # what begins a part that is skipped -> what ends it
NUMBER = re.compile(r"(?<![\w.\-/$])[-+~]?\d[\d.,]*(?![\w/-]|[.,]\d| bits?\b)")  # not fp16, 6.7B, 4-bit, 4 bits, $3
ENTRY = re.compile(r"[*`]*[\w.]+[*`]*(, [*`]*[\w.]+[*`]*){0,5}( \([^)]*\))?: ")  # a parameter or field
# Shapes and formulas, whose numbers do not count.
SHAPE = re.compile(
    r"\([^()]*,[^()]*\)|\[[^\[\]]*\]|\([^() ]*\)|\b\d+ [a-zA-Z]\b(?: [-+/] \w+(?: [a-zA-Z]\b)?)*"
    r"|[\w.]+(?: ?[*^+=|] ?\(?[\w.]+)+|2\^-?\d+|\b\w+ ?\.\. ?\w+(?: [a-z]\b)?"
)
DATE = re.compile(r"\b20\d\d-\d\d(-\d\d)?\b|\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* (\d+, )?20\d\d\b")
COMMIT = re.compile(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b")
FORBIDDEN = ("the former", "the latter")  # until the glossary stands
BEGINS = re.compile(r"(Of|What|Those|That)\b")  # no noun and no verb, so no beginning of a docstring of ours
