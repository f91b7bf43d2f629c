"""A signal ends every phase of a command with one line and exit 130 or 143. Nothing goes on, no child stays."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from bundles import make_bundle
from conftest import REPOSITORY
from small_runs import activations, flags, start_main

from dejavu_train.families import UnitKey
from dejavu_train.ground import signals
from dejavu_train.ground.children import PARENT, forget_launcher, run_child
from dejavu_train.ground.errors import BEGINS_ANEW, GOES_ON, UserError, exit_on_user_error
from dejavu_train.ground.signals import Interrupted, heard
from dejavu_train.training.job import job_folder


@pytest.fixture(autouse=True)
def _signals_are_not_ignored():
    """As SIGINT is where the tests run in the background, and SIGHUP behind nohup."""
    chosen = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in chosen.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_is_one_line_and_a_code(number, code, capsys):
    before = signal.getsignal(number)
    assert exit_on_user_error(lambda argv: os.kill(os.getpid(), number)) == code
    assert capsys.readouterr().err == f"interrupted by {number.name}; {BEGINS_ANEW}\n"
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


@pytest.mark.parametrize("theirs", [SystemExit(), OSError("full"), ValueError("of a library")])
def test_a_deferred_signal_is_not_lost_to_an_exception_of_its_place(theirs):
    def main(argv):
        with contextlib.suppress(type(theirs)), signals.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            raise theirs

    assert exit_on_user_error(main) == 143
    assert exit_on_user_error(lambda argv: None) == 0 and not signals.pending()


def wait_for(found, process, seconds=300):
    until = time.monotonic() + seconds
    while not found():
        assert process.is_alive() if hasattr(process, "is_alive") else process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)


def both_signals(names, *with_both):
    """Signals in turn, which end alike what is interrupted (`test_a_signal_is_one_line_and_a_code`). The other one of
    each name, but for those in ``with_both``, is for make test-long."""
    cases = []
    for i, name in enumerate(names):
        for j, (number, code) in enumerate(((signal.SIGINT, 130), (signal.SIGTERM, 143))):
            marks = () if name in with_both or (i + j) % 2 == 0 else pytest.mark.long
            cases.append(pytest.param(name, number, code, marks=marks, id=f"{name}-{number.name}"))
    return pytest.mark.parametrize("name, number, code", cases)


PHASES = {
    "collecting": lambda output: (output / "activations" / "layer_00").is_dir(),
    "fitting": lambda output: list(output.glob("predictors/layer_00/mlp/csv/*/hparams.yaml")),
    "calibrating": lambda output: (output / "predictors" / "layer_01" / "heads" / "predictor.json").is_file(),
}


@both_signals(PHASES, "fitting")  # Lightning has its own ways with each
def test_every_phase_ends_and_goes_on(tiny_opt, text_file, tmp_path, name, number, code):
    output, log = tmp_path / "run", tmp_path / "log"
    more = ["--mlp.steps=4000", "--data.batch_size=64"] if name == "fitting" else ["--mlp.steps=4", "--heads.steps=4"]
    if name == "calibrating":
        more += ["--calibrate.sensitivity_tokens=2000", "--collect.train_tokens=400"]
    if name != "collecting":
        shutil.copytree(activations(tiny_opt, text_file), output / "activations")
    else:
        more += ["--collect.batch_size=1"]
    more += ["--mlp.validations=1", "--heads.validations=1"]
    if name == "calibrating":
        more = [flag for flag in more if "train_tokens" not in flag]
    process = start_main(flags(tiny_opt, text_file, output, *more), log)
    wait_for(lambda: PHASES[name](output), process)
    time.sleep(0.1 if name == "fitting" else 0.0)
    os.kill(process.pid, number)
    process.join(300)
    text = log.read_text()
    assert process.exitcode == code, text
    assert text.count(f"interrupted by {number.name}; {GOES_ON}") == 1 and "Traceback" not in text
    assert not (output / "bundle").exists(), f"the signal came when the bundle was being written: {text}"
    assert not list(output.rglob(".holders/**/*.json")), text
    if name == "fitting":
        assert (job_folder(output, UnitKey(0, "mlp")) / "checkpoints" / "last.ckpt").is_file()


def holds(path, words):
    return path.is_file() and words in path.read_text()


def first_text_is_scored(output, log):
    return (output / "results.json").is_file()


COMMANDS = {  # module, flags, when it is interrupted, the files that may be there then and after it
    "infer": (
        "dejavu_train.evaluation.command",
        "bundle window=64 batch_tokens=64 mlp_density=0.3 curve_mlp_density=[] selections=predicted"
        " head_density=[] sparse_from=[0] tokens=1500 timing=false text={text} text=more={long}",
        first_text_is_scored, "results.json",
    ),
    "pretrain": (
        "dejavu_train.extras.pretrain.run",
        "text={text} vocab_size=320 d_model=32 n_layers=2 n_heads=2 d_ffn=64 max_positions=64"
        " context=32 batch_rows=2 steps=100000 checkpoint_seconds=0", lambda o, _: (o / "pretraining.ckpt").is_file(),
        "pretraining.ckpt",
    ),
    "observe": (
        "papers.deja_vu.observe.__main__", "model bundle text={long} window=64 batch_tokens=64 tokens=500"
        " parts=residual,selections densities=0.1,0.2,0.3,0.4", lambda _, log: holds(log, "one pass"),
        "observations/*.csv",
    ),
    "generation": (
        "dejavu_train.extras.generation.run", "model bundle text={long} prompts=8 prompt=16 new_tokens=48 every=4",
        lambda o, _: (o / "generation/rows.csv").is_file(), "generation/*",
    ),
}  # fmt: skip


@both_signals(COMMANDS)
def test_every_other_command_ends(tiny_opt, text_file, tmp_path, name, number, code):
    module, words, reached, kept = COMMANDS[name]
    output, log, bundle, long = (tmp_path / name for name in ("out", "log", "bundle", "long.txt"))
    make_bundle(tiny_opt).save_pretrained(bundle)
    long.write_text(text_file.read_text() * 40)
    given = {"model": f"model={tiny_opt}", "bundle": f"bundle={bundle}"}
    flags = [given.get(word, word).format(text=text_file, long=long) for word in words.split()]
    flags += [f"output={output}", "device=cpu", *([given["model"]] if name == "infer" else [])]
    process = start_main([f"--{flag}" for flag in flags], log, module)
    wait_for(lambda: reached(output, log), process)
    os.kill(process.pid, number)
    process.join(300)
    assert process.exitcode == code, log.read_text()
    assert log.read_text().count(f"interrupted by {number.name}; ") == 1 and "Traceback" not in log.read_text()
    files = [path.relative_to(output) for path in output.rglob("*") if path.is_file()]
    assert all(path.match(kept) for path in files if "tokenizer" not in path.name), files
    assert "*" in kept or files
    assert not [path for path in files if path.name.startswith(".tmp")]
    if name == "infer":
        assert {row["text"] for row in json.loads((output / kept).read_text())["quality"]} == {text_file.stem}


@both_signals(["tasks", "pretrain", "quantize"])
def test_the_imports_of_a_command_end(name, number, code, tmp_path):
    quantize = name == "quantize"  # says what it will do before it loads torch
    words = ["--quantizer=rtn", f"--output={tmp_path / 'out'}"] if quantize else ["--help"]
    command = [sys.executable, "-m", "dejavu_train", name, *words]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text(), process)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    assert out.count("\n") == quantize and not list(tmp_path.iterdir())
    assert err.startswith(f"interrupted by {number.name}; ") and err.count("\n") == 1


def test_a_signal_within_a_callback_of_the_interpreter_is_not_lost():
    class Thing:
        pass

    def called(_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

    thing = Thing()
    reference = weakref.ref(thing, called)
    with pytest.raises(Interrupted), heard():
        del thing
        time.sleep(10)
    assert reference() is None


@pytest.mark.parametrize("theirs", [ImportError("initialization failed"), SystemExit(1), UserError("cannot be read")])
def test_a_signal_that_a_library_answered_with_another_exception_is_still_the_signal(theirs, capsys):
    def main(argv):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Interrupted:
            pass
        raise theirs

    assert exit_on_user_error(main) == 143
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(RuntimeError, match="a bug"):  # of a later command, which no signal ended
        exit_on_user_error(lambda argv: bug())


def bug():
    raise RuntimeError("a bug")


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
        run_child([sys.executable, "-c", CHILD, str(path)], dict(os.environ))

    assert exit_on_user_error(main) == 143
    time.sleep(0.1)
    assert gone(int(path.read_text()))


@pytest.mark.parametrize("end, code", [("os.kill(os.getpid(), 15)", 143), ("sys.exit(130)", 130), ("sys.exit(2)", 2)])
def test_how_a_child_ended_is_how_we_end(end, code):
    try:
        assert exit_on_user_error(lambda argv: run_child([sys.executable, "-c", f"import os, sys; {end}"], {})) == code
    except SystemExit as error:
        assert error.code == code == 2


ORPHAN = """
import os, sys, time
from dejavu_train.ground.children import end_with_parent
end_with_parent()
print(os.getpid(), file=open(sys.argv[1], "w"), flush=True)
time.sleep(600)
"""


def test_a_child_ends_with_a_parent_that_was_killed(tmp_path):
    path = tmp_path / "pid"
    command = [sys.executable, "-c", ORPHAN, str(path)]
    start = f"import os; from dejavu_train.ground.children import run_child; run_child({command!r}, os.environ)"
    parent = subprocess.Popen([sys.executable, "-c", start])
    wait_for(lambda: path.exists() and path.read_text().strip(), parent)
    parent.kill()
    parent.wait()
    until = time.monotonic() + 10
    while not gone(int(path.read_text())) and time.monotonic() < until:
        time.sleep(0.05)
    assert gone(int(path.read_text()))


def test_a_child_whose_parent_ended_before_it_began_ends(tmp_path):
    path = tmp_path / "pid"
    environment = os.environ | {PARENT: "4194304"}  # above all process numbers of Linux
    child = subprocess.Popen([sys.executable, "-c", ORPHAN, str(path)], env=environment)
    assert child.wait(30) == -signal.SIGTERM


def test_ranks_of_a_launcher_are_forgotten(monkeypatch):
    theirs = [
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "NODE_RANK",
        "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
    ]  # fmt: skip
    others = ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_DEBUG", "MY_RANKING", "HF_HOME"]
    for name in theirs + others:
        monkeypatch.setenv(name, "1")
    forget_launcher()
    assert [name for name in theirs if name in os.environ] == []
    assert all(name in os.environ for name in others)
