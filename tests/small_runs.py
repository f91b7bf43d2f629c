"""A run small enough for tests: its flags, its activations (made once), and processes that run train.py's main."""

import functools
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

from dejavu_train.data.collect import collect
from dejavu_train.data.config import CollectConfig
from dejavu_train.data.text import TextSource

COLLECT = {
    "window": 64,
    "train_tokens": 12000,
    "val_tokens": 2000,
    "calibration_tokens": 2000,
    "shard_tokens": 4096,
    "device": "cpu",
}


@functools.cache
def activations(tiny_opt: Path, text_file: Path) -> Path:
    """Activations of the tiny model, shared by the tests that only read them."""
    folder = tiny_opt.parent / "activations"
    collect(str(tiny_opt), TextSource(source=str(text_file)), CollectConfig(**COLLECT), folder)
    return folder


def flags(tiny_opt: Path, text_file: Path, output: Path, *more: str) -> list[str]:
    """Flags of train.py for a run of some seconds."""
    values = {
        "model": tiny_opt,
        "output": output,
        "text.source": text_file,
        **{f"collect.{name}": value for name, value in COLLECT.items()},
        "data.batch_size": 256,
        "mlp.rank": 16,
        "mlp.density": 0.4,
        "mlp.steps": 80,
        "mlp.validations": 4,
        "heads.rank": 8,
        "heads.density": 0.75,
        "heads.steps": 80,
        "heads.validations": 4,
        "calibrate.mlp_density": 0.4,
        "calibrate.head_density": 0.75,
        "calibrate.sensitivity_tokens": 0,
        "trainer.accelerator": "cpu",
    }
    return [f"--{name}={value}" for name, value in values.items()] + list(more)


def one_line(capsys, argv: list[str], *words: str) -> str:
    """The mistake that train.py tells with exit code 2: one line on stderr, the last one, that has all the words."""
    from dejavu_train.ground.errors import exit_on_user_error
    from dejavu_train.run.command import main

    capsys.readouterr()
    assert exit_on_user_error(main, argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Loading weights")]
    errors = [line for line in lines if line.startswith("error:")]
    assert len(errors) == 1 and lines[-1] == errors[0] and all(word in errors[0] for word in words), lines
    return errors[0]


def run_main(argv: list[str], log: str, module: str) -> None:
    """The main of a module, in this process, which ends. What it prints goes to the log."""
    import importlib
    import signal
    import sys

    import torch

    from dejavu_train.ground.errors import GOES_ON, exit_on_user_error

    main = importlib.import_module(module).main

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background were told to ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # behind nohup this one
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(exit_on_user_error(main, argv, GOES_ON))


@functools.cache
def _server():
    """Children of a server that has imported everything start at once and share no threads with the tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["dejavu_train.run.command", "dejavu_train.run.pipeline", "transformers.models.opt.modeling_opt"]
    )
    return context


def start_main(argv: list[str], log: Path, module: str = "dejavu_train.run.command") -> multiprocessing.Process:
    """Run the main of train.py, or of another command's ``module``, in a process of its own."""
    return start_process(run_main, argv, str(log), module)


def start_process(function: Callable[..., None], *arguments: object) -> multiprocessing.Process:
    """Run it in a process of its own."""
    process = _server().Process(target=function, args=arguments)
    process.start()
    return process


def in_a_process(function: Callable[..., None], *arguments: object) -> float:
    """The number that ``function``, in a process of its own, puts into the shared value it gets as last argument."""
    told = _server().Value("d", float("nan"))
    process = _server().Process(target=function, args=(*arguments, told))
    process.start()
    process.join()
    assert process.exitcode == 0
    return float(told.value)
