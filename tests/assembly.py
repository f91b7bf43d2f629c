"""Carries out the assembly of the queues and lists of kernels/common on a CPU, all threads of a program in step.

Triton's interpreter takes no assembly. `carried_out(monkeypatch)` lets it take the PTX instructions below, those of
one program at a time. A copy (`cp.async`) writes garbage at once, and its words when they are waited for. So it shows
words that are taken too early, and a slot that is asked for anew before it was taken. Barriers do nothing: what this
cannot find is a missing one.
"""

import ctypes
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

GARBAGE = 0xA5
# Where in shared memory a kernel's rooms begin: its queue, its list of rows and its warps' normalised inputs.
ROOMS = {"room": 1 << 10, "listed": 1 << 16, "normalised": 1 << 17}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def carried_out(monkeypatch: pytest.MonkeyPatch) -> "Program":
    """Triton's interpreter takes assembly, the state of which, returned here, begins anew with each queue."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    state = Program()

    def inline_asm(_self: Any, text: str, constraints: str, values: list[Any], *_rest: Any) -> SimpleNamespace:
        n = sum(word.startswith("=") for word in constraints.split(","))
        results = state.run(text, n, [value.data for value in values])
        floats = [word.endswith("f") for word in constraints.split(",")[:n]]
        handles = [TensorHandle(each.view(np.float32 if number else np.int32), tl.float32 if number else tl.int32)
                   for each, number in zip(results, floats, strict=True)]  # fmt: skip
        return SimpleNamespace(get_result=lambda i: handles[i])

    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", inline_asm)
    return state


def queues_carried_out(monkeypatch: pytest.MonkeyPatch) -> "Program":
    """Kernels that import a queue's functions run their assembly, all other arithmetic stays plain."""
    import triton.language as tl

    import dejavu_train.kernels.dense.dense_batch
    import dejavu_train.kernels.dense.dense_rows
    import dejavu_train.kernels.stages.mlp
    import dejavu_train.kernels.stages.qkv  # noqa: F401
    from dejavu_train.kernels.common import int4_mma, int4_neurons, int4_norm, lane_queue, launch, shared_rows

    state = carried_out(monkeypatch)
    # Called from Python, a function's tuples are not those that the interpreter makes of a kernel's.
    both = lambda one, two: tl.tuple([*one, *two])  # noqa: E731
    monkeypatch.setattr(tl.tuple, "__add__", both)
    monkeypatch.setattr(tl.tuple, "__radd__", lambda self, before: both(before, self), raising=False)
    modules = [module for module in launch.loaded_kernels() if module != lane_queue]
    for owner, names in (
        (
            lane_queue,
            (
                "ask",
                "take",
                "ask_lines",
                "ask_listed_lines",
                "ask_units",
                "take_unit",
                "drain",
                "emptied",
                "lane_queue",
                "at_slot",
                "after_slot",
            ),
        ),
        (shared_rows, ("rows_list", "append_rows", "four_rows", "one_row", "written_anew")),
        (int4_mma, ("ask_words", "ask_inputs", "int4_tile")),
        (int4_neurons, ("take_halves",)),
        (int4_norm, ("normalised_units",)),
    ):
        for name in names:
            function = getattr(owner, name)
            for module in modules:
                if getattr(module, name, None) is function:
                    monkeypatch.setattr(module, name, lambda *args, of=function, **named: of(*args, **named, ASM=True))
    return state


class Program:
    """Shared memory of one program, its threads' copies on their way, and the registers of one piece of assembly."""

    def __init__(self) -> None:
        self.shared = np.zeros(0, np.uint8)
        self.groups: list[list[tuple[int, Callable[[], None]]]] = []  # of copies: where to, and what carries it out
        self.open: list[tuple[int, Callable[[], None]]] = []
        self.registers: dict[str, np.ndarray] = {}
        self.threads = 0
        self.left = 0  # copies that programs before this one left on their way

    def run(self, text: str, n_outputs: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """The outputs, uint32 for each thread."""
        self.threads = max(each.size for each in inputs)
        thread = np.arange(self.threads, dtype=np.uint32)
        self.registers = {
            "%tid.x": thread,
            "%laneid": thread % 32,
            "%lanemask_lt": (1 << (thread % 32)) - 1,
            **ROOMS,
        }
        for i, each in enumerate(inputs):
            bits = each.view(np.uint32) if each.dtype.itemsize == 4 else each.astype(np.uint64)
            self.registers[f"${n_outputs + i}"] = bits
        for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
            if line.strip() and not line.strip().startswith(".reg"):
                self.instruction(line.strip())
        return [np.broadcast_to(self.value(f"${i}"), self.threads).astype(np.uint32) for i in range(n_outputs)]

    def on_their_way(self) -> int:
        return sum(map(len, self.groups))

    def value(self, name: str) -> np.ndarray:
        """A register or a number, for all threads."""
        found = self.registers.get(name)
        return np.broadcast_to(np.asarray(int(name, 0) if found is None else found), self.threads)

    def address(self, text: str) -> np.ndarray:
        register, _, offset = text.strip("[] ").partition("+")
        return self.value(register.strip()).astype(np.int64) + int(offset or 0)

    def instruction(self, line: str) -> None:
        if line.startswith(".shared"):
            name, size = re.findall(r"(\w+)\[(\d+)\]", line)[0]
            end = ROOMS[name] + int(size)
            if name == "normalised":  # which comes last
                before = self.shared[: ROOMS["normalised"]]
                self.shared = np.concatenate((before, np.full(end - before.size, GARBAGE, np.uint8)))
                return
            if name == "listed":  # which comes first, where there is one
                self.shared = np.full(end, GARBAGE, np.uint8)
                return
            if self.shared.size <= ROOMS["listed"]:
                self.shared = np.full(end, GARBAGE, np.uint8)
            self.left += self.on_their_way()
            self.groups, self.open = [], []
            return
        guard = np.ones(self.threads, bool)
        if line.startswith("@"):
            name, line = line[1:].split(" ", 1)
            guard = self.value(name).astype(bool)
        code, _, rest = line.partition(" ")
        names = [each.strip() for each in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)]
        kind, *more = code.split(".")
        if kind == "cp":
            self.copy(more, names)
        elif kind in ("ld", "st"):
            self.move(kind, more, names, guard)
        elif kind not in ("createpolicy", "bar"):
            new = self.computed(kind, more, [self.value(name) for name in names[1:]])
            old = self.registers.get(names[0], np.zeros(self.threads, np.uint32))
            self.registers[names[0]] = np.where(guard, new, old)

    def computed(self, kind: str, more: list[str], of: list[np.ndarray]) -> np.ndarray:
        bits = [each.astype(np.uint32) for each in of]
        if kind == "add" and "f32" in more:
            return (bits[0].view(np.float32) + bits[1].view(np.float32)).view(np.uint32)
        if kind == "setp":
            numbers = [each.view(np.int32) for each in bits] if more[-1] == "s32" else bits
            compare = {"ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal}[more[0]]
            return compare(numbers[0], numbers[1])
        if kind == "vote":
            votes = of[0].astype(bool).reshape(-1, 32) @ (1 << np.arange(32, dtype=np.uint64))
            return np.repeat(votes, 32).astype(np.uint32)
        if kind == "popc":
            return np.array([int(each).bit_count() for each in bits[0]], np.uint32)
        if kind in ("mov", "cvt"):
            return bits[0]
        if kind == "mad":
            return bits[0] * bits[1] + bits[2]
        operations = {"add": np.add, "and": np.bitwise_and, "shl": np.left_shift, "shr": np.right_shift}
        return operations[kind](bits[0], bits[1])

    def copy(self, more: list[str], names: list[str]) -> None:
        if "commit_group" in more:
            self.groups.append(self.open)
            self.open = []
        elif "wait_group" in more or "wait_all" in more:
            if "wait_all" in more:
                self.groups.append(self.open)
                self.open = []
            keep = int(names[0]) if names else 0
            while len(self.groups) > keep:
                for _, arrives in self.groups.pop(0):
                    arrives()
        else:
            size = int(names[2])
            to, at = self.address(names[0]), self.address(names[1])
            read = self.value(names[3]).astype(int) if len(names) > 3 and names[3] != "policy" else None
            assert not (to % size).any(), "not aligned in shared memory"
            assert not (at % size)[slice(None) if read is None else read > 0].any(), "not aligned in memory"
            assert "cg" not in more or size == 16
            late = {place for group in [*self.groups, self.open] for place, _ in group}
            assert late.isdisjoint(to.tolist()), "a copy to where another one is on its way, in whatever order"
            for thread in range(self.threads):
                length = size if read is None else int(read[thread])
                self.shared[to[thread] : to[thread] + size] = GARBAGE
                arrives = lambda to=to[thread], at=int(at[thread]), n=length: self.arrive(to, at, n, size)  # noqa: E731
                self.open.append((int(to[thread]), arrives))

    def arrive(self, to: int, at: int, length: int, size: int) -> None:
        words = ctypes.string_at(at, length) if length else b""
        self.shared[to : to + size] = np.frombuffer(words.ljust(size, b"\0"), np.uint8)

    def move(self, kind: str, more: list[str], names: list[str], guard: np.ndarray) -> None:
        bytes_each = int(more[-1][1:]) // 8
        place, registers = (names[1], names[0]) if kind == "ld" else (names[0], names[1])
        at = self.address(place)
        for number, name in enumerate(registers.strip("{}").replace(" ", "").split(",")):
            view = self.shared[(at + number * bytes_each)[:, None] + np.arange(bytes_each)]
            if kind == "ld":
                new = np.ascontiguousarray(view).view(UNSIGNED[bytes_each])[:, 0].astype(np.uint32)
                self.registers[name] = np.where(guard, new, self.registers.get(name, new))
            else:
                data = self.value(name).astype(np.uint32).astype(UNSIGNED[bytes_each])
                for thread in np.flatnonzero(guard):
                    begin = at[thread] + number * bytes_each
                    self.shared[begin : begin + bytes_each] = data[thread : thread + 1].view(np.uint8)
