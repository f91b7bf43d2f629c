"""How many arguments a function of the library may have."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = 10
# Those of transformers' own classes, which their callers know.
THEIRS = {"forward", "from_pretrained", "generate"}
# What is compiled for a device, or to machine code, has no objects to take.
COMPILED = ("triton.jit", "compiled", "intrinsic")
# Only shrinks: (file, function).
KNOWN: set[tuple[str, str]] = set()
MOST_COMPILED = 24  # of a function of a kernel: what belongs together is a named tuple


def functions(source: str) -> Iterator[tuple[str, int]]:
    """(name, parameters beside self) of every function that Python runs."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(ast.unparse(decorator).startswith(COMPILED) for decorator in node.decorator_list):
            continue
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        yield node.name, len(names) - (names[:1] in (["self"], ["cls"]))


def long_signatures(room: str) -> set[tuple[str, str]]:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    return {
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name, number in functions(path.read_text())
        if number > MOST and name not in THEIRS
    }


@pytest.mark.parametrize("room", ["dejavu_train/engine", "dejavu_train/sparse", "kernels"])
def test_functions_have_few_parameters(room):
    known = {each for each in KNOWN if each[0].startswith(room)}
    assert long_signatures(room) == known, "take what belongs together as a small frozen dataclass"


def test_functions_of_kernels_have_few_parameters():
    found = {}
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "triton.jit" in "".join(map(ast.unparse, node.decorator_list)):
                found[node.name] = len([*node.args.args, *node.args.kwonlyargs])
    assert len(found) > 80 and max(found.values()) > 10
    assert {name for name, number in found.items() if number > MOST_COMPILED} == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(a, b, *, c): ...", [("f", 3)]),
        ("class A:\n    def f(self, a, /, b): ...", [("f", 2)]),
        ("@triton.jit\ndef f(a): ...\n@triton.jit(do_not_specialize=['n'])\ndef g(n): ...", []),
        ("@compiled(fastmath=SUMS)\ndef f(a): ...\n@functools.cache\ndef g(a): ...", [("g", 1)]),
    ],
)
def test_what_counts_as_a_parameter(source, found):
    assert list(functions(source)) == found
