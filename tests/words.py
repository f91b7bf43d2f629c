"""Holds the rule for writers where a program can: `make lint` runs it over pages, docstrings and messages.

    python tests/words.py              new offenders, and lines of the baseline that are gone
    python tests/words.py --shrink     takes what is gone out of the baseline
    python tests/words.py --all        every offender with its place, and counts by kind of file

The rule stands in CONTRIBUTING.md. Pages are Markdown files and notebooks. Messages are the texts of errors, warnings
and log lines. Tables, code and commands are left out: `code` between backticks counts as one word without numbers.
"""

import argparse
import ast
import collections
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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


# A file of the repository in a page that is read first, as code.
OURS = re.compile(r"`((?:kernels|dejavu_train|benchmarks|tests|papers|examples|configs)/[\w./-]+\.[a-z]+)`")


class Prose(NamedTuple):
    """A paragraph, an item of a list, a docstring's entry or a message."""

    kind: str  # page, docstring, summary (the first paragraph of a docstring) or message
    path: str
    line: int
    text: str


class Offender(NamedTuple):
    kind: str
    path: str
    line: int
    rule: str
    text: str

    @property
    def key(self) -> str:
        """Entry of the baseline: the same wherever the sentence moves."""
        return hashlib.sha256(f"{self.rule}\n{self.text}".encode()).hexdigest()[:10]


def plain(text: str) -> str:
    """One line without code, images, addresses of links and marks of emphasis."""
    text = re.sub(r"(`+).+?\1|<[^>\s][^>]*>", "X", text, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+|\S+(?:/\S+|\.(?:py|md|csv|yaml|json|html))\b", "X", text)
    return " ".join(re.sub(r"(?<!\w)[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}(?!\w)", "", text).split())


def paragraphs(text: str, first: int, entries: bool) -> Iterator[tuple[int, str]]:
    """(line, text) of every paragraph and item, without tables, code, quotes. entries: each `name: text` is one."""
    block: list[str] = []
    start, depth, fence, code, blank = first, 0, "", False, True
    for number, line in enumerate([*text.splitlines(), ""], first):
        bare, indent = line.strip(), len(line) - len(line.lstrip())
        item = re.match(r"([-*+]|\d+[.)])\s+|#+\s", bare)
        code = bool(bare) and (code or blank and indent >= depth + 4 or bare.startswith((">>>", "$ ")))
        mark = re.match(r"```+|~~~+|<!-- table|<!--", bare) if not fence else None
        fence = CLOSES.get(mark.group(), mark.group()) if mark else fence
        closes = fence in bare[mark.end() if mark else 0 :]
        skip = bool(fence) or code or bare.startswith(("|", "<", "> "))  # "> ": a message, quoted from the code
        if block and (not bare or skip or item or entries and ENTRY.match(bare)):
            yield start, " ".join(block)
            block = []
        if bare and not skip:
            if not block:
                start, depth = number, indent
            block.append(bare[item.end() :] if item else bare)
        fence, blank = "" if closes else fence, not bare


def said(node: ast.AST) -> str:
    """The text of a string, f-string or sum of them, values as one word. Empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(said(part) if isinstance(part, ast.Constant) else "X" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        return said(node.left) + ("" if isinstance(node.op, ast.Mod) else said(node.right) or "X")
    return ""


def python(path: str, source: str) -> Iterator[Prose]:
    """Docstrings, texts below the fields of a class (`--help` shows them), and what errors, warnings, loggers say."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            texts = [(ast.get_docstring(node), first) for first in node.body[:1]]
            if isinstance(node, ast.ClassDef):
                texts += [(said(e.value), e) for e in node.body[1:] if isinstance(e, ast.Expr)]
            for text, first in texts:
                for line, paragraph in paragraphs(text or "", first.lineno, entries=True):
                    summary = line == first.lineno and path.startswith("dejavu_train/")
                    yield Prose("summary" if summary else "docstring", path, line, paragraph)
        elif isinstance(node, ast.Call) and not path.startswith("tests/"):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
            if MESSAGES.search(name) and node.args and (text := said(node.args[0])):
                yield Prose("message", path, node.lineno, re.sub("%[sdr]", "X", text))


def sentences(text: str, message: bool) -> Iterator[str]:
    """A message's parts between semicolons are sentences of their own."""
    rest = ""
    for part in re.split(r"(?<=[.!?;])\s+" if message else r"(?<=[.!?])[\"')]*\s+", text):
        rest = f"{rest} {part}".strip()
        if not ABBREVIATION.search(rest):
            yield rest
            rest = ""
    if rest:
        yield rest


def words(text: str) -> int:
    return sum(any(c.isalnum() for c in word) for word in text.split())


def forbidden(root: Path) -> re.Pattern[str]:
    """The words of the glossary's lines "Not: `word`, `word`.", in any number and case."""
    lines = (root / GLOSSARY).read_text("utf-8").splitlines() if (root / GLOSSARY).is_file() else []
    listed = [word for line in lines if re.match(r"\W*Not\W*:", line) for word in re.findall(r"`([^`]+)`", line)]
    return re.compile(rf"\b({'|'.join(map(re.escape, listed or FORBIDDEN))})s?\b", re.I)


def broken(prose: Prose, avoid: re.Pattern[str]) -> Iterator[Offender]:
    """Offenders in a paragraph or message."""
    message, counted = prose.kind == "message", not prose.path.startswith(NUMBERS_FREE)
    if prose.kind == "summary" and BEGINS.match(prose.text):
        yield Offender(*prose[:3], "beginning", prose.text)
    for sentence in sentences(plain(prose.text), message):
        rules = {
            "long": words(sentence) > LONGEST,
            "semicolon": ";" in sentence and not message,
            "numbers": counted and len(NUMBER.findall(SHAPE.sub("", sentence))) > NUMBERS,
            "date": DATE.search(sentence) and not prose.text.startswith("["),  # a release in the changelog
            "commit": COMMIT.search(sentence),
            "word": avoid.search(sentence),
        }
        yield from (Offender(*prose[:3], rule, sentence) for rule, breaks in rules.items() if breaks)


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(root: Path, path: str, source: str) -> Iterator[Offender]:
    """Links to files that are not there, and to headings that a page has not. Files that a page names as code."""
    if path.startswith(CLEAN):
        for named in OURS.finditer(source):
            if not (root / named[1]).exists():
                yield Offender("page", path, source.count("\n", 0, named.start()) + 1, "file", named[1])
    source = re.sub(r"^(```+).*?^\1|`[^`\n]+`", lambda code: "\n" * code.group().count("\n"), source, flags=re.S | re.M)
    for link in re.finditer(r"(?:\]\(|^\[[^\]]+\]: )([^)\s]+)", source, re.M):
        target, _, anchor = link.group(1).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        page = (root / path).parent / target if target else root / path
        if not page.exists() or (anchor and page.suffix == ".md" and anchor not in slugs(page)):
            yield Offender("page", path, source.count("\n", 0, link.start()) + 1, "link", link.group(1))


def offenders(root: Path, files: Sequence[str]) -> Iterator[Offender]:
    avoid = forbidden(root)
    for path in files:
        source = (root / path).read_text("utf-8")
        if path.endswith(".py"):
            for prose in python(path, source):
                yield from broken(prose, avoid)
            continue
        if path.endswith(".ipynb"):
            cells = json.loads(source)["cells"]
            source = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        page = [Prose("page", path, line, text) for line, text in paragraphs(source, 1, entries=False)]
        for prose in page:
            yield from broken(prose, avoid)
        yield from dead_links(root, path, source)
        text = " ".join(plain(prose.text) for prose in page)
        numbers, length = len(NUMBER.findall(text)), words(text)
        if numbers * 100 > NUMBERS_IN_100 * max(length, 100) and not path.startswith(NUMBERS_FREE):
            yield Offender("page", path, 1, "numbers in 100 words", f"more than {NUMBERS_IN_100} in {path}")


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="show old offenders too, and counts")
    parser.add_argument("--shrink", action="store_true", help="take what is gone out of the baseline")
    asked = parser.parse_args(argv)
    known = subprocess.check_output(["git", "ls-files", "*.md", "*.py", "*.ipynb"], cwd=root, text=True).splitlines()
    every = list(offenders(root, [n for n in known if not n.startswith(NOT_OURS) and (root / n).is_file()]))
    gone = collections.Counter((root / BASELINE).read_text("utf-8").split())
    new = []
    for each in every:
        if gone[each.key] and not each.path.startswith(CLEAN):
            gone[each.key] -= 1
        else:
            new.append(each)
    kept = collections.Counter((root / BASELINE).read_text("utf-8").split()) - gone
    if asked.shrink:
        (root / BASELINE).write_text("".join(f"{key}\n" for key in sorted(kept.elements())), "utf-8")
        gone.clear()
    for each in every if asked.all else new:
        print(f"{each.path}:{each.line}: {each.rule}: {each.text}")
    if asked.all:
        counts = collections.Counter((each.kind, each.rule) for each in every)
        print(*(f"{kind} {rule}: {count}" for (kind, rule), count in sorted(counts.items())), sep="\n")
    if new:
        print(f"{len(new)} new offenders against the rule for writers, see CONTRIBUTING.md", file=sys.stderr)
    if gone.total():
        print(f"{BASELINE} lists {gone.total()} that are gone: python tests/words.py --shrink", file=sys.stderr)
    return int(bool(new or gone.total()))


if __name__ == "__main__":
    sys.exit(main())
