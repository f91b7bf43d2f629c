"""The five rules of dependent launches, see `kernels/common/launch.py`: from sources, and from what is queued."""

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from conftest import REPOSITORY

sys.path.append(str(REPOSITORY / "tests" / "engine"))
from queued import CASES, Launch, engine_of, recorded

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are noted where the interpreter would run")
CONSTANT = re.compile(r"[A-Z][A-Z_]*( > 0)?")
REWRITTEN = {
    "residual",
    "row_bits",
    "ids",
    "count",
    "x",
}  # buffers that every layer rewrites, by kernels' names for them
# Kernels that trigger before they wait, because what follows them has weights to load.
TRIGGER_FIRST = {
    "flash_decode", "attend_pack", "predict", "predict_words", "pack", "partial_sums.add", "add_ahead",
}  # fmt: skip


def compiled() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of the kernels that Triton compiles, with the module that it stands in."""
    for path in sorted((REPOSITORY / "kernels").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                yield path.stem, node


def handed() -> dict[str, list[ast.FunctionDef]]:
    """What kernels are handed, by its field of a named tuple: the functions that fields have as defaults."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for path in sorted((REPOSITORY / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Name) and node.value.id in FUNCTIONS:
                found.setdefault(ast.unparse(node.target), []).append(FUNCTIONS[node.value.id])
    return found


FUNCTIONS = {node.name: node for _, node in compiled()}
HANDED = handed()
CONSTANTS = {  # the same as constants, by their names
    "WAIT": [FUNCTIONS["wait_for_predecessor"], FUNCTIONS["start_dependents_and_wait"]],
    "READ": [node for name, node in FUNCTIONS.items() if name.startswith("read_")],
    "MULTIPLY": [node for name, node in FUNCTIONS.items() if name.startswith("multiply_")],
}
OF_WALKS = ("how.listed",)  # constants of a walk by which it decides where it waits
LAUNCHED = {f"{module}.{node.name}": node for module, node in compiled()
            if node.name.endswith("_kernel") and "PDL" in ast.unparse(node.args)}  # fmt: skip


@dataclass
class Walk:
    """A program of a kernel from its first statement on, with dependent launches: what happens before it has waited.

    Buffers are called as the kernel calls them, whatever they are called in functions within.
    """

    constants: dict[str, Any]  # of the kernel, by their names, and functions that it is handed, of which one is meant
    triggers: int = 0
    broken: list[str] = field(default_factory=list)  # stores and returns before the wait
    early: dict[str, set[str]] = field(default_factory=dict)  # buffers that are read before it, with what loads them
    written: set[str] = field(default_factory=set)
    depth: int = 0

    def run(self, function: ast.FunctionDef, names: dict[str, str], waited: bool = False) -> bool:
        """Whether the program has waited behind the function."""
        self.depth += 1
        for statement in function.body:
            waited = self.statement(statement, names, waited)
        self.depth -= 1
        return waited

    def block(self, statements: list[ast.stmt], names: dict[str, str], waited: bool) -> bool:
        for statement in statements:
            waited = self.statement(statement, names, waited)
        return waited

    def statement(self, node: ast.stmt, names: dict[str, str], waited: bool) -> bool:
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            named = test.removeprefix("not ")
            known = self.constants.get(named) if self.depth == 1 or named in OF_WALKS else None
            if test == "PDL" or (CONSTANT.fullmatch(test) and test.endswith("> 0")):
                known = True
            if known is not None:
                return self.block(node.body if known != test.startswith("not ") else node.orelse, names, waited)
            return all([self.block(node.body, names, waited), self.block(node.orelse, names, waited)])
        if isinstance(node, ast.For | ast.While):
            self.block(node.body, names, waited)
            return waited
        if isinstance(node, ast.Return) and not waited and self.depth == 1:
            self.broken.append(ast.unparse(node))
        waited = self.calls(node, names, waited)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = buffer(node.value, names)
        return waited

    def calls(self, node: ast.AST, names: dict[str, str], waited: bool) -> bool:
        found = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
        for call in sorted(found, key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0)):
            name = ast.unparse(call.func).rpartition(".")[2]
            text, first = ast.unparse(call), buffer(call.args[0], names) if call.args else ""
            if name == "gdc_wait":
                waited = True
            elif name == "gdc_launch_dependents":
                self.triggers += not waited
            elif ast.unparse(call.func).startswith(("how.", "sink.ahead", "sink.put")):
                assert name in HANDED, name
                chosen = [self.constants[name]] if name in self.constants else HANDED[name]
                waited = all([self.called(function, call, names, waited) for function in chosen])
            elif name in CONSTANTS:
                waited = all([self.called(function, call, names, waited) for function in CONSTANTS[name]])
            elif names.get(name, name) in FUNCTIONS:
                waited = self.called(FUNCTIONS[names.get(name, name)], call, names, waited)
            elif name == "store" or name.startswith("atomic"):
                self.written.add(first)
                if not waited:
                    self.broken.append(text)
            elif name == "load" and not waited:
                past = "cache_modifier='.cg'" in text or (
                    "cache_modifier=CACHE" in text and names.get("CACHE") == ".cg"
                )
                self.early.setdefault(first, set()).add("past the L1" if past else text)
        return waited

    def called(self, function: ast.FunctionDef, call: ast.Call, names: dict[str, str], waited: bool) -> bool:
        """Whether the program has waited behind a function that is called so."""
        given = dict(zip((a.arg for a in function.args.args), call.args, strict=False))
        given |= {word.arg: word.value for word in call.keywords if word.arg}
        inner = {inside: buffer(value, names) for inside, value in given.items()}
        if not waited and any(".cg" in ast.unparse(value) for value in given.values()):
            inner["CACHE"] = ".cg"
        return self.run(function, inner, waited)


def buffer(node: ast.AST, names: dict[str, str]) -> str:
    """What the kernel calls the buffer that an expression points into. "" for anything else.

    A buffer in a tuple is called as the tuple's field.
    """
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Attribute):
            return node.attr
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value if node.func.attr == "to" else ast.Constant("")
        else:
            return ""
    return names.get(node.id, node.id)


@cache
def walks(key: str) -> list[tuple[Walk, bool]]:
    """Of every value of the kernel's constants that its tests name, with whether the program has waited at its end."""
    kernel = LAUNCHED[key]
    tests = {ast.unparse(n.test).removeprefix("not ") for n in ast.walk(kernel) if isinstance(n, ast.If)}
    constants = sorted(test for test in tests if CONSTANT.fullmatch(test) and not test.endswith("> 0"))
    choices: dict[str, list[Any]] = {constant: [True, False] for constant in constants}
    if "how.walk(" in ast.unparse(kernel):
        choices["walk"] = HANDED["walk"]
        choices |= {named: [True, False] for named in OF_WALKS}
    found = []
    for values in itertools.product(*choices.values()):
        walk = Walk(dict(zip(choices, values, strict=True)))
        found.append((walk, walk.run(kernel, {a.arg: a.arg for a in kernel.args.args})))
    return found


def short(key: str) -> str:
    """As a list of queued kernels calls it, with its module where two have one name."""
    module, name = key.split(".")
    name = name.removeprefix("_").removesuffix("_kernel")
    return f"{module}.{name}" if name == "add" else name


@pytest.mark.parametrize("key", LAUNCHED)
def test_1_a_program_waits_before_it_stores_or_returns(key):
    for walk, waited in walks(key):
        assert not walk.broken, (walk.constants, walk.broken)
        assert waited, f"a program that never waits lets its successor start too early: {walk.constants}"


@pytest.mark.parametrize("key", LAUNCHED)
def test_2_a_program_triggers_behind_its_wait_but_for_those_that_are_listed(key):
    early = any(walk.triggers for walk, _ in walks(key))
    assert early == (short(key) in TRIGGER_FIRST)


def meant(option: Any, value: Any) -> bool:
    """Whether a launch has this constant, or is handed this function."""
    return option.__name__ == value.name if isinstance(value, ast.FunctionDef) else bool(option) == value


def reads_early(launch: Launch) -> set[str]:
    """Buffers of which a kernel with these constants reads something before it waits."""
    found = set()
    for walk, _ in walks(launch.kernel):
        if all(meant(launch.options.get(name, value), value) for name, value in walk.constants.items()):
            found |= set(walk.early)
    # Attention reads only positions before the present one, which older steps wrote.
    return (found & set(launch.tensors)) - {"k_cache", "v_cache"}


def writes(launch: Launch, address: int) -> bool:
    if launch.kernel not in LAUNCHED:
        return False
    names = set().union(*(walk.written for walk, _ in walks(launch.kernel)))
    return any(launch.tensors[name] == address for name in names & set(launch.tensors))


def triggers_first(launch: Launch) -> bool:
    return launch.kernel in LAUNCHED and short(launch.kernel) in TRIGGER_FIRST


def too_early(queued: list[Launch]) -> list[str]:
    """Buffers that a launch may read before another one has written them."""
    found = []
    for i, launch in enumerate(queued):
        if launch.kernel not in LAUNCHED or not launch.dependent:
            continue
        newest = i - 2  # the kernel before the predecessor has ended
        while (
            newest >= 0 and queued[newest + 1].kernel in LAUNCHED and short(queued[newest + 1].kernel) in TRIGGER_FIRST
        ):
            newest -= 1
        for name in reads_early(launch):
            running = queued[max(newest + 1, 0) : i]
            if any(each.kernel.startswith("torch") for each in running):
                continue  # a product of cuBLAS starts when all before it has ended
            found += [f"{name} of {launch} by {w}, {i}" for w in running if writes(w, launch.tensors[name])]
    return found


@WITHOUT_GPU
@pytest.mark.parametrize("name", CASES)
def test_3_what_is_read_early_is_older_by_one_kernel_for_each_that_triggers_first(name, monkeypatch):
    with torch.no_grad():
        engine = engine_of(name, monkeypatch)
        with recorded(monkeypatch) as queued:
            engine.core.eager("greedy", False)
            engine.core.eager("greedy", False)
    assert any(reads_early(launch) for launch in queued if launch.kernel in LAUNCHED)
    assert not too_early(queued)


@WITHOUT_GPU
def test_3_sees_a_kernel_that_is_missing_between(monkeypatch):
    """Without the projection between them, the MLP would read the list while attention's grid packs it."""
    with torch.no_grad():
        engine = engine_of("4 bits, own heads, fused", monkeypatch)
        with recorded(monkeypatch) as queued:
            engine.core.eager("greedy", False)
    assert not too_early(queued)
    assert any("ids" in each for each in too_early([launch for launch in queued if "heads" not in str(launch)]))


@pytest.mark.parametrize("key", LAUNCHED)
def test_4_early_reads_of_buffers_that_layers_rewrite_go_past_the_l1(key):
    for walk, _ in walks(key):
        for name in REWRITTEN & set(walk.early):
            assert walk.early[name] == {"past the L1"}, (name, walk.early[name])


def test_4_is_about_the_kernels_that_it_should_be():
    found = {short(key) for key in LAUNCHED for walk, _ in walks(key) if REWRITTEN & set(walk.early)}
    assert {"mlp", "rows", "add_ahead", "flash_decode", "partial_sums.add"} <= found


@WITHOUT_GPU
def test_5_embed_triggers_behind_its_wait_and_stands_between_advance_and_who_reads_row_state(monkeypatch):
    """Layer 0's selection reads row_state early, which `advance` writes one kernel before embed."""
    assert "embed" not in TRIGGER_FIRST
    with torch.no_grad():
        engine = engine_of("16 bits, own sites, 1 rows", monkeypatch)
        with recorded(monkeypatch) as queued:
            engine.core.eager("greedy", False)
            engine.core.eager("greedy", False)
    names = [str(launch) for launch in queued]
    first = names.index("embed", 1)
    assert names[first - 1 : first + 2] == ["advance", "embed", "predict"]
    monkeypatch.setattr(sys.modules[__name__], "TRIGGER_FIRST", TRIGGER_FIRST | {"embed"})
    assert any("row_state of predict" in each for each in too_early(queued))


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("name", "writers"),
    [
        ("4 bits, MLP ahead, int4, fused", {
            "inputs": {"predict", "add_ahead"}, "estimate": {"mlp"}, "moments": {"mlp", "add_ahead"},
            "arrived": {"qkv_select", "add_ahead"}, "packed": {"attend_pack"}, "normalised": set(),
        }),
        ("16 bits, own sites, 1 rows", {"packed": {"pack"}, "normalised": {"predict"}}),
        ("4 bits, int4 predictors, 1 rows", {"packed": set(), "normalised": {"predict"}}),
        ("4 bits, int4 predictors, 2 rows", {"packed": {"select"}, "normalised": {"layer_norm"}}),
    ],
)  # fmt: skip
def test_buffers_that_are_carried_over_are_written_by_whom_their_class_says(name, writers, monkeypatch):
    with torch.no_grad():
        engine = engine_of(name, monkeypatch)
        with recorded(monkeypatch) as queued:
            engine.core.eager("greedy", False)
    carried = engine.core.work.carried
    for buffer_name, expected in writers.items():
        tensor = carried.packed.ids if buffer_name == "packed" else getattr(carried, buffer_name)
        assert {str(launch) for launch in queued if writes(launch, tensor.data_ptr())} == expected, buffer_name
    carried.arrived.fill_(3)
    carried.moments.fill_(5)
    engine.core.reset()
    assert not carried.arrived.any() and not carried.moments.any(), "a step that was cut short leaves nothing behind"
