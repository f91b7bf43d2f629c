"""The compiled entry points, cached on disk under a hash of all the sources that it is compiled from.

Numba's cache looks at the file of an entry point alone. A hash of the whole package in the closure, which is part of
the cache's key, makes a change anywhere in it compile anew. Where the cache cannot be used, every process compiles.
"""

import functools
import gc
import logging
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

from numba.core.caching import NullCache

from dejavu_train.engine import cpu_limits
from dejavu_train.engine.cpu.pipeline import Entry, operators_kept
from dejavu_train.engine.cpu.step import N_STEPS, run
from dejavu_train.engine.cpu.threads import barrier, without_counts
from dejavu_train.engine.cpu.verify import cycle

NOTICE_SECONDS = 0.7  # loading from the cache takes less
logger = logging.getLogger(__name__)


def _stamp() -> int:
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(cpu_limits.__file__)]
    return zlib.crc32(b"".join(file.read_bytes() for file in files))


compiled_entry = functools.partial(without_counts, pipeline_class=Entry)


def _entry_points(stamp: int) -> tuple[Any, Any]:
    @compiled_entry()
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

    @compiled_entry()
    def enter_cycle(
        draft, selectors, state, draft_work, dense, rules, slots, work, choices, control, command, thread, n_threads
    ):
        """The same for cycles of lossless decoding."""
        if stamp < 0:
            return
        while True:
            barrier(control, n_threads)
            if command[N_STEPS] < 0:
                return
            cycle(
                draft, selectors, state, draft_work, dense, rules, slots, work, choices, control, command, thread,
                n_threads,
            )  # fmt: skip
            barrier(control, n_threads)
            if thread == 0:
                return

    return enter, enter_cycle


enter, enter_cycle = _entry_points(_stamp())
_compiling = threading.Lock()


def prepare(entry: Any, arguments: tuple[Any, ...]) -> None:
    """Compile an entry point for arguments of these types, or load it. Says on stderr what takes long.

    Callers wait for each other: numba's compiler is for one thread at a time.
    """

    def show_notice() -> None:
        again = ", once for each kind of call; later starts read it from the cache"
        kept = "" if isinstance(entry._cache, NullCache) else again
        print(f"compiling the CPU engine: some 15 seconds{kept}", file=sys.stderr)

    from numba import typeof

    kinds = tuple(typeof(argument) for argument in arguments)
    with _compiling:
        notice = threading.Timer(NOTICE_SECONDS, show_notice)
        notice.daemon = True
        notice.start()
        collecting = gc.isenabled()
        gc.disable()  # numba makes millions of small objects, beside those of torch: a sixth of the time
        try:
            with operators_kept():
                _compile(entry, kinds)
        finally:
            if collecting:
                gc.enable()
            notice.cancel()


def _compile(entry: Any, kinds: tuple[Any, ...]) -> None:
    """An entry point for these types, from the cache where it can be read, else compiled, and written if it can."""
    reason = ""
    for damaged in (False, True):
        try:
            _use_cache(entry, kinds, damaged)
            entry.compile(kinds)
            return
        except Exception as error:  # no folder, a full disk, a file that ends early: numba has no one name for it
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    entry._cache = NullCache()
    entry.compile(kinds)
    logger.warning(
        "the compiled CPU engine is not kept (%s), so every process compiles it for some 15 seconds; set"
        " NUMBA_CACHE_DIR to a folder that can be written",
        reason,
    )


def _use_cache(entry: Any, kinds: tuple[Any, ...], damaged: bool) -> None:
    """Have an entry point look into numba's cache on disk. What is damaged there is forgotten."""
    entry.enable_caching()
    cache = entry._cache
    # numba numbers the files of an index: two processes that compile at once would give theirs the same name.
    key = zlib.crc32(repr(cache._index_key(kinds, entry.targetctx.codegen())).encode())
    cache._cache_file._data_name_pattern = f"{cache._impl.filename_base}.{key:08x}-{{number:d}}.nbc"
    if damaged:
        cache.flush()
