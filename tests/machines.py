"""Runs a part of the tests as other machines would: `python tests/machines.py [SETTING...]`, or `make test-machines`.

Each setting is a run of its own, in two processes. A setting that this processor lacks is skipped by name. The table
has a row a setting, and the command exits with 1 where a test failed.
"""

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
KERNELS = (
    "kernels/attention/test_out_projection.py",
    "kernels/attention/test_sparse_attention.py",
    "kernels/common",
    "kernels/dense/test_screened_head.py",
    "kernels/mlp",
    "kernels/stages",
    "kernels/test_decode_engine.py",
    "kernels/test_sampling.py",
    "kernels/verify",
    "engine/test_decode_families.py",
    "engine/test_four_bits.py",
    "engine/test_lossless.py",
    "engine/test_slot_pass.py",
    "test_products.py",
)
CPU_ENGINE = (
    "engine/test_cpu_backend.py",
    "engine/test_cpu_engine.py",
    "engine/test_cpu_families.py",
    "engine/test_cpu_four_bits.py",
    "engine/test_cpu_packed.py",
    "engine/test_lossless_cpu.py",
    "sparse/test_lossless_models.py",
    "sparse/test_opt_mini.py",
)
MODELS = (
    "engine/test_backend.py",
    "families/test_families.py",
    "sparse/test_generated.py",
    "sparse/test_inputs.py",
    "sparse/test_model.py",
    "sparse/test_saving.py",
    "bundle",
    "test_footprint.py",
)
COMPUTED = (*CPU_ENGINE, *MODELS)  # with what is compiled, written and read
ALL = (*KERNELS, *COMPUTED)
SECONDS = 900  # that a setting may take
CACHES = ("XDG_CACHE_HOME", "HF_HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
UNWRITABLE = "/sys"  # a folder in which not even the administrator can make a file


@dataclass(frozen=True)
class Setting:
    """Variables of the environment, or options of pytest, and the tests that they may change.

    Attributes:
        flag: what /proc/cpuinfo calls what the setting needs.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    flag: str = ""
    tests: Sequence[str] = ALL


SETTINGS = {
    "product by place": Setting(options=["--product", "by-place"], tests=KERNELS),
    "ATEN_CPU_CAPABILITY=default": Setting({"ATEN_CPU_CAPABILITY": "default"}),
    "ATEN_CPU_CAPABILITY=avx2": Setting({"ATEN_CPU_CAPABILITY": "avx2"}, flag="avx2"),
    "ATEN_CPU_CAPABILITY=avx512": Setting({"ATEN_CPU_CAPABILITY": "avx512"}, flag="avx512f"),
    "NUMBA_CPU_NAME=generic": Setting({"NUMBA_CPU_NAME": "generic"}, tests=CPU_ENGINE),
    "NUMBA_CPU_NAME=haswell": Setting({"NUMBA_CPU_NAME": "haswell"}, flag="avx2", tests=CPU_ENGINE),
    "one thread": Setting({"OMP_NUM_THREADS": "1"}, ["--threads", "1"], tests=COMPUTED),
    "two threads": Setting({"OMP_NUM_THREADS": "2"}, ["--threads", "2"], tests=COMPUTED),
    "ONEDNN_MAX_CPU_ISA=AVX2": Setting({"ONEDNN_MAX_CPU_ISA": "AVX2"}, flag="avx2"),
    "a C locale": Setting({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, tests=COMPUTED),
    "a read-only home": Setting({"HOME": UNWRITABLE} | dict.fromkeys(CACHES, ""), tests=COMPUTED),
}


@dataclass(frozen=True)
class Outcome:
    """Tests of one setting. `failures` are names, or what else went wrong."""

    passed: int
    skipped: int
    failures: Sequence[str]
    seconds: float


def processor_has(flag: str) -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return not flag
    return not flag or any(flag in line.split() for line in lines if line.startswith("flags"))


def environment(setting: Setting) -> dict[str, str]:
    """That of this process with the variables of the setting. An empty one is taken out."""
    values = {"OMP_NUM_THREADS": "1", **os.environ, **setting.variables}
    return {name: value for name, value in values.items() if value or name not in setting.variables}


def run(setting: Setting, tests: Sequence[str]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        report, began = Path(folder) / "report.xml", time.monotonic()
        command = [sys.executable, "-m", "pytest", "--numprocesses", "2", "--dist", "loadfile", "-m", "not long"]
        command += [f"--junitxml={report}", "-p", "no:cacheprovider", *setting.options, *tests]
        try:
            done = subprocess.run(
                command, cwd=REPOSITORY, env=environment(setting), capture_output=True, text=True, timeout=SECONDS
            )
            said = done.stdout.splitlines()[-1:] + done.stderr.splitlines()[-1:]
        except subprocess.TimeoutExpired:
            return Outcome(0, 0, [f"not done in {SECONDS} s"], time.monotonic() - began)
        if not report.exists():
            return Outcome(0, 0, [" ".join(said)], time.monotonic() - began)
        outcome = read_report(report, time.monotonic() - began)
    return outcome if done.returncode == 0 or outcome.failures else Outcome(0, 0, [" ".join(said)], outcome.seconds)


def read_report(path: Path, seconds: float) -> Outcome:
    """The counts of pytest's junit.xml."""
    kinds: dict[str, list[str]] = {"failure": [], "error": [], "skipped": [], "": []}
    for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
        kind = next((child.tag for child in case if child.tag in kinds), "")
        kinds[kind].append(f"{case.get('classname')}::{case.get('name')}")
    return Outcome(len(kinds[""]), len(kinds["skipped"]), kinds["failure"] + kinds["error"], seconds)


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        print(f"no setting {unknown[0]!r}: one of {', '.join(SETTINGS)}", file=sys.stderr)
        return 2
    print("| setting | passed | failed | skipped | seconds |\n| --- | --- | --- | --- | --- |", flush=True)
    failures: list[str] = []
    for name in names or SETTINGS:
        if not processor_has(SETTINGS[name].flag):
            print(f"| {name} | this processor has no {SETTINGS[name].flag} | | | |", flush=True)
            continue
        outcome = run(SETTINGS[name], [f"tests/{each}" for each in SETTINGS[name].tests])
        counts = outcome.passed, len(outcome.failures), outcome.skipped, round(outcome.seconds)
        print(f"| {name} | {' | '.join(map(str, counts))} |", flush=True)
        print("".join(f"{name}: {failure}\n" for failure in outcome.failures), end="", file=sys.stderr, flush=True)
        failures += outcome.failures
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
