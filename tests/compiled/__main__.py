"""Tells what the compiler makes of the kernels without a GPU: registers, spills, shared memory, loops.

    python -m tests.compiled                          a line for each kernel and shape, for compute capability 9.0
    python -m tests.compiled --capability 80 86 89    for others, which have no dependent launches
    python -m tests.compiled --save before.json       the PTX of each, with what names source lines taken out
    python -m tests.compiled --compare before.json    the same kernels again: what changed; exit code 1 if any did

The public functions run on CPU tensors, and each launch is replaced by a compilation. So settings, specialisation and
constants are those of a real call. Weights are never read: they are allocated and left alone.
"""

import hashlib
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.rows import command_line
from dejavu_train.kernels.common import checks, launch, settings

from .attend import attend_cases
from .layers import WIDTHS, cases
from .steps import step_cases

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FILES = settings.committed_files()
GPUS = {  # by compute capability: file of settings, multiprocessors, bytes of shared memory of a program
    90: ("h200.json", FILES["h200.json"].multiprocessors, 227 * 1024),
    89: ("other.json", 128, 99 * 1024),
    86: ("other.json", 82, 99 * 1024),
    80: ("other.json", 108, 163 * 1024),
}


class _Device:
    """A driver that knows what to compile for and nothing else."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # what kernels are kept by

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


def compiled_launches(call: Callable[[], Any]) -> list[tuple[str, Any]]:
    """(name, compiled kernel) of every launch that `call` makes."""
    found: list[tuple[str, Any]] = []

    def compile_only(self: JITFunction, grid: Any) -> Callable[..., Any]:
        def launch_of(*args: Any, **kwargs: Any) -> Any:
            kernel = self.warmup(*args, grid=grid, **kwargs)
            found.append((self.fn.__name__, kernel))
            return kernel

        return launch_of

    kept = JITFunction.__getitem__
    JITFunction.__getitem__ = compile_only
    try:
        call()
    finally:
        JITFunction.__getitem__ = kept
    return found


def pretend_a_gpu(capability: int = 90) -> None:
    """CPU tensors pass for those of a GPU of `GPUS`. From 9.0 on it has dependent launches."""
    assert not checks.INTERPRET, "run without TRITON_INTERPRET"
    triton.runtime.driver.set_active(_Device(capability))
    name, multiprocessors, _ = GPUS[capability]
    dependents = capability >= 90
    for module in launch.loaded_kernels():
        for attribute, stand_in in (
            ("check_device", lambda *_: None),
            ("n_sms", lambda _: multiprocessors),
            ("use_pdl", lambda pdl, _: pdl and dependents),
            ("fetches_rows", lambda _: dependents),
            ("programmatic", lambda _, pdl: (dependents, pdl and dependents)),
        ):
            if hasattr(module, attribute):
                setattr(module, attribute, stand_in)
    launch._knows_pdl = lambda _: dependents  # type: ignore[assignment]
    settings.settings_file = lambda _: FILES[name]  # type: ignore[assignment]
    settings.forget_settings()


def plain_ptx(kernel: Any) -> str:
    """PTX without debug sections, line numbers and the labels that only these name."""
    text = kernel.asm["ptx"].split("\t.section\t.debug")[0].split(".file\t")[0]
    lines = (re.sub(r"//.*", "", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not re.match(r"\s*\.loc|\$L__(tmp|func)\w*:", line))


def report(kernel: Any) -> SimpleNamespace:
    """Of a compiled kernel: registers, bytes spilled, shared memory (with 1 KB of the driver's), and its machine code's
    instructions by name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([TOOLS / "cuobjdump", "-res-usage", file.name], text=True)
        sass = subprocess.check_output([TOOLS / "cuobjdump", "-sass", file.name], text=True)
    numbers = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage))
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", sass)
    return SimpleNamespace(
        registers=int(numbers["REG"]),
        stack=int(numbers["STACK"]),
        shared=int(numbers["SHARED"]) + kernel.metadata.shared,
        code=[(int(at, 16), name, rest) for at, name, rest in lines],
    )


def refused_copies(code: list[tuple[int, str, str]]) -> int:
    """Copies to shared memory at a uniform register plus another one. The assembler of CUDA 12.8 makes of them what an
    H200 refuses as an illegal instruction."""
    return sum(name.startswith("LDGSTS") and "+UR" in rest.partition("]")[0] for _, name, rest in code)


def loops(code: list[tuple[int, str, str]]) -> list[list[tuple[str, str]]]:
    """Instructions of each innermost loop, (name, operands): what lies between a backward branch and its target."""
    found = []
    for at, name, rest in code:
        target = re.search(r"(0x[0-9a-f]+)", rest)
        if name.startswith("BRA") and target and int(target.group(1), 16) < at:
            found.append((int(target.group(1), 16), at))
    inner = [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return [[(name, rest) for at, name, rest in code if low <= at <= high] for low, high in inner]


def described(kernel: Any, most: int) -> str:
    """A line about a compiled kernel, on a GPU whose programs have at most so many bytes of shared memory."""
    found = report(kernel)
    inner = loops(found.code)
    sizes = ", ".join(str(len(loop)) for loop in inner)
    spills = sum(name.startswith(("LDL", "STL")) for loop in inner for name, _ in loop)
    refused = refused_copies(found.code)
    return (
        f"{found.registers} registers, {found.stack} B stack ({spills} in loops), "
        f"{found.shared} B shared, {'dependent' if 'griddepcontrol' in kernel.asm['ptx'] else 'plain'}, "
        f"loops of {sizes or 'none'} instructions"
        + (f"; {refused} COPIES THAT A GPU REFUSES" if refused else "")
        + ("; MORE SHARED MEMORY THAN IT HAS" if found.shared > most + 1024 else "")
    )


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--save", metavar="JSON")
    parser.add_argument("--compare", metavar="JSON")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--capability", type=int, nargs="+", choices=sorted(GPUS), default=[90], help="90 = 9.0")
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS, metavar="D")
    parser.add_argument("--steps", action="store_true", help="whole steps of other families' shapes as well: minutes")
    args = parser.parse_args()
    texts: dict[str, str] = {}
    for capability in args.capability:
        pretend_a_gpu(capability)
        every = itertools.chain(cases(args.widths), attend_cases(), step_cases() if args.steps else ())
        for name, call in every:  # one after the other: a case holds the tensors of its width
            for function, kernel in compiled_launches(call) if args.only in name else ():
                key = f"{name} {function}" if capability == 90 else f"{name} {function} for {capability}"
                texts[key] = hashlib.sha256(plain_ptx(kernel).encode()).hexdigest()
                if not args.save and not args.compare:
                    print(f"{key}: {described(kernel, GPUS[capability][2])}", flush=True)
    if args.save:
        Path(args.save).write_text(json.dumps(texts, indent=1))
    if args.compare:
        before = json.loads(Path(args.compare).read_text())
        changed = [key for key, value in texts.items() if before.get(key) not in (None, value)]
        new = [key for key in texts if key not in before]
        print(f"{len(texts)} kernels: {len(changed)} changed, {len(new)} new", *changed, sep="\n  ")
        return int(bool(changed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
