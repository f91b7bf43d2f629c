"""Runs what a model wrote in a process of its own, with limits of time, memory and files.

The limits keep a mistake from doing harm. They keep nothing from the network, nor from files that the user may read.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 10
MEMORY, WRITTEN = 2 << 30, 1 << 20  # bytes
# In the child: the limits, then the program, then a word that only a program without errors comes to.
_CHILD = f"""\
import resource
for what, most in (("CPU", {SECONDS}), ("AS", {MEMORY}), ("FSIZE", {WRITTEN}), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{{what}}"), (most, most))
exec(compile(open("program.py", encoding="utf-8").read(), "program.py", "exec"), {{"__name__": "__main__"}})
"""


def passes(program: str, seconds: float = SECONDS) -> bool:
    """Tell whether a program comes to its end without an error.

    >>> passes("assert 1 + 1 == 2"), passes("assert 1 + 1 == 3")
    (True, False)
    """
    done = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        with open(Path(folder, "said"), "w+b") as said:
            child = subprocess.Popen(
                [sys.executable, "-I", "-c", f"{_CHILD}print('\\n{done}')"], cwd=folder, env={"PATH": ""},
                stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            with child, contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                try:
                    child.wait(seconds)
                finally:
                    os.killpg(child.pid, signal.SIGKILL)  # it, and all that it has started
            said.seek(0)
            return said.read().split()[-1:] == [done.encode()]
