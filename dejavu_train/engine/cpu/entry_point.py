"""The compiled entry point, cached on disk under a hash of all the sources that it is compiled from.

Numba's cache looks at the file of the entry point alone; a hash of the whole package in the closure, which is part of
the cache's key, makes a change anywhere in it compile anew.
"""

import gc
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

from numba import njit

from dejavu_train.engine.cpu.pipeline import Entry, operators_kept
from dejavu_train.engine.cpu.step import N_STEPS, run
from dejavu_train.engine.cpu.threads import barrier

NOTICE_SECONDS = 0.7  # loading from the cache takes less


def _stamp() -> int:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return zlib.crc32(b"".join(file.read_bytes() for file in files))


def _entry_point(stamp: int) -> Any:
    @njit(
        nogil=True,
        cache=True,
        error_model="numpy",
        _nrt=False,
        no_cfunc_wrapper=True,
        no_rewrites=True,
        pipeline_class=Entry,
    )
    def enter(model, selectors, state, work, control, command, thread, n_threads):
        """Thread 0 runs one command, the others run commands until one sends them home."""
        if stamp < 0:  # never: names the stamp, so that it is part of the cache's key
            return
        while True:
            barrier(control, n_threads)
            if command[N_STEPS] < 0:
                return
            run(model, selectors, state, work, control, command, thread, n_threads)
            barrier(control, n_threads)
            if thread == 0:
                return

    return enter


enter = _entry_point(_stamp())


def prepare(arguments: tuple[Any, ...]) -> None:
    """Compile ``enter`` for arguments of these types, or load it; says on stderr what takes long."""

    def show_notice() -> None:
        print("compiling the CPU engine: some 15 seconds, once; later starts read it from the cache", file=sys.stderr)

    from numba import typeof

    notice = threading.Timer(NOTICE_SECONDS, show_notice)
    notice.daemon = True
    notice.start()
    collecting = gc.isenabled()
    gc.disable()  # numba makes millions of small objects, beside those of torch: a sixth of the time
    try:
        with operators_kept():
            enter.compile(tuple(typeof(argument) for argument in arguments))
    finally:
        if collecting:
            gc.enable()
        notice.cancel()
