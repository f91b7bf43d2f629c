"""The kernel of all layers on a CPU: its source behind host.cuh, compiled by the machine's C++ compiler."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dejavu_train.kernels.persistent import decoder_layers
from dejavu_train.kernels.persistent.sizes import PROGRAMS, THREADS, StepSizes

HOST, LAUNCH = (Path(__file__).with_name(name) for name in ("host.cuh", "host_launch.cuh"))


class HostLauncher:
    """A `Launcher` of the kernel on a CPU.

    seed: of the order in which copies land and warps take their turns. without: a copy that is lost, by its number.
    """

    def __init__(self, sizes: StepSizes, device: torch.device) -> None:
        self.shared, self.library = sizes.shared_bytes, ctypes.CDLL(str(compiled(sizes)))
        self.seed, self.without = 0, -1

    def __call__(self, stream: int, arguments: Sequence[tuple[Any, Any]]) -> None:
        self.seed += 1
        values = [ctypes.c_void_p(value) if kind is None else kind(value) for value, kind in arguments]
        hung = self.library.launch(PROGRAMS, ctypes.c_uint32(self.shared), self.seed, self.without, *values)
        assert not hung, "programs wait for each other for ever"


@functools.cache
def compiled(sizes: StepSizes) -> Path:
    """A library for these sizes."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or pytest.skip("no C++ compiler")
    needed = "#include <ucontext.h>\nucontext_t context; _Float16 half;"
    command = [compiler, "-std=c++17", "-x", "c++", "-"]
    if subprocess.run([*command, "-fsyntax-only"], input=needed, text=True, capture_output=True).returncode:
        pytest.skip(f"{compiler} has no ucontext.h or no _Float16")
    parts = [HOST, *decoder_layers.SOURCES[1:], LAUNCH]
    source = "\n".join(f'#line 1 "{path.name}"\n{path.read_text()}' for path in parts)
    defines = [f"-D{name}={value}" for name, value in {**sizes.defines, "THREADS_OF_ALL": THREADS}.items()]
    command += ["-O2", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-w"]
    told = hashlib.sha256("\n".join([source, *defines, *command]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"dejavu-host-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} is of another user"
    file = folder / f"{told}.so"
    if not file.exists():
        made = file.with_suffix(f".{os.getpid()}")
        found = subprocess.run([*command, *defines, "-o", str(made)], input=source, text=True, capture_output=True)
        assert found.returncode == 0, found.stderr[-3000:]
        os.replace(made, file)
    return file
