"""CUDA C++ that is compiled when it is first used: NVRTC's binary, kept beside Triton's own, and its launch.

`cuda.bindings` is imported where it is needed alone. PyTorch's CUDA wheels bring it, and NVRTC with it.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

LOG_LINES = 40  # of a compiler's error
PACKAGES = "cuda-bindings and nvidia-cuda-nvrtc"


class NoCompiler(RuntimeError):
    """The compiler is missing, or ended in an error."""


@dataclass(frozen=True)
class Program:
    """A source with one kernel of this name. defines: macros by name, of one configuration.

    arch: as NVRTC calls it, "sm_90a".
    """

    source: str
    kernel: str
    defines: Mapping[str, int | str]
    arch: str

    @property
    def options(self) -> list[str]:
        return [f"--gpu-architecture={self.arch}", "-std=c++17", *(f"-D{k}={v}" for k, v in self.defines.items())]

    def compiled(self, verbose: bool = False) -> tuple[bytes, str]:
        """(machine code, the compiler's log). verbose: the log tells registers and spills.

        Raises:
            NoCompiler: no NVRTC, or an error with its log.
        """
        nvrtc = _nvrtc()
        options = [each.encode() for each in self.options + ["--ptxas-options=-v"] * verbose]
        made = _checked(nvrtc.nvrtcCreateProgram(self.source.encode(), b"layers.cu", 0, None, None))
        (error,) = nvrtc.nvrtcCompileProgram(made, len(options), options)
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(made)))
        _checked(nvrtc.nvrtcGetProgramLog(made, log))
        text = log.decode(errors="replace").strip("\0\n")
        if int(error):
            raise NoCompiler(f"NVRTC ended in an error:\n{chr(10).join(text.splitlines()[:LOG_LINES])}")
        code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(made)))
        _checked(nvrtc.nvrtcGetCUBIN(made, code))
        nvrtc.nvrtcDestroyProgram(made)
        return bytes(code), text

    def binary(self) -> bytes:
        """Machine code, from the cache if it was compiled before by the same compiler."""
        major, minor = _checked(_nvrtc().nvrtcVersion())
        told = "\n".join([self.source, *self.options, f"{major}.{minor}"])
        path = Path(triton.knobs.cache.dir) / f"dejavu-{hashlib.sha256(told.encode()).hexdigest()[:32]}.cubin"
        with contextlib.suppress(OSError):
            return path.read_bytes()
        code, _ = self.compiled()
        with contextlib.suppress(OSError):  # a folder that cannot be written costs the next start its seconds
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(code)
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        return code


@dataclass(frozen=True)
class Launcher:
    """A loaded kernel with its grid. All programs run at once (a cooperative launch), or the launch is refused."""

    function: Any
    programs: int
    threads: int
    shared: int

    @classmethod
    def load(cls, program: Program, programs: int, threads: int, shared: int) -> "Launcher":
        """Load it on the current device. shared: bytes of a program.

        Raises:
            NoCompiler: see `Program.compiled`. RuntimeError: the driver refuses it.
        """
        driver = _driver()
        library = _checked(driver.cuLibraryLoadData(program.binary(), None, None, 0, None, None, 0))
        function = _checked(
            driver.cuKernelGetFunction(_checked(driver.cuLibraryGetKernel(library, program.kernel.encode())))
        )
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, most, shared))
        return cls(function, programs, threads, shared)

    def __call__(self, stream: int, arguments: Sequence[tuple[Any, Any]]) -> None:
        """Launch with (value, ctypes type) of each argument. None = a pointer, whose value is an address."""
        values = tuple(value for value, _ in arguments)
        types = tuple(ctypes.c_void_p if kind is None else kind for _, kind in arguments)
        _checked(
            _driver().cuLaunchCooperativeKernel(
                self.function, self.programs, 1, 1, self.threads, 1, 1, self.shared, stream, (values, types)
            )
        )


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise NoCompiler(f"no NVRTC was found ({error}); install {PACKAGES}") from error
    return nvrtc


@functools.cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoCompiler(f"the driver's bindings were not found ({error}); install {PACKAGES}") from error
    return driver


def _checked(returned: tuple[Any, ...]) -> Any:
    """The values that a call of the bindings returns behind its error code."""
    error, *values = returned
    if int(error):
        raise RuntimeError(f"CUDA answered {error!r}")
    return values[0] if len(values) == 1 else tuple(values) if values else None
