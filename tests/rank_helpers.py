"""Starts processes as torchrun does, without the seconds that imports take."""

import multiprocessing
import os
import socket
import sys
import time

import torch

from dejavu_train.engine.ranks import group as groups
from dejavu_train.ground.errors import exit_on_user_error

FORK = multiprocessing.get_context("fork")  # everything is imported here already


def processes(tmp_path, run, world=2, ranks=None, seconds=60):
    """Exit codes and what was said on stderr, of `run(rank)` in processes as torchrun starts them."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]

    def work(rank):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        os.dup2(os.open(tmp_path / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(os.open(tmp_path / f"stdout-{rank}", os.O_WRONLY | os.O_CREAT), 1)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        groups._found.clear()
        torch.cuda.is_available = lambda: False  # a forked process cannot use a GPU that its parent has used
        try:
            code = exit_on_user_error(lambda _: run(rank))
        except SystemExit as leaving:
            code = leaving.code
        if groups._found:
            groups._say_bye(groups._found[0].watch)
        os._exit(code)

    began = time.monotonic()
    children = {rank: FORK.Process(target=work, args=(rank,)) for rank in (range(world) if ranks is None else ranks)}
    for child in children.values():
        child.start()
    for child in children.values():
        child.join(max(0.0, began + seconds - time.monotonic()))
    hung = [rank for rank, child in children.items() if child.is_alive()]
    for child in children.values():
        child.kill()
        child.join()
    assert not hung, f"ranks {hung} hang"
    codes = [child.exitcode for child in children.values()]
    return codes, [(tmp_path / f"stderr-{rank}").read_text().splitlines() for rank in children]
