"""A SLURM of one host for tests: sbatch, srun, sacct and scancel in a folder for PATH. Jobs are processes."""

import os
import sys
from pathlib import Path

SBATCH = r"""#!{python}
import os, re, subprocess, sys
from pathlib import Path
here = Path({folder!r})
number = 100 + len(list(here.glob("*.job")))
script = Path(sys.argv[-1]).read_text()
(here / f"{{number}}.job").write_text(script)
found = re.search(r"--array=0-(\d+)", script)
for task in range(int(found[1]) + 1) if found else [None]:
    name = str(number) if task is None else f"{{number}}_{{task}}"
    own = {{"SLURM_JOB_ID": name, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "0"}}
    if task is not None:
        own |= {{"SLURM_ARRAY_JOB_ID": str(number), "SLURM_ARRAY_TASK_ID": str(task)}}
    with open(here / f"{{name}}.out", "wb") as out:
        command = ["bash", str(here / f"{{number}}.job")]
        child = subprocess.Popen(command, env=os.environ | own, stdout=out, stderr=out, start_new_session=True)
    (here / f"{{name}}.pid").write_text(str(child.pid))
print(f"Submitted batch job {{number}}")
"""
SRUN = """#!{python}
import os, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words = words[1 if words[0] == "--unbuffered" else 2:]
os.execvp(words[0], words)
"""
SACCT = """#!{python}
import os
from pathlib import Path
print("JobID|State|NodeList")
for path in Path({folder!r}).glob("*.pid"):
    try:
        alive = Path(f"/proc/{{path.read_text()}}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        alive = False
    print(f"{{path.stem}}|{{'RUNNING' if alive else 'FAILED'}}|here")
"""
SCANCEL = """#!{python}
import os, signal, sys
from pathlib import Path
os.killpg(int((Path({folder!r}) / f"{{sys.argv[1]}}.pid").read_text()), signal.SIGTERM)
"""


def install(folder: Path) -> str:
    """Write the four commands into ``folder``. Returns a PATH that finds them first."""
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT), ("scancel", SCANCEL)):
        (folder / name).write_text(text.format(python=sys.executable, folder=str(folder)))
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
