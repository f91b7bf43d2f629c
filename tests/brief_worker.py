"""A worker of tests that takes no time: appends a line to a file, and is killed, refuses or ends well."""

import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    path, ends = Path(sys.argv[1]), sys.argv[2:]
    starts = len(path.read_text().splitlines()) if path.is_file() else 0
    with path.open("a") as file:
        file.write(f"{os.getcwd()}\n")
    end = ends[min(starts, len(ends) - 1)]
    print(f"start {starts} ends by {end}", flush=True)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "parent":  # what ran this worker on its host goes, and takes it along
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(5)  # nobody waits for it, and it does not stay
        end = "1"
    sys.exit(int(end))
