"""A signal ends every phase of a command with one line and exit 130 or 143; nothing goes on, no child stays."""

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from small_runs import activations, flags, start_main

from dejavu_train import signals
from dejavu_train.errors import exit_on_user_error
from dejavu_train.training.job import _run_child, job_folder

LINE = "the same command goes on from the last complete piece"


@pytest.fixture(autouse=True)
def _sigint_is_not_ignored():
    """As it is where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_one_line_and_a_code(number, code, capsys):
    before = signal.getsignal(number)
    assert exit_on_user_error(lambda argv: os.kill(os.getpid(), number)) == code
    assert capsys.readouterr().err == f"interrupted by {number.name}; {LINE}\n"
    assert signal.getsignal(number) is before


def test_a_deferred_signal_waits_for_its_place_and_a_second_one_does_not():
    passed = []

    def main(argv):
        with signals.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            passed.append("first")
            if argv:
                os.kill(os.getpid(), signal.SIGINT)
            passed.append("second")
        passed.append("behind")

    assert exit_on_user_error(main, []) == 143 and passed == ["first", "second"]
    passed.clear()
    assert exit_on_user_error(main, ["again"]) == 130 and passed == ["first"]
    assert exit_on_user_error(lambda argv: passed.append(signals.pending())) == 0 and passed[-1] is False


def wait_for(found, process, seconds=60):
    until = time.monotonic() + seconds
    while not found():
        assert process.is_alive() if hasattr(process, "is_alive") else process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)


PHASES = {
    "collecting": lambda output: (output / "activations" / "layer_00").is_dir(),
    "fitting": lambda output: list(output.glob("predictors/layer_00/mlp/csv/*/hparams.yaml")),
    "calibrating": lambda output: (output / "predictors" / "layer_01" / "heads" / "predictor.json").is_file(),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_every_phase_ends_and_goes_on(tiny_opt, text_file, tmp_path, phase, number, code):
    output, log = tmp_path / "run", tmp_path / "log"
    more = ["--mlp.steps=4000", "--data.batch_size=64"] if phase == "fitting" else ["--mlp.steps=4", "--heads.steps=4"]
    if phase == "calibrating":
        more += ["--calibrate.sensitivity_tokens=2000", "--collect.train_tokens=400"]
    if phase != "collecting":
        shutil.copytree(activations(tiny_opt, text_file), output / "activations")
    else:
        more += ["--collect.batch_size=1"]
    more += ["--mlp.validations=1", "--heads.validations=1"]
    if phase == "calibrating":
        more = [flag for flag in more if "train_tokens" not in flag]
    process = start_main(flags(tiny_opt, text_file, output, *more), log)
    wait_for(lambda: PHASES[phase](output), process)
    time.sleep(0.1 if phase == "fitting" else 0.0)
    os.kill(process.pid, number)
    process.join(60)
    text = log.read_text()
    assert process.exitcode == code, text
    assert text.count(f"interrupted by {number.name}; {LINE}") == 1 and "Traceback" not in text
    assert not (output / "bundle").exists() and not list(output.rglob(".holders/**/*.json"))
    if phase == "fitting":
        assert (job_folder(output, (0, "mlp")) / "checkpoints" / "last.ckpt").is_file()


CHILD = """
import signal, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(grandchild.pid, file=open(sys.argv[1], "w"), flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
time.sleep(600)
"""


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_children_end_with_their_parent(tmp_path):
    """As the ranks of a fit over several processes do."""
    path = tmp_path / "pid"

    def main(argv):
        def ask():
            while not (path.exists() and path.read_text().strip()):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=ask, daemon=True).start()
        _run_child([sys.executable, "-c", CHILD, str(path)], dict(os.environ))

    assert exit_on_user_error(main) == 143
    time.sleep(0.1)
    assert gone(int(path.read_text()))


@pytest.mark.parametrize("end, code", [("os.kill(os.getpid(), 15)", 143), ("sys.exit(130)", 130), ("sys.exit(2)", 2)])
def test_how_a_child_ended_is_how_we_end(end, code):
    try:
        assert exit_on_user_error(lambda argv: _run_child([sys.executable, "-c", f"import os, sys; {end}"], {})) == code
    except SystemExit as error:
        assert error.code == code == 2
